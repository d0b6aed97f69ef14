"""Plain tensors of what a get returned: `Conv2d`, `torch.cat` and NumPy take no nested ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.errors import InvalidInput

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How rows of different length become one tensor.

    `value` fills what is missing. `side`: "right" or "left". `multiple`: a dimension that is filled up is as long as
    the longest row, rounded up to a multiple of it; rows of one dimension are, too, where all are of one length.
    `mask`: also give a bool tensor (rows, ...) for every padded field, true where a value is the row's own, under the
    field's name and "_mask", or under this name with the field's in place of "{}". Raises `InvalidInput`.
    """

    value: float = 0
    side: str = RIGHT
    multiple: int = 1
    mask: bool | str = False

    def __post_init__(self) -> None:
        for name in ("value", "multiple"):
            number = getattr(self, name)
            if isinstance(number, np.number):
                object.__setattr__(self, name, number.item())
        if self.side not in (LEFT, RIGHT):
            raise InvalidInput(f'side is "left" or "right", got {self.side!r}')
        if type(self.multiple) is not int or not 1 <= self.multiple < 1 << 32:
            raise InvalidInput(f"multiple is an integer of 1 or more, below 2**32, got {self.multiple!r}")
        if not isinstance(self.mask, (bool, str)):
            raise InvalidInput(f"mask is True, False or a name, got {self.mask!r:.200}")
        if not isinstance(self.value, (int, float)):
            raise InvalidInput(f"value is a number, got {self.value!r}")

    def mask_name(self, field: str) -> str | None:
        """The name of the mask of this field; None where no mask is wanted."""
        if not self.mask:
            return None
        return f"{field}_mask" if self.mask is True else self.mask.replace("{}", field)


Pad: TypeAlias = float | Padding | Mapping[str, float | Padding]


def check_pad(pad: Pad | None) -> None:
    """Raises `InvalidInput` for what no padding can be made of."""
    for each in pad.values() if isinstance(pad, Mapping) else (pad,):
        if each is not None:
            _padding(each)


def to_dense(data: TensorDict, pad: Pad | None = None) -> TensorDict:
    """The same rows with every nested tensor as a plain one, (rows, *row shape). Other fields stay as they are.

    A field whose rows have one shape needs no padding, and its tensor is a view. `pad` fills up rows that differ: a
    number or `Padding` for every such field, or a mapping that gives it for some. Raises `InvalidInput` for a field
    whose rows differ without a padding, for a value that its dtype does not have, and for masks whose name is taken.
    """
    check_pad(pad)
    if not isinstance(data, TensorDict):
        raise InvalidInput(f"data is a TensorDict, got {type(data).__qualname__}")
    if isinstance(pad, Mapping) and not pad.keys() <= set(data.keys()):
        raise InvalidInput(f"pad names fields that are not there: {sorted(pad.keys() - set(data.keys()))}")
    found: dict[str, Any] = {}
    masks: dict[str, torch.Tensor] = {}
    for name in data.keys():  # noqa: SIM118  a TensorDict iterates over rows
        value = data.get(name)
        if not isinstance(value, torch.Tensor):
            found[name] = value
            continue
        given = pad.get(name) if isinstance(pad, Mapping) else pad
        padding = None if given is None else _padding(given)
        found[name], mask = _plain(name, value, padding)
        title = None if mask is None or padding is None else padding.mask_name(name)
        if mask is not None and title is not None:
            if title in masks or title in data.keys():  # noqa: SIM118
                raise InvalidInput(f'the mask {title!r} has the name of another: name masks with mask="{{}}_other"')
            masks[title] = mask
    return TensorDict({**found, **masks}, batch_size=data.batch_size)


def has_nested(data: TensorDict) -> bool:
    """Whether `to_dense` would change something."""
    return any(isinstance(value, torch.Tensor) and value.is_nested for value in data.values())


def _padding(given: float | Padding) -> Padding:
    return given if isinstance(given, Padding) else Padding(value=given)


def _plain(name: str, value: Any, padding: Padding | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The field as a plain tensor, with its mask where it was padded."""
    if not value.is_nested:
        return value, None
    if value.layout == torch.jagged and value._lengths is None:
        return _of_jagged(name, value, padding)
    rows = list(value.unbind())
    shapes = [tuple(row.shape) for row in rows]
    if len(set(shapes)) == 1:
        dense = torch.stack(rows)
        return dense, _all_own(dense, padding)
    if padding is None:
        raise _ragged(name, shapes)
    sizes = [max(at) if len(set(at)) == 1 else _rounded(max(at), padding) for at in zip(*shapes, strict=True)]
    full = _filled(name, (len(rows), *sizes), value, padding)
    mask = torch.zeros(full.shape, dtype=torch.bool, device=full.device)
    for number, row in enumerate(rows):
        place = tuple(_place(length, size, padding) for length, size in zip(row.shape, sizes, strict=True))
        full[number][place] = row
        mask[number][place] = True
    return full, mask


def _of_jagged(name: str, value: Any, padding: Padding | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `_plain`, of values that lie together, without looking at every row."""
    dim = value._ragged_idx - 1  # of a row
    values, offsets = value._values, value._offsets
    first, last = int(offsets[0]), int(offsets[-1])
    values = values.narrow(dim, first, last - first) if first or last != values.shape[dim] else values
    lengths = offsets.diff()
    count, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    uniform = bool((lengths == longest).all())
    size = longest if padding is None or (uniform and values.dim() > 1) else _rounded(longest, padding)
    if uniform and size == longest:
        dense = values.unflatten(dim, (count, longest)).movedim(dim, 0)
        return dense, _all_own(dense, padding)
    if padding is None:
        raise _ragged(name, [(length,) for length in lengths.tolist()])
    steps = torch.arange(size, device=lengths.device)
    own = steps < lengths[:, None] if padding.side == RIGHT else steps >= size - lengths[:, None]
    full = _filled(name, (count, size, *values.movedim(dim, 0).shape[1:]), value, padding)
    _assignable(full)[own] = _assignable(values.movedim(dim, 0))
    full = full.movedim(1, dim + 1)
    mask = own.view(count, *(size if d == dim else 1 for d in range(full.dim() - 1))).expand(full.shape)
    return full, mask.contiguous()


def _all_own(dense: torch.Tensor, padding: Padding | None) -> torch.Tensor | None:
    """The mask of rows that needed no padding."""
    if padding is None or not padding.mask:
        return None
    return torch.ones(dense.shape, dtype=torch.bool, device=dense.device)


def _ragged(name: str, shapes: list[tuple[int, ...]]) -> InvalidInput:
    seen = sorted(set(shapes))
    text = ", ".join(map(str, seen[:4])) + (", ..." if len(seen) > 4 else "")
    return InvalidInput(f"field {name!r} has rows of different shape, {text}: give pad=, or leave dense out")


def _rounded(length: int, padding: Padding) -> int:
    return -(-length // padding.multiple) * padding.multiple


def _place(length: int, size: int, padding: Padding) -> slice:
    return slice(0, length) if padding.side == RIGHT else slice(size - length, size)


def _filled(name: str, shape: tuple[int, ...], like: torch.Tensor, padding: Padding) -> torch.Tensor:
    """A tensor of the padding's value. Raises `InvalidInput` where the dtype would change it into another number."""
    value, inexact = padding.value, like.dtype.is_floating_point or like.dtype.is_complex
    try:
        number = float(value) if inexact else value
        exact = torch.float64 if isinstance(number, float) else torch.uint64 if value >= 1 << 63 else torch.int64
        held = torch.tensor(number, dtype=exact, device="cpu").to(like.dtype)
        torch.full((1,), value, dtype=like.dtype, device="cpu")
    except NotImplementedError:
        raise InvalidInput(f"field {name!r} is {like.dtype}, which torch cannot fill: leave pad= out of it") from None
    except (OverflowError, RuntimeError, ValueError):  # torch's, for a number that the dtype has not
        holds = False
    else:
        if inexact:
            holds = not math.isfinite(value) or math.isfinite(abs(held.item()))
        else:
            holds = math.isfinite(value) and held.item() == value
    if not holds:
        raise InvalidInput(f"field {name!r} is {like.dtype}, which has no {padding.value!r} to pad with")
    return torch.full(shape, padding.value, dtype=like.dtype, device=like.device)


# Those of which torch assigns no chosen places; of float8 it does not where there is one number for them.
_AS_BYTES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_AS_BYTES |= {dtype: torch.uint8 for name, dtype in vars(torch).items() if name.startswith("float8_")}


def _assignable(value: torch.Tensor) -> torch.Tensor:
    """The same bytes as a dtype of which torch does."""
    return value.view(_AS_BYTES.get(value.dtype, value.dtype))
