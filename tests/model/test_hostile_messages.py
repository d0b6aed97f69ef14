"""Well-typed messages with hostile content: a service answers every one, and only with errors of this package."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import packed

from transfer_queue.codec.layout import encode_layout
from transfer_queue.controller import Controller
from transfer_queue.errors import CallerError, InvalidInput, ProtocolError, ServiceError
from transfer_queue.groups import GroupPolicy
from transfer_queue.sampler import SequentialSampler
from transfer_queue.schema import FieldSchema
from transfer_queue.server.connection import UNIT_REQUESTS
from transfer_queue.server.controller_node import ControllerNode
from transfer_queue.server.sessions import ServerSession
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m
from transfer_queue.wire.messages.base import Seconds

ROWS = 4
FUZZ = settings(max_examples=600, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))  # fmt: skip
NUMBERS = [0, 1, -1, 2, 3, 7, 300, 2**24 + 1, 2**31, -(2**31), 2**40, 2**40 + 1, 2**56, 2**62, 2**63 - 1, -(2**63),
           2**63, 2**64 - 1]  # fmt: skip
NAMES = ["", "p", "q", "x", "y", "k0", "k1", "t", "\x00", "a" * 300, "controller", ":1", "dense", "objects", "nested"]
numbers = st.sampled_from(NUMBERS)
names = st.sampled_from(NAMES)
in_64_bits = st.sampled_from([number for number in NUMBERS if number < 2**63])
arrays = st.lists(in_64_bits, max_size=5).map(packed)
raw = st.binary(max_size=20) | arrays | arrays.map(lambda data: data[:-1]) | arrays.map(lambda data: data + b"\x00")
groups = names | st.sampled_from(["g", "h"])
plain: Any = st.none() | st.booleans() | numbers | st.floats() | names | st.binary(max_size=9)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)
tags = st.dictionaries(names, values, max_size=3)
fields = st.builds(FieldSchema, names, names, names, st.lists(numbers, max_size=3).map(tuple))
finished = st.builds(
    m.FinishedSlot, groups, numbers, numbers, st.none() | st.floats(), st.none() | numbers, st.none() | numbers,
    numbers, st.just({}), numbers,
)  # fmt: skip
slices = st.dictionaries(names, st.tuples(numbers, st.none() | numbers, numbers, numbers, numbers, st.booleans()))
shared = st.builds(m.SharedCells, fields, numbers, raw, raw, st.booleans(), raw, raw)
STRATEGIES: dict[Any, Any] = {
    int: numbers, float: st.floats() | numbers.map(float), bool: st.booleans(), bytes: raw, str: names,
    bytes | None: st.none() | raw, list[str]: st.lists(groups, max_size=4), int | None: st.none() | numbers,
    str | None: st.none() | names, list[str] | None: st.none() | st.lists(names, max_size=4),
    list[FieldSchema]: st.lists(fields, max_size=3), m.Tags: tags, list[m.Tags]: st.lists(tags, max_size=4),
    list[m.Tags] | None: st.none() | st.lists(tags, max_size=4), list[int]: st.lists(numbers, max_size=4),
    list[float]: st.lists(st.floats(), max_size=4),
    m.Registered: st.builds(m.Registered, names, numbers),
    list[m.Cut]: st.lists(st.builds(m.Cut, numbers, raw, st.lists(names, max_size=3), slices), max_size=3),
    list[m.Refilled]: st.lists(st.builds(m.Refilled, numbers, numbers, numbers), max_size=3),
    list[bytes]: st.lists(raw, max_size=3),
    list[tuple[int, bytes | None]]: st.lists(st.tuples(numbers, st.none() | raw), max_size=3),
    Seconds: st.floats(allow_nan=False),
    float | None: st.none() | st.floats(), Literal["infra", "data"]: st.sampled_from(["infra", "data", "x"]),
    GroupPolicy: st.sampled_from([GroupPolicy.windowed(1), GroupPolicy.in_order(1, 2), GroupPolicy.dropless(2),
                                  GroupPolicy.prioritized(2, samples_per_insert=2.0)]),
    list[m.SharedCells]: st.lists(shared, max_size=3),
    list[m.FinishedSlot]: st.lists(finished, max_size=2),
    list[m.FinishedSlot] | None: st.none() | st.lists(finished, max_size=2),
    list[tuple[str, int]]: st.lists(st.tuples(groups, numbers), max_size=3),
    list[m.Attempt]: st.lists(st.builds(m.Attempt, groups, numbers, numbers), max_size=3),
    list[m.ReplicaStatus]: st.lists(
        st.builds(m.ReplicaStatus, names, st.booleans(), st.none() | numbers, names, names, st.floats(),
                  st.none() | st.floats()), max_size=3),
    dict[str, int]: st.dictionaries(names, numbers),
    list[m.WaitOverview]: st.lists(
        st.builds(m.WaitOverview, names, names, names, raw, st.none() | st.floats(), st.floats(), names), max_size=3),
    dict[str, tuple[int, int]]: st.dictionaries(names, st.tuples(numbers, numbers), max_size=3),
}  # fmt: skip


class Line:
    def push(self, message: m.Message) -> None: ...
    def abort(self) -> None: ...


class Place:
    """A service in this process: rows in two partitions, one block that is large, one lease, one block being filled."""

    def __init__(self) -> None:
        self.head = ControllerNode(Controller(SequentialSampler(), reserved_rows=0), Unit(1 << 20))
        self.service = self.head.service
        self.session = self.service.sessions.attach(b"hostile", local=True)
        self.remote = self.service.sessions.attach(b"remote", local=False)
        self.rid = 1000
        self.now = 0.0
        for partition, keys in (("p", [f"k{row}" for row in range(ROWS)]), ("q", None)):
            fields = [FieldSchema("x", "dense", "int64", ()), FieldSchema("y", "objects", "", ())]
            self.send(m.Commit(0, partition, ROWS, keys, None, fields, 0, LAYOUT, [{"a": 1}] * ROWS, 0.0), bytes(512))
        self.send(m.Allocate(0, 100_000, True, 0.0))
        self.send(m.MarkStep(0, 0, ["t"], []))
        self.send(m.Fetch(0, "p", ["x"], 2, "t", {}, 0.0, True, 60.0))
        self.send(m.Fetch(0, "p", ["x"], 1, "t", {}, 0.0, True))
        self.send(m.MarkStep(0, 1, ["t"], []))
        self.send(m.Lock(0, "p", ["k0"], 60.0, 0.0, {}))
        self.send(m.OpenPool(0, "p", GroupPolicy(gate=1, groups_per_version=4), None))
        self.send(m.TakeTickets(0, "p", 3, 0.0))
        for number, name in enumerate("gh"):
            self.send(m.OpenGroup(0, "p", name, 2 - number, 1, "", {}, None, number, False))
        self.send(m.StartSlots(0, "p", [("g", 0), ("h", 0)]))
        self.send(m.FinishSlots(0, "p", [m.FinishedSlot("h", 0, 0, 1.0, None, None, 5, {})], packed([3])))
        self.send(m.OpenPartition(0, "q", "s", 1, ["c"], True, 0.0))

    def send(self, message: m.Request, payload: bytes = b"", session: ServerSession | None = None) -> m.Reply | None:
        """The reply, None when it was parked. Raises what the link would log as a traceback."""
        self.rid += 1
        self.now += 0.001
        if not message.rid:
            message = msgspec.structs.replace(message, rid=self.rid)
        if type(message) in UNIT_REQUESTS:
            return self.head.of_unit(message, "host", Line(), self.now)
        session = session or self.session
        if payload:
            into = self.service.blocks.destination(message, len(payload), session)
            into[:] = payload
            if isinstance(message, m.Commit):
                payload = bytes(into)
        answer = self.service.handle(message, memoryview(payload), session, ("link", message.rid), self.now)
        if answer is not None:
            m.encode(answer[0])
        for _, answered in self.service.answered(self.now):
            m.encode(answered[0])
        return None if answer is None else answer[0]

    def close(self) -> None:
        self.service.unit.close()


def layout() -> bytes:
    from transfer_queue.codec.layout import Column, Layout

    offsets = 8 * (ROWS + 1)
    return encode_layout(
        Layout(ROWS, 512, [
            Column("x", "dense", "int64", 8, (), -1, [(0, 8 * ROWS)], []),
            Column("y", "objects", "", 0, (), -1, [(64, 0), (128, offsets)], []),
        ])
    )  # fmt: skip


LAYOUT = layout()


@cache  # msgspec evaluates annotations anew each time
def fields_of(kind: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def sample(kind: Any) -> m.Message:
    """A message of this type that names things that are there."""
    known: dict[str, Any] = {
        "partition": "p", "task": "t", "fields": ["x"], "keys": None, "rows": packed([0, 1]), "count": 2, "block": 1,
        "blocks": packed([1]), "lease": 1, "tags": [{}, {}], "timeout_s": 0.0, "nbytes": 100, "offset": 0,
        "layout": LAYOUT, "batch_size": 1, "cuts": [m.Cut(1, packed([0, 2]), ["x"])],
        "lies": m.Registered("there:1", 4096), "target": 2, "address": ":1",
        "lease_s": 1.0, "layouts": [LAYOUT], "names": ["a"], "session": b"remote", "known": {}, "rids": [7],
        "policy": GroupPolicy(), "group": "g", "groups": ["h"], "priorities": [1.0], "slot": 0,
        "attempts": [m.Attempt("g", 0, 0)],
        "slots": [("g", 1)], "series": "s", "consumers": ["c"], "consumer": "c", "least": 1, "most": 2, "tickets": [2],
        "finished": [m.FinishedSlot("g", 0, 0, 1.0, None, None, 5, {})], "size": 2, "min_size": 1, "kind": "infra",
        "max_open": 1, "field": "x", "replicas": [m.ReplicaStatus("a", True, 1, "1", "", 0.0, None)],
        "waits": [m.WaitOverview("put", "", "", b"remote", 1.0, 2.0, "no room")],
        "lock": 1, "holder": {"pid": 1} if kind is m.Lock else b"", "tasks": ["t"], "step": 1,
    }  # fmt: skip
    if kind is m.Commit:
        known |= {"fields": [FieldSchema("x", "dense", "int64", ())], "block": 3}
    if kind is m.Restore:
        known["blocks"] = [m.Refilled(1, 3, 0)]
    if kind is m.Unpin:
        known["blocks"] = [1]
    if kind is m.MarkStep:
        known["used"] = [(1, None)]
    if kind in (m.Find, m.Lock):
        known["keys"] = ["k0", "new"]
    empty: dict[Any, Any] = {int: 0, float: 0.0, Seconds: 0.0, bool: False, bytes: b"", str: "", m.Tags: {}}
    content = {}
    for field in fields_of(kind):
        if field.name in known:
            content[field.name] = known[field.name]
        elif field.required:
            content[field.name] = empty.get(field.type, None if "None" in str(field.type) else {})
    return kind(**content)


KINDS = [
    kind
    for kind in m.ClientMessage.__args__
    if kind not in (m.Hello, m.Proof, m.Stop, m.DigestCells)  # type: ignore[attr-defined]  # the last waits: test_hosts
]


def test_every_sample_is_well_typed() -> None:
    for kind in KINDS:
        message = sample(kind)
        assert m.decode_client(m.encode(message)) == message
        assert all(field.type in STRATEGIES for field in fields_of(kind)), kind


def has_plain_values(found: Any) -> bool:
    """Whether a type has a place for anything that msgpack has; see `msgspec.inspect`."""
    if isinstance(found, msgspec.inspect.AnyType):
        return True
    inner = [field.type for field in getattr(found, "fields", ())]
    inner += [getattr(found, name) for name in ("item_type", "key_type", "value_type") if hasattr(found, name)]
    return any(map(has_plain_values, [*inner, *getattr(found, "item_types", ()), *getattr(found, "types", ())]))


def nested(depth: int, leaf: Any = 1) -> Any:
    """A dict in a list in a dict in ..."""
    for level in range(depth):
        leaf = [leaf] if level % 2 else {"a": leaf}
    return leaf


def nested_key(depth: int) -> Any:
    """A dict whose key is a tuple in a tuple in ..."""
    key: Any = 1
    for _ in range(depth - 1):
        key = (key,)
    return {key: 1}


def test_every_field_with_plain_values_is_known() -> None:
    found: dict[type, tuple[str, ...]] = {}
    for kind in m.ClientMessage.__args__:  # type: ignore[attr-defined]
        inspected: Any = msgspec.inspect.type_info(kind)
        names = tuple(field.name for field in inspected.fields if has_plain_values(field.type))
        found |= {kind: names} if names else {}
    assert found == m.PLAIN


@pytest.mark.parametrize("make", [nested, nested_key])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in m.PLAIN.items() for name in names])
def test_plain_values_that_are_nested_too_deep_are_found(kind: Any, name: str, make: Any) -> None:
    for depth in (1, m.MAX_NESTING, m.MAX_NESTING + 1, 700):
        tags = {"n": 1, "deep": make(depth)}
        values = {"tags": [{}, tags], "finishes": [finish(tags)], "finished": [finish(tags)]}
        message = msgspec.structs.replace(sample(kind), **{name: values.get(name, tags)})
        came = m.decode_client(m.encode(message))
        assert m.nests_too_deep(getattr(came, name)) == (depth > m.MAX_NESTING)


def finish(info: m.Tags) -> m.FinishedSlot:
    return m.FinishedSlot("g", 0, 0, 1.0, None, None, 5, info)


def deliver(place: Place, message: m.Message, payload: bytes, session: ServerSession) -> None:
    """As the link does; whatever is no error of this package is a traceback in the server's log."""
    try:
        message = m.decode_client(m.encode(message))
    except (msgspec.MsgspecError, UnicodeError, OverflowError):
        return  # never gets so far
    with contextlib.suppress(CallerError, ServiceError):
        if isinstance(message, m.Request):
            place.send(message, payload, session)
        else:
            place.service.notify(message, session)
    place.service.check_invariants()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hostile_content_of_any_field_is_answered(kind: Any) -> None:
    @settings(FUZZ, max_examples=40)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        place = Place()
        try:
            for _ in range(data.draw(st.integers(1, 4))):
                message = sample(kind)
                fields = fields_of(kind)
                for field in data.draw(st.lists(st.sampled_from(fields), max_size=3, unique_by=id)) if fields else []:
                    setattr(message, field.name, data.draw(STRATEGIES[field.type]))
                payload = data.draw(st.sampled_from([b"", b"", bytes(100), b"\x93\x01"]))
                session = data.draw(st.sampled_from([place.session, place.remote]))
                deliver(place, message, payload, session)
            place.service.expire(place.now + 2.0)
            for _, answered in place.service.answered(place.now):
                m.encode(answered[0])
            place.service.check_invariants()
            located = place.send(m.Get(0, "q", None, packed([ROWS]), ["x"], False))
            assert isinstance(located, (m.Located, m.Failed))
        finally:
            place.close()

    fuzz()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("layout", [b"", b"\xc1", LAYOUT, LAYOUT[:-1], LAYOUT.replace(b"\x02", b"\x09")])
def test_a_block_with_a_layout_that_is_not_its_own_can_be_asked_for(layout: bytes, remote: bool) -> None:
    """The server cuts parts out of blocks for readers on other hosts; writers say how those lie."""
    place = Place()
    fields = [FieldSchema("x", "dense", "int64", ())]
    place.send(m.Commit(0, "r", ROWS, None, None, fields, 0, layout, None, 0.0), bytes(40))
    session = place.remote if remote else place.session
    for rows in ([0, 2], [1], [3, 9]):
        taken = place.send(m.Take(0, [m.Cut(4, packed(rows), ["x"])]), session=session)
        assert isinstance(taken, m.Failed)
        assert taken.code in (ProtocolError.code, InvalidInput.code)
    place.service.check_invariants()
    place.close()
