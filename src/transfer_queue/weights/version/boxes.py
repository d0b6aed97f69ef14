"""Boxes of a tensor: what a rank holds (a shard), what a loader takes (a want), what is moved (a piece).

A box has a start and a length in each dimension. Everything here is arithmetic on them; nothing looks at data.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

MAX_TAKERS = 62  # tables of wants: a bit each
MAX_CELLS = 1 << 16  # that are looked at for one shard
MAX_PIECES = 64  # of one shard; one that would have more stays whole
Ints: TypeAlias = "tuple[int, ...]"


class Box(NamedTuple):
    start: Ints
    lengths: Ints

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.lengths)


class ShardCell(NamedTuple):
    """A part of a shard and who takes it, a bit for each table of wants."""

    box: Box
    takers: int


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def lies_in(box: Box, around: Box) -> bool:
    """Whether all of `box` is in the other one."""
    return all(
        first <= at and at + n <= first + room
        for at, n, first, room in zip(box.start, box.lengths, around.start, around.lengths, strict=True)
    )


def common(one: Box, other: Box) -> Box | None:
    """What is in both."""
    start = tuple(map(max, one.start, other.start))
    lengths = tuple(
        min(a + n, b + m) - at
        for a, n, b, m, at in zip(one.start, one.lengths, other.start, other.lengths, start, strict=True)
    )
    return Box(start, lengths) if min(lengths, default=1) > 0 else None


def relative(box: Box, around: Box) -> Box:
    """`box`, counted from where `around` starts."""
    return Box(tuple(at - first for at, first in zip(box.start, around.start, strict=True)), box.lengths)


def within(box: Box, around: Box) -> tuple[slice, ...]:
    """Where `box` is in a tensor that holds `around`."""
    return tuple(
        slice(at - first, at - first + n) for at, n, first in zip(box.start, box.lengths, around.start, strict=True)
    )


def strides_of(shape: Sequence[int]) -> Ints:
    """Of a tensor in C order, in elements."""
    found = [1]
    for n in reversed(shape[1:]):
        found.append(found[-1] * n)
    return tuple(reversed(found)) if shape else ()


def run_of(box: Box, shape: Sequence[int]) -> slice | None:
    """The elements of `box` in a tensor of `shape` in C order, if they lie one behind the other."""
    outer = True  # so far each length was 1
    for n, whole_n in zip(box.lengths, shape, strict=True):
        if n != whole_n and not outer:
            return None
        outer = outer and n == 1
    first = sum(at * stride for at, stride in zip(box.start, strides_of(shape), strict=True))
    return slice(first, first + box.size)


@functools.lru_cache(1 << 12)
def do_tile(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> bool:
    """Whether these boxes, none of them empty, are the whole of `shape`, each element once.

    The mixed differences of a sum of boxes lie at their corners, with alternating signs, and determine it. So it is one
    everywhere just when they cancel out but for the corners of the whole. Linear in the number of boxes, and cached: a
    model has few kinds of tensors.
    """
    left: Counter[Ints] = Counter()

    def add(box: Box, weight: int) -> None:
        for sides in product((0, 1), repeat=len(box.start)):
            corner = tuple(at + n * side for at, n, side in zip(box.start, box.lengths, sides, strict=True))
            left[corner] += weight if sum(sides) % 2 == 0 else -weight

    for box in boxes:
        if len(box.start) != len(shape) or len(box.lengths) != len(shape) or min(box.lengths, default=1) < 1:
            return False
        add(box, 1)
    add(whole(shape), -1)
    return not any(left.values())


@functools.lru_cache(1 << 14)
def cut(shard: Box, wants: tuple[tuple[Box, ...], ...]) -> tuple[ShardCell, ...]:
    """The shard along the edges of what each table wants of its tensor: all elements of a cell have the same takers.

    Neighbours with the same takers are one cell. A shard that would have more than `MAX_PIECES` is one cell, for
    everybody who takes something of it. Cached: a model has few kinds of tensors.
    """
    parts = [[part for want in table if (part := common(shard, want)) is not None] for table in wants]
    takers = sum(1 << number for number, found in enumerate(parts) if found)
    one = (ShardCell(shard, takers),)
    if all(part == shard for found in parts for part in found):
        return one
    edges = [
        sorted({at, at + n, *(edge for found in parts for part in found for edge in _edges(part, dim))})
        for dim, (at, n) in enumerate(zip(shard.start, shard.lengths, strict=True))
    ]
    if math.prod(len(dim) - 1 for dim in edges) > MAX_CELLS:
        return one
    grid = _marked(edges, parts)
    for dim in range(len(edges)):
        grid, edges[dim] = _joined(grid, edges[dim], dim)
    if grid.size > MAX_PIECES:
        return one
    spans = [[(at, end - at) for at, end in pairwise(dim)] for dim in edges]
    return tuple(
        ShardCell(Box(tuple(at for at, _ in found), tuple(n for _, n in found)), int(bits))
        for found, bits in zip(product(*spans), grid.flat, strict=True)
    )


def _edges(box: Box, dim: int) -> Ints:
    return box.start[dim], box.start[dim] + box.lengths[dim]


def _marked(edges: list[list[int]], parts: list[list[Box]]) -> Any:
    """Who takes each cell of the grid."""
    grid = np.zeros([len(dim) - 1 for dim in edges], np.int64)
    number = [{edge: index for index, edge in enumerate(dim)} for dim in edges]
    for taker, found in enumerate(parts):
        for part in found:
            ends = [_edges(part, dim) for dim in range(len(edges))]
            grid[tuple(slice(number[dim][a], number[dim][b]) for dim, (a, b) in enumerate(ends))] |= 1 << taker
    return grid


def _joined(grid: Any, edges: list[int], dim: int) -> tuple[Any, list[int]]:
    """Without the edges across `dim` on both sides of which all cells have the same takers."""
    lying = np.moveaxis(grid, dim, 0).reshape(len(edges) - 1, -1)
    differs = (lying[1:] != lying[:-1]).any(axis=1)
    first = np.flatnonzero(np.concatenate([[True], differs]))
    return np.take(grid, first, axis=dim), [*(edges[int(at)] for at in first), edges[-1]]


# views


def box_of_view(shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int], offset: int) -> Box | None:
    """The box that a view of a tensor of `shape` in C order covers, in whatever order of dimensions; None when it is no
    box, or empty. `sizes`, `strides` and `offset` are the view's, in elements."""
    if 0 in sizes:
        return None
    dims = [(n, stride) for n, stride in zip(sizes, strides, strict=True) if stride]
    if any(stride < 0 for _, stride in dims):
        return None
    last = offset + sum((n - 1) * stride for n, stride in dims)
    steps = strides_of(shape)
    start = tuple(offset // step % n if n else 0 for n, step in zip(shape, steps, strict=True))
    end = tuple(last // step % n if n else 0 for n, step in zip(shape, steps, strict=True))
    lengths = tuple(b - a + 1 for a, b in zip(start, end, strict=True))
    if any(n < 1 for n in lengths):
        return None
    same = _merged(dims) == _merged(list(zip(lengths, steps, strict=True)))
    return Box(start, lengths) if same else None


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(size, stride) of the same set of places, largest stride first, joined where one goes on with the next."""
    found: list[tuple[int, int]] = []
    for n, stride in sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: -dim[1]):
        if found and found[-1][1] == n * stride:
            found[-1] = (found[-1][0] * n, stride)
        else:
            found.append((n, stride))
    return found


def strides_within(lengths: Sequence[int], shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> Ints:
    """The strides of a view (`box_of_view`) once only its box of `lengths` is there, in C order.

    Dimensions within which the box is full are one with the next outer one: a view may go over their edges. The others
    it cannot leave, so each of its strides is a multiple of one of theirs.
    """
    groups: list[tuple[int, int, int]] = []  # step in the tensor, step in the box, length; the innermost first
    step = new_step = n = length = 1
    for whole_n, part_n in zip(reversed(shape), reversed(lengths), strict=True):
        if length != n:
            groups.append((step, new_step, length))
            step, new_step, n, length = step * n, new_step * length, 1, 1
        n, length = n * whole_n, length * part_n
    groups.append((step, new_step, length))
    found = []
    for size, stride in zip(sizes, strides, strict=True):
        over = [(old, new) for old, new, length in groups if length > 1 and old <= stride]
        found.append(stride // over[-1][0] * over[-1][1] if over and size > 1 else 0)
    return tuple(found)
