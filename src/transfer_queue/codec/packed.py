"""A batch in buffers: values packed into memory of the caller's, for whatever carries bytes but no Python values.

    head          8s magic; uint64 number of items, bytes of the description, bytes in all; xxh3-64 of head, sizes and
                  description
    sizes         uint64 bytes of each item
    description
    items         these and the description begin at multiples of 64 bytes, one after the other

`pack_into` and `unpack_from` put bytes-like items into one buffer and take them out again. `batch_encode_into` and
`batch_decode_from` do so with any value that a sample may hold: a value's block (`codec.layout`) is the only item, and
the layout of the block the description. The functions keep no state and may be called by many threads.

A *buffer* is an object with contiguous bytes, as `bytearray`, `memoryview`, `mmap`, a numpy array or a tensor on the
CPU, or a list of such, whose bytes count as one after the other (that costs one more copy).
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from xxhash import xxh3_64

from transfer_queue.codec.assemble import Assembler
from transfer_queue.codec.layout import Builder, decode_layout
from transfer_queue.codec.plan import plan_value
from transfer_queue.codec.rows import BlockBytes, Copier, Run
from transfer_queue.errors import InvalidInput, ProtocolError, TransferQueueError, UnsupportedValue
from transfer_queue.memory.bytes import Bytes, address_of
from transfer_queue.memory.copy import Copies, Move, Mover
from transfer_queue.memory.pool import Pool
from transfer_queue.schema import OBJECTS

Buffer: TypeAlias = Any
MAGIC = b"TQpacked"
HEAD, DIGEST = struct.Struct("<8sQQQ"), struct.Struct("<Q")
SIZES_AT = HEAD.size + DIGEST.size
KEEP_NBYTES = 1 << 30  # of memory that decoded values have left, for the next ones

_pool = Pool(KEEP_NBYTES)


def _start_over() -> None:
    """In a forked child: another thread of the parent may have been amid an allocation."""
    global _pool
    _pool = Pool(KEEP_NBYTES)


os.register_at_fork(after_in_child=_start_over)


class _Form(NamedTuple):
    """Where everything lies in a packed buffer, as (offset, bytes)."""

    described: tuple[int, int]
    items: list[tuple[int, int]]
    nbytes: int

    @classmethod
    def of(cls, sizes: Sequence[int], description: int = 0) -> _Form:
        builder = Builder()
        builder.place(SIZES_AT + 8 * len(sizes))
        described = builder.place(description)
        return cls(described, [builder.place(size) for size in sizes], builder.nbytes)

    def write(self, into: Bytes, description: bytes = b"") -> None:
        """All but the items; zeros between the parts, so that equal values are equal bytes."""
        sizes = np.array([nbytes for _, nbytes in self.items], "<u8").tobytes()
        head = HEAD.pack(MAGIC, len(self.items), len(description), self.nbytes)
        head += DIGEST.pack(_digest(head, sizes, description)) + sizes
        for at, part in ((0, head), (self.described[0], description)):
            into[at : at + len(part)] = np.frombuffer(part, np.uint8)
        parts = [(0, len(head)), self.described, *self.items, (self.nbytes, 0)]
        for (start, nbytes), (after, _) in itertools.pairwise(parts):
            into[start + nbytes : after] = 0


class _Target(NamedTuple):
    """Bytes to write, and the parts that they are handed on to (none: they are the buffer's own)."""

    into: Bytes
    parts: list[Bytes]

    def finish(self) -> None:
        at = 0
        for part in self.parts:
            piece = self.into[at : at + part.nbytes]
            part[: piece.nbytes] = piece
            at += piece.nbytes


def calc_packed_size(items: Sequence[Buffer]) -> int:
    """How many bytes `pack_into` needs for these items; a multiple of 64."""
    return _Form.of([_item(item, number).nbytes for number, item in enumerate(items)]).nbytes


def pack_into(target_buffer: Buffer, items: Sequence[Buffer], *, num_workers: int = 1) -> int:
    """Put copies of the items into the buffer, from its first byte on; returns how many bytes of it are used.

    An item may lie in strides, and is packed row by row then. `num_workers` threads copy. What is behind the bytes used
    is not touched. Raises `InvalidInput`, with the buffer as it was, where that is too small, read-only or not
    contiguous.
    """
    sources = [_item(item, number) for number, item in enumerate(items)]
    form = _Form.of([source.nbytes for source in sources])
    with _copying(num_workers) as mover:
        (target,) = _targets([target_buffer], [form.nbytes])
        form.write(target.into)
        base = address_of(target.into)
        places = zip(form.items, sources, strict=True)
        mover.move([(base + start, address_of(source), nbytes) for (start, nbytes), source in places if nbytes])
        target.finish()
    return form.nbytes


def unpack_from(source_buffer: Buffer, *, copy: bool = False) -> list[memoryview]:
    """The items of a packed buffer, in order. By default they are views: each keeps the buffer alive, shows what is
    written there later, and is writable where the buffer is. With `copy` they are memory of their own.

    Raises `ProtocolError` for bytes that were not packed like this, that were cut off, or of which anything but the
    items was changed. The bytes of the items are compared with nothing.
    """
    source = _source(source_buffer)
    form, _ = _parsed(source)
    parts = [source[start : start + nbytes] for start, nbytes in form.items]
    return [memoryview(part.copy() if copy else part) for part in parts]  # type: ignore[arg-type]


def batch_encode_into(
    objs: Sequence[Any],
    alloc_buff_func: Callable[[list[int]], Sequence[Buffer]],
    *,
    num_workers: int = 1,
    allow_pickle: bool = False,
) -> tuple[list[Buffer], list[int]]:
    """Write each value into a buffer of its own; returns the buffers, and how many bytes of each are used.

    `alloc_buff_func` is called once with the bytes that each value needs, multiples of 64, and returns as many buffers
    of at least that size. A value is whatever a sample may hold: tensors of every kind, nested ones included, arrays,
    TensorDicts, images, Python values with any of these inside. Its tensors are copied once, straight to their place,
    also from a GPU; `num_workers` threads share the copies of all values.

    Raises `UnsupportedValue`, naming value and type, before anything is allocated; and `InvalidInput`, before anything
    is written, for buffers that are too few, too small, read-only, not contiguous, or that overlap.
    """
    plans = []
    for number, value in enumerate(objs):
        with _named(f"value {number}"):
            plans.append(plan_value(value, allow_pickle))
    layouts = [plan.layout() for plan in plans]
    forms = [_Form.of([plan.nbytes], len(layout)) for plan, layout in zip(plans, layouts, strict=True)]
    sizes = [form.nbytes for form in forms]
    buffers = list(alloc_buff_func(list(sizes)))
    if len(buffers) != len(plans):
        raise InvalidInput(f"alloc_buff_func gave {len(buffers)} buffers for {len(plans)} values")
    kept: list[Any] = []
    with _copying(num_workers) as mover:
        targets = _targets(buffers, sizes)
        moves: list[Move] = []
        for target, plan, layout, form in zip(targets, plans, layouts, forms, strict=True):
            form.write(target.into, layout)
            start, nbytes = form.items[0]
            moves += plan.moves(target.into[start : start + nbytes], kept)
        mover.move(moves)
        for target in targets:
            target.finish()
    return buffers, sizes


def batch_decode_from(
    source_buffers: Sequence[Buffer],
    *,
    copy: bool | None = None,
    num_workers: int = 1,
    allow_pickle: bool = False,
) -> list[Any]:
    """The values in buffers that `batch_encode_into` filled, in order.

    `copy=False`: tensors and arrays are views, each of which keeps its buffer alive and shows what is written there
    later. `copy=True`: they own their memory, and the buffers may be reused at once; `num_workers` threads share the
    copies of all values. `None`: views, but copies where a buffer is read-only or a list. Texts, numbers and images are
    always copies.

    Raises `ProtocolError`, naming the buffer, for one that `unpack_from` would not take, whose value was not packed
    alone, or cannot be decoded; `UnsupportedValue` for a value that needs pickle or a class that is not there;
    `InvalidInput` for `copy=False` of a buffer that is read-only or a list.
    """
    with _copying(num_workers) as mover:
        copies = Copies(mover)
        copier = Copier(_pool.allocate, copies.copy, copies.take, copies.collect, copies.run)
        assembler = Assembler(copier, allow_pickle)
        runs = []
        for number, buffer in enumerate(source_buffers):
            with _named(f"buffer {number}"):
                runs.append(_run(buffer, copy))
        try:
            return assembler.objects(runs)
        except TransferQueueError:
            for number, run in enumerate(runs):
                with _named(f"buffer {number}"):
                    assembler.objects([run])
            raise


def _run(buffer: Buffer, copy: bool | None) -> Run:
    """The row of the one value in a buffer."""
    source, joined = _source(buffer), isinstance(buffer, (list, tuple))
    if copy is False and (joined or not source.flags.writeable):
        what = "a list" if joined else "read-only"
        raise InvalidInput(f"it is {what}, of which values cannot be views: pass copy=True")
    form, description = _parsed(source)
    if not description or len(form.items) != 1:
        raise ProtocolError("it holds items of pack_into, not a value")
    layout = decode_layout(description)
    if layout.rows != 1 or len(layout.columns) != 1 or layout.columns[0].kind != OBJECTS:
        raise ProtocolError("it holds rows, not a value")
    start, nbytes = form.items[0]
    may_view = joined or (source.flags.writeable and not copy)  # what was joined is memory of its own
    block = BlockBytes(source[start : start + nbytes], layout, 0 if may_view else -1)
    return Run(block, layout.columns[0], 0, 1)


def _parsed(source: Bytes) -> tuple[_Form, bytes]:
    """Where everything lies, all within the buffer, and the description. Raises `ProtocolError`."""
    if len(source) < SIZES_AT:
        raise ProtocolError(f"not a packed buffer: {len(source)} bytes")
    head = source[: HEAD.size].tobytes()
    magic, count, description, nbytes = HEAD.unpack(head)
    if magic != MAGIC:
        raise ProtocolError("not a packed buffer")
    if nbytes > len(source) or SIZES_AT + 8 * count + description > nbytes:
        raise ProtocolError(f"a packed buffer of {nbytes} bytes is cut off after {len(source)}")
    sizes = source[SIZES_AT : SIZES_AT + 8 * count].tobytes()
    form = _Form.of(np.frombuffer(sizes, "<u8").tolist(), description)
    start = form.described[0]
    described = source[start : start + description].tobytes()
    digest = DIGEST.unpack(source[HEAD.size : SIZES_AT].tobytes())[0]
    if form.nbytes != nbytes or _digest(head, sizes, described) != digest:
        raise ProtocolError("the description of a packed buffer is damaged")
    return form, described


def _digest(*parts: bytes) -> int:
    return xxh3_64(b"".join(parts)).intdigest()


def _targets(buffers: Sequence[Buffer], sizes: Sequence[int]) -> list[_Target]:
    """The first bytes of each buffer, to be written. Raises `InvalidInput` as `batch_encode_into`."""
    places = []
    for number, (buffer, size) in enumerate(zip(buffers, sizes, strict=True)):
        with _named(f"buffer {number}"):
            places.append([_contiguous(part) for part in _parts(buffer)])
            room = sum(part.nbytes for part in places[-1])
            if room < size:
                raise InvalidInput(f"it has {room} bytes, {size} are needed")
            if not all(part.flags.writeable for part in places[-1]):
                raise InvalidInput("it is read-only")
    lying = sorted((address_of(part), part.nbytes) for parts in places for part in parts if part.nbytes)
    if any(start + nbytes > after for (start, nbytes), (after, _) in itertools.pairwise(lying)):
        raise InvalidInput("the buffers overlap")
    return [
        _Target(parts[0][:size], []) if len(parts) == 1 else _Target(np.empty(size, np.uint8), parts)
        for parts, size in zip(places, sizes, strict=True)
    ]


def _parts(buffer: Buffer) -> Sequence[Buffer]:
    return buffer if isinstance(buffer, (list, tuple)) else [buffer]


def _source(buffer: Buffer) -> Bytes:
    parts = [_contiguous(part) for part in _parts(buffer)]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])


def _item(item: Buffer, number: int) -> Bytes:
    """The bytes of an item, in order."""
    with _named(f"item {number}"):
        if isinstance(item, torch.Tensor):
            item = item.contiguous()
        elif isinstance(item, np.ndarray):
            item = np.ascontiguousarray(item)
        elif isinstance(item, memoryview) and not item.c_contiguous:
            item = item.tobytes()
        return _contiguous(item)


def _contiguous(buffer: Buffer) -> Bytes:
    """The bytes of a buffer, which stays as it is as long as they are needed. Raises `InvalidInput`."""
    if isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise InvalidInput("a buffer lies in the memory of the processor, without gaps")
        found: Bytes = buffer.detach().reshape(-1).view(torch.uint8).numpy()
        return found
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise InvalidInput("a buffer lies without gaps")
        return buffer.reshape(-1).view(np.uint8)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidInput(f"{type(buffer).__name__} is no buffer") from None
    if not view.c_contiguous:
        raise InvalidInput("a buffer lies without gaps")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except (InvalidInput, ProtocolError, UnsupportedValue) as error:
        raise type(error)(f"{where}: {error}") from None


@contextmanager
def _copying(num_workers: int) -> Iterator[Mover]:
    if num_workers < 1:
        raise InvalidInput(f"num_workers {num_workers}")
    mover = Mover(num_workers)
    try:
        yield mover
    finally:
        mover.close()
