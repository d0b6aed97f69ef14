"""The trainer: warm start, then one optimiser step per batch, streaming rows as soon as all their fields are there."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from demo.arithmetic import END, MAX_RESPONSE_LEN, PROMPT_LEN, Problems, all_problems, decode
from demo.columns import padded
from demo.grpo import clipped_loss, group_advantages
from demo.model import Policy, flatten, generate, response_log_probs
from demo.port import Doing, Port, Rows
from demo.publisher import Publisher
from demo.settings import Settings
from demo.tables import METRICS, REFERENCE, REPLICAS, STOP, Tags, train_partition
from demo.warmstart import accuracy, warm_start
from transfer_queue.errors import DeadlineExceeded

_FIELDS = ["prompt", "response", "response_mask", "rollout_log_probs", "reward", "ref_log_probs"]


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
    """Of groups that taught something; the three above are sums over these."""


def run(worker: str, settings: Settings) -> None:
    """Train for `settings.steps` steps and tell everybody when there is nothing more to do."""
    torch.manual_seed(settings.seed)
    Trainer(Port(worker, settings), settings).run()


class Trainer:
    """Owner of the policy: the only one that changes it and that decides what is sampled next."""

    def __init__(self, port: Port, settings: Settings) -> None:
        self._port = port
        self._settings = settings
        self._problems: Problems = all_problems()
        self._policy = Policy(settings.shape)
        self._midway: set[int] = set()  # versions that came between two tokens of some sample
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), betas=(0.9, 0.95), weight_decay=0.01)

    def run(self) -> None:
        """Warm start, steps, goodbye."""
        settings, port = self._settings, self._port
        self._warm_start()
        port.add("weights", [REFERENCE], [{}], parameters=flatten(self._policy)[None])
        publisher = Publisher(self._policy, self._replicas(), settings.token)
        publisher.publish()
        self._record(0, _Sums(), math.nan)
        for step in range(min(settings.max_lag + 1, settings.steps)):
            self._put_tickets(step)
        for step in range(settings.steps):
            sums = self._gradients(step)
            grad_norm = self._update(step, sums)
            port.drop_partition(train_partition(step))
            if step + 1 + settings.max_lag < settings.steps:
                self._put_tickets(step + 1 + settings.max_lag)
            with port.spending(Doing.QUEUE):
                publisher.publish()
            self._record(step + 1, sums, grad_norm)
        for _ in settings.rollout_names:
            self._put_tickets(STOP, settings.prompts_per_ticket)
            port.give_back("trainer", settings.rows_per_ticket)
        port.report(phase="done", midway=len(self._midway))
        publisher.close()

    def _replicas(self) -> list[str]:
        """The addresses of all rollout workers, which started long ago. Raises `DeadlineExceeded`."""
        deadline = time.monotonic() + self._settings.patience_s
        while len(found := self._port.tags(REPLICAS)) < len(self._settings.rollout_names):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"only {sorted(found)} take weights")
            time.sleep(0.01)
        return [tags["address"] for tags in found.values()]

    def _warm_start(self) -> None:
        def show(updates: int, solved: float) -> None:
            self._port.report(phase="warm start", updates=updates, solved=solved)

        self._port.report(phase="warm start")
        with self._port.spending(Doing.WORK):
            warm_start(self._policy, self._problems, self._settings, show)

    def _put_tickets(self, step: int, count: int | None = None) -> None:
        """Ask for samples for `step`: one row per prompt, in groups that a worker takes together."""
        n = self._settings.samples_per_prompt
        count = self._settings.prompts_per_step if count is None else count
        prompts = self._problems.train[torch.randint(len(self._problems.train), (count,))]
        tags: list[Tags] = [
            {"group_id": f"{step}/{number // n}", "step": step, "number": number} for number in range(count)
        ]
        self._port.add("prompts", [f"{time.monotonic_ns()}/{number}" for number in range(count)], tags, prompt=prompts)

    def _gradients(self, step: int) -> _Sums:
        """Sum up the gradients of all rows of the step, in whatever order their groups become complete."""
        sums = _Sums()
        self._optimizer.zero_grad()
        for _ in range(0, self._settings.rows_per_step, self._settings.rows_per_read):
            rows = self._port.take(
                train_partition(step), _FIELDS, self._settings.rows_per_read, max_staleness=self._settings.max_lag
            )
            with self._port.spending(Doing.WORK):
                self._accumulate(rows, sums)
            self._port.finish(len(rows))
        return sums

    def _accumulate(self, rows: Rows, sums: _Sums) -> None:
        data = rows.data
        rewards = data["reward"]
        advantages = group_advantages(rewards, torch.tensor(rows.tag("group_id")))
        sums.rewards += rewards.tolist()
        sums.versions += rows.tag("weight_version")
        made_by = [[version for version, _, _ in spans] for spans in rows.tag("weight_versions")]
        sums.mixed += sum(len(versions) > 1 for versions in made_by)
        self._midway.update(version for versions in made_by for version in versions[1:])
        mask = padded(data["response_mask"], MAX_RESPONSE_LEN).float()
        told = advantages.nonzero().squeeze(1)  # a group that is all right or all wrong teaches nothing: save the time
        if not len(told):
            return
        log_probs = response_log_probs(
            self._policy,
            padded(data["prompt"], PROMPT_LEN)[told],
            padded(data["response"], MAX_RESPONSE_LEN, fill=END)[told],
        )
        terms = clipped_loss(
            log_probs,
            padded(data["rollout_log_probs"], MAX_RESPONSE_LEN)[told],
            padded(data["ref_log_probs"], MAX_RESPONSE_LEN)[told],
            advantages[told],
            mask[told],
            clip=self._settings.clip,
            kl_weight=self._settings.kl_weight,
        )
        torch.autograd.backward(terms.loss)
        sums.tokens += float(mask[told].sum())
        sums.loss += float(terms.loss.detach())
        sums.kl += terms.kl
        sums.clipped += terms.clipped

    def _update(self, step: int, sums: _Sums) -> float:
        """One optimiser step with the mean gradient per token. Returns its norm before it was cut."""
        with self._port.spending(Doing.WORK):
            parameters = list(self._policy.parameters())
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= sums.tokens  # not 0: there is a gradient
            norm = torch.nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = self._settings.learning_rate_at(step)
            self._optimizer.step()
        return float(norm)

    def _record(self, version: int, sums: _Sums, grad_norm: float) -> None:
        """Publish what the step brought; now and then, how good the policy is on problems it never trained on."""
        settings = self._settings
        solved = math.nan
        if version % settings.evaluate_every == 0 or version == settings.steps:
            with self._port.spending(Doing.WORK):
                solved = accuracy(self._policy, self._problems.held_out)
        count = len(sums.rewards) or math.nan
        tokens = sums.tokens or math.nan
        values = {
            "at": time.monotonic(),
            "step": version,
            "reward": sum(sums.rewards) / count,
            "accuracy": solved,
            "loss": sums.loss / tokens,
            "kl": sums.kl / tokens,
            "clipped": sums.clipped / tokens,
            "lag": max((version - old for old in sums.versions), default=0),
            "grad_norm": grad_norm,
            "mixed": sums.mixed,
        }
        row = torch.tensor([[values[name] for name in METRICS]], dtype=torch.float64)
        self._port.add("metrics", [str(version)], [{}], values=row)
        self._port.report(phase="training", step=version, examples=self._examples())

    def _examples(self) -> str:
        """A few held-out problems with the policy's present answers."""
        prompts = self._problems.held_out[:3]
        found = generate(self._policy, self._policy.shape, prompts, temperature=0.0)
        return "  ".join(
            decode(prompt) + decode(tokens[: length - 1])
            for prompt, tokens, length in zip(prompts, found.tokens, found.lengths.tolist(), strict=True)
        )
