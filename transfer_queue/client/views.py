"""Zero-copy reads: who holds which block, and putting things right when the last tensor is gone.

A view lies in the private mapping of its arena. When its last tensor is collected, the pages that were written are
dropped and the block is unpinned, in a thread of its own: collection may happen anywhere. A second view of a block
in the same process gets a private mapping of its own, so that two readers never see each other's writes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from transfer_queue.client.mapping import Arena, Arenas, drop_written_pages
from transfer_queue.codec.layout import Bytes
from transfer_queue.codec.memory import Anchor, address_of

POPULATE_NBYTES = 8 << 20


class Range(NamedTuple):
    arena: int
    offset: int
    nbytes: int


class Ended(NamedTuple):
    """The last tensor over a pinned block is gone. `range` is set when it lay in the arena's own private mapping."""

    rid: int  # the request that pinned it
    block: int
    range: Range | None = None
    ended: Callable[[], None] | None = None  # called in the reaper before the pin is released


class Opened(NamedTuple):
    range: Range


class Views:
    """Views of one session. `unpin(rid, blocks)` tells the server what is read no longer, in the reaper thread."""

    def __init__(
        self,
        arenas: Arenas,
        unpin: Callable[[int, list[int]], None],
        started: Callable[[], None],
        finished: Callable[[], None],
    ) -> None:
        self._arenas = arenas
        self._unpin = unpin
        self._started = started  # called before the first view
        self._finished = finished  # called once after `close`, when no view is left
        self._closing = False
        self._busy: set[Range] = set()
        self._ending: set[Range] = set()  # their last tensor is gone, the reaper has yet to come by
        self._notes: queue.SimpleQueue[Ended | Opened | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # re-entered when a collection runs inside
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.num_open = 0

    def open(self, rid: int, block: int, arena: int, offset: int, nbytes: int) -> Bytes:
        """The bytes of a block that request `rid` has pinned once for this view; writable, seen by nobody else."""
        where = Range(arena, offset, nbytes)
        lying = self._arenas[arena]
        with self._lock:
            self._start()
            self.num_open += 1
            if where in self._busy:
                return self._own_mapping(Ended(rid, block), lying, where)
            self._busy.add(where)
        if nbytes >= POPULATE_NBYTES:
            self._notes.put(Opened(where))
        return self._anchor(lying.private_address + offset, nbytes, lying, Ended(rid, block, where))

    def hold(self, rid: int, block: int, arena: int, offset: int, nbytes: int, ended: Callable[[], None]) -> Bytes:
        """The shared memory of a block that request `rid` pinned, to be filled; `ended` runs once nobody holds it."""
        lying = self._arenas[arena]
        with self._lock:
            self._start()
            self.num_open += 1
        return self._anchor(address_of(lying.writable(offset, nbytes)), nbytes, lying, Ended(rid, block, None, ended))

    def _own_mapping(self, note: Ended, lying: Arena, where: Range) -> Bytes:
        mapping = lying.map_private(where.offset, where.nbytes)
        return self._anchor(address_of(mapping), where.nbytes, mapping, note)  # type: ignore[arg-type]

    def _anchor(self, address: int, nbytes: int, owner: object, note: Ended) -> Bytes:
        pid, notes, ending = self._pid, self._notes, self._ending

        def released() -> None:
            if os.getpid() == pid:  # a forked child holds the pins of its parent's views through its own session
                if note.range is not None:
                    ending.add(note.range)
                notes.put(note)

        return Anchor(address, nbytes, owner, released).array()

    def _start(self) -> None:
        if self._thread is None:
            self._started()
            self._thread = threading.Thread(target=self._reap, name="tq-reaper", daemon=True)
            self._thread.start()

    def _reap(self) -> None:
        while not (self._closing and not self.num_open):
            note = self._notes.get()
            if isinstance(note, Opened):
                self._populate(note.range)
            elif note is not None:
                self._end(note)
        self._finished()

    def _populate(self, where: Range) -> None:
        """Map the pages ahead of the reader: a fault each costs far more."""
        self._arenas[where.arena].populate(
            where.offset, where.nbytes, lambda: where in self._busy and where not in self._ending
        )

    def _end(self, note: Ended) -> None:
        if note.range is not None:
            lying = self._arenas[note.range.arena]
            drop_written_pages(lying.private_address + note.range.offset, note.range.nbytes)
            with self._lock:
                self._busy.discard(note.range)
                self._ending.discard(note.range)
        if note.ended is not None:
            note.ended()
        with self._lock:
            self.num_open -= 1
        self._unpin(note.rid, [note.block])

    def close(self) -> None:
        """End the reaper once no view is left; until then the pins of those that are open stay."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closing = True
            lingers = self.num_open > 0
        if thread is None or self._pid != os.getpid():
            self._finished()
            return
        self._notes.put(None)
        if not lingers:
            thread.join()
