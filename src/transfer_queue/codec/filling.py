"""The layout of a block in the making, and the copies that fill it."""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from transfer_queue.codec.arrays import Source
from transfer_queue.codec.layout import Builder, Column, Layout, encode_layout, offsets_of
from transfer_queue.errors import UnsupportedValue
from transfer_queue.memory.bytes import Bytes, Ints, address_of
from transfer_queue.memory.copy import Move, Mover
from transfer_queue.schema import FieldSchema

_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.restype, _bytes_address.argtypes = ctypes.c_void_p, [ctypes.py_object]
_utf8_address = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
_utf8_address.restype = ctypes.c_void_p
_utf8_address.argtypes = [ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t)]

Filling = Source | bytes
TEXT_HEADER_NBYTES = 5


def utf8(text: str) -> tuple[int, int]:
    """Address and size of the UTF-8 form that `text` keeps as long as it lives; `UnicodeEncodeError` for surrogates."""
    size = ctypes.c_ssize_t()
    address: int = _utf8_address(text, ctypes.byref(size))
    return address, size.value


class Texts(NamedTuple):
    """Long texts of one column: where each goes, its header, and address and size of its UTF-8 form in `owners`."""

    starts: Ints
    headers: Bytes
    lying: list[tuple[int, int]]
    owners: list[str]


class BlockPlan:
    """The layout of one block and what goes where: (offset, source) pairs. `batch`: what was planned, by column."""

    def __init__(self, rows: int, allow_pickle: bool = False, batch: Any = None) -> None:
        self.rows = rows
        self.batch = batch
        self.columns: list[Column] = []
        self.allow_pickle = allow_pickle
        self._builder = Builder()
        self._fillings: list[tuple[int, Filling]] = []
        self._gaps: list[tuple[int, int]] = []  # from where to where nothing lies
        self._texts: list[Texts] = []
        self._ends: list[int] = []  # of each column

    def add_column(self, column: Column) -> None:
        """All parts that were placed since the last one are of this column."""
        self.columns.append(column)
        self._ends.append(self.nbytes)

    def without(self, names: Collection[str]) -> BlockPlan:
        """The plan of the other columns. Touches no data."""
        kept = BlockPlan(self.rows, self.allow_pickle)
        for column, start, end in zip(self.columns, [0, *self._ends], self._ends, strict=False):
            if column.name not in names:
                kept._take(self, column, start, end)
        return kept

    def _take(self, plan: BlockPlan, column: Column, start: int, end: int) -> None:
        """Another plan's column, which lies there from `start` to `end`."""
        shift = self.nbytes - start
        self._builder.nbytes += end - start
        first, last = (bisect_left(plan._fillings, at, key=itemgetter(0)) for at in (start, end))
        self._fillings += [(offset + shift, source) for offset, source in plan._fillings[first:last]]
        self._gaps += [(a + shift, b + shift) for a, b in plan._gaps if start <= a < end]
        self._texts += [one._replace(starts=one.starts + shift) for one in plan._texts if start <= one.starts[0] < end]
        self.add_column(_shifted(column, shift))

    @property
    def nbytes(self) -> int:
        return self._builder.nbytes

    def layout(self) -> bytes:
        return encode_layout(Layout(self.rows, self.nbytes, self.columns))

    def schema(self) -> list[FieldSchema]:
        return [column.schema() for column in self.columns]

    def _place(self, nbytes: int) -> tuple[int, int]:
        start, _ = part = self._builder.place(nbytes)
        if start + nbytes < self.nbytes:
            self._gaps.append((start + nbytes, self.nbytes))
        return part

    def add_heap(self, spans: Sequence[tuple[int, int]], sources: Sequence[Source], nbytes: int) -> tuple[int, int]:
        """One part of `nbytes`; the sources fill the `spans` (offset, bytes) of it, which ascend."""
        start, _ = part = self._place(nbytes)
        for (offset, size), source in zip(spans, sources, strict=True):
            if size:
                self._fillings.append((start + offset, source))
        ends = [start + offset + size for offset, size in spans]
        starts = [start + offset for offset, _ in spans[1:]] + [start + nbytes]
        self._gaps += [gap for gap in zip(ends, starts, strict=True) if gap[0] < gap[1]]
        return part

    def add(self, source: Filling | None, nbytes: int) -> tuple[int, int]:
        """Place `nbytes`; `source` fills them (None: the caller does)."""
        part = self._place(nbytes)
        if source is not None and nbytes:
            self._fillings.append((part[0], source))
        return part

    def add_all(self, sources: Sequence[tuple[Filling, int]]) -> tuple[int, int]:
        """One part filled by (source, nbytes) one after the other."""
        part = self._place(sum(nbytes for _, nbytes in sources))
        at = part[0]
        for source, nbytes in sources:
            if nbytes:
                self._fillings.append((at, source))
            at += nbytes
        return part

    def add_texts(self, texts: list[str]) -> tuple[tuple[int, int], Ints]:
        """One part with every text as a msgpack "str 32", and their offsets; copied from where the strings lie.

        Raises `UnicodeEncodeError` for lone surrogates, `UnsupportedValue` for a text of 4 GiB or more.
        """
        lying = [utf8(text) for text in texts]
        sizes = np.array([nbytes for _, nbytes in lying], np.int64)
        if sizes.max(initial=0) >= 1 << 32:
            raise UnsupportedValue("a text of 4 GiB or more cannot be stored: put it in parts")
        offsets = offsets_of(sizes + TEXT_HEADER_NBYTES)
        part = self._place(int(offsets[-1]))
        headers = np.empty((len(texts), TEXT_HEADER_NBYTES), np.uint8)
        headers[:, 0] = 0xDB
        headers[:, 1:] = sizes.astype(">u4").view(np.uint8).reshape(-1, 4)
        self._texts.append(Texts(part[0] + offsets[:-1], headers, lying, texts))
        return part, offsets

    def write(self, into: Bytes, mover: Mover) -> None:
        """Fill the block at `into` (uint8, `nbytes`)."""
        kept: list[Any] = []
        mover.move(self.moves(into, kept))

    def moves(self, into: Bytes, kept: list[Any]) -> list[Move]:
        """What is left to copy into the block at `into`, after what cannot be copied as it lies; `kept` has to live
        until then."""
        base = address_of(into)
        for start, end in self._gaps:  # what lay there is nobody's business: blocks go to other hosts and to disks
            into[start:end] = 0
        moves: list[Move] = []
        for texts in self._texts:
            into[texts.starts[:, None] + np.arange(TEXT_HEADER_NBYTES)] = texts.headers
            targets = (texts.starts + (base + TEXT_HEADER_NBYTES)).tolist()
            moves += [(target, *text) for target, text in zip(targets, texts.lying, strict=True)]
        return moves + moves_of(self._fillings, into, base, kept)


def _shifted(column: Column, shift: int) -> Column:
    parts = [(offset + shift, nbytes) for offset, nbytes in column.parts]
    children = [_shifted(child, shift) for child in column.children]
    return msgspec.structs.replace(column, parts=parts, children=children)


def moves_of(fillings: Sequence[tuple[int, Filling]], into: Bytes, address: int, kept: list[Any]) -> list[Move]:
    """What is left to copy into memory at `address` that is `into`, after what cannot be copied as it lies. `fillings`
    are (offset, source); `kept` has to live until then."""
    moves: list[Move] = []
    for offset, source in fillings:
        if isinstance(source, torch.Tensor):
            if source.device.type != "cpu" or not source.is_contiguous() or source.is_conj() or source.is_neg():
                nbytes = source.numel() * source.element_size()
                plain = source if source.is_conj() or source.is_neg() else _as_numbers(source)
                target = torch.from_numpy(into[offset : offset + nbytes]).view(plain.dtype)
                target.view(plain.shape).copy_(plain)
                continue
            moves.append((address + offset, source.data_ptr(), source.numel() * source.element_size()))
        elif isinstance(source, bytes):
            moves.append((address + offset, _bytes_address(source), len(source)))
        else:
            lying = np.ascontiguousarray(source)
            kept.append(lying)
            moves.append((address + offset, lying.__array_interface__["data"][0], lying.nbytes))
    return moves


def _as_numbers(source: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers: torch cannot copy all of its dtypes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return source.view(kinds.get(source.element_size(), source.dtype))
