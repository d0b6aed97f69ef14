"""Memory of other processes, read by this one through the job's transport, and its own that they read."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transfer_queue.background_call import Helpers
from transfer_queue.client.images import Image, Wanted
from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.pool import Pool
from transfer_queue.storage.engines.sealed import Ranges
from transfer_queue.storage.in_time import OpenedOnce, left_until
from transfer_queue.storage.transports import GuardedTransport, RemoteSpan
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, host_towards

CLOSE_S = 5.0
UNITS = 4  # that are read from at the same time


def _opened(told: Mapping[str, Any] | None, server: Address, timeout_s: float) -> GuardedTransport:
    assert told is not None
    host = str(told["host"]) if server.is_local else host_towards(server)
    return GuardedTransport(told["name"], told["settings"], host, timeout_s)


class TransportAccess:
    """The transport that the `server` told of (None: bytes come over the service's connections), opened on first use.
    For many threads.

    Calls raise `ServiceUnavailable` when the other process does not answer in time or the transport is not installed
    here, and `NotReached`, which is one, when there is nothing to be read.
    """

    def __init__(self, told: Mapping[str, Any] | None, server: Address, pool: Pool) -> None:
        self._told = told
        self._pool = pool
        name = "" if told is None else str(told["name"])
        self._transport = OpenedOnce(name, functools.partial(_opened, told, server))

    def __bool__(self) -> bool:
        return self._told is not None

    def read(self, wanted: Sequence[tuple[m.Registered, Wanted]], timeout_s: float) -> list[Bytes]:
        """Each block as memory of its size, of which what the rows need is there."""
        deadline = time.monotonic() + timeout_s
        images = [(lies, Image(one, self._pool.allocate(one.nbytes))) for lies, one in wanted]
        self._fetch([(lies, image, image.first()) for lies, image in images], deadline)
        self._fetch([(lies, image, image.rest()) for lies, image in images], deadline)
        return [image.memory for _, image in images]

    def _fetch(self, wanted: Sequence[tuple[m.Registered, Image, Ranges]], deadline: float) -> None:
        """Read these ranges of each image, from all units at once."""
        by_endpoint: dict[str, list[tuple[m.Registered, Image, Ranges]]] = {}
        for lies, image, ranges in wanted:
            if ranges:
                by_endpoint.setdefault(lies.endpoint, []).append((lies, image, ranges))

        def read(endpoint: str) -> None:
            mine = by_endpoint[endpoint]
            spans = [
                RemoteSpan(lies.address + first, image.memory[first:end])
                for lies, image, ranges in mine
                for first, end in ranges
            ]
            into = [image.memory for _, image, _ in mine]
            self._transport.get(left_until(deadline)).read(endpoint, spans, into, left_until(deadline))

        if len(by_endpoint) < 2:
            for endpoint in by_endpoint:
                read(endpoint)
            return
        with Helpers(UNITS, thread_name_prefix="tq-transport") as readers:
            list(readers.map(read, by_endpoint))

    @contextlib.contextmanager
    def lent(self, memory: Bytes, timeout_s: float) -> Iterator[m.Registered]:
        """Where others read it meanwhile."""
        deadline = time.monotonic() + timeout_s
        opened = self._transport.get(timeout_s)
        with opened.lent(memory, left_until(deadline)) as address:
            yield m.Registered(opened.endpoint, address)

    def close(self) -> None:
        opened = self._transport.taken()
        if opened is not None:
            opened.close(CLOSE_S)
