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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.codec.layout import Bytes
from transfer_queue.errors import ProtocolError, ShapeMismatch, StaleBase, UnknownTensor
from transfer_queue.weights.digest import byte_view, digest_tensor
from transfer_queue.weights.manifest import Contents, Entry, Manifest, Stored, TensorSpec, expand, root_of
from transfer_queue.weights.packing import Placement, Plan
from transfer_queue.weights.sources import TensorMeta, WeightSource

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CODES: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
HEAD_NBYTES = 24
Indices = npt.NDArray[np.int64]


def encode(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """What `decode` needs to make `new` out of `old` (flat uint8, on the CPU), or `new` itself when that is not larger,
    or None when they are equal. `old` and `new` have the same dtype and shape."""
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ShapeMismatch(
            f"{old.dtype} {list(old.shape)} differs from {new.dtype} {list(new.shape)} in more than values"
        )
    units = _units(new.contiguous())
    most = (new.nbytes - HEAD_NBYTES) // (units.element_size() + 1)  # more elements than this need more bytes
    found = _changes(_units(old.contiguous()).to(units.device), units, most)
    if found is None:
        return new
    indices, values = found
    if not len(indices):
        return None
    width, codes = _gap_codes(indices)
    padding = -codes.nbytes % 8
    if HEAD_NBYTES + codes.nbytes + padding + values.nbytes >= new.nbytes:
        return new
    head = np.array([len(indices), len(codes), width], "<i8")
    parts = [head.view(np.uint8), codes.view(np.uint8), np.zeros(padding, np.uint8), values.view(np.uint8)]
    return torch.from_numpy(np.concatenate(parts))


def decode(stored: torch.Tensor, onto: torch.Tensor) -> None:
    """Turn the old tensor `onto` (contiguous, on the CPU) into the new one, in place.

    Raises `ProtocolError`, with `onto` unchanged, when `stored` is not a difference to a tensor of this size.
    """
    data = stored.numpy()
    units = _units(onto).numpy()
    num_changed, num_codes, width = _head(data)
    start = HEAD_NBYTES + num_codes * width
    start += -start % 8
    if start + num_changed * units.itemsize != data.nbytes:
        raise ProtocolError(
            f"a difference of {data.nbytes} bytes cannot have {num_changed} elements, {num_codes} codes"
        )
    codes = data[HEAD_NBYTES : HEAD_NBYTES + num_codes * width].copy().view(_CODES[width])
    indices = _indices(codes)
    if len(indices) != num_changed or (num_changed and indices[-1] >= len(units)):
        raise ProtocolError(f"the gaps do not lead to {num_changed} of {len(units)} elements")
    units[indices] = data[start:].copy().view(units.dtype)


def _changes(old: torch.Tensor, new: torch.Tensor, most: int) -> tuple[Indices, npt.NDArray[Any]] | None:
    """Indices of the elements that differ, and their new values; None when they are more than `most` and not 0."""
    if new.device.type != "cpu":
        differs = old != new
        if int(differs.count_nonzero()) > max(0, most):
            return None
        indices = differs.nonzero().reshape(-1)
        return indices.cpu().numpy(), new[indices].cpu().numpy()
    values = new.numpy()
    unequal = old.numpy() != values  # numpy finds them several times faster than torch on a CPU
    if np.count_nonzero(unequal) > max(0, most):
        return None
    found = np.flatnonzero(unequal)
    return found, values[found]


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
    flat bytes; `manifest` says what they mean. A version that adds or drops tensors, or changes their dtype, shape or
    ties, has no difference: `UnknownTensor`, `ShapeMismatch` or `StaleBase`.
    """

    def __init__(self, base: Mapping[str, torch.Tensor], base_root: str, new: WeightSource) -> None:
        self._aliases = new.aliases()
        self._contents: Contents = {}
        self._stored: dict[str, torch.Tensor] = {}
        old: Contents = {}
        for name, tensor in new.tensors():
            if name not in base:
                raise UnknownTensor(f"the base has no {name!r}: send a full version")
            stored = encode(base[name], tensor)
            if stored is not None:
                self._stored[name] = stored.clone() if stored is tensor else stored
            digest = digest_tensor(tensor)
            self._contents[name] = Entry(dtype_name(tensor.dtype), tuple(tensor.shape), digest)
            old[name] = self._contents[name]._replace(digest=digest if stored is None else digest_tensor(base[name]))
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
