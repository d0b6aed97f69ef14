"""What people are shown of a controller: all of it, a map of a partition, one row; it agrees with what is there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import Box, indexes, packed, schema

from transfer_queue.controller import overview as overview_module
from transfer_queue.controller.departures import MAX_DEPARTURES
from transfer_queue.controller.recent import MAX_EVENTS, MAX_MARKS, MAX_ROWS, Arrivals, Happened, RecentEvents
from transfer_queue.errors import InvalidInput, UnknownRows
from transfer_queue.groups import GroupPolicy
from transfer_queue.wire import messages as m


def overview(box: Box, most: int = 256) -> m.ServiceOverview:
    return box.handle(m.DescribeService(1, most))


def fetch(box: Box, fields: list[str], count: int, task: str = "t", **more: Any) -> Any:
    values: dict[str, Any] = {"sampling": {}, "timeout_s": 0.0, "empty_on_timeout": True} | more
    ticket = values.pop("ticket", None)
    return box.handle(m.Fetch(7, "p", fields, count, task, **values), ticket, b"consumer")


def row(box: Box, number: int) -> m.RowInspected:
    return box.handle(m.InspectRow(1, "p", None, number))


def test_an_overview_counts_what_is_there() -> None:
    box = Box()
    rows = indexes(box.put(["a", "b", "c"], ["x"], tags=[{"n": 1}] * 3))
    box.put(rows[:2], ["y"])
    fetch(box, ["x", "y"], 1)
    fetch(box, ["x"], 1, task="other", lease_s=5.0)
    (partition,) = overview(box).partitions
    assert (partition.name, partition.rows, partition.declared, partition.lost) == ("p", 3, None, 0)
    assert dict(zip([one.name for one in partition.fields], partition.written, strict=True)) == {"x": 3, "y": 2}
    tasks = {one.name: one for one in partition.tasks}
    assert (tasks["t"].consumed, tasks["t"].leased) == (1, 0)
    assert [(one.fields, one.ready) for one in tasks["t"].views] == [(["x", "y"], 1)]
    assert (tasks["other"].consumed, tasks["other"].leased) == (0, 1)
    (lease,) = overview(box).leases
    assert (lease.task, lease.rows, lease.holders, lease.left_s) == ("other", 1, [b"consumer"], 5.0)


def test_who_ended_with_rows_on_lease_is_remembered_and_only_the_latest() -> None:
    box = Box()
    box.put(MAX_DEPARTURES + 4, ["x"])
    fetch(box, ["x"], 2, lease_s=60.0, holder=b"other")
    box.controller.end_session(b"consumer")  # asked on behalf of the other, and holds nothing itself
    assert overview(box).departures == []
    for number in range(MAX_DEPARTURES + 1):
        box.now = float(number)
        box.handle(m.Fetch(7, "p", ["x"], 1, f"t{number}", {}, 0.0, True, 60.0), None, b"%d" % number)
        box.controller.received(b"%d" % number, 7)  # else it was never its
        box.controller.end_session(b"%d" % number)
        box.controller.end_session(b"%d" % number)  # nothing is left
    found = overview(box).departures
    assert [one.session for one in found] == [b"%d" % number for number in range(1, MAX_DEPARTURES + 1)]
    assert (found[-1].ago_s, found[0].ago_s) == (0.0, MAX_DEPARTURES - 1.0)
    assert [(one.task, one.leases, one.rows, one.groups) for one in found[-1].given_back] == [
        (f"t{MAX_DEPARTURES}", 1, 1, 0)
    ]


def test_who_waits_is_shown_with_what_it_lacks() -> None:
    box = Box(max_rows=4)
    box.put(2, ["x"])
    box.now = 10.0
    fetch(box, ["x", "reward"], 2, timeout_s=60.0, ticket="a")
    box.put(3, ["x"], timeout_s=60.0, ticket="b")
    box.now = 25.0
    found = overview(box)
    assert found.num_waits == 2
    waits = {one.call: one for one in found.waits}
    assert (waits["get_meta"].task, waits["get_meta"].session, waits["get_meta"].waited_s) == ("t", b"consumer", 15.0)
    assert waits["get_meta"].left_s == 45.0
    assert "'reward' written on none" in waits["get_meta"].lacks
    assert "4 rows that may be there" in waits["put"].lacks
    assert (waits["get_meta"].fields, waits["put"].fields) == (["x", "reward"], [])
    assert [len(overview(box, most).waits) for most in (0, 1, 9)] == [0, 1, 2]


def test_every_place_where_requests_wait_is_shown() -> None:
    box = Box()
    box.put(["a"], ["x"])
    box.handle(m.OpenPool(1, "p", GroupPolicy(), None))
    lock = m.Lock(2, "p", ["a"], 50.0, 0.0, {"name": "me"})
    box.handle(lock)
    versions = box.handle(m.WatchKeys(6, "p", {}, 0.0)).versions
    parked = [
        m.Lock(3, "p", ["a"], 50.0, 50.0, {"name": "you"}), m.SelectGroups(4, "p", 1, 1, None, 5.0, 50.0),
        m.ClaimSlots(5, "p", 1, None, 50.0), m.WatchKeys(6, "p", versions, 50.0),
        m.Admit(8, "t", 1, 0, 1, 50.0),
    ]  # fmt: skip
    for message in parked:
        assert box.handle(message, ticket=message.rid) is None
    lacks = {one.call: one.lacks for one in overview(box).waits}
    assert lacks.keys() == {"kv_global_lock", "select", "claim", "kv_watch", "admit"}
    assert lacks["select"].startswith("1 groups: the pool of 'p' at version 0 has 0 open groups")
    assert "'a' is held by" in lacks["kv_global_lock"]
    assert all(lacks.values())


def test_groups_series_and_versions_are_in_the_overview() -> None:
    box = Box()
    box.handle(m.OpenPool(1, "p", GroupPolicy(), None))
    box.handle(m.OpenGroup(2, "p", "g", 1, 1, "math", {}, None, None, False))
    (slot,) = box.handle(m.ClaimSlots(3, "p", 1, None, 0.0)).slots
    (made,) = indexes(box.put(1, ["x"]))
    finished = m.FinishedSlot("g", slot.slot, slot.attempt, 1.0, None, None, 5, {})
    box.handle(m.FinishSlots(4, "p", [finished], packed([made])))
    lent = box.handle(m.SelectGroups(5, "p", 1, 1, None, 9.0, 0.0))
    box.handle(m.OpenPartition(6, "step", "steps", 0, ["actor"], True, 0.0))
    box.announce(41)
    found = overview(box)
    assert found.groups["p"]["sources"]["math"]["selected"] == 1
    assert found.series["steps"]["open"]["step"]["left"] == ["actor"]
    assert (found.weight_version, found.num_announcements, found.run_id) == (41, 1, "e")
    assert [(one.number, one.groups, one.rows) for one in found.leases] == [(lent.lease, ["g"], 1)]
    assert row(box, made).group == "g"


@pytest.mark.parametrize("reserved", [0, 2])
def test_the_oldest_ready_row_has_an_age(reserved: int) -> None:
    box = Box(reserved_rows=reserved)
    for box.now in (10.0, 20.0, 30.0):
        box.put(2, ["x"])
    fetch(box, ["x"], 2)
    box.now = 33.0
    (task,) = overview(box).partitions[0].tasks
    assert task.views[0].oldest_s == 13.0
    fetch(box, ["x"], 4)
    assert overview(box).partitions[0].tasks[0].views[0].oldest_s is None


@given(st.lists(st.floats(0.0, 50.0), min_size=1, max_size=60).map(sorted), st.data())
def test_marks_say_when_a_row_came_to_within_a_tenth_of_a_second(times: list[float], data: st.DataObject) -> None:
    marks = Arrivals()
    for number, now in enumerate(times):
        marks.note(10 * number, now)
    number = data.draw(st.integers(0, len(times) - 1))
    said = marks.of(10 * number + data.draw(st.integers(0, 9)))
    assert said is not None
    assert said <= times[number] < said + 0.1 + 1e-9
    assert Arrivals().of(3) is None


def test_marks_and_events_are_bounded() -> None:
    marks, events = Arrivals(), RecentEvents()
    for number in range(3 * MAX_MARKS):
        marks.note(number, float(number))
    assert len(marks._rows) <= MAX_MARKS
    assert marks.of(3 * MAX_MARKS) == 3 * MAX_MARKS - 1
    for number in range(MAX_EVENTS + 5):
        events.note(Happened(0.0, "written", "p", np.array([number]), b"", "", ()))
    assert not events.of_row("p", 4)
    assert events.of_row("p", 5)
    events.note(Happened(0.0, "written", "p", np.arange(MAX_ROWS + 1), b"", "", ()))
    assert not events.of_row("p", MAX_EVENTS)


@pytest.mark.parametrize("each", [1, 2, 3, 7, 50])
def test_a_map_has_the_share_of_each_run(each: int) -> None:
    box = Box(reserved_rows=3)
    rows = indexes(box.put(10, ["x"]))
    box.put(rows[:5], ["y"])
    fetch(box, ["x"], 4)
    box.clear(rows[1:2])
    fetch(box, ["x"], 2, task="u", lease_s=9.0)
    found = box.handle(m.MapCells(1, "p", 0, each))
    left = [number for number in rows if number != rows[1]]
    runs = [left[first : first + each] for first in range(0, 9, each)]
    assert (found.known, found.size, found.next, found.fields, found.tasks) == (True, 9, 0, ["x", "y"], ["t", "u"])
    assert np.frombuffer(found.first_rows, np.int64).tolist() == [run[0] for run in runs]
    assert list(found.written[0]) == [255] * len(runs)
    for line, having in (
        (found.written[1], rows[:5]), (found.consumed[0], rows[:4]), (found.consumed[1], []),
        (found.leased[0], []), (found.leased[1], [rows[0], rows[2]]),
    ):  # fmt: skip
        shares = [sum(one in having for one in run) / len(run) for run in runs]
        assert [value / 255 for value in line] == pytest.approx(shares, abs=2 / 255)
        assert [(value == 0, value == 255) for value in line] == [(share == 0.0, share == 1.0) for share in shares]


def test_slices_of_a_map_have_the_rows_that_are_left_among_many_that_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_module, "SLICE_CELLS", 4 * 1000)
    box, chance = Box(), np.random.default_rng(0)
    rows = np.array(indexes(box.put(3 * overview_module.BLOCK_SLOTS + 7, ["x"])))
    box.put(rows[chance.random(len(rows)) < 0.5].tolist(), ["y"])
    fetch(box, ["y"], 3000)
    gone = chance.random(len(rows)) < 0.4
    gone[: overview_module.BLOCK_SLOTS] = True
    box.clear(rows[gone].tolist())
    start, slices = 0, list[m.CellMap]()
    while start or not slices:
        slices.append(box.handle(m.MapCells(1, "p", start, 1)))
        start = slices[-1].next
    assert len(slices) > 3
    table = box.controller.state.tables["p"]
    left = np.flatnonzero(table.alive[: table.size])
    found = np.concatenate([np.frombuffer(one.first_rows, np.int64) for one in slices])
    assert np.array_equal(found, rows[~gone])
    written = np.frombuffer(b"".join(one.written[1] for one in slices), np.uint8)
    assert np.array_equal(written, 255 * (table.cells[1, left] > 0))
    consumed = np.frombuffer(b"".join(one.consumed[0] for one in slices), np.uint8)
    assert np.array_equal(consumed, 255 * table.tasks["t"].consumed[left])


def test_a_map_of_a_large_partition_comes_in_slices_that_nobody_waits_long_for() -> None:
    controller = Box().controller
    fields = [schema(f"f{number}") for number in range(20)]
    for block in range(1, 11):
        commit = m.Commit(block, "p", 100_000, None, None, fields, block, b"", None, 0.0)
        controller.handle(commit, None, b"s", 0.0)
    start, slices, longest = 0, 0, 0.0
    while start or not slices:
        began = time.thread_time()
        found: Any = controller.handle(m.MapCells(1, "p", start, 1000), None, b"s", 0.0)
        longest = max(longest, time.thread_time() - began)
        slices, start = slices + 1, found.next
    assert found.size == 1_000_000
    assert slices > 5
    assert longest < 0.05  # seconds; alone on the machine 0.004


def test_a_row_tells_what_became_of_it() -> None:
    box = Box()
    (made,) = box.made_by(3, fields=["x"])
    box.announce(3)
    box.announce(5)
    box.now = 1.0
    box.put([made], ["y"])
    reply = fetch(box, ["x", "y"], 1, lease_s=5.0)
    found = row(box, made)
    assert (found.row, found.key, found.age, found.missing) == (made, None, 1, [])
    assert [one.name for one in found.written] == ["x", "y"]
    (task,) = found.tasks
    assert (task.task, task.state, task.lease, task.attempts) == ("t", "leased", reply.lease, 0)
    box.expire(20.0)
    assert [(one.state, one.attempts, one.reason) for one in row(box, made).tasks] == [
        ("ready", 1, "the lease was over")
    ]
    box.now = 21.0
    reply = fetch(box, ["x", "y"], 1, lease_s=5.0)
    box.handle(m.Ack(9, reply.lease, None))
    found = row(box, made)
    assert found.tasks[0].state == "consumed"
    assert [(one.what, one.detail) for one in found.events] == [
        ("written", "x"), ("written", "y"), ("taken", ""), ("returned", "the lease was over"), ("taken", ""),
        ("acknowledged", ""),
    ]  # fmt: skip
    assert [one.ago_s for one in found.events] == [21.0, 20.0, 20.0, 1.0, 0.0, 0.0]
    assert found.events[2].session == b"consumer"


def test_the_rows_of_a_batch_of_results_tell_each_its_own() -> None:
    box = Box()
    box.handle(m.OpenPool(1, "p", GroupPolicy(), None))
    for name in "gh":
        box.handle(m.OpenGroup(2, "p", name, 1, 1, "", {}, None, None, False))
    slots = box.handle(m.ClaimSlots(3, "p", 2, None, 0.0)).slots
    rows = indexes(box.put(3, ["x"]))
    counts = [2, 1]
    results = [
        m.FinishedSlot(one.group, one.slot, one.attempt, 1.0, None, None, 5, {}, count=count)
        for one, count in zip(slots, counts, strict=True)
    ]
    box.handle(m.FinishSlots(4, "p", results, packed(rows)))
    box.handle(m.SelectGroups(5, "p", 2, 2, None, 9.0, 0.0))
    assert len(box.controller.state.recent._events) == 3  # written, finished, selected
    for made, group in zip(rows, "ggh", strict=True):
        assert [(one.what, one.detail) for one in row(box, made).events[1:]] == [
            ("finished", f"slot 0 of group '{group}', attempt 0"), ("selected", f"group '{group}'"),
        ]  # fmt: skip


def test_a_row_that_is_too_old_for_a_task_was_not_consumed_by_it() -> None:
    box = Box()
    used, old = box.made_by(3, 2, fields=["x"])
    box.announce(3)
    fetch(box, ["x"], 1, sampling={"max_staleness": 0})
    box.announce(4)
    assert [row(box, made).tasks[0].state for made in (used, old)] == ["consumed", "too old"]


def test_a_row_tells_what_became_of_it_in_its_group() -> None:
    box = Box()
    box.handle(m.OpenPool(1, "p", GroupPolicy(serve="window", window=1, stale="withhold", judge="oldest"), None))
    box.handle(m.OpenGroup(2, "p", "g", 2, 2, "math", {}, None, None, False))
    slots = box.handle(m.ClaimSlots(3, "p", 2, None, 0.0)).slots
    rows = indexes(box.put(2, ["x"]))
    for number, (one, made) in enumerate(zip(slots, rows, strict=True)):
        result = m.FinishedSlot("g", one.slot, one.attempt, 1.0, 2 * number, 2, 5, {})
        box.handle(m.FinishSlots(4, "p", [result], packed([made])))
    box.handle(m.AdvancePool(5, "p", 2))
    first = box.handle(m.SelectGroups(6, "p", 1, 1, None, 9.0, 0.0))
    box.handle(m.ReleaseGroups(7, first.lease, None))
    second = box.handle(m.SelectGroups(8, "p", 1, 1, None, 9.0, 0.0))
    box.handle(m.AckGroups(9, second.lease, None, False))
    old, new = ([(one.what, one.detail) for one in row(box, made).events] for made in rows)
    group = "group 'g'"
    assert new == [
        ("written", "x"), ("finished", "slot 1 of group 'g', attempt 0"), ("selected", group), ("returned", group),
        ("selected", group), ("acknowledged", group),
    ]  # fmt: skip
    assert [what for what, _ in old] == ["written", "finished", "withheld", "returned", "withheld", "acknowledged"]
    assert (row(box, rows[1]).group, overview(box).groups["p"]["sources"]["math"]["discarded_tokens"]) == (None, 5)


def test_a_row_names_the_steps_that_used_it() -> None:
    box = Box()
    (made,) = indexes(box.put(1, ["x"]))
    box.mark(0)
    fetch(box, ["x"], 1)
    assert row(box, made).tasks[0].steps == [(-1, 0)]
    box.mark(1)
    assert row(box, made).tasks[0].steps == [(1, 0)]


@pytest.mark.parametrize("state", ["waiting", "kept", "delayed", "dead"])
def test_a_row_that_nobody_gets_says_why(state: str) -> None:
    box = Box(max_deliver=1 if state == "dead" else None)
    (made,) = indexes(box.put(1, ["x"]))
    fields = ["x", "y"] if state == "waiting" else ["x"]
    if state == "kept":
        indexes(box.put(1, ["x"]))
        fetch(box, fields, 1, dp_size=2, sampling={"dp_rank": 1, "batch_index": 0})
    else:
        reply = fetch(box, fields, 1, lease_s=9.0)
    if state in ("delayed", "dead"):
        box.handle(m.Nack(9, reply.lease, None, 30.0, "no"))
    assert row(box, made).tasks[0].state == state


def follow(box: Box, seen: m.EventsSeen | None = None, most: int = 1024) -> m.EventsSeen:
    since, memory = (0, 0) if seen is None else (seen.since, seen.memory)
    reply: m.EventsSeen = box.handle(m.FollowEvents(1, "p", since, memory, most))
    return reply


def test_events_are_those_since_the_last_look() -> None:
    box = Box()
    box.put(["before"], ["x"])
    begun = follow(box)
    assert begun.events == []
    rows = indexes(box.put(3, ["x", "y"]))
    fetch(box, ["x"], 2)
    box.now += 2.0
    seen = follow(box, begun)
    told = [(one.what, one.task, one.detail, one.rows, one.first, one.last, one.ago_s) for one in seen.events]
    assert told == [
        ("written", "", "x, y", 3, rows[0], rows[2], 2.0), ("taken", "t", "", 2, rows[0] - 1, rows[0], 2.0),
    ]  # fmt: skip
    assert follow(box, seen).events == []


def test_events_come_in_parts_and_those_of_other_partitions_not_at_all() -> None:
    box = Box()
    begun = follow(box)
    for _ in range(3):
        box.put(1, ["x"])
        box.handle(m.FollowEvents(1, "q", 0, 0))
    box.put(1, ["x"], partition="q")
    first = follow(box, begun, most=2)
    second = follow(box, first, most=2)
    assert (len(first.events), len(second.events), follow(box, second).events) == (2, 1, [])


def test_events_that_were_forgotten_are_counted() -> None:
    box = Box()
    begun = follow(box)
    for _ in range(MAX_EVENTS + 5):
        box.controller.state.recent.note(Happened(0.0, "written", "p", np.arange(1), b"s", "", ("x",)))
    seen = follow(box, begun)
    assert (seen.missed, len(seen.events)) == (5, 1024)
    assert follow(box, seen).missed == 0


def test_events_of_another_servers_memory_begin_anew() -> None:
    box = Box()
    box.put(3, ["x"])
    seen = box.handle(m.FollowEvents(1, "p", 40, 12345))
    assert (seen.events, seen.since, seen.memory) == ([], follow(box).since, follow(box).memory)
    assert seen.memory != 12345


@pytest.mark.parametrize(
    "message",
    [
        m.DescribeService(1, -1), m.DescribeService(1, 1 << 60), m.MapCells(1, "p", 0, 0), m.MapCells(1, "p", 3, 2),
        m.MapCells(1, "p", -2, 2), m.InspectRow(1, "p", None, None), m.InspectRow(1, "p", "a", 0),
        m.FollowEvents(1, "p", 0, 0, 0), m.FollowEvents(1, "p", 0, 0, 1 << 60),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(message: Any) -> None:
    box = Box()
    box.put(["a"], ["x"])
    with pytest.raises(InvalidInput):
        box.handle(message)


def test_what_is_not_there_is_unknown() -> None:
    box = Box()
    box.put(["a"], ["x"])
    assert not box.handle(m.MapCells(1, "q", 0, 1)).known
    for partition, key, number in (("q", "a", None), ("p", "b", None), ("p", None, 7), ("p", None, -1)):
        with pytest.raises(UnknownRows):
            box.handle(m.InspectRow(1, partition, key, number))


REPLICAS = [
    m.ReplicaStatus("a", True, 3, "3", "", 1.0, 0.5),
    m.ReplicaStatus("b", False, None, "", "it is gone", 2.0, None),
]


def test_replicas_are_shown_as_their_trainer_said_and_end_with_it() -> None:
    box = Box()
    box.now = 10.0
    assert isinstance(box.handle(m.ReportReplicas(1, REPLICAS[:1]), None, b"one"), m.Done)
    box.handle(m.ReportReplicas(2, REPLICAS), None, b"one")
    box.handle(m.ReportReplicas(1, REPLICAS[1:]), None, b"other")
    box.now = 14.0
    one, other = overview(box).fleets
    assert (one.session, one.said_s, [found.name for found in one.replicas]) == (b"one", 4.0, ["a", "b"])
    assert one.replicas == [
        m.ReplicaStatus("a", True, 3, "3", "", 5.0, 4.5),
        m.ReplicaStatus("b", False, None, "", "it is gone", 6.0, None),
    ]
    box.controller.end_session(b"one")
    assert overview(box).fleets == [other]
    box.handle(m.ReportReplicas(2, []), None, b"other")
    assert overview(box).fleets == []


def test_of_replicas_only_so_many_are_kept() -> None:
    box = Box()
    with pytest.raises(InvalidInput, match="4097 replicas"):
        box.handle(m.ReportReplicas(1, REPLICAS[:1] * 4097), None, b"one")
    assert overview(box).fleets == []
