"""What a case says: rows of numbers, and targets that they meet or miss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Unit = Literal["s", "ops/s", "B/s", "x", "count"]
RATES = ("ops/s", "B/s")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One bound on one number. `value` is None when it could not be measured, for want of a peer for example."""

    text: str
    """The number's name and bound, as printed."""
    value: float | None
    bound: float
    at_least: bool

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(kw_only=True)
class Row:
    """One line of the table; numbers by system are medians in `unit`, absent where there was none."""

    case: int
    what: str
    unit: Unit = "s"
    values: dict[str, float] = field(default_factory=dict)
    memcpy: float | None = None
    """Median of the copy of the same bytes in the same rounds, in seconds."""
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Why a system has no number."""
    words: dict[str, str] = field(default_factory=dict)
    """What is shown in place of a system's number."""
    skipped: str = ""
    """Why this was not measured at all, where that is nobody's failure."""
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """failed when ours has no number, else met or missed by the targets, those without a number said apart."""
        if self.skipped:
            return "skipped"
        if "ours" in self.failures:
            return "failed"
        outcomes = [target.met for target in self.targets]
        if False in outcomes:
            return "missed"
        if True in outcomes:
            return "met, rest unmeasured" if None in outcomes else "met"
        return "unmeasured" if outcomes else ""

    def at_most(self, text: str, bound: float) -> Row:
        """Add a target on our own number; returns self."""
        self.targets.append(Target(text=text, value=self.values.get("ours"), bound=bound, at_least=False))
        return self

    def at_least(self, text: str, bound: float) -> Row:
        """Add a target on our own number; returns self."""
        self.targets.append(Target(text=text, value=self.values.get("ours"), bound=bound, at_least=True))
        return self

    def of_memcpy(self, share: float) -> Row:
        """Add the target that our speed is at least this share of memcpy's; returns self."""
        value = ratio(self.memcpy, self.values.get("ours"))
        self.targets.append(Target(text=f">= {share:g} M", value=value, bound=share, at_least=True))
        return self

    def faster_than(self, system: str, times: float) -> Row:
        """Add the target that ours is at least so many times faster than a peer; returns self."""
        text = f">= {times:g} x {system}"
        self.targets.append(Target(text=text, value=self.versus(system), bound=times, at_least=True))
        return self

    def against(self, text: str, value: float | None, bound: float) -> Row:
        """Add the target that `value`, some quotient of our number, is at least this; returns self."""
        self.targets.append(Target(text=text, value=value, bound=bound, at_least=True))
        return self

    def within(self, text: str, value: float | None, bound: float) -> Row:
        """Add the target that `value`, some quotient of our number, is at most this; returns self."""
        self.targets.append(Target(text=text, value=value, bound=bound, at_least=False))
        return self

    def versus(self, system: str) -> float | None:
        """How many times better ours is than this system, by the row's unit."""
        ours, other = self.values.get("ours"), self.values.get(system)
        return ratio(ours, other) if self.unit in RATES else ratio(other, ours)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient, None where either is missing or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


@dataclass
class Samples:
    """Numbers of interleaved rounds: by system, by metric; and what went wrong, by system."""

    by_system: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    first: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By system, what the first round said; it warms up and counts nowhere else."""

    def add(self, system: str, metrics: dict[str, Any]) -> None:
        """Append numbers; a list of numbers is extended with."""
        kept = self.by_system.setdefault(system, {})
        for name, value in metrics.items():
            kept.setdefault(name, []).extend(value if isinstance(value, list) else [value])

    def of(self, system: str, metric: str) -> list[float]:
        return self.by_system.get(system, {}).get(metric, [])

    def quantile(self, system: str, metric: str, share: float = 0.5) -> float | None:
        """The sample at this share of the ordered ones (0.5: the median), None without samples."""
        ordered = sorted(self.of(system, metric))
        if not ordered:
            return None
        if share == 0.5:
            return statistics.median(ordered)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def row(self, case: int, what: str, metric: str, *, unit: Unit = "s", share: float = 0.5, **systems: str) -> Row:
        """A row of this metric; `systems` names another metric for a system (ray="get_copy")."""
        row = Row(case=case, what=what, unit=unit, failures=dict(self.failures))
        for system in self.by_system:
            name = systems.get(system, metric)
            value = self.quantile(system, name, share)
            if value is not None and system != "plain":
                row.values[system] = value
                row.samples[system] = self.of(system, name)
        row.memcpy = self.quantile("plain", "memcpy")
        if "ours" not in row.values:
            row.failures.setdefault("ours", "not measured")
        return row


def spread(values: Sequence[float]) -> float | None:
    """Largest over smallest, None for less than two."""
    return max(values) / min(values) if len(values) > 1 and min(values) > 0 else None
