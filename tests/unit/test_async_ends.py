"""What an asyncio call began has ended when the call ends, however often it is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from transfer_queue.client.drivers import run_async
from transfer_queue.client.effects import Call, Operation, Together
from transfer_queue.dataloader import streams
from transfer_queue.errors import ServiceUnavailable
from transfer_queue.wire import messages as m


class Reads:
    """A session whose call `n` answers when `let[n]` is set, and fails then where it is one of `bad`."""

    def __init__(self, *bad: int) -> None:
        self.uses = SimpleNamespace(begin=lambda *asked: None, end=lambda given: None)
        self.under_way: set[int] = set()
        self.bad = bad
        self.let = {rid: asyncio.Event() for rid in range(3)}
        self.begun = asyncio.Event()

    async def call_async(self, call: Call) -> Any:
        rid = call.request.rid
        self.under_way.add(rid)
        if len(self.under_way) == 3:
            self.begun.set()
        try:
            await self.let[rid].wait()
            if rid in self.bad:
                raise ServiceUnavailable(f"read {rid}")
            return m.Done(rid), memoryview(b"")
        finally:
            self.under_way.remove(rid)

    def notify_on_loop(self, message: Any, to: str = "") -> None:
        pass

    def start(self) -> asyncio.Task[Any]:
        def operation() -> Operation[Any]:
            return (yield Together([Call(m.Read(rid, 1, 0, 8)) for rid in range(3)]))

        session: Any = self
        return asyncio.create_task(run_async(session, operation()))


def test_reads_from_several_hosts_answer_in_order() -> None:
    async def read() -> list[int]:
        reads = Reads()
        task = reads.start()
        await reads.begun.wait()
        for rid in (2, 0, 1):
            reads.let[rid].set()
        return [reply.rid for reply, _ in await task]

    assert asyncio.run(read()) == [0, 1, 2]


def test_where_one_of_several_reads_fails_the_others_have_ended() -> None:
    async def read() -> None:
        reads = Reads(1)
        task = reads.start()
        await reads.begun.wait()
        reads.let[1].set()
        with pytest.raises(ServiceUnavailable, match="read 1"):
            await task
        assert not reads.under_way

    asyncio.run(read())


@pytest.mark.parametrize("times", [1, 3])
def test_where_a_read_of_several_is_cancelled_all_have_ended(times: int) -> None:
    async def read() -> None:
        reads = Reads()
        task = reads.start()
        await reads.begun.wait()
        for _ in range(times):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not reads.under_way

    asyncio.run(read())


class Owner:
    """A `LeaseOwner` whose threads stay until they are `let` go."""

    ident = b"owner"

    def __init__(self) -> None:
        self.renewing, self.let = threading.Event(), threading.Event()
        self.has_renewed = self.is_closed = False

    def keep(self, lease_s: float) -> None:
        self.renewing.set()
        assert self.let.wait(30)
        self.has_renewed = True

    def close(self) -> None:
        assert self.has_renewed, "the thread is done with the connection before that is closed"
        self.is_closed = True


async def cancelled(task: asyncio.Task[Any], times: int, let: Callable[[], None]) -> None:
    """Cancel a task so often, each time when it waits again, and let go what it waits for."""
    for _ in range(times):
        task.cancel()
        for _ in range(5):  # turns of the loop
            await asyncio.sleep(0)
        assert not task.done()
    let()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_stream_that_is_cancelled_closes_when_its_renewal_has_ended(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner()
    dataset = streams._dataset("p", ["x"], "t", (2, None), (None, None), (0.01, None, None))

    async def take(*asked: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(streams, "_attached", lambda dataset: (None, owner))
    monkeypatch.setattr(streams, "_take", take)

    async def stream() -> None:
        running = aiter(streams.AsyncStream(dataset, streams.Form(False, None, False)))
        task = asyncio.ensure_future(anext(running))
        await asyncio.to_thread(owner.renewing.wait, 30)
        await cancelled(task, times, owner.let.set)

    asyncio.run(stream())
    assert owner.is_closed
