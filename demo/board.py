"""What the parent knows about a run: only what the workers put into the queue."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import transfer_queue as tq
from demo.settings import Settings
from demo.tables import METRICS

_WINDOW_S = 4.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """Totals since the worker attached; seconds of `wait_s` go on while it waits."""

    name: str
    rows: int
    nbytes: int
    work_s: float
    wait_s: float
    queue_s: float

    def shares(self) -> tuple[float, float, float]:
        """Work, queue and waiting as parts of 1; zeros before anything happened."""
        total = self.work_s + self.queue_s + self.wait_s
        return (self.work_s / total, self.queue_s / total, self.wait_s / total) if total else (0.0, 0.0, 0.0)


def _state(name: str, tag: Mapping[str, Any], now: float) -> WorkerState:
    """A worker that has been waiting since its report has waited until now."""
    idle_s = now - tag["at"] if tag["waiting"] else 0.0
    return WorkerState(
        name=name,
        rows=tag["rows"],
        nbytes=tag["nbytes"],
        work_s=tag["work_s"],
        wait_s=tag["wait_s"] + idle_s,
        queue_s=tag["queue_s"],
    )


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
    workers: dict[str, WorkerState] = field(default_factory=dict)
    metrics: list[Floats] = field(default_factory=list)
    """One vector per published version, version 0 first; columns as in METRICS."""
    _marks: deque[tuple[float, int, int]] = field(default_factory=deque)

    def refresh(self) -> None:
        """Read the workers' rows. Raises the queue's errors."""
        status = tq.kv_list("status").get("status", {})
        now = time.monotonic()
        known = [name for name in self.settings.worker_names if name in status]
        self.workers = {name: _state(name, status[name], now) for name in known}
        trainer = status.get("trainer", {})
        self.phase = trainer.get("phase", self.phase)
        self.updates = trainer.get("updates", self.updates)
        self.solved = trainer.get("solved", self.solved)
        self.examples = trainer.get("examples", self.examples)
        ended = [status[name] for name in self.settings.rollout_names if "paused_s" in status.get(name, {})]
        self.paused_s = sum(tag["paused_s"] for tag in ended) / max(1, len(ended))
        self.longest_pause_s = max((tag["longest_pause_s"] for tag in ended), default=0.0)
        self.midway = trainer.get("midway", self.midway)
        self._read_metrics(trainer.get("step", -1))
        self._marks.append((now, sum(state.nbytes for state in self.workers.values()), self.trained_rows))
        while self._marks[-1][0] - self._marks[0][0] > _WINDOW_S:
            self._marks.popleft()

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
        """Samples that the trainer is done with."""
        return self.workers["trainer"].rows if "trainer" in self.workers else 0

    @property
    def rows_in_flight(self) -> int:
        """Samples between rollout and trainer, by the latest reports."""
        made = sum(state.rows for name, state in self.workers.items() if name in self.settings.rollout_names)
        return max(0, made - self.trained_rows)

    @property
    def rates(self) -> tuple[float, float]:
        """(bytes per second in and out of all workers, samples trained per second), over the last seconds."""
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
