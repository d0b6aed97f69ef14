"""What `init` needs of a launcher; there is one for this host and one for a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire.address import Address


class RunningService(Protocol):
    """A service that this process started and owns."""

    @property
    def addresses(self) -> Sequence[Address]:
        """Where this process attaches, the best one first."""

    def stop(self) -> None:
        """End it and wait, at most some seconds. Does not raise; does nothing in a forked child of the owner."""


class Launcher(Protocol):
    """Finds the service of a run directory or cluster, or starts it."""

    @property
    def has_hosts(self) -> bool:
        """Whether the service may span several hosts."""

    def find(self) -> Sequence[Address]:
        """Where this process attaches to the running service, the best address first; empty when none runs.

        Waits for one that is being started. Raises `ServiceUnavailable` when that takes too long.
        """

    def launch(self, config: ServerConfig) -> RunningService | None:
        """Start the service; None when another process was faster: then `find` it. Raises `ServiceUnavailable`."""
