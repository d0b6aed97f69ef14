"""The key-value interface: rows by user keys. Each operation once; `transfer_queue.interface` runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.arguments import flag, text
from transfer_queue.client.dense import Pad
from transfer_queue.client.effects import Call, Operation
from transfer_queue.client.operations import rows as ops
from transfer_queue.client.remarks import warn
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.read import read
from transfer_queue.client.transfer.share import store_shared
from transfer_queue.client.transfer.write import TargetRows, checked_tags, commit, is_on, store
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.codec.plan import columns_of_row, plan_row
from transfer_queue.codec.select import NO_SLICES
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import InvalidInput, UnsupportedValue
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.wire import messages as m
from transfer_queue.wire.lives import naming


def kv_put(
    session: Session,
    key: str,
    partition_id: str,
    fields: TensorDictBase | Mapping[str, Any] | None = None,
    tag: Mapping[str, Any] | None = None,
    data_parser: ops.Parser | None = None,
    strict_schema: bool | None = None,
    dedupe: bool | None = None,
) -> Operation[KVBatchMeta]:
    """Write fields and tag of one row; other fields and tag names of the row stay.

    In a dict, a tensor is the value of a cell; numbers, arrays (also of libraries that export them by DLPack) and lists
    of numbers become tensors, as in the columns of `kv_batch_put`, and everything else is one object. A TensorDict has
    batch size 1.
    Rows of a field may differ: with another kind or rank a get of both gives a list. With another dtype it raises
    `SchemaConflict`, but for integers beside floats of one dtype that holds them exactly, which come as these; the log
    of the put says so once. `strict_schema` refuses such a put (None: as `controller.strict_schema` of the service
    says).

    `dedupe` stores cells of 64 KiB and more that are the same once, within this put and with what was put with `dedupe`
    into the same field of the partition before, by any process (None: as `controller.dedupe` of the service says). They
    are compared byte by byte. Readers get objects and lists that share memory then: who changes one in place changes
    the others of the same read. What lies in a storage engine is not shared.

    Atomic. Raises `InvalidInput`, `UnsupportedValue`, `SchemaConflict` (where strict), `StoreFull`; nothing is stored
    then.
    """
    if fields is None and tag is None:
        raise InvalidInput("give fields, tag or both")
    keys = ops.checked_keys([key])
    if fields is None:
        plan = None
    elif data_parser is not None or isinstance(fields, TensorDictBase):
        batch = fields if isinstance(fields, TensorDictBase) else columns_of_row(fields)
        plan = yield from ops.planned(session, batch, data_parser)
        if plan.rows != 1:
            raise InvalidInput(f"kv_put writes one row, the fields have {plan.rows}")
    elif isinstance(fields, Mapping):
        plan = plan_row(fields, session.allow_pickle)
    else:
        raise InvalidInput(f"fields is a dict or a TensorDict, got {type(fields).__qualname__}")
    return (yield from _write(session, keys, partition_id, plan, None if tag is None else [tag], strict_schema, dedupe))


def kv_batch_put(
    session: Session,
    keys: list[str],
    partition_id: str,
    fields: TensorDictBase | Mapping[str, Any] | None = None,
    tags: Sequence[Mapping[str, Any]] | None = None,
    data_parser: ops.Parser | None = None,
    strict_schema: bool | None = None,
    dedupe: bool | None = None,
) -> Operation[KVBatchMeta]:
    """Write fields and tags of the rows `keys`, creating those that do not exist. Atomic.

    `fields`: a TensorDict, or a mapping of columns, of batch size `len(keys)`. `tags`: one dict per key, merged into
    the stored ones. Returns the stored tags and the fields that all these keys have. Raises as `kv_put`.
    """
    if fields is None and tags is None:
        raise InvalidInput("give fields, tags or both")
    ops.distinct_keys(keys)
    plan = None if fields is None else (yield from _planned_batch(session, fields, len(keys), data_parser))
    return (yield from _write(session, keys, partition_id, plan, tags, strict_schema, dedupe))


def _planned_batch(session: Session, fields: ops.Batch, count: int, parser: ops.Parser | None) -> Operation[BlockPlan]:
    if ops.num_rows(fields) != count:
        raise InvalidInput(f"{count} keys with fields of {ops.num_rows(fields)} rows")
    if parser is None:
        return (yield from ops.batch_plan(session, fields, count))
    return (yield from ops.planned(session, fields, parser))


def _write(
    session: Session,
    keys: list[str],
    partition_id: str,
    plan: BlockPlan | None,
    tags: Sequence[Mapping[str, Any]] | None,
    strict_schema: bool | None,
    dedupe: bool | None,
) -> Operation[KVBatchMeta]:
    text(partition_id, "partition_id")
    wire_tags = None if tags is None else checked_tags(tags, len(keys))
    rows = TargetRows(partition_id, len(keys), list(keys), strict_schema=strict_schema)
    if plan is not None and plan.columns:
        reply = yield from (store_shared if is_on(session, "dedupe", dedupe) else store)(session, plan, rows, wire_tags)
    else:
        reply = (yield commit(session, rows, [], b"", -1, wire_tags))[0]
    return keyed_meta(session, reply, keys, partition_id)


def keyed_meta(session: Session, reply: m.Committed, keys: list[str], partition_id: str) -> KVBatchMeta:
    """Metadata of the rows that a commit wrote by key."""
    life = naming(session.service_id, reply.loads)
    return KVBatchMeta._build(list(keys), reply.tags, partition_id, reply.fields, service_id=life)


def kv_batch_get(
    session: Session,
    keys: list[str] | str,
    partition_id: str,
    select_fields: list[str] | str | None = None,
    strict: bool = False,
    copy: bool = False,
    device: torch.device | str | None = None,
    dense: bool = False,
    pad: Pad | None = None,
    slices: Mapping[str, Slice] | None = None,
) -> Operation[TensorDict]:
    """The rows of `keys` in their order, all fields that every one of them has or those of `select_fields`.

    Keys that do not exist, and fields that are not written on every row, are left out; `strict` raises `UnknownRows` or
    `NotReady` instead. `copy`, `device`, `dense`, `pad` and `slices` as in `get_data`. Raises `UnknownRows` (a
    ValueError) when no key exists, `NotReady` (a ValueError) when the rows have no field in common, `SchemaConflict`
    for rows of several dtypes, `InvalidInput` for slices of fields that are not asked for.
    """
    request = _get(session, keys, partition_id, select_fields, strict)
    ops.check_slices(slices, request.fields)
    parts = slices or NO_SLICES
    found = yield from read(session, [request], copy=copy, device=device, dense=dense, pad=pad, slices=parts)
    if request.fields is None:
        ops.check_slices(slices, list(found.keys()))
    return found


def _get(
    session: Session,
    keys: list[str] | str,
    partition_id: str,
    select_fields: list[str] | str | None,
    strict: bool = False,
    service_id: bytes = b"",
) -> m.Get:
    fields, strict = _selected(select_fields), flag(strict, "strict")
    return m.Get(session.next_rid(), partition_id, ops.key_list(keys), None, fields, strict, service_id)


def _selected(fields: Any) -> list[str] | None:
    """The names of one field or of several; None for all. `UnsupportedValue` for what names none."""
    if fields is None:
        return None
    try:
        names = [fields] if isinstance(fields, str) else list(fields)
    except TypeError:
        names = [fields]
    if not all(isinstance(name, str) for name in names):
        raise UnsupportedValue(f"select_fields is a name or a list of names, got {fields!r:.200}")
    return names


def kv_batch_get_by_meta(
    session: Session, meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> Operation[TensorDict]:
    """The rows of `meta`: its fields, or some of them.

    Raises `InvalidInput` when `meta` lacks partition or fields, `DataLost` when it is of a service that ended.
    """
    if not isinstance(meta, KVBatchMeta):
        raise InvalidInput(f"meta is a KVBatchMeta, got {type(meta).__qualname__}")
    if meta.partition_id is None:
        raise InvalidInput("the meta has no partition_id")
    wanted = _selected(select_fields)
    if wanted is not None and meta.fields is not None:
        missing = sorted(set(wanted) - set(meta.fields))
        if missing:
            raise InvalidInput(f"select_fields {missing} not found in the meta's fields {meta.fields}")
    fields = meta.fields if wanted is None else wanted
    request = _get(session, meta.keys, meta.partition_id, fields, service_id=meta.service_id)
    return (yield from read(session, [request]))


def kv_list(session: Session, partition_id: str | None = None) -> Operation[dict[str, dict[str, dict[str, Any]]]]:
    """`{partition: {key: tag}}` of one partition (`{}` when unknown), or of all."""
    listings = session.listings
    if partition_id is not None:
        text(partition_id, "partition_id")
    while True:
        request = m.ListKeys(session.next_rid(), partition_id, listings.versions(partition_id))
        found = listings.update((yield Call(request))[0], partition_id)
        if found is not None:
            return found


class KeysSeen(NamedTuple):
    """How keys and tags stood at some instant. `service_id` names the life of the service."""

    service_id: bytes
    versions: dict[str, tuple[int, int]]


def kv_watch(
    session: Session, partition_id: str | None = None, since: KeysSeen | None = None, timeout_s: float | None = None
) -> Operation[KeysSeen]:
    """Wait until keys or tags of a partition, or of any, are other than at `since`, which an earlier call returned; say
    how they stand now. Without `since`: at once.

    Waits in the service, at most `timeout_s` (default: the session's); then what it returns equals `since`. A loop that
    asks before it lists misses nothing:

        seen = kv_watch("train")
        while not enough(kv_list("train")):
            seen = kv_watch("train", seen)
    """
    if since is not None and not isinstance(since, KeysSeen):
        raise InvalidInput(f"since is what an earlier kv_watch returned, got {type(since).__qualname__}")
    wait_s = session.timeout_s if timeout_s is None else timeout_s
    is_same = since is not None and since.service_id == session.service_id
    known = since.versions if since is not None and is_same else {}
    request = m.WatchKeys(session.next_rid(), partition_id, known, wait_s if is_same else 0.0)
    reply = (yield Call(request, wait_s=wait_s))[0]
    return KeysSeen(session.service_id, reply.versions)


def kv_clear(session: Session, keys: list[str] | str, partition_id: str) -> Operation[None]:
    """Remove rows by key. Keys that do not exist are fine; a partition without rows left is gone, unless more are to
    come that were declared."""
    reply = (yield Call(m.Clear(session.next_rid(), partition_id, ops.key_list(keys), None, spares=True)))[0]
    warn("kv_clear", reply.note)
