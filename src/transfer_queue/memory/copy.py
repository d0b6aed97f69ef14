"""Copies at memory speed: large ones are split between threads, which leave the interpreter meanwhile."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import numpy as np

from transfer_queue.background_call import Helpers
from transfer_queue.memory.bytes import PAGE, Bytes, Ints, address_of
from transfer_queue.memory.processors import usable_processors

T = TypeVar("T")
THREADED_NBYTES = 4 << 20
DIRECT_NBYTES = 256 << 10
Move = tuple[int, int, int]  # destination address, source address, bytes
Take = tuple[Bytes, Bytes, Ints]  # 2-D destination, 2-D source, which rows of it
_memmove_held = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)  # keeps the interpreter lock: giving it up costs more than a small copy


class Mover:
    """Copies bytes; splits large work between the calling thread and helpers. Usable from many threads."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._helpers = max(0, (num_threads or min(4, math.ceil(usable_processors()))) - 1)
        self._pool: Helpers | None = None
        self._workers: Helpers | None = None
        self._pid = 0
        self._lock = threading.RLock()  # once the main thread has ended, what `start` is given is done within it

    def move(self, moves: Sequence[Move], takes: Sequence[Take] = ()) -> None:
        """Carry out all moves and takes. The caller keeps both sides alive; large copies leave the interpreter."""
        large = [move for move in moves if move[2] >= DIRECT_NBYTES]
        total = sum(nbytes for _, _, nbytes in large) + sum(into.nbytes for into, _, _ in takes)
        if total < THREADED_NBYTES or not self._helpers:
            return carry_out(moves, takes)
        num_shares = self._helpers + 1
        shares = _split(large, num_shares)
        parts = [[_rows_of(take, share, num_shares) for take in takes] for share in range(num_shares)]
        small = [move for move in moves if move[2] < DIRECT_NBYTES] if len(large) < len(moves) else []
        shares[0] = [*small, *shares[0]]
        works = [functools.partial(carry_out, *share) for share in zip(shares, parts, strict=True)]
        self.together(works)
        return None

    @property
    def num_threads(self) -> int:
        """How many work at once, the caller's included."""
        return self._helpers + 1

    def together(self, works: Sequence[Callable[[], None]]) -> None:
        """Run all of them, the first in this thread; what one raises, or an interrupt, is raised once all have ended:
        they write where the caller goes on."""
        others: list[Future[None]] = []
        try:
            others += [self._helper().submit(work) for work in works[1:]]
            works[0]()
        finally:
            _end(others)
        for other in others:
            other.result()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Run `work`, which moves bytes, in a thread. More at once than copy well would keep the processors from an
        event loop that waits for them."""
        with self._lock:
            self._leave_to_parent()
            if self._workers is None:
                self._workers = Helpers(max(1, self._helpers), thread_name_prefix="tq-work")
            return self._workers.submit(work)

    def close(self) -> None:
        """End the threads, once what was started is done."""
        with self._lock:
            self._leave_to_parent()
            pools = (self._workers, self._pool)
            self._workers = self._pool = None
        for pool in pools:
            if pool is not None:
                pool.shutdown()

    def _helper(self) -> Helpers:
        with self._lock:
            self._leave_to_parent()
            if self._pool is None:
                self._pool = Helpers(self._helpers, thread_name_prefix="tq-copy")
            return self._pool

    def _leave_to_parent(self) -> None:
        """A forked child has none of the threads."""
        if self._pid != os.getpid():
            self._pid, self._pool, self._workers = os.getpid(), None, None


class Copies:
    """The copies of one read. `run` carries out the large ones together, so that threads share them evenly."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._moves: list[Move] = []
        self._takes: list[Take] = []
        self._alive: list[object] = []

    def copy(self, into: Bytes, source: Bytes) -> None:
        """`into[...] = source` for arrays of one shape, by the end of `run`."""
        if source.nbytes < DIRECT_NBYTES or not (into.flags.c_contiguous and source.flags.c_contiguous):
            np.copyto(into, source)
        else:
            self._moves.append((address_of(into), address_of(source), source.nbytes))
            self._alive.append((into, source))  # which may be made for this copy alone

    def collect(self, into: Bytes, sources: Sequence[int], sizes: Sequence[int], owners: object) -> None:
        """Bytes from many addresses, one after the other, fill `into` by the end of `run`. `owners` keep them alive."""
        self._moves += moves_into(into, sources, sizes)
        self._alive.append((into, owners))

    def take(self, into: Bytes, source: Bytes, rows: Ints) -> None:
        """`into[i] = source[rows[i]]` for 2-D arrays, by the end of `run`."""
        self._takes.append((into, source, rows))

    def run(self) -> None:
        self._mover.move(self._moves, self._takes)
        self._moves, self._takes, self._alive = [], [], []


def _end(calls: Sequence[Future[None]]) -> None:
    """Return once all have; an interrupt is raised then."""
    try:
        wait(calls)
    finally:
        if not all(call.done() for call in calls):
            _end(calls)


def moves_into(into: Bytes, sources: Sequence[int], sizes: Sequence[int]) -> list[Move]:
    """The moves that fill `into` with `sizes` bytes from each address, one after the other."""
    if sum(sizes) > into.nbytes:
        raise ValueError(f"{sum(sizes)} bytes into {into.nbytes}")
    starts = itertools.accumulate(sizes, initial=address_of(into))
    return [move for move in zip(starts, sources, sizes, strict=False) if move[2]]


def carry_out(moves: Sequence[Move], takes: Sequence[Take]) -> None:
    for into, source, nbytes in moves:
        (ctypes.memmove if nbytes >= DIRECT_NBYTES else _memmove_held)(into, source, nbytes)
    for target, lying, rows in takes:
        np.take(lying, rows, axis=0, out=target, mode="clip")  # leaves the interpreter, and runs at memcpy speed


def _rows_of(take: Take, share: int, num_shares: int) -> Take:
    """One of `num_shares` parts of the rows."""
    into, source, rows = take
    part = slice(len(rows) * share // num_shares, len(rows) * (share + 1) // num_shares)
    return into[part], source, rows[part]


def _split(moves: Sequence[Move], num_shares: int) -> list[list[Move]]:
    """Shares of about equal bytes, in order, cut at page boundaries."""
    ends = list(itertools.accumulate(nbytes for _, _, nbytes in moves))
    shares: list[list[Move]] = []
    rest = list(moves)
    done = 0  # bytes in the shares so far
    for share in range(1, num_shares):
        goal = (ends[-1] if ends else 0) * share // num_shares - done
        taken: list[Move] = []
        while rest and goal > 0:
            into, source, nbytes = rest[0]
            part = nbytes if nbytes <= goal else goal // PAGE * PAGE
            if not part:
                break
            taken.append((into, source, part))
            done, goal = done + part, goal - part
            if part == nbytes:
                rest.pop(0)
            else:
                rest[0] = (into + part, source + part, nbytes - part)
                break
        shares.append(taken)
    return [*shares, rest]
