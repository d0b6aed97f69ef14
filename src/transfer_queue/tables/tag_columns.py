"""Tags as columns: one for each name, of one type where the values are alike, else JSON text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from transfer_queue.tables import texts
from transfer_queue.wire.messages import Tags

MAX_NAMES = 1000  # a column each; of more names the tags of a row are one text
EXACT = 1 << 53  # integers up to here are exact among floats
TYPES: list[tuple[set[type], pa.DataType]] = [
    ({bool}, pa.bool_()), ({int}, pa.int64()), ({int, float}, pa.float64()), ({str}, pa.large_string()),
    ({bytes}, pa.large_binary()),
]  # fmt: skip


def names_of(tags: Sequence[Tags]) -> list[str]:
    """The names in these tags, in order of appearance."""
    return list(dict.fromkeys(itertools.chain.from_iterable(tags)))


def together(tags: Sequence[Tags]) -> pa.Array:
    """The tags of a row as one text, null where it has none."""
    return pa.array([texts.text_of(tag, None) if tag else None for tag in tags], pa.large_string())


def column(values: list[Any]) -> pa.Array:
    """The values of one name; null where a row has none, or None."""
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {int, float} and any(type(value) is int and abs(value) > EXACT for value in values):
        kinds = {object}
    for wanted, found in TYPES:
        if kinds and kinds <= wanted:
            try:
                return pa.array(values, found)
            except (OverflowError, UnicodeEncodeError, pa.ArrowInvalid):
                break  # an integer of more than 64 bits, a lone surrogate
    if kinds == {str}:
        return pa.array([value if value is None else texts.clean(value) for value in values], pa.large_string())
    return pa.array([_json(value) for value in values], pa.large_string())


def _json(value: Any) -> str | None:
    """Of a column of several types: a string is in quotes, so that "1" is not 1."""
    if type(value) is str:
        return texts.clean(texts.quoted(value))
    return texts.text_of(value, None)
