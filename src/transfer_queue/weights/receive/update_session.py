"""One update of a receiver: whose it is, how far it has come, until when it may go on, and why it ended.

The receiver owns it. Servers, engines and fleets ask it; nobody else keeps that an update is open.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from transfer_queue.errors import Aborted, DeadlineExceeded, NotOpen, TransferQueueError, WrongEpoch
from transfer_queue.weights.receive.staging import Staging
from transfer_queue.weights.version.manifest import Contents, Manifest

CALLED_OFF = "the trainer gave it up"


class Phase(str, Enum):
    STARTED = "started"
    OPEN = "open"
    STAGED = "staged"
    READY = "ready"
    COMMITTING = "committing"
    ENDED = "ended"


class UpdateEnd(str, Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    TAKEN_OVER = "taken over"
    FAILED = "failed"
    LATE = "late"


class SessionKey(NamedTuple):
    """`update_id` counts the updates of one receiver."""

    run_id: str
    update_id: int


class OpenVersion:
    """The version of a session. `contents` is what the model will hold; `repeated` when it holds that already.
    `wanted`: the buckets that are taken here (None: all), to the host's memory if `on_host`."""

    def __init__(
        self,
        manifest: Manifest,
        contents: Contents,
        repeated: bool,
        wanted: list[int] | None = None,
        on_host: bool = False,
    ) -> None:
        self.manifest = manifest
        self.contents = contents
        self.repeated = repeated
        self.staging = Staging(manifest, wanted, on_host)
        self.verifying = threading.Lock()
        self.prepared: Any = None
        self.is_prepared = False  # what a server prepares may be None
        self.committing = False

    @property
    def phase(self) -> Phase:
        if self.committing:
            return Phase.COMMITTING
        if self.repeated or self.is_prepared:
            return Phase.READY
        return Phase.OPEN if self.staging.missing else Phase.STAGED


class UpdateSession:
    """From `Receiver.begin` (or `open`) to a commit, an abort, a fault, another run, or its deadline.

    Fields change under the receiver's lock. What it holds of a version is let go of when it ends.
    """

    def __init__(self, key: SessionKey, clock: Callable[[], float], timeout_s: float | None) -> None:
        self.key = key
        self.opened: OpenVersion | None = None
        self.end: UpdateEnd | None = None
        self.reason = ""
        self._thread = 0  # that ended it
        self._clock = clock
        self._deadline = math.inf if timeout_s is None else clock() + timeout_s
        self._watching: list[Callable[[], object]] = []

    @property
    def phase(self) -> Phase:
        if self.end is not None:
            return Phase.ENDED
        return Phase.STARTED if self.opened is None else self.opened.phase

    @property
    def manifest(self) -> Manifest | None:
        return None if self.opened is None else self.opened.manifest

    def left_s(self) -> float:
        """Seconds until it is over; 0 or less once it is."""
        return self._deadline - self._clock()

    def limit(self, timeout_s: float) -> None:
        """It is over then, or earlier."""
        self._deadline = min(self._deadline, self._clock() + timeout_s)

    def close(self, end: UpdateEnd, reason: str) -> list[Callable[[], object]]:
        """End it. Returns what has to be called for that, without the receiver's lock."""
        self.end, self.reason, self.opened, self._thread = end, reason, None, threading.get_ident()
        watching, self._watching = self._watching, []
        return watching

    @contextmanager
    def interrupting(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """When the session ends within, `interrupt` is called, by another thread: it wakes up what waits here."""
        self._watching.append(interrupt)
        if self.end is not None:
            interrupt()
        try:
            yield
        finally:
            if interrupt in self._watching:
                self._watching.remove(interrupt)

    def error(self) -> TransferQueueError:
        """Why it is over, for those that hold on to it."""
        return _ERRORS[self.end or UpdateEnd.ABORTED](f"the update was aborted: {self.reason or 'it is over'}")

    def check(self) -> None:
        """Raise once another thread has ended it."""
        if self.end not in (None, UpdateEnd.COMMITTED) and self._thread != threading.get_ident():
            raise self.error()


def timeout_of(info: object, default: float) -> float:
    """The seconds that an info gives a call; the default where it gives none, or nonsense."""
    found = info.get("timeout_s") if isinstance(info, Mapping) else None
    return float(found) if isinstance(found, (int, float)) and 0 < found < 1e6 else default


def run_of(info: object) -> str:
    """The run that an info names; "" when it names none. `epoch` is the key of earlier releases."""
    found = (info.get("run_id") or info.get("epoch") or "") if isinstance(info, Mapping) else ""
    return found if isinstance(found, str) else ""


def begun_of(info: object) -> float:
    """When the run of this info began, by its trainer's clock; 0 when it does not say."""
    found = info.get("begun") if isinstance(info, Mapping) else None
    return float(found) if isinstance(found, (int, float)) else 0.0


_ERRORS: dict[UpdateEnd, type[TransferQueueError]] = {
    UpdateEnd.COMMITTED: NotOpen,
    UpdateEnd.ABORTED: Aborted,
    UpdateEnd.TAKEN_OVER: WrongEpoch,
    UpdateEnd.FAILED: Aborted,
    UpdateEnd.LATE: DeadlineExceeded,
}
