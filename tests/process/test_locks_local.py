"""kv_local_lock: threads, tasks and event loops of one process; no service is there."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from typing import Any

import pytest
from conftest import until

import transfer_queue as tq
from transfer_queue.client.local_locks import local

P = "p"
TIMEOUT_S = 20.0


class Holder:
    """A thread that holds keys until it is told to leave."""

    def __init__(self, *keys: str) -> None:
        self._leave, entered = threading.Event(), threading.Event()

        def hold() -> None:
            with tq.kv_local_lock(list(keys), P, timeout=TIMEOUT_S):
                entered.set()
                self._leave.wait(TIMEOUT_S)

        self._thread = threading.Thread(target=hold)
        self._thread.start()
        assert entered.wait(TIMEOUT_S)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(TIMEOUT_S)


def is_free(*keys: str) -> bool:
    """Whether another thread gets the keys at once."""
    found = []

    def look() -> None:
        try:
            with tq.kv_local_lock(list(keys), P, timeout=0):
                found.append(True)
        except TimeoutError:
            found.append(False)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(TIMEOUT_S)
    return found == [True]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    yield
    assert len(local) == 0


def test_threads_and_tasks_on_several_loops_exclude_each_other() -> None:
    counter = [0]

    def in_a_thread() -> None:
        for _ in range(50):
            with tq.kv_local_lock("c", P, timeout=TIMEOUT_S):
                value = counter[0]
                time.sleep(0)
                counter[0] = value + 1

    async def on_a_loop() -> None:
        async def task() -> None:
            for _ in range(50):
                async with tq.async_kv_local_lock("c", P, timeout=TIMEOUT_S):
                    value = counter[0]
                    await asyncio.sleep(0)
                    counter[0] = value + 1

        await asyncio.gather(*(task() for _ in range(3)))

    threads = [threading.Thread(target=in_a_thread) for _ in range(3)]
    threads += [threading.Thread(target=asyncio.run, args=(on_a_loop(),)) for _ in range(2)]
    for one in threads:
        one.start()
    asyncio.run(on_a_loop())
    for one in threads:
        one.join(TIMEOUT_S)
    assert counter == [3 * 50 + 3 * 3 * 50]


def test_waiters_are_served_in_order_of_arrival() -> None:
    order: list[int] = []
    holder = Holder("k")

    def wait(number: int) -> None:
        with tq.kv_local_lock("k", P, timeout=TIMEOUT_S):
            order.append(number)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        until(lambda number=number: len(local) == number + 2, "the next one waits")  # type: ignore[misc]
    holder.leave()
    for one in threads:
        one.join(TIMEOUT_S)
    assert order == [0, 1, 2, 3, 4]


def test_a_newcomer_does_not_get_in_before_the_one_whose_turn_it_is() -> None:
    outcome = []

    def hold_then_come_again() -> None:
        with tq.kv_local_lock("k", P, timeout=TIMEOUT_S):
            entered.set()
            until(lambda: len(local) == 2, "somebody waits")
        outcome.append(is_free("k"))

    entered = threading.Event()
    thread = threading.Thread(target=hold_then_come_again)
    thread.start()
    assert entered.wait(TIMEOUT_S)
    with tq.kv_local_lock("k", P, timeout=TIMEOUT_S):
        thread.join(TIMEOUT_S)
    assert outcome == [False]


def test_a_timeout_is_for_all_keys_together_and_leaves_nothing() -> None:
    first, second = Holder("a"), Holder("b")

    async def take() -> None:
        async with tq.async_kv_local_lock("b", P, timeout=0.01):
            pass

    with pytest.raises(TimeoutError), tq.kv_local_lock(["b", "a", "c"], P, timeout=0.01):
        pass
    with pytest.raises(TimeoutError):
        asyncio.run(take())
    assert len(local) == 2
    assert is_free("c")
    first.leave()
    second.leave()


def test_a_cancelled_task_never_keeps_the_key() -> None:
    holder = Holder("k")
    order = []

    async def take(name: str) -> None:
        async with tq.async_kv_local_lock("k", P, timeout=TIMEOUT_S):
            order.append(name)

    async def main() -> None:
        waiting = asyncio.create_task(take("cancelled while it waits"))
        while len(local) < 2:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        granted, after = asyncio.create_task(take("cancelled when it was its turn")), asyncio.create_task(take("next"))
        while len(local) < 3:
            await asyncio.sleep(0)
        holder.leave()  # blocks this loop: `granted` cannot run before it is cancelled
        granted.cancel()
        await asyncio.gather(granted, after, return_exceptions=True)

    asyncio.run(main())
    assert order == ["next"]


def test_a_waiter_on_a_closed_loop_is_passed_over() -> None:
    holder, taken = Holder("k"), []

    async def take() -> None:
        async with tq.async_kv_local_lock("k", P, timeout=TIMEOUT_S):
            taken.append("task")

    async def until_it_waits() -> None:
        while len(local) < 2:
            await asyncio.sleep(0)

    def wait() -> None:
        with tq.kv_local_lock("k", P, timeout=TIMEOUT_S):
            taken.append("thread")

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # the task is dropped while it waits
    task = loop.create_task(take())
    loop.run_until_complete(until_it_waits())
    loop.close()
    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: len(local) == 3, "the thread waits, too")
    holder.leave()
    thread.join(TIMEOUT_S)
    assert taken == ["thread"]
    del task
    gc.collect()


def test_no_keys_and_nested_use_are_refused() -> None:
    with pytest.raises(ValueError), tq.kv_local_lock([], P):
        pass
    with tq.kv_local_lock(["a", "a", "b"], P):
        for keys in ("a", "c"):
            with pytest.raises(RuntimeError, match="Nested"), tq.kv_local_lock(keys, P, timeout=TIMEOUT_S):
                pass


def test_the_blocking_form_is_refused_on_a_loop_and_tasks_started_inside_take_none() -> None:
    async def child() -> None:
        async with tq.async_kv_local_lock("c", P):
            pass

    async def main() -> None:
        with pytest.raises(RuntimeError, match="async_kv_local_lock"), tq.kv_local_lock("a", P):
            pass
        async with tq.async_kv_local_lock("a", P):
            with pytest.raises(RuntimeError, match="Nested"):
                await child()
            with pytest.raises(RuntimeError, match="Nested"):
                await asyncio.create_task(child())
        await child()

    asyncio.run(main())


def test_the_wrappers_hold_the_lock_during_the_call() -> None:
    def plain(keys: Any, partition_id: str, **more: Any) -> Any:
        return is_free("a"), keys, partition_id, more

    async def coroutine(keys: Any, partition_id: str, **more: Any) -> Any:
        return is_free("a"), keys, partition_id, more

    assert tq.kv_local_locked(plain, ["b", "a"], P, lock_timeout=5, x=1) == (False, ["b", "a"], P, {"x": 1})
    assert asyncio.run(tq.async_kv_local_locked(coroutine, "a", P)) == (False, "a", P, {})
    with pytest.raises(TypeError, match="async_kv_local_locked"):
        tq.kv_local_locked(coroutine, "a", P)
    with pytest.raises(TypeError, match="coroutine function"):
        asyncio.run(tq.async_kv_local_locked(plain, "a", P))
    with pytest.raises(ZeroDivisionError):
        tq.kv_local_locked(lambda keys, partition_id: 1 / 0, "a", P)
    assert is_free("a")


def test_a_lock_timeout_skips_the_call() -> None:
    holder, calls = Holder("k"), []
    with pytest.raises(TimeoutError):
        tq.kv_local_locked(lambda keys, partition_id: calls.append(keys), ["j", "k"], P, lock_timeout=0.01)
    assert calls == []
    holder.leave()


def test_a_forked_child_has_none_of_its_parents_locks() -> None:
    with tq.kv_local_lock("k", P):
        pid = os.fork()
        if not pid:
            try:
                with tq.kv_local_lock("k", P, timeout=0):
                    os._exit(7)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.parametrize("step", ["add", "leave"])
def test_a_collection_amid_a_step_may_end_what_holds_another_lock(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def hold(me: list[Any]) -> Any:
        with tq.kv_local_lock("other", P, timeout=TIMEOUT_S):
            yield me

    def hold_in_a_cycle() -> None:
        me: list[Any] = []
        me.append(hold(me))
        next(me[0])

    def collect_and(*args: Any) -> Any:
        gc.collect()
        return do(*args)

    def take_both() -> None:
        with tq.kv_local_lock("mine", P, timeout=TIMEOUT_S):
            pass
        with tq.kv_local_lock("other", P, timeout=TIMEOUT_S):
            took.append(True)

    took: list[bool] = []
    hold_in_a_cycle()
    do = getattr(local._claims, step)
    monkeypatch.setattr(local._claims, step, collect_and)
    thread = threading.Thread(target=take_both, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert took
    assert not len(local)
