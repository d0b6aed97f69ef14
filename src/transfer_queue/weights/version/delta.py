"""The exact difference between two states of a tensor, or of a box of it.

Elements are compared as integers, so NaNs, signed zeros and every dtype are exact. A difference lists the elements that
changed; applying it twice is applying it once:

    int64  number of changed elements, number of gap codes, bytes per code (1, 2 or 4)
    codes  little-endian, padded to 8 bytes: how many equal elements lie before the next changed one;
           the largest code means that many, and goes on
    values the changed elements
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64, xxh3_128

from transfer_queue.errors import ProtocolError, ShapeMismatch
from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.downloads import downloaded
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights.version.digest import STEP_NBYTES

_CODES: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_UNITS: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
HEAD_NBYTES = 24
PATCH_STEP = 1 << 20  # elements written at once on a device: 10 MB there, of bf16
Indices = npt.NDArray[np.int64]
Units = npt.NDArray[Any]  # elements as integers, flat; halves of elements of 16 bytes


class Patch(NamedTuple):
    """New values (as integers of the elements' size) for some elements of a flat tensor, by ascending indices."""

    indices: Indices
    values: Units

    def apply(self, onto: torch.Tensor) -> None:
        """Write them into a contiguous tensor, where it lies."""
        if onto.device.type == "cpu":
            units_of(onto)[self.indices] = self.values
            return
        elements = byte_view(onto).view(torch.from_numpy(self.values).dtype)
        for span in self._spans():
            indices = torch.from_numpy(self.indices[span]).to(onto.device)
            elements[indices] = torch.from_numpy(self.values[span]).to(onto.device)

    def before(self, onto: torch.Tensor) -> Patch:
        """What takes `apply` back."""
        if onto.device.type == "cpu":
            return Patch(self.indices, units_of(onto)[self.indices])
        elements = byte_view(onto).view(torch.from_numpy(self.values).dtype)
        values = np.empty_like(self.values)
        for span in self._spans():
            indices = torch.from_numpy(self.indices[span]).to(onto.device)
            torch.from_numpy(values[span]).copy_(elements[indices])
        return Patch(self.indices, values)

    def _spans(self) -> Iterator[slice]:
        """Parts that need little of a device's memory."""
        for start in range(0, len(self.indices), PATCH_STEP):
            yield slice(start, start + PATCH_STEP)

    def result(self, base: torch.Tensor, into: torch.Tensor | None = None) -> str:
        """Write the contiguous tensor `base`, on any device, changed by this, to `into`, on the CPU (None: nowhere);
        the result's digest. Both are done step by step, so that memory is read once."""
        scratch = np.empty(min(STEP_NBYTES, base.nbytes) // self.values.itemsize, self.values.dtype)
        place = None if into is None else units_of(into)
        state = xxh3_128()
        start = first = 0
        for part in in_steps(base):
            end = start + len(part)
            target = scratch[: len(part)] if place is None else place[start:end]
            np.copyto(target, part)
            last = int(np.searchsorted(self.indices, end))
            target[self.indices[first:last] - start] = self.values[first:last]
            state.update(target.data)
            start, first = end, last
        return state.hexdigest()


class Difference(NamedTuple):
    """What leads from old elements to new ones: a `patch`, and as what it is `stored` (what `read` takes; None when
    nothing changed). No patch where it would need no fewer bytes than the new elements. `digest` is that of these."""

    digest: str
    patch: Patch | None
    stored: Bytes | None


def difference(old: torch.Tensor, new: torch.Tensor) -> Difference:
    """Of contiguous tensors of the same dtype and shape (otherwise `ShapeMismatch`), the old one on the CPU."""
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ShapeMismatch(
            f"{old.dtype} {list(old.shape)} differs from {new.dtype} {list(new.shape)} in more than values"
        )
    return difference_of(units_of(old), in_steps(new))


def difference_of(old: Units, new: Iterable[Units]) -> Difference:
    """Of elements as integers. `new` has as many, in steps."""
    # With more changed elements than this the difference needs more bytes, or hardly fewer.
    most = max(0, min((old.nbytes - HEAD_NBYTES) // (old.itemsize + 1), len(old) // 4))
    patch, digest = _scan(old, new, most)
    if patch is None or not len(patch.indices):
        return Difference(digest, patch, None)
    width, codes = _gap_codes(patch.indices)
    padding = -codes.nbytes % 8
    if HEAD_NBYTES + codes.nbytes + padding + patch.values.nbytes >= old.nbytes:
        return Difference(digest, None, None)
    head = np.array([len(patch.indices), len(codes), width], "<i8")
    parts = [head.view(np.uint8), codes.view(np.uint8), np.zeros(padding, np.uint8), patch.values.view(np.uint8)]
    return Difference(digest, patch, np.concatenate(parts))


def read(stored: torch.Tensor, base: torch.Tensor) -> Patch:
    """The changes to a tensor like `base`. `ProtocolError` when `stored` is not a difference to one of its size."""
    data, itemsize = stored.numpy(), min(8, base.element_size())
    num = base.nbytes // itemsize
    num_changed, num_codes, width = _head(data)
    start = HEAD_NBYTES + num_codes * width
    start += -start % 8
    if start + num_changed * itemsize != data.nbytes:
        raise ProtocolError(
            f"a difference of {data.nbytes} bytes cannot have {num_changed} elements, {num_codes} codes"
        )
    codes = data[HEAD_NBYTES : HEAD_NBYTES + num_codes * width].copy().view(_CODES[width])
    indices = _indices(codes)
    if len(indices) != num_changed or (num_changed and indices[-1] >= num):
        raise ProtocolError(f"the gaps do not lead to {num_changed} of {num} elements")
    return Patch(indices, data[start:].copy().view(_UNITS[itemsize]))


def units_of(tensor: torch.Tensor) -> Units:
    """The elements of a contiguous CPU tensor."""
    return units_from(byte_view(tensor).numpy(), tensor.element_size())


def units_from(data: Bytes, itemsize: int) -> Units:
    """The elements of this size with these bytes."""
    return data.view(_UNITS[min(8, itemsize)])


def in_steps(tensor: torch.Tensor) -> Iterator[Units]:
    """The elements of a contiguous tensor, on any device, in steps that stay in a core's cache."""
    flat = byte_view(tensor)
    for data in [flat.numpy()] if flat.device.type == "cpu" else downloaded(flat):
        yield from steps_from(data, tensor.element_size())


def steps_from(data: Bytes, itemsize: int) -> Iterator[Units]:
    """As `in_steps`, of the elements of this size with these bytes."""
    for start in range(0, data.nbytes, STEP_NBYTES):
        yield units_from(data[start : start + STEP_NBYTES], itemsize)


def _scan(old: Units, new: Iterable[Units], most: int) -> tuple[Patch | None, str]:
    """The changes (None: more than `most`, and not 0) and the digest of `new`, reading both once."""
    unequal = np.empty(min(STEP_NBYTES // old.itemsize, len(old)), np.bool_)
    state, touched = xxh3_128(), xxh3_64()
    found: list[Indices] = [np.empty(0, np.int64)]
    values: list[Units] = [np.empty(0, old.dtype)]
    count = start = 0
    for part in new:
        state.update(part.data)
        if count <= most:
            before = old[start : start + len(part)]
            touched.update(before.data)  # brings it to the cache faster than the comparison does: a tenth of the time
            differs = np.flatnonzero(np.not_equal(before, part, out=unequal[: len(part)]))
            found.append(differs + start)
            values.append(part[differs])
            count += len(differs)
        start += len(part)
    if count > most:
        return None, state.hexdigest()
    return Patch(np.concatenate(found), np.concatenate(values)), state.hexdigest()


def _head(data: Bytes) -> tuple[int, int, int]:
    if data.nbytes < HEAD_NBYTES:
        raise ProtocolError(f"a difference of {data.nbytes} bytes has no head")
    num_changed, num_codes, width = (int(number) for number in data[:HEAD_NBYTES].copy().view("<i8"))
    if width not in _CODES or not 0 <= num_changed <= num_codes <= data.nbytes:
        raise ProtocolError(f"a difference with {num_changed} elements, {num_codes} codes of {width} bytes")
    return num_changed, num_codes, width


def _gap_codes(indices: Indices) -> tuple[int, npt.NDArray[Any]]:
    """The width that needs the fewest bytes, and the codes of gaps before ascending indices."""
    gaps = np.diff(indices, prepend=-1) - 1
    longest = int(gaps.max(initial=0))
    if longest < _largest(1):
        return 1, gaps.astype(_CODES[1])
    sizes = {}
    for width in _CODES:
        long = gaps[gaps >= _largest(width)]
        sizes[width] = width * (len(gaps) + int((long // _largest(width)).sum()))
    width = min(sizes, key=lambda width: sizes[width])
    largest = _largest(width)
    long = np.flatnonzero(gaps >= largest)
    num_full = gaps[long] // largest
    gaps[long] -= num_full * largest
    before = np.zeros(len(gaps), np.int64)
    before[long] = num_full
    codes = np.full(sizes[width] // width, largest, _CODES[width])
    codes[np.cumsum(before) + np.arange(len(gaps))] = gaps
    return width, codes


def _indices(codes: npt.NDArray[Any]) -> Indices:
    """The ascending indices that the codes lead to."""
    found = np.cumsum(codes, dtype=np.int64)
    last = codes != _largest(codes.itemsize)
    if not last.all():
        found = found[last]
    found += np.arange(len(found))
    return found


def _largest(width: int) -> int:
    return int(256**width - 1)
