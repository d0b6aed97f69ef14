"""Who reads which blocks. A pin is named by the session and the request that made it: when it is released twice, by its
last view and because its request is cancelled, nobody else's is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

NO_REQUEST = 0  # in place of a request: what a server pins for itself, or a child took over from its parent


class Pins:
    """Pinned blocks by session and request, with how often: a request may pin a block several times.

    Plain dicts: a read of rows that were put alone pins a block for each, and a Counter takes three times as long.
    """

    def __init__(self) -> None:
        self._by_session: dict[bytes, dict[int, dict[int, int]]] = {}

    def add(self, number: int, session: bytes, rid: int) -> None:
        held = self._by_session.setdefault(session, {}).setdefault(rid, {})
        held[number] = held.get(number, 0) + 1

    def remove(self, number: int, session: bytes, rid: int) -> bool:
        """Whether there was such a pin, which is no more."""
        requests = self._by_session.get(session, {})
        held = requests.get(rid)
        if held is None or number not in held:
            return False
        held[number] -= 1
        if not held[number]:
            del held[number]
        if not held:
            del requests[rid]
        if not requests:
            del self._by_session[session]
        return True

    def of_request(self, session: bytes, rid: int) -> list[int]:
        """The blocks of one request, once for each pin."""
        return _elements(self._by_session.get(session, {}).get(rid, {}))

    def end(self, session: bytes) -> Iterable[int]:
        """The blocks of a session, once for each of its pins, which are no more."""
        requests = self._by_session.pop(session, {})
        return [number for held in requests.values() for number in _elements(held)]

    def holds(self, number: int, session: bytes) -> bool:
        return any(number in held for held in self._by_session.get(session, {}).values())

    def of(self, session: bytes) -> set[int]:
        return {number for held in self._by_session.get(session, {}).values() for number in held}

    def sessions(self) -> Iterator[tuple[bytes, set[int]]]:
        """The blocks of each session."""
        for session in self._by_session:
            yield session, self.of(session)

    def counts(self) -> Counter[int]:
        """How many pins every block has."""
        total: Counter[int] = Counter()
        for requests in self._by_session.values():
            for held in requests.values():
                total.update(held)
        return total


def _elements(held: dict[int, int]) -> list[int]:
    """Each number as often as it is pinned."""
    return [number for number, times in held.items() for _ in range(times)]
