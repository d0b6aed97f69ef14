"""Zero-copy reads: who holds which block, and putting things right when the last tensor is gone.

A view lies in the private mapping of its arena. When its last tensor is collected, the pages that were written are
dropped and the block is unpinned, in a thread of its own: collection may happen anywhere. A second view of a block
in the same process gets a private mapping of its own, so that two readers never see each other's writes.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from transfer_queue.client.arenas import MappedArenas
from transfer_queue.memory.bytes import Anchor, Bytes, address_of
from transfer_queue.memory.private_map import drop_written_pages, own_pages

POPULATE_NBYTES = 8 << 20


class Range(NamedTuple):
    arena: int
    offset: int
    nbytes: int


class BlockView(weakref.ref[Anchor]):
    """The hold on a pinned block: it goes to the reaper by itself when the last tensor over the block is gone.

    It is a weak reference, and its callback a function in C: a method that Python runs, `__del__` as well, may be
    left at its first line by an interrupt from the keyboard, and the pin would stay for as long as the process.
    """

    __slots__ = ("block", "ended", "range", "rid")

    rid: int  # the request that pinned it
    block: int
    range: Range | None  # where it lies in the arena's own private mapping
    ended: Callable[[], None] | None  # called in the reaper before the pin is released


class ViewOpened(NamedTuple):
    view: BlockView


class Views:
    """Views of one session. `unpin(rid, blocks)` tells the server what is read no longer, in the reaper thread."""

    def __init__(
        self,
        arenas: MappedArenas,
        unpin: Callable[[int, list[int]], None],
        started: Callable[[], None],
        finished: Callable[[], None],
    ) -> None:
        self._arenas = arenas
        self._unpin = unpin
        self._started = started  # called before the first view
        self._finished = finished  # called once after `close`, when no view is left
        self._closing = False
        self._open: dict[int, BlockView] = {}  # by `id`: one that is not here was given up before it was open
        self._busy: dict[Range, BlockView] = {}  # those in the private mappings of arenas
        self._notes: queue.SimpleQueue[BlockView | ViewOpened | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # re-entered when a collection runs inside
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, rid: int, block: int, arena: int, offset: int, nbytes: int) -> Bytes:
        """The bytes of a block that request `rid` has pinned once for this view; writable, seen by nobody else."""
        where = Range(arena, offset, nbytes)
        mapped = self._arenas[arena]
        with self._lock:
            if where in self._busy:
                mapping = mapped.map_private(offset, nbytes)
                return self._anchored(Anchor(address_of(mapping), nbytes, mapping), rid, block)
            return self._anchored(Anchor(mapped.private_address + offset, nbytes, mapped), rid, block, where)

    def make_private(self) -> None:
        """Give every view the bytes that it has now for good, whatever becomes of its block: for a child that is about
        to be forked. It takes as much memory as they. Memory that is being filled stays shared."""
        with self._lock:
            views = list(self._open.values())
        for view in views:
            anchor = view() if view.ended is None else None
            if anchor is not None:
                own_pages(anchor.array())

    def hold(self, rid: int, block: int, arena: int, offset: int, nbytes: int, ended: Callable[[], None]) -> Bytes:
        """The shared memory of a block that request `rid` pinned, to be filled; `ended` runs once nobody holds it."""
        mapped = self._arenas[arena]
        with self._lock:
            anchor = Anchor(address_of(mapped.writable(offset, nbytes)), nbytes, mapped)
            return self._anchored(anchor, rid, block, ended=ended)

    def _anchored(
        self, anchor: Anchor, rid: int, block: int, where: Range | None = None, ended: Callable[[], None] | None = None
    ) -> Bytes:
        self._start()
        view = BlockView(anchor, self._notes.put)
        view.rid, view.block, view.range, view.ended = rid, block, where, ended
        self._open[id(view)] = view
        if where is not None:
            self._busy[where] = view
            if where.nbytes >= POPULATE_NBYTES:
                self._notes.put(ViewOpened(view))
        return anchor.array()

    def _start(self) -> None:
        if self._thread is None or self._thread.ident is None:  # an interrupt may have come before its start
            self._started()
            self._thread = threading.Thread(target=self._reap, name="tq-reaper", daemon=True)
            self._thread.start()

    def _reap(self) -> None:
        while not (self._closing and not self._open):
            note = self._notes.get()
            if isinstance(note, ViewOpened):
                self._populate(note.view)
            elif note is not None and self._open.get(id(note)) is note:
                self._end(note)
        self._finished()

    def _populate(self, view: BlockView) -> None:
        """Map the pages ahead of the reader: a fault each costs far more."""
        if view.range is not None:
            arena, offset, nbytes = view.range
            self._arenas[arena].populate(offset, nbytes, lambda: view() is not None)

    def _end(self, view: BlockView) -> None:
        if view.range is not None:
            mapped = self._arenas[view.range.arena]
            drop_written_pages(mapped.private_address + view.range.offset, view.range.nbytes)
            with self._lock:
                if self._busy.get(view.range) is view:
                    del self._busy[view.range]
        if view.ended is not None:
            view.ended()
        with self._lock:
            del self._open[id(view)]
        self._unpin(view.rid, [view.block])

    def close(self) -> None:
        """End the reaper once no view is left; until then the pins of those that are open stay."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closing = True
            lingers = bool(self._open)
        if thread is None or self._pid != os.getpid():
            self._finished()
            return
        self._notes.put(None)
        if not lingers:
            thread.join()
