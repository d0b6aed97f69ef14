"""A batch in buffers: values packed into memory of the caller's, for whatever carries bytes but no Python values.

    head          8s magic; uint64 number of items, bytes of the description, bytes in all; xxh3-64 of head, sizes and
                  description
    sizes         uint64 bytes of each item
    description
    items         these and the description begin at multiples of 64 bytes, one after the other

`pack_into` and `unpack_from` put bytes-like items into one buffer and take them out again; they describe nothing.
`batch_encode_into` and `batch_decode_from` do so with any value that a sample may hold: the description is the value as
`codec.values` writes it, the items are the bytes of the tensors and arrays in it (`codec.arrays`). The functions keep
no state and may be called by many threads.

A *buffer* is an object with contiguous bytes, as `bytearray`, `memoryview`, `mmap`, a numpy array or a tensor on the
CPU, or a list of such, whose bytes count as one after the other (that costs one more copy).
"""

from __future__ import annotations

import itertools
import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from xxhash import xxh3_64

from transfer_queue.codec.arrays import BufferReader, BufferWriter, Source, nbytes_of
from transfer_queue.codec.collector import collector_pause
from transfer_queue.codec.filling import moves_of
from transfer_queue.codec.layout import ALIGN, DAMAGED
from transfer_queue.codec.values import Lifting, pack
from transfer_queue.errors import InvalidInput, ProtocolError, UnsupportedValue
from transfer_queue.memory.bytes import Bytes, address_of
from transfer_queue.memory.copy import Copies, Move, Mover
from transfer_queue.memory.pool import HUGE_NBYTES, Pool
from transfer_queue.memory.tensors import byte_view

Buffer: TypeAlias = Any
MAGIC = b"TQpacked"
HEAD, NUMBER = struct.Struct("<8sQQQ"), struct.Struct("<Q")
SIZES_AT = HEAD.size + NUMBER.size
KEEP_NBYTES = 1 << 30  # of memory that decoded values have left, for the next ones
SLAB_NBYTES = 16 << 20  # of small parts of decoded values: fresh pages for each take ten times as long as the copy
FEW = 64  # values that are made without a pause of the garbage collector
REFUSALS = (InvalidInput, ProtocolError, UnsupportedValue)

_pool = Pool(KEEP_NBYTES, lends_idle=True)


def _start_over() -> None:
    """In a forked child: another thread of the parent may have been amid an allocation."""
    global _pool
    _pool = Pool(KEEP_NBYTES, lends_idle=True)


os.register_at_fork(after_in_child=_start_over)


class _Form:
    """Where everything lies in a packed buffer with items of these sizes and a description of so many bytes."""

    __slots__ = ("described", "nbytes", "sizes", "starts")

    def __init__(self, sizes: Sequence[int], description: int = 0) -> None:
        self.sizes = sizes
        self.described = _aligned(SIZES_AT + 8 * len(sizes))
        at = _aligned(self.described + description)
        self.starts: list[int] = []
        for size in sizes:
            self.starts.append(at)
            at = _aligned(at + size)
        self.nbytes = at

    def write(self, into: Bytes, description: bytes = b"") -> None:
        """All but the items; zeros between the parts, so that equal values are equal bytes."""
        sizes = struct.pack(f"<{len(self.sizes)}Q", *self.sizes)
        head = HEAD.pack(MAGIC, len(self.sizes), len(description), self.nbytes)
        lead = b"".join((head, NUMBER.pack(_digest(head, sizes, description)), sizes))
        view, described = memoryview(into), self.described + len(description)  # type: ignore[arg-type]
        view[: len(lead)] = lead
        view[self.described : described] = description
        ends = [len(lead), described, *map(int.__add__, self.starts, self.sizes)]
        for end, start in zip(ends, (self.described, *self.starts, self.nbytes), strict=True):
            if end < start:
                view[end:start] = bytes(start - end)


class _Filled(NamedTuple):
    """Bytes to write, and the parts that they are handed on to (none: they are the buffer's own)."""

    into: Bytes
    address: int
    parts: list[Bytes]

    def finish(self) -> None:
        at = 0
        for part in self.parts:
            piece = self.into[at : at + part.nbytes]
            part[: piece.nbytes] = piece
            at += piece.nbytes


def calc_packed_size(items: Sequence[Buffer]) -> int:
    """How many bytes `pack_into` needs for these items; a multiple of 64."""
    return _Form([_item(item, number).nbytes for number, item in enumerate(items)]).nbytes


def pack_into(target_buffer: Buffer, items: Sequence[Buffer], *, num_workers: int = 1) -> int:
    """Put copies of the items into the buffer, from its first byte on; returns how many bytes of it are used.

    An item may lie in strides, and is packed row by row then. `num_workers` threads copy. What is behind the bytes used
    is not touched. Raises `InvalidInput`, with the buffer as it was, where that is too small, read-only or not
    contiguous, where an item lies in it, and for an item that has no bytes, such as an array of objects.
    """
    sources = [_item(item, number) for number, item in enumerate(items)]
    form = _Form([source.nbytes for source in sources])
    with _copying(num_workers) as mover:
        (target,) = _targets([target_buffer], [form.nbytes])
        _check_apart([target], enumerate(sources), "item")
        form.write(target.into)
        places = zip(form.starts, sources, strict=True)
        mover.move([(target.address + at, address_of(one), one.nbytes) for at, one in places if one.nbytes])
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
    parts = [source[start : start + size] for start, size in zip(form.starts, form.sizes, strict=True)]
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
    is written, for buffers that are too few, too small, read-only, not contiguous, or that overlap each other or memory
    of the values.
    """
    with _copying(num_workers) as mover, collector_pause if len(objs) > FEW else nullcontext():
        writers, descriptions = _described(objs, allow_pickle)
        forms = [
            _Form(list(map(nbytes_of, writer.sources)), len(description))
            for writer, description in zip(writers, descriptions, strict=True)
        ]
        sizes = [form.nbytes for form in forms]
        buffers = list(alloc_buff_func(list(sizes)))
        if len(buffers) != len(forms):
            raise InvalidInput(f"alloc_buff_func gave {len(buffers)} buffers for {len(forms)} values")
        targets = _targets(buffers, sizes)
        parts = ((number, source) for number, writer in enumerate(writers) for source in writer.sources)
        _check_apart(targets, parts, "value")
        moves: list[Move] = []
        kept: list[Any] = []
        for target, form, writer, description in zip(targets, forms, writers, descriptions, strict=True):
            form.write(target.into, description)
            fillings = [one for one in zip(form.starts, writer.sources, strict=True) if nbytes_of(one[1])]
            moves += moves_of(fillings, target.into, target.address, kept)
        mover.move(moves)
        for target in targets:
            target.finish()
    return buffers, sizes


def _described(objs: Sequence[Any], allow_pickle: bool) -> tuple[list[BufferWriter], list[bytes]]:
    """The buffers of each value, and its description: how many references to them are listed, these (none: to each
    once, in order), and the message."""
    writers: list[BufferWriter] = []
    descriptions: list[bytes] = []
    try:
        for value in objs:
            writer = BufferWriter()
            message = pack(value, writer, allow_pickle)
            refs = [] if len(writer.refs) == len(writer.sources) else writer.refs
            writers.append(writer)
            descriptions.append(struct.pack(f"<{1 + len(refs)}Q", len(refs), *refs) + message)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"value {len(writers)}: {error}") from None
    return writers, descriptions


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
    copies of all values, and those below 2 MiB lie together, up to 16 MiB that are free when the last one is gone.
    `None`: views, but copies where a buffer is read-only or a list. Texts, numbers and images are always copies.

    Raises `ProtocolError`, naming the buffer, for one that `unpack_from` would not take, whose value was not packed
    alone, or cannot be decoded; `UnsupportedValue` for a value that needs pickle or a class that is not there;
    `InvalidInput` for `copy=False` of a buffer that is read-only or a list.
    """
    with _copying(num_workers) as mover, collector_pause if len(source_buffers) > FEW else nullcontext():
        decoding = _Decoding(Copies(mover), copy)
        reader = BufferReader(decoding.span)
        unpack = Lifting(reader.lift, allow_pickle).unpack
        values: list[Any] = []
        done: list[Any] = decoding.messages
        try:
            for buffer in source_buffers:
                decoding.add(buffer)
            reader.fetch(range(len(decoding.parts)))
            decoding.copies.run()  # an image, or a type of the user's, looks at its bytes when it is made
            done = values
            for message, refs in decoding.messages:
                reader.begin_row(refs)
                values.append(unpack(message))
        except DAMAGED as error:
            raise ProtocolError(f"buffer {len(done)}: a damaged value: {error}") from None
        except REFUSALS as error:
            raise type(error)(f"buffer {len(done)}: {error}") from None
        finally:
            reader.close()
    return values


class _Decoding:
    """The `messages` of values, each with the numbers of its buffers among the `parts` of all."""

    def __init__(self, copies: Copies, copy: bool | None) -> None:
        self.copies = copies
        self._copy = copy
        self.parts: list[Bytes] = []
        self.messages: list[tuple[memoryview, Sequence[int]]] = []
        self._viewed: list[bool] = []  # of each part
        self._slab: Bytes = np.empty(0, np.uint8)
        self._needed = 0  # bytes of slabs for the parts that are still to be copied

    def add(self, buffer: Buffer) -> None:
        source, joined = _source(buffer), isinstance(buffer, (list, tuple))
        if self._copy is False and (joined or not source.flags.writeable):
            what = "a list" if joined else "read-only"
            raise InvalidInput(f"it is {what}, of which values cannot be views: pass copy=True")
        form, description = _parsed(source)
        if len(description) < NUMBER.size:
            raise ProtocolError("it holds items of pack_into, not a value")
        first, count = len(self.parts), len(form.sizes)
        (listed,) = NUMBER.unpack_from(description)
        if NUMBER.size * (1 + listed) > len(description):
            raise ProtocolError("its references are not all there")
        refs = struct.unpack_from(f"<{listed}Q", description, NUMBER.size) if listed else range(count)
        if listed and max(refs) >= count:
            raise ProtocolError("it refers to a part that is not there")
        self.parts += [source[start : start + size] for start, size in zip(form.starts, form.sizes, strict=True)]
        viewed = joined or (source.flags.writeable and not self._copy)  # what was joined is memory of its own
        self._viewed += [viewed] * count
        if not viewed:
            self._needed += sum(_aligned(size) for size in form.sizes if size < HUGE_NBYTES)
        self.messages.append((description[NUMBER.size * (1 + listed) :], [first + ref for ref in refs]))

    def span(self, number: int) -> Bytes:
        """The bytes of a part: a view, or memory of the reader by the end of `copies.run`."""
        part = self.parts[number]
        if self._viewed[number]:
            return part
        own = self._allocate(part.nbytes)
        self.copies.copy(own, part)
        return own

    def _allocate(self, nbytes: int) -> Bytes:
        if nbytes >= HUGE_NBYTES:
            return _pool.allocate(nbytes)
        size = _aligned(nbytes)
        if len(self._slab) < size:
            self._slab = _pool.allocate(min(SLAB_NBYTES, self._needed))
        own, self._slab = self._slab[:nbytes], self._slab[size:]
        self._needed -= size
        return own


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGN - 1) & -ALIGN


def _parsed(source: Bytes) -> tuple[_Form, memoryview]:
    """Where everything lies, all within the buffer, and the description. Raises `ProtocolError`."""
    if len(source) < SIZES_AT:
        raise ProtocolError(f"not a packed buffer: {len(source)} bytes")
    view = memoryview(source)  # type: ignore[arg-type]
    magic, count, description, nbytes = HEAD.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError("not a packed buffer")
    if nbytes > len(source) or SIZES_AT + 8 * count + description > nbytes:
        raise ProtocolError(f"a packed buffer of {nbytes} bytes is cut off after {len(source)}")
    sizes = view[SIZES_AT : SIZES_AT + 8 * count]
    form = _Form(struct.unpack(f"<{count}Q", sizes), description)
    described = view[form.described : form.described + description]
    (digest,) = NUMBER.unpack_from(view, HEAD.size)
    if form.nbytes != nbytes or _digest(view[: HEAD.size], sizes, described) != digest:
        raise ProtocolError("the description of a packed buffer is damaged")
    return form, described


def _digest(head: bytes | memoryview, sizes: bytes | memoryview, description: bytes | memoryview) -> int:
    found = xxh3_64(head)
    found.update(sizes)
    found.update(description)
    return found.intdigest()


def _targets(buffers: Sequence[Buffer], sizes: Sequence[int]) -> list[_Filled]:
    """The first bytes of each buffer, to be written. Raises `InvalidInput` as `batch_encode_into`."""
    places: list[list[tuple[int, Bytes]]] = []
    try:
        for buffer, size in zip(buffers, sizes, strict=True):
            parts = [_contiguous(part) for part in _parts(buffer)]
            room = sum(part.nbytes for part in parts)
            if room < size:
                raise InvalidInput(f"it has {room} bytes, {size} are needed")
            if not all(part.flags.writeable for part in parts):
                raise InvalidInput("it is read-only")
            places.append([(address_of(part), part) for part in parts])
    except InvalidInput as error:
        raise InvalidInput(f"buffer {len(places)}: {error}") from None
    lying = sorted((start, part.nbytes) for parts in places for start, part in parts if part.nbytes)
    if any(start + nbytes > after for (start, nbytes), (after, _) in itertools.pairwise(lying)):
        raise InvalidInput("the buffers overlap")
    return [_target(parts, size) for parts, size in zip(places, sizes, strict=True)]


def _check_apart(targets: Sequence[_Filled], sources: Iterable[tuple[int, Source]], what: str) -> None:
    """Refuse numbered sources that would be overwritten before they are copied. Parts are written when all is."""
    taken = sorted((one.address, one.address + one.into.nbytes) for one in targets if not one.parts)
    for number, source in sources if taken else ():
        start, end = _extent(source)
        before = bisect_left(taken, (end, 0)) - 1  # they do not overlap each other
        if start < end and before >= 0 and taken[before][1] > start:
            raise InvalidInput(f"{what} {number} lies in a buffer that is to be written; copy it first")


def _extent(source: Source) -> tuple[int, int]:
    """From where to where its memory lies; nowhere for what is on a device."""
    if not nbytes_of(source) or (isinstance(source, torch.Tensor) and source.device.type != "cpu"):
        return 0, 0
    if isinstance(source, torch.Tensor):
        start, size = source.data_ptr(), source.element_size()
        steps = [(count - 1) * step * size for count, step in zip(source.shape, source.stride(), strict=True)]
    else:
        start, size = source.__array_interface__["data"][0], source.itemsize
        steps = [(count - 1) * step for count, step in zip(source.shape, source.strides, strict=True)]
    return start + sum(step for step in steps if step < 0), start + sum(step for step in steps if step > 0) + size


def _target(parts: list[tuple[int, Bytes]], size: int) -> _Filled:
    if len(parts) == 1:
        ((address, part),) = parts
        return _Filled(part, address, [])
    joined = np.empty(size, np.uint8)
    return _Filled(joined, address_of(joined), [part for _, part in parts])


def _parts(buffer: Buffer) -> Sequence[Buffer]:
    return buffer if isinstance(buffer, (list, tuple)) else (buffer,)


def _source(buffer: Buffer) -> Bytes:
    if isinstance(buffer, (list, tuple)):
        return np.concatenate([np.empty(0, np.uint8), *map(_contiguous, buffer)])
    return _contiguous(buffer)


def _item(item: Buffer, number: int) -> Bytes:
    """The bytes of an item, in order. Raises `InvalidInput`, which names the item."""
    try:
        if isinstance(item, torch.Tensor):
            if item.is_nested or item.layout is not torch.strided:
                raise InvalidInput("a nested or sparse tensor does not lie in one piece")
            item = item.resolve_conj().resolve_neg().contiguous()
        elif isinstance(item, np.ndarray):
            item = np.ascontiguousarray(item)
        elif isinstance(item, memoryview) and not item.c_contiguous:
            item = item.tobytes()
        return _contiguous(item)
    except InvalidInput as error:
        raise InvalidInput(f"item {number}: {error}") from None


def _contiguous(buffer: Buffer) -> Bytes:
    """The bytes of a buffer, which stays as it is as long as they are needed. Raises `InvalidInput`."""
    if isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise InvalidInput("a buffer lies in the memory of the processor, without gaps")
        if buffer.dtype is not torch.uint8 or buffer.dim() != 1:
            buffer = byte_view(buffer)
        found: Bytes = buffer.numpy()
        return found
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise InvalidInput("a buffer lies without gaps")
        if buffer.dtype.hasobject:
            raise InvalidInput("an array of objects has pointers for bytes")
        return buffer.reshape(-1).view(np.uint8) if buffer.nbytes else np.empty(0, np.uint8)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidInput(f"{type(buffer).__name__} is no buffer") from None
    if not view.c_contiguous:
        raise InvalidInput("a buffer lies without gaps")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


@contextmanager
def _copying(num_workers: int) -> Iterator[Mover]:
    if num_workers < 1:
        raise InvalidInput(f"num_workers {num_workers}")
    mover = Mover(num_workers)
    try:
        yield mover
    finally:
        mover.close()
