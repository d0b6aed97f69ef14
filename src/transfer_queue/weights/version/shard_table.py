"""What a rank holds, as a table in columns; of several ranks, the rows of all of them together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.errors import ProtocolError, ShapeMismatch
from transfer_queue.memory.bytes import Ints
from transfer_queue.structs import decodable
from transfer_queue.weights.version.boxes import Box
from transfer_queue.weights.version.columns import bytes_of, column_of, first_of, numbered
from transfer_queue.weights.version.sharded import TensorShard


class ShardKind(NamedTuple):
    """A shard but for the tensor's name. A model has few kinds."""

    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.size * torch_dtype(self.dtype).itemsize


@decodable
class ShardTable(msgspec.Struct, frozen=True, dict=True):
    """The shards of one rank, in its order; `column` has the number of each one's kind."""

    names: list[str]
    kinds: list[ShardKind]
    column: bytes

    @staticmethod
    def of(shards: Iterable[TensorShard]) -> ShardTable:
        if isinstance(shards, ShardTable):
            return shards
        rows = list(shards)
        column, kinds = numbered(row[1:] for row in rows)
        made = [ShardKind(dtype_name(dtype), shape, box) for dtype, shape, box in kinds]
        return ShardTable([row.name for row in rows], made, bytes_of(column))

    def check(self) -> None:
        """`ProtocolError` for what is no table, as it came from elsewhere, and for boxes that are none."""
        try:
            column = self.column_kinds
        except ValueError as error:
            raise ProtocolError(f"not a table of shards: {error}") from None
        num = len(self.kinds)
        if len(column) != len(self.names) or (len(column) and not 0 <= column.min() <= column.max() < num):
            raise ProtocolError(f"a table of {len(self.names)} shards has {len(column)} of {num} kinds")
        for kind in self.kinds:
            torch_dtype(kind.dtype)
            start, lengths = kind.box
            if not len(kind.shape) == len(start) == len(lengths) or min((*start, *lengths), default=0) < 0:
                raise ProtocolError(f"a rank has {kind.box} of a tensor that is {list(kind.shape)}")

    @functools.cached_property
    def key(self) -> str:
        """Names the content."""
        return xxh3_128_hexdigest(msgspec.json.encode(self))

    @functools.cached_property
    def column_kinds(self) -> Ints:
        return column_of(self.column).astype(np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[TensorShard]:
        kinds = [(torch_dtype(dtype), shape, box) for dtype, shape, box in self.kinds]
        return (TensorShard(name, *kinds[at]) for name, at in zip(self.names, self.column_kinds.tolist(), strict=True))


class ShardRows:
    """The shards of all ranks, one rank's after the other's: of which tensor (by number, in the order in which ranks
    first have them) and of which kind each is. `begin`: where a rank's rows begin, and where the last one's end.

    `ShapeMismatch` when ranks disagree on a tensor's dtype or shape.
    """

    def __init__(self, tables: Sequence[ShardTable]) -> None:
        self.begin = list(itertools.accumulate((len(table) for table in tables), initial=0))
        self.tensor, self.names = _tensors_of(tables)
        kinds, self.kinds = numbered(itertools.chain.from_iterable(table.kinds for table in tables))
        first = list(itertools.accumulate((len(table.kinds) for table in tables), initial=0))
        columns = [kinds[at : at + len(one.kinds)][one.column_kinds] for at, one in zip(first, tables, strict=False)]
        self.kind: Ints = np.concatenate([np.empty(0, np.int64), *columns])
        self.nbytes: Ints = np.array([kind.nbytes for kind in self.kinds], np.int64)
        self.first: Ints = first_of(self.tensor, len(self.names))  # row of each tensor
        self._check()

    def rank_of(self, row: int) -> int:
        return int(np.searchsorted(self.begin, row, "right")) - 1

    def shape_of(self, tensor: int) -> ShardKind:
        """A kind with the tensor's dtype and shape."""
        return self.kinds[self.kind[self.first[tensor]]]

    def _check(self) -> None:
        forms = numbered(kind[:2] for kind in self.kinds)[0][self.kind] if len(self.kind) else self.kind
        wrong = np.flatnonzero(forms != forms[self.first[self.tensor]])
        if len(wrong):
            row = int(wrong[0])
            mine, other = self.kinds[self.kind[row]], self.shape_of(int(self.tensor[row]))
            raise ShapeMismatch(
                f"rank {self.rank_of(row)} has {self.names[self.tensor[row]]!r} as {mine.dtype} {list(mine.shape)}, "
                f"another one as {other.dtype} {list(other.shape)}"
            )


def _tensors_of(tables: Sequence[ShardTable]) -> tuple[Ints, list[str]]:
    """The tensor of each row, by number, and the names."""
    if tables and all(table.names == tables[0].names for table in tables[1:]):
        found, names = numbered(tables[0].names)
        return np.tile(found, len(tables)), names
    return numbered(itertools.chain.from_iterable(table.names for table in tables))
