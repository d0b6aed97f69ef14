"""Values that are no numbers, as text to look at. Text of strings is whole, of anything else a preview."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from transfer_queue.codec.described import Described

MAX_DEPTH, MAX_ITEMS = 16, 256  # of a preview
MAX_BITS = 4096  # of an integer in digits: Python refuses to write very long ones
SAMPLED = 64  # items whose sizes stand for those of all


def clean(text: str) -> str:
    """`text` as UTF-8 can have it: lone surrogates are escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def text_of(value: Any, max_chars: int | None) -> str | None:
    """A string as it is, None as it is, anything else as JSON of at most `max_chars` characters (None: all of it).

    What JSON does not have is described in a string, as in `<image, PNG file, 812 bytes>`; a number that is not finite
    is null. Nothing is evaluated.
    """
    if value is None or type(value) is str:
        return None if value is None else clean(value)
    text = clean(_json(_plain(value, MAX_DEPTH, max_chars)))
    return text if max_chars is None or len(text) <= max_chars else text[: max(0, max_chars - 1)] + "…"


def _json(plain: Any) -> str:
    try:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False)
    except ValueError:  # some number is not finite
        return json.dumps(_finite(plain), ensure_ascii=False, allow_nan=False)


def _finite(plain: Any) -> Any:
    """Null in place of what is not finite."""
    if type(plain) is float:
        return plain if plain - plain == 0 else None
    if type(plain) is list:
        return [_finite(one) for one in plain]
    return {name: _finite(one) for name, one in plain.items()} if type(plain) is dict else plain


def _plain(value: Any, depth: int, max_chars: int | None) -> Any:
    """`value` as JSON has it; no more of it than a preview shows."""
    kind = type(value)
    if kind is int and value.bit_length() > MAX_BITS:
        return hex(value) if max_chars is None else f"<int of {value.bit_length()} bits>"
    if kind in (bool, int, float) or value is None:
        return value
    if kind is str:
        return value if max_chars is None else value[: max_chars + 1]
    if isinstance(value, (NonTensorStack, NonTensorData)):
        value = value.tolist() if isinstance(value, NonTensorStack) else value.data
    items = MAX_ITEMS if max_chars is not None else None
    if isinstance(value, (list, tuple, set, frozenset)) and type(value) is not Described:
        if not depth:
            return f"<{kind.__name__} of {len(value)}>"
        return [_plain(one, depth - 1, max_chars) for one in itertools.islice(value, items)]
    if isinstance(value, (dict, TensorDictBase)):
        if not depth:
            return f"<{kind.__name__}>"
        pairs = [(name, _plain(one, depth - 1, max_chars)) for name, one in itertools.islice(value.items(), items)]
        made = {_key(name): one for name, one in pairs}
        if len(made) < len(pairs):  # 1 and "1" are one name in JSON
            return [[_plain(name, depth - 1, max_chars), one] for name, one in pairs]
        return made
    return _described(value, depth, max_chars)


def _key(name: Any) -> str:
    return hex(name) if type(name) is int and name.bit_length() > MAX_BITS else str(name)


def _described(value: Any, depth: int, max_chars: int | None) -> Any:
    if type(value) is Described:
        return _of_described(value, depth, max_chars)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _of_array(value, max_chars)
    if isinstance(value, np.generic):
        return _plain(value.item(), 0, max_chars) if _has_numbers(value.dtype) else str(value)[:MAX_ITEMS]
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value)} bytes>" if max_chars is not None else value.hex()
    return str(value)[: MAX_ITEMS if max_chars is not None else None]  # dates, paths, numbers of other kinds


def _of_described(value: Described, depth: int, max_chars: int | None) -> Any:
    if value.what == "image":
        _, name, size = value.content[:3]
        about = f"{name} file" if value.file is not None else f"{name} {'x'.join(map(str, size))}"
        return f"<image, {about}, {0 if value.data is None else len(value.data)} bytes>"
    if value.what == "pickle":
        return f"<pickle, {value.content} bytes>"
    return {value.what: _plain(value.content, depth - 1, max_chars) if depth else "..."}


def _of_array(value: Any, max_chars: int | None) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    nested = is_tensor and value.is_nested
    dtype = str(value.dtype).removeprefix("torch.")
    shape = "nested" if nested else "x".join(map(str, value.shape)) or "scalar"
    count = value.numel() if is_tensor else value.size
    if nested or dtype.startswith("complex") or (max_chars is not None and count > MAX_ITEMS):
        return f"<{'tensor' if is_tensor else 'array'} {dtype} {shape}>"
    if is_tensor:
        try:
            return (value.float() if value.dtype.is_floating_point else value).tolist()
        except RuntimeError:  # torch makes no numbers of some dtypes
            return f"<tensor {dtype} {shape}>"
    return value.tolist() if _has_numbers(value.dtype) else f"<array {dtype} {shape}>"


def _has_numbers(dtype: Any) -> bool:
    """Whether Python has its numbers, or texts: it has none as wide as a long double."""
    return dtype.kind in "biufU" and dtype.char != "g"


def bytes_of(value: Any) -> bytes | None:
    """Bytes as they are, a string as UTF-8, an image's file; None for anything else, and for an image of pixels."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if type(value) is str:
        return value.encode("utf-8", "backslashreplace")
    if type(value) is Described and value.file is not None:
        return bytes(value.file)
    return None


def nbytes_of(value: Any) -> int:
    """About how many bytes a value has."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes) if not (isinstance(value, torch.Tensor) and value.is_nested) else 1024
    if type(value) is Described:
        return 64 + (0 if value.data is None else len(value.data))
    if isinstance(value, (list, tuple)) and value:
        sample = value[:SAMPLED]
        return sum(map(nbytes_of, sample)) * len(value) // len(sample)
    if isinstance(value, dict):
        return 64 + sum(nbytes_of(one) for one in itertools.islice(value.values(), SAMPLED))
    return 16


def quoted(text: str) -> str:
    """A string as JSON has it."""
    return json.dumps(text, ensure_ascii=False)
