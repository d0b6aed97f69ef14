"""Calls of a transport that end in time, with an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from transfer_queue.memory.bytes import Bytes, address_of
from transfer_queue.storage.in_time import in_time
from transfer_queue.storage.transports.transport import RemoteSpan, Transport, transport_class

T = TypeVar("T")


class GuardedTransport:
    """A transport, each of whose calls ends within its `timeout_s`. Raises `ServiceUnavailable`, of which `NotReached`
    is one, and `ConfigError` when it cannot be opened."""

    def __init__(self, name: str, settings: Mapping[str, Any], host: str, timeout_s: float) -> None:
        self.name = name
        self.transport: Transport = self._within(
            timeout_s, lambda: transport_class(name)(settings, host), lambda transport: transport.close()
        )
        self.endpoint = self.transport.endpoint

    def register(self, memory: Bytes, timeout_s: float) -> None:
        """Until it is closed."""
        self._within(timeout_s, lambda: self.transport.register(memory))

    def read(self, endpoint: str, spans: Sequence[RemoteSpan], into: Sequence[Bytes], timeout_s: float) -> None:
        """`into`: the memory that the spans are wanted in, which is registered for this read only."""

        def work() -> None:
            with ExitStack() as registered:
                for memory in into:
                    registered.enter_context(self._registered(memory))
                self.transport.read(endpoint, spans)

        self._within(timeout_s, work)

    @contextmanager
    def lent(self, memory: Bytes, timeout_s: float) -> Iterator[int]:
        """The address by which others read it meanwhile."""
        self._within(timeout_s, lambda: self.transport.register(memory), lambda _: self.transport.unregister(memory))
        try:
            yield address_of(memory)
        finally:
            self.transport.unregister(memory)

    def close(self, timeout_s: float) -> None:
        self._within(timeout_s, self.transport.close)

    @contextmanager
    def _registered(self, memory: Bytes) -> Iterator[None]:
        self.transport.register(memory)
        try:
            yield
        finally:
            self.transport.unregister(memory)

    def _within(self, timeout_s: float, work: Callable[[], T], undo: Callable[[T], None] = lambda found: None) -> T:
        return in_time(self.name, timeout_s, work, undo)
