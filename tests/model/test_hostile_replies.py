"""Blocks that their writers described wrongly, replies that do not fit: readers raise errors of this package only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blocks import put, put_row
from damage import NUMBERS, touch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import packed
from test_codec_bounds import ORIGINAL, PLAN, ROWS, places, with_change

import transfer_queue as tq
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.effects import Together
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.located import MANY
from transfer_queue.client.transfer.read import read
from transfer_queue.client.transfer.remote import received
from transfer_queue.codec.layout import encode_layout
from transfer_queue.errors import TransferQueueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire import messages as m

FUZZ = settings(max_examples=300, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))  # fmt: skip
LAYOUT = PLAN.layout()
SCHEMA = PLAN.schema()
NAMES = [field.name for field in SCHEMA]
RUNS = [[0, 0, ROWS]], [[0, 1, 2]], [[0, 3, 1], [0, 0, 2], [0, 2, 1]]
WRONG: list[Any] = [
    None,
    "",
    "x",
    "dense",
    "ragged",
    "varied",
    "objects",
    "nested",
    "int64",
    "float64",
    "bool",
    "no",
    [],
    {},
]


@pytest.fixture(scope="module")
def session(shared: tq.TransferQueueClient) -> Session:
    return shared.session


AT_ONCE = m.Inline(0)


def located(layout: bytes, runs: Any, location: m.Location = AT_ONCE) -> m.Located:
    count = sum(run[2] for run in runs)
    pieces = [m.Piece(1, len(ORIGINAL.data), 0, location)]
    return m.Located(
        1, count, pieces, [layout], [m.Part(list(NAMES), packed(np.array(runs).reshape(-1)))], list(SCHEMA)
    )


def attempt(session: Session, reply: m.Located, **options: Any) -> None:
    """Read what the reply names, and every byte of the result."""
    request = m.Get(1, "p", None, b"", None, False)
    payload = memoryview(bytearray(ORIGINAL.data.tobytes()))
    with contextlib.suppress(TransferQueueError):
        found = run(session, read(session, [request], located=(reply, payload), **options))
        for _, value in found.items():
            if not isinstance(value, torch.Tensor) or value.numel() < 1 << 20:
                touch(value)


def read_all_ways(session: Session, layout: bytes) -> None:
    for runs in RUNS:
        attempt(session, located(layout, runs))
    attempt(
        session,
        located(layout, RUNS[0]),
        out={"dense": torch.empty(ROWS, 2, 3), "flat": torch.empty(ROWS, dtype=torch.int64)},
    )


def test_a_layout_as_it_was_written_is_read(session: Session) -> None:
    for runs in RUNS:
        reply = located(LAYOUT, runs)
        payload = memoryview(bytearray(ORIGINAL.data.tobytes()))
        found = run(session, read(session, [m.Get(1, "p", None, b"", None, False)], located=(reply, payload)))
        assert set(found.keys()) == set(NAMES)


def changes() -> Iterator[bytes]:
    """The layout with one value changed, wherever."""
    content = msgspec.msgpack.decode(LAYOUT)
    for path in places(content):
        for value in [*NUMBERS, *WRONG]:
            yield with_change(content, path, value)


def test_every_changed_layout_is_read_or_refused(session: Session) -> None:
    for number, layout in enumerate(changes()):
        if number % 3 == 0:
            attempt(session, located(layout, RUNS[number // 3 % 3]))


def test_layouts_whose_columns_change_places_are_read_or_refused(session: Session) -> None:
    content = msgspec.msgpack.decode(LAYOUT)
    columns = content[2]
    for name in range(len(columns)):
        for other in range(len(columns)):
            changed = copy.deepcopy(content)
            changed[2][name] = copy.deepcopy(columns[other])
            changed[2][name][0] = columns[name][0]
            read_all_ways(session, msgspec.msgpack.encode(changed))


@FUZZ
@given(data=st.data())
def test_several_changes_are_read_or_refused(session: Session, data: st.DataObject) -> None:
    content = msgspec.msgpack.decode(LAYOUT)
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(list(places(content))))
        content = msgspec.msgpack.decode(with_change(content, path, data.draw(st.sampled_from([*NUMBERS, *WRONG]))))
    attempt(session, located(msgspec.msgpack.encode(content), data.draw(st.sampled_from(RUNS))))


HOSTILE = st.sampled_from([*NUMBERS, 5, 1000, 2**64 - 1])


LOCATIONS = st.one_of(
    st.builds(m.Inline, HOSTILE), st.builds(m.InArena, HOSTILE, HOSTILE), st.builds(m.InArena, st.just(0), HOSTILE)
)


def change(data: st.DataObject, piece: m.Piece) -> None:
    field = data.draw(st.sampled_from(["nbytes", "layout", "location"]))
    setattr(piece, field, data.draw(LOCATIONS if field == "location" else HOSTILE))


NUM_ALONE = MANY + 1  # from so many on they are read as a matrix
ALONE = [
    put_row({"x": torch.arange(n), "y": torch.ones(2), "s": "a" * n, "o": {"n": torch.ones(n)}})
    for n in range(NUM_ALONE)
]
ENDS = np.cumsum([0, *(len(block.data) for block in ALONE)]).tolist()


def reply_of_rows_put_alone() -> m.Located:
    pieces = [m.Piece(n, len(block.data), n, m.Inline(ENDS[n])) for n, block in enumerate(ALONE)]
    layouts = [encode_layout(block.layout) for block in ALONE]
    runs = np.array([[n, 0, 1] for n in range(NUM_ALONE)])
    fields = [column.schema() for column in ALONE[0].layout.columns]
    return m.Located(1, NUM_ALONE, pieces, layouts, [m.Part(list("xyso"), runs.tobytes())], fields)


def attempt_alone(session: Session, reply: m.Located) -> None:
    payload = memoryview(bytearray(b"".join(block.data.tobytes() for block in ALONE)))
    found = run(session, read(session, [m.Get(1, "p", None, b"", None, False)], located=(reply, payload)))
    for _, value in found.items():
        if not isinstance(value, torch.Tensor) or value.numel() < 1 << 20:
            touch(value)


@pytest.mark.parametrize("location", [m.Inline(2**64 - 1), m.InArena(2**64 - 1, 0), m.InArena(0, 2**64 - 1)], ids=str)
def test_a_place_that_no_array_holds_is_refused(session: Session, location: m.Location) -> None:
    for number in range(NUM_ALONE):
        for name, value in (("location", location), ("nbytes", 2**64 - 1), ("layout", 2**64 - 1)):
            reply = reply_of_rows_put_alone()
            setattr(reply.pieces[number], name, value)
            with pytest.raises(TransferQueueError):
                attempt_alone(session, reply)
    for piece in (reply := reply_of_rows_put_alone()).pieces:
        piece.location = location
    with pytest.raises(TransferQueueError):
        attempt_alone(session, reply)


def changed_reply_of_rows_put_alone(data: st.DataObject) -> m.Located:
    reply = reply_of_rows_put_alone()
    pieces, layouts = reply.pieces, reply.layouts
    runs = np.frombuffer(reply.parts[0].runs, np.int64).reshape(-1, 3).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        what, number = data.draw(st.sampled_from(["piece", "runs", "layout"])), data.draw(st.integers(0, NUM_ALONE - 1))
        if what == "piece":
            change(data, pieces[number])
        elif what == "runs":
            runs[number, data.draw(st.integers(0, 2))] = data.draw(st.sampled_from(NUMBERS))
        else:
            changed = bytearray(layouts[number])
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
            layouts[number] = bytes(changed)
    reply.count = data.draw(st.sampled_from([NUM_ALONE, NUM_ALONE, NUM_ALONE, 8, 0]))
    reply.parts[0].runs = runs.tobytes()
    return reply


@FUZZ
@given(data=st.data())
def test_changed_replies_of_rows_put_alone_are_read_or_refused(session: Session, data: st.DataObject) -> None:
    with contextlib.suppress(TransferQueueError):
        attempt_alone(session, changed_reply_of_rows_put_alone(data))


def changed_reply(data: st.DataObject) -> m.Located:
    """A reply with one to three of its parts changed."""
    reply = located(LAYOUT, data.draw(st.sampled_from(RUNS)))
    for _ in range(data.draw(st.integers(1, 3))):
        what = data.draw(st.sampled_from(["piece", "runs", "bytes", "count", "fields", "layouts", "schema", "pieces"]))
        part = reply.parts[0] if reply.parts else m.Part([], b"")
        if what == "piece" and reply.pieces:
            change(data, reply.pieces[0])
        elif what == "runs" and len(part.runs) >= 8:
            runs = np.frombuffer(part.runs[: len(part.runs) // 8 * 8], np.int64).copy()
            runs[data.draw(st.integers(0, len(runs) - 1))] = data.draw(st.sampled_from(NUMBERS))
            part.runs = runs.tobytes()
        elif what == "bytes":
            part.runs = data.draw(st.sampled_from([b"", b"1", part.runs[:-1], part.runs[8:], part.runs + b"12345678"]))
        elif what == "count":
            reply.count = data.draw(HOSTILE)
        elif what == "fields":
            part.fields = data.draw(st.lists(st.sampled_from([*NAMES, "other"]), max_size=3))
        elif what == "layouts":
            reply.layouts = data.draw(st.sampled_from([[], [b""], [b"\xc1"], [LAYOUT, LAYOUT]]))
        elif what == "schema":
            reply.schema = data.draw(st.lists(st.sampled_from(SCHEMA), max_size=3))
        elif what == "pieces":
            reply.pieces = data.draw(st.sampled_from([[], reply.pieces * 2]))
    return reply


@FUZZ
@given(data=st.data())
def test_replies_that_do_not_fit_are_refused(session: Session, data: st.DataObject) -> None:
    attempt(session, changed_reply(data))


@FUZZ
@given(data=st.data())
def test_answers_of_other_hosts_that_do_not_fit_are_refused(session: Session, data: st.DataObject) -> None:
    """A unit is asked for a part of a block, and answers with another, or with nonsense."""
    reply = located(LAYOUT, data.draw(st.sampled_from(RUNS)), m.REMOTE)
    piece = m.Piece(1, len(ORIGINAL.data), 0, m.Inline(0))
    taken = m.Taken(1, [piece], [LAYOUT])
    if data.draw(st.booleans()):
        change(data, piece)
    if data.draw(st.booleans()):
        content = msgspec.msgpack.decode(LAYOUT)
        path = data.draw(st.sampled_from(list(places(content))))
        taken.layouts = [with_change(content, path, data.draw(st.sampled_from([*NUMBERS, *WRONG])))]
    if data.draw(st.booleans()):
        taken.pieces = data.draw(st.sampled_from([[], [piece, piece]]))
    operation = received(session, m.Get(1, "p", None, None, None, False), reply)
    assert isinstance(next(operation), Together)
    with contextlib.suppress(TransferQueueError, StopIteration):
        operation.send([(taken, memoryview(bytearray(ORIGINAL.data.tobytes())))])


def test_partitions_whose_fields_differ_in_rank_are_read_together_as_a_list(session: Session) -> None:
    client = TransferQueueClient.of(session)
    one = client.put({"x": torch.ones(2, 3)}, partition_id="flat")
    other = client.put({"x": torch.ones(2, 3, 4)}, partition_id="deep")
    rows = client.get_data(BatchMeta.concat([one, other]))["x"]
    assert [row.shape for row in rows] == [(3,), (3,), (3, 4), (3, 4)]
    for name in ("flat", "deep"):
        client.clear_partition(name)


NUM_TOGETHER = 12  # rows of each of two blocks, which are read with those put alone
TOGETHER = [
    put(
        {
            "x": [torch.arange(n) for n in range(NUM_TOGETHER)],
            "y": torch.ones(NUM_TOGETHER, 2),
            "s": ["b" * n for n in range(NUM_TOGETHER)],
            "o": [{"n": torch.ones(n)} for n in range(NUM_TOGETHER)],
        },
        NUM_TOGETHER,
    )
    for _ in range(2)
]
BLOCKS = [*ALONE, *TOGETHER]
STARTS = np.cumsum([0, *(len(block.data) for block in BLOCKS)]).tolist()


def spread_reply() -> m.Located:
    """Rows put alone, and rows of two blocks between them."""
    pieces = [m.Piece(n, len(block.data), n, m.Inline(STARTS[n])) for n, block in enumerate(BLOCKS)]
    runs = [[n, 0, 1] for n in range(NUM_ALONE)]
    runs += [[NUM_ALONE + block, row, 1] for row in range(NUM_TOGETHER) for block in range(2)]
    mixed = np.array(runs)[np.random.default_rng(1).permutation(len(runs))]
    fields = [column.schema() for column in TOGETHER[0].layout.columns]
    part = m.Part([field.name for field in fields], mixed.tobytes())
    return m.Located(1, len(runs), pieces, [encode_layout(block.layout) for block in BLOCKS], [part], fields)


def attempt_spread(session: Session, reply: m.Located) -> dict[str, Any]:
    payload = memoryview(bytearray(b"".join(block.data.tobytes() for block in BLOCKS)))
    found = run(session, read(session, [m.Get(1, "p", None, b"", None, False)], located=(reply, payload)))
    for _, value in found.items():
        if not isinstance(value, torch.Tensor) or value.numel() < 1 << 20:
            touch(value)
    return dict(found.items())


def test_rows_between_others_are_read(session: Session) -> None:
    runs = np.frombuffer(spread_reply().parts[0].runs, np.int64).reshape(-1, 3).tolist()
    found = attempt_spread(session, spread_reply())
    lengths = [piece if piece < NUM_ALONE else row for piece, row, _ in runs]
    assert [len(row) for row in found["x"].unbind()] == lengths
    assert [len(text) for text in found["s"].tolist()] == lengths


@FUZZ
@given(data=st.data())
def test_changed_replies_of_rows_in_many_places_are_read_or_refused(session: Session, data: st.DataObject) -> None:
    reply = spread_reply()
    runs = np.frombuffer(reply.parts[0].runs, np.int64).reshape(-1, 3).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        what, block = data.draw(st.sampled_from(["piece", "runs", "layout"])), data.draw(st.integers(1, 4))
        if what == "piece":
            change(data, reply.pieces[-block])
        elif what == "runs":
            runs[data.draw(st.integers(0, len(runs) - 1)), data.draw(st.integers(0, 2))] = data.draw(
                st.sampled_from(NUMBERS)
            )
        else:
            changed = bytearray(reply.layouts[-block])
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
            reply.layouts[-block] = bytes(changed)
    reply.count = data.draw(st.sampled_from([reply.count, reply.count, 8, 0, 2**62]))
    reply.parts[0].runs = runs.tobytes()
    with contextlib.suppress(TransferQueueError):
        attempt_spread(session, reply)
