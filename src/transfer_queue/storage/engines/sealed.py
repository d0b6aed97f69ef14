"""How a block lies in an engine: its bytes, then the digests that every reader compares.

An engine is another program, and may give other bytes than were written: cut short, evicted and written anew, or those
of another key. The bytes come in grains of 256 KiB, each with an xxh3-64 of its own, so that a reader of a few rows
compares what it read without reading the rest. The number of the block is the seed: the right bytes of another block
are wrong, too. After the digests lies one of the digests themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from xxhash import xxh3_64_intdigest

from transfer_queue.memory.bytes import Bytes

GRAIN = 256 << 10
Ranges = list[tuple[int, int]]  # (first byte, the one after the last), ascending and apart


def key_prefix(service: bytes) -> str:
    """What the names of blocks begin with in an engine, before their number. Numbers of blocks are never used again in
    a life of a service."""
    return f"tq/{service.hex()}/"


def prefix_of(key: str) -> str:
    """The `key_prefix` of the name of a block."""
    return key[: key.rindex("/") + 1]


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


def seal(memory: Bytes, nbytes: int, block: int) -> None:
    """Write the digests of the first `nbytes` of `memory` behind them. 25 GB/s; threads gain nothing, for xxhash keeps
    the interpreter."""
    start, end = tail_range(nbytes)
    memory[nbytes:start] = 0
    found = [_digest(memory, nbytes, grain, block) for grain in range(num_grains(nbytes))]
    digests = np.array([*found, 0], np.uint64)
    digests[-1] = _of_digests(digests, block)
    memory[start:end] = digests.view(np.uint8)


def is_right(memory: Bytes, nbytes: int, ranges: Ranges, block: int) -> bool:
    """Whether these grains of a block of `nbytes`, which lies in `memory` with its digests, are what was sealed."""
    start, end = tail_range(nbytes)
    digests = memory[start:end].view(np.uint64)
    if int(digests[-1]) != _of_digests(digests, block):
        return False
    grains = [grain for first, last in ranges for grain in range(first // GRAIN, num_grains(last))]
    return all(_digest(memory, nbytes, grain, block) == digests[grain] for grain in grains)


def _digest(memory: Bytes, nbytes: int, grain: int, block: int) -> int:
    part = memory[grain * GRAIN : min((grain + 1) * GRAIN, nbytes)]
    return xxh3_64_intdigest(memoryview(part), block)  # type: ignore[arg-type]


def _of_digests(digests: np.ndarray, block: int) -> int:
    return xxh3_64_intdigest(digests[:-1].tobytes(), block)
