"""Building and taking apart nested tensors cheaply."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor, get_tensor_symint
from torch.utils._python_dispatch import _disable_current_modes

from transfer_queue.memory.bytes import Ints

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensor).add(torch._C.DispatchKey.AutogradNestedTensor)


class Offsets:
    """Where the rows of a jagged tensor begin and end, with the length of the shortest and the longest.

    torch keeps such a length as the shape of an empty tensor, which torch.compile has to take as changing.
    """

    def __init__(self, marks: torch.Tensor, shortest: int, longest: int) -> None:
        self.marks = marks
        self.count = len(marks) - 1
        self._size: Any = None
        self._steps: dict[int, Any] = {}
        self.lengths = {"min_seqlen": _length(shortest), "max_seqlen": _length(longest)}

    @classmethod
    def of(cls, marks: Ints) -> Offsets:
        lengths = np.diff(marks) if len(marks) > 1 else np.zeros(1, np.int64)
        return cls(torch.from_numpy(marks), int(lengths.min()), int(lengths.max()))

    @classmethod
    def uniform(cls, count: int, length: int) -> Offsets:
        return cls(torch.from_numpy(np.arange(count + 1, dtype=np.int64) * length), length, length)

    @classmethod
    def elsewhere(cls, rows: Any, device: torch.device) -> Offsets:
        """Those of a jagged tensor, on another device."""
        found = cls.__new__(cls)
        found.marks = rows._offsets.to(device)
        found.count = len(found.marks) - 1
        found._size, found._steps, found.lengths = None, {}, dict(rows._metadata_cache)
        return found

    @property
    def size(self) -> Any:
        """What torch calls the size of the dimension that differs; equal for tensors of these offsets only."""
        if self._size is None:  # not a `cached_property`, whose lock costs a microsecond up to Python 3.11
            self._size = get_tensor_symint(self.marks, coeff=1)
        return self._size

    def step(self, stride: int) -> Any:
        """`size * stride`, which takes torch 4 microseconds."""
        found = self.size if stride == 1 else self._steps.get(stride)
        if found is None:
            found = self._steps[stride] = self.size * stride
        return found


@lru_cache(maxsize=4096)
def _length(length: int) -> torch.Tensor:
    """What torch keeps a length as. Nobody writes to it, and it has no memory: tensors share it. So it is made outside
    of the modes of whoever asks first (inference, fake tensors)."""
    with torch.inference_mode(False), _disable_current_modes():
        found = torch.empty(length, 0, device="cpu")
    found._dynamo_propagated_dynamic_indices = {0}  # type: ignore[attr-defined]
    return found


class JaggedRows(NestedTensor):
    """A NestedTensor that gives one row without looking at the others.

    torch takes all of them apart for `x[3]`, by way of its schemas, which takes 15 times as long.
    What an operation makes of it is a plain NestedTensor, and so is what pickle and `copy` make.
    """

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int:
            with torch._C.DisableTorchFunctionSubclass():
                count = len(self._offsets) - 1
                if -count <= index < count and not self.requires_grad:
                    index %= count
                    begin, end = self._offsets[index : index + 2].tolist()
                    return self._values.narrow(self._ragged_idx - 1, begin, end - begin)
        return super().__getitem__(index)  # also what differentiates, and what says how many rows there are

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, (function, _, *rest) = super().__reduce_ex__(protocol)
        return rebuild, (function, NestedTensor, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        found = memo[id(self)] = copy.deepcopy(_remade(NestedTensor, self), memo)
        return found

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        """As torch.compile needs it: of the class that was taken apart."""
        return _remade(JaggedRows, NestedTensor.__tensor_unflatten__(inner, meta, size, stride))


def _remade(kind: type[NestedTensor], of: Any) -> Any:
    """The same rows, in the same memory, as a `kind`."""
    with torch._C.DisableTorchFunctionSubclass():
        return kind(
            of._values, offsets=of._offsets, lengths=of._lengths, requires_grad=of.requires_grad,
            _ragged_idx=of._ragged_idx, _metadata_cache=of._metadata_cache,
        )  # fmt: skip


def jagged(values: torch.Tensor, offsets: Offsets, ragged: int) -> torch.Tensor:
    """The jagged NestedTensor over `values` whose dimension `ragged` (counted with the batch) differs.

    It knows its longest row, as those of `torch.nested.nested_tensor` do: without, `to_padded_tensor` pads to the
    length of all rows together.
    """
    try:
        return (_put_together if _is_known() else constructed)(values, offsets, ragged)
    except TypeError as error:  # torch asks the length in Python, and gives another name to what is raised there
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        raise


def constructed(values: torch.Tensor, offsets: Offsets, ragged: int) -> torch.Tensor:
    """By torch's constructor: 13 microseconds, and 17 when it is given the lengths, for it marks them for torch.compile
    every time. `torch.nested.nested_tensor_from_jagged` with its checks costs 42."""
    found: Any = NestedTensor(values, offsets=offsets.marks, _ragged_idx=ragged)
    found._metadata_cache = dict(offsets.lengths)
    return found


def _put_together(values: torch.Tensor, offsets: Offsets, ragged: int) -> torch.Tensor:
    """What torch's constructor makes, without what is known here: half the time."""
    shape, strides, at = values.shape, values.stride(), ragged - 1
    size = (offsets.count, *shape[:at], offsets.size, *shape[ragged:])
    steps = (offsets.step(strides[at]), *strides)
    found: Any = torch.Tensor._make_wrapper_subclass(
        JaggedRows, size, steps, 0, torch.contiguous_format, values.dtype, torch.jagged, values.device, False, False,
        "sizes", False, True, _KEYS, storage_size=values.untyped_storage().size(),
    )  # fmt: skip
    found._size, found._strides, found._ragged_idx = size, steps, ragged
    found._values, found._offsets, found._lengths = values, offsets.marks, None
    found._metadata_cache = dict(offsets.lengths)
    found._dynamo_propagated_dynamic_indices = {ragged}
    values._dynamo_propagated_dynamic_indices = {at}  # type: ignore[attr-defined]
    return found


@lru_cache(maxsize=1)
def _is_known() -> bool:
    """Whether this torch makes its jagged tensors like the one that `_put_together` was written for: with the same
    attributes of the same values, of the tensor and of what it holds."""
    offsets = Offsets.uniform(2, 3)
    try:
        made = [make(torch.zeros(2, 6, 4, device="cpu"), offsets, 2) for make in (constructed, _put_together)]
        return _described(made[0]) == _described(made[1])
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False


def _described(made: Any) -> Any:
    values = made._values
    attributes = {name: repr(value) for name, value in vars(made).items()}
    looks = (made.shape, made.stride(), made.layout, made.dtype, made.device, made.requires_grad, made.is_contiguous())
    pickled = made.__reduce_ex__(2)[1][:2]  # what makes it again, and of which class
    return attributes, vars(values), looks, pickled, str(torch._C._dispatch_keys(made)), made.untyped_storage().size()


def nested(values: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The strided NestedTensor over flat `values`; row `i` has `sizes[i]`, `strides[i]` and begins at `starts[i]`.

    Shares memory, and takes every dtype, which `torch.nested.nested_tensor` does not.
    """
    found: torch.Tensor = torch._nested_view_from_buffer(values, sizes, strides, starts)
    return found


def strided(values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The strided NestedTensor whose rows, of these `sizes` (n, dims), lie one after the other in flat `values`."""
    if not len(sizes):
        return torch.nested.nested_tensor([], dtype=values.dtype, device="cpu")
    shapes = sizes.numpy()
    steps = np.ones_like(shapes)
    steps[:, :-1] = shapes[:, :0:-1].cumprod(axis=1)[:, ::-1]
    lengths = shapes.prod(axis=1)
    return nested(values, sizes, torch.from_numpy(steps), torch.from_numpy(lengths.cumsum() - lengths))


def flattened(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, sizes) of a strided NestedTensor, as `strided` takes them. Copies rows that do not lie like that."""
    rows = value.unbind()
    sizes = torch.tensor([tuple(row.shape) for row in rows], dtype=torch.int64).reshape(len(rows), value.dim() - 1)
    if not rows:
        return torch.empty(0, dtype=value.dtype, device="cpu"), sizes
    flat = torch.cat([row.reshape(-1) for row in rows]) if not value.is_contiguous() else value.values()
    return flat, sizes


def trimmed(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, offsets) of a jagged NestedTensor without what lies before its first and after its last row."""
    values, offsets, ragged = value._values, value._offsets, value._ragged_idx - 1
    first, last = int(offsets[0]), int(offsets[-1])
    if first or last != values.shape[ragged]:
        return values.narrow(ragged, first, last - first), offsets - first
    return values, offsets
