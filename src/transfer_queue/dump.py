"""Chosen rows as files, and putting them back by key: to keep them, or to move them to another run.

    dump_info.json       the list of all other files, with the partition (`saved.files`)
    row_index.msgpack    `DumpedRows`: key, number, fields and tag of every row; rows and fields of each shard
    shards/              blocks, as they lie in the store: some rows that have the same fields

What has been there before is never replaced.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from transfer_queue.client.drivers import run
from transfer_queue.client.effects import Call, Notify, Operation
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.read import located_rows, read
from transfer_queue.client.transfer.snapshots import Refill, refill
from transfer_queue.client.transfer.write import TargetRows, checked_tags, commit, is_on
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.codec.layout import DAMAGED
from transfer_queue.codec.plan import items_of, plan_batch
from transfer_queue.codec.rows import row_numbers
from transfer_queue.codec.values import Lifting
from transfer_queue.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    CheckpointUnsupported,
    RowCleared,
    SchemaConflict,
    UnknownRows,
    UnsupportedValue,
)
from transfer_queue.names import unknown_partition
from transfer_queue.saved.places import folder_at
from transfer_queue.saved.reading import SavedFolder
from transfer_queue.schema import MIXED, FieldSchema
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

FORMAT = 1
INFO, INDEX, SHARDS, SHARD = "dump_info.json", "row_index.msgpack", "shards", "shard_{:05d}.bin"
PICKLED = "row_index.pt"  # what the other package writes
SHARD_ROWS = 256


class Row(msgspec.Struct, array_like=True):
    key: str
    global_index: int
    fields: list[str]
    tag: m.Tags


class Shard(msgspec.Struct, array_like=True):
    """One block: `rows` are positions in the list of all rows."""

    nbytes: int
    rows: list[int]
    schema: list[FieldSchema]
    layout: bytes


class DumpedRows(msgspec.Struct):
    partition_id: str
    rows: list[Row]
    shards: list[Shard]


_decode = msgspec.msgpack.Decoder(DumpedRows, ext_hook=Lifting()._lift).decode


# dumping


def dump(session: Session, directory: str | os.PathLike[str], keys: Sequence[str], partition_id: str) -> dict[str, int]:
    """See `transfer_queue.dump_data_by_key`."""
    try:
        named = [] if isinstance(keys, str) else list(keys)
    except TypeError:
        raise UnsupportedValue(f"keys is a list of strings, got {keys!r:.200}") from None
    if isinstance(keys, str) or not set(map(type, named)) <= {str}:
        raise UnsupportedValue(f"keys is a list of strings, got {keys!r:.200}")
    folder = folder_at(directory)
    folder.refuse_any()  # before rows are read for it
    found = DumpedRows(partition_id, _rows(session, partition_id, list(dict.fromkeys(named))), [])
    with folder.creating(INFO) as draft:
        for positions, plan in _plans(session, found):
            data = np.empty(max(1, plan.nbytes), np.uint8)
            plan.write(data, session.mover)
            with draft.output(f"{SHARDS}/{SHARD.format(len(found.shards))}") as out:
                out.write(memoryview(data))  # type: ignore[arg-type]
            found.shards.append(Shard(len(data), positions, plan.schema(), plan.layout()))
        wire = checked_tags([row.tag for row in found.rows], len(found.rows))
        rows = [Row(row.key, row.global_index, row.fields, tag) for row, tag in zip(found.rows, wire, strict=True)]
        with draft.output(INDEX) as out:
            out.write(msgspec.msgpack.encode(DumpedRows(partition_id, rows, found.shards)))
        draft.seal(INFO, FORMAT, {"partition_id": partition_id, "num_keys": len(rows)})
    return {
        "keys": len(found.rows),
        "rows_with_data": sum(bool(row.fields) for row in found.rows),
        "shards": len(found.shards),
        "bytes": sum(shard.nbytes for shard in found.shards),
    }


def _rows(session: Session, partition_id: str, keys: list[str]) -> list[Row]:
    """What each of these rows has. Raises `UnknownRows`, and `RowCleared` where one is cleared meanwhile."""
    if not keys:
        return []
    info: m.PartitionInfo = session.call(Call(m.GetPartition(session.next_rid(), partition_id)))[0]
    if not info.known:
        known: list[str] = session.call(Call(m.ListPartitions(session.next_rid())))[0].names
        raise UnknownRows(unknown_partition(partition_id, known))
    request = m.Find(session.next_rid(), partition_id, keys, False, session.timeout_s)
    reply: m.RowSet = session.call(Call(request, wait_s=session.timeout_s))[0]
    indexes = numbers_of(reply.rows)
    if len(indexes) < len(keys):
        names = session.call(Call(m.NameRows(session.next_rid(), partition_id, reply.rows)))[0].names
        missing = [key for key in keys if key not in set(names)]
        raise UnknownRows(f"partition {partition_id!r}: keys not found: {missing[:8]}")
    fields = [field.name for field in info.schema]
    written = np.zeros((len(keys), len(fields)), np.bool_)
    if fields:
        status: m.RowStatus = session.call(Call(m.Production(session.next_rid(), partition_id, fields)))[0]
        everything = row_numbers(numbers_of(status.runs, 2))
        gone = [key for key, is_there in zip(keys, np.isin(indexes, everything), strict=True) if not is_there]
        if gone:
            raise RowCleared(f"partition {partition_id!r}: rows {gone[:8]} were cleared while they were dumped")
        flags = np.frombuffer(status.status, np.int8).reshape(len(everything), len(fields)) != 0
        written = flags[np.searchsorted(everything, indexes)]
    tags = reply.tags or [{}] * len(keys)
    return [
        Row(key, index, sorted(name for name, has in zip(fields, flags, strict=True) if has), dict(tag))
        for key, index, flags, tag in zip(keys, indexes.tolist(), written.tolist(), tags, strict=True)
    ]


def _alike(rows: list[Row]) -> Iterator[list[int]]:
    """The positions of rows that have the same fields, a shard's worth at a time; none of rows without fields."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, row in enumerate(rows):
        groups.setdefault(tuple(row.fields), []).append(position)
    for fields, positions in groups.items():
        if fields:
            yield from (positions[at : at + SHARD_ROWS] for at in range(0, len(positions), SHARD_ROWS))


def _plans(session: Session, found: DumpedRows) -> Iterator[tuple[list[int], BlockPlan]]:
    """The block of each shard, read from the store; rows are in one of the same kinds, dtypes and ranks only, so that
    each comes back as it was put."""
    left = deque(_alike(found.rows))
    while left:
        positions = left.popleft()
        plan = run(session, _planned(session, found, positions))
        if isinstance(plan, BlockPlan):
            yield positions, plan
        else:
            left.extendleft([positions[row] for row in rows] for rows in reversed(plan))


def _planned(session: Session, found: DumpedRows, positions: list[int]) -> Operation[BlockPlan | list[list[int]]]:
    """The block of these rows; where they are not alike, the rows of each kind instead."""
    rows = np.array([found.rows[position].global_index for position in positions], np.int64)
    fields = found.rows[positions[0]].fields
    request = m.Get(session.next_rid(), found.partition_id, None, rows.tobytes(), fields, True)
    located = yield from located_rows(session, request)
    kinds = located.alike()
    if len(kinds) > 1:
        pinned = located.pinned()
        if pinned:
            yield Notify(m.Unpin(located.reply.rid, pinned))
        return list(kinds.values())
    data = yield from read(session, [request], found_rows=[located])
    columns = dict(items_of(data))
    for name, column in columns.items():
        if isinstance(column, torch.Tensor) and column.is_nested:
            columns[name] = list(column.unbind())  # rows of one shape become a dense column again
    plan = plan_batch(columns, len(positions), session.allow_pickle)
    weak = {cell.name for cells in kinds for cell in cells if cell.weak}
    for planned in plan.columns:
        planned.weak = planned.name in weak
    return plan


# loading


def read_index(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """See `transfer_queue.read_row_index`."""
    found, _ = _opened(directory)
    rows = {row.key: {"global_index": row.global_index, "fields": row.fields, "tag": row.tag} for row in found.rows}
    return {"partition_id": found.partition_id, "rows": rows}


def load(session: Session, directory: str | os.PathLike[str]) -> dict[str, m.Tags]:
    """See `transfer_queue.load_data_by_key`."""
    found, saved = _opened(directory)
    _check_types(session, found)
    bare = [position for position, row in enumerate(found.rows) if not row.fields]
    order = [*itertools.chain.from_iterable(shard.rows for shard in found.shards), *bare]
    is_in_order = order == sorted(order)
    with refill(session) as blocks:
        for number, shard in enumerate(found.shards):
            _fill(blocks, saved, number, shard)
        if not is_in_order:  # new rows have the order of the dump, by which samplers tell groups apart
            _publish_bare(session, found, list(range(len(found.rows))))
        for shard in found.shards:
            where, tags = _target(found, shard.rows)
            put = commit(session, where, shard.schema, shard.layout, blocks.first(), tags if is_in_order else None)
            session.call(put)
            blocks.published()
        if bare and is_in_order:
            _publish_bare(session, found, bare)
    return {row.key: row.tag for row in found.rows}


def _publish_bare(session: Session, found: DumpedRows, positions: list[int]) -> None:
    """Rows with their keys and tags, and no fields yet."""
    where, tags = _target(found, positions)
    session.call(commit(session, where, [], b"", -1, tags))


def _target(found: DumpedRows, positions: list[int]) -> tuple[TargetRows, list[m.Tags]]:
    rows = [found.rows[position] for position in positions]
    tags = checked_tags([row.tag for row in rows], len(rows))
    return TargetRows(found.partition_id, len(rows), [row.key for row in rows]), tags


def _opened(directory: str | os.PathLike[str]) -> tuple[DumpedRows, SavedFolder]:
    """The verified index of a dump. Raises `CheckpointMissing`, `CheckpointCorrupt`, `CheckpointUnsupported`."""
    folder = folder_at(directory)
    if folder.has(PICKLED):
        raise CheckpointUnsupported(f"{folder}: {PICKLED} is a pickle, which could run any code; it cannot be loaded")
    saved = SavedFolder(folder, INFO, FORMAT)
    try:
        found = _decode(saved.content(INDEX))
    except DAMAGED as error:
        raise CheckpointCorrupt(f"{saved.path(INDEX)} is damaged: {error}") from None
    for number, shard in enumerate(found.shards):
        name = f"{SHARDS}/{SHARD.format(number)}"
        if not saved.has(name):
            raise CheckpointMissing(f"{saved.path(name)} is missing")
        if not shard.rows or not all(0 <= row < len(found.rows) for row in shard.rows) or shard.nbytes < 1:
            raise CheckpointCorrupt(f"{saved.path(INDEX)} is damaged: rows of shard {number}")
    if len({row.key for row in found.rows}) != len(found.rows):
        raise CheckpointCorrupt(f"{saved.path(INDEX)} is damaged: keys repeat")
    return found, saved


def _check_types(session: Session, found: DumpedRows) -> None:
    """`SchemaConflict` where a field of the dump cannot lie beside what the partition holds. A field of several kinds,
    there or in the dump, takes any: a load that failed in between has left some of them."""
    info: m.PartitionInfo = session.call(Call(m.GetPartition(session.next_rid(), found.partition_id)))[0]
    strict = is_on(session, "strict_schema", None)
    dumped: dict[str, FieldSchema] = {}
    for shard in found.shards:
        dumped |= {field.name: dumped.get(field.name, field).merged(field) for field in shard.schema}
    mixed = {field.name for field in (*info.schema, *dumped.values()) if field.kind == MIXED and not strict}
    held = {field.name: field for field in info.schema}
    for new in (field for shard in found.shards for field in shard.schema if field.name not in mixed):
        reason = held[new.name].conflict(new) if new.name in held else None
        if reason is not None:
            raise SchemaConflict(f"partition {found.partition_id!r}: {reason}")
        if strict:  # the service compares the shards with each other, too
            held.setdefault(new.name, new)


def _fill(blocks: Refill, saved: SavedFolder, number: int, shard: Shard) -> None:
    """Fill a block with a shard, every byte of which is verified."""
    with saved.opened(f"{SHARDS}/{SHARD.format(number)}") as file:
        if file.listed.nbytes != shard.nbytes:
            raise CheckpointCorrupt(f"{file.where} has {file.listed.nbytes} bytes, the index says {shard.nbytes}")

        def fill(into: memoryview) -> None:
            file.fill(into)
            file.check()

        blocks.fill(number, 0, shard.nbytes, fill)
