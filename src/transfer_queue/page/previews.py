"""The beginning of a value, as text. No code of the value's own runs: of objects of other classes only the name is
shown, and of lists, tuples and mappings as much as fits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from transfer_queue.page.png import is_picture
from transfer_queue.page.printable import MAX_TEXT, lines, printable

NUMBERS = 96  # of a tensor
HEX_NBYTES = 64
MAX_SUMMED = 1 << 20
DEPTH, ITEMS = 4, 32
BEGINNING = ", its beginning"


def preview(value: Any, is_cut: bool = False) -> dict[str, Any]:
    """`kind` ("text", "numbers", "binary", "image", "object"), `type`, and `text` of at most about 2 kB. `is_cut`: the
    value is the beginning of a longer tensor, of which nothing is said as of the whole."""
    # By type alone: `isinstance` would ask the value for its class.
    if type(value) is str:
        return {"kind": "text", "type": f"text, {len(value):,} characters", "text": lines(value)}
    if type(value) in (bytes, bytearray, memoryview):
        return _binary(bytes(value[:HEX_NBYTES]), len(value))
    if is_picture(value):
        return {"kind": "image", "type": _image_type(value) + BEGINNING * is_cut, "text": ""}
    if type(value) is torch.Tensor and not value.is_nested:
        return _numbers(value, is_cut)
    if type(value) is np.ndarray and value.dtype.kind in "biuf" and value.dtype.char != "g":  # torch has no long double
        return _numbers(torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False)), is_cut)
    return {"kind": "object", "type": _name(value), "text": lines(_safe(value, DEPTH))}


def _binary(first: bytes, size: int) -> dict[str, Any]:
    text = first.hex(" ") + (" …" if size > len(first) else "")
    return {"kind": "binary", "type": f"{size:,} bytes", "text": text}


def _image_type(value: Any) -> str:
    if type(value) is torch.Tensor:
        return _shape(value)
    return f"image {value.width} × {value.height}, {printable(str(value.mode), 16)}"


def _shape(value: torch.Tensor) -> str:
    shape = "×".join(map(str, value.shape))
    return f"{str(value.dtype).removeprefix('torch.')}{f' [{shape}]' if shape else ''}"


def _numbers(value: torch.Tensor, is_cut: bool) -> dict[str, Any]:
    flat = value.detach().reshape(-1)
    shown = flat[:NUMBERS].tolist()
    text = ", ".join(f"{one:.6g}" if type(one) is float else str(one) for one in shown)
    if len(flat) > NUMBERS:
        text += ", …" if is_cut else f", … ({len(flat):,} numbers)"
    about = "" if is_cut else _about(flat)
    return {"kind": "numbers", "type": _shape(value) + BEGINNING * is_cut, "text": text, "about": about}


def _about(flat: torch.Tensor) -> str:
    """Least, greatest and mean of more than a few; what is not finite."""
    if not 1 < len(flat) <= MAX_SUMMED or flat.dtype == torch.bool or flat.is_complex():
        return ""
    found = flat.double()
    strange = int((~torch.isfinite(found)).sum())
    text = f"min {found.min().item():.6g}, max {found.max().item():.6g}, mean {found.mean().item():.6g}"
    return f"{text}, {strange:,} not finite" if strange else text


def _name(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    size = f", {len(value):,} items" if type(value) in (list, tuple, dict, set, frozenset) else ""
    return printable(name) + size


def _safe(value: Any, depth: int) -> str:
    """As `repr` where that is known to be harmless and short; else what it is."""
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() <= 512 else f"<int of {value.bit_length():,} bits>"
    if kind is str:
        return repr(value[:MAX_TEXT]) + ("…" if len(value) > MAX_TEXT else "")
    if kind in (bytes, bytearray):
        return f"<{len(value):,} bytes>"
    if kind is torch.Tensor and not value.is_nested:
        return f"<tensor {_shape(value)}>"
    if kind is np.ndarray:
        return f"<array {value.dtype.name} {list(value.shape)}>"
    if kind is dict:
        return _joined("{}", ((f"{_safe(k, 0)}: ", v) for k, v in value.items()), len(value), depth)
    if kind in (list, tuple, set, frozenset):
        return _joined(
            "[]" if kind is list else "()" if kind is tuple else "{}", (("", v) for v in value), len(value), depth
        )
    return f"<{_name(value)}>"


def _joined(ends: str, items: Iterable[tuple[str, Any]], size: int, depth: int) -> str:
    """The first items, as long as they are few and short."""
    if depth <= 0:
        return f"{ends[0]}{f'{size:,} items' if size else ''}{ends[1]}"
    found, length = list[str](), 0
    for name, value in items:
        if len(found) == ITEMS or length > MAX_TEXT:
            break
        found.append(name + _safe(value, depth - 1))
        length += len(found[-1])
    more = ", …" if len(found) < size else ""
    return f"{ends[0]}{', '.join(found)}{more}{ends[1]}"
