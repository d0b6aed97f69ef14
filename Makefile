# Every target sets up what it needs from nothing: a Python 3.10+ as `python3` is enough.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo test check bench test-frameworks test-vllm matrix wheel-compat docs clean

demo: $(STAMP)
	$(RUN) -m demo $(ARGS)

# Without ARGS the whole suite in parallel, a file at a time; `make test ARGS="tests/process/test_kv.py -k put"` in one process.
test: $(STAMP)
	$(RUN) -m pytest $(if $(ARGS),$(ARGS),--numprocesses auto --dist loadfile --no-loadscope-reorder)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(RUN) tools/house.py
	$(RUN) tools/readme.py README.md docs/staleness.md docs/tutorials/*.md

bench: $(STAMP)
	$(RUN) -m bench $(ARGS)

# The site, in site/. Its packages go into .venv-docs; PYTHON has to be 3.11 or newer. ARGS="serve" shows it while you write.
docs:
	$(PYTHON) tools/docs.py $(ARGS)

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

# torch first and by exact version: a range lets pip choose a build with gigabytes of CUDA packages.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet torch==2.13.0
	$(RUN) -m pip install --quiet --editable ".[dev,demo]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-docs site .venv-peers .venv-redis .venv-reverb .venv-frameworks .venv-vllm .venv-matrix build dist *.egg-info demo-out bench-out
