"""kv_global_lock as users call it: exclusion between processes, leases, killed holders, and where it may be taken."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Child, freeze, until

import transfer_queue as tq
from transfer_queue.client import locks
from transfer_queue.client.drivers import run
from transfer_queue.client.effects import Call
from transfer_queue.wire import messages as m

Spawn = Callable[[str], Child]
P = "locked"
HOLD = """
    import transfer_queue as tq
    tq.init()
    with tq.kv_global_lock({keys!r}, "locked", lease_s={lease_s}) as lease:
        print(lease.fence[{keys!r}], flush=True)
        input()
"""


def held() -> set[str]:
    return {one["key"] for one in tq.kv_lock_list(P)["holders"]}


def waiters() -> int:
    return int(tq.kv_lock_list(P)["waiters"])


def test_three_processes_that_read_and_write_under_the_lock_lose_no_increment(
    client: tq.TransferQueueClient, child: Spawn
) -> None:
    tq.kv_put("counter", P, fields={"v": torch.tensor([0])})
    code = """
        import torch, transfer_queue as tq
        tq.init()
        for _ in range(20):
            with tq.kv_global_lock("counter", "locked", timeout=60):
                value = tq.kv_batch_get("counter", "locked")["v"][0]
                tq.kv_put("counter", "locked", fields={"v": value + 1})
    """
    for one in [child(code) for _ in range(3)]:
        one.finish(100)
    assert tq.kv_batch_get("counter", P)["v"][0].tolist() == [60]
    assert tq.kv_lock_list() == {"holders": [], "waiters": 0}


def test_who_holds_a_lock_is_listed(client: tq.TransferQueueClient, child: Spawn) -> None:
    other = child(HOLD.format(keys="k", lease_s=30))
    other.line()
    (one,) = tq.kv_lock_list(P)["holders"]
    assert (one["partition_id"], one["key"]) == (P, "k")
    assert one["holder"]["pid"] == other.pid
    assert set(one["holder"]) == {"node_ip", "pid", "thread"}
    assert 0 <= one["held_s"] < 30
    assert 0 < one["lease_remaining_s"] <= 30
    assert tq.kv_lock_list("other") == {"holders": [], "waiters": 0}
    assert asyncio.run(tq.async_kv_lock_list(P))["waiters"] == 0
    other.say()
    other.finish()


def test_the_keys_of_a_killed_holder_are_free_at_once(client: tq.TransferQueueClient, child: Spawn) -> None:
    other = child(HOLD.format(keys="k", lease_s=600))
    other.line()
    with pytest.raises(TimeoutError), tq.kv_global_lock("k", P, timeout=0):
        pass
    other.kill()
    with tq.kv_global_lock("k", P, timeout=20):
        pass


def test_the_keys_of_a_frozen_holder_are_free_after_its_lease_and_it_learns_so(
    client: tq.TransferQueueClient, child: Spawn
) -> None:
    other = child("""
        import os, signal, transfer_queue as tq
        tq.init()
        try:
            with tq.kv_global_lock("k", "locked", lease_s=0.5) as lease:
                print(lease.fence["k"], flush=True)
                input()
                try:
                    lease.check()
                except tq.LockLostError:
                    print("check", flush=True)
        except tq.LockLostError:
            print("exit", flush=True)
    """)
    fence = int(other.line())
    freeze(other.pid)
    with tq.kv_global_lock("k", P, timeout=20) as lease:
        assert lease.fence["k"] > fence
        other.process.send_signal(signal.SIGCONT)
        other.say()
        assert (other.line(), other.line()) == ("check", "exit")
    other.finish()


def test_closing_gives_the_locks_of_a_process_back(client: tq.TransferQueueClient, child: Spawn) -> None:
    other = child("""
        import transfer_queue as tq
        tq.init()
        lock = tq.kv_global_lock("k", "locked", lease_s=600)
        lease = lock.__enter__()
        tq.close()
        try:
            lock.__exit__(None, None, None)
        except tq.LockLostError:
            print("lost", flush=True)
        input()
    """)
    assert other.line() == "lost"
    with tq.kv_global_lock("k", P, timeout=20):
        pass
    other.say()
    other.finish()


def test_a_lock_outlives_its_lease_as_long_as_its_process_lives(client: tq.TransferQueueClient) -> None:
    with tq.kv_global_lock("k", P, lease_s=0.3) as lease:
        first = lease.deadline
        until(lambda: lease.deadline > first + 0.6, "two renewals")
        lease.check()
        assert held() == {"k"}
    assert held() == set()


def test_a_lock_that_was_lost_is_told_by_check_and_at_the_end(client: tq.TransferQueueClient) -> None:
    lock = tq.kv_global_lock(["k", "l"], P, lease_s=0.3)
    lease = lock.__enter__()
    client.session.call(_unlocking(client, lease))
    until(lambda: lease.lost, "the renewal that fails")
    with pytest.raises(tq.LockLostError):
        lease.check()
    with pytest.raises(tq.LockLostError):
        lock.__exit__(None, None, None)
    assert held() == set()


def test_a_lost_lock_never_masks_what_the_block_raised(client: tq.TransferQueueClient) -> None:
    def lose_it_and_raise() -> None:
        with tq.kv_global_lock("k", P) as lease:
            client.session.call(_unlocking(client, lease))
            raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        lose_it_and_raise()


def _unlocking(client: tq.TransferQueueClient, lease: Any) -> Any:
    """A call that ends the lock behind its holder's back."""
    from transfer_queue.client.effects import Call

    return Call(m.Unlock(client.session.next_rid(), int(lease.token)))


def test_fences_grow_and_name_every_key(client: tq.TransferQueueClient, child: Spawn) -> None:
    with tq.kv_global_lock(["f", "g", "f"], P) as first:
        assert set(first.fence) == {"f", "g"}
        assert list(first.shards) == [0]
    other = child(HOLD.format(keys="f", lease_s=30))
    fence = int(other.line())
    other.say()
    other.finish()
    with tq.kv_global_lock("f", P) as last:
        assert first.fence["f"] < fence < last.fence["f"]


def test_a_wait_that_timed_out_leaves_neither_holder_nor_waiter(client: tq.TransferQueueClient, child: Spawn) -> None:
    other = child(HOLD.format(keys="k", lease_s=30))
    other.line()
    with pytest.raises(TimeoutError), tq.kv_global_lock(["a", "k"], P, timeout=0.1):
        pass
    assert held() == {"k"}
    assert waiters() == 0
    with tq.kv_global_lock("a", P, timeout=5):
        pass
    other.say()
    other.finish()


def test_a_cancelled_waiter_is_withdrawn_and_never_granted(client: tq.TransferQueueClient, child: Spawn) -> None:
    other = child(HOLD.format(keys="k", lease_s=30))
    fence = int(other.line())

    async def cancelled() -> None:
        async def wait() -> None:
            async with tq.async_kv_global_lock("k", P):
                raise AssertionError("granted")

        task = asyncio.create_task(wait())
        while await asyncio.to_thread(waiters) != 1:
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: waiters() == 0, "the withdrawal")
    other.say()
    other.finish()
    with tq.kv_global_lock("k", P, timeout=5) as lease:
        assert lease.fence["k"] == fence + 1


def test_locks_do_not_nest_and_a_local_one_goes_inside_a_global_one(client: tq.TransferQueueClient) -> None:
    with tq.kv_global_lock("n", P):
        with pytest.raises(RuntimeError, match="Nested kv_global_lock"), tq.kv_global_lock("m", P):
            pass
        with tq.kv_local_lock("n", P):
            pass
    with (
        tq.kv_local_lock("n", P),
        pytest.raises(RuntimeError, match="before kv_local_lock"),
        tq.kv_global_lock("n", P),
    ):
        pass

    async def on_a_loop() -> None:
        with pytest.raises(RuntimeError, match="async_kv_global_lock"), tq.kv_global_lock("n", P):
            pass
        async with tq.async_kv_global_lock("n", P, timeout=5):
            with pytest.raises(RuntimeError, match="Nested kv_global_lock"):
                async with tq.async_kv_global_lock("m", P):
                    pass

    asyncio.run(on_a_loop())
    assert held() == set()


@pytest.mark.parametrize(("keys", "lease_s"), [([], 30), ("k", 0), ("k", -1)])
def test_no_keys_and_no_lease_are_refused(client: tq.TransferQueueClient, keys: Any, lease_s: float) -> None:
    with pytest.raises(ValueError), tq.kv_global_lock(keys, P, lease_s=lease_s):
        pass


def test_without_a_service_it_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    with pytest.raises(RuntimeError, match="not initialized"), tq.kv_global_lock("k", P):
        pass
    with pytest.raises(RuntimeError):
        tq.kv_lock_list()


def test_the_wrappers_hold_the_lock_during_the_call(client: tq.TransferQueueClient) -> None:
    def plain(keys: Any, partition_id: str, **more: Any) -> Any:
        return held(), keys, partition_id, more

    async def coroutine(keys: Any, partition_id: str, **more: Any) -> Any:
        return await asyncio.to_thread(held), keys, partition_id, more

    assert tq.kv_global_locked(plain, ["u", "v"], P, lock_timeout=5, lease_s=2, x=1) == (
        {"u", "v"}, ["u", "v"], P, {"x": 1},
    )  # fmt: skip
    assert asyncio.run(tq.async_kv_global_locked(coroutine, "u", P, lock_timeout=5)) == ({"u"}, "u", P, {})
    with pytest.raises(TypeError, match="async_kv_global_locked"):
        tq.kv_global_locked(coroutine, "u", P)
    with pytest.raises(TypeError, match="coroutine function"):
        asyncio.run(tq.async_kv_global_locked(plain, "u", P))
    with pytest.raises(ZeroDivisionError):
        tq.kv_global_locked(lambda keys, partition_id: 1 / 0, "u", P)
    assert held() == set()


def test_threads_of_one_process_exclude_each_other(client: tq.TransferQueueClient) -> None:
    counter = [0]

    def work() -> None:
        for _ in range(20):
            with tq.kv_global_lock("k", P, timeout=30):
                value = counter[0]
                time.sleep(0)
                counter[0] = value + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert counter == [80]


def failing_once(client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch, error: Exception) -> threading.Event:
    """Set once the next renewal has failed with `error`."""
    call, failed = type(client.session).call, threading.Event()

    def fails(*given: Any) -> Any:
        if not failed.is_set() and threading.current_thread().name == "tq-locks":
            failed.set()
            raise error
        return call(*given)

    monkeypatch.setattr(type(client.session), "call", fails)
    return failed


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
def test_a_lock_is_renewed_after_a_renewal_that_failed_for_lack_of_something(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failed = failing_once(client, monkeypatch, error)
    with tq.kv_global_lock("k", P, lease_s=1.2) as lease:
        begun = lease.deadline
        assert failed.wait(10)
        until(lambda: lease.deadline > begun, "the next renewal")
        lease.check()


def test_a_thread_that_died_leaves_its_locks_to_the_next(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    failed, renewed = failing_once(client, monkeypatch, ZeroDivisionError()), threading.Event()

    def hold_another() -> None:
        with tq.kv_global_lock("other", P):
            renewed.wait(20)

    with tq.kv_global_lock("k", P, lease_s=3) as lease:
        begun, thread = lease.deadline, locks.keeper._thread
        assert failed.wait(10)
        assert thread is not None
        thread.join()
        holding = threading.Thread(target=hold_another)
        holding.start()
        until(lambda: lease.deadline > begun, "the next renewal")
        lease.check()
        renewed.set()
        holding.join()


def test_the_thread_that_renews_ends_after_the_last_lock(client: tq.TransferQueueClient) -> None:
    def renewing() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "tq-locks"]

    with tq.kv_global_lock("k", P):
        assert renewing() == ["tq-locks"]
    until(lambda: not renewing(), "the end of the thread", 10 * locks.LINGER_S + 5)


def test_keyed_calls_never_look_at_locks(client: tq.TransferQueueClient, child: Spawn) -> None:
    other = child(HOLD.format(keys="k", lease_s=30))
    other.line()
    tq.kv_put("k", P, fields={"x": torch.ones(1)})
    tq.kv_clear("k", P)
    other.say()
    other.finish()


def test_a_lock_does_not_outlive_the_service(service: Callable[..., Any]) -> None:
    service()
    lock = tq.kv_global_lock("k", P)
    lease = lock.__enter__()
    tq.close()
    with pytest.raises(tq.LockLostError):
        lock.__exit__(None, None, None)
    with pytest.raises(tq.LockLostError):
        lease.check()
    tq.init()
    with tq.kv_global_lock("k", P, timeout=0) as again:
        assert again.fence["k"] > lease.fence["k"]


def test_settings_of_the_other_package_are_taken(service: Callable[..., Any]) -> None:
    service(lock={"enabled": True, "num_shards": 4}, controller={"num_lock_shards": 2})
    with tq.kv_global_lock("k", P, timeout=0):
        pass


def test_a_lock_that_was_given_back_was_not_lost(client: tq.TransferQueueClient) -> None:
    """A renewal comes from another thread and over another connection, and may be read after it."""
    session = client.session
    lease = run(session, locks.taking(session, P, ["k"], None, 30.0))
    giving_back = lease.giving_back()
    unlock = next(giving_back)
    assert isinstance(unlock, Call)
    answer = session.call(unlock)
    lease.renew()
    with pytest.raises(StopIteration):
        giving_back.send(answer)
