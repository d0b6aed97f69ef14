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

    def __init__(self) -> None:
        self.nbytes = 0
        self.version = ""


@contextmanager
def activity(name: str) -> Iterator[Activity]:
    """Record what is done within a `with` as one span. Does nothing else, whatever happens there."""
    about = Activity()
    if not switch.is_on:
        yield about
        return
    started, failed = time.monotonic_ns(), ""
    telemetry = switch.telemetry
    span = None if telemetry is None else telemetry.span(name, "")
    try:
        yield about
    except BaseException as error:
        failed = type(error).__name__
        if telemetry is not None:
            telemetry.fail(span, error)
        raise
    finally:
        if switch.recorder is not None:
            ended = time.monotonic_ns()
            switch.recorder.add((_span, name, started, ended, threading.get_ident(), about, failed))
        if telemetry is not None:
            telemetry.end(span, {"tq.nbytes": about.nbytes, "tq.weights.version": about.version})


def _span(name: str, started: int, ended: int, thread: int, about: Activity, error: str) -> TraceSpan:
    return TraceSpan(started, ended - started, thread, name, nbytes=about.nbytes, error=error, version=about.version)
