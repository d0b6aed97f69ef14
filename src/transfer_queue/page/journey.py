"""What became of one row, as the page gets it: who wrote what when, who had it, and the beginnings of its values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.images import TooMuch
from transfer_queue.client.transfer.read import read
from transfer_queue.codec.select import NO_SLICES
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import StorageKeyNotFoundError, TransferQueueError, UnknownRows
from transfer_queue.page import shown
from transfer_queue.page.png import is_picture, picture
from transfer_queue.page.previews import preview
from transfer_queue.page.printable import ident, printable
from transfer_queue.schema import DENSE, RAGGED, FieldSchema
from transfer_queue.wire import messages as m
from transfer_queue.wire.messages.overview import RowEvent, RowInspected, RowOfTask

MAX_EVENTS, MAX_READ = 100, 32
MAX_SENT_NBYTES, WIDEST_NBYTES = 16 << 20, 16  # of one value that comes over a network; of a number
MAX_ITEMS, MAX_NUMBERS = 1 << 20, 1 << 26  # that are read of a tensor: along its first dimension, and in all


def journey(client: TransferQueueClient, partition: str, key: str | None, row: int | None) -> dict[str, Any]:
    """All that is known of the row, and previews of its first fields. Blocks for as many reads as it has fields, of at
    most `MAX_READ`. Raises `UnknownRows` where it was cleared, as the client otherwise."""
    found = client.inspect_row(partition, key, row)
    pids = shown.pids(client.overview(0))
    return {
        "row": found.row, "key": None if found.key is None else printable(found.key), "partition": printable(partition),
        "tags": shown.tags(found.tags), "age": found.age, "weights": _weights(found.tags),
        "group": None if found.group is None else printable(found.group),
        "tasks": [_task(one) for one in found.tasks[: shown.MAX_TASKS]],
        "events": [_event(one, pids) for one in found.events[-MAX_EVENTS:]],
        "fields": _fields(client, partition, found), "num_written": len(found.written),
        "missing": [printable(name) for name in found.missing[: shown.MAX_FIELDS]],
    }  # fmt: skip


def image_of(client: TransferQueueClient, partition: str, row: int, field_id: str) -> bytes | None:
    """A PNG of one value, None where that is no picture. Raises `UnknownRows`, as the client otherwise."""
    found = client.inspect_row(partition, None, row)
    field = next((one for one in found.written if ident(one.name) == field_id), None)
    value = None if field is None or _is_large(field) else _value(client, partition, row, field)[0]
    return picture(value) if is_picture(value) else None


def _weights(tags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which version made which tokens, as `weights.Spans` tags a row. Nothing where it is tagged in another way."""
    spans, runs = tags.get("weight_versions"), tags.get("weight_epochs")
    if not isinstance(spans, list) or not all(_is_span(one) for one in spans):
        return []
    if not isinstance(runs, list) or len(runs) != len(spans):
        runs = [tags.get("weight_epoch", "")] * len(spans)
    return [
        {"version": version, "tokens": _tokens(start, end), "run": printable(str(name))}
        for (version, start, end), name in zip(spans[:MAX_EVENTS], runs, strict=False)
    ]


def _tokens(start: int, end: int) -> str:
    return "none" if end <= start else f"{start}" if end == start + 1 else f"{start} to {end - 1}"


def _is_span(one: Any) -> bool:
    return isinstance(one, (list, tuple)) and len(one) == 3 and all(type(number) is int for number in one)


def _task(one: RowOfTask) -> dict[str, Any]:
    return {
        "name": printable(one.task), "state": one.state, "lease": one.lease, "attempts": one.attempts,
        "reason": printable(one.reason, 300), "steps": one.steps[-8:],
    }  # fmt: skip


def _event(one: RowEvent, pids: dict[bytes, int]) -> dict[str, Any]:
    return {
        "ago_s": one.ago_s, "what": one.what, "who": shown.who(one.session, pids), "task": printable(one.task),
        "detail": printable(one.detail, 600),
    }  # fmt: skip


def _fields(client: TransferQueueClient, partition: str, found: RowInspected) -> list[dict[str, Any]]:
    return [
        {
            "id": ident(field.name), "name": printable(field.name), "schema": shown.type_of(field),
            **(_previewed(client, partition, found.row, field) if number < MAX_READ else _unread("not read: too many")),
        }
        for number, field in enumerate(found.written[: shown.MAX_FIELDS])
    ]  # fmt: skip


def _previewed(client: TransferQueueClient, partition: str, row: int, field: FieldSchema) -> dict[str, Any]:
    """One that cannot be read says why; the others are shown."""
    if _is_large(field):
        return _unread("not read: too large")
    try:
        value, most = _value(client, partition, row, field)
        return preview(value, _is_cut(value, field, most))
    except (UnknownRows, StorageKeyNotFoundError):
        return _unread("cleared meanwhile")
    except TransferQueueError as error:  # pickled, lost with its host, no decoder here
        return _unread(printable(str(error), 300))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # of NumPy and torch, for odd dtypes
        return _unread(f"cannot be shown: {printable(str(error), 300)}")


def _unread(why: str) -> dict[str, Any]:
    return {"kind": "none", "type": "", "text": why}


def _most(field: FieldSchema) -> int | None:
    """How many items along the first dimension of a tensor are read in a moment; None where it cannot be cut there."""
    if field.kind not in (DENSE, RAGGED) or not field.shape or -1 in field.shape[1:]:
        return None
    return min(MAX_ITEMS, MAX_NUMBERS // max(1, math.prod(field.shape[1:])))


def _is_large(field: FieldSchema) -> bool:
    """A tensor of which not one item is read in a moment."""
    return _most(field) == 0


def _is_cut(value: Any, field: FieldSchema, most: int | None) -> bool:
    """Whether there is more of a tensor than the `most` that were read; or may be, where rows differ in length."""
    if most is None:
        return False
    return len(value) < field.shape[0] if field.shape[0] >= 0 else len(value) >= most


def _value(client: TransferQueueClient, partition: str, row: int, field: FieldSchema) -> tuple[Any, int | None]:
    """The value itself; of a long tensor its beginning, of a large one that lies elsewhere a smaller part; and how many
    items were read at most (None: all). Raises `TooMuch` for another large value that lies elsewhere: only the whole of
    it can be read."""
    most = _most(field)
    try:
        return _read(client, partition, row, field, most), most
    except TooMuch:
        few = 0 if most is None else MAX_SENT_NBYTES // (WIDEST_NBYTES * max(1, math.prod(field.shape[1:])))
        if not few:
            raise
    return _read(client, partition, row, field, few), few


def _read(client: TransferQueueClient, partition: str, row: int, field: FieldSchema, most: int | None) -> Any:
    session, part = client.session, NO_SLICES if most is None else {field.name: Slice(0, most)}
    request = m.Get(session.next_rid(), partition, None, np.array([row], np.int64).tobytes(), [field.name], True)
    return run(session, read(session, [request], slices=part, most_sent=MAX_SENT_NBYTES))[field.name][0]
