"""How many connections a server has at most, so that it always has descriptors for who is connected already."""

from __future__ import annotations

import resource
from typing import Generic, Protocol, TypeVar

from transfer_queue.errors import ConfigError

SPARE_DESCRIPTORS = 64  # for listeners, arenas, doors' visitors, metrics, checkpoints and the loop itself
LEAST_CONNECTIONS = 16  # a client has several
MAX_STRANGERS = 4096  # of other hosts, in the midst of a handshake; all come at once when a server was replaced


class Limited(Protocol):
    """A connection, as far as its number matters."""

    @property
    def is_local(self) -> bool: ...

    def abort(self) -> None: ...


T = TypeVar("T", bound=Limited)


class ConnectionLimit(Generic[T]):
    """All connections of a server, `most` at a time.

    Of those that come over TCP and have not said yet who they are, only the latest `MAX_STRANGERS` stay: a handshake
    takes milliseconds, and whoever is pushed out connects again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._links: set[T] = set()
        self._refused: set[T] = set()  # until they have been told
        self._strangers: dict[T, None] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._links)

    def links(self) -> list[T]:
        return list(self._links)

    def enter(self, link: T) -> bool:
        """Whether there is room for one more connection. One that there is none for may ask, and is told so."""
        if len(self._links) >= self._most:
            self._refused.add(link)
            if len(self._refused) > SPARE_DESCRIPTORS // 2:
                link.abort()
            return False
        self._links.add(link)
        if not link.is_local:
            self._strangers[link] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.abort()
        return True

    def known(self, link: T) -> None:
        """It has proven who it is."""
        self._strangers.pop(link, None)

    def leave(self, link: T) -> None:
        self._links.discard(link)
        self._refused.discard(link)
        self._strangers.pop(link, None)


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one (setrlimit(2)); the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def most_connections() -> int:
    """How many a server may have. Raises `ConfigError` where the limit of descriptors leaves next to none."""
    limit = raise_descriptor_limit()
    least = SPARE_DESCRIPTORS + LEAST_CONNECTIONS
    if limit < least:
        raise ConfigError(
            f"a server needs {least} descriptors at least, and may have {limit} here: raise the hard limit "
            "(`ulimit -Hn`) where it is started"
        )
    return limit - SPARE_DESCRIPTORS
