"""What a difference has of the cells of a plan, and where that lies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from transfer_queue.codec.layout import ALIGN
from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Ints
from transfer_queue.structs import decodable
from transfer_queue.weights.version.columns import DIGEST_NBYTES, bytes_of, column_of, digests_from, ends_of, order_of
from transfer_queue.weights.version.plans import ShardPlan

_NO_DIGEST = "0" * (2 * DIGEST_NBYTES)
ITSELF, UNCHANGED = -1, 0  # in place of the bytes of a difference


class Places(NamedTuple):
    """Where what is stored of cells lies: columns, and the sizes of the buckets."""

    bucket: Ints
    offset: Ints
    buckets: list[int]


@decodable
class StoredCells(msgspec.Struct, frozen=True, dict=True):
    """What a difference has of each cell of a plan, in columns: how many bytes (`ITSELF`, `UNCHANGED`), and, of those
    that are stored as a difference, the digests."""

    nbytes: bytes
    digests: bytes

    @staticmethod
    def of(nbytes: Sequence[int], digests: Sequence[str | None]) -> StoredCells:
        column = bytes_of(np.array(nbytes, np.int64), 8)
        return StoredCells(column, digests_from(one or _NO_DIGEST for one in digests).tobytes())

    @functools.cached_property
    def column(self) -> Ints:
        return column_of(self.nbytes, 8)

    def check(self, num_cells: int) -> None:
        """`ProtocolError` when it is not of so many cells, as it came from elsewhere."""
        if len(self.nbytes) != 8 * num_cells or len(self.digests) != DIGEST_NBYTES * num_cells:
            raise ProtocolError(f"what is stored of {num_cells} cells is not of as many")
        if num_cells and self.column.min() < ITSELF:
            raise ProtocolError("a cell has fewer bytes than none")

    def places(self, where: ShardPlan) -> Places:
        """In the buckets of the plan, of which those that are empty are left out."""
        cells = where.columns
        nbytes = np.where(self.column == ITSELF, cells.nbytes, self.column)
        order = order_of(cells.bucket)
        start, ends = ends_of(-(-nbytes[order] // ALIGN) * ALIGN)
        edges = np.searchsorted(cells.bucket[order], np.arange(len(where.buckets) + 1))
        begin = np.concatenate([start, ends[-1:], [0]])[edges]
        sizes = np.diff(begin)
        number = np.cumsum(sizes > 0) - 1
        is_there = nbytes > 0
        offset = np.empty(len(order), np.int64)
        offset[order] = start - begin[cells.bucket[order]]
        bucket = np.where(is_there, number[cells.bucket], 0)
        return Places(bucket, np.where(is_there, offset, 0), sizes[sizes > 0].tolist())
