# Every target sets up what it needs from nothing: a Python 3.10+ as `python3` is enough.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
ENGINES := .venv-engines
STAMP := $(VENV)/.installed

# Hundreds of processes are started by tests and examples: each would compile all it imports, a third of a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check check-types check-style check-house check-docs bench chaos stress test-engines bench-engines test-frameworks test-vllm test-sglang matrix wheel-compat docs clean

demo: $(STAMP)
	$(RUN) -m demo $(ARGS)

# Without ARGS the whole suite in parallel, a file at a time; `make test ARGS="tests/process/test_kv.py -k put"` in one process.
test: $(STAMP)
	$(RUN) -m pytest $(if $(ARGS),$(ARGS),--numprocesses auto --dist loadfile --no-loadscope-reorder)

# Two parts of it at a time: `make check-types` is one of them.
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 --output-sync check-types check-style check-house check-docs

check-types: $(STAMP)
	$(VENV)/bin/mypy

check-style: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

check-house: $(STAMP)
	$(VENV)/bin/lint-imports
	$(RUN) tools/house.py

check-docs: $(STAMP)
	$(RUN) tools/readme.py README.md docs/staleness.md docs/groups.md docs/bridge.md docs/tables.md docs/trace.md \
		docs/api/packed.md docs/tutorials/*.md

bench: $(STAMP)
	$(RUN) -m bench $(ARGS)

# An hour of trouble: histories of real processes that are killed and frozen, each of five seeds for SECONDS; a standby at
# 20,000 random moments; journals whose power goes; hosts that are cut off, disks that are full, answers that are lost.
SECONDS ?= 150
chaos: $(STAMP)
	for seed in 1 2 3 4 5; do TQ_HISTORY_SEED=$$seed TQ_HISTORY_SECONDS=$(SECONDS) $(RUN) -m pytest -k histor \
		tests/process/test_histories_processes.py tests/process/test_standby.py \
		tests/process/test_standby_units.py || exit 1; done
	TQ_STANDBY_SEEDS=20000 TQ_UNIT_SEEDS=20000 TQ_CLUSTER_SEEDS=4000 $(RUN) -m pytest --numprocesses auto --timeout 3000 \
		tests/model/test_standby_simulation.py tests/model/test_unit_standby_simulation.py \
		tests/model/test_cluster_simulation.py
	TQ_LEDGER_SEEDS=20000 TQ_JOURNAL_SEEDS=10000 TQ_POWER_SEEDS=10000 TQ_UNIT_POWER_SEEDS=10000 $(RUN) -m pytest \
		--numprocesses auto tests/model/test_ledger_simulation.py tests/model/test_journal_simulation.py \
		tests/model/test_journal_power.py tests/model/test_unit_power.py
	for seed in 1 2 3 4 5; do TQ_JOURNAL_SEED=$$seed TQ_JOURNAL_TURNS=50 $(RUN) -m pytest tests/process/test_journal.py \
		tests/process/test_journal_trouble.py tests/process/test_journal_units.py || exit 1; done
	for turn in 1 2 3 4 5; do $(RUN) -m pytest --numprocesses auto --dist loadfile tests/process/test_standby.py \
		tests/process/test_spill.py tests/process/test_hosts_trouble.py tests/process/test_arena_limits.py \
		tests/process/test_blips.py tests/process/test_unreceived.py tests/process/test_checkpoint_faults.py || exit 1; done

# 8192 clients with a token, from 16 processes, whose server and processes are killed in turn; docs/img/stress.svg.
stress: $(STAMP)
	$(RUN) -m bench.stress --picture docs/img/stress.svg $(ARGS)

# The site, in site/. Its packages go into .venv-docs; PYTHON has to be 3.11 or newer. ARGS="serve" shows it while you write.
docs:
	$(PYTHON) tools/docs.py $(ARGS)

# The contract of storage engines with the real ones, each started here. Mooncake needs libibverbs1, librdmacm1, libnuma1,
# libnl-3-200 and libnl-route-3-200 from the system. Mooncake's Transfer Engine has a process of its own, for it crashes
# where its store was used before; and RayStore: in a cluster a service is an actor, without the object store's options.
test-engines: $(ENGINES)/.installed
	TQ_ENGINES="ObjectStore MooncakeStore Yuanrong" $(ENGINES)/bin/python -m pytest tests/contract/test_storage_engines.py \
		tests/contract/test_mooncake_offload.py tests/contract/test_mooncake_hosts.py $(ARGS)
	TQ_ENGINES="MooncakeStore" $(ENGINES)/bin/python -m pytest tests/contract/test_transports.py $(ARGS)
	TQ_ENGINES="RayStore" $(ENGINES)/bin/python -m pytest tests/contract/test_storage_engines.py tests/contract/test_ray_nodes.py $(ARGS)

# The same engines, measured: ours, their own API, and TransferQueue 0.1.11. ARGS="--engine MooncakeStore".
bench-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m bench.engines $(ARGS)

# Minutes, and gigabytes of packages: not part of `check` or `test`.
test-frameworks:
	$(PYTHON) -m frameworks $(ARGS)

# Every Python and both ends of tensordict: minutes and gigabytes for each. ARGS="--python 3.12 --tensordict newest tests/process/test_kv.py".
matrix: $(STAMP)
	$(RUN) tools/matrix.py $(ARGS)

# A wheel under the name TransferQueue, with a version that its pins take: docs/migration.md. ARGS="--version 0.1.12".
wheel-compat:
	$(PYTHON) tools/wheel_compat.py $(ARGS)

# A real vLLM on the CPU: minutes, 4 GB of packages, 6 GB of memory; PYTHON has to be 3.11.
test-vllm:
	$(PYTHON) -m vllm_tests $(ARGS)

# The real SGLang on the CPU: a quarter of an hour, 3 GB of packages, 6 GB of memory; PYTHON has to be 3.11.
test-sglang:
	$(PYTHON) -m sglang_tests $(ARGS)

# torch first and by exact version: a range lets pip choose a build with gigabytes of CUDA packages.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet torch==2.13.0
	$(RUN) -m pip install --quiet --editable ".[dev,demo]"
	touch $(STAMP)

$(ENGINES)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --upgrade pip
	$(ENGINES)/bin/python -m pip install --quiet torch==2.13.0
	$(ENGINES)/bin/python -m pip install --quiet --editable ".[dev,mooncake,yuanrong]"
	touch $(ENGINES)/.installed

clean:
	rm -rf $(VENV) .venv-docs site .venv-peers .venv-redis .venv-reverb .venv-frameworks .venv-vllm .venv-sglang .venv-matrix .venv-engines build dist *.egg-info demo-out bench-out
