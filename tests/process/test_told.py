"""What servers are told without an answer: with as few system calls as possible, and before anything else is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transfer_queue as tq
from transfer_queue.client import drivers
from transfer_queue.client.effects import Call, Notify, Offload, Trying
from transfer_queue.client.holding import Uses
from transfer_queue.wire import messages as m
from transfer_queue.wire.blocking import FrameSocket


class Session:
    """Writes down what it is asked for and told, in order."""

    def __init__(self) -> None:
        self.uses, self.given_up, self.log = Uses(), list[Any](), list[Any]()

    def call(self, call: Call) -> tuple[Any, memoryview]:
        self.log.append(type(call.request).__name__)
        return m.Done(call.request.rid), memoryview(b"")

    def confirmation(self, rid: int) -> m.Received:
        return m.Received([rid])

    def tell(self, untold: list[Any]) -> None:
        if untold:
            self.log.append([type(message).__name__ for message, _ in untold])
        untold.clear()

    def settle(self, is_answered: bool) -> None:
        self.log.append(is_answered)


def run(operation: Any) -> list[Any]:
    session: Any = Session()
    try:
        drivers.run(session, operation)
    except ValueError:
        session.log.append("ValueError")
    return list(session.log)


def asked() -> Call:
    return Call(m.GetStep(1, "t", None, False))


def test_what_is_told_at_the_end_goes_together() -> None:
    def operation() -> Any:
        yield asked()
        yield Notify(m.Unpin(1, [4]))
        yield Offload(lambda: None, 8)

    assert run(operation()) == ["GetStep", ["Unpin"]]


def test_a_server_is_told_before_anything_else_is_asked_or_takes_long() -> None:
    def operation() -> Any:
        yield Notify(m.Unpin(1, [4]))
        yield Offload(lambda: None, 1 << 30)
        yield Notify(m.Discard(4))
        yield Trying(again())

    def again() -> Any:
        yield asked()
        yield Notify(m.Discard(5))

    assert run(operation()) == [["Unpin"], ["Discard"], "GetStep", ["Discard"]]


def test_what_was_to_be_told_is_told_when_an_operation_fails() -> None:
    def operation() -> Any:
        yield asked()
        yield Notify(m.Discard(4))
        raise ValueError

    def outer() -> Any:
        try:
            yield Trying(operation())
        finally:
            yield Notify(m.Discard(5))

    assert run(operation()) == ["GetStep", ["Discard"], True, "ValueError"]
    assert run(outer()) == ["GetStep", ["Discard"], True, ["Discard"], True, "ValueError"]


def test_a_take_that_copies_tells_its_server_everything_at_once(
    shared: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tq.kv_batch_put([f"{i}" for i in range(512)], "told", fields={"x": torch.arange(512 * 256).view(512, 256)})
    told: list[list[str]] = []
    send_all = FrameSocket.send_all

    def noted(self: FrameSocket[Any], messages: Any) -> None:
        told.append([type(message).__name__ for message in messages])
        send_all(self, messages)

    monkeypatch.setattr(FrameSocket, "send_all", noted)
    _, data = shared.take("told", ["x"], batch_size=1, task_name="t")
    assert data["x"][0].tolist() == list(range(256))
    assert told == [["Unpin", "Received"]]
