"""What a run is: sizes, rates and limits, the same frozen object in every process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_urlsafe
from typing import Literal, NamedTuple

from demo.model import Shape

Moment = Literal["taken", "made", "filled", "gathered", "saved", "announced"]
"""Where a worker can be made to die: rows are on lease; samples are made, not added; fields are added, not
acknowledged; a whole step's gradients are summed up; the step is saved, its rows not acknowledged; the version is
announced, not sent."""


class Kill(NamedTuple):
    """`worker` kills itself (kill -9) the first time it comes by `moment` of optimiser step `step` or a later one."""

    worker: str
    step: int
    moment: Moment


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The defaults take held-out accuracy from about 30 % to above 90 % in one to two minutes on two free cores."""

    seed: int = 0
    steps: int = 800
    """Optimiser steps; each publishes one version of the weights."""
    num_rollout_workers: int = 2
    samples_per_prompt: int = 8
    """Rows of a group. All readers of the queue ask for multiples of it."""
    prompts_per_step: int = 64
    prompts_per_ticket: int = 16
    """What a rollout worker takes at once."""
    rows_per_read: int = 128
    """What the reward worker, the reference worker and the trainer take at once."""
    max_lag: int = 2
    """A sample is trained on at most this many versions after the oldest one that had a part in it; at least 1."""
    temperature: float = 1.0
    learning_rate: float = 1.5e-3
    """Reached after `ramp_steps`, then falls linearly to a tenth."""
    ramp_steps: int = 20
    clip: float = 0.2
    kl_weight: float = 0.01
    max_grad_norm: float = 1.0
    evaluate_every: int = 20
    warm_learning_rate: float = 3e-3
    warm_batch: int = 256
    warm_until: float = 0.3
    """The supervised warm start ends at this accuracy, so that the rest is learned from rewards."""
    warm_max_updates: int = 1000
    shape: Shape = field(default_factory=Shape)
    token: str = field(default_factory=token_urlsafe)
    """Whoever sends weights to the rollout workers has to know it."""
    run_id: str = field(default_factory=lambda: token_urlsafe(6))
    """Names the run, through all lives of its trainer: the epoch of the versions that are announced."""
    patience_s: float = 300.0
    """How long a worker waits for rows before it gives up; longer than any warm start. Leases last as long: whoever is
    killed loses his at once."""
    max_restarts: int = 5
    """Of one worker; who is killed more often ends the run."""
    kills: tuple[Kill, ...] = ()
    """What is to happen by itself; of each worker the first one that is left."""
    kill_service_s: float | None = None
    """The service, too, is killed every so many seconds."""
    page_port: int | None = None
    """Of a page in a browser that shows the service; 0 takes any free one, None: no page."""
    reproducible: bool = False
    """All runs with a seed end with the same weights, to the last bit, whoever is killed: samples are made with the
    newest weights only, from seeds of their own, and whoever works on a step takes all its rows, in the same order."""
    folder: Path = Path("demo-out")
    """For the picture, the trainer's checkpoint and what the workers print."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "num_rollout_workers",
            "samples_per_prompt",
            "prompts_per_ticket",
            "rows_per_read",
            "max_lag",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for whole, part in (
            ("prompts_per_step", "prompts_per_ticket"),
            ("prompts_per_ticket", "samples_per_prompt"),
            ("rows_per_step", "rows_per_read"),
            ("rows_per_read", "samples_per_prompt"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"{whole} ({getattr(self, whole)}) must be a multiple of {part} ({getattr(self, part)})"
                )

    @property
    def rows_per_step(self) -> int:
        """Samples in one optimiser step."""
        return self.prompts_per_step * self.samples_per_prompt

    def weights_for(self, step: int) -> int:
        """The oldest version of the weights that may make samples for a step; those that learn from them are version
        `step + 1`."""
        return step + 1 if self.reproducible else max(step + 1 - self.max_lag, 1)

    @property
    def rollout_names(self) -> list[str]:
        """Names of the rollout workers."""
        return [f"rollout {number}" for number in range(self.num_rollout_workers)]

    @property
    def worker_names(self) -> list[str]:
        """Names of all workers, in the order in which they are shown."""
        return ["trainer", *self.rollout_names, "reward", "reference"]

    def learning_rate_at(self, step: int) -> float:
        """For optimiser step `step`, counted from 0."""
        ramp = min(1.0, (step + 1) / self.ramp_steps)
        return self.learning_rate * ramp * (1.0 - 0.9 * step / self.steps)


def chaos(settings: Settings) -> tuple[Kill, ...]:
    """One worker of each kind is killed, at moments and steps of their own."""
    moments: list[tuple[str, Moment]] = [
        (settings.rollout_names[-1], "made"),
        ("reward", "filled"),
        ("reference", "taken"),
        ("trainer", "gathered"),
    ]
    parts = len(moments) + 1
    return tuple(
        Kill(worker, settings.steps * number // parts, moment)
        for number, (worker, moment) in enumerate(moments, start=1)
    )


def smoke(seed: int, num_rollout_workers: int) -> Settings:
    """A run of seconds that takes every path but learns nothing worth showing."""
    return Settings(
        seed=seed,
        steps=4,
        num_rollout_workers=num_rollout_workers,
        prompts_per_step=16,
        prompts_per_ticket=8,
        rows_per_read=64,
        evaluate_every=2,
        warm_max_updates=10,
        shape=Shape(width=32, num_layers=2),
    )


def choose(
    *,
    short: bool,
    steps: int | None,
    workers: int,
    seed: int,
    out: Path,
    kill: bool,
    kill_service_s: float | None,
    page_port: int | None = None,
    reproducible: bool = False,
) -> Settings:
    """What the command line asks for."""
    settings = smoke(seed, workers) if short else Settings(seed=seed, num_rollout_workers=workers)
    steps = settings.steps if steps is None else steps
    settings = replace(settings, folder=out, steps=steps, kill_service_s=kill_service_s, page_port=page_port)
    if reproducible:
        settings = replace(settings, reproducible=True, max_lag=1, rows_per_read=settings.rows_per_step)
    return replace(settings, kills=chaos(settings)) if kill else settings
