"""A rollout worker's model: generates token by token, while new weights arrive and are committed between two tokens."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from types import TracebackType

import torch
from torch import Tensor

from demo.line import Line
from demo.model import Cache, Generation, Policy, Shape, generate
from transfer_queue.weights import Control, Gate, Receiver, Spans, Swap
from transfer_queue.weights.receive.receiver import VersionInfo
from transfer_queue.weights.transport import registry

_PAUSE_TIMEOUT_S = 30.0


class Freezing(Control):
    """Freezes generation around the commit: requests keep the tokens they have, and go on with the new weights."""

    longest_pause_s = total_pause_s = 0.0

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]  # those of Control
        self._committed = threading.Condition()
        self.pauses: deque[tuple[float, float]] = deque()
        """From when to when; whoever reads them takes them out."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        start = time.monotonic()
        self.pause_generation("keep")
        try:
            super().finish_weight_update(weight_version)
        finally:
            self.resume_generation()
            end = time.monotonic()
            self.pauses.append((start, end))
            self.longest_pause_s = max(self.longest_pause_s, end - start)
            self.total_pause_s += end - start
        with self._committed:
            self._committed.notify_all()

    def wait_for(self, version: int, timeout_s: float) -> bool:
        """Block until these weights or newer ones are here; whether they are."""
        with self._committed:
            return self._committed.wait_for(lambda: (self.status().installed.version or 0) >= version, timeout_s)


class Replica:
    """A context. The trainer that knows `token` reaches it at `address`.

    `run_id`: what rows say of the weights that made them, whichever life of the trainer has sent these.
    """

    def __init__(self, shape: Shape, token: str, run_id: str = "") -> None:
        self._gate = Gate()
        self._receiver = Receiver(Swap(Policy(shape)))
        self._engine = registry.engine("shm")(self._receiver)
        self.control = Freezing(self._engine, self._receiver, generation=self._gate, pause_timeout_s=_PAUSE_TIMEOUT_S)
        self._line = Line(self.control, token)
        self._shape = shape
        self._run_id = run_id
        self._numbers = itertools.count()
        self.address = self._line.address

    def generate(self, prompts: Tensor, temperature: float, generator: torch.Generator) -> tuple[Generation, Spans]:
        """One response to each prompt, and which weights made which of its tokens."""
        spans = Spans()
        with self._gate.request(str(next(self._numbers))) as request:

            def forward(tokens: Tensor, cache: Cache) -> Tensor:
                with request.step(), self._receiver.reading() as live:
                    logits: Tensor = live.module(tokens, cache)
                spans.add(VersionInfo(live.tag.version, self._run_id))
                return logits

            return generate(forward, self._shape, prompts, temperature, generator), spans

    def pauses_within(self, start: float, end: float) -> list[tuple[float, float]]:
        """When generation was frozen between these moments. Earlier pauses are forgotten."""
        found = []
        pauses = self.control.pauses
        while pauses and pauses[0][0] < end:
            first, last = pauses.popleft()
            if last > start:
                found.append((max(first, start), min(last, end)))
        return found

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._line.close()
        self._engine.shutdown()
