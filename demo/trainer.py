"""The trainer: warm start, then one optimiser step per batch, streaming rows as soon as all their fields are there.

It may be killed anywhere. A step is saved before its rows are acknowledged and cleared, and before its weights are
announced: every row is in exactly one step that counts, and a version's weights are the same whoever sends them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from xxhash import xxh3_64

from demo.arithmetic import END, MAX_RESPONSE_LEN, PROMPT_LEN, Problems, all_problems, decode
from demo.checkpoint import Checkpoint
from demo.columns import padded
from demo.grpo import clipped_loss, divergence, group_advantages, stand_ins
from demo.model import Policy, chosen, flatten, generate, token_log_probs
from demo.port import Doing, Port, Rows
from demo.publisher import Publisher
from demo.settings import Settings
from demo.tables import DONE, METRICS, REFERENCE, STOP, Tags, train_partition
from demo.warmstart import accuracy, warm_start

_FIELDS = ["prompt", "response", "response_mask", "rollout_log_probs", "reward", "ref_log_probs"]
_ASKED = "asked"  # noted of a partition: all its tickets are there
_PROMPTS = 1_000_003  # apart are the seeds of runs, from which each step draws its prompts


@dataclass
class _Sums:
    """Over the rows of one optimiser step."""

    rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The oldest that had a part in each."""
    mixed: int = 0
    """Rows that several versions made."""
    loss: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    tokens: float = 0.0
    """Of all rows; the three above are sums over these."""

    def values(self, version: int, grad_norm: float) -> dict[str, float]:
        """What there is to say of the step that led to `version`."""
        tokens = self.tokens or math.nan
        return {
            "reward": sum(self.rewards) / (len(self.rewards) or math.nan),
            "loss": self.loss / tokens,
            "kl": self.kl / tokens,
            "clipped": self.clipped / tokens,
            "lag": max((version - old for old in self.versions), default=0),
            "grad_norm": grad_norm,
            "mixed": self.mixed,
        }


def run(worker: str, settings: Settings) -> None:
    """Train for `settings.steps` steps and tell everybody when there is nothing more to do."""
    torch.manual_seed(settings.seed)
    Trainer(Port(worker, settings, waits=False), settings).run()


class Trainer:
    """Owner of the policy: the only one that changes it and that decides what is sampled next.

    `step` counts optimiser steps that are saved; version `step + 1` is the weights after them.
    """

    def __init__(self, port: Port, settings: Settings) -> None:
        self._port = port
        self._settings = settings
        self._problems: Problems = all_problems()
        self._policy = Policy(settings.shape)
        self._midway: set[int] = set()  # versions that came between two tokens of some sample
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self._checkpoint = Checkpoint(settings.folder / "trainer", settings.run_id)
        self._publisher = Publisher(port, self._policy, settings)
        self._asked: set[int] = set()  # steps whose tickets are all there, as far as this process knows

    def run(self) -> None:
        """Begin, or go on where a trainer before this one was killed."""
        settings, port = self._settings, self._port
        step, values = self._begin()
        while True:
            self._ask(step)
            self._publisher.publish(step + 1)
            reads = self._reads(step)
            self._record(step, values)
            if step == settings.steps:
                break
            taken, sums = self._gradients(step, reads)
            self._publisher.settle()
            values = sums.values(step + 1, self._update(step, sums))
            step += 1
            self._save(step, values)
            port.pass_by("saved", step)
            port.conclude(step, taken)
        self._publisher.settle()
        self._say_goodbye()

    def _begin(self) -> tuple[int, dict[str, float]]:
        """Steps done so far, and what was measured in the last of them."""
        with self._port.spending(Doing.WEIGHTS):
            found = self._checkpoint.load(self._policy, self._optimizer)
        if found is not None:
            step, notes = found
            self._midway.update(notes["midway"])
            return step, notes["values"]
        self._warm_start()
        self._port.add("weights", [REFERENCE], [{}], parameters=flatten(self._policy)[None])
        values = _Sums().values(0, math.nan)
        self._save(0, values)
        self._port.conclude(0, [])  # from here on it is noted what was taken for a step
        return 0, values

    def _save(self, step: int, values: dict[str, float]) -> None:
        self._port.catch_up()  # who begins here writes nothing of before again
        notes: dict[str, Any] = {"midway": sorted(self._midway), "values": values}
        with self._port.spending(Doing.WEIGHTS):
            self._checkpoint.save(step, self._policy, self._optimizer, notes)

    def _say_goodbye(self) -> None:
        settings, port = self._settings, self._port
        for number, _ in enumerate(settings.rollout_names):
            self._put_tickets(STOP, settings.prompts_per_ticket, f"stop {number}")
        weights = xxh3_64(flatten(self._policy).numpy()).hexdigest()
        port.report_last(phase=DONE, midway=len(self._midway), weights=weights)
        port.catch_up()
        self._publisher.close()

    def _warm_start(self) -> None:
        def show(updates: int, solved: float) -> None:
            self._port.report(phase="warm start", updates=updates, solved=solved)

        self._port.report(phase="warm start")
        with self._port.spending(Doing.WORK):
            warm_start(self._policy, self._problems, self._settings, show)

    def _ask(self, step: int) -> None:
        """Clear what is done with, and see that samples are asked for: those for this step, and for those after it that
        are not more than `max_lag` versions old when the weights of the step before this one make them. These are what
        workers have while the newest are under way."""
        settings, port = self._settings, self._port
        if step:
            port.drop_partition(train_partition(step - 1))
        for later in range(step, min(step + settings.max_lag, settings.steps)):
            partition = train_partition(later)
            if later not in self._asked and not (port.notes(partition) or {}).get(_ASKED):
                port.open_partition(partition)  # first: a ticket for a partition that is not there is out of date
                self._put_tickets(later, settings.prompts_per_step, str(later))
                port.open_partition(partition, **{_ASKED: True})
            self._asked.add(later)

    def _put_tickets(self, step: int, count: int, name: str) -> None:
        """Ask for samples for `step`: one row per prompt, in groups that a worker takes together. Doing it again
        changes nothing for those that are still there."""
        n = self._settings.samples_per_prompt
        generator = torch.Generator().manual_seed(self._settings.seed * _PROMPTS + max(step, 0))
        prompts = self._problems.train[torch.randint(len(self._problems.train), (count,), generator=generator)]
        tags: list[Tags] = [
            {"group_id": f"{name}/{number // n}", "step": step, "number": number} for number in range(count)
        ]
        self._port.add("prompts", [f"{name}/{number}" for number in range(count)], tags, prompt=prompts)

    def _reads(self, step: int) -> Iterator[Rows | None]:
        """All rows of the step, in whatever order their groups become complete. Not before its weights are announced:
        how old a row may be counts from there."""
        settings = self._settings
        if step == settings.steps:
            return iter(())
        return self._port.takes(
            train_partition(step),
            _FIELDS,
            settings.rows_per_read,
            settings.rows_per_step // settings.rows_per_read,
            max_staleness=settings.max_lag,
            meanwhile=self._publisher.look_around,
        )

    def _gradients(self, step: int, reads: Iterator[Rows | None]) -> tuple[list[Rows], _Sums]:
        """Sum up the gradients of all rows of the step. They stay on lease: who takes the place of a killed trainer
        gets them again."""
        sums, taken = _Sums(), []
        self._optimizer.zero_grad()
        for rows in reads:
            assert rows is not None, "nobody else clears rows"
            with self._port.spending(Doing.WORK):
                self._accumulate(rows, sums)
            self._port.finish(len(rows))
            taken.append(rows)
        self._port.pass_by("gathered", step)
        return taken, sums

    def _accumulate(self, rows: Rows, sums: _Sums) -> None:
        data = rows.data
        rewards, group_ids = data["reward"], torch.tensor(rows.tag("group_id"))
        advantages = group_advantages(rewards, group_ids)
        counts = stand_ins(advantages, group_ids)
        sums.rewards += rewards.tolist()
        sums.versions += rows.tag("weight_version")
        made_by = [[version for version, _, _ in spans] for spans in rows.tag("weight_versions")]
        sums.mixed += sum(len(versions) > 1 for versions in made_by)
        self._midway.update(version for versions in made_by for version in versions[1:])
        looked_at = counts.nonzero().squeeze(1)
        responses = padded(data["response"], MAX_RESPONSE_LEN, fill=END)[looked_at]
        mask = padded(data["response_mask"], MAX_RESPONSE_LEN).float()[looked_at] * counts[looked_at, None]
        log_probs = token_log_probs(self._policy, padded(data["prompt"], PROMPT_LEN)[looked_at], responses)
        terms = clipped_loss(
            chosen(log_probs, responses),
            padded(data["rollout_log_probs"], MAX_RESPONSE_LEN)[looked_at],
            divergence(log_probs, padded(data["ref_log_probs"], MAX_RESPONSE_LEN)[looked_at]),
            advantages[looked_at],
            mask,
            clip=self._settings.clip,
            kl_weight=self._settings.kl_weight,
        )
        torch.autograd.backward(terms.loss)
        sums.tokens += float(mask.sum())
        sums.loss += float(terms.loss.detach())
        sums.kl += terms.kl
        sums.clipped += terms.clipped

    def _update(self, step: int, sums: _Sums) -> float:
        """One optimiser step with the mean gradient per token. Returns its norm before it was cut."""
        with self._port.spending(Doing.WORK):
            parameters = list(self._policy.parameters())
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= sums.tokens
            norm = torch.nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = self._settings.learning_rate_at(step)
            self._optimizer.step()
        return float(norm)

    def _record(self, step: int, values: dict[str, float]) -> None:
        """Publish what the step brought; now and then, how good the policy is on problems it never trained on."""
        settings = self._settings
        solved = math.nan
        if step % settings.evaluate_every == 0 or step == settings.steps:
            with self._port.spending(Doing.WORK):
                solved = accuracy(self._policy, self._problems.held_out)
        values = {**values, "at": time.monotonic(), "step": step, "accuracy": solved}
        row = torch.tensor([[values[name] for name in METRICS]], dtype=torch.float64)
        self._port.add("metrics", [str(step)], [{}], values=row)
        self._port.report(phase="training", step=step, examples=self._examples())

    def _examples(self) -> str:
        """A few held-out problems with the policy's present answers."""
        prompts = self._problems.held_out[:3]
        found = generate(self._policy, self._policy.shape, prompts, temperature=0.0)
        return "  ".join(
            decode(prompt) + decode(tokens[: length - 1])
            for prompt, tokens, length in zip(prompts, found.tokens, found.lengths.tolist(), strict=True)
        )
