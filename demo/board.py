"""What the parent knows about a run: only what the workers put into the queue."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import transfer_queue as tq
from demo.settings import Settings
from demo.tables import METRICS, TRAINED, train_partition

_WINDOW_S = 4.0

Floats = npt.NDArray[np.float64]


class Shares(NamedTuple):
    """Parts of 1; zeros before anything happened."""

    work: float
    samples: float
    weights: float
    wait: float


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """Totals of all processes of this name; seconds of `wait_s` go on while it waits."""

    name: str
    rows: int
    nbytes: int
    work_s: float
    wait_s: float
    samples_s: float
    weights_s: float

    def shares(self) -> Shares:
        """What its time went into."""
        parts = (self.work_s, self.samples_s, self.weights_s, self.wait_s)
        total = sum(parts)
        return Shares(*(part / total for part in parts)) if total else Shares(0.0, 0.0, 0.0, 0.0)


def _state(name: str, lives: Sequence[Mapping[str, Any]], now: float) -> WorkerState:
    """A worker that has been waiting since its report has waited until now; one that is dead has not."""
    last = max(lives, key=lambda tag: tag["life"])
    idle_s = now - last["at"] if last["waiting"] else 0.0

    def total(what: str) -> Any:
        return sum(tag[what] for tag in lives)

    return WorkerState(
        name=name,
        rows=total("rows"),
        nbytes=total("nbytes"),
        work_s=total("work_s"),
        wait_s=total("wait_s") + idle_s,
        samples_s=total("samples_s"),
        weights_s=total("weights_s"),
    )


@dataclass(kw_only=True)
class Incident:
    """A worker was killed."""

    name: str
    pid: int
    reason: str
    noticed_s: float
    """When its end was noticed."""
    step: int
    """How many optimiser steps were done then."""
    rows: int
    """How many it had on lease and not acknowledged, that were there when the service noticed its end: they are
    delivered again."""
    life: int
    """Of the process that took its place; 1 for the second one of the name."""
    worked_s: float | None = None
    """When that one had done its part on some row for the first time."""


@dataclass
class Board:
    """Call `refresh` to look again; everything else only reads what that found."""

    settings: Settings
    started_s: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    updates: int = 0
    """Supervised updates of the warm start."""
    solved: float = 0.0
    """Accuracy of the warm start on its probe."""
    examples: str = ""
    paused_s: float = 0.0
    longest_pause_s: float = 0.0
    """Generation was frozen for new weights, per worker; known at the end."""
    midway: int = 0
    """Versions that came between two tokens of some sample; known at the end."""
    weights: str = ""
    """A digest of those that the trainer ends with."""
    pids: dict[str, int] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    flight: list[tuple[float, int]] = field(default_factory=list)
    """(when, how many samples there were)."""
    workers: dict[str, WorkerState] = field(default_factory=dict)
    metrics: list[Floats] = field(default_factory=list)
    """One vector per published version, version 0 first; columns as in METRICS."""
    _marks: deque[tuple[float, int, int]] = field(default_factory=deque)

    def refresh(self) -> None:
        """Read the workers' rows. Raises the queue's errors."""
        status = list(tq.kv_list("status").get("status", {}).values())
        now = time.monotonic()
        by_name = {name: [tag for tag in status if tag["worker"] == name] for name in self.settings.worker_names}
        self.workers = {name: _state(name, lives, now) for name, lives in by_name.items() if lives}
        for tag in sorted(by_name["trainer"], key=lambda tag: int(tag["life"])):  # what the latest one says counts
            for name in ("phase", "updates", "solved", "examples", "midway", "weights"):
                setattr(self, name, tag.get(name, getattr(self, name)))
        self._read_pauses([tag for name in self.settings.rollout_names for tag in by_name[name] if "paused_s" in tag])
        self._read_metrics(max((tag.get(TRAINED, -1) for tag in by_name["trainer"]), default=-1))
        for incident in self.incidents:
            for tag in by_name.get(incident.name, []):  # the service is no worker
                if tag["life"] >= incident.life and incident.worked_s is None:
                    incident.worked_s = tag.get("worked_at")
        if self.metrics:
            self.flight.append((now, self._count_rows()))
        self._marks.append((now, sum(state.nbytes for state in self.workers.values()), self.trained_rows))
        while self._marks[-1][0] - self._marks[0][0] > _WINDOW_S:
            self._marks.popleft()

    def _read_pauses(self, ended: Sequence[Mapping[str, Any]]) -> None:
        self.paused_s = sum(tag["paused_s"] for tag in ended) / max(1, len(ended))
        self.longest_pause_s = max((tag["longest_pause_s"] for tag in ended), default=0.0)

    def _count_rows(self) -> int:
        """Samples in the store: made, and not cleared by the trainer yet."""
        client = tq.get_client()
        steps = range(self.step, min(self.step + self.settings.max_lag + 1, self.settings.steps))
        found = [client.get_partition(train_partition(step)) for step in steps]
        return sum(one["rows"] for one in found if one is not None)

    def _read_metrics(self, last: int) -> None:
        new = [str(version) for version in range(len(self.metrics), last + 1)]
        if new:
            rows = tq.kv_batch_get(keys=new, partition_id="metrics", select_fields=["values"])["values"]
            self.metrics += [row.numpy().copy() for row in rows.unbind()]

    def read_spans(self) -> dict[str, Floats]:
        """Per worker, (k, 4): start, end, Doing, rows finished; ordered by time."""
        rows = tq.kv_list("spans").get("spans", {})
        found: dict[str, list[Floats]] = {}
        if rows:
            columns = tq.kv_batch_get(keys=list(rows), partition_id="spans", select_fields=["spans"])["spans"]
            for tag, spans in zip(rows.values(), columns.unbind(), strict=True):
                found.setdefault(tag["worker"], []).append(spans.numpy().copy())
        joined = {name: np.concatenate(parts) for name, parts in found.items()}
        return {name: spans[spans[:, 0].argsort(kind="stable")] for name, spans in sorted(joined.items())}

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return max(0, len(self.metrics) - 1)

    @property
    def trained_rows(self) -> int:
        """Samples of the steps that are done."""
        return self.step * self.settings.rows_per_step

    @property
    def rows_in_flight(self) -> int:
        """Samples between rollout and trainer."""
        return self.flight[-1][1] if self.flight else 0

    @property
    def rates(self) -> tuple[float, float]:
        """(bytes per second in and out of all workers, samples trained per second), over the last seconds."""
        if not self._marks:
            return 0.0, 0.0
        (first_s, first_nbytes, first_rows), (last_s, last_nbytes, last_rows) = self._marks[0], self._marks[-1]
        elapsed_s = last_s - first_s
        if elapsed_s <= 0:
            return 0.0, 0.0
        return (last_nbytes - first_nbytes) / elapsed_s, (last_rows - first_rows) / elapsed_s

    def column(self, name: str) -> Floats:
        """One metric of every version."""
        index = METRICS.index(name)
        return np.array([row[index] for row in self.metrics], dtype=np.float64)

    def latest(self, name: str, count: int = 1) -> float:
        """Mean of the last `count` measured values, NaN when there is none."""
        values = self.column(name)
        values = values[~np.isnan(values)][-count:]
        return float(values.mean()) if len(values) else math.nan

    def start_accuracy(self) -> float:
        """Held-out accuracy right after the warm start."""
        values = self.column("accuracy")
        return float(values[0]) if len(values) else math.nan
