"""NeMo-RL's buffer on groups at the service: what it refuses, what fails, what is saved, and where it is plugged in."""

from __future__ import annotations

import asyncio
import builtins
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from conftest import Child
from nemo import PARTITION, SIZE, TABLE, DataPlane, beginning, commit, names_of, new_buffer, pack, parked, run, stored
from test_standby import DURABLE, replaced, standby_of

import transfer_queue as tq
from transfer_queue.errors import InvalidInput, NotSupported
from transfer_queue.integrations import nemo_rl
from transfer_queue.integrations.nemo_rl import (
    InOrderSampler,
    ReadyFirstSampler,
    TQReplayBuffer,
    WeightFifoSampler,
    WindowedSampler,
    patching,
)
from transfer_queue.integrations.nemo_rl.payload import SampleMeta

# ---- wrong input ----


def test_a_commit_of_an_unknown_group_writes_nothing(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        with pytest.raises(ValueError, match="'ghost' has no slot"):
            await buffer.commit("ghost", 7, 0, 0)
        with pytest.raises(ValueError, match="'ghost' has no slot"):
            await buffer.remove_group("ghost")
        assert (buffer._dp_client.puts, stored()) == ([], set())

    run(steps())


def test_places_that_are_none_are_refused_and_nothing_changes(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        await commit(buffer, "x"), await commit(buffer, "y")
        for wrong in ([0, 2], [-1]):
            with pytest.raises(IndexError):
                await buffer.remove(wrong, True)
        with pytest.raises(InvalidInput, match="repeat"):
            await buffer.remove([0, 0], True)
        assert (buffer._group_ids, stored()) == (["x", "y"], {"x", "y"})
        assert await buffer.remove([], True) == 0
        assert await buffer.remove([1, 0], True) == 2
        assert (len(buffer), buffer.size(), stored()) == (0, 0, set())

    run(steps())


def test_a_name_is_reserved_once(client: Any) -> None:
    async def steps() -> None:
        buffer, other = new_buffer(), new_buffer()
        await commit(buffer, "x"), await commit(buffer, "y")
        with pytest.raises(InvalidInput, match="reserved already"):
            buffer.reserve(weight_version=0, group_id="x")
        with pytest.raises(InvalidInput, match="by another process"):
            other.reserve(weight_version=0, group_id="x")
        await buffer.remove_group("y", remove_in_dp=True)
        with pytest.raises(InvalidInput, match="'y' has ended"):
            buffer.reserve(weight_version=0, group_id="y")
        assert (buffer._group_ids, other._group_ids) == (["x"], [])
        assert buffer.reserve(weight_version=0) != buffer.reserve(weight_version=0)

    run(steps())


def test_samplers_refuse_what_means_nothing(client: Any) -> None:
    with pytest.raises(InvalidInput, match="needs the TQReplayBuffer"):
        WindowedSampler([], max_staleness_versions=1)  # type: ignore[arg-type]
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="expected 0 or more"):
            ReadyFirstSampler(new_buffer(), max_staleness_versions=wrong)  # type: ignore[arg-type]
    sampler = InOrderSampler(new_buffer(), max_lookahead_versions=1)
    for wrong in (-1, -7):
        with pytest.raises(ValueError, match="0 or more"):
            sampler.set_dispatch_index(wrong)
    with pytest.raises(InvalidInput, match="expected 1 or more"):
        sampler.required_buffer_capacity(0)

    async def steps() -> None:
        for least, most in ((0, 1), (2, 1)):
            with pytest.raises(ValueError, match="expected 1 or more"):
                await sampler.select(current_train_weight=0, min_prompt_groups=least, max_prompt_groups=most)
        with pytest.raises(InvalidInput, match="groups_per_step"):
            await sampler.admit(trainer_version_fn=lambda: 0)

    run(steps())


def test_a_sampler_comes_before_groups(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        buffer.reserve(weight_version=0)
        with pytest.raises(InvalidInput, match="make the sampler before"):
            WindowedSampler(buffer, max_staleness_versions=1)

    run(steps())


# ---- what fails ----


def test_a_put_that_fails_leaves_no_rows_and_the_slot_can_be_removed(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = WeightFifoSampler(buffer, max_staleness_versions=1)
        buffer.reserve(weight_version=0, group_id="x"), await commit(buffer, "y")
        buffer._dp_client.fails = {"put_samples"}
        with pytest.raises(ConnectionError):
            await buffer.commit("x", 7, 0, 0)
        assert (buffer.ready_list, stored()) == ([False, True], {"y"})
        with pytest.raises(ConnectionError):
            await buffer.commit("x", 7, 0, 0)
        assert await buffer.remove_group("x") == 1
        _, count = await sampler.select(current_train_weight=0, min_prompt_groups=1, max_prompt_groups=9)
        assert count == 1
        assert buffer.pool.status()["sources"][""]["evicted_for"] == {"failed": 1}

    run(steps())


def test_a_commit_that_failed_may_be_tried_again(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = WindowedSampler(buffer, max_staleness_versions=1)
        buffer._dp_client.fails = {"put_samples"}
        with pytest.raises(ConnectionError):
            await commit(buffer, "x")
        buffer._dp_client.fails = set()
        await buffer.commit("x", 7, 0, 0)
        meta, _ = await sampler.select(current_train_weight=0, min_prompt_groups=1, max_prompt_groups=1)
        assert (names_of(meta), stored()) == ("x", {"x"})

    run(steps())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions came with Python 3.11")
def test_where_clearing_fails_too_both_errors_are_told(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        buffer.reserve(weight_version=0, group_id="x")
        buffer._dp_client.fails = {"put_samples", "clear_samples"}
        with pytest.raises(builtins.BaseExceptionGroup) as caught:
            await buffer.commit("x", 7, 0, 0)
        assert [str(one) for one in caught.value.exceptions] == ["put_samples failed", "clear_samples failed"]

    run(steps())


def test_a_group_that_is_removed_during_its_write_leaves_no_rows(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        buffer.reserve(weight_version=0, group_id="x")
        put = buffer._dp_client.put_samples

        async def slowly(**arguments: Any) -> None:
            put(**arguments)
            await buffer.remove_group("x")

        buffer._dp_client.put_samples = slowly
        with pytest.raises(ValueError, match=r"rows are cleared"):
            await buffer.commit("x", 7, 0, 0)
        assert (len(buffer), stored()) == (0, set())

    run(steps())


@pytest.mark.parametrize("way", ["answered", "cancelled"])
def test_a_group_may_be_selected_before_its_commit_has_its_answer(client: Any, way: str) -> None:
    """Both are answered by the same event, and the trainer's answer may be read first."""

    async def steps() -> None:
        buffer = new_buffer()
        sampler = WindowedSampler(buffer, max_staleness_versions=1, patience_s=60)
        answers = asyncio.Event()
        finish = buffer.pool.async_finish

        async def slowly(*arguments: Any, **more: Any) -> None:
            await finish(*arguments, **more)
            await answers.wait()

        buffer.pool.async_finish = slowly  # type: ignore[method-assign, assignment]
        committing = asyncio.ensure_future(commit(buffer, "x"))
        meta, count = await sampler.select(current_train_weight=0, min_prompt_groups=1, max_prompt_groups=1)
        assert (names_of(meta), count, len(buffer)) == ("x", 1, 0)
        if way == "answered":
            answers.set()
            assert await committing == meta
        else:
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
        assert stored() == {"x"}, "the rows are the trainer's"
        assert await sampler.evict(current_train_weight=0) == 0

    run(steps())


def test_a_commit_that_is_cancelled_when_its_group_is_sealed_leaves_nothing(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        sampler = WindowedSampler(buffer, max_staleness_versions=1)
        finish = buffer.pool.async_finish
        sealed = asyncio.Event()

        async def never(*arguments: Any, **more: Any) -> None:
            await finish(*arguments, **more)
            sealed.set()
            await asyncio.Event().wait()

        buffer.pool.async_finish = never  # type: ignore[method-assign, assignment]
        committing = asyncio.ensure_future(commit(buffer, "x"))
        await sealed.wait()
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        asked = {"current_train_weight": 0, "min_prompt_groups": 1, "max_prompt_groups": 1}
        assert await sampler.select(**asked) == (None, 0)
        assert stored() == set()
        assert await buffer.remove_group("x") == 1

    run(steps())


def test_rows_without_routed_experts_are_refused_where_they_are_needed(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer(require_routed_experts=True)
        buffer.reserve(weight_version=0, group_id="x")
        with pytest.raises(RuntimeError, match="have no routed_experts"):
            await buffer.commit("x", 7, 0, 0)
        assert buffer._dp_client.puts == []

    run(steps())


def test_the_open_groups_of_a_producer_end_with_it_and_its_finished_ones_are_used(
    client: Any, fresh_child: Callable[[str], Child]
) -> None:
    buffer = new_buffer()
    sampler = WeightFifoSampler(buffer, max_staleness_versions=1)
    producer = fresh_child(
        beginning()
        + """
    asyncio.run(commit(buffer, "theirs", 0))
    buffer.reserve(weight_version=0, group_id="open")
    print("ready", flush=True)
    sys.stdin.readline()
    """
    )
    assert producer.line() == "ready"

    async def steps() -> None:
        await commit(buffer, "mine", 1)
        asked = {"current_train_weight": 1, "max_prompt_groups": 2}
        meta, count = await sampler.select(**asked, min_prompt_groups=1)
        assert (names_of(meta), count, meta.sequence_lengths) == ("theirs", 1, [3] * SIZE)
        assert await sampler.select(**asked, min_prompt_groups=1) == (None, 0), "one of the oldest is open"
        waiting = asyncio.ensure_future(sampler.wait_for_groups(1, timeout_s=60))
        await parked(buffer.pool)
        producer.kill()
        assert await waiting == 1
        meta, _ = await sampler.select(**asked, min_prompt_groups=1)
        assert names_of(meta) == "mine"

    run(steps())


def test_groups_that_a_killed_trainer_did_not_get_in_hand_are_offered_again(
    client: Any, fresh_child: Callable[[str], Child]
) -> None:
    buffer = new_buffer()
    sampler = WeightFifoSampler(buffer, max_staleness_versions=1)

    async def made() -> None:
        await commit(buffer, "x"), await commit(buffer, "y")

    run(made())
    trainer = fresh_child(
        beginning()
        + """
    def hold(*arguments, **more):
        print("ready", flush=True)
        sys.stdin.readline()
    buffer.pool.async_ack = hold
    asked = {"current_train_weight": 0, "min_prompt_groups": 2, "max_prompt_groups": 2}
    asyncio.run(sampler.select(**asked))
    """
    )
    assert trainer.line() == "ready"

    async def steps() -> None:
        waiting = asyncio.ensure_future(sampler.wait_for_groups(2, timeout_s=60))
        await parked(buffer.pool)
        trainer.kill()
        assert await waiting == 2
        meta, _ = await sampler.select(current_train_weight=0, min_prompt_groups=2, max_prompt_groups=2)
        assert names_of(meta) == "xy"

    run(steps())


def test_groups_tickets_and_waits_outlive_the_server(service: Any) -> None:
    client = service(**DURABLE)

    async def steps() -> None:
        buffer = new_buffer()
        sampler = InOrderSampler(buffer, max_lookahead_versions=0, groups_per_step=2, patience_s=50)
        await sampler.admit(trainer_version_fn=lambda: 0)
        await commit(buffer, "x", target_step=0)
        buffer.reserve(weight_version=0, target_step=0, group_id="y")
        asked = {"current_train_weight": 0, "min_prompt_groups": 2, "max_prompt_groups": 2}
        selecting = asyncio.ensure_future(sampler.select(**asked))
        admitting = asyncio.ensure_future(sampler.admit(trainer_version_fn=lambda: 0))
        await parked(buffer.pool), await parked(sampler._admission)  # type: ignore[arg-type]
        await asyncio.to_thread(standby_of, client)
        await asyncio.to_thread(replaced, client)
        await buffer.commit("y", 7, 0, 0)
        meta, count = await selecting
        assert (names_of(meta), count) == ("xy", 2)
        await sampler.evict(current_train_weight=1)
        assert await admitting == 1

    run(steps())


# ---- samplers of others, which read the lists ----


def test_a_sampler_of_others_takes_groups_by_their_places(client: Any) -> None:
    async def steps() -> None:
        buffer = new_buffer()
        for number, name in enumerate("abc"):
            await commit(buffer, name, number)
        assert await buffer.remove([1], remove_in_dp=False) == 1
        assert (buffer._group_ids, stored()) == (["a", "c"], {"a", "b", "c"})
        status = buffer.pool.status()
        assert (status["sealed"], status["lent"]) == (2, 0)
        meta, count = await buffer.take(1, 9, 5, 0.0)
        assert (names_of(meta), count) == ("ac", 2)
        assert buffer.pool.status()["sources"][""]["consumed"] == 3

    run(steps())


# ---- saving ----


def saved() -> dict[str, Any]:
    async def steps() -> dict[str, Any]:
        buffer = new_buffer()
        InOrderSampler(buffer, max_lookahead_versions=1, groups_per_step=2)
        for name, step in [("a", 0), ("b", 0), ("c", 1)]:
            await commit(buffer, name, 0, target_step=step)
        buffer.reserve(weight_version=0, target_step=1, group_id="open")
        return await buffer.state_dict(saved_capacity=4)

    return run(steps())


EXPECTED = {"max_groups": 4, "expected_partition_id": PARTITION, "expected_group_size": SIZE}


def test_a_saved_buffer_goes_on_in_a_new_service(client: Any) -> None:
    state = pickle.loads(pickle.dumps(saved()))  # noqa: S301
    tq.close()
    tq.init()

    async def steps() -> None:
        buffer = new_buffer()
        sampler = InOrderSampler(buffer, max_lookahead_versions=1, groups_per_step=2)
        sampler.set_dispatch_index(0)
        assert await buffer.load_state_dict(state, **EXPECTED) == 3
        assert await sampler.admit(trainer_version_fn=lambda: 0) == 0
        assert (buffer.count_for_target_step(0), buffer.count_for_target_step(1)) == (2, 1)
        assert await sampler.admit(trainer_version_fn=lambda: 0) == 1
        buffer.reserve(weight_version=0, target_step=1, group_id="again")
        with pytest.raises(InvalidInput, match="has all its groups"):
            buffer.reserve(weight_version=0, target_step=1)
        meta, count = await sampler.select(current_train_weight=0, min_prompt_groups=2, max_prompt_groups=2)
        assert (names_of(meta), count) == ("ab", 2)
        assert tq.kv_batch_get(meta.sample_ids, PARTITION, strict=True)["input_lengths"].tolist() == [3] * 4

    run(steps())


def test_groups_that_the_service_still_has_are_not_written_again(client: Any) -> None:
    async def steps() -> None:
        first, second = new_buffer(), new_buffer()
        await commit(first, "a"), await commit(first, "b")
        state = await first.state_dict(saved_capacity=2)
        sampler = ReadyFirstSampler(second, max_staleness_versions=1)
        assert await second.load_state_dict(state, **EXPECTED) == 2
        assert second._dp_client.puts == []
        meta, _ = await sampler.select(current_train_weight=0, min_prompt_groups=2, max_prompt_groups=2)
        assert names_of(meta) == "ab"
        with pytest.raises(InvalidInput, match="restore into a new service"):
            await new_buffer().load_state_dict(state, **EXPECTED)

    run(steps())


def doubled(state: dict[str, Any]) -> None:
    state["groups"].append(dict(state["groups"][0], group_id="other"))


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any], str]] = {
    "partition": (lambda state: state.update(partition_id="other"), {}, "of partition 'other'"),
    "group size": (lambda state: None, {"expected_group_size": 3}, "expected 3 of each"),
    "sample twice": (doubled, {}, "sample 'a_g0' is in"),
    "group twice": (lambda state: state["groups"].append(state["groups"][0]), {}, "group 'a' is in"),
    "no groups": (lambda state: state.pop("groups"), {}, r"lacks \['groups'\]"),
    "no rows": (lambda state: state["groups"][0].pop("fields_data"), {}, "lacks"),
    "too many": (lambda state: None, {"max_groups": 2}, "each for a certain step"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_written(client: Any, what: str) -> None:
    state = saved()
    change, more, text = WRONG[what]
    change(state)

    async def steps() -> None:
        buffer = TQReplayBuffer(DataPlane(), PARTITION, pad_value_dict={}, pack=pack)
        with pytest.raises(ValueError, match=text):
            await buffer.load_state_dict(state, **{**EXPECTED, **more})
        assert (buffer._dp_client.puts, len(buffer)) == ([], 0)

    run(steps())


def test_of_too_many_groups_those_of_the_newest_weights_are_restored(client: Any) -> None:
    async def steps() -> list[str]:
        first = new_buffer()
        for name, start in [("a", 3), ("b", 1), ("c", 2), ("d", 3)]:
            await commit(first, name, start)
        state = await first.state_dict(saved_capacity=4)
        second = new_buffer()
        assert await second.load_state_dict(state, **{**EXPECTED, "max_groups": 3}) == 3
        return second._group_ids

    assert run(steps()) == ["a", "c", "d"]


# ---- where it is plugged in ----


def test_install_puts_the_buffer_where_nemo_rl_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL is on no package index: here are modules of these names."""
    parents = {name.rpartition(".")[0] for name in (patching.DEFINED, patching.MADE)}
    for name in ("nemo_rl", "nemo_rl.algorithms", *parents, patching.DEFINED, patching.MADE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(NotSupported):
        nemo_rl.install()
    made: Any = [sys.modules[name] for name in (patching.DEFINED, patching.MADE)]

    class Newer:
        def claim_for_training(self) -> None: ...

    class Known:
        def __init__(self, dp_client: Any, partition_id: str) -> None: ...

    for module in made:
        module.TQReplayBuffer = Newer
    with pytest.raises(NotSupported, match="claim_for_training"):
        nemo_rl.install()
    for module in made:
        module.TQReplayBuffer = Known
    nemo_rl.install()
    nemo_rl.install()
    assert [module.TQReplayBuffer for module in made] == [TQReplayBuffer] * 2


def test_a_buffer_travels_to_the_controllers_process_before_it_is_used() -> None:
    buffer = pickle.loads(pickle.dumps(new_buffer()))  # noqa: S301
    assert (len(buffer), buffer.partition_id) == (0, PARTITION)


def test_metadata_of_groups_is_joined() -> None:
    one = SampleMeta("p", "train", ["a"], ["x", "y"], [1], {"k": 1}, [{"t": 1}])
    two = SampleMeta("p", "train", ["b"], ["y"], [2], {}, [{"t": 2}])
    both = one.concat(two)
    assert (both.sample_ids, both.fields, both.sequence_lengths, both.size) == (["a", "b"], ["y"], [1, 2], 2)
    assert (both.tags, both.extra_info) == ([{"t": 1}, {"t": 2}], {"k": 1})


def test_all_of_the_protocol_is_there(client: Any) -> None:
    """`PromptGroupSampler` is checked by `isinstance`, so every name counts."""
    names = (
        "admit", "select", "evict", "should_abort_inflight", "is_on_policy", "required_buffer_capacity",
        "set_dispatch_index", "dispatch_index", "restore_dispatch_index", "supports_buffer_checkpoint",
    )  # fmt: skip
    for make, *_ in TABLE.values():
        sampler = make(new_buffer())
        assert all(hasattr(sampler, name) for name in names)
        sampler.restore_dispatch_index(6)
        assert sampler.dispatch_index == 6
