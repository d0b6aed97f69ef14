"""A stretch of work that is no operation of a client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from transfer_queue.trace import switch
from transfer_queue.trace.lines import TraceSpan


class Activity:
    """What is known of it only while it goes on: how many bytes, and which version of weights."""

    def __init__(self, name: str) -> None:
        self.nbytes = 0
        self.version = ""
        self.error = ""
        self.thread = threading.get_ident()
        self._name = name
        self._started = self._ended = time.monotonic_ns()

    def end(self) -> None:
        self._ended = time.monotonic_ns()

    def span(self) -> TraceSpan:
        """It, as it is recorded."""
        length = self._ended - self._started
        return TraceSpan(
            self._started, length, self.thread, self._name, nbytes=self.nbytes, error=self.error, version=self.version
        )


@contextmanager
def activity(name: str) -> Iterator[Activity]:
    """Record what is done within a `with` as one span. Does nothing else, whatever happens there."""
    about = Activity(name)
    telemetry = switch.telemetry
    span = None if telemetry is None else telemetry.span(name, "")
    try:
        yield about
    except BaseException as error:
        about.error = type(error).__name__
        if telemetry is not None:
            telemetry.fail(span, error)
        raise
    finally:
        about.end()
        if switch.recorder is not None:
            switch.recorder.add(about)
        if telemetry is not None:
            telemetry.end(span, {"tq.nbytes": about.nbytes, "tq.weights.version": about.version})
