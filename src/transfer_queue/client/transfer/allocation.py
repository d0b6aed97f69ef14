"""Writing without a copy: tensors that already lie in the store, filled by the caller and then published."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue.client.describing import committed_meta
from transfer_queue.client.drivers import awaitable, blocking
from transfer_queue.client.effects import Call, Notify, Offload, Operation
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.write import TargetRows, checked_tags, commit, noted, send_block, store_in_engine
from transfer_queue.codec.assemble import typed
from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.codec.plan import plan_empty
from transfer_queue.errors import InvalidInput
from transfer_queue.memory.bytes import Bytes
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.shm import SMALL_NBYTES
from transfer_queue.wire import messages as m

Specs = Mapping[str, tuple[Sequence[int], torch.dtype | str]]


def allocate(session: Session, specs: Specs, timeout_s: float | None) -> Operation[Allocation]:
    """Room for dense fields, each given as (shape with the rows first, dtype). See `TransferQueueClient.allocate`."""
    plan = plan_empty(_checked(specs))
    wait_s = session.timeout_s if timeout_s is None else timeout_s
    nbytes = max(1, plan.nbytes)
    if not session.is_local or session.engine:
        return Allocation(session, plan, session.pool.allocate(nbytes), None)
    found: m.Allocated = (yield Call(m.Allocate(session.next_rid(), nbytes, True, wait_s), wait_s=wait_s))[0]
    allocation = Allocation(session, plan, None, found.block)
    published = allocation._published

    def ended() -> None:
        if not published:
            session.notify(m.Discard(found.block))

    def hold() -> Bytes:
        lies = found.location
        assert isinstance(lies, m.InArena)  # there is no engine
        return session.views.hold(found.rid, found.block, lies.arena, lies.offset, nbytes, ended)

    allocation._fill((yield Offload(hold, nbytes)))
    return allocation


def _checked(specs: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype | str]]:
    found = {}
    for name, spec in specs.items() if isinstance(specs, Mapping) else [(specs, None)]:
        match spec:
            case (Iterable() as shape, dtype) if isinstance(name, str):
                found[name] = (tuple(shape), dtype)
            case _:
                text = 'expected field names, each with (shape, dtype), as {"x": ((8, 512), torch.float32)}'
                raise InvalidInput(f"specs: {text}; got {name!r}: {spec!r}")
    return found


class Allocation(Mapping[str, torch.Tensor]):
    """Tensors by field name, uninitialised, lying in the store. Fill them, then `commit` publishes them as they are.

    After `commit` the tensors belong to the readers: writing into them changes what others read. Their memory stays
    valid as long as they are referenced, and is given back unpublished when they are dropped without a commit.
    """

    def __init__(self, session: Session, plan: BlockPlan, memory: Bytes | None, block: int | None) -> None:
        self.session = session
        self._plan = plan
        self._block = block
        self._memory = memory  # only where blocks cannot be mapped: sent by commit
        self._published: list[bool] = []  # whether the service was asked to
        self._refused: str | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        if memory is not None:
            self._fill(memory)

    def _fill(self, memory: Bytes) -> None:
        for column in self._plan.columns:
            offset, nbytes = column.parts[0]
            shape = (self._plan.rows, *column.shape)
            self._tensors[column.name] = typed(memory[offset : offset + nbytes], torch_dtype(column.dtype), shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _commit(
        self,
        partition_id: str | None = None,
        keys: list[str] | None = None,
        metadata: BatchMeta | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        strict_schema: bool | None = None,
    ) -> Operation[BatchMeta]:
        """Publish: one round trip whatever the size, atomic. Rows are new, or those of `keys`, or those of `metadata`.

        Returns their metadata. `strict_schema`: see `kv_put`. Raises `InvalidInput` when the rows do not fit in number,
        keys repeat, or there are not as many tags: the allocation stays usable. It is given up once the service was
        asked, whatever comes of that: then its tensors can be read still, and a next commit raises `InvalidInput`.
        """
        if self._refused is not None:
            raise InvalidInput(
                f"this allocation was given up, allocate another one: its commit failed ({self._refused})"
            )
        if self._published:
            raise InvalidInput("this allocation was committed before")
        count = self._plan.rows
        partition_id = metadata.sole_partition if metadata is not None else partition_id
        if (
            not partition_id
            or (keys is not None and len(keys) != count)
            or (metadata is not None and len(metadata) != count)
        ):
            raise InvalidInput(f"commit needs a partition and {count} rows")
        if keys is not None and len(set(keys)) != count:
            raise InvalidInput("Got duplicated keys.")
        wire_tags = None if tags is None else checked_tags(tags, count)
        rows = TargetRows(partition_id, count, keys, strict_schema=strict_schema)
        if metadata is not None:
            rows = rows._replace(indexes=metadata.indexes.tobytes(), service=metadata.service_id)
        block, fields, layout = self._block, self._plan.schema(), self._plan.layout()
        if block is None:
            block = yield from self._upload()
        self._published.append(True)
        call = commit(self.session, rows, fields, layout, block, wire_tags)
        call.to = self._books
        try:
            reply = noted(rows, (yield call)[0])
        except BaseException as error:
            self._refused = f"{type(error).__name__}: {error}"  # no error itself: it would keep frames
            yield Notify(m.Discard(block), self._books)  # ignored where it was published
            raise
        return committed_meta(self.session.service_id, reply, partition_id, self._plan.schema(), wire_tags)

    @property
    def _books(self) -> str:
        """The server that has the block: where it lies in an engine, perhaps not this host's."""
        is_large = self._memory is not None and len(self._memory) > SMALL_NBYTES
        return self.session.engine.books if is_large else ""

    def _upload(self) -> Operation[int]:
        session, own = self.session, self._memory
        assert own is not None
        wait_s = session.timeout_s
        deadline = time.monotonic() + wait_s
        request = m.Allocate(session.next_rid(), len(own), False, wait_s)
        found: m.Allocated = (yield Call(request, wait_s=wait_s, to=self._books))[0]
        match found.location:
            case m.InEngine(key):
                copy = functools.partial(np.copyto, src=own)
                yield from store_in_engine(session, found.block, key, len(own), copy, deadline)
            case m.InArena(arena=arena, offset=offset) if session.is_local:
                into = session.arenas[arena].writable(offset, len(own))
                yield Offload(lambda: np.copyto(into, own), len(own))
            case m.InArena():
                yield from send_block(session, found.block, own)
        return found.block

    commit = blocking(_commit)
    async_commit = awaitable(_commit)
