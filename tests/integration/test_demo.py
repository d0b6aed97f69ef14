"""The demo: its arithmetic, its loss, its child processes, and short runs from end to end, with kills on the way."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Child, until
from paths import ROOT
from rich.console import Console
from zygote import CHILDREN

import transfer_queue as tq
from demo import rollout
from demo.arithmetic import (
    MAX_RESPONSE_LEN,
    PROMPT_LEN,
    VOCABULARY,
    all_problems,
    decode,
    encode,
    is_correct,
    solutions,
    solve,
)
from demo.board import Board
from demo.checkpoint import Checkpoint
from demo.columns import padded, ragged, row_lengths
from demo.grpo import clipped_loss, divergence, group_advantages, stand_ins
from demo.line import Caller, Line
from demo.model import Cache, Forward, Generation, Policy, Shape, flatten, generate, response_log_probs, unflatten
from demo.port import Port
from demo.replica import Replica
from demo.settings import Kill, Settings, chaos, smoke
from demo.supervisor import recover
from demo.tables import REPLICAS, STOP, train_partition
from demo.view import dashboard, plain_line
from transfer_queue.errors import ServiceUnavailable, StaleVersion
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.transport import registry

_DEADLINE_S = 300.0  # of a run that takes seconds on a quiet machine
pytestmark = pytest.mark.timeout(_DEADLINE_S + 20)


def _python(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TQ_ADDRESS"}
    return CHILDREN.run(list(args), environment, str(ROOT))


@pytest.mark.parametrize(
    ("prompt", "response", "right"),
    [
        ("37+45=", "82$", True),
        ("99+99=", "198$", True),
        ("00+07=", "7$", True),
        ("37+45=", "83$", False),
        ("37+45=", "82", False),  # no end mark
        ("37+45=", "82$$", False),
        ("37+45=", "082$", False),
        ("37+45=", "$", False),
        ("37+45=", "8=2$", False),
    ],
)
def test_only_the_exact_answer_is_correct(prompt: str, response: str, right: bool) -> None:
    assert is_correct(encode(prompt), encode(response)) is right


def test_held_out_problems_are_never_trained_on() -> None:
    problems = all_problems()
    train, held_out = ({decode(prompt) for prompt in part} for part in (problems.train, problems.held_out))
    assert len(train) + len(held_out) == 10_000
    assert not train & held_out
    answer = decode(solutions(problems.held_out[:1])[0])
    assert answer == solve(decode(problems.held_out[0])).ljust(MAX_RESPONSE_LEN, "$")


def test_advantages_are_normalised_within_each_group() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    groups = torch.tensor([7, 3, 7, 7, 3, 7, 3, 3])
    # Group 7: 1, 0, 0, 0 has mean 1/4 and deviation sqrt(3)/4. Group 3 is all right: nothing to compare.
    high, low = math.sqrt(3), -1 / math.sqrt(3)
    expected = torch.tensor([high, 0, low, low, 0, low, 0, 0])
    torch.testing.assert_close(group_advantages(rewards, groups), expected, atol=1e-3, rtol=0)


def test_divergence_is_the_sum_over_the_vocabulary() -> None:
    new, ref = torch.tensor([[[0.5, 0.5, 1e-30]]]), torch.tensor([[[0.25, 0.5, 0.25]]])
    # The third token is what a sample of an older policy may hold: k3 would be 0.25e30 there.
    torch.testing.assert_close(divergence(new.log(), ref.log()), torch.tensor([[0.5 * math.log(2)]]))
    assert divergence(ref.log(), ref.log()).item() == 0


def test_one_row_stands_for_a_group_that_teaches_nothing() -> None:
    advantages = torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0, 0.0])
    groups = torch.tensor([7, 3, 7, 3, 7, 3])
    assert stand_ins(advantages, groups).tolist() == [1, 3, 1, 0, 1, 0]


def test_loss_is_what_a_hand_computes() -> None:
    new = torch.tensor([[math.log(0.5), math.log(0.4)], [math.log(0.9), math.log(0.2)]], requires_grad=True)
    old = torch.tensor([[math.log(0.25), math.log(0.4)], [math.log(0.6), math.log(0.9)]])
    ref = torch.tensor([[math.log(0.5), math.log(0.2)], [math.log(0.9), math.log(0.1)]])
    gap = ref - new
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    terms = clipped_loss(new, old, gap.exp() - gap - 1, torch.tensor([2.0, -1.0]), mask, clip=0.2, kl_weight=0.1)
    # Ratios 2 (cut to 1.2), 1 and, with a negative advantage, 1.5 (not cut: the worse of both counts).
    surrogate = 2 * 1.2 + 2 * 1.0 - 1 * 1.5
    kl = 0.5 - math.log(0.5) - 1  # only the second token differs from the reference
    assert terms.loss.item() == pytest.approx(0.1 * kl - surrogate, rel=1e-5)
    assert terms.kl == pytest.approx(kl, rel=1e-5)
    assert terms.clipped == 1
    torch.autograd.backward(terms.loss)
    assert new.grad is not None
    gradient = [[0.0, -2 + 0.1 * (1 - 0.5)], [1.5, 0.0]]  # none through the cut ratio, none through padding
    torch.testing.assert_close(new.grad, torch.tensor(gradient))


def test_sampled_log_probs_are_those_of_the_whole_sequence() -> None:
    torch.manual_seed(0)
    policy = Policy(Shape(width=16, num_layers=2, num_heads=2))
    prompts = all_problems().train[:32]
    made = generate(policy, policy.shape, prompts, temperature=1.0)
    inside = torch.arange(MAX_RESPONSE_LEN) < made.lengths[:, None]
    whole = response_log_probs(policy, prompts, made.tokens.clone())
    torch.testing.assert_close(made.log_probs[inside], whole.detach()[inside])


def test_weights_survive_the_way_through_a_vector() -> None:
    shape = Shape(width=16, num_layers=1, num_heads=2)
    source, target = Policy(shape), Policy(shape)
    unflatten(target, flatten(source))
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_ragged_columns_come_back_padded() -> None:
    values, lengths = torch.tensor([[1, 2, 9], [3, 9, 9], [4, 5, 6]]), torch.tensor([2, 1, 3])
    column = ragged(values, lengths)
    assert row_lengths(column).tolist() == [2, 1, 3]
    assert padded(column, 4, fill=-1).tolist() == [[1, 2, -1, -1], [3, -1, -1, -1], [4, 5, 6, -1]]


def test_settings_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"prompts_per_step \(60\) must be a multiple of prompts_per_ticket \(16\)"):
        Settings(prompts_per_step=60)


def test_a_failed_worker_is_named_and_takes_the_others_down(tmp_path: Path) -> None:
    code = f"""
import multiprocessing, operator, pathlib, signal
from demo.fleet import Fleet, WorkerFailed
try:
    with Fleet(pathlib.Path({str(tmp_path)!r})) as fleet:
        fleet.start("sleeper", signal.pause)
        fleet.start("divider", operator.truediv, 1, 0)
        while not fleet.wait(30):
            pass
except WorkerFailed as failure:
    print(failure)
print("left:", multiprocessing.active_children())
"""
    done = _python("-c", code)
    assert "worker 'divider' ended with exit code 1" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert "left: []" in done.stdout
    assert done.stderr == ""


def test_an_unknown_backend_is_a_usage_error() -> None:
    done = _python("-m", "demo", "--backend", "mooncake")
    assert done.returncode == 2
    assert "mooncake" in done.stderr


class Told:
    """Notes the calls; `update_weights` raises `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[object] = []
        self._error = error

    def init_weight_transfer_engine(self, init_info: object) -> None:
        self.calls.append(init_info)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: object) -> None:
        self.calls.append(update_info)
        if self._error is not None:
            raise self._error

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(weight_version)


def test_calls_reach_a_worker_and_errors_come_back() -> None:
    worker = Told(StaleVersion("version 1 after 2"))
    end = Line(worker, "token")
    stranger = Caller(end.address, "another token", 10)
    with pytest.raises(AuthenticationError):
        stranger.start_weight_update()
    trainer = Caller(end.address, "token", 10)
    trainer.init_weight_transfer_engine({"address": "here"})
    trainer.start_weight_update()
    with pytest.raises(StaleVersion, match="version 1 after 2"):
        trainer.update_weights({"version": 1})
    trainer.finish_weight_update("1")
    assert worker.calls == [{"address": "here"}, "start", {"version": 1}, "1"]
    trainer.close()
    end.close()
    with pytest.raises(ServiceUnavailable, match="is gone"):
        trainer.start_weight_update()


def test_workers_are_members_of_a_fleet_also_one_that_joins_late() -> None:
    shape = Shape(width=16, num_layers=1, num_heads=2)
    with Replica(shape, "token") as first, Replica(shape, "token") as late:
        callers = [Caller(one.address, "token", 10) for one in (first, late)]
        fleet = Fleet({"first": callers[0]}, pause="keep")
        trainer = registry.trainer("shm").trainer_init({}, client=fleet, source=ModuleSource(Policy(shape)))
        trainer.send_weights(deadline_s=30)
        fleet.join("late", callers[1], wait_s=30)
        for caller in callers:
            status = caller.status()
            assert (status.label, status.paused) == ("1", False)
            caller.close()
        fleet.close()
        trainer.shutdown()


def test_a_replica_takes_weights_between_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(width=16, num_layers=1, num_heads=2)
    policy, before, prompts = Policy(shape), Policy(shape), all_problems().train[:4]
    generator = torch.Generator().manual_seed(0)
    with Replica(shape, "token") as replica:
        trainer = registry.trainer("shm").trainer_init({}, client=replica.control, source=ModuleSource(policy))
        trainer.send_weights(deadline_s=10)
        unflatten(before, flatten(policy))

        def interrupted(forward: Forward, *more: Any) -> Generation:
            def forward_later(tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
                if cache.length == PROMPT_LEN + 1:
                    torch.nn.init.zeros_(policy.head.weight)
                    trainer.send_weights(deadline_s=10)
                return forward(tokens, cache)

            return generate(forward_later, *more)

        monkeypatch.setattr("demo.replica.generate", interrupted)
        made, spans = replica.generate(prompts, 1.0, generator)
        trainer.shutdown()
    assert spans.tag()["weight_versions"] == [[1, 0, 2], [2, 2, MAX_RESPONSE_LEN]]
    assert spans.tag(tokens=1)["weight_versions"] == [[1, 0, 1]]
    early = response_log_probs(before, prompts, made.tokens.clone())[:, :2].detach()
    torch.testing.assert_close(made.log_probs[:, :2], early)
    torch.testing.assert_close(made.log_probs[:, 2:], torch.full((4, 2), -math.log(len(VOCABULARY))))
    assert 0 < replica.control.longest_pause_s <= replica.control.total_pause_s


def test_a_checkpoint_brings_back_the_very_same_next_step(tmp_path: Path) -> None:
    def made() -> tuple[Policy, torch.optim.Optimizer]:
        policy = Policy(Shape(width=16, num_layers=1, num_heads=2))
        return policy, torch.optim.AdamW(policy.parameters(), lr=0.1)

    def step(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(policy(all_problems().train[:4]).square().sum())
        optimizer.step()

    file = Checkpoint(tmp_path / "trainer", "run")
    first, second = made(), made()
    assert file.load(*second) is None
    step(*first)
    file.save(3, *first, {"midway": [1, 2]})
    assert file.load(*second) == (3, {"midway": [1, 2]})
    assert Checkpoint(tmp_path / "trainer", "another run").load(*made()) is None
    step(*first)
    step(*second)
    assert torch.equal(flatten(first[0]), flatten(second[0]))


@pytest.mark.parametrize("nbytes", [0, 5, 1000, None])
def test_a_trainer_that_is_killed_as_it_saves_goes_on_from_the_step_before(tmp_path: Path, nbytes: int | None) -> None:
    """`nbytes`: so many are of step 2, the rest is still of step 0; None: all but the last are."""
    file, policy = Checkpoint(tmp_path / "trainer", "run"), Policy(Shape(width=16, num_layers=1, num_heads=2))
    optimizer = torch.optim.AdamW(policy.parameters())
    contents = []
    for number in range(3):
        torch.nn.init.constant_(next(policy.parameters()), number)
        file.save(number, policy, optimizer, {})
        contents.append((tmp_path / f"trainer.{number % 2}").read_bytes())
    torn = contents[2][:-1] if nbytes is None else contents[2][:nbytes] + contents[0][nbytes:]
    (tmp_path / "trainer.0").write_bytes(torn)
    assert file.load(policy, optimizer) == (1, {})
    assert bool((next(policy.parameters()) == 1).all())
    file.forget()
    assert file.load(policy, optimizer) is None


def test_what_a_dead_worker_held_is_known_also_when_the_rows_are_gone(
    tmp_path: Path, child: Callable[[str], Child]
) -> None:
    tq.init()
    port = Port("trainer", replace(smoke(0, 1), folder=tmp_path))
    port.add("here", ["a", "b", "c", "d"], [{}] * 4, response=torch.zeros(4, 1))
    worker = child(
        """
        from demo.port import Port
        from demo.settings import smoke
        port = Port("reward", smoke(0, 1))
        acknowledged, kept = (port.take("here", ["response"], 2) for _ in range(2))
        port.acknowledge(acknowledged)
        print(len(kept), flush=True)
        input()
        """
    )
    assert worker.line() == "2"
    worker.kill()
    assert recover("reward", worker.pid) == 2
    port.drop_partition("here")
    assert recover("reward", worker.pid) == 2
    assert recover("reward", os.getpid()) == 0
    tq.close()


def test_a_rollout_worker_that_missed_versions_waits_for_weights_that_are_new_enough(tmp_path: Path) -> None:
    tq.init()
    settings = replace(smoke(0, 1), folder=tmp_path, shape=Shape(width=16, num_layers=1, num_heads=2))
    port, step = Port("trainer", settings), 4
    prompts = all_problems().train[: settings.prompts_per_ticket]
    port.open_partition(train_partition(step))
    tags = [{"step": step, "number": number} for number in range(len(prompts))]
    port.add("prompts", [f"a ticket/{number}" for number in range(len(prompts))], tags, prompt=prompts)
    worker = threading.Thread(target=rollout.run, args=("rollout 0", settings))
    worker.start()
    until(lambda: "rollout 0" in port.tags(REPLICAS), "the worker's address")
    caller = Caller(port.tags(REPLICAS)["rollout 0"]["address"], settings.token, 30)
    trainer = registry.trainer("shm").trainer_init({}, client=caller, source=ModuleSource(Policy(settings.shape)))
    trainer.send_weights(2, deadline_s=30)
    until(lambda: bool(tq.get_client().overview().leases), "the ticket's lease")
    trainer.send_weights(3, deadline_s=30)
    port.add("prompts", [f"stop/{number}" for number in range(len(prompts))], [{"step": STOP}] * 8, prompt=prompts)
    worker.join()
    made = port.tags(train_partition(step)).values()
    assert {tag["weight_version"] for tag in made} == {step + 1 - settings.max_lag}
    trainer.shutdown()
    caller.close()
    tq.close()


def test_the_view_shows_a_dash_where_there_is_no_value_yet() -> None:
    board = Board(smoke(0, 1))
    board.metrics = [torch.tensor([math.nan] * 10, dtype=torch.float64).numpy()]
    console = Console(width=160)
    with console.capture() as seen:
        console.print(dashboard(board), plain_line(board))
    assert "nan" not in seen.get()
    assert "–" in seen.get()


class _Demo:
    """`python -m demo --smoke`, the leader of a session; what is left of it is killed at the end."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TQ_ADDRESS"}
        self._folder, self._stuck = tmp_path, ""  # what was found of a run that did not end
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed at the end
        self._process = CHILDREN.start(
            ["-m", "demo", "--smoke", "--out", str(tmp_path), *arguments], environment, cwd=str(ROOT),
            stderr=self._errors.fileno(), own_session=True,
        )  # fmt: skip
        self._process.stdin.close()
        self._stdout = io.TextIOWrapper(self._process.stdout)
        self.pid = self._process.pid

    def read_until(self, what: str) -> str:
        """What it printed, up to the first line with `what`."""
        seen = ""
        for line in self._stdout:
            seen += line
            if what in line:
                return seen
        raise AssertionError(f"no {what!r} in {seen}; {self._said()}")

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end: the exit status, the rest of the output, and the errors."""
        overdue = threading.Timer(_DEADLINE_S, self._give_up)
        overdue.start()
        try:
            output = self._stdout.read()
            return self._process.wait(), output, self._said() + self._stuck + (output[-3000:] if self._stuck else "")
        finally:
            overdue.cancel()

    def _give_up(self) -> None:
        """Note what each process is at, and what it printed; then end them."""
        with contextlib.suppress(psutil.Error):  # one may end meanwhile
            for one in psutil.Process(self.pid).children(recursive=True):
                threads = [f"{thread.id}: {thread.user_time:.1f} s" for thread in one.threads()]
                self._stuck += f"{one.pid} {one.status()} {one.name()} {len(one.net_connections('unix'))} {threads}\n"
        for log in sorted(self._folder.rglob("*.log")):
            self._stuck += f"{log.name}: {log.read_text(errors='replace')[-1000:]}\n"
        os.killpg(self.pid, signal.SIGKILL)

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> _Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._stdout.close()
        self._errors.close()


def _incidents(output: str) -> dict[str, int]:
    """Who was ended by SIGKILL, and how many rows were delivered again. Also one that had no work left when it was back
    (a dash for its seconds)."""
    found = re.findall(r"^(\S+(?: \d)?) +SIGKILL +[\d.]+ s +\d+ +(?:[\d.]+ s|–) +(\d+)$", output, re.MULTILINE)
    return {name: int(rows) for name, rows in found}


def _is_whole(output: str, steps: int, tmp_path: Path) -> None:
    assert f"step {steps}/{steps}" in output
    assert f"{steps} steps on {steps * 128:,} samples" in output
    lag = re.search(r"no sample was more than (\d) versions behind \(limit 2\)", output)
    assert lag, output
    assert int(lag[1]) <= 2
    assert "nan" not in output
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("victim", ["trainer", "rollout 0", "reward", "reference"])
def test_a_worker_that_is_killed_in_the_middle_is_replaced(tmp_path: Path, victim: str) -> None:
    steps = 40
    with _Demo(tmp_path, "--steps", str(steps)) as demo:
        seen = demo.read_until("training: step")
        pids = dict(re.findall(r"^(\S+(?: \d)?) is process (\d+)$", seen, re.MULTILINE))
        os.kill(int(pids[victim]), signal.SIGKILL)
        code, output, errors = demo.finish()
    assert code == 0, errors
    assert list(_incidents(output)) == [victim]
    assert errors == ""
    _is_whole(output, steps, tmp_path)


def test_chaos_kills_one_worker_of_each_kind(tmp_path: Path) -> None:
    with _Demo(tmp_path, "--chaos", "--steps", "10") as demo:
        code, output, errors = demo.finish()
    assert code == 0, errors
    held = _incidents(output)
    # rollout: the prompts of a ticket. trainer: all samples of a step. The others: one read.
    assert held.pop("reward") in (0, 64)  # it had answered, so the trainer may have used and cleared them meanwhile
    assert held == {"rollout 1": 8, "reference": 64, "trainer": 128}
    _is_whole(output, 10, tmp_path)


def test_the_service_may_be_killed_again_and_again(tmp_path: Path) -> None:
    with _Demo(tmp_path, "--steps", "20", "--kill-service", "1.5") as demo:
        code, output, errors = demo.finish()
    assert code == 0, errors
    back = re.findall(r"^service +SIGKILL +[\d.]+ s +\d+ +([\d.]+) s +0$", output, re.MULTILINE)
    assert len(back) > 1
    _is_whole(output, 20, tmp_path)


def test_whoever_is_killed_a_reproducible_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    ends = []
    # Not the rollout worker: two others may have made all samples before it, or the one after it, had a ticket.
    surely = {"service", "reward", "reference", "trainer"}
    for arguments, killed in (([], set()), (["--chaos", "--kill-service", "2", "--workers", "3"], surely)):
        with _Demo(tmp_path, "--reproducible", "--steps", "10", *arguments) as demo:
            code, output, errors = demo.finish()
        assert code == 0, errors
        assert _incidents(output).keys() - {"rollout 2"} == killed
        found = re.search(
            r"^weights ([0-9a-f]{16}) at the end, as in every such run with seed 0$", output, re.MULTILINE
        )
        assert found, output
        ends.append(found[1])
    assert ends[0] == ends[1]


def test_chaos_kills_at_steps_and_moments_of_their_own() -> None:
    kills = chaos(Settings())
    assert len({kill.step for kill in kills}) == len({kill.moment for kill in kills}) == len(kills) == 4


_CUSTOM = """
import os
os.environ["OMP_NUM_THREADS"] = "1"
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from demo.fleet import import_ahead

import_ahead([f"demo.{{kind}}" for kind in ("trainer", "rollout", "reward", "reference")])
from demo.command import run
from demo.interrupts import Interrupts
from demo.settings import Kill, smoke

with Interrupts() as interrupts:
    settings = replace(smoke(0, {workers}), steps={steps}, kills={kills!r}, max_restarts={most})
    settings = replace(settings, folder=Path({folder!r}))
    sys.exit(run(settings, interrupts))
"""


def test_the_trainer_may_be_killed_at_any_moment_of_a_step(tmp_path: Path) -> None:
    moments = ("saved", "announced", "gathered", "announced")
    kills = tuple(Kill("trainer", 2 * number, moment) for number, moment in enumerate(moments))  # type: ignore[arg-type]
    code = _CUSTOM.format(workers=1, steps=10, folder=str(tmp_path), kills=kills, most=4)
    done = _python("-c", code)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^trainer +SIGKILL", done.stdout, re.MULTILINE)) == 4
    _is_whole(done.stdout, 10, tmp_path)


def test_a_worker_that_is_killed_too_often_ends_the_run(tmp_path: Path) -> None:
    kills = tuple(Kill("reward", 0, "taken") for _ in range(2))
    code = _CUSTOM.format(workers=1, steps=2, folder=str(tmp_path), kills=kills, most=1)
    done = _python("-c", code)
    assert done.returncode == 1
    assert done.stderr == "worker 'reward' was ended by SIGKILL, for the 2th time\n(it printed nothing)\n"


@pytest.mark.parametrize("moment", ["is process", "training: step"])
def test_an_interrupt_ends_the_workers_and_shows_what_there_is(tmp_path: Path, moment: str) -> None:
    with _Demo(tmp_path, "--steps", "500") as demo:
        demo.read_until(moment)
        started = psutil.Process(demo.pid).children(recursive=True)
        os.killpg(demo.pid, signal.SIGINT)
        code, output, errors = demo.finish()
    assert code == 130
    assert errors == "interrupted: every process has been ended\n"
    assert re.search(r"^process +computing +samples", output, re.MULTILINE)
    assert "nan" not in output
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    until(lambda: not any(one.is_running() for one in started), "the end of all processes")
