"""Values, shortened to a line: what they are, and how they begin. No code of a value runs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from transfer_queue.cli.tables import harmless

MAX_TEXT = 200  # characters
MAX_ITEMS = 8
MAX_NESTED = 3
MAX_BITS = 4096  # of an integer: Python refuses to write very long ones


def preview(value: Any, depth: int = 0) -> str:
    """A tensor or array by shape, dtype and first numbers; a text or bytes cut; of containers the first items."""
    if isinstance(value, str):
        cut = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}…"
        return harmless(repr(cut)) + (f" ({len(value):,} characters)" if len(value) > MAX_TEXT else "")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value):,} bytes {bytes(value[:16]).hex(' ')}{' …' if len(value) > 16 else ''}"
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"<int of {value.bit_length():,} bits>"
    if value is None or type(value) in (bool, int, float):
        return str(value)[:MAX_TEXT]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _of_array(value)
    if depth >= MAX_NESTED:
        return "…"
    if isinstance(value, Mapping):
        items = [
            f"{preview(name, depth + 1)}: {preview(one, depth + 1)}" for name, one in islice(value.items(), MAX_ITEMS)
        ]
        return f"{{{_cut(items, len(value))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{_cut([preview(one, depth + 1) for one in value[:MAX_ITEMS]], len(value))}]"
    return f"<{harmless(type(value).__qualname__)}>"


def _cut(items: list[str], there: int) -> str:
    return ", ".join(items) + (f", … {there:,} in all" if there > len(items) else "")


def _of_array(value: Any) -> str:
    """Of a tensor, nested ones included, or an array of numpy."""
    kind = str(value.dtype).removeprefix("torch.")
    if getattr(value, "is_nested", False):
        return f"{kind} nested, {len(value.unbind()):,} parts"
    there = int(value.numel()) if hasattr(value, "numel") else int(value.size)
    if kind == "object":
        return f"object {list(value.shape)}"
    first = value.reshape(-1)[:MAX_ITEMS]
    numbers = (first.double() if "float" in kind and hasattr(first, "double") else first).tolist()
    items = [f"{one:g}" if isinstance(one, float) else str(one)[:MAX_TEXT] for one in numbers]
    return harmless(f"{kind} {list(value.shape)} [{_cut(items, there)}]")
