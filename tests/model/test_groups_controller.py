"""Groups of siblings as requests: who waits for what, what returns with a session, what outlives the controller."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tables import Box, indexes, packed, reloaded

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import (
    DeadlineExceeded,
    GroupEnded,
    InvalidInput,
    LeaseExpired,
    StaleAttempt,
    error_from_code,
)
from transfer_queue.groups import GroupPolicy
from transfer_queue.sampler import SequentialSampler
from transfer_queue.wire import messages as m

READY = GroupPolicy()


class GroupBox(Box):
    """A controller with a pool for partition p, driven by short calls."""

    def __init__(self, policy: GroupPolicy | None = READY, ledger: Ledger | None = None) -> None:
        super().__init__()
        if ledger is not None:
            self.controller = Controller(SequentialSampler(), None, 0, ledger=ledger)
        self.rid = 100
        if policy is not None:
            self.ask(m.OpenPool, policy, None)

    def ask(self, kind: Any, *args: Any, session: Any = b"session", asker: Any = None, **more: Any) -> Any:
        """The asker confirms at once that it has the answer."""
        self.rid += 1
        named = {"partition": "p"} if "partition" in kind.__struct_fields__ else {}
        names = [name for name in kind.__struct_fields__[1:] if name not in named]
        values = named | dict(zip(names, args, strict=False)) | more
        reply = self.handle(kind(self.rid, **values), asker, session)
        if reply is not None:
            self.controller.received(session, self.rid)
        return reply

    def open(self, name: str, size: int = 1, **more: Any) -> None:
        values = {"min_size": size, "source": "", "prompt": {}, "start": None, "ticket": None, "refills": False}
        self.ask(m.OpenGroup, name, size, **values | more)

    def claim(self, count: int = 99, group: str | None = None, session: bytes = b"worker", **more: Any) -> Any:
        more.setdefault("timeout_s", 0.0)
        reply = self.ask(m.ClaimSlots, count, group, session=session, **more)
        return None if reply is None else [(one.group, one.slot, one.attempt) for one in reply.slots]

    def finish(
        self, name: str, slot: int = 0, attempt: int = 0, rows: list[int] | None = None, **more: Any
    ) -> list[int]:
        """New rows, unless given, as the result of an attempt."""
        rows = indexes(self.put(1)) if rows is None else rows
        values: dict[str, Any] = {"reward": 1.0, "oldest": None, "newest": None, "tokens": 5, "info": {}}
        one = m.FinishedSlot(name, slot, attempt, **values | more, count=len(rows))
        self.accepted(self.ask(m.FinishSlots, [one], packed(rows), session=b"worker"))
        return rows

    def put_results(self, *found: tuple[str, int, int, int], **more: Any) -> Any:
        """The answer to new rows that are the results of attempts, each with its number of rows."""
        finished = [m.FinishedSlot(*one, 1.0, None, None, 5, {}, count) for *one, count in found]
        count = sum(one.count for one in finished)
        tags = [{"row": row} for row in range(count)]
        self.rid += 1
        return self.handle(m.Commit(self.rid, "p", count, None, None, [], -1, b"", tags, 0.0, finishes=finished))

    def accepted(self, reply: Any) -> Any:
        """Raises why results were refused."""
        for one in reply.refused:
            raise error_from_code(one.code, one.text)
        return reply

    def made(self, name: str, size: int = 1, **more: Any) -> list[int]:
        """A sealed group, and its rows."""
        self.open(name, size, **more)
        self.claim(size, name)
        return [row for slot in range(size) for row in self.finish(name, slot)]

    def select(self, least: int = 1, most: int = 99, wait_s: float = 0.0, **more: Any) -> Any:
        values = {"version": None, "lease_s": 10.0, "timeout_s": wait_s}
        return self.ask(m.SelectGroups, least, most, **values | more)

    def told(self) -> dict[Any, Any]:
        """The answers of those who waited, by ticket."""
        found = dict(self.controller.outbox)
        self.controller.outbox.clear()
        return found

    def report(self) -> Any:
        return self.ask(m.DescribePool).values

    def rows(self) -> list[int]:
        table = self.controller.tables.get("p")
        return [] if table is None else sorted(table.index[table.live_slots()].tolist())


def names(reply: Any) -> list[str]:
    return [group.group for group in reply.groups]


def test_whole_groups_are_selected_with_their_rows_in_order() -> None:
    box = GroupBox()
    first, second = box.made("x", 3), box.made("y", 2)
    reply = box.select()
    assert names(reply) == ["x", "y"]
    assert indexes(reply.rows) == first + second
    assert [[one.slot for one in group.members] for group in reply.groups] == [[0, 1, 2], [0, 1]]
    assert box.report()["lent"] == 2


def test_attempts_that_take_too_long_have_failed_and_those_with_a_result_have_not() -> None:
    box = GroupBox()
    box.open("x", 2)
    ((_, _, first), (_, _, second)) = box.claim(attempt_s=10.0)
    assert box.controller.next_deadline() == box.now + 10.0
    box.finish("x", 0, first)
    assert box.claim(asker="other", timeout_s=60.0) is None
    box.now += 10.0
    box.controller.expire(box.now)
    (again,) = box.told()["other"].slots
    assert (again.slot, again.attempt) == (1, second + 1)
    with pytest.raises(StaleAttempt):
        box.finish("x", 1, second)
    box.finish("x", 1, again.attempt)
    assert names(box.select()) == ["x"]
    assert box.report()["sources"][""]["failed_attempts"] == {"infra": 1}


def test_the_time_of_an_attempt_ends_with_its_pool() -> None:
    box = GroupBox()
    box.open("x")
    box.claim(attempt_s=10.0)
    box.ask(m.RemovePool, True)
    assert box.controller.next_deadline() is None
    with pytest.raises(InvalidInput, match="attempt_s"):
        GroupBox().claim(attempt_s=-1.0)


def test_who_selects_is_answered_by_the_result_that_completes_the_last_group() -> None:
    box = GroupBox()
    for number in range(7):
        box.made(f"g{number}")
    box.open("last", 2)
    box.claim()
    assert box.select(8, 8, 60.0, asker="trainer") is None
    box.finish("last", 0)
    assert box.told() == {}
    box.finish("last", 1)
    assert len(box.told()["trainer"].groups) == 8


def test_who_claims_waits_until_a_group_is_opened_or_a_slot_is_free_again() -> None:
    box = GroupBox()
    assert box.claim(2, timeout_s=60.0, asker="one") is None
    assert box.claim(2, timeout_s=60.0, asker="two", session=b"other") is None
    box.open("x", 2)
    told = box.told()
    assert [slot.slot for slot in told["one"].slots] == [0, 1]
    assert "two" not in told
    box.ask(m.FailSlots, [m.Attempt("x", 1, 0)], "infra")
    assert [(slot.slot, slot.attempt) for slot in box.told()["two"].slots] == [(1, 1)]


def test_a_worker_that_dies_fails_its_attempts_and_the_siblings_stay() -> None:
    box = GroupBox()
    box.open("x", 4)
    box.claim(4, session=b"worker")
    for slot in (0, 1, 3):
        box.finish("x", slot)
    box.end_session(b"worker")
    assert box.claim(9, session=b"next") == [("x", 2, 1)]
    late = indexes(box.put(1))
    with pytest.raises(StaleAttempt):
        box.finish("x", 2, 0, late)
    assert late[0] not in box.rows(), "what a lost attempt wrote is not readable"
    box.finish("x", 2, 1)
    assert names(box.select()) == ["x"]


def test_an_answer_that_reached_nobody_gives_everything_back() -> None:
    box = GroupBox(GroupPolicy(gate=0, groups_per_version=1, max_attempts=9))
    box.ask(m.TakeTickets, 1, 0.0)
    box.controller.state.groups._unreceived.clear()
    unheard = [
        (m.TakeTickets, {"count": 1}), (m.ClaimSlots, {"count": 1, "group": None}),
        (m.SelectGroups, {"least": 1, "most": 1, "version": None, "lease_s": 9.0}),
    ]  # fmt: skip
    box.open("x", ticket=0)
    box.ask(m.AdvancePool, 1)
    for number, (kind, values) in enumerate(unheard):
        box.handle(kind(number, partition="p", timeout_s=0.0, **values), None, b"lost")
        box.controller.take_back(b"lost", number)
        if kind is m.ClaimSlots:
            assert box.claim() == [("x", 0, 1)]
            box.finish("x", 0, 1)
    report = box.report()
    assert (report["tickets_out"], report["lent"], report["sealed"]) == (0, 0, 1)


def test_a_consumer_that_dies_gives_its_groups_back() -> None:
    box = GroupBox()
    box.made("x"), box.made("y")
    box.select(2, session=b"trainer")
    assert box.select(1, wait_s=9.0, asker="other", session=b"other") is None
    box.end_session(b"trainer")
    assert names(box.told()["other"]) == ["x", "y"]


def test_a_lease_that_is_over_gives_its_groups_back_and_is_refused() -> None:
    box = GroupBox()
    box.made("x")
    first = box.select(lease_s=5.0)
    box.expire(4.0)
    box.ask(m.RenewGroups, first.lease, 5.0)
    box.expire(8.0)
    with pytest.raises(DeadlineExceeded):
        box.select()
    box.expire(9.0)
    assert names(box.select()) == ["x"]
    for kind, more in ((m.AckGroups, {"groups": None, "clears": False}), (m.ReleaseGroups, {"groups": None})):
        with pytest.raises(LeaseExpired):
            box.ask(kind, first.lease, **more)


def test_a_lease_begins_when_the_groups_come_not_when_they_were_asked_for() -> None:
    box = GroupBox()
    box.open("x")
    box.claim()
    assert box.select(lease_s=4.0, wait_s=60.0, asker="trainer") is None
    box.now = 6.0
    box.put_results(("x", 0, 0, 1))
    box.now = 9.0
    box.ask(m.AckGroups, box.told()["trainer"].lease, None, False)
    assert box.report()["sources"][""]["consumed"] == 1


@pytest.mark.parametrize("looks", [(m.DescribePool, {"partition": "p"}), (m.DescribeService, {"most": 9})])
def test_who_looks_moves_no_time_that_a_standby_does_not_know(looks: Any) -> None:
    kind, values = looks
    terms = []
    for is_watched in (False, True):
        box = GroupBox()
        box.made("x")
        box.select(session=b"gone", lease_s=90.0)
        assert box.select(lease_s=10.0, wait_s=90.0, asker="trainer") is None
        if is_watched:
            box.now = 50.0
            box.handle(kind(7, **values))
        box.end_session(b"gone")
        terms.append([one.left_s for one in box.controller.groups.leases()])
    assert terms[0] == terms[1]


def test_groups_are_acknowledged_one_by_one_or_all_together() -> None:
    box = GroupBox()
    rows = box.made("x") + box.made("y") + box.made("z")
    reply = box.select(3)
    box.ask(m.AckGroups, reply.lease, ["y"], True)
    box.ask(m.ReleaseGroups, reply.lease, ["z"])
    with pytest.raises(InvalidInput, match="does not have group 'y'"):
        box.ask(m.AckGroups, reply.lease, ["y"], False)
    box.ask(m.AckGroups, reply.lease, None, False)
    assert box.rows() == [rows[0], rows[2]]
    assert names(box.select()) == ["z"]
    with pytest.raises(GroupEnded, match="'x' has ended: it was consumed"):
        box.finish("x")


def test_who_waits_for_fields_is_answered_when_the_host_that_has_them_is_back() -> None:
    box = GroupBox()
    box.unit = 1
    box.made("x")
    box.put(box.rows(), ("advantage",))
    box.controller.hide(1)
    assert box.select(wait_s=60.0, asker="trainer", fields=["advantage"]) is None
    box.controller.show(1)
    assert names(box.told()["trainer"]) == ["x"]


def test_a_group_that_a_request_names_twice_counts_once() -> None:
    box = GroupBox(GroupPolicy(order="weighted", max_times_sampled=2))
    box.made("x"), box.made("y"), box.made("z")
    box.ask(m.FilterGroups, ["x", "y", "x"])
    assert len(box.rows()) == 1
    box.ask(m.AckGroups, box.select().lease, ["z", "z"], False)
    assert names(box.select()) == ["z"], "it was acknowledged once of twice"


def test_attempts_are_said_to_have_failed_all_or_none() -> None:
    box = GroupBox()
    box.open("x", 2)
    box.claim()
    with pytest.raises(InvalidInput, match="slot 9"):
        box.ask(m.FailSlots, [m.Attempt("x", 0, 0), m.Attempt("x", 9, 0)], "infra")
    assert box.claim(group="x") == []


def test_an_announced_version_judges_every_pool_and_opens_its_gate() -> None:
    box = GroupBox(GroupPolicy(serve="window", window=0, stale="evict", gate=0, groups_per_version=2))
    tickets = [one.number for one in box.ask(m.TakeTickets, 2, 0.0).tickets]
    rows = box.made("x", ticket=tickets[0])
    assert box.ask(m.TakeTickets, 2, 60.0, asker="producer") is None
    box.announce(1)
    told = [one.number for one in box.told()["producer"].tickets]
    assert told == [0, 2], "the ticket of the group that was evicted, and a new one"
    assert rows[0] not in box.rows()
    assert box.report()["sources"][""]["evicted_for"] == {"stale": 1}


def test_a_selection_at_a_newer_version_judges_first() -> None:
    box = GroupBox(GroupPolicy.windowed(1))
    box.made("old", start=0), box.made("new", start=2)
    assert names(box.select(version=2)) == ["new"]
    assert box.report()["version"] == 2


def test_refills_wait_for_an_eviction_and_come_back_from_who_dies() -> None:
    box = GroupBox(GroupPolicy.drop(1))
    assert box.ask(m.TakeRefills, 5, 60.0, asker="one", session=b"one") is None
    box.made("x"), box.made("y")
    box.ask(m.FilterGroups, ["x", "y"])
    assert box.told()["one"].count == 2
    assert box.ask(m.TakeRefills, 5, 60.0, asker="two", session=b"two") is None
    box.open("z", refills=True)
    box.end_session(b"one")
    assert box.told()["two"].count == 1
    assert box.report()["owed"] == 1


def test_refills_that_one_session_took_may_be_opened_by_others() -> None:
    box = GroupBox(GroupPolicy.drop(1))
    box.made("x"), box.made("y")
    box.ask(m.FilterGroups, ["x", "y"])
    assert box.ask(m.TakeRefills, 2, 0.0, session=b"driver").count == 2
    for name in ("z", "w"):
        box.made(name, refills=True)
    box.ask(m.FilterGroups, ["z", "w"])
    assert box.ask(m.TakeRefills, 1, 0.0, session=b"driver").count == 1
    assert box.ask(m.TakeRefills, 9, 0.0, session=b"another").count == 1


@pytest.mark.parametrize("way", ["used", "returned"])
def test_a_producer_that_ends_leaves_a_ticket_to_who_has_it_now(way: str) -> None:
    box = GroupBox(GroupPolicy.in_order(0, 1))
    taken = box.ask(m.TakeTickets, 1, 0.0, session=b"first")
    mine = taken.tickets[0].number
    if way == "used":
        box.made("x", ticket=mine)
        box.ask(m.FilterGroups, ["x"])
    else:
        box.ask(m.ReturnTickets, [mine], session=b"first")
    assert box.ask(m.TakeTickets, 1, 0.0, session=b"second").tickets[0].number == mine
    assert box.ask(m.TakeTickets, 1, 60.0, asker="third", session=b"third") is None
    box.controller.take_back(b"first", taken.rid)
    box.end_session(b"first")
    assert box.told() == {}
    assert box.report()["tickets_out"] == 1
    box.open("y", ticket=mine)


def test_a_group_whose_rows_were_cleared_is_gone_as_a_whole() -> None:
    box = GroupBox()
    rows = box.made("x", 2)
    kept = box.made("y", 2)
    box.clear([rows[0]])
    assert names(box.select()) == ["y"]
    assert box.rows() == kept
    box.clear()
    assert box.report()["lent"] == 0
    assert box.report()["sources"][""]["evicted_for"] == {"cleared": 2}


def test_who_selects_waits_for_fields_that_others_write_for_each_row() -> None:
    box = GroupBox()
    rows = box.made("x", 2)
    box.ask(m.EndPool)
    assert box.select(1, wait_s=60.0, asker="trainer", fields=["advantage"]) is None
    box.put([rows[0]], ["advantage"])
    box.put([rows[1]], ["other"])
    assert box.told() == {}
    box.put([rows[1]], ["advantage"])
    told = box.told()["trainer"]
    assert (names(told), told.ended) == (["x"], True)
    box.put([rows[0]], ["advantage"])
    assert not box.controller.groups.fields_awaited


def test_who_waits_for_fields_holds_up_nobody_who_does_not() -> None:
    box = GroupBox()
    assert box.select(1, wait_s=60.0, asker="trainer", fields=["advantage"]) is None
    box.made("x")
    assert names(box.select()) == ["x"]


def test_what_a_session_has_done_is_not_kept() -> None:
    box = GroupBox(GroupPolicy(gate=0, groups_per_version=9999))
    for number in range(700):
        (ticket,) = box.ask(m.TakeTickets, 1, 0.0, session=b"worker").tickets
        box.open(f"g{number}", ticket=ticket.number)
        box.claim(1)
        box.finish(f"g{number}")
        box.ask(m.AckGroups, box.select().lease, None, True)
    held = box.controller.groups._holdings[b"worker"]
    assert len(held.attempts["p"]) <= 257
    assert len(held.tickets["p"]) == 1


def test_a_pool_with_groups_keeps_its_policy() -> None:
    box = GroupBox()
    box.ask(m.OpenPool, READY, None)
    box.open("x")
    with pytest.raises(InvalidInput, match=r"has another policy .* and is in use: it has 1 open groups"):
        box.ask(m.OpenPool, GroupPolicy.drop(2), None)
    with pytest.raises(InvalidInput, match="has no pool of groups"):
        box.handle(m.DescribePool(1, "q"))


def test_a_pool_whose_tickets_are_out_keeps_its_policy() -> None:
    box = GroupBox(GroupPolicy(gate=0, groups_per_version=2))
    (ticket,) = box.ask(m.TakeTickets, 1, 0.0).tickets
    with pytest.raises(InvalidInput, match="1 tickets out"):
        box.ask(m.OpenPool, READY, None)
    box.open("x", ticket=ticket.number)
    assert box.claim() == [("x", 0, 0)]


def test_an_attempt_of_before_a_load_is_not_taken_for_one_of_after_it() -> None:
    box = GroupBox()
    box.open("x")
    saved = exported(box.controller.state)
    assert box.claim() == [("x", 0, 0)]
    Recovery(box.controller, *saved, 0).finish()
    assert box.claim(session=b"other") == [("x", 0, 1)]
    with pytest.raises(StaleAttempt):
        box.finish("x", 0, 0)


def test_attempts_of_a_journal_have_the_numbers_that_they_had() -> None:
    box = GroupBox(ledger=(ledger := Ledger()))
    box.ask(m.OpenPool, READY, None, partition="q")
    box.open("old", partition="q")
    box.claim(partition="q")
    box.ask(m.RemovePool, True, partition="q")  # its number 0 is used, and there is a pool that begins with it
    box.open("x", 2)
    saved = exported(box.controller.state)
    ledger.take()
    assert box.claim() == [("x", 0, 0), ("x", 1, 0)]
    rows = box.finish("x", 0), indexes(box.put_results(("x", 1, 0, 1)))
    heir = Recovery(GroupBox(None, Ledger()).controller, *saved, 0)
    for fact in ledger.take():
        heir.apply(fact)
    heir.finish()
    box.controller = heir._controller
    assert indexes(box.select().rows) == [*rows[0], *rows[1]]


@pytest.mark.parametrize(
    "asked",
    [
        (m.TakeTickets, 0, 1.0), (m.ClaimSlots, 0, None, 1.0), (m.SelectGroups, 3, 2, None, 1.0, 1.0),
        (m.SelectGroups, 1, 1, None, 0.0, 1.0), (m.AwaitGroups, -1, 1.0), (m.TakeRefills, 0, 1.0),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(asked: Any) -> None:
    with pytest.raises(InvalidInput):
        GroupBox().ask(asked[0], *asked[1:])


def test_more_tickets_than_a_gate_ever_lets_through_are_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match="the gate is open for 4 at most"):
        GroupBox(GroupPolicy(gate=1, groups_per_version=2)).ask(m.TakeTickets, 5, 60.0)


def test_whoever_waited_too_long_is_told_what_was_missing() -> None:
    box = GroupBox()
    box.open("x")
    assert box.select(2, 2, 5.0, asker="trainer") is None
    box.expire(5.0)
    failed = box.told()["trainer"]
    assert failed.code == DeadlineExceeded.code
    assert "has 1 open groups, 0 sealed ones" in failed.text


def test_who_came_behind_somebody_that_waited_too_long_is_answered_then() -> None:
    box = GroupBox(GroupPolicy(gate=0, groups_per_version=2))
    box.ask(m.TakeTickets, 1, 0.0)
    assert box.ask(m.TakeTickets, 2, 5.0, asker="many") is None
    assert box.ask(m.TakeTickets, 1, 60.0, asker="one") is None
    box.expire(5.0)
    told = box.told()
    assert told["many"].code == DeadlineExceeded.code
    assert [one.number for one in told["one"].tickets] == [1]


def test_a_loaded_pool_goes_on_with_what_nobody_had() -> None:
    box = GroupBox()
    rows = box.made("x", 2)
    box.made("y")
    box.open("z", 2)
    box.claim(2)
    box.finish("z", 0)
    box.select(1, 1)
    fresh = GroupBox(None)
    fresh.controller = reloaded(box).controller
    report = fresh.report()
    assert (report["open"], report["sealed"], report["lent"]) == (1, 2, 0)
    assert fresh.claim() == [("z", 1, 1)]
    fresh.finish("z", 1, 1)
    reply = fresh.select()
    assert names(reply) == ["x", "y", "z"]
    assert indexes(reply.rows)[:2] == rows


# ---- random histories ----


def test_who_works_on_siblings_is_told_until_the_attempt_is_over() -> None:
    box = GroupBox()
    box.open("x", 3)
    box.claim(2, session=b"one")
    box.claim(1, session=b"two")
    found = box.ask(m.DescribePool).values
    assert found["running"] == 3
    assert found["workers"] == [{"session": b"one".hex(), "attempts": 2}, {"session": b"two".hex(), "attempts": 1}]
    json.dumps(found)
    box.finish("x", 0)
    box.ask(m.FailSlots, [m.Attempt("x", 2, 0)], "infra")
    box.open("y", 1)
    assert box.ask(m.DescribePool).values["oldest_open"] == {
        "group": "x", "source": "", "start_version": 0, "size": 3, "done": 1, "running": 1, "idle": 1, "failed": 0,
    }  # fmt: skip
    with pytest.raises(DeadlineExceeded, match="the oldest open group is 'x': 1 of 3 slots done, 1 running"):
        box.select(1)
    assert box.ask(m.DescribePool).values["workers"] == [{"session": b"one".hex(), "attempts": 1}]


def test_rows_that_became_too_old_and_went_with_their_group_in_one_step_are_counted_after_a_restart() -> None:
    blank = exported(Controller(SequentialSampler(), None, 0, ledger=Ledger()).state)
    box = GroupBox(None, ledger := Ledger())
    box.announce(1)
    box.ask(m.OpenPool, GroupPolicy.windowed(0), None)
    box.tag(box.made("x"), [{"weight_version": 1, "weight_epoch": "e"}])
    stays = box.made_by(1)
    with pytest.raises(DeadlineExceeded):
        box.fetch(9, max_staleness=0)
    box.announce(2)
    assert box.rows() == stays
    heir = Recovery(GroupBox(None, Ledger()).controller, *blank, 0)
    for fact in ledger.take():
        heir.apply(fact)
    heir.finish()
    counts = [one.staleness.statistics()["stale_rows"] for one in (box.controller, heir._controller)]
    assert counts == [2, 2]
