"""Rows that were put alone, each the only one of its block: one pass per field over the matrix of their numbers. No
torch.

A column is read here when it is *plain* in all of the rows: tensors of one dtype and rank, or values without buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from transfer_queue.codec.layout import ALIGN, MAX_ELEMENTS, MAX_ITEMSIZE, ColumnTemplate, Template
from transfer_queue.codec.rows import Copier, collected
from transfer_queue.memory.bytes import Bytes, Ints, address_of
from transfer_queue.schema import DENSE, OBJECTS

OFFSETS_NBYTES = 16  # of the values of one row


class LoneRows:
    """`memories` hold the blocks: row i lies in `memories[homes[i]]`, from `offsets[i]` on, and has `nbytes[i]`.
    `numbers` (n, `template.size`) are those of their layouts. All blocks lie within their memory, which stays as it is.
    """

    def __init__(
        self, template: Template, numbers: Ints, memories: Sequence[Bytes], homes: Ints, offsets: Ints, nbytes: Ints
    ) -> None:
        self._template = template
        self._numbers = numbers
        self.memories = memories
        self._homes = homes
        self._offsets = offsets
        self._limits = np.minimum(nbytes, numbers[:, 0])

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def names(self) -> list[str]:
        """Of all columns, in order."""
        return list(self._template.places)

    def plain(self, name: str) -> LoneColumn | None:
        """The column, where it is plain: its parts lie inside their blocks, and are of the size that they need."""
        column, start = self._template.places.get(name, (None, 0))
        if column is None or column.ragged != -1:
            return None
        shapes = self._numbers[:, start : start + column.num_dims]
        parts = self._numbers[:, start + column.num_dims : start + column.num_dims + 2 * column.num_parts]
        places, sizes = parts[:, ::2], parts[:, 1::2]
        if bool((places < 0).any() or (sizes < 0).any() or (places % ALIGN).any()):
            return None
        if bool((sizes > self._limits[:, None]).any() or (places > self._limits[:, None] - sizes).any()):
            return None
        is_plain = _are_values if column.kind == OBJECTS else _are_tensors
        if not is_plain(column, shapes, sizes):
            return None
        return LoneColumn(column, shapes, self._offsets + places[:, 0], sizes[:, 0], self)

    @cached_property
    def bases(self) -> Ints:
        """The address of the memory that each row lies in."""
        return np.array([address_of(memory) for memory in self.memories], np.int64)[self._homes]

    def spans(self, starts: Ints, sizes: Ints) -> list[memoryview]:
        """The bytes from `starts` on of each row's memory."""
        views = [memoryview(memory) for memory in self.memories]  # type: ignore[arg-type]
        lying = zip(self._homes.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True)
        return [views[home][start:end] for home, start, end in lying]


class LoneColumn:
    """A plain column: row i has the shape `shapes[i]`, and `sizes[i]` bytes at the address `sources[i]`."""

    def __init__(self, column: ColumnTemplate, shapes: Ints, starts: Ints, sizes: Ints, rows: LoneRows) -> None:
        self.template = column
        self.shapes = shapes
        self.sizes = sizes
        self._starts = starts
        self._rows = rows

    @property
    def sources(self) -> Ints:
        return self._rows.bases + self._starts

    def values(self, copier: Copier) -> Bytes:
        """The bytes of all rows, one after the other."""
        return collected(self.sources.tolist(), self.sizes.tolist(), self._rows.memories, copier)

    def messages(self) -> list[memoryview]:
        """The data of each row of an objects column. It fills its part: there is no other row."""
        return self._rows.spans(self._starts, self.sizes)


def _are_tensors(column: ColumnTemplate, shapes: Ints, sizes: Ints) -> bool:
    if column.kind != DENSE or column.num_parts != 1 or not 0 < column.itemsize <= MAX_ITEMSIZE:
        return False
    if bool((shapes < 0).any()) or bool((np.maximum(shapes, 1).prod(axis=1, dtype=np.float64) > MAX_ELEMENTS).any()):
        return False
    return bool((shapes.prod(axis=1) * column.itemsize == sizes[:, 0]).all())


def _are_values(column: ColumnTemplate, shapes: Ints, sizes: Ints) -> bool:
    return column.num_parts == 2 and not shapes.shape[1] and bool((sizes[:, 1] == OFFSETS_NBYTES).all())
