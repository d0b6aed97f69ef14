"""What `top` sees: an overview of the service each second, and why there is none while it is stopped or gone."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from transfer_queue.cli.attaching import remedied
from transfer_queue.errors import DeadlineExceeded, TransferQueueError, error_from_code

if TYPE_CHECKING:
    from transfer_queue.client.connection import Connection
    from transfer_queue.wire import messages as m

MOST = 64  # waiting requests and leases
PATIENCE_S = 1.0
STILL_S = 1.5  # an answer that takes longer is told of
STILL = "no answer: the service is stopped (SIGCONT wakes it) or busy"
FOREVER_S = 1e6
Counts: TypeAlias = dict[tuple[str, str, int], int]  # by partition, its field or task, and its life


class Rates(NamedTuple):
    """A second's changes, by (partition, field) and (partition, task): rows that were written and used, cleared ones
    too, but for what a partition got between the last look and its end. `requests` of all clients."""

    requests: float
    written: dict[tuple[str, str], float]
    consumed: dict[tuple[str, str], float]


class Sight(NamedTuple):
    """`overview`: the last one, None where there was none yet, `rates` since the one before it. `trouble`: why there
    has been no newer one for `silent_s` ("": there is no trouble). `note`: what happened to the service last."""

    address: str
    overview: m.ServiceOverview | None
    rates: Rates | None
    trouble: str
    silent_s: float
    note: str


class Observer:
    """Looks at the service that `chosen` names, each `interval_s`, in a thread of its own; `ring` is called there when
    there is something new in `sight`.

    A service that stands still is waited for, one that is gone is looked for again, at the same address or, where
    `chosen` finds another one, there. Nothing is raised: `Sight.trouble` says it.
    """

    def __init__(self, chosen: Callable[[], str], interval_s: float, ring: Callable[[], None]) -> None:
        self._chosen = chosen
        self._interval_s = interval_s
        self._ring = ring
        self._address = ""
        self._connection: Connection | None = None
        self._rids = itertools.count(1)
        self._service = b""
        self._last: m.ServiceOverview | None = None
        self._last_at = time.monotonic()
        self._asked_at: float | None = None  # and not answered yet
        self._rates: Rates | None = None
        self._trouble = self._note = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._observe, name="tq-top", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        connection = self._connection
        if connection is not None:
            connection.shut()
        self._thread.join(3 * PATIENCE_S)

    def sight(self) -> Sight:
        """What is known now."""
        now, asked_at = time.monotonic(), self._asked_at
        still = asked_at is not None and now - asked_at > STILL_S
        trouble = self._trouble or (STILL if still else "")
        silent_s = now - self._last_at if trouble else 0.0
        return Sight(self._address, self._last, None if trouble else self._rates, trouble, silent_s, self._note)

    def _observe(self) -> None:
        while not self._ended.is_set():
            self._look()
            if not self._ended.is_set():
                self._ring()
            self._ended.wait(max(PATIENCE_S, self._interval_s) if self._trouble else self._interval_s)
        self._leave()

    def _look(self) -> None:
        try:
            with remedied():
                self._ask(self._connection or self._attach())
            self._trouble = ""
        except DeadlineExceeded:  # of a greeting
            self._trouble = STILL
        except (TransferQueueError, OSError) as error:
            self._trouble = str(error).splitlines()[0]
            self._leave()
        self._asked_at = None

    def _ask(self, connection: Connection) -> None:
        """Take an overview, however long it takes: an answer that comes late is one, and `shut` ends the wait."""
        from transfer_queue.wire import messages as m

        request = m.DescribeService(next(self._rids), MOST)
        self._asked_at = time.monotonic()
        reply: Any = connection.call(request, None, FOREVER_S)[0]
        if isinstance(reply, m.Failed):
            raise error_from_code(reply.code, reply.text)
        now = time.monotonic()
        self._rates = None if self._last is None else rates_between(self._last, reply, now - self._last_at)
        self._last, self._last_at = reply, now

    def _attach(self) -> Connection:
        from transfer_queue.client.connection import Connection
        from transfer_queue.wire.address import parse_address

        self._address = self._chosen()
        found = Connection(parse_address(self._address), secrets.token_bytes(16), PATIENCE_S)
        if self._service and found.welcome.service != self._service:
            self._note = f"started anew at {time.strftime('%H:%M:%S')}"
            self._last = self._rates = None
        elif self._service:
            self._note = f"came back at {time.strftime('%H:%M:%S')}"
        self._service, self._connection = found.welcome.service, found
        return found

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


def rates_between(before: m.ServiceOverview, after: m.ServiceOverview, seconds: float) -> Rates:
    """By how much counts grew, per second. A partition that began anew is one that was not there before."""

    def grown(old: Counts, new: Counts) -> dict[tuple[str, str], float]:
        return {key[:2]: max(0, count - old.get(key, 0)) / seconds for key, count in new.items()}

    requests = max(0, after.server["requests"] - before.server["requests"]) / seconds
    return Rates(requests, grown(_written(before), _written(after)), grown(_consumed(before), _consumed(after)))


def _written(seen: m.ServiceOverview) -> Counts:
    return {
        (part.name, field.name, part.life): count
        for part in seen.partitions
        for field, count in zip(part.fields, part.written_in_all, strict=True)
    }


def _consumed(seen: m.ServiceOverview) -> Counts:
    return {(part.name, task.name, part.life): task.consumed_in_all for part in seen.partitions for task in part.tasks}


class Bell:
    """Wakes a thread that waits for descriptors (`fileno`), from another thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._write, b"!")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def __enter__(self) -> Bell:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read)
        os.close(self._write)
