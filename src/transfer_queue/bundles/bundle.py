"""A bundle: one step of one task as a directory that nothing else is needed for.

    bundle.json               step, task, settings of the service, every batch; size and xxh3-128 of the other files
    rows.jsonl                a line for every row in the order in which it was taken: key, tags, where it was. Tags
                              that JSON changes (NaN, tuples, bytes) are there as msgpack as well
    batch-00000.safetensors   the fields of a batch (see `columns`)

It appears whole, with all files on disk, or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from tensordict import TensorDict

from transfer_queue.bundles.columns import SavedColumn, Tensors, packed, unpacked
from transfer_queue.client.describing import field_specs
from transfer_queue.client.drivers import run
from transfer_queue.client.effects import Call
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.read import new_tensordict, read
from transfer_queue.client.transfer.write import checked_tags
from transfer_queue.codec.layout import DAMAGED
from transfer_queue.codec.plan import items_of
from transfer_queue.codec.values import Lifting
from transfer_queue.errors import CellsChanged, CheckpointCorrupt, CheckpointMissing, RowCleared
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.contents import REPEATED
from transfer_queue.saved.places import folder_at
from transfer_queue.saved.reading import SavedFolder
from transfer_queue.schema import FieldSchema
from transfer_queue.structs import decodable
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

FORMAT = 1
INFO, ROWS, BATCH = "bundle.json", "rows.jsonl", "batch-{:05d}.safetensors"


class SavedBatch(msgspec.Struct):
    """One answer to the task. `num_rows` counts the `repeated` ones at its end as well."""

    partition: str
    num_rows: int
    batch_size: int
    sampling: dict[str, Any]
    repeated: int
    schema: list[FieldSchema]
    columns: list[SavedColumn]


@decodable
class SavedStep(msgspec.Struct):
    """`settings`: those of the service, by their dotted names."""

    step: int
    task: str
    settings: dict[str, Any]
    batches: list[SavedBatch]


@decodable
class SavedRow(msgspec.Struct, omit_defaults=True):
    """A line of rows.jsonl: row number `position` of a batch. `weight_version` and the like are among the tags.
    `exact_tags`: as msgpack in a file, where JSON changes them. `retagged`: they changed since the row was taken."""

    batch: int
    position: int
    partition: str
    global_index: int
    key: str | None
    tags: dict[str, Any]
    exact_tags: bytes | None = None
    retagged: bool = False


_exact_tags = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=Lifting()._lift).decode


# saving


def save(session: Session, directory: str | os.PathLike[str], step: int, task: str) -> dict[str, int]:
    """See `transfer_queue.save_step`."""
    folder = folder_at(directory)
    batches = taken(session, step, task)
    _check_unchanged(batches, step)
    saved = SavedStep(step, task, dict(session.config.get("settings", {})), [])
    with folder.creating(INFO) as draft:
        with draft.output(ROWS) as out:
            for row in rows_of(batches):
                out.write(_line(row))
        for number, batch in enumerate(batches):
            tensors: Tensors = {}
            saved.batches.append(_packed(session, batch, tensors))
            with draft.output(BATCH.format(number)) as out:
                out.write(bytes_of(tensors))
        _check_unchanged(taken(session, step, task), step)  # while they were read
        draft.seal(INFO, FORMAT, msgspec.to_builtins(saved))
    return {
        "batches": len(saved.batches),
        "rows": sum(batch.num_rows for batch in saved.batches),
        "bytes": sum(file.nbytes for file in draft.files.values()),
    }


def _check_unchanged(batches: list[m.TakenBatch], step: int) -> None:
    """`RowCleared`, `CellsChanged` where the rows do not hold any more what the task took."""
    for batch in batches:
        of_step = f"of partition {batch.partition!r}, which step {step} took,"
        if len(batch.there.rows) < len(batch.rows):
            gone = np.setdiff1d(numbers_of(batch.rows), numbers_of(batch.there.rows))
            raise RowCleared(f"rows {gone[:8].tolist()} {of_step} were cleared: save a step before its rows are")
        for name, rows in batch.rewritten.items():
            text = f"field {name!r} of rows {numbers_of(rows)[:8].tolist()} {of_step} was written anew"
            raise CellsChanged(f"{text}: save a step before its rows are")


def taken(session: Session, step: int, task: str) -> list[m.TakenBatch]:
    """The batches of a step, as they are now."""
    found: m.StepTaken = session.call(Call(m.GetStep(session.next_rid(), task, step)))[0]
    return found.batches


def rows_of(batches: list[m.TakenBatch]) -> Iterator[SavedRow]:
    """Those that were not cleared."""
    for number, batch in enumerate(batches):
        there = dict(zip(numbers_of(batch.there.rows).tolist(), range(len(batch.names)), strict=True))
        changed = set(numbers_of(batch.retagged).tolist())
        for position, row in enumerate(numbers_of(batch.rows).tolist()):
            if row in there:
                tags = batch.there.tags[there[row]] if batch.there.tags else {}
                name = batch.names[there[row]]
                yield SavedRow(number, position, batch.partition, row, name, tags, retagged=row in changed)


def _line(row: SavedRow) -> bytes:
    if not _is_json(row.tags):
        row = msgspec.structs.replace(row, exact_tags=msgspec.msgpack.encode(checked_tags([row.tags], 1)[0]))
    return msgspec.json.encode(row, enc_hook=repr) + b"\n"


def _is_json(value: Any) -> bool:
    """Whether JSON gives this value back as it is."""
    if type(value) is dict:
        return all(type(name) is str and _is_json(one) for name, one in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


def _packed(session: Session, batch: m.TakenBatch, tensors: Tensors) -> SavedBatch:
    """Read a batch, and add its fields to `tensors`."""
    request = m.Get(session.next_rid(), batch.partition, None, batch.rows, batch.fields, True)
    data = run(session, read(session, [request]))
    num_rows = len(batch.rows) // 8
    columns = [packed(name, value, num_rows, session.allow_pickle, tensors) for name, value in items_of(data)]
    sampling = json.loads(json.dumps(batch.sampling, default=repr))
    return SavedBatch(
        batch.partition, num_rows, batch.batch_size, sampling, batch.repeated, batch.there.schema, columns
    )


# reading


def _row(line: bytes) -> SavedRow:
    row = msgspec.json.decode(line, type=SavedRow)
    return row if row.exact_tags is None else msgspec.structs.replace(row, tags=_exact_tags(row.exact_tags))


class Bundle:
    """What was saved of a step. Raises `CheckpointMissing` (a FileNotFoundError), `CheckpointCorrupt` and
    `CheckpointUnsupported` (ValueErrors): the list of files and the rows are verified here, a batch when it is read."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = folder_at(directory)
        if not folder.is_there():
            raise CheckpointMissing(f"{folder}: no such directory")
        self._files = SavedFolder(folder, INFO, FORMAT)
        rows = self._files.path(ROWS)
        try:
            saved = msgspec.convert(self._files.metadata.user_metadata, SavedStep)
            lines = self._files.content(ROWS).splitlines()
            self.rows = [_row(line) for line in lines]
        except DAMAGED as error:
            raise CheckpointCorrupt(f"{folder} is damaged: {error}") from None
        self.step, self.task, self.settings, self.batches = saved.step, saved.task, saved.settings, saved.batches
        counts = [0] * len(self.batches)
        for row in self.rows:
            if not 0 <= row.batch < len(counts) or row.position != counts[row.batch]:
                raise CheckpointCorrupt(f"{rows} is damaged: rows are not in order")
            counts[row.batch] += 1
        if counts != [batch.num_rows for batch in self.batches]:
            raise CheckpointCorrupt(f"{rows} is damaged: rows are missing")

    def __len__(self) -> int:
        """The number of batches."""
        return len(self.batches)

    def digest(self, number: int) -> str:
        """xxh3-128 of the file of a batch, as it was written."""
        name = BATCH.format(number)
        listed = self._files.metadata.files.get(name)
        if listed is None:
            raise CheckpointCorrupt(f"{self._files.folder.path(INFO)} is damaged: it does not name {name}")
        return listed.xxh3_128

    def verify(self, number: int) -> None:
        """Read the file of a batch, and raise `CheckpointCorrupt` unless it is what was written."""
        self._files.content(BATCH.format(number))

    def batch(self, number: int, allow_pickle: bool = False) -> tuple[TensorDict, BatchMeta]:
        """(fields, metadata) of a batch, as the task got them; every byte is verified."""
        name, saved = BATCH.format(number), self.batches[number]
        try:
            tensors = tensors_of(self._files.content(name))
        except SafetensorError as error:
            raise CheckpointCorrupt(f"{self._files.path(name)} is damaged: {error}") from None
        columns = {one.name: unpacked(one, tensors, saved.num_rows, allow_pickle) for one in saved.columns}
        return new_tensordict(columns, saved.num_rows), self._meta(number, saved)

    def _meta(self, number: int, saved: SavedBatch) -> BatchMeta:
        rows = [row for row in self.rows if row.batch == number]
        indexes = np.array([row.global_index for row in rows], np.int64)
        meta = BatchMeta._build(indexes, saved.partition, field_specs(saved.schema), True, [row.tags for row in rows])
        if saved.repeated:
            meta.extra_info[REPEATED] = saved.repeated
        return meta
