"""Steps of a training loop whose ranks share its batches: going back to one with as many ranks, fewer, or none."""

from __future__ import annotations

from typing import Any

import pytest
from tables import Box, reloaded
from test_steps import filled


def test_a_checkpoint_brings_deals_of_ranks_that_are_to_come_again() -> None:
    box, _ = filled(8)
    taken_ = [deal(box, rank, 0)[1] for rank in (0, 1)]
    box.resume(0)
    fresh = reloaded(box)
    assert [deal(fresh, rank, 0)[1] for rank in (0, 1)] == taken_


def deal(box: Box, rank: int, batch: int, size: int = 2, **more: Any) -> Any:
    return box.lend(2, 1e6, dp_rank=rank, dp_size=size, batch_index=batch, until_done=True, **more)


@pytest.mark.parametrize("again", [(1,), (1, 0), (0,)])
def test_a_step_that_ends_amid_a_deal_has_its_half_also_after_going_back_twice(again: tuple[int, ...]) -> None:
    """As streams do whose micro-batches are half of their batches, and each of which is a step."""
    box, _ = filled(8)
    leases = [deal(box, rank, 0) for rank in (0, 1)]
    for step, half in ((1, slice(1)), (2, slice(1, 2))):
        for lease, rows in leases:
            box.ack(lease, rows[half])
        box.mark(step)
    for step in again:
        box.resume(step)
        halves = []
        for batch in range(2 - step):
            got = [deal(box, rank, batch) for rank in (0, 1)]
            halves.append([rows for _, rows in got])
            for lease, _ in got:
                box.ack(lease)
        assert halves == [[rows[half : half + 1] for _, rows in leases] for half in range(step, 2)]
        box.mark(2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fewer_or_more_ranks_get_all_rows(size: int) -> None:
    box, rows = filled(12)
    box.controller.tables["p"].declared = 12
    for rank in range(2):
        box.ack(deal(box, rank, 0)[0])
    box.resume(0)
    found: list[int] = []
    batch = 0
    while len(found) < 12:
        for rank in range(size):
            lease, more = deal(box, rank, batch, size=size)
            found += more
            box.ack(lease)
        batch += 1
    assert sorted(found) == rows


def test_a_loop_without_ranks_gets_what_was_dealt() -> None:
    box, rows = filled(4)
    for rank in range(2):
        box.ack(deal(box, rank, 0)[0])
    assert box.fetch(2, wait_s=60, ticket="next") is None
    box.resume(0)
    assert [*box.answers()[0][1], *box.fetch(2)] == rows


def test_repeated_rows_are_their_owners() -> None:
    box, rows = filled(1)
    box.controller.tables["p"].declared = 1
    for _ in range(2):
        got = [deal(box, rank, 0) for rank in range(2)]
        assert [found for _, found in got] == [rows, rows], "the second rank's is the first one's once more"
        for lease, _ in got:
            if lease:
                box.ack(lease)
        box.resume(0)


def test_a_share_that_its_rank_had_not_asked_for_is_its_own() -> None:
    """The ranks were at different batches when they died."""
    box, rows = filled(13)
    box.controller.tables["p"].declared = 13
    first = deal(box, 0, 0, size=3)[1]
    deal(box, 2, 0, size=3)
    box.resume(0)
    at, over, held = [0] * 3, [False] * 3, dict[int, int]()
    learned: list[int] = []
    for turn in range(40):
        rank = (0, 2, 0, 1, 2, 1)[turn % 6]
        if rank in held:
            box.ack(held.pop(rank))
        if not over[rank]:
            lease, found = deal(box, rank, at[rank], size=3, session=b"n%d" % rank)
            if lease > 0:
                held[rank] = lease
                learned += found
            if at[rank] == 0 and rank == 0:
                assert found == first
            at[rank] += bool(found)
            over[rank] = lease == -1
    assert over == [True] * 3
    assert sorted(set(learned)) == rows


def test_ranks_that_die_twice_get_their_shares_twice() -> None:
    box, _ = filled(16)
    taken = {(rank, batch): deal(box, rank, batch)[1] for rank, batch in ((1, 0), (1, 1), (0, 0))}
    for session in (b"first", b"second"):
        box.resume(0)
        for (rank, batch), rows in taken.items():
            if session == b"second" or (rank, batch) != (1, 1):
                assert deal(box, rank, batch, session=session)[1] == rows
        box.end_session(session)


def test_a_row_that_was_cleared_before_its_deal_comes_again_takes_no_other_with_it() -> None:
    box, rows = filled(8)
    shares = [deal(box, rank, 0)[1] for rank in (0, 1)]
    box.resume(0)
    box.clear(shares[1][:1])
    assert deal(box, 0, 0)[1] == shares[0]
    box.controller.check_invariants()
    assert set(rows) - set(shares[0]) - {shares[1][0]} <= {*deal(box, 1, 0)[1], *rows}


def test_a_share_that_was_used_for_a_step_and_is_given_once_more_is_of_that_step() -> None:
    box, rows = filled(6)
    deal(box, 0, 0, session=b"n0")
    lease, share = deal(box, 1, 0, session=b"n1")
    box.ack(lease)
    box.mark(0)
    box.end_session(b"n1")  # it begins anew
    assert deal(box, 1, 0, session=b"n1") == (0, share)
    box.resume(0)
    found = [box.fetch(2), box.fetch(2)]
    assert sorted(rows) == sorted([*share, *found[0], *found[1]])
