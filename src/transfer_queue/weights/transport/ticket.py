"""A version that was packed and is on its way to the receivers, while its trainer goes on."""

from __future__ import annotations

from collections.abc import Callable

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.pending import SyncReport

LEAVE_S = 600.0  # every update has a deadline


class PublishTicket:
    """What `publish` returns. The weights may change; the update ends by its deadline, whether anybody asks or not."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._call: BackgroundCall[SyncReport] | None = None

    def start(self, function: Callable[[], SyncReport]) -> PublishTicket:
        """Have this go on in a thread of its own."""
        self._call = BackgroundCall("tq-weights-publish", function)
        return self

    @property
    def done(self) -> bool:
        """Whether the update has ended, well or not."""
        return self.wait(0.0)

    def wait(self, timeout_s: float = LEAVE_S) -> bool:
        """Whether it has ended within that time."""
        return self._call is not None and self._call.ended(timeout_s)

    def settle(self, deadline: Deadline) -> None:
        """Return once it has ended, well or not; `DeadlineExceeded`."""
        if not self.wait(deadline.left()):
            raise DeadlineExceeded(f"version {self.version} was on its way until the deadline")

    def result(self, timeout_s: float = 3600.0) -> SyncReport:
        """What `send_weights` would have returned, or raised. `DeadlineExceeded` when it is still on its way then."""
        if self._call is None or not self._call.ended(timeout_s):
            raise DeadlineExceeded(f"version {self.version} is still on its way after {timeout_s:g} s")
        return self._call.outcome()
