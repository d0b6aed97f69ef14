"""A trainer on a pool of groups goes back to a step that it marked."""

from __future__ import annotations

from typing import Any

import pytest
from test_group_policies import opened, pool_of, result

from transfer_queue.errors import InvalidInput
from transfer_queue.groups import GroupPolicy, PoolCore, steps
from transfer_queue.groups.again import GroupsDue, resume, unlike_before
from transfer_queue.groups.consistency import is_consistent

STEPS = GroupPolicy.windowed(1)


class Trainer:
    """Takes groups of two siblings, whose rows are 10 n and 10 n + 1."""

    def __init__(self, policy: GroupPolicy = STEPS, num_groups: int = 8) -> None:
        self.pool: PoolCore = pool_of(policy)
        for number in range(num_groups):
            self.make(number)
        self.cleared: list[int] = []

    def make(self, number: int, **more: Any) -> None:
        opened(self.pool, name := str(number), size=2)
        for slot in range(2):
            (attempt,) = self.pool.start([(name, slot)])
            self.pool.done(name, slot, attempt, result([10 * number + slot], self.pool.version, **more))

    def take(self, count: int = 2) -> list[str]:
        """The groups of a batch, which is on lease."""
        self.pool.release(unlike_before(self.pool, count, count))
        found = [group for group, _ in self.pool.offered(count, count, None)[0]]
        self.pool.lend(found)
        self._look()
        return [group.name for group in found]

    def learn(self, count: int = 2, clears: bool = False) -> list[str]:
        names = self.take(count)
        self.pool.consume(names, clears)
        self._look()
        return names

    def mark(self, step: int) -> None:
        self.pool.mark(step)
        self._look()

    def resume(self, step: int) -> GroupsDue:
        found = resume(self.pool, step)
        self._look()
        return found

    def lose(self, row: int) -> None:
        self.pool.lose([row])
        self._look()

    def _look(self) -> None:
        self.cleared += self.pool.discarded
        self.pool.discarded.clear()
        assert is_consistent(self.pool)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def test_what_was_learned_after_a_step_comes_again_in_the_batches_of_before(trainer: Trainer) -> None:
    trainer.learn()
    trainer.mark(1)
    before = [trainer.learn(), trainer.learn(3)]
    assert trainer.resume(1) == (2, 5, 0)
    assert [trainer.learn(), trainer.learn(3)] == before == [["2", "3"], ["4", "5", "6"]]
    assert trainer.learn(1) == ["7"]


def test_it_comes_however_old_it_is_by_now(trainer: Trainer) -> None:
    trainer.mark(0)
    before = trainer.learn()
    trainer.pool.advance(9)
    assert trainer.resume(0).groups == 2
    assert trainer.learn() == before


def test_what_was_on_lease_comes_again_too_after_what_was_learned(trainer: Trainer) -> None:
    trainer.mark(0)
    learned, lent = trainer.learn(), trainer.take()
    assert trainer.resume(0) == (2, 4, 0)
    assert [trainer.take(), trainer.take()] == [learned, lent]


def test_a_trainer_can_go_back_again_from_the_middle(trainer: Trainer) -> None:
    trainer.mark(0)
    before = [trainer.learn(), trainer.learn(), trainer.learn()]
    trainer.resume(0)
    trainer.learn(), trainer.take()
    trainer.resume(0)
    assert [trainer.learn(), trainer.learn(), trainer.learn()] == before


def test_what_is_not_learned_again_after_all_is_due_as_before(trainer: Trainer) -> None:
    trainer.mark(0)
    before = [trainer.learn(), trainer.learn()]
    trainer.resume(0)
    trainer.pool.release(trainer.take())  # the lease ended
    assert [trainer.learn(), trainer.learn()] == before


def test_rows_that_may_go_stay_until_the_next_step(trainer: Trainer) -> None:
    trainer.learn(clears=True)
    assert trainer.cleared == [0, 1, 10, 11], "nobody marks steps here"
    trainer.mark(1)
    before = trainer.learn(clears=True)
    assert trainer.cleared == [0, 1, 10, 11]
    trainer.resume(1)
    assert trainer.learn(clears=True) == before
    trainer.mark(2)
    assert trainer.cleared == [0, 1, 10, 11, 20, 21, 30, 31]
    assert trainer.resume(1) == (0, 0, 2)


def test_a_group_that_lost_a_row_is_lost_and_the_rest_of_its_batch_is_offered_like_others(trainer: Trainer) -> None:
    trainer.mark(0)
    assert [trainer.learn(), trainer.learn()] == [["0", "1"], ["2", "3"]]
    trainer.lose(10)
    assert trainer.resume(0) == (2, 3, 1)
    assert trainer.learn() == ["2", "3"]
    assert trainer.learn() == ["0", "4"]


def test_a_group_that_loses_a_row_while_it_is_due_is_gone(trainer: Trainer) -> None:
    trainer.mark(0)
    trainer.learn()
    trainer.resume(0)
    trainer.lose(0)
    assert trainer.cleared == [0, 1]
    assert trainer.learn() == ["1", "2"]


def test_a_loop_of_another_shape_gets_them_like_any_others(trainer: Trainer) -> None:
    trainer.mark(0)
    trainer.learn(), trainer.learn()
    trainer.resume(0)
    assert trainer.learn(3) == ["0", "1", "2"]
    assert trainer.learn(3) == ["3", "4", "5"]


def test_the_last_groups_may_be_fewer_than_asked_for(trainer: Trainer) -> None:
    trainer.mark(0)
    trainer.pool.end()
    before = [trainer.learn(5), trainer.learn(5)]
    trainer.resume(0)
    assert [trainer.learn(5), trainer.learn(5)] == before
    assert len(before[1]) == 3


def test_members_that_were_held_back_are_held_back_again() -> None:
    trainer = Trainer(GroupPolicy(serve="window", window=1, stale="withhold"), 0)
    trainer.make(0)
    trainer.make(1, oldest=1, newest=1)
    trainer.pool.advance(1)
    trainer.mark(0)
    trainer.learn()
    trainer.pool.advance(2)
    trainer.resume(0)
    assert trainer.take() == ["0", "1"]
    assert [trainer.pool.withheld(trainer.pool.group(name)) for name in "01"] == [[], []]


def test_what_became_of_groups_is_counted_once(trainer: Trainer) -> None:
    trainer.mark(0)
    trainer.learn()
    trainer.resume(0)
    assert trainer.pool.source("").consumed == 0
    trainer.learn()
    assert (trainer.pool.source("").consumed, trainer.pool.state.sampled) == (2, 2)


def test_the_newest_step_may_be_marked_again_an_earlier_one_not(trainer: Trainer) -> None:
    trainer.mark(3)
    trainer.learn()
    trainer.mark(3)
    assert trainer.resume(3) == (0, 0, 0)
    with pytest.raises(InvalidInput, match="step 2: the pool is at step 3"):
        trainer.mark(2)


def test_only_a_step_that_was_marked_can_be_gone_back_to(trainer: Trainer) -> None:
    for step in (1, 2, 4):
        trainer.mark(step)
    with pytest.raises(InvalidInput, match=r"step 3 of the pool: it has marks of \[1, 2, 4\]"):
        trainer.resume(3)
    trainer.resume(1)
    with pytest.raises(InvalidInput, match=r"marks of \[1\]"):
        trainer.resume(2)


@pytest.mark.parametrize(
    "policy", [GroupPolicy.prioritized(9), GroupPolicy(samples_per_insert=1.0, min_size_to_sample=1)]
)
def test_groups_that_are_drawn_again_and_again_have_no_steps(policy: GroupPolicy) -> None:
    with pytest.raises(InvalidInput, match="whose groups are used once"):
        pool_of(policy).mark(0)


def test_the_oldest_steps_are_forgotten_and_rows_that_wait_for_a_mark_are_not_kept_for_ever(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "MAX_ROWS", 6)
    trainer.mark(0)
    trainer.learn()
    trainer.mark(1)
    trainer.learn()
    assert trainer.pool.steps.marked == [1]
    trainer.learn(clears=True)
    assert trainer.pool.steps.marked == []
    assert trainer.cleared == [40, 41, 50, 51]
    assert "its steps are forgotten" in caplog.text


def test_a_pool_that_is_removed_keeps_no_rows_for_a_mark(trainer: Trainer) -> None:
    trainer.mark(0)
    trainer.learn(8, clears=True)
    trainer.pool.give_up()
    assert sorted(trainer.pool.discarded) == sorted(10 * n + slot for n in range(8) for slot in range(2))


def test_what_is_due_stays_so_when_those_who_had_something_are_forgotten(trainer: Trainer) -> None:
    trainer.mark(0)
    trainer.learn(), trainer.learn()
    trainer.pool.advance(5)
    trainer.resume(0)
    assert trainer.take() == ["0", "1"]
    trainer.pool = PoolCore(trainer.pool.state)  # as a journal brings it back
    trainer.pool.forget_holders()
    assert (trainer.learn(), trainer.learn()) == (["0", "1"], ["2", "3"])


def test_a_group_that_was_surplus_when_it_was_learned_comes_again_and_takes_no_room() -> None:
    trainer = Trainer(GroupPolicy(capacity=2), 2)
    trainer.mark(0)
    trainer.take(1)
    trainer.make(2)
    trainer.pool.consume(["0"], False)
    trainer.resume(0)
    assert trainer.learn(1) == ["0"]
    assert trainer.learn(2) == ["1", "2"]
    trainer.make(3), trainer.make(4)
    assert trainer.take(2) == ["3", "4"]


def test_a_pool_that_goes_back_keeps_no_more_of_the_new_groups_than_before() -> None:
    trainer = Trainer(GroupPolicy(capacity=2), 2)
    trainer.mark(0)
    trainer.learn()
    trainer.make(2), trainer.make(3)
    trainer.resume(0)
    trainer.make(4)
    assert trainer.learn() == ["0", "1"]
    assert (trainer.pool.num_sealed, trainer.take()) == (2, ["3", "4"])


def test_what_a_step_that_is_marked_again_has_more_comes_after_the_step_before(trainer: Trainer) -> None:
    trainer.mark(0)
    before = [trainer.learn()]
    trainer.mark(1)
    before.append(trainer.learn())
    trainer.mark(1)
    assert trainer.resume(1) == (0, 0, 0)
    assert trainer.resume(0) == (2, 4, 0)
    assert [trainer.learn(), trainer.learn()] == before
