"""NeMo-RL's samplers on groups at the service, called as its single controller calls them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from nemo import PARTITION, SIZE, TABLE, commit, filled, lists, names_of, new_buffer, parked, run, stored

import transfer_queue as tq
from transfer_queue.errors import InvalidInput
from transfer_queue.integrations.nemo_rl import (
    InOrderSampler,
    ReadyFirstSampler,
    TQReplayBuffer,
    WeightFifoSampler,
    WindowedSampler,
)

# ---- policies ----


@pytest.mark.parametrize("name", TABLE)
def test_what_a_policy_selects_evicts_and_aborts(client: Any, name: str) -> None:
    make, selects, evicts, aborts = TABLE[name]

    async def steps() -> None:
        buffer = new_buffer()
        sampler = make(buffer)
        if sampler.stamps:
            sampler.set_dispatch_index(4)
        await filled(buffer, sampler.stamps)
        assert await sampler.evict(current_train_weight=5) == len(evicts)
        assert "".join(buffer._group_ids) == "".join(one for one in "abcdefg" if one not in evicts)
        assert stored() == set("acdefg") - set(evicts), "the rows of evicted groups are gone"
        assert await sampler.evict(current_train_weight=5) == 0
        meta, count = await sampler.select(current_train_weight=5, min_prompt_groups=1, max_prompt_groups=9)
        assert (names_of(meta), count) == (selects, len(selects))
        assert len(meta.sample_ids) == len(meta.tags) == len(meta.sequence_lengths) == SIZE * count
        assert not set(selects) & set(buffer._group_ids), "they are the caller's"
        assert set(selects) <= stored()
        assert len({len(one) for one in lists(buffer)}) == 1
        assert sampler.should_abort_inflight(start_weight_version=3, current_train_weight=5) == bool(aborts)
        assert "b" in buffer._group_ids, "what is unfinished is never evicted"

    run(steps())


@pytest.mark.parametrize(
    ("name", "least"), [("weight_fifo 2", 2), ("in_order", 4)], ids=["weight_fifo waits", "in_order waits"]
)
def test_fewer_than_the_least_are_none_until_the_unfinished_one_comes(client: Any, name: str, least: int) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = TABLE[name][0](buffer)
        if sampler.stamps:
            sampler.set_dispatch_index(4)
        await filled(buffer, sampler.stamps)
        asked = {"current_train_weight": 5, "min_prompt_groups": least, "max_prompt_groups": 9}
        assert await sampler.select(**asked) == (None, 0)
        await buffer.commit("b", 7, 3, 5)
        meta, count = await sampler.select(**asked)
        assert count == least
        assert "b" in names_of(meta)

    run(steps())


def test_an_unfinished_group_that_is_too_old_is_evicted_when_it_is_finished(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = WindowedSampler(buffer, max_staleness_versions=1)
        buffer.reserve(weight_version=0, group_id="late")
        assert await sampler.evict(current_train_weight=5) == 0
        await buffer.commit("late", 7, 0, 5)
        asked = {"current_train_weight": 5, "min_prompt_groups": 1, "max_prompt_groups": 1}
        assert await sampler.select(**asked) == (None, 0)
        assert await sampler.evict(current_train_weight=5) == 1
        assert (len(buffer), stored()) == (0, set())

    run(steps())


def test_what_select_gave_no_later_evict_touches(client: Any) -> None:
    """A version is announced between the commit and `select`, and others after it."""

    async def steps() -> None:
        buffer = new_buffer()
        sampler = WindowedSampler(buffer, max_staleness_versions=1)
        await commit(buffer, "old", 0), await commit(buffer, "new", 2)
        tq.set_weight_version(2, "run")
        meta, count = await sampler.select(current_train_weight=2, min_prompt_groups=1, max_prompt_groups=9)
        assert (names_of(meta), count) == ("new", 1)
        assert await sampler.evict(current_train_weight=9) == 1, "the other one"
        assert tq.kv_batch_get(meta.sample_ids, PARTITION, strict=True)["input_ids"].shape[0] == SIZE

    run(steps())


def test_what_is_for_a_later_step_is_kept_however_old_it_is(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = InOrderSampler(buffer, max_lookahead_versions=2, groups_per_step=1)
        await commit(buffer, "x", 0, target_step=2)
        assert await sampler.evict(current_train_weight=2) == 0
        assert await sampler.wait_for_groups(1, timeout_s=0) == 1
        assert await sampler.evict(current_train_weight=3) == 1

    run(steps())


def test_a_group_whose_rows_somebody_cleared_is_evicted_and_counted(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = ReadyFirstSampler(buffer, max_staleness_versions=1)
        await commit(buffer, "x"), await commit(buffer, "y")
        assert await sampler.evict(current_train_weight=0) == 0
        tq.kv_clear(["x_g1"], PARTITION)
        assert await sampler.evict(current_train_weight=0) == 1
        assert buffer._group_ids == ["y"]
        assert stored() == {"y"}, "a fragment is no group"

    run(steps())


def test_facts_that_are_derived_from_a_policy(client: Any) -> None:
    made = [make(new_buffer()) for make, *_ in TABLE.values()]
    assert [one.required_buffer_capacity(8) for one in made] == [None, None, 16, 16, 24, 32]
    assert not any(one.is_on_policy for one in made)
    assert WindowedSampler(new_buffer(), max_staleness_versions=0).is_on_policy


LOOPS: dict[str, Callable[[TQReplayBuffer], Any]] = {
    "windowed": lambda b: WindowedSampler(b, max_staleness_versions=1, patience_s=40),
    "ready_first": lambda b: ReadyFirstSampler(b, max_staleness_versions=1, patience_s=40),
    "weight_fifo": lambda b: WeightFifoSampler(b, max_staleness_versions=1, patience_s=40),
    "in_order": lambda b: InOrderSampler(b, max_lookahead_versions=1, patience_s=40),
}
STEPS, PROMPTS, CAPACITY = 8, 3, 9


@pytest.mark.parametrize("name", LOOPS)
def test_two_loops_train_and_every_permit_comes_back_once(client: Any, name: str) -> None:
    """As NeMo-RL's two pumps: a permit for each group in the buffer, which counts of `select` and `evict` give back.
    One rollout in four fails and is tried again as another group."""

    async def steps() -> None:
        buffer, chance = new_buffer(), random.Random(name)
        sampler = LOOPS[name](buffer)
        sampler.set_dispatch_index(0)
        sampler.required_buffer_capacity(PROMPTS)
        permits, version, taken = asyncio.Semaphore(CAPACITY), 0, 0
        rollouts: list[asyncio.Future[None]] = []

        async def rollout(group: str, start: int, step: int | None) -> None:
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            if chance.random() < 0.25:
                await buffer.remove_group(group)
                group = buffer.reserve(weight_version=version, target_step=step)
                start = version
            await buffer.commit(group, 7, start, version)

        async def produce() -> None:
            while True:
                step = await sampler.admit(trainer_version_fn=lambda: version)
                for _ in range(PROMPTS):
                    await permits.acquire()
                    group = buffer.reserve(weight_version=version, target_step=step)
                    rollouts.append(asyncio.ensure_future(rollout(group, version, step)))

        producing = asyncio.ensure_future(produce())
        while version < STEPS:
            for _ in range(await sampler.evict(current_train_weight=version)):
                permits.release()
            wanted = {"min_prompt_groups": 1, "max_prompt_groups": PROMPTS - taken}
            meta, count = await sampler.select(current_train_weight=version, **wanted)
            assert meta is not None
            assert len(meta.sample_ids) == SIZE * count
            for _ in range(count):
                permits.release()
            tq.kv_clear(meta.sample_ids, PARTITION)
            taken += count
            if taken == PROMPTS:
                version, taken = version + 1, 0
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        await asyncio.gather(*rollouts)
        assert CAPACITY - permits._value == len(buffer)
        await buffer.remove(list(range(len(buffer))), remove_in_dp=True)
        status = buffer.pool.status()
        assert (status["open"], status["sealed"], status["lent"]) == (0, 0, 0)
        assert status["sources"][""]["consumed"] == STEPS * PROMPTS
        assert stored() == set()

    run(steps())


def test_what_an_earlier_process_left_unfinished_holds_up_no_run(client: Any) -> None:
    async def steps() -> None:
        policy = msgspec.structs.replace(
            WeightFifoSampler(new_buffer(), max_staleness_versions=1).policy(), max_attempts=1
        )
        tq.group_pool(PARTITION, policy).open("left", 1)
        buffer = new_buffer()
        sampler = WeightFifoSampler(buffer, max_staleness_versions=1)
        sampler.set_dispatch_index(0)
        await commit(buffer, "x", 1)
        _, count = await sampler.select(current_train_weight=1, min_prompt_groups=1, max_prompt_groups=9)
        assert count == 1

    run(steps())


# ---- admission ----


@pytest.mark.parametrize(
    ("make", "stamps"),
    [
        (TABLE["ready_first 1"][0], [None, None]),
        (lambda b: InOrderSampler(b, max_lookahead_versions=1, groups_per_step=1), [0, 1]),
        (TABLE["windowed 1"][0], [None] * 4),
    ],
    ids=["ready_first", "in_order", "windowed"],
)
def test_four_batches_at_a_gate_of_one(client: Any, make: Any, stamps: list[int | None]) -> None:
    """The third waits in the service, and the trainer's next step lets it in. Nobody looks at the version meanwhile."""

    async def steps() -> None:
        asked = []
        sampler = make(new_buffer())

        def version() -> int:
            asked.append(0)
            return 0

        assert [await sampler.admit(trainer_version_fn=version) for _ in stamps] == stamps
        if not sampler.gated:
            return
        waiting = asyncio.ensure_future(sampler.admit(trainer_version_fn=version))
        await parked(sampler._admission)
        assert len(asked) == len(stamps) + 1
        await sampler.evict(current_train_weight=1)
        assert await waiting == (2 if sampler.stamps else None)
        assert len(asked) == len(stamps) + 1
        assert sampler.dispatch_index == 2

    run(steps())


def test_an_announced_version_lets_a_batch_in(client: Any) -> None:
    async def steps() -> None:
        sampler = ReadyFirstSampler(new_buffer(), max_staleness_versions=0)
        await sampler.admit(trainer_version_fn=lambda: 0)
        waiting = asyncio.ensure_future(sampler.admit(trainer_version_fn=lambda: 0))
        await parked(sampler._admission)  # type: ignore[arg-type]
        await tq.async_set_weight_version(1, "run")
        await waiting

    run(steps())


def test_a_run_that_resumes_begins_with_its_step(client: Any) -> None:
    async def steps() -> None:
        sampler = InOrderSampler(new_buffer(), max_lookahead_versions=1, groups_per_step=1)
        sampler.set_dispatch_index(5)
        assert [await sampler.admit(trainer_version_fn=lambda: 5) for _ in range(2)] == [5, 6]
        waiting = asyncio.ensure_future(sampler.admit(trainer_version_fn=lambda: 5))
        await parked(sampler._admission)  # type: ignore[arg-type]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await sampler.evict(current_train_weight=6)
        assert await sampler.admit(trainer_version_fn=lambda: 6) == 7, "a wait that was cancelled took nothing"
        with pytest.raises(InvalidInput):
            sampler.set_dispatch_index(3)

    run(steps())


def test_a_run_cannot_begin_before_where_its_partition_is(client: Any) -> None:
    async def steps() -> None:
        ahead = WindowedSampler(new_buffer(), max_staleness_versions=1)
        await ahead.evict(current_train_weight=9)
        behind = WindowedSampler(new_buffer(), max_staleness_versions=1)
        behind.set_dispatch_index(5)
        with pytest.raises(InvalidInput, match="is at version 9: a run from 5 on"):
            await behind.evict(current_train_weight=5)

    run(steps())


def test_a_step_has_as_many_groups_as_it_has_prompts(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = InOrderSampler(buffer, max_lookahead_versions=1)
        sampler.required_buffer_capacity(2)
        for name, step in [("d", 1), ("a", 0), ("c", 1), ("b", 0)]:
            buffer.reserve(weight_version=0, target_step=step, group_id=name)
        before = [list(one) for one in lists(buffer)]
        for step in (0, 1, 2):
            with pytest.raises(InvalidInput, match=f"step {step} has all its groups"):
                buffer.reserve(weight_version=0, target_step=step)
        assert lists(buffer) == before
        await buffer.remove_group("c")
        assert (buffer.count_for_target_step(0), buffer.count_for_target_step(1)) == (2, 1)
        buffer.reserve(weight_version=0, target_step=1, group_id="again")

    run(steps())


def test_a_group_of_a_step_that_has_passed_is_evicted(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = InOrderSampler(buffer, max_lookahead_versions=1, groups_per_step=1)
        await sampler.evict(current_train_weight=4)
        await commit(buffer, "late", 3, target_step=3)
        assert stored() == {"late"}
        assert await sampler.evict(current_train_weight=4) == 1
        assert (len(buffer), stored()) == (0, set())

    run(steps())


# ---- a step that lacks a group ----


def test_a_step_that_lost_a_prompt_closes_smaller(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = InOrderSampler(buffer, max_lookahead_versions=0, groups_per_step=5)
        sampler.set_dispatch_index(7)
        for name in "abcde":
            buffer.reserve(weight_version=7, target_step=7, group_id=name)
        for name in "abcd":
            await buffer.commit(name, 7, 7, 7)
        assert await buffer.remove_group("e") == 1
        meta, count = await sampler.select(current_train_weight=7, min_prompt_groups=4, max_prompt_groups=5)
        assert (names_of(meta), count) == ("abcd", 4)

    run(steps())


def test_a_finished_group_of_the_latest_step_is_promoted_and_its_step_is_owed_one(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = InOrderSampler(buffer, max_lookahead_versions=2, groups_per_step=1)
        for step, name in enumerate("abc"):
            buffer.reserve(weight_version=0, target_step=step, group_id=name)
        await buffer.commit("b", 7, 0, 0), await buffer.commit("c", 7, 0, 0)
        assert buffer.promote_ready_group(to_target_step=2) is None, "no later one"
        assert buffer.promote_ready_group(to_target_step=0) is None, "it lacks none"
        await buffer.remove_group("a")
        assert buffer.promote_ready_group(to_target_step=0) == 2
        assert buffer.target_step_list == [1, 0]
        meta, _ = await sampler.select(current_train_weight=0, min_prompt_groups=1, max_prompt_groups=1)
        assert names_of(meta) == "c"
        await commit(buffer, "spare", 0, target_step=2)
        meta, _ = await sampler.select(current_train_weight=2, min_prompt_groups=1, max_prompt_groups=1)
        assert names_of(meta) == "spare"

    run(steps())


# ---- waiting ----


def test_the_last_of_many_groups_answers_who_waits(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = ReadyFirstSampler(buffer, max_staleness_versions=1)
        for number in range(31):
            await commit(buffer, f"{number}")
        buffer.reserve(weight_version=0, group_id="last")
        waiting = asyncio.ensure_future(sampler.wait_for_groups(32, timeout_s=60))
        await parked(buffer.pool)
        meta = await buffer.commit("last", 7, 0, 0)
        assert await waiting == 32
        assert meta == buffer.meta_list[-1]
        _, count = await sampler.select(current_train_weight=0, min_prompt_groups=32, max_prompt_groups=32)
        assert count == 32

    run(steps())


def test_a_patient_select_waits_in_the_service(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = WindowedSampler(buffer, max_staleness_versions=1, patience_s=60)
        buffer.reserve(weight_version=0, group_id="x")
        asked = {"current_train_weight": 0, "min_prompt_groups": 1, "max_prompt_groups": 1}
        waiting = asyncio.ensure_future(sampler.select(**asked))
        await parked(buffer.pool)
        await buffer.commit("x", 7, 0, 0)
        assert (await waiting)[1] == 1
        waiting = asyncio.ensure_future(sampler.select(**asked))
        await parked(buffer.pool)
        await buffer.pool.async_end()
        assert await waiting == (None, 0), "no more will come"

    run(steps())
