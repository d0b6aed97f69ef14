"""Worker processes that do what a driver tells them: child processes with a pipe each, or Ray actors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from demo.fleet import Fleet

Wait = Callable[[], list[Any]]
Kind = Callable[..., Any]
_GRACE_S = 10.0


class Workers(Protocol):
    """A group of workers of one kind."""

    def start(self, method: str, parts: Sequence[Any]) -> Wait:
        """Call `method(part)` of every worker, each with its own part, all at once.

        What comes back waits until all are done, and returns their results in order. One call at a time per group.
        """


Hire = Callable[[Kind, Sequence[tuple[Any, ...]]], Workers]


@contextmanager
def hiring(on_ray: bool) -> Iterator[Hire]:
    """Gives a function that makes one worker `kind(*arguments)` per element of its second argument.

    When the block ends, all workers end. With `on_ray` they are actors of the running Ray cluster, or of one that is
    started here when there is none.
    """
    if on_ray:
        import ray

        started = not ray.is_initialized()
        if started:
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        try:
            yield Actors
        finally:
            if started:
                ray.shutdown()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the children: one core each
        with tempfile.TemporaryDirectory() as logs, Fleet(Path(logs)) as fleet:
            yield partial(Children, fleet)


class Children:
    """Each worker is a child process of the driver's."""

    def __init__(self, fleet: Fleet, kind: Kind, arguments: Sequence[tuple[Any, ...]]) -> None:
        self._fleet = fleet
        self._pipes: list[Connection] = []
        for number, given in enumerate(arguments):
            ours, theirs = Pipe()
            fleet.start(f"{kind.__name__} {number}", _serve, theirs, kind, given)
            theirs.close()
            self._pipes.append(ours)

    def start(self, method: str, parts: Sequence[Any]) -> Wait:
        for pipe, part in zip(self._pipes, parts, strict=True):
            pipe.send((method, part))
        return lambda: [self._result(pipe) for pipe in self._pipes]

    def _result(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except EOFError:
            self._fleet.wait(_GRACE_S)  # raises, with what the worker printed
            raise


def _serve(pipe: Connection, kind: Kind, arguments: tuple[Any, ...]) -> None:
    """What a child does until its driver is gone."""
    worker = kind(*arguments)
    while True:
        try:
            method, part = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(worker, method)(part))


class Actors:
    """Each worker is a Ray actor that reserves nothing."""

    def __init__(self, kind: Kind, arguments: Sequence[tuple[Any, ...]]) -> None:
        import ray

        self._get = ray.get
        self._actors = [ray.remote(num_cpus=0)(kind).remote(*given) for given in arguments]

    def start(self, method: str, parts: Sequence[Any]) -> Wait:
        calls = [getattr(actor, method).remote(part) for actor, part in zip(self._actors, parts, strict=True)]
        return lambda: list(self._get(calls))
