"""What to remark on requests that name something that does not exist. Asked only once that is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transfer_queue.controller.table import Table
from transfer_queue.names import hint, near
from transfer_queue.wire import messages as m

LISTED = 8


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """ "there is no partition 'a'; the nearest is 'b'", or nothing where none is near: it may just be gone."""
    found = hint(name, known)
    return found and f"there is no {kind} {name!r}{found}"


def created(name: str, known: Iterable[str]) -> str:
    found = near(name, known)
    return "" if found is None else f"partition {name!r} is new, and there was {found!r} before"


def left_out(message: m.Get, table: Table, fields: Iterable[Any]) -> str:
    """Which of the keys and fields that were asked for are not in an answer with `fields`."""
    return "; ".join([*_keys_left_out(message.keys or [], table), *_fields_left_out(message, table, fields)])


def _keys_left_out(keys: list[str], table: Table) -> Iterable[str]:
    missing = [key for key in keys if key not in table.keys]
    if missing:
        near_it = hint(missing[0], table.keys)
        yield f"left out {len(missing)} of {len(keys)} keys, unknown are {missing[:LISTED]}{near_it}"


def _fields_left_out(message: m.Get, table: Table, fields: Iterable[Any]) -> Iterable[str]:
    found = {field.name for field in fields}
    absent = [name for name in message.fields or () if name not in found]
    unwritten = [name for name in absent if name in table.fields]
    unheard = [name for name in absent if name not in table.fields]
    if unwritten:
        yield f"left out the fields {unwritten[:LISTED]}, which are not written on every row"
    if unheard:
        yield f"left out the fields {unheard[:LISTED]}, which no row has{hint(unheard[0], table.fields)}"
