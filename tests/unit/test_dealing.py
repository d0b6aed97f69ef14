"""Batches dealt to data-parallel ranks by the controller: equal shares, kept for who is late, free when a rank ends."""

from __future__ import annotations

from typing import Any

import pytest
from tables import Box, indexes

from transfer_queue.errors import InvalidInput, MissingParameter, SamplerFailed
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    StreamingTokenBudgetSampler,
)
from transfer_queue.sampler.base import Sampled
from transfer_queue.wire import messages as m


class Ranks(Box):
    """A box whose fetches are those of data-parallel ranks; the session of rank r is b"r"."""

    def __init__(self, dp_size: int, size: int, **more: Any) -> None:
        super().__init__(**more)
        self.dp_size, self.size = dp_size, size
        self.repeated = 0  # of the last answer
        self.reply: Any = None

    def ask(self, rank: int, batch: int, *, used: int = 0, until_done: bool = False, ticket: Any = None,
            session: bytes | None = None, lease_s: float = 10.0, fields: tuple[str, ...] = ("a",),
            task: str = "t", until_cleared: bool = False) -> Any:  # fmt: skip
        """(lease, rows), "done", "passed", or None: it was parked (with a ticket), or there is nothing yet."""
        session = session or f"{rank}".encode()
        message = m.Fetch(
            1, "p", list(fields), self.size, task, {"dp_rank": rank, "batch_index": batch}, 5.0 if ticket else 0.0,
            True, lease_s, until_done, dp_size=self.dp_size, used=used, until_cleared=until_cleared,
        )  # fmt: skip
        reply = self.handle(message, ticket, session)
        if reply is None:
            return None
        self.controller.received(session, 1)
        return self.read(reply)

    def read(self, reply: Any) -> Any:
        self.reply, self.repeated = reply, reply.repeated
        if not reply.rows:
            return {m.DONE: "done", m.PASSED: "passed", 0: None}[reply.lease]
        return reply.lease, indexes(reply)

    def rows(self, rank: int, batch: int, **more: Any) -> list[int]:
        found = self.ask(rank, batch, **more)
        return [] if found is None else found[1]

    def use(self, rank: int, batch: int, **more: Any) -> list[int]:
        """The share, acknowledged."""
        lease, rows = self.ask(rank, batch, **more)
        if lease:
            self.ack(lease)
        return rows


def test_a_fast_rank_never_gets_the_share_of_a_late_one() -> None:
    box = Ranks(2, 4)
    box.put(8)
    assert box.rows(0, 0) == [0, 1, 2, 3]
    assert box.ask(0, 1) is None, "the rest is kept for rank 1"
    assert box.rows(1, 0) == [4, 5, 6, 7]


def test_a_batch_is_dealt_when_it_is_there_for_all_ranks() -> None:
    box = Ranks(2, 2)
    box.put(3)
    assert box.ask(0, 0, ticket="r0") is None
    assert box.ask(1, 0, ticket="r1") is None
    box.put(1)
    assert sorted(box.answers()) == [("r0", [0, 1]), ("r1", [2, 3])]


def test_rows_that_are_kept_for_a_rank_are_offered_to_nobody_else() -> None:
    box = Ranks(2, 2)
    box.put(5)
    box.rows(0, 0)
    assert box.fetch(1) == [4]
    assert box.consumed() == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1}


def test_tensor_parallel_peers_get_the_same_rows_on_one_lease() -> None:
    box = Ranks(2, 2)
    box.put(4)
    first = box.ask(0, 0, session=b"tp0")
    assert box.ask(0, 0, session=b"tp1") == first
    box.ack(first[0])
    assert box.rows(0, 0, session=b"tp2") == first[1], "also when they come after it was used"


def test_a_peer_that_wants_other_fields_waits_for_them() -> None:
    box = Ranks(1, 2)
    rows = indexes(box.put(2))
    assert box.rows(0, 0) == rows
    assert box.ask(0, 0, fields=("a", "b"), session=b"tp1", ticket="tp1") is None
    box.put(rows, fields=("b",))
    assert box.answers() == [("tp1", rows)]


@pytest.mark.parametrize(
    ("rest", "shares"),
    [
        (5, [[0, 1, 2], [3, 4, 3]]),
        (2, [[0], [1]]),
        (1, [[0], [0]]),
    ],
)
def test_the_last_batch_gives_every_rank_the_same_number(rest: int, shares: list[list[int]]) -> None:
    box = Ranks(2, 4)
    box.put(rest)
    box.handle(m.SetPartition(1, "p", rest, {}))
    assert [box.rows(rank, 0, until_done=True) for rank in (0, 1)] == shares
    assert box.repeated == len(shares[0]) * 2 - rest
    assert box.ask(0, 1, until_done=True) == "done", "whatever the other rank still does"
    box.end_session(b"0"), box.end_session(b"1")
    assert len(box.fetch(rest)) == rest, "every row is in one share"


def test_repeated_rows_count_once() -> None:
    box = Ranks(2, 4)
    box.put(3)
    box.handle(m.SetPartition(1, "p", 3, {}))
    used = [box.use(rank, 0, until_done=True) for rank in (0, 1)]
    assert used == [[0, 1], [2, 2]]
    assert box.consumed() == {0: 1, 1: 1, 2: 1}


def test_the_end_is_the_same_for_all_ranks_though_rows_come_after_it() -> None:
    box = Ranks(2, 1)
    box.put(2)
    box.use(0, 0), box.use(1, 0)
    assert box.ask(0, 1, until_done=True) == "done"
    box.put(2)
    assert box.ask(1, 1, until_done=True) == "done"
    assert box.rows(0, 1, until_done=True) == [2], "all were told: who asks again goes on"


def test_a_waiting_rank_is_told_of_the_end_when_others_use_the_rest() -> None:
    box = Ranks(2, 2)
    box.put(5)
    box.handle(m.SetPartition(1, "p", 5, {}))
    lease, rows = box.lend(1)
    assert box.rows(0, 0) == [1, 2]
    assert box.ask(0, 1, until_done=True, ticket="r0") is None
    box.ack(lease, rows)
    assert box.answers() == [("r0", [])]
    assert box.rows(1, 0) == [3, 4]


def test_a_rank_that_dies_gives_its_share_back_and_keeps_it_in_the_group() -> None:
    box = Ranks(2, 4)
    box.put(8)
    box.rows(0, 0)
    lease, rows = box.ask(1, 0)
    box.ack(lease, rows[:1])
    box.end_session(b"1")
    assert box.ask(0, 1) is None, "not for the group"
    assert box.rows(1, 0, used=1, session=b"again") == [5, 6, 7]
    box.end_session(b"again")
    assert box.fetch(2) == [5, 6], "others may have them"
    box.put(2)
    assert box.rows(1, 0, used=1, session=b"third") == [7, 8, 9], "with others in their place"


def test_a_row_that_a_rank_refuses_is_dealt_in_a_later_batch() -> None:
    box = Ranks(2, 2)
    box.put(8)
    box.handle(m.SetPartition(1, "p", 8, {}))
    lease, rows = box.ask(1, 0, until_done=True)
    assert (box.use(0, 0, until_done=True), rows) == ([0, 1], [2, 3])
    box.nack(lease, [2])
    box.ack(lease, [3])
    assert [box.use(rank, 1, until_done=True) for rank in (0, 1)] == [[2, 4], [5, 6]]
    assert [box.use(rank, 2, until_done=True) for rank in (0, 1)] == [[7], [7]], "the same number for every rank"
    assert [box.ask(rank, 3, until_done=True) for rank in (0, 1)] == ["done", "done"]
    assert all(box.consumed().values())


def test_ranks_wait_until_a_refused_row_is_offered_again_and_as_often_as_it_may_be() -> None:
    box = Ranks(1, 1, max_deliver=2)
    box.put(1)
    box.nack(box.ask(0, 0, until_done=True)[0], delay_s=5.0)
    assert box.ask(0, 1, until_done=True, ticket="waits") is None
    box.expire(5.0)
    assert box.answers() == [("waits", [0])]
    box.nack(box.controller.tables["p"].tasks["t"].lease[0], delay_s=5.0)
    assert box.ask(0, 2, until_done=True) == "done"
    assert list(box.dead_letters()) == [0]


@pytest.mark.parametrize(("used", "rest"), [(1, [2, 3, 4]), (2, [2, 3])])
def test_a_rank_that_comes_back_gets_another_row_where_one_that_it_refused_is_missing(
    used: int, rest: list[int]
) -> None:
    box = Ranks(1, 4)
    box.put(6)
    lease, rows = box.ask(0, 0)
    box.nack(lease, rows[:1], delay_s=50.0)
    box.ack(lease, rows[1:2])
    box.end_session(b"0")
    assert box.rows(0, 0, used=used, session=b"again") == rest, "as many as it has left of this batch"


def test_a_refused_row_that_the_sampler_leaves_does_not_keep_ranks_from_their_end() -> None:
    box = Ranks(1, 2, sampler=GRPOGroupNSampler(n_samples_per_prompt=2))
    box.put(4)
    box.handle(m.SetPartition(1, "p", 4, {}))
    lease, rows = box.ask(0, 0, until_done=True)
    box.nack(lease, rows[:1])
    box.ack(lease, rows[1:])
    assert box.use(0, 1, until_done=True) == [2, 3]
    assert box.ask(0, 2, until_done=True) == "done"
    box.end_session(b"0")
    assert box.consumed() == {0: 0, 1: 1, 2: 1, 3: 1}


def test_a_row_that_is_refused_after_a_rank_was_told_of_the_end_is_for_others() -> None:
    box = Ranks(2, 1)
    box.put(2)
    lease, rows = box.ask(1, 0, until_done=True)
    assert box.use(0, 0, until_done=True) == [0]
    assert box.ask(0, 1, until_done=True) == "done"
    box.nack(lease)
    assert box.ask(1, 1, until_done=True) == "done"
    assert box.fetch(1) == rows


def test_the_share_of_a_dead_rank_is_free_though_it_never_asked_for_it() -> None:
    box = Ranks(2, 2)
    box.put(8)
    box.use(0, 0), box.use(1, 0)
    box.end_session(b"1")
    assert box.rows(0, 1) == [4, 5]
    assert box.fetch(2) == [6, 7]


def test_a_late_rank_gets_its_share_though_the_fast_one_has_finished_and_left() -> None:
    box = Ranks(2, 2)
    box.put(8)
    assert [box.use(0, batch) for batch in (0, 1)] == [[0, 1], [4, 5]]
    assert box.ask(0, 2, until_done=True) == "done"
    box.end_session(b"0")
    assert [box.use(1, batch) for batch in (0, 1)] == [[2, 3], [6, 7]]
    assert box.ask(1, 2, until_done=True) == "done"
    box.end_session(b"1")
    box.put(4)
    assert box.rows(0, 0, session=b"anew") == [8, 9], "all have come: who comes now is of a new group"


def test_ranks_of_another_number_take_over_what_a_late_one_never_asked_for() -> None:
    box = Ranks(2, 2)
    box.put(4)
    box.use(0, 0)
    box.end_session(b"0")
    box.dp_size = 1
    assert box.rows(0, 0, session=b"alone") == [2, 3]


def test_a_row_of_a_share_that_others_took_is_not_of_it_any_more_when_they_give_it_back() -> None:
    box = Ranks(2, 1)
    box.put(3)
    box.rows(0, 0)
    box.end_session(b"0")  # rank 1 never asked: everything that was dealt is on offer
    strangers = [box.handle(m.Fetch(1, "p", ["a"], 1, "t", {}, 0.0, True, 99.0), None, b"stranger") for _ in range(2)]
    assert [indexes(one) for one in strangers] == [[0], [1]]
    assert box.rows(1, 0) == [2], "row 1 is replaced"
    box.release(strangers[1].lease)
    assert box.rows(1, 0, session=b"tp1") == [2], "a peer gets what the rank has"
    assert box.rows(0, 0, session=b"another 0") == [1]


def test_when_all_ranks_have_ended_everything_is_free() -> None:
    box = Ranks(3, 2)
    box.put(6)
    lease, rows = box.ask(0, 0)
    box.ack(lease, rows[:1])
    box.ask(1, 0)
    box.end_session(b"0"), box.end_session(b"1")
    assert box.fetch(5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("anew", [False, True])
def test_a_rank_that_goes_on_when_others_have_ended_gets_all_of_its_shares(ahead: bool, anew: bool) -> None:
    box = Ranks(2, 2)
    box.put(8)
    assert [box.use(0, 0), box.use(0, 1), box.ask(0, 2, until_done=True)] == [[0, 1], [4, 5], "done"]
    box.end_session(b"0")
    leases = [box.ask(1, batch)[0] for batch in (0, 1)]
    assert not ahead or box.ask(1, 2, until_done=True) == "done"
    if not anew:
        box.ack(leases[0])
        box.ack(leases[1], [6])
    box.end_session(b"1")
    if anew:
        assert [box.rows(rank, 0, session=b"%d" % rank) for rank in (1, 0)] == [[6, 7], [2, 3]]
    else:
        assert (box.use(1, 1, used=1, session=b"on"), box.ask(1, 2, until_done=True, session=b"on")) == ([7], "done")


def test_ranks_that_resume_together_get_the_rest_of_their_batch() -> None:
    box = Ranks(2, 4)
    box.put(16)
    for rank in (0, 1):
        lease, rows = box.ask(rank, 0)
        box.ack(lease, rows[:2])
    box.end_session(b"0"), box.end_session(b"1")
    assert [box.rows(rank, 0, used=2, session=b"new%d" % rank) for rank in (0, 1)] == [[2, 3], [6, 7]]
    assert [box.rows(rank, 1, session=b"new%d" % rank) for rank in (0, 1)] == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_rank_that_resumes_later_in_the_stream_leaves_nothing_behind() -> None:
    box = Ranks(2, 2)
    box.put(6)
    box.handle(m.SetPartition(1, "p", 6, {}))
    assert box.use(1, 3, used=1, until_done=True) == [1], "dealt to both: nobody knows where rank 0 is"
    assert box.use(0, 4, until_done=True) == [0, 2], "it began later: what was kept for it is dealt anew"
    assert box.use(1, 4, until_done=True) == [3, 4]
    assert box.use(0, 5, until_done=True) == [5]
    assert (box.use(1, 5, until_done=True), box.repeated) == ([5], 1)
    assert all(box.consumed().values())
    assert [box.ask(rank, 6, until_done=True) for rank in (0, 1)] == ["done", "done"]


def test_a_rank_that_comes_to_a_batch_which_others_shared_gets_as_many() -> None:
    box = Ranks(2, 2)
    box.put(4)
    box.handle(m.SetPartition(1, "p", 4, {}))
    assert box.rows(0, 1, until_done=True) == [0, 1]
    assert box.rows(1, 2, until_done=True) == [3], "it has passed batch 1"
    assert box.ask(1, 1, until_done=True)[1] == [0, 1], "nothing is left: rows of the others are repeated"
    assert box.repeated == 2


def test_other_sizes_in_a_living_group_are_refused() -> None:
    box = Ranks(2, 2)
    box.put(10)
    box.rows(0, 0)
    box.size = 3
    with pytest.raises(InvalidInput, match=r"dp_size=2 ranks in batches of 2 rows; dp_size=2 with batches of 3"):
        box.ask(1, 0)
    box.size, box.dp_size = 2, 4
    with pytest.raises(InvalidInput, match="dp_size=2 ranks"):
        box.ask(3, 0)
    assert box.rows(0, 0) == [2, 3], "its own group may begin anew; what was kept is free, what is lent is not"
    assert box.rows(3, 0) == [8, 9]


def test_a_reset_forgets_what_was_dealt() -> None:
    box = Ranks(2, 1)
    box.put(2)
    box.use(0, 0), box.use(1, 0)
    box.reset()
    assert [box.use(rank, 0) for rank in (0, 1)] == [[0], [1]]


def test_a_cleared_partition_forgets_what_was_dealt() -> None:
    box = Ranks(2, 1)
    box.put(2)
    box.use(0, 0)
    box.clear()
    box.put(2)
    assert [box.use(rank, 0) for rank in (0, 1)] == [[2], [3]]


def test_who_wants_no_other_partition_is_told_when_it_is_cleared() -> None:
    box = Ranks(1, 2)
    box.put(1)
    assert box.ask(0, 1, ticket="ends", until_cleared=True) is None
    assert box.ask(0, 1, ticket="stays", session=b"other") is None
    box.clear()
    assert box.answers() == [("ends", [])]
    assert box.ask(0, 1, until_cleared=True) == "done"


def test_cleared_rows_are_left_out_of_a_share() -> None:
    box = Ranks(2, 2)
    box.put(4)
    box.rows(0, 0)
    box.clear([2])
    assert box.rows(1, 0) == [3, 3]
    box.clear([0, 1, 3])
    assert box.ask(1, 0) == "passed"


def test_a_request_that_nobody_got_the_answer_of_leaves_the_share_to_its_rank() -> None:
    box = Ranks(2, 2)
    box.put(4)
    message = m.Fetch(7, "p", ["a"], 2, "t", {"dp_rank": 0, "batch_index": 0}, 0.0, True, 10.0, dp_size=2)
    box.handle(message, None, b"0")
    box.controller.take_back(b"0", 7)
    box.controller.check_invariants()
    assert box.rows(1, 0) == [2, 3]
    assert box.rows(0, 0) == [0, 1]


def test_without_leases_a_share_is_consumed_when_it_is_fetched() -> None:
    box = Ranks(2, 2)
    box.put(4)
    assert box.ask(0, 0, lease_s=0.0) == (0, [0, 1])
    assert box.consumed() == {0: 1, 1: 1, 2: 0, 3: 0}
    assert box.ask(1, 0, lease_s=0.0) == (0, [2, 3])


# samplers


@pytest.mark.parametrize("kind", [GRPOGroupNSampler, StreamingTokenBudgetSampler])
def test_groups_stay_whole_and_go_to_one_rank(kind: type[GRPOGroupNSampler]) -> None:
    box = Ranks(2, 4, sampler=kind(n_samples_per_prompt=2))
    box.put(8, tags=[{"group_id": group} for group in "abcdabcd"])
    assert [box.rows(rank, 0) for rank in (0, 1)] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    box.put(2, tags=[{"group_id": "e"}] * 2)
    box.handle(m.SetPartition(1, "p", 10, {}))
    assert [box.rows(rank, 1, until_done=True) for rank in (0, 1)] == [[8, 9], [8, 9]]


@pytest.mark.parametrize("kind", [GRPOGroupNSampler, StreamingTokenBudgetSampler])
def test_a_last_batch_of_groups_is_divided_by_groups(kind: type[GRPOGroupNSampler]) -> None:
    box = Ranks(2, 4, sampler=kind(n_samples_per_prompt=2))
    box.put(6)
    box.handle(m.SetPartition(1, "p", 6, {}))
    assert box.rows(0, 0, until_done=True) == [0, 1, 2, 3]
    assert box.rows(1, 0, until_done=True)[:2] == [4, 5]


class SeesAnything(BaseSampler):
    """Looks at the ready rows itself, also at fewer than the batch has."""

    def sample(  # type: ignore[override]
        self, ready_indexes: list[int], batch_size: int, **kwargs: Any
    ) -> Sampled:
        found = ready_indexes[:batch_size] if len(ready_indexes) >= batch_size else []
        return found, found

    def least_ready(self, batch_size: int) -> int:
        return 0


def test_the_last_batch_is_smaller_also_with_a_sampler_that_may_see_fewer_rows() -> None:
    box = Ranks(2, 2, sampler=SeesAnything())
    box.put(6)
    box.handle(m.SetPartition(1, "p", 6, {}))
    assert [box.use(rank, 0, until_done=True) for rank in (0, 1)] == [[0, 1], [2, 3]]
    assert [box.use(rank, 1, until_done=True) for rank in (0, 1)] == [[4], [5]]
    assert [box.ask(rank, 2, until_done=True) for rank in (0, 1)] == ["done", "done"]


def test_the_balanced_sampler_divides_a_deal_by_tokens() -> None:
    box = Ranks(2, 2, sampler=SeqlenBalancedSampler(dp_size=2))
    box.put(4, tags=[{"total_lengths": length} for length in (9, 8, 2, 1)])
    assert sorted(box.rows(rank, 0) for rank in (0, 1)) == [[0, 3], [1, 2]]
    box.dp_size = 3
    with pytest.raises(InvalidInput, match="divides batches among dp_size=2 ranks"):
        box.ask(0, 1)


def test_the_rank_aware_sampler_deals_and_remembers_nothing_itself() -> None:
    sampler = RankAwareSampler()
    box = Ranks(2, 2, sampler=sampler)
    box.put(4)
    assert [box.rows(rank, 0) for rank in (1, 0)] == [[2, 3], [0, 1]]
    assert sampler._states == {}


class ByRank(BaseSampler):
    """Rank 0 gets the last rows, the others the first."""

    def sample(  # type: ignore[override]
        self, ready_indexes: list[int], batch_size: int, dp_rank: int, **kwargs: Any
    ) -> Sampled:
        found = ready_indexes[-batch_size:] if dp_rank == 0 else ready_indexes[:batch_size]
        return found, found


class Plain(BaseSampler):
    """Knows nothing of ranks, and drops the first row of each pick."""

    def sample(  # type: ignore[override]
        self, ready_indexes: list[int], batch_size: int, partition: Any, task_name: str, partition_id: str
    ) -> Sampled:
        return ready_indexes[1 : batch_size + 1], ready_indexes[: batch_size + 1]


class Twice(BaseSampler):
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        return ready_indexes[:1] * batch_size, ready_indexes[:1]


def test_a_users_sampler_that_names_the_rank_is_asked_for_each() -> None:
    box = Ranks(2, 2, sampler=ByRank())
    box.put(6)
    assert [box.rows(rank, 0) for rank in (0, 1)] == [[4, 5], [0, 1]]


def test_a_users_sampler_that_knows_no_ranks_is_asked_once() -> None:
    box = Ranks(2, 2, sampler=Plain())
    box.put(5)
    assert [box.rows(rank, 0) for rank in (0, 1)] == [[1, 2], [3, 4]]
    assert box.consumed()[0] == 1


def test_a_sampler_that_gives_a_row_to_two_ranks_fails() -> None:
    box = Ranks(2, 1, sampler=Twice())
    box.put(2)
    with pytest.raises(SamplerFailed, match="two shares"):
        box.ask(0, 0)


# asking by a sampling_config


class TakesSize(BaseSampler):
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        return ready_indexes[: kwargs["dp_size"]], ready_indexes[: kwargs["dp_size"]]


def test_a_sampling_config_with_dp_size_asks_for_a_share() -> None:
    box = Box()
    box.put(4)
    assert box.fetch(2, dp_rank=1, dp_size=2, batch_index=0) == [2, 3]
    assert box.fetch(2, dp_rank=0, dp_size=2, batch_index=0) == [0, 1]


def test_a_sampler_of_a_user_keeps_its_own_dp_size() -> None:
    box = Box(TakesSize())
    box.put(4)
    assert box.fetch(2, dp_rank=1, dp_size=3, batch_index=0) == [0, 1, 2]


def test_a_rank_without_dp_size_is_served_as_before() -> None:
    box = Box(GRPOGroupNSampler())
    box.put(4)
    assert [box.fetch(2, dp_rank=rank, batch_index=0) for rank in (0, 1, 0)] == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    "bad",
    [
        {"dp_rank": 2}, {"dp_rank": -1}, {"dp_rank": "x"}, {"batch_index": -1}, {"batch_index": None},
        {"dp_size": -1}, {"dp_size": 1 << 20}, {"dp_size": "two"},
    ],
)  # fmt: skip
def test_what_cannot_be_a_share_is_refused_at_once(bad: dict[str, Any]) -> None:
    box = Box()
    with pytest.raises(InvalidInput):
        box.fetch(1, wait_s=9, ticket="t", **{"dp_rank": 0, "dp_size": 2, "batch_index": 0, **bad})
    assert box.controller.num_waiting == 0


def test_a_share_without_a_rank_is_refused() -> None:
    with pytest.raises(MissingParameter):
        Box().fetch(1, dp_size=2)


def test_ranks_that_clear_what_they_used_come_to_an_end() -> None:
    box = Ranks(2, 2)
    box.handle(m.SetPartition(1, "p", 6, {}))
    box.put(6)
    assert [box.ask(rank, 0, until_done=True)[1] for rank in (0, 1)] == [[0, 1], [2, 3]]
    box.clear([0, 1]), box.clear([2, 3])
    assert [box.ask(rank, 1, until_done=True)[1] for rank in (0, 1)] == [[4], [5]]
    box.clear([4]), box.clear([5])
    assert [box.ask(rank, 2, until_done=True) for rank in (0, 1)] == ["done", "done"]


def test_ranks_of_a_partition_of_no_rows_are_done_at_once() -> None:
    box = Ranks(2, 2, reserved_rows=1)
    box.handle(m.SetPartition(1, "p", 0, {}))
    assert [box.ask(rank, 0, until_done=True) for rank in (0, 1)] == ["done", "done"]


def test_ranks_that_begin_after_all_was_cleared_wait_for_the_next_rows() -> None:
    box = Ranks(2, 1)
    box.handle(m.SetPartition(1, "p", 2, {}))
    box.put(2)
    assert [box.use(rank, 0, until_done=True) for rank in (0, 1)] == [[0], [1]]
    assert [box.ask(rank, 1, until_done=True) for rank in (0, 1)] == ["done", "done"]
    box.end_session(b"0"), box.end_session(b"1")
    box.clear([0, 1])
    assert [box.ask(rank, 0, until_done=True, ticket=b"%d" % rank) for rank in (0, 1)] == [None, None]
    box.put(2)
    assert sorted(box.answers()) == [(b"0", [2]), (b"1", [3])]


@pytest.mark.parametrize("dp_size", [0, 1])
def test_last_rows_that_are_no_whole_groups_are_named(dp_size: int) -> None:
    box = Ranks(dp_size, 8, sampler=GRPOGroupNSampler(4))
    box.handle(m.SetPartition(1, "p", 10, {}))
    box.put(10)
    assert box.use(0, 0, until_done=True) == list(range(8))
    with pytest.raises(InvalidInput, match=r"2 rows are left of partition 'p'.*n_samples_per_prompt 4"):
        box.ask(0, 1, until_done=True)
