"""How a block lies in an engine: its bytes, then the digests that every reader compares.

An engine is another program, and may give other bytes than were written: cut short, evicted and written anew, or those
of another key. The bytes come in grains of 256 KiB, each with an xxh3-64 of its own, so that a reader of a few rows
compares what it read without reading the rest. The number of the block is the seed: the right bytes of another block
are wrong, too. After the digests lies one of the digests themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from transfer_queue.memory.bytes import Bytes

GRAIN = 256 << 10
Ranges = list[tuple[int, int]]  # (first byte, the one after the last), ascending and apart


def engine_key(service: bytes, block: int) -> str:
    """What a block is called in an engine. Numbers of blocks are never used again in a life of a service."""
    return f"tq/{service.hex()}/{block}"


def num_grains(nbytes: int) -> int:
    return -(-nbytes // GRAIN)


def tail_range(nbytes: int) -> tuple[int, int]:
    """Where the digests of a block of `nbytes` lie."""
    start = -(-nbytes // 8) * 8
    return start, start + 8 * (num_grains(nbytes) + 1)


def sealed_nbytes(nbytes: int) -> int:
    return tail_range(nbytes)[1]


def in_grains(ranges: Iterable[tuple[int, int]], nbytes: int) -> Ranges:
    """The grains that these ranges of a block touch, where they follow each other as one."""
    found: Ranges = []
    for first, end in sorted((first // GRAIN * GRAIN, end) for first, end in ranges if first < end):
        end = min(-(-end // GRAIN) * GRAIN, nbytes)
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def seal(memory: Bytes, nbytes: int, block: int, side_by_side: Callable[[Sequence[Callable[[], None]]], None]) -> None:
    """Write the digests of the first `nbytes` of `memory` behind them."""
    start, end = tail_range(nbytes)
    memory[nbytes:start] = 0
    tail = np.empty(num_grains(nbytes) + 1, np.uint64)
    data = memoryview(memory)  # type: ignore[arg-type]

    def some(first: int, last: int) -> Callable[[], None]:
        def work() -> None:
            for grain in range(first, last):
                at = grain * GRAIN
                tail[grain] = xxh3_64_intdigest(data[at : min(at + GRAIN, nbytes)], block)

        return work

    count = num_grains(nbytes)
    share = max(16, -(-count // 4))
    side_by_side([some(at, min(at + share, count)) for at in range(0, count, share)])
    tail[-1] = xxh3_64_intdigest(tail[:-1].tobytes(), block)
    memory[start:end] = tail.view(np.uint8)


def is_right(
    memory: Bytes, nbytes: int, ranges: Ranges, block: int, side_by_side: Callable[[Sequence[Callable[[], None]]], None]
) -> bool:
    """Whether these grains of a block of `nbytes`, which lies in `memory` with its digests, are what was sealed."""
    start, end = tail_range(nbytes)
    digests = memory[start:end].view(np.uint64)
    if int(digests[-1]) != xxh3_64_intdigest(digests[:-1].tobytes(), block):
        return False
    view = memoryview(memory[:nbytes])  # type: ignore[arg-type]
    grains = [grain for first, end in ranges for grain in range(first // GRAIN, num_grains(end))]
    wrong: list[int] = []

    def some(part: Sequence[int]) -> Callable[[], None]:
        def work() -> None:
            for grain in part:
                at = grain * GRAIN
                if xxh3_64_intdigest(view[at : min(at + GRAIN, nbytes)], block) != digests[grain]:
                    wrong.append(grain)

        return work

    share = max(16, -(-len(grains) // 4))
    side_by_side([some(grains[at : at + share]) for at in range(0, len(grains), share)])
    return not wrong
