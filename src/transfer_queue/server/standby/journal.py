"""Records in memory that two processes share: one appends, the other reads when the first one is gone."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator

import msgspec

from transfer_queue.memory import memfd
from transfer_queue.server.standby.records import Record, decode, encode

log = logging.getLogger("transfer_queue.server")

SIZE = 4 << 30  # of addresses: untouched pages cost nothing
HEAD_NBYTES = 64
END, USELESS = 0, 1  # words of the head
LENGTH_NBYTES = 4
# A journal is replaced when it is so long: to replay an entry takes about 10 us, and nobody is answered meanwhile.
MAX_RECORDS, MAX_NBYTES = 10_000, 64 << 20


class JournalUseless(Exception):
    """The journal does not say all that happened, so nobody may act on it."""


class Succession:
    """Which standby is the one to take over: one machine word, so that it is never two of them nor none."""

    def __init__(self) -> None:
        self._words = shared(mmap.PAGESIZE).cast("Q")

    @property
    def current(self) -> int:
        """The number of its journal; 0 before the first."""
        return int(self._words[0])

    def appoint(self, number: int) -> None:
        """From now on it is this one's turn, and no other's."""
        self._words[0] = number


class Journal:
    """An event counts from the store of one machine word on: who is killed while it is written leaves none of it."""

    def __init__(self, number: int = 1, size: int = SIZE) -> None:
        self.number = number
        self._size = size
        self._memory = shared(size)
        self._words = self._memory[:HEAD_NBYTES].cast("Q")  # an item is stored whole: who is killed leaves no half
        self._at = self._words[END] = HEAD_NBYTES
        self.num_records = 0

    def write(self, event: list[Record]) -> bool:
        """All of an event, which has happened then, or nothing of it. Written together, records cost half as much.
        Gives whether a new standby should begin a new journal, at the next occasion."""
        try:
            data = encode(event)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
            # A journal is no reason to fail a request.
            log.exception("not in the journal: %s", [type(record).__name__ for record in event])
            self.leave()
            return True
        start = self._at + LENGTH_NBYTES
        end = start + len(data)
        if end > self._size:
            self.leave()
            return True
        self.num_records += len(event)
        self._memory[self._at : end] = len(data).to_bytes(LENGTH_NBYTES, "little") + data
        self._words[END] = self._at = end
        return self.num_records > MAX_RECORDS or end > MAX_NBYTES or self._words[USELESS] != 0

    def leave(self) -> None:
        """Something happened that is not in it: nobody may act on it any more."""
        self._words[USELESS] = 1

    @property
    def is_useless(self) -> bool:
        return bool(self._words[USELESS])

    def records(self) -> Iterator[Record]:
        """What was written, in order. Raises `JournalUseless`."""
        if self.is_useless:
            raise JournalUseless("something happened that is not in the journal")
        at, end = HEAD_NBYTES, self._words[END]
        while at < end:
            start = at + LENGTH_NBYTES
            at = start + int.from_bytes(self._memory[at:start], "little")
            yield from decode(self._memory[start:at])

    def close(self) -> None:
        """Give the memory back, as far as this process holds it."""
        self._words.release()
        self._memory.release()


def shared(nbytes: int) -> memoryview:
    """Zeros that a child forked from now on shares with this process; they last as long as one of the two looks."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | memfd.MAP_NORESERVE))
