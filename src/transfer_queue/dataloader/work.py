"""What one process has of a stream, and how a loop over it ends."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterator
from typing import Any

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.dataloader.acks import Acks, Receipt
from transfer_queue.dataloader.feed import Calling, Feed
from transfer_queue.dataloader.lease_owner import LEAVE_S, LeaseOwner
from transfer_queue.errors import DeadlineExceeded, InvalidInput, ServiceError


class Work:
    """The feed, the holder of the leases, acknowledgements on their way, and what is in the consumer's hands.

    All of it belongs to the process that made it. In a forked child it is the parent's still: to end it there drops the
    child's copies of descriptors, and tells the service nothing.
    """

    def __init__(self, client: TransferQueueClient, returned: set[int]) -> None:
        """`returned` collects rows of acknowledgements that had been given back."""
        self._pid = os.getpid()
        self.client = client
        self._returned = returned
        self.holder: LeaseOwner | None = None
        self.feed: Feed | Calling | None = None
        self.running: weakref.ref[Generator[Any, None, None]] | None = None  # the iterator of `feed`
        self.items: Iterator[tuple[Any, Receipt]] | None = None
        self.in_hand: Receipt | None = None  # of the micro-batch the consumer works on, since `handed_at`
        self.handed_at = 0.0
        self.is_stalled = False  # the service did not answer as the last loop was left
        self._acks: Acks | None = None

    @property
    def is_mine(self) -> bool:
        return self._pid == os.getpid()

    def check_mine(self) -> None:
        """Raises `InvalidInput` in a forked child."""
        check_process(self._pid)

    def acks(self) -> Acks:
        if self._acks is None:
            self._acks = Acks(self.client.session, self._returned)
        return self._acks

    def confirm_pending(self) -> None:
        """Wait for the answer to the last acknowledgement. Raises `LeaseExpired` when its rows went to others."""
        if self._acks is not None:
            self._acks.confirm_pending()

    def end_acks(self, within_s: float | None = None) -> None:
        """Everything that was used is acknowledged; what was not answered in time, or until an interrupt, goes once
        more before the leases end. Raises `LeaseExpired` when it went to others."""
        acks, self._acks = self._acks, None
        if acks is not None:
            try:
                if self.is_mine:
                    acks.confirm_pending(within_s)
            finally:
                if self.holder is not None:
                    self.holder.leave_after(acks.begun)
                acks.close()

    def leave(self, feed: Feed | Calling, *, ends_leases: bool) -> None:
        """The loop over `feed` ends: its last rows are offered again. With `ends_leases` all that is leased is, and a
        next loop has another holder.

        Its thread renews nothing from the start on: all else waits for the service, where an interrupt may end it.
        """
        feed.stop()
        self.is_stalled = True
        try:
            self.end_acks(LEAVE_S)
            self.is_stalled = False
        except DeadlineExceeded:
            pass
        except ServiceError:
            self.is_stalled = False
        finally:
            if ends_leases:
                self.holder = None
            if self.is_mine:
                feed.close()
            if self.feed is feed:
                self.feed = None


def check_process(pid: int) -> None:
    """Raises `InvalidInput` in another process than that."""
    if pid != os.getpid():
        raise InvalidInput("this loop is the parent's, which works on its rows: a forked process begins one of its own")
