"""Every operation of `TransferQueueClient`, once. The public methods in `api` run these."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from transfer_queue.arguments import text
from transfer_queue.client.dense import Pad
from transfer_queue.client.describing import batch_meta, committed_meta, field_specs, warn_repeated
from transfer_queue.client.effects import Call, HoldSession, Offload, Operation, seconds
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.read import read
from transfer_queue.client.transfer.share import store_shared
from transfer_queue.client.transfer.write import TargetRows, checked_tags, is_on, store
from transfer_queue.codec import lists
from transfer_queue.codec.classes import is_tensorclass
from transfer_queue.codec.columns import items_in, rows_of, unsized
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.codec.plan import exchanged, items_of, plan_batch, python_nbytes
from transfer_queue.codec.rows import row_numbers
from transfer_queue.codec.select import NO_SLICES
from transfer_queue.codec.slices import Slice
from transfer_queue.codec.values import is_plain, is_too_deep
from transfer_queue.errors import BatchMismatch, InvalidInput, MissingParameter, UnknownMode, UnsupportedValue
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import whole_number
from transfer_queue.sampler.streaming_token_budget_sampler import BUDGET
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import NUMERIC, numbers_of, pack_array

log = logging.getLogger("transfer_queue")

Batch: TypeAlias = TensorDictBase | Mapping[str, Any]
Parser: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
MODES = ("fetch", "insert", "force_fetch")


def get_meta(
    session: Session,
    data_fields: list[str],
    batch_size: int | None,
    partition_id: str,
    mode: str,
    task_name: str | None,
    sampling_config: Mapping[str, Any] | None,
    timeout_s: float | None,
    lease_s: float | None = None,
    token_budget: int | None = None,
) -> Operation[BatchMeta]:
    if not is_given(partition_id, "partition_id") or (batch_size is None and token_budget is None):
        raise MissingParameter("get_meta needs partition_id, and batch_size or token_budget")
    if not isinstance(mode, str) or mode not in MODES:
        raise UnknownMode(f"mode {mode!r:.200}: expected one of {list(MODES)}")
    lease_s = lease_length(lease_s)
    if token_budget is not None:
        if mode != "fetch":
            raise UnknownMode(f"mode {mode!r} takes no rows: token_budget is for 'fetch'")
        sampling_config = {**(sampling_config or {}), BUDGET: token_budget}
    batch_size = 1 if batch_size is None else whole_number(batch_size, "batch_size")
    if lease_s is not None and mode != "fetch":
        raise UnknownMode(f"mode {mode!r} takes no rows: lease_s is for 'fetch'")
    if mode == "insert":
        request: m.Request = m.Insert(session.next_rid(), partition_id, batch_size, data_fields, session.timeout_s)
        reply = (yield Call(request, wait_s=session.timeout_s))[0]
        return batch_meta(session.service_id, reply, partition_id, data_fields)
    if mode == "force_fetch":
        reply = (yield Call(m.Scan(session.next_rid(), partition_id, data_fields)))[0]
        return batch_meta(session.service_id, reply, partition_id, data_fields)
    if not is_given(task_name, "task_name"):
        raise UnknownMode("mode 'fetch' needs task_name: which consumer takes the rows")
    if batch_size == 0:
        return BatchMeta.empty()
    terms = (*waiting(session, timeout_s), lease_s or 0.0)
    return (yield from fetch(session, data_fields, batch_size, partition_id, task_name, sampling_config, *terms))


def is_given(name: Any, what: str) -> TypeGuard[str]:
    """Whether a partition or task is named. `InvalidInput` for what is no string."""
    return name is not None and text(name, what) != ""


def lease_length(lease_s: Any) -> float | None:
    """`InvalidInput` for less than 0: rows would be taken for good."""
    if lease_s is None:
        return None
    length = seconds(lease_s, "lease_s")
    if lease_s < 0:
        raise InvalidInput(f"lease_s is a number of seconds, 0 or more, got {lease_s}")
    return length


def field_list(names: Iterable[str]) -> list[str]:
    """`InvalidInput` for one text in place of several names, which would be taken for names of one letter, and for what
    has none."""
    if isinstance(names, str):
        raise InvalidInput(f"data_fields is a list of names, got the text {names!r}")
    try:
        found = list(names)
    except TypeError:
        raise InvalidInput(f"data_fields is a list of names, got {names!r:.200}") from None
    return [text(name, f"data_fields[{place}]") for place, name in enumerate(found)]


def index_list(global_indexes: Any) -> list[int]:
    """One global index or several of them, as a list."""
    try:
        indexes: list[int] = (
            [int(global_indexes)] if isinstance(global_indexes, (int, np.integer)) else list(global_indexes)
        )
    except TypeError:
        raise UnsupportedValue(f"global_indexes are integers, got {global_indexes!r:.200}") from None
    if not indexes:
        raise InvalidInput("global_indexes names no rows")
    if not all(isinstance(index, (int, np.integer)) for index in indexes):
        raise UnsupportedValue(f"global_indexes are integers, got {indexes[:8]}")
    if any(not -(2**63) <= index < 2**63 for index in indexes):
        raise InvalidInput("global_indexes beyond 64 bits: no row has such a number")
    return indexes


def checked_meta(metadata: Any) -> BatchMeta:
    if not isinstance(metadata, BatchMeta):
        raise InvalidInput(f"metadata is a BatchMeta, got {type(metadata).__qualname__}")
    return metadata


def check_slices(slices: Mapping[str, Slice] | None, fields: Sequence[str] | None) -> None:
    """`InvalidInput` for parts of fields that are not read (None: which are is not known yet), and for what is no
    `Slice`."""
    if slices is None:
        return
    if not isinstance(slices, Mapping):
        raise InvalidInput(f"slices is a dict of a Slice for each field, got {type(slices).__qualname__}")
    for name, one in slices.items():
        if not isinstance(one, Slice):
            raise InvalidInput(
                f"slices: {name!r} has a {type(one).__qualname__}, expected a Slice such as tq.Slice(0, 8)"
            )
    unknown = [] if fields is None else sorted(map(repr, set(slices) - set(fields)))
    if unknown:
        raise InvalidInput(f"slices has [{', '.join(unknown)}], which are not among the fields: {list(fields or ())}")


def waiting(session: Session, timeout_s: float | None) -> tuple[float, bool]:
    """For how long a fetch waits, and whether it is empty then; else it fails."""
    polling = bool(session.config.get("polling_mode"))
    return (timeout_s if timeout_s is not None else (0.0 if polling else session.timeout_s)), polling


def fetch(
    session: Session,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any] | None,
    wait_s: float,
    empty_on_timeout: bool,
    lease_s: float,
) -> Operation[BatchMeta]:
    """Ready rows of a task; see `messages.Fetch`. An empty meta when the answer is empty."""
    sampling = checked_sampling(sampling_config)
    if lease_s and not session.is_held:
        yield HoldSession()
    request = m.Fetch(
        session.next_rid(), partition_id, data_fields, _as_sent(batch_size), task_name, sampling, wait_s,
        empty_on_timeout, lease_s,
    )  # fmt: skip
    asked = session.carrying.asked(request, session.changes)
    reply, payload = yield Call(request, wait_s=wait_s)
    rows = reply.rows if isinstance(reply, m.Handed) else reply
    if not rows.rows:
        return BatchMeta.empty()
    meta = batch_meta(session.service_id, rows, partition_id)
    session.carrying.fetched(meta, asked, reply, payload)
    warn_repeated(meta)
    return meta


def checked_sampling(sampling_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """`sampling_config` as it travels; the sampler gets tuples as lists, tensors as arrays, and numbers as Python's.

    Raises `UnsupportedValue` unless it is a dict of plain data and arrays of numbers.
    """
    if sampling_config is None:
        return {}
    if not isinstance(sampling_config, Mapping):
        raise UnsupportedValue(f"sampling_config is a dict, got {type(sampling_config).__qualname__}")
    if is_too_deep(sampling_config, m.MAX_NESTING):
        raise InvalidInput(f"sampling_config: lists and dicts in each other, more than {m.MAX_NESTING} deep")
    sent: dict[str, Any] = _as_sent(dict(sampling_config))
    return sent


def _as_sent(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMERIC:
        return pack_array(value) if value.ndim else value.item()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_as_sent(item) for item in value]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _as_sent(item) for key, item in value.items()}
    if is_plain(value):
        return value
    raise UnsupportedValue(
        f"sampling_config {value!r}: only numbers, strings, lists, dicts by string, arrays and tensors of numbers"
    )


def leased(metadata: BatchMeta) -> tuple[int, bytes, bytes]:
    """(lease, rows, life of the service) of a meta, or `InvalidInput` when it has no lease, or several."""
    if not checked_meta(metadata).lease:
        raise InvalidInput(
            "the rows are not on lease: they were fetched without lease_s, or joined from several leases"
        )
    return metadata.lease, metadata.indexes.tobytes(), metadata.service_id


def num_rows(batch: Batch) -> int:
    """Rows of a batch, or `InvalidInput` when it has none."""
    count = _counted(batch)
    if count < 1:
        raise InvalidInput("a batch needs at least one row")
    return count


def _counted(batch: Batch) -> int:
    """Rows of a batch that says how many it has, which may be none."""
    if isinstance(batch, TensorDictBase):
        size = list(batch.batch_size)
        count = size[0] if size else 0
    elif isinstance(batch, Mapping):
        name, first = "", cast(Any, ())
        for name, first in batch.items():  # noqa: B007  no generator: an interrupt is lost where one is closed
            if not unsized(first):
                break
        else:
            return _num_items(batch)
        if not hasattr(first, "__len__"):
            first = exchanged({name: first})[name]  # arrays of other libraries need not have a length
        count = _length(first)
        if count is None:
            raise InvalidInput(f"a column has rows, got {type(first).__qualname__} without length")
    else:
        what = ": put .to_tensordict() of it" if is_tensorclass(batch) else ""
        raise UnsupportedValue(f"data is a TensorDict or a mapping of columns, got {type(batch).__qualname__}{what}")
    return count


def _num_items(batch: Mapping[str, Any]) -> int:
    """The rows of a batch whose columns are all unsized, which only data of one item per row tell."""
    for column in batch.values():
        if count := items_in(column):
            return count
    raise InvalidInput("a batch needs at least one row: a column that says how many there are")


def batch_plan(session: Session, batch: Batch, rows: int) -> Operation[BlockPlan]:
    """As `plan_batch`; many Python values do not hold up an event loop."""
    nbytes = python_nbytes(batch, rows)
    if not nbytes:
        return plan_batch(batch, rows, session.allow_pickle)
    plan: BlockPlan = yield Offload(lambda: plan_batch(batch, rows, session.allow_pickle), nbytes)
    return plan


def planned(session: Session, batch: Batch, parser: Parser | None) -> Operation[BlockPlan]:
    """The plan of a batch, after `parser` where there is one. Raises before anything is sent."""
    plan = yield from batch_plan(session, parsed(batch, parser), num_rows(batch))
    if not plan.columns:
        raise InvalidInput("a batch needs at least one field")
    return plan


def parsed(batch: Batch, parser: Parser | None) -> Batch:
    """A batch after `parser`, where there is one."""
    if parser is not None:
        if not callable(parser):
            raise UnsupportedValue(f"data_parser is a function of a dict of columns, got {type(parser).__qualname__}")
        count = num_rows(batch)
        columns = dict(items_of(batch))
        parsed = parser({name: _for_parser(column) for name, column in columns.items()})
        if not isinstance(parsed, (Mapping, TensorDictBase)):
            raise BatchMismatch(f"data_parser must return a dict, got {type(parsed).__qualname__}")
        if parsed.keys() != columns.keys() or any(not _fits(column, count) for column in parsed.values()):
            raise BatchMismatch("data_parser must keep the fields and the number of rows")
        batch = {name: _from_parser(parsed[name], column) for name, column in columns.items()}
    return batch


def _for_parser(column: Any) -> Any:
    """A column as a parser sees it: what is nested, and a stack, is a list of its rows."""
    is_nested = isinstance(column, torch.Tensor) and column.is_nested
    return rows_of(column) if is_nested or isinstance(column, NonTensorStack) else column


def _from_parser(parsed: Any, column: Any) -> Any:
    """Rows of a stack stay what they are: a list of numbers would become a tensor."""
    is_stack = isinstance(column, NonTensorStack) and isinstance(parsed, (list, tuple))
    return NonTensorStack(*map(NonTensorData, parsed)) if is_stack else parsed


def _fits(column: Any, count: int) -> bool:
    return unsized(column) or _length(column) == count


def _length(column: Any) -> int | None:
    """The rows of a column, None for what has none. A strided nested tensor has no len."""
    if isinstance(column, torch.Tensor) and column.is_nested:
        return column.size(0)
    try:
        return len(column)
    except TypeError:
        return None


def put(
    session: Session,
    data: Batch,
    metadata: BatchMeta | None,
    partition_id: str | None,
    data_parser: Parser | None,
    strict_schema: bool | None = None,
    dedupe: bool | None = None,
) -> Operation[BatchMeta]:
    if metadata is None:
        if not is_given(partition_id, "partition_id"):
            raise InvalidInput("put needs metadata or a partition_id")
        plan = yield from planned(session, data, data_parser)
        rows = TargetRows(partition_id, plan.rows, strict_schema=strict_schema)
        reply = yield from (store_shared if is_on(session, "dedupe", dedupe) else store)(session, plan, rows, None)
        return committed_meta(session.service_id, reply, partition_id, plan.schema(), None)
    if partition_id is not None and set(checked_meta(metadata).partition_ids) - {text(partition_id, "partition_id")}:
        others = sorted(set(metadata.partition_ids) - {partition_id})
        raise InvalidInput(f"partition_id {partition_id!r}, but the metadata has rows of {others[:8]}: leave it out")
    count = _counted(data)
    if len(checked_meta(metadata)) != count or not count:
        raise BatchMismatch(f"{count} rows of data for {len(metadata)} rows of metadata")
    whole, parts = parsed(data, data_parser), list[_PartPut]()
    for positions, part in _each_once(metadata):  # all are checked before any is written
        of_part = whole if len(part) == count else _rows_at(whole, positions, count)
        plan = yield from planned(session, of_part, None)
        parts.append(_PartPut.of(plan, part))
    for one in parts:
        yield from one.carry_out(session, strict_schema, dedupe)
    schema = field_specs(parts[-1].plan.schema())
    metadata.field_schema = {**metadata._frozen_schema(), **schema}
    metadata._set_ready()
    metadata._forget_tag_edits()
    return metadata


class _PartPut(NamedTuple):
    """What is written to the rows of one partition, with the tags that their holder changed."""

    plan: BlockPlan
    meta: BatchMeta
    tags: list[m.Tags] | None
    replaced: list[int]

    @staticmethod
    def of(plan: BlockPlan, meta: BatchMeta) -> _PartPut:
        """Raises where the tags cannot be stored."""
        edits = meta._tag_edits()
        tags = None
        if edits:
            unchanged: tuple[bool, dict[str, Any]] = (False, {})
            tags = checked_tags([edits.get(position, unchanged)[1] for position in range(len(meta))], len(meta))
        replaced = [position for position, (replace, _) in edits.items() if replace]
        return _PartPut(plan, meta, tags, replaced)

    def carry_out(self, session: Session, strict: bool | None, dedupe: bool | None) -> Operation[None]:
        meta = self.meta
        rows = TargetRows(
            meta.sole_partition, len(meta), None, meta.indexes.tobytes(), self.replaced, meta.service_id, strict
        )
        yield from (store_shared if is_on(session, "dedupe", dedupe) else store)(session, self.plan, rows, self.tags)


def _by_partition(meta: BatchMeta) -> list[tuple[list[int], BatchMeta]]:
    """(positions, rows) of each partition in `meta`."""
    found: dict[str, list[int]] = {}
    names = meta.partition_ids
    if len(set(names)) == 1:
        return [(list(range(len(meta))), meta)]
    for position, name in enumerate(names):
        found.setdefault(name, []).append(position)
    return [(positions, meta.select_samples(positions)) for positions in found.values()]


def _each_once(meta: BatchMeta) -> list[tuple[list[int], BatchMeta]]:
    """As `_by_partition`, of a row that is in `meta` more than once the last: what is written there stays."""
    rows = meta.indexes
    if (rows[1:] > rows[:-1]).all():
        return _by_partition(meta)
    last = np.sort(len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1])
    if len(last) == len(rows):
        return _by_partition(meta)
    parts = _by_partition(meta.select_samples(last))
    return [(last[positions].tolist(), part) for positions, part in parts]


def _rows_at(data: Batch, positions: list[int], count: int) -> Batch:
    """These of `count` rows. A jagged tensor can't be indexed by torch, and not by tensordict before 0.11: it becomes a
    list. `InvalidInput` for a column of another length."""
    found: dict[str, Any] = {}
    for name, column in items_of(data):
        is_stack = isinstance(column, (NonTensorStack, NonTensorData))
        if is_stack or isinstance(column, (list, tuple)) or getattr(column, "is_nested", False):
            rows: Any = rows_of(column, count)
        else:
            rows = lists.column_of(column)
        if len(rows) != count:
            raise InvalidInput(f"field {name!r} has {len(rows)} rows, expected {count}")
        if is_stack:
            found[name] = NonTensorStack(*[NonTensorData(rows[p]) for p in positions])
        else:
            found[name] = [rows[p] for p in positions] if isinstance(rows, list) else rows[positions]
    return found


def set_tags(session: Session, meta: BatchMeta, tags: Sequence[Mapping[str, Any]]) -> Operation[None]:
    """Replace the tags of the rows."""
    checked = checked_tags(tags, len(meta))
    for positions, part in _by_partition(meta):
        wire = [checked[position] for position in positions]
        request = m.SetTags(
            session.next_rid(), part.sole_partition, part.indexes.tobytes(), wire, True, part.service_id
        )
        yield Call(request)


def get_data(
    session: Session,
    metadata: BatchMeta | None,
    copy: bool,
    out: Mapping[str, torch.Tensor] | None,
    device: torch.device | str | None,
    dense: bool = False,
    pad: Pad | None = None,
    slices: Mapping[str, Slice] | None = None,
) -> Operation[TensorDict]:
    if metadata is None or not len(checked_meta(metadata)) or not metadata.field_names:
        log.warning("get_data: the metadata names no rows or no fields")
        return TensorDict({}, batch_size=[0])
    fields, life = metadata.field_names, metadata.service_id
    check_slices(slices, fields)
    requests = [
        m.Get(session.next_rid(), part.sole_partition, None, part.indexes.tobytes(), fields, True, life)
        for part in _segments(metadata)
    ]
    cells = session.carrying.read(metadata, requests, session.changes)
    parts = slices or NO_SLICES
    return (
        yield from read(
            session, requests, copy=copy, out=out, device=device, dense=dense, pad=pad, slices=parts, located=cells
        )
    )


def _segments(meta: BatchMeta) -> list[BatchMeta]:
    """Stretches of rows of one partition, in order."""
    names = meta.partition_ids
    if len(set(names)) <= 1:
        return [meta]
    starts = [0, *(p for p in range(1, len(names)) if names[p] != names[p - 1]), len(names)]
    return [meta[a:b] for a, b in itertools.pairwise(starts)]


def clear_samples(session: Session, metadata: BatchMeta) -> Operation[None]:
    if metadata is None or not len(checked_meta(metadata)):
        return
    for _, part in _by_partition(metadata):
        rows = part.indexes.tobytes()
        yield Call(m.Clear(session.next_rid(), part.sole_partition, None, rows, part.service_id))


def status(reply: m.RowStatus, num_fields: int | None = None) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """(global indexes, int8 status) of a partition, ascending; (None, None) when it or a field is unknown."""
    if not reply.known:
        return None, None
    runs = numbers_of(reply.runs, 2)
    rows = torch.from_numpy(row_numbers(runs))
    values = torch.from_numpy(np.frombuffer(reply.status, np.int8).copy())
    return rows, values if num_fields is None else values.view(len(rows), num_fields)


def is_done(reply: m.RowStatus) -> bool:
    """Whether every row has the status, and as many as were declared were there; without a declared size, any is."""
    there = reply.num_rows + reply.cleared
    is_whole = reply.num_rows > 0 if reply.declared is None else there >= reply.declared
    return reply.known and is_whole and b"\x00" not in reply.status


def is_over(reply: m.RowStatus, has_begun: bool) -> bool:
    """As `is_done`, for a loop: where all rows are cleared, one that had some has come to its end, and one that begins
    waits for the next round."""
    if not reply.num_rows and reply.cleared and (reply.declared is None or not has_begun):
        return has_begun
    return is_done(reply)


def checked_keys(keys: Any) -> list[str]:
    """`keys` as they are: a list of distinct strings, not empty."""
    if type(keys) is not list:
        raise UnsupportedValue(f"keys is a list of strings, got {type(keys).__qualname__}")
    if not set(map(type, keys)) <= {str}:
        wrong = next(key for key in keys if type(key) is not str)
        raise UnsupportedValue(f"keys is a list of strings, got {wrong!r:.200} among them")
    if not keys:
        raise InvalidInput("keys is empty")
    return keys


def distinct_keys(keys: Any) -> list[str]:
    found = checked_keys(keys)
    if len(set(found)) != len(found):
        raise InvalidInput("Got duplicated keys.")
    return found


def key_list(keys: Any) -> list[str]:
    """One key or a list of keys, as a list."""
    return checked_keys([keys] if type(keys) is str else keys)
