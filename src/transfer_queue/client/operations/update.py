"""Changing cells by what they hold: read, compute here, and write unless somebody else wrote meanwhile.

The cells are read with the number of the block that each lies in. A block never changes, and no number is used twice,
so the commit can say which blocks it expects; the controller refuses it where one is another by now, and the update
begins anew. No code travels: `parser` runs in the calling process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from transfer_queue.arguments import flag
from transfer_queue.client.describing import field_specs
from transfer_queue.client.effects import Call, Offload, Operation, Together
from transfer_queue.client.operations import rows as ops
from transfer_queue.client.operations.kv import keyed_meta
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.read import read
from transfer_queue.client.transfer.write import TargetRows, store
from transfer_queue.codec import lists
from transfer_queue.codec.columns import rows_of
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.codec.plan import exchanged, items_of, plan_batch, python_nbytes
from transfer_queue.codec.rows import row_numbers
from transfer_queue.codec.stacks import unwrapped
from transfer_queue.errors import (
    BatchMismatch,
    CellsChanged,
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    UnsupportedValue,
)
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.schema import MIXED, OBJECTS
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import Numbers, numbers_of

Parser: TypeAlias = Callable[[Any, Any], Any]
Columns: TypeAlias = dict[str, list[Any]]  # the values of each field, one for each row
PARSERS = ("append", "merge", "add", "max", "replace")


# what callers may ask for by name


def _append(old: Any, new: Any) -> Any:
    if isinstance(old, torch.Tensor):
        more = _held("append", old, new)
        return torch.cat([old, more[None] if more.dim() == old.dim() - 1 else more])
    if type(old) is type(new) and type(old) in (list, str, bytes):
        return old + new
    if isinstance(old, list):
        return [*old, new]
    raise UnsupportedValue(f"append: {type(new).__qualname__} to {type(old).__qualname__}")


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **new}
    raise UnsupportedValue(f"merge: {type(new).__qualname__} into {type(old).__qualname__}, expected two dicts")


def _numeric(name: str, of_tensors: Parser, of_numbers: Parser) -> Parser:
    def combine(old: Any, new: Any) -> Any:
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            return {**old, **{key: combine(old[key], new[key]) if key in old else new[key] for key in new}}
        if isinstance(old, torch.Tensor):
            return of_tensors(old, _held(name, old, new))
        if isinstance(old, (int, float)) and isinstance(new, (int, float)):
            return of_numbers(old, new)
        raise UnsupportedValue(f"{name}: {type(old).__qualname__} and {type(new).__qualname__}")

    return combine


def _held(name: str, old: torch.Tensor, new: Any) -> torch.Tensor:
    """`new` in the dtype of `old`. `UnsupportedValue` unless that has these numbers; Python's floats are rounded."""
    try:
        given = new if isinstance(new, torch.Tensor) else torch.as_tensor(np.asarray(new), device=old.device)
    except (TypeError, ValueError):  # the latter: lists of different lengths
        raise UnsupportedValue(f"{name}: {type(new).__qualname__} to a tensor of {old.dtype}") from None
    own = _own_numbers(new) if old.dtype.is_floating_point else None
    if given.dtype == old.dtype and not own:
        return given
    if not given.is_complex() or old.is_complex():
        found = given.to(old.dtype)
        if all(map(_is_rounded, own, found.flatten().tolist())) if own else bool(_are_same(found, given).all()):
            return found
        if old.dtype.is_floating_point and bool((given.double().isfinite() & ~found.double().isfinite()).any()):
            raise UnsupportedValue(f"{name}: these numbers overflow {old.dtype}, which the field holds")
    raise UnsupportedValue(
        f"{name}: the field holds {old.dtype}, which has not all of these numbers of {given.dtype}; "
        f"torch.tensor(..., dtype={old.dtype}) rounds them"
    )


def _own_numbers(value: Any) -> list[Any] | None:
    """The numbers of nested lists, one after the other; None unless all are Python's own, which have no dtype. So is
    what NumPy's functions return (`np.mean`), which is a float of Python's."""
    if type(value) in (bool, int, float, np.float64):
        return [value]
    if not isinstance(value, (list, tuple)):
        return None
    parts = [_own_numbers(item) for item in value]
    return None if None in parts else [number for part in parts for number in part or ()]


def _is_rounded(number: float, found: float) -> bool:
    """Whether `found` is a float that stands for Python's `number`: any but an infinite one for a float that is finite,
    and just the same for an int."""
    return math.isfinite(found) or not math.isfinite(number) if isinstance(number, float) else found == number


def _are_same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where tensors of different dtypes have the same numbers. NaN is NaN."""
    if one.is_complex() or other.is_complex():
        return one.to(torch.complex128) == other.to(torch.complex128)
    if not one.dtype.is_floating_point and not other.dtype.is_floating_point:
        numbers, others = one.cpu().numpy(), other.cpu().numpy()
        return torch.as_tensor((numbers == others) & ((numbers < 0) == (others < 0)))
    ours, theirs = one.double(), other.double()
    if one.dtype.is_floating_point and other.dtype.is_floating_point:
        return (ours == theirs) | (ours.isnan() & theirs.isnan())
    whole, number = (other, ours) if one.dtype.is_floating_point else (one, theirs)
    inside = (number >= -(2.0**63)) & (number < 2.0**63)  # neither of int64 and double has all of the other
    back = torch.where(inside, number, torch.zeros_like(number)).to(torch.int64)
    return inside & (back == whole.to(torch.int64)) & (ours == theirs)


def _sum(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`UnsupportedValue` where the dtype of both has not their sum."""
    found = torch.add(old, new)
    if old.dtype == torch.bool:
        is_beyond = bool((old & new).any())
    elif old.dtype.is_floating_point or old.is_complex():
        is_beyond = bool((torch.isfinite(old) & torch.isfinite(new) & ~torch.isfinite(found)).any())
    else:
        was, more, numbers = old.cpu().numpy(), new.cpu().numpy(), found.cpu().numpy()
        carried = (was ^ numbers) & (more ^ numbers) < 0 if was.dtype.kind == "i" else numbers < was
        is_beyond = bool(carried.any())
    if is_beyond:
        raise UnsupportedValue(f"add: the field holds {old.dtype}, which has not the sum: it overflows")
    return found


_NAMED: dict[str, Parser] = {
    "append": _append,
    "merge": _merge,
    "add": _numeric("add", _sum, lambda old, new: old + new),
    "max": _numeric("max", torch.maximum, lambda old, new: old if old >= new or old != old else new),
    "replace": lambda _, new: new,
}


def _parser(parser: object) -> Parser:
    if isinstance(parser, str):
        named = _NAMED.get(parser)
        if named is None:
            raise InvalidInput(f"parser {parser!r}: expected a function of (old, new), or one of {list(PARSERS)}")

        def combine(old: Any, new: Any) -> Any:
            try:
                return new if old is None else named(old, new)
            except UnsupportedValue:
                raise
            except RuntimeError as error:  # torch's, for shapes that do not fit
                raise UnsupportedValue(f"{parser}: {error}") from None

        return combine
    if not callable(parser):
        raise UnsupportedValue(f"parser must be callable, or one of {list(PARSERS)}; got {parser!r}")
    return parser


# by key


def kv_update(
    session: Session,
    key: str,
    partition_id: str,
    fields: str | list[str] | Mapping[str, Any] | TensorDictBase,
    values: Any = None,
    parser: Parser | str | None = None,
    empty: bool = False,
    *,
    merge: Parser | str | None = None,
) -> Operation[KVBatchMeta]:
    """Replace cells of one row by `parser(old, new)`: one atomic step, of which others see all cells or none.

    `fields`: one field, and `values` is its new value; several, and `values` is a dict of as many; or a dict of values.
    `parser` is a function, which runs in this process, again whenever another write came first; or the name of one:
    "append" (to tensors along their first dimension, lists, strings), "merge" (dicts), "add", "max" (numbers, tensors,
    dicts of numbers), "replace". An array that it returns is a tensor, as for a put, except in a field of objects. A
    tensor keeps its dtype: Python's own floats are rounded to it, and other numbers and sums that it has not are
    `UnsupportedValue`. `merge` is another word for `parser`. `empty`: the cells become None instead.

    A field that was not written has the old value None, and the result may be of any type; not so where `fields` is a
    dict: there the field must be written, tensors keep their dtype, and what is no tensor stays so. What `parser`
    raises comes out here and nothing has changed. Raises ValueError and TypeError for arguments that do not fit,
    `UnknownRows` (a ValueError) for a key that is not there, `DeadlineExceeded` when others were faster until the
    deadline, and as `kv_put`.
    """
    ops.checked_keys([key])
    chosen = parser if merge is None else merge
    if flag(empty, "empty"):
        if values is not None or isinstance(fields, Mapping):
            raise InvalidInput("empty=True must not specify values")
        if chosen is not None:
            raise InvalidInput("empty=True must not specify parser")
        return (yield from kv_empty(session, key, partition_id, _names(fields)))
    new, strict = _new_values(fields, values)
    update = _CellUpdate(_Target(partition_id, 1, [key]), new, _parser(chosen), strict)
    yield from update.prepare(session)
    return keyed_meta(session, (yield from update.carry_out(session)), [key], partition_id)


def kv_empty(session: Session, key: str, partition_id: str, fields: str | list[str]) -> Operation[KVBatchMeta]:
    """The cells of these fields become None; the row stays, and they count as written. Raises as `kv_update`."""
    new: Columns = {name: [None] for name in _names(fields)}
    ops.checked_keys([key])
    update = _CellUpdate(_Target(partition_id, 1, [key]), new, lambda _, none: none, False)
    yield from update.prepare(session)
    return keyed_meta(session, (yield from update.carry_out(session)), [key], partition_id)


def _names(fields: Any) -> list[str]:
    found = [fields] if isinstance(fields, str) else fields
    if not isinstance(found, list) or not set(map(type, found)) <= {str}:
        raise UnsupportedValue(f"fields is a string or a list of strings, got {fields!r}")
    if not found or len(set(found)) != len(found):
        raise InvalidInput(f"fields {found}: name one or more, each once")
    return found


def _new_values(fields: Any, values: Any) -> tuple[Columns, bool]:
    """(the new value of each field, whether the types are to stay as they are)."""
    if isinstance(fields, TensorDictBase):
        if values is not None:
            raise InvalidInput("fields has the values already")
        return _row_of(fields), True
    if isinstance(fields, Mapping):
        if values is not None:
            raise InvalidInput("fields has the values already")
        if not fields or not set(map(type, fields)) <= {str}:
            raise UnsupportedValue("fields is a dict with at least one field, whose names are strings")
        return {name: [unwrapped(value)] for name, value in exchanged(fields).items()}, True
    if isinstance(fields, list) and not fields:
        raise UnsupportedValue("fields is empty")
    names = _names(fields)
    if values is None:
        raise InvalidInput("an update requires values")
    if isinstance(fields, str):
        return {fields: [unwrapped(exchanged({fields: values})[fields])]}, False
    given = _row_of(values) if isinstance(values, TensorDictBase) else values
    if not isinstance(given, Mapping) or set(given) != set(names):
        raise InvalidInput(f"values must have the same columns as fields: {names}")
    if isinstance(values, TensorDictBase):
        return {name: given[name] for name in names}, False
    known = exchanged(given)
    return {name: [unwrapped(known[name])] for name in names}, False


def _row_of(batch: TensorDictBase) -> Columns:
    if list(batch.batch_size) != [1]:
        raise InvalidInput(f"one row is updated, the values have batch size {list(batch.batch_size)}")
    return {name: rows_of(column) for name, column in items_of(batch)}


# by metadata


def update(
    session: Session,
    metadata: BatchMeta,
    fields: list[str] | str,
    values: ops.Batch | None,
    parser: Parser | str | None,
) -> Operation[BatchMeta]:
    """See `TransferQueueClient.update`."""
    names = _names(fields)
    if values is None:
        raise InvalidInput("an update requires values")
    chosen = _parser(parser)
    if not len(ops.checked_meta(metadata)) or ops.num_rows(values) != len(metadata):
        raise BatchMismatch(f"{ops.num_rows(values)} rows of values for {len(metadata)} rows of metadata")
    batch = values if isinstance(values, TensorDictBase) else exchanged(values)
    columns = {name: [*map(unwrapped, rows_of(_as_put(one), len(metadata)))] for name, one in items_of(batch)}
    if columns.keys() != set(names):
        raise InvalidInput(f"values must have the same columns as fields: {names}")
    updates = []
    for positions, part in ops._by_partition(metadata):
        target = _Target(part.sole_partition, len(part), None, part.indexes.tobytes(), part.service_id)
        of_part = {name: [column[position] for position in positions] for name, column in columns.items()}
        updates.append(_CellUpdate(target, of_part, chosen, False))
        yield from updates[-1].prepare(session)  # all, before any is written
    for written in updates:
        yield from written.carry_out(session)
        metadata.field_schema = {**metadata._frozen_schema(), **field_specs(written.plan.schema())}
    return metadata


# one update


def _as_put(value: Any) -> Any:
    """An array is a tensor, where torch has its numbers, as it is for a put."""
    tensor = lists.as_tensor(value[None]) if type(value) is np.ndarray else None
    return value if tensor is None else tensor[0]


class _Target(NamedTuple):
    """The rows of one partition, by key or by index."""

    partition: str
    num: int
    keys: list[str] | None
    indexes: bytes | None = None
    service: bytes = b""


class _Old(NamedTuple):
    """What rows hold: values (None where a cell is not written), and, (2, rows), the block that each cell lies in and
    its row there (0: none)."""

    values: Columns
    places: dict[str, Numbers]
    objects: set[str]  # fields of which rows hold no tensors


class _CellUpdate:
    def __init__(self, target: _Target, new: Columns, parser: Parser, strict: bool) -> None:
        self.plan: BlockPlan
        self._expected: bytes  # the blocks that the cells were read from
        self._target = target
        self._new = new
        self._parser = parser
        self._strict = strict

    def prepare(self, session: Session) -> Operation[None]:
        """Read and compute."""
        old = yield from self._read(session)
        nbytes = python_nbytes(self._new, self._target.num)
        self.plan = yield Offload(lambda: self._planned(old, session.allow_pickle), nbytes)
        names = [field.name for field in self.plan.schema()]
        self._expected = np.concatenate([old.places[name].reshape(-1) for name in names]).tobytes()

    def _planned(self, old: _Old, allow_pickle: bool) -> BlockPlan:
        return plan_batch(self._results(old), self._target.num, allow_pickle)

    def carry_out(self, session: Session) -> Operation[m.Committed]:
        """Write what was prepared; prepare it again until nobody else wrote in between."""
        deadline = time.monotonic() + session.timeout_s
        where = self._target
        while True:
            rows = TargetRows(
                where.partition, where.num, where.keys, where.indexes, service=where.service, expected=self._expected
            )
            try:
                return (yield from store(session, self.plan, rows, None))
            except CellsChanged as error:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"others wrote the cells each time they were read: {error}") from None
            yield from self.prepare(session)

    def _results(self, old: _Old) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, new in self._new.items():
            before = old.values[name]
            if self._strict and not old.places[name][0].all():
                raise InvalidInput(f"unproduced field {name!r}: an update by a dict needs what was written before")
            results = [self._parser(was, now) for was, now in zip(before, new, strict=True)]
            are_objects = name in old.objects and not any(isinstance(one, torch.Tensor) for one in (*before, *results))
            results = results if are_objects else list(map(_as_put, results))
            if self._strict:
                _check_types(name, before, results)
            # lists of numbers and arrays among objects stay what they are
            found[name] = NonTensorStack(*map(NonTensorData, results)) if are_objects else results
        return found

    # reading

    def _read(self, session: Session) -> Operation[_Old]:
        where = self._target
        try:
            return (yield from self._cells(session, self._get(session, list(self._new)), range(where.num)))
        except NotReady:
            if where.keys is not None:  # the row has no field at all
                return self._blank()
            return (yield from self._read_by_pattern(session))

    def _get(self, session: Session, fields: list[str], rows: Sequence[int] | None = None) -> m.Get:
        where = self._target
        indexes = where.indexes
        if rows is not None:
            indexes = numbers_of(where.indexes or b"")[list(rows)].tobytes()
        return m.Get(session.next_rid(), where.partition, where.keys, indexes, fields, False, where.service)

    def _blank(self) -> _Old:
        num = self._target.num
        nowhere = {name: np.zeros((2, num), np.int64) for name in self._new}
        return _Old({name: [None] * num for name in self._new}, nowhere, set())

    def _cells(self, session: Session, request: m.Get, rows: Sequence[int]) -> Operation[_Old]:
        """What the rows at these positions hold; the others and what was not found is blank."""
        reply, payload = yield Call(request)
        reply.note = ""  # that a field is not written is no surprise here
        old = self._blank()
        if not reply.schema:
            return old
        places = list(rows)
        for part in reply.parts:
            runs = numbers_of(part.runs, 3)
            blocks = np.array([piece.block for piece in reply.pieces], np.int64)[runs[:, 0]].repeat(runs[:, 2])
            lying = np.stack([blocks, row_numbers(runs[:, 1:])])
            for name in part.fields:
                old.places[name][:, places] = lying
        old.objects.update(field.name for field in reply.schema if field.kind in (OBJECTS, MIXED))
        found = yield from read(session, [request], located=(reply, payload))
        for name in found.keys():  # noqa: SIM118  a TensorDict iterates over rows
            for place, value in zip(places, rows_of(found.get(name)), strict=True):
                old.values[name][place] = value
        return old

    def _read_by_pattern(self, session: Session) -> Operation[_Old]:
        """Rows of which some lack a field: those alike are read together."""
        indexes = numbers_of(self._target.indexes or b"")
        asked = [Call(m.Scan(session.next_rid(), self._target.partition, [name])) for name in self._new]
        answers = yield Together(asked)
        written = np.zeros((len(indexes), len(asked)), np.bool_)
        for number, (reply, _) in enumerate(answers):
            ready = np.frombuffer(reply.ready or b"", np.int8) != 0
            written[:, number] = np.isin(indexes, numbers_of(reply.rows)[ready])
        old, names = self._blank(), list(self._new)
        for pattern in np.unique(written, axis=0):
            if pattern.any():
                rows = np.flatnonzero((written == pattern).all(axis=1)).tolist()
                fields = [name for name, has in zip(names, pattern.tolist(), strict=True) if has]
                part = yield from self._cells(session, self._get(session, fields, rows), rows)
                for name in fields:
                    old.places[name][:, rows] = part.places[name][:, rows]
                    for row in rows:
                        old.values[name][row] = part.values[name][row]
                old.objects.update(part.objects)
        return old


def _check_types(name: str, before: list[Any], results: list[Any]) -> None:
    for old, result in zip(before, results, strict=True):
        if isinstance(old, torch.Tensor):
            if not isinstance(result, torch.Tensor) or result.dtype != old.dtype:
                raise UnsupportedValue(f"field {name!r}: parser must keep dtype {old.dtype}")
        elif isinstance(result, torch.Tensor):
            raise UnsupportedValue(f"field {name!r}: parser's result must remain non-tensor")
