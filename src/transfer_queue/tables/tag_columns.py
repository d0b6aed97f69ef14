"""Tags as columns: one for each name, of one type where the values are alike, else JSON text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from transfer_queue.tables import texts
from transfer_queue.wire.messages import Tags

MAX_NAMES = 1000  # a column each; of more names the tags of a row are one text
EXACT = 1 << 53  # integers up to here are exact among floats


def names_of(tags: Sequence[Tags]) -> list[str]:
    """The names in these tags, in order of appearance."""
    found: dict[str, None] = {}
    for tag in tags:
        if tag.keys() - found.keys():
            found.update(dict.fromkeys(tag))
    return list(found)


def column(tags: Sequence[Tags], name: str) -> pa.Array:
    """The values of one name; null where a row has none, or None."""
    return _array([tag.get(name) for tag in tags])


def together(tags: Sequence[Tags]) -> pa.Array:
    """The tags of a row as one text, null where it has none."""
    return pa.array([texts.text_of(tag, None) if tag else None for tag in tags], pa.large_string())


def _array(values: list[Any]) -> pa.Array:
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {str}:
        return pa.array([value if value is None else texts.clean(value) for value in values], pa.large_string())
    for wanted, found in (({bool}, pa.bool_()), ({int}, pa.int64()), ({bytes}, pa.large_binary())):
        if kinds == wanted and (wanted != {int} or _fits(values)):
            return pa.array(values, found)
    if kinds in ({float}, {int, float}) and all(type(value) is not int or -EXACT <= value <= EXACT for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([_json(value) for value in values], pa.large_string())


def _fits(values: list[Any]) -> bool:
    return all(value is None or -(1 << 63) <= value < 1 << 63 for value in values)


def _json(value: Any) -> str | None:
    """Of a column of several types: a string is in quotes, so that "1" is not 1."""
    if type(value) is str:
        return texts.clean(texts.quoted(value))
    return texts.text_of(value, None)
