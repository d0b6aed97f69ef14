"""A controller without a server, driven by short calls; checks its invariants after every one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import error_from_code
from transfer_queue.sampler import BaseSampler, SequentialSampler
from transfer_queue.schema import DENSE, OBJECTS, FieldSchema
from transfer_queue.wire import messages as m
from transfer_queue.wire.messages.staleness import Policy

ROWS = "rows"


def indexes(reply: Any) -> list[int]:
    if isinstance(reply, m.RowStatus):
        runs = np.frombuffer(reply.runs, np.int64).reshape(-1, 2).tolist()
        return [first + n for first, number in runs for n in range(number)]
    return np.frombuffer(reply.rows, np.int64).tolist()


def schema(name: str, dtype: str = "float32", shape: tuple[int, ...] = (2,)) -> FieldSchema:
    return FieldSchema(name, DENSE if dtype else OBJECTS, dtype, shape if dtype else ())


def as_schema(field: str | FieldSchema) -> FieldSchema:
    return schema(field) if isinstance(field, str) else field


def packed(rows: Sequence[int]) -> bytes:
    return np.array(rows, np.int64).tobytes()


def content(controller: Controller) -> tuple[Any, list[int]]:
    """What is saved of a controller, but for the random names of the lives that its rows are from."""
    state, blocks = exported(controller.state)
    return {name: value for name, value in msgspec.msgpack.decode(state).items() if name != "lineage"}, blocks


# They change nothing: what holds before them holds after them.
QUERIES = (
    m.Get, m.Scan, m.ListTags, m.NameRows, m.Consumption, m.Production, m.ListKeys, m.ListPartitions, m.GetPartition,
    m.ListLocks, m.ListDeadLetters, m.GetStep, m.DescribePool, m.DescribeSeries,
)  # fmt: skip


class Box:
    """One controller; every put is a block of its own."""

    def __init__(self, sampler: BaseSampler | None = None, reserved_rows: int = 0, max_rows: int | None = None,
                 policy: Policy | None = None, max_deliver: int | None = None,
                 ledger: Ledger | None = None) -> None:  # fmt: skip
        self.controller = Controller(sampler or SequentialSampler(), max_rows, reserved_rows, policy,
                                     max_deliver=max_deliver, ledger=ledger)  # fmt: skip
        self.numbers = itertools.count(1)
        self.now = 0.0
        self.last_block = 0
        self.unit = 0  # the storage unit that puts go to

    def handle(self, message: Any, ticket: Any = None, session: bytes = b"session") -> Any:
        try:
            return self.controller.handle(message, ticket, session, self.now)
        finally:
            if type(message) not in QUERIES:
                self.controller.check_invariants()

    # writing

    def put(self, where: Any, fields: Sequence[str | FieldSchema] = ("a",), tags: Any = None, partition: str = "p",
            timeout_s: float = 0.0, ticket: Any = None, strict: bool = False) -> Any:  # fmt: skip
        """`where`: a number of new rows, keys, or indexes. The reply, or None when it was parked."""
        keys = list(where) if isinstance(where, (list, tuple)) and where and isinstance(where[0], str) else None
        rows = packed(where) if isinstance(where, (list, tuple)) and keys is None else None
        count = where if isinstance(where, int) else len(where)
        block = self.last_block = next(self.numbers) | self.unit << m.UNIT_SHIFT if fields else -1
        schemas = [as_schema(field) for field in fields]
        message = m.Commit(block, partition, count, keys, rows, schemas, block, b"", tags, timeout_s, strict=strict)
        return self.handle(message, ticket)

    def share(self, count: int, field: str, block: int, places: Sequence[int], is_new: bool, partition: str = "p",
              prints: bytes = b"", rid: int = 1) -> Any:  # fmt: skip
        """New rows whose cell of a field is that in row `places[i]` of a block."""
        shared = m.SharedCells(schema(field), block, packed(range(count)), packed(places), is_new, b"", prints)
        return self.handle(m.Commit(rid, partition, count, None, None, [], -1, b"", None, 0.0, shared=[shared]))

    def insert(self, count: int, fields: Sequence[str] = ("a",), partition: str = "p", **more: Any) -> Any:
        return self.handle(m.Insert(1, partition, count, list(fields), more.get("timeout_s", 0.0)), more.get("ticket"))

    def tag(self, rows: Sequence[int], tags: list[dict[str, Any]], replace: bool = False, partition: str = "p") -> Any:
        return self.handle(m.SetTags(1, partition, packed(rows), tags, replace))

    def clear(self, rows: Any = None, partition: str = "p") -> Any:
        """Keys, indexes, or the whole partition."""
        keys = rows if rows and isinstance(rows[0], str) else None
        data = packed(rows) if rows is not None and keys is None else None
        return self.handle(m.Clear(1, partition, keys, data, spares=True))

    def reset(self, task: str | None = "t", partition: str = "p") -> Any:
        return self.handle(m.ResetConsumption(1, partition, task))

    # versions of the weights

    def announce(self, version: int, epoch: str = "e") -> int:
        return int(self.handle(m.Announce(1, epoch, version)).count)

    def made_by(self, version: int, count: int = 1, epoch: str = "e", **more: Any) -> list[int]:
        """New rows of one version."""
        tags = [{"weight_version": version, "weight_epoch": epoch}] * count
        return indexes(self.put(count, tags=tags, **more))

    def admit(self, count: int, task: str = "t", max_age: int | None = 1, rows_per_version: int | None = 4,
              wait_s: float = 0.0, ticket: Any = None) -> bool:  # fmt: skip
        """Whether they are admitted at once; else the request was parked."""
        return self.handle(m.Admit(1, task, count, max_age, rows_per_version, wait_s), ticket) is not None

    # reading

    def fetch(self, size: int, fields: Sequence[str] = ("a",), task: str = "t", wait_s: float = 0.0, ticket: Any = None,
              empty: bool = False, partition: str = "p", session: bytes = b"session", rid: int = 1,
              received: bool = True, **sampling: Any) -> Any:  # fmt: skip
        """The rows, or None when the request was parked. The asker confirms at once that it has them."""
        message = m.Fetch(rid, partition, list(fields), size, task, sampling, wait_s, empty)
        reply = self.handle(message, ticket, session)
        if reply is not None and received:
            self.controller.received(session, rid)
        return None if reply is None else indexes(reply)

    def lend(self, size: int, lease_s: float = 10.0, *, session: bytes = b"session", fields: Sequence[str] = ("a",),
             task: str = "t", wait_s: float = 0.0, ticket: Any = None, partition: str = "p", until_done: bool = False,
             holder: bytes = b"", received: bool = True, **sampling: Any) -> Any:  # fmt: skip
        """(lease, rows), or None when the request was parked. The asker confirms at once that it has them."""
        message = m.Fetch(1, partition, list(fields), size, task, sampling, wait_s, until_done, lease_s, until_done,
                          holder)  # fmt: skip
        reply = self.handle(message, ticket, session)
        if reply is not None and received:
            self.controller.received(session, 1)
        return None if reply is None else (reply.lease, indexes(reply))

    def ack(self, lease: int, rows: Sequence[int] | None = None) -> int:
        return int(self.handle(m.Ack(1, lease, None if rows is None else packed(rows))).rows)

    def renew(self, lease: int, lease_s: float = 10.0, session: bytes = b"session") -> int:
        return int(self.handle(m.Renew(1, lease, lease_s), None, session).rows)

    def release(self, lease: int, rows: Sequence[int] | None = None) -> int:
        return int(self.handle(m.Release(1, lease, None if rows is None else packed(rows))).rows)

    def nack(self, lease: int, rows: Sequence[int] | None = None, delay_s: float = 0.0, reason: str = "") -> int:
        return int(self.handle(m.Nack(1, lease, None if rows is None else packed(rows), delay_s, reason)).rows)

    def dead_letters(self, task: str = "t", partition: str = "p") -> dict[int, tuple[int, str]]:
        """(attempts, reason) by row."""
        reply = self.handle(m.ListDeadLetters(1, partition, task))
        rows = indexes(reply)
        return {rows[place]: (attempts, reason) for place, attempts, reason in reply.redelivered}

    def requeue(self, rows: Sequence[int] | None = None, task: str = "t", partition: str = "p") -> int:
        return int(self.handle(m.Requeue(1, partition, task, None if rows is None else packed(rows))).count)

    def mark(self, step: int, tasks: Sequence[str] = ("t",), used: Sequence[tuple[int, Any]] = (),
             pools: Sequence[str] = ()) -> None:  # fmt: skip
        named = [(lease, None if rows is None else packed(rows)) for lease, rows in used]
        self.handle(m.MarkStep(1, step, list(tasks), named, pools=list(pools)))

    def resume(self, step: int, tasks: Sequence[str] = ("t",)) -> tuple[int, int, int]:
        """(batches, rows) to come once more, and batches lost."""
        reply = self.handle(m.ResumeStep(1, step, list(tasks)))
        return reply.batches, reply.rows, reply.lost

    def taken(self, step: int | None = None, task: str = "t") -> list[list[int]]:
        """The rows of each batch."""
        return [indexes(batch) for batch in self.handle(m.GetStep(1, task, step)).batches]

    def end_session(self, session: bytes = b"session") -> None:
        self.controller.end_session(session)
        self.controller.check_invariants()

    def get(
        self, where: Sequence[Any], fields: Sequence[str] | None = None, strict: bool = False, partition: str = "p"
    ) -> Any:
        keys = list(where) if where and isinstance(where[0], str) else None
        wanted = None if fields is None else list(fields)
        return self.handle(m.Get(1, partition, keys, packed(where) if keys is None else None, wanted, strict))

    def cells(self, where: Sequence[Any], fields: Sequence[str] | None = None, **more: Any) -> dict[str, Any]:
        """(block, row in it) of every cell, by field."""
        reply = self.get(where, fields, **more)
        found = {}
        for part in reply.parts:
            runs = np.frombuffer(part.runs, np.int64).reshape(-1, 3).tolist()
            lying = [(reply.pieces[piece].block, first + n) for piece, first, count in runs for n in range(count)]
            found.update(dict.fromkeys(part.fields, lying))
        return found

    def tags(self, rows: Sequence[int], partition: str = "p") -> list[dict[str, Any]]:
        table = self.controller.tables[partition]
        return [table.tags[slot] or {} for slot in table.slots_of(np.array(rows)).tolist()]

    def consumed(self, task: str = "t", partition: str = "p") -> dict[int, int]:
        reply = self.handle(m.Consumption(1, partition, task))
        return dict(zip(indexes(reply), reply.status, strict=True)) if reply.known else {}

    def produced(self, fields: Sequence[str], partition: str = "p") -> Any:
        """(known, {row: one status per field})."""
        reply = self.handle(m.Production(1, partition, list(fields)))
        status = np.frombuffer(reply.status, np.int8).reshape(-1, max(1, len(set(fields)))).tolist()
        return reply.known, dict(zip(indexes(reply), status, strict=True))

    def scan(self, fields: Sequence[str], partition: str = "p") -> dict[int, int]:
        reply = self.handle(m.Scan(1, partition, list(fields)))
        return dict(zip(indexes(reply), reply.ready, strict=True))

    def partitions(self) -> list[str]:
        return self.handle(m.ListPartitions(1)).names

    # time and trouble

    def expire(self, now: float) -> None:
        self.now = now
        self.controller.expire(now)
        self.controller.check_invariants()

    def forget(self, *tickets: Any) -> None:
        self.controller.forget(set(tickets))
        self.controller.check_invariants()

    def answers(self) -> list[tuple[Any, Any]]:
        """(ticket, rows or error) of the parked requests answered since the last call."""
        found = [(ticket, error_from_code(reply.code, reply.text) if isinstance(reply, m.Failed)
                  else reply.count if isinstance(reply, m.Admitted) else indexes(reply))
                 for ticket, reply in self.controller.outbox]  # fmt: skip
        self.controller.outbox.clear()
        return found

    def freed(self) -> list[int]:
        found = list(self.controller.block_index.freed)
        self.controller.block_index.freed.clear()
        return found


# ---- saved and loaded ----


def busy(sampler: BaseSampler | None = None, reserved_rows: int = 3) -> Box:
    """A box with something of everything: reserved rows, overwritten and cleared cells, tags, consumption, metadata."""
    box = Box(sampler, reserved_rows)
    box.put(["k0", "k1", "k2", "k3"], ["b", "a"], [{"n": 0, "in": {"deep": [1]}}, {"n": 1}, {}, {"n": 3}])
    box.put(["k1"], ["a"])
    box.put([2], [schema("a", shape=(2,)), "c"])
    box.put(2, ["c", schema("o", dtype="")])
    box.clear(["k2"])
    box.insert(2, ["later"])
    box.put(["x"], ["y"], partition="q")
    box.controller.tables["p"].declared = 12
    box.controller.tables["p"].metadata = {"step": 3, "nested": {"a": [1, 2.5, None]}}
    box.fetch(2, ["a"])
    box.fetch(1, ["c"], task="u")
    return box


def moved(blocks: list[int], by: int = 1000) -> dict[int, int]:
    return {block: block + by for block in blocks}


def reloaded(box: Box, sampler: BaseSampler | None = None, **more: Any) -> Box:
    """A new box with the state of another; blocks have other numbers."""
    state, blocks = exported(box.controller.state)
    fresh = Box(sampler, **more)
    fresh.controller.restoring.replace(state, moved(blocks))
    fresh.controller.state.groups.forget_holders()
    fresh.controller.check_invariants()
    return fresh
