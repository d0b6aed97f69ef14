"""The exact difference between two states of a tensor, and the source of a version that carries only differences.

Elements are compared as integers, so NaNs, signed zeros and every dtype are exact. A difference lists the elements that
changed; applying it twice is applying it once:

    int64  number of changed elements, number of gap codes, bytes per code (1, 2 or 4)
    codes  little-endian, padded to 8 bytes: how many equal elements lie before the next changed one;
           the largest code means that many, and goes on
    values the changed elements
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_128

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.errors import ProtocolError, ShapeMismatch, StaleBase, UnknownTensor
from transfer_queue.memory.bytes import Bytes
from transfer_queue.weights.version.device import ready
from transfer_queue.weights.version.digest import STEP_NBYTES, byte_view, digest_tensor
from transfer_queue.weights.version.manifest import Contents, Entry, Manifest, Stored, TensorSpec, expand, root_of
from transfer_queue.weights.version.packing import NUM_THREADS, Placement, Plan
from transfer_queue.weights.version.sources import TensorMeta, WeightSource

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CODES: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_NUMPY: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
HEAD_NBYTES = 24
Indices = npt.NDArray[np.int64]


class Difference(NamedTuple):
    """`stored` is what `read` takes, or the new tensor itself when that is not larger, or None when nothing changed.
    `digest` is the new tensor's."""

    stored: torch.Tensor | None
    digest: str


class Patch(NamedTuple):
    """New values (as integers of the elements' size) for some elements of a flat tensor, by ascending indices."""

    indices: Indices
    values: npt.NDArray[Any]

    def apply(self, onto: torch.Tensor) -> None:
        """Write them into a contiguous CPU tensor, by several threads."""
        _units(onto)[torch.from_numpy(self.indices)] = torch.from_numpy(self.values)

    def before(self, onto: torch.Tensor) -> Patch:
        """What takes `apply` back."""
        return Patch(self.indices, _units(onto).numpy()[self.indices])

    def result(self, base: torch.Tensor, into: torch.Tensor | None = None) -> str:
        """Write the contiguous CPU tensor `base`, changed by this, to `into` (None: nowhere); the result's digest.

        Both are done in steps that stay in a core's cache, so that memory is read once."""
        units = _units(base).numpy()
        place = None if into is None else _units(into).numpy()
        step = STEP_NBYTES // units.itemsize
        scratch = np.empty(min(step, len(units)), units.dtype)
        ends = np.searchsorted(self.indices, np.arange(0, len(units) + step, step))
        state = xxh3_128()
        for number, start in enumerate(range(0, len(units), step)):
            part = units[start : start + step]
            target = scratch[: len(part)] if place is None else place[start : start + step]
            np.copyto(target, part)
            span = slice(ends[number], ends[number + 1])
            target[self.indices[span] - start] = self.values[span]
            state.update(target.data)
        return state.hexdigest()


def encode(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """See `Difference.stored`: flat uint8, on the CPU. `old` and `new` have the same dtype and shape."""
    return difference(old, new).stored


def difference(old: torch.Tensor, new: torch.Tensor) -> Difference:
    """What leads from `old` to `new`, which have the same dtype and shape (otherwise `ShapeMismatch`)."""
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ShapeMismatch(
            f"{old.dtype} {list(old.shape)} differs from {new.dtype} {list(new.shape)} in more than values"
        )
    before, units = _units(old.contiguous()), _units(new.contiguous())
    # With more changed elements than this the difference needs more bytes, or hardly fewer.
    most = max(0, min((new.nbytes - HEAD_NBYTES) // (units.element_size() + 1), len(units) // 4))
    if units.device.type == "cpu":
        found, digest = _scan(before.cpu().numpy(), units.numpy(), most)
    else:
        found, digest = _changes(before.to(units.device), units, most), digest_tensor(new)
    if found is None:
        return Difference(new, digest)
    if not len(found.indices):
        return Difference(None, digest)
    width, codes = _gap_codes(found.indices)
    padding = -codes.nbytes % 8
    if HEAD_NBYTES + codes.nbytes + padding + found.values.nbytes >= new.nbytes:
        return Difference(new, digest)
    head = np.array([len(found.indices), len(codes), width], "<i8")
    parts = [head.view(np.uint8), codes.view(np.uint8), np.zeros(padding, np.uint8), found.values.view(np.uint8)]
    return Difference(torch.from_numpy(np.concatenate(parts)), digest)


def read(stored: torch.Tensor, base: torch.Tensor) -> Patch:
    """The changes to a tensor like `base`. `ProtocolError` when `stored` is not a difference to one of its size."""
    data = stored.numpy()
    units = _units(base)
    num_changed, num_codes, width = _head(data)
    start = HEAD_NBYTES + num_codes * width
    start += -start % 8
    if start + num_changed * units.element_size() != data.nbytes:
        raise ProtocolError(
            f"a difference of {data.nbytes} bytes cannot have {num_changed} elements, {num_codes} codes"
        )
    codes = data[HEAD_NBYTES : HEAD_NBYTES + num_codes * width].copy().view(_CODES[width])
    indices = _indices(codes)
    if len(indices) != num_changed or (num_changed and indices[-1] >= len(units)):
        raise ProtocolError(f"the gaps do not lead to {num_changed} of {len(units)} elements")
    return Patch(indices, data[start:].copy().view(_NUMPY[units.element_size()]))


def decode(stored: torch.Tensor, onto: torch.Tensor) -> None:
    """Turn the old tensor `onto` (contiguous, on the CPU) into the new one, in place. Raises as `read` does, with
    `onto` unchanged."""
    read(stored, onto).apply(onto)


def _scan(old: npt.NDArray[Any], new: npt.NDArray[Any], most: int) -> tuple[Patch | None, str]:
    """The changes (None: more than `most`, and not 0) and the digest of `new`, reading both once."""
    step = STEP_NBYTES // new.itemsize
    unequal = np.empty(min(step, len(new)), np.bool_)
    state = xxh3_128()
    found: list[Indices] = []
    count = 0
    for start in range(0, len(new), step):
        part = new[start : start + step]
        state.update(part.data)
        if count <= most:
            differs = np.not_equal(old[start : start + step], part, out=unequal[: len(part)])
            found.append(np.flatnonzero(differs) + start)
            count += len(found[-1])
    if count > most:
        return None, state.hexdigest()
    indices = np.concatenate(found) if found else np.empty(0, np.int64)
    return Patch(indices, new[indices]), state.hexdigest()


def _changes(old: torch.Tensor, new: torch.Tensor, most: int) -> Patch | None:
    """As `_scan`, on a device."""
    differs = old != new
    if int(differs.count_nonzero()) > most:
        return None
    indices = differs.nonzero().reshape(-1)
    return Patch(indices.cpu().numpy(), new[indices].cpu().numpy())


def _units(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, flat; halves of elements of 16 bytes."""
    return byte_view(tensor).view(_INTEGERS[min(8, tensor.element_size())])


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
    sizes = {width: width * (len(gaps) + int((gaps // _largest(width)).sum())) for width in _CODES}
    width = min(sizes, key=lambda width: sizes[width])
    full, rest = np.divmod(gaps, _largest(width))
    codes = np.full(sizes[width] // width, _largest(width), _CODES[width])
    codes[np.cumsum(full + 1) - 1] = rest
    return width, codes


def _indices(codes: npt.NDArray[Any]) -> Indices:
    """The ascending indices that the codes lead to."""
    last = codes != _largest(codes.itemsize)
    return np.cumsum(codes, dtype=np.int64)[last] + np.arange(np.count_nonzero(last))


def _largest(width: int) -> int:
    return int(256**width - 1)


class DeltaSource:
    """The difference of a source to the tensors of an earlier version (`base`, by name), ready to be packed.

    Holds the encoded differences, and reads both sides once, when made. It gives what is stored, so its tensors may be
    flat bytes; `manifest` says what they mean. `base_digests` spares reading the base for them. A version that adds or
    drops tensors, or changes their dtype, shape or ties, has no difference: `UnknownTensor`, `ShapeMismatch` or
    `StaleBase`.
    """

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        base_root: str,
        new: WeightSource,
        base_digests: Mapping[str, str] | None = None,
    ) -> None:
        self._aliases = new.aliases()
        self._contents: Contents = {}
        self._stored: dict[str, torch.Tensor] = {}
        old: Contents = {}

        def compare(name: str, tensor: torch.Tensor, written: torch.Event | None) -> Difference:
            if name not in base:
                raise UnknownTensor(f"the base has no {name!r}: send a full version")
            if written is not None:
                written.synchronize()
            return difference(base[name], tensor)

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tq-delta") as helpers:
            comparing = [
                (name, tensor, helpers.submit(compare, name, tensor, ready(tensor))) for name, tensor in new.tensors()
            ]
            for name, tensor, compared in comparing:
                stored, digest = compared.result()
                if stored is not None:
                    self._stored[name] = stored.clone() if stored is tensor else stored
                self._contents[name] = Entry(dtype_name(tensor.dtype), tuple(tensor.shape), digest)
                was = digest if stored is None else (base_digests or {}).get(name) or digest_tensor(base[name])
                old[name] = self._contents[name]._replace(digest=was)
        self._base_root = base_root
        if root_of(expand(old, self._aliases)) != base_root:
            raise StaleBase("the base does not have that root: send a full version")

    def specs(self) -> list[TensorMeta]:
        return [TensorMeta(name, stored.dtype, tuple(stored.shape)) for name, stored in self._stored.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._stored.items()

    def aliases(self) -> dict[str, str]:
        return {alias: name for alias, name in self._aliases.items() if name in self._stored}

    def manifest(
        self,
        where: Plan,
        digests: Mapping[str, str],
        *,
        version: int,
        epoch: str,
        base: int,
        label: str = "",
        meta: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """The manifest, given the plan of these specs and the digests of what is stored."""
        return Manifest(
            version=version, epoch=epoch, kind="delta", base=base, base_root=self._base_root, label=label,
            tensors=tuple(self._spec(place, digests) for place in where.placements), aliases=self.aliases(),
            buckets=where.buckets, root=root_of(expand(self._contents, self._aliases)), meta=dict(meta or {}),
        )  # fmt: skip

    def _spec(self, place: Placement, digests: Mapping[str, str]) -> TensorSpec:
        dtype, shape, digest = self._contents[place.name]
        nbytes = math.prod(shape) * torch_dtype(dtype).itemsize
        stored = Stored(place.nbytes, digests[place.name]) if place.nbytes < nbytes else None
        return TensorSpec(place.name, dtype, shape, nbytes, digest, place.bucket, place.offset, stored)
