"""The demo: its arithmetic, its loss, its child processes, and one short run from end to end."""

from __future__ import annotations

import math
import os
import re
import subprocess
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest
import torch
from zygote import CHILDREN

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
from demo.columns import padded, ragged, row_lengths
from demo.grpo import clipped_loss, group_advantages
from demo.line import Line, Lines
from demo.model import Cache, Forward, Generation, Policy, Shape, flatten, generate, response_log_probs, unflatten
from demo.replica import Replica
from demo.settings import Settings
from transfer_queue.errors import StaleVersion
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.engines import registry

ROOT = Path(__file__).parent.parent


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


def test_loss_is_what_a_hand_computes() -> None:
    new = torch.tensor([[math.log(0.5), math.log(0.4)], [math.log(0.9), math.log(0.2)]], requires_grad=True)
    old = torch.tensor([[math.log(0.25), math.log(0.4)], [math.log(0.6), math.log(0.9)]])
    ref = torch.tensor([[math.log(0.5), math.log(0.2)], [math.log(0.9), math.log(0.1)]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    terms = clipped_loss(new, old, ref, torch.tensor([2.0, -1.0]), mask, clip=0.2, kl_weight=0.1)
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


def test_calls_reach_every_worker_and_errors_come_back() -> None:
    workers = [Told(), Told(StaleVersion("version 1 after 2"))]
    ends = [Line(worker, "token") for worker in workers]
    with pytest.raises(AuthenticationError):
        Lines([ends[0].address], "another token", 10)
    trainer = Lines([line.address for line in ends], "token", 10)
    trainer.init_weight_transfer_engine({"address": "here"})
    trainer.start_weight_update()
    with pytest.raises(StaleVersion, match="version 1 after 2"):
        trainer.update_weights({"version": 1})
    trainer.finish_weight_update("1")
    assert workers[0].calls == workers[1].calls == [{"address": "here"}, "start", {"version": 1}, "1"]
    trainer.close()
    for line in ends:
        line.close()


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


def test_smoke_run(tmp_path: Path) -> None:
    done = _python("-m", "demo", "--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout
    lag = re.search(r"no sample was more than (\d) versions behind \(limit 2\)", done.stdout)
    assert lag, done.stdout
    assert int(lag[1]) <= 2
    assert re.search(r"\d of 4 versions reached the rollout workers between two tokens", done.stdout)
    assert re.search(r"generation was frozen for \d", done.stdout)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
