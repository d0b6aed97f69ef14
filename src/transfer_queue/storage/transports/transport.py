"""What every transport does, and how one is opened by its name."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transfer_queue.errors import ServiceUnavailable
from transfer_queue.memory.bytes import Bytes
from transfer_queue.storage.plugins import plugin

GROUP = "transfer_queue.storage_transports"
BUILT_IN = {"Mooncake": "transfer_queue.storage.transports.mooncake:MooncakeTransport"}


class NotReached(ServiceUnavailable):
    """Nothing was read from there: the process is gone, or it lends other memory by now. Look where the rows are."""


class RemoteSpan(NamedTuple):
    """Bytes of another process's memory, from its `address` on, and where they are wanted (uint8)."""

    address: int
    into: Bytes


class Transport(abc.ABC):
    """One process's endpoint. Calls block and may come from several threads; none needs a timeout, for whoever calls
    keeps the time. After a fork the child opens one of its own; its parent's is dropped there without a `close`.

    `endpoint` is how other processes name this one. `pins_memory`: pages of memory that was registered stay where they
    are, so that none of it can be given back to the system.
    """

    endpoint: str
    pins_memory: bool = False

    @abc.abstractmethod
    def __init__(self, settings: Mapping[str, Any], host: str) -> None:
        """`host`: where other hosts reach this one. Raises `ConfigError`, and ImportError where its library is not
        installed."""

    @abc.abstractmethod
    def register(self, memory: Bytes) -> None:
        """From now on every process of the job may read it, and `read` may write into it. Ranges do not overlap."""

    @abc.abstractmethod
    def unregister(self, memory: Bytes) -> None: ...

    @abc.abstractmethod
    def read(self, endpoint: str, spans: Sequence[RemoteSpan]) -> None:
        """Fill every span, whose memory is registered, from what the process at `endpoint` has registered. Raises
        `NotReached`."""

    def close(self) -> None:  # noqa: B027  some have nothing to let go of
        """Nothing of this process can be read any more."""


def transport_class(name: str) -> type[Transport]:
    """The transport of that name: one of ours, or an entry point of the group `transfer_queue.storage_transports`.
    Raises `ConfigError`."""
    return plugin(name, Transport, BUILT_IN, GROUP, "transport")  # type: ignore[type-abstract]
