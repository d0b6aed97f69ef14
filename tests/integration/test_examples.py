"""The examples, as a person runs them who has copied one file and installed the package, with little data."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from paths import ROOT, SOURCES
from zygote import CHILDREN, Ended

pytestmark = pytest.mark.timeout(300)  # a busy machine takes its time to import torch in every process
JOBS = ("TQ_", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
Run: TypeAlias = Callable[..., Ended]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Two tasks of one step, as `slurmstepd` starts them.
STEP = """
import os, subprocess, sys
step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
tasks = [{**os.environ, **step, "SLURM_PROCID": str(number)} for number in range(2)]
started = [subprocess.Popen([sys.executable, *sys.argv[1:]], env=task) for task in tasks]
sys.exit(any([task.wait() for task in started]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a copy of a file, elsewhere: `before` goes between the interpreter and the file."""

    def run(name: str, *arguments: str, before: tuple[str, ...] = ()) -> Ended:
        shutil.copy(ROOT / "examples" / f"{name}.py", tmp_path)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(JOBS)}
        environment.update(PYTHONPATH=SOURCES, OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1")
        return CHILDREN.run([*before, f"{name}.py", *arguments], environment, str(tmp_path))

    return run


def test_single_controller(run: Run) -> None:
    done = run("single_controller", "--steps", "2", "--prompts", "3", "--workers", "2")
    assert done.returncode == 0, done.stderr
    head, *steps, last = done.stdout.splitlines()
    assert head.split()[:2] == ["step", "rows"]
    assert [line.split()[:2] for line in steps] == [["0", "12"], ["1", "12"]]
    assert last == "2 steps, 24 rows: every row went through rollout, reward, log_prob, train exactly once"


def test_disaggregated_streaming(run: Run) -> None:
    done = run("disaggregated_streaming", "--rows", "32", "--rollouts", "1", "--batch", "4", "--micro-batch", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "32 rows: 2 dp ranks disjoint and complete, 2 tp peers each identical"


def test_weights_synchronous(run: Run) -> None:
    done = run("weights_synchronous", "--steps", "3")
    assert done.returncode == 0, done.stderr
    _, *versions, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in versions] == [["1", "{1}"], ["2", "{2}"], ["3", "{3}"]]
    assert last == "3 versions, 192 rows, 0 of them too old"


def test_weights_in_flight(run: Run) -> None:
    done = run("weights_in_flight", "--steps", "30", "--max-staleness", "2")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"30 versions, 1920 rows: (\d+) made by several versions, the oldest (\d) behind", last)
    assert found, last
    assert int(found[1]) > 0
    assert int(found[2]) <= 2


def test_weights_over_http(run: Run) -> None:
    done = run("weights_over_http", "--steps", "3")
    assert done.returncode == 0, done.stderr
    head, *_, last = done.stdout.splitlines()
    assert head.endswith("version 'default'; refused: access_denied, not_open, not_initialized")
    assert last == "3 versions over HTTP, the server has version 3 of this trainer's run"


def test_sizes_that_do_not_divide_are_named(run: Run) -> None:
    done = run("disaggregated_streaming", "--rows", "33")
    assert done.returncode == 1
    assert done.stderr.strip() == "--rows must be a multiple of --batch x --rollouts, 16"


def test_a_worker_that_fails_ends_the_example_with_its_error(run: Run) -> None:
    done = run("single_controller", "--max-len", "0")
    assert done.returncode != 0
    assert "in rollout" in done.stderr
    assert "EOFError" in done.stderr.splitlines()  # other workers may have words of their own after it


# The programs of docs/recipes


def test_grpo_under_ddp(run: Run) -> None:
    done = run("grpo_ddp", "--steps", "5", "--prompts", "7", "--samples", "3", before=TORCHRUN)
    assert done.returncode == 0, done.stderr
    # 21 rows: 12 for each rank if there were enough, so 11 and 10, in three micro-batches each
    assert sorted(done.stdout.splitlines())[:2] == [
        "rank 0: 55 rows in 15 micro-batches", "rank 1: 50 rows in 15 micro-batches",
    ]  # fmt: skip
    assert re.search(r"^step 5: reward \d+%$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("before", [TORCHRUN, ("-c", STEP)], ids=["torchrun", "Slurm"])
def test_every_rank_finds_the_service_of_its_job(run: Run, before: tuple[str, ...]) -> None:
    done = run("every_rank", before=before)
    assert done.returncode == 0, done.stderr
    said = sorted(line.split(", from ") for line in done.stdout.splitlines())
    assert [line for line, _ in said] == [f"rank {rank} of 2: 20 rows, of ranks [0, 1]" for rank in range(2)]
    assert len({address for _, address in said}) == 1


def test_images(run: Run) -> None:
    done = run("multimodal")
    assert done.returncode == 0, done.stderr
    shapes = "[4, 3, 16, 16] [4, 4] [4, 4] PngImageFile (16, 16)"
    assert [line.rpartition(" ")[0] for line in done.stdout.splitlines()] == [
        f"{shapes} (0, 100, 200)", f"{shapes} (80, 100, 200)",
    ]  # fmt: skip


def test_rollouts_for_trl(run: Run) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    done = run("trl_rollouts", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 steps, every answer came through the queue"


def test_a_worker_of_verl(run: Run) -> None:
    pytest.importorskip("verl", reason="verl is not installed")
    done = run("verl_worker")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Image (8, 8) (40, 100, 200)"


def test_vl_pipeline(run: Run) -> None:
    done = run("vl_pipeline", "--prompts", "2", "--group", "2", "--steps", "2")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "2 steps; left in the service: []"
    assert [re.findall(r"(\d+) MB of images in (\d+) MB", line) for line in lines[::3]] == [[("29", "15")]] * 2
    rows = [int(found) for line in lines for found in re.findall(r"(\d+) rows", line)]
    assert sum(rows) == 8


@pytest.mark.parametrize(("mode", "lead"), [("sync", 0), ("async", 2)])
def test_every_answer_is_trained_on_whatever_its_length(run: Run, mode: str, lead: int) -> None:
    sizes = ("--steps", "8", "--groups", "4", "--slots", "8", "--lead", "2", "--token-us", "20", "--goal", "0.05")
    done = run("async_lengths", "--mode", mode, *sizes)
    assert done.returncode == 0, done.stderr
    times, groups, lengths = done.stdout.splitlines()
    assert re.match(rf"{mode}: 8 steps in [\d.]+ s, 5% right after [\d.]+ s \(step 1\), ", times)
    found = re.fullmatch(
        r"groups: 32 opened, 32 consumed, 0 evicted; weights [\d.]+ versions old, (\d) at most", groups
    )
    assert found, groups
    assert int(found[1]) <= lead
    seen = re.fullmatch(
        r"lengths of 128 answers: mean ([\d.]+), of all ([\d.]+); "
        r"KS distance 0\.0000 to all, ([\d.]+) to their distribution",
        lengths,
    )
    assert seen, lengths
    assert seen[1] == seen[2]
    assert float(seen[3]) < 1.36 / 128**0.5  # 19 of 20 samples of this size are nearer
