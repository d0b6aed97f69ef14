"""The controller's state as it is saved.

Blocks are named by number only. Loading gives every saved number another one, so the file knows nothing of storage
units. Arrays are little-endian bytes over the *positions* of a table: its live rows in ascending order of their index.
Whatever Python objects there is one of for each row lies in chunks, which are decoded one by one. What was decoded
refers to the memory it was decoded from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

from transfer_queue.controller.admission import AdmissionGrant
from transfer_queue.controller.series import SeriesMember
from transfer_queue.controller.taken import SavedSteps
from transfer_queue.controller.weight_versions import SavedVersions
from transfer_queue.errors import CheckpointCorrupt, CheckpointUnsupported
from transfer_queue.groups import PoolState, UsedNumbers
from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages import Tags

FORMAT = 2
CHUNK_ROWS = 1024


class SavedGroup(msgspec.Struct):
    """Fields written together. `blocks`: int64 (k, 2) of (block, cells it was written with); `runs`: int64 (k, 4) of
    (first position, block, first row in it, number of rows), ascending, of the positions with cells of this group."""

    fields: list[str]
    blocks: memoryview
    runs: memoryview


class SavedReturn(msgspec.Struct, array_like=True):
    """A row that a task had on a lease and did not use (`readiness.Returned`). `dead`: it counts as consumed.
    `delay_s`: for how long it is held back, 0 for one that is offered."""

    position: int
    attempts: int
    reason: str
    dead: bool
    delay_s: float = 0.0


class SavedTable(msgspec.Struct):
    """One partition. `index` is int64, `unclaimed` int64 positions; `keys` and `tags` lie parallel to the positions, in
    chunks of the same rows: each is a list in msgpack.

    `cells` maps every field, in the order they were first written, to its entry of `patterns`: uint16 group numbers
    over the positions, 0 where the cell is absent; group n is `groups[n - 1]`. `consumed` has one byte per position,
    `returned` an entry for each row that came back to a task. `lost`: int64 positions of rows that lost cells with a
    storage unit. `cleared`, `over`: as of a `Table`. `kept`: int64 positions of rows that the sampler keeps for later
    requests of a task, which once were `consumed`. `fates`: one byte per position (`readiness.Task.fates`), for tasks
    with some; `stale`: their `num_stale`. `rewritten`, `retagged`: `rewrites.Rewrites.cells` and `tags`, int64 over the
    positions; empty where nothing changed. `max_deliver`: of tasks whose requests asked for one.
    """

    name: str
    declared: int | None
    metadata: Tags
    index: memoryview
    unclaimed: memoryview
    keys: list[memoryview]
    tags: list[memoryview]
    fields: list[FieldSchema]
    cells: list[int]
    patterns: list[memoryview]
    groups: list[SavedGroup]
    consumed: dict[str, memoryview]
    returned: dict[str, list[SavedReturn]] = {}
    lost: memoryview = memoryview(b"")
    sizes: dict[str, int] = {}
    cleared: int = 0
    kept: dict[str, memoryview] = {}
    fates: dict[str, memoryview] = {}
    stale: dict[str, int] = {}
    over: int = 0
    rewritten: dict[str, memoryview] = {}
    retagged: memoryview = memoryview(b"")
    max_deliver: dict[str, int] = {}

    def key_chunks(self) -> Iterator[list[str | None]]:
        """Raises `CheckpointCorrupt`."""
        return (decoded(_keys, chunk) for chunk in self.keys)

    def tag_chunks(self) -> Iterator[list[Tags | None]]:
        """Raises `CheckpointCorrupt`."""
        return (decoded(_tags, chunk) for chunk in self.tags)


class SavedController(msgspec.Struct):
    format: int
    next_index: int
    sampler: str
    sampler_state: Any
    tables: list[SavedTable]
    versions: SavedVersions = msgspec.field(default_factory=SavedVersions)
    admitted: dict[str, AdmissionGrant] = {}
    lineage: dict[bytes, int] = {}
    steps: dict[str, SavedSteps] = {}
    pools: dict[str, PoolState] = {}
    series: dict[str, SeriesMember] = {}
    used_numbers: UsedNumbers = msgspec.field(default_factory=UsedNumbers)
    next_batch: int = 0
    lock_numbers: int = 0  # of these, and those below, any may have been given out


class TableOf1(SavedTable):
    """A table of format 1: `keys` and `tags` are not in chunks."""

    keys: list[str | None]  # type: ignore[assignment]
    tags: list[Tags | None]  # type: ignore[assignment]

    def key_chunks(self) -> Iterator[list[str | None]]:
        return (self.keys[at : at + CHUNK_ROWS] for at in range(0, len(self.keys), CHUNK_ROWS))

    def tag_chunks(self) -> Iterator[list[Tags | None]]:
        return (self.tags[at : at + CHUNK_ROWS] for at in range(0, len(self.tags), CHUNK_ROWS))


class ControllerOf1(SavedController):
    tables: list[TableOf1]  # type: ignore[assignment]


class Header(msgspec.Struct):
    format: int


encode = msgspec.msgpack.Encoder().encode
_header = msgspec.msgpack.Decoder(Header)
_keys: msgspec.msgpack.Decoder[list[str | None]] = msgspec.msgpack.Decoder(list[str | None])
_tags: msgspec.msgpack.Decoder[list[Tags | None]] = msgspec.msgpack.Decoder(list[Tags | None])
_states: dict[int, msgspec.msgpack.Decoder[Any]] = {
    1: msgspec.msgpack.Decoder(ControllerOf1),
    2: msgspec.msgpack.Decoder(SavedController),
}


def decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, TypeError) as error:
        raise CheckpointCorrupt(f"not a saved controller state: {error}") from None


def read(data: bytes | memoryview) -> SavedController:
    """Raises `CheckpointCorrupt` or `CheckpointUnsupported`. Keys and tags are looked at later, except of format 1."""
    number = decoded(_header, data).format
    if number not in _states:
        raise CheckpointUnsupported(
            f"controller state of format {number}, this version reads {FORMAT} and earlier ones"
        )
    saved: SavedController = decoded(_states[number], data)
    return saved


def refuse(reason: str) -> NoReturn:
    raise CheckpointCorrupt(f"the saved controller state is not consistent: {reason}")
