"""One version of the weights from a trainer's rank to worker processes: whole at all of them, or at none."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import Child

from transfer_queue.errors import (
    AccessDenied,
    BadManifest,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    NotOpen,
    ServiceUnavailable,
    StaleVersion,
    UnsupportedValue,
)
from transfer_queue.integrations import refit
from transfer_queue.integrations.refit import Sender, Taker
from transfer_queue.weights.version.digest import digest_tensor

WORKER = """
import asyncio
from transfer_queue.errors import TransferQueueError
from transfer_queue.integrations.refit import Taker
from transfer_queue.weights.version.digest import digest_tensor

address, token, rank, version, timeout_s = input().split()
taker = Taker(address, token, int(rank), float(timeout_s))
print("met")

async def take():
    async for batch in taker.take(int(version), float(timeout_s)):
        for name, tensor in batch:
            print(name, tensor.dtype, list(tensor.shape), digest_tensor(tensor))

try:
    asyncio.run(take())
except TransferQueueError as error:
    print(error.code)
taker.close()
"""
SENDER = """
from transfer_queue.integrations.refit import Sender
sender = Sender()
print(sender.address, sender.token)
input()
"""
Workers = Callable[..., list[Child]]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(3000, 100, generator=generator),
        "bf16": torch.randn(64, 33, generator=generator).bfloat16(),
        "columns": torch.randn(20, 30, generator=generator).t(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "fp8": torch.randn(16, 16, generator=generator).to(torch.float8_e4m3fn),
        "odd": torch.arange(3, dtype=torch.uint8),
        "parameter": torch.nn.Parameter(torch.ones(5)),
    }


def described(tensors: dict[str, torch.Tensor]) -> list[str]:
    """What a worker prints of them."""
    return [f"{name} {one.dtype} {list(one.shape)} {digest_tensor(one.detach())}" for name, one in tensors.items()]


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender(bucket_nbytes=1 << 20)
    yield made
    made.close()


@pytest.fixture
def workers(child: Callable[[str], Child]) -> Workers:
    """Starts worker processes that have met the sender when it returns."""

    def start(place: str, ranks: range, version: int = 7, timeout_s: float = 30.0) -> list[Child]:
        found = [child(WORKER) for _ in ranks]
        for rank, one in zip(ranks, found, strict=True):
            one.say(f"{place} {rank} {version} {timeout_s}")
        assert [one.line() for one in found] == ["met"] * len(found)
        return found

    return start


def place_of(sender: Sender) -> str:
    return f"{sender.address} {sender.token}"


def send(sender: Sender, tensors: Any, num_workers: int, timeout_s: float = 30.0) -> refit.RefitReport:
    return asyncio.run(sender.send(tensors, 7, num_workers, timeout_s))


def test_every_worker_gets_every_tensor_as_it_was(sender: Sender, workers: Workers) -> None:
    found = workers(place_of(sender), range(2))
    tensors = weights()
    report = send(sender, iter(tensors.items()), 2)
    assert report.nbytes >= sum(one.nbytes for one in tensors.values())
    assert [one.finish().splitlines() for one in found] == [described(tensors)] * 2


def test_many_workers_of_one_process_wait_for_each_other(sender: Sender) -> None:
    takers = [Taker(sender.address, sender.token, rank, 30.0) for rank in range(60)]

    async def take(taker: Taker) -> list[str]:
        return [name async for batch in taker.take(7, 30.0) for name, _ in batch]

    async def update() -> list[Any]:
        return await asyncio.gather(sender.send(weights().items(), 7, len(takers), 30.0), *map(take, takers))

    _, *found = asyncio.run(update())
    for taker in takers:
        taker.close()
    assert found == [list(weights())] * len(takers)


def test_a_bucket_that_was_damaged_once_is_fetched_again(
    sender: Sender, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch, times=1)
    [found] = workers(place_of(sender), range(1))
    send(sender, weights().items(), 1)
    assert found.finish().splitlines() == described(weights())


def test_a_worker_that_has_verified_gets_nothing_when_the_bytes_of_another_stay_damaged(
    sender: Sender, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = when_verified(monkeypatch)
    [sound] = workers(place_of(sender), range(1))
    with ThreadPoolExecutor() as beside:
        sent = beside.submit(send, sender, weights().items(), 2)
        assert waits.wait(30)
        damage(monkeypatch)
        [damaged] = workers(place_of(sender), range(1, 2))
        with pytest.raises(DigestMismatch, match="worker 1"):
            sent.result()
    assert (sound.finish(), damaged.finish()) == ("aborted", "digest_mismatch")


def test_workers_get_nothing_when_one_of_them_never_comes(sender: Sender, workers: Workers) -> None:
    [found] = workers(place_of(sender), range(1))
    with pytest.raises(DeadlineExceeded, match="1 of 2 workers"):
        send(sender, weights().items(), 2, timeout_s=1.0)
    assert found.finish() == "aborted"


def test_workers_get_nothing_when_one_of_them_dies_before_the_decision(
    sender: Sender, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = when_verified(monkeypatch)
    sound, killed = workers(place_of(sender), range(2))
    killed.kill()
    with ThreadPoolExecutor() as beside:
        sent = beside.submit(send, sender, weights().items(), 2, 2.0)
        assert waits.wait(30)
        with pytest.raises(DeadlineExceeded, match="1 of 2 workers"):
            sent.result()
    assert sound.finish() == "aborted"


def test_a_worker_does_not_wait_longer_than_it_was_told_for_a_trainer_that_is_late(
    sender: Sender, workers: Workers
) -> None:
    [found] = workers(place_of(sender), range(1), timeout_s=0.5)
    assert found.finish() == "deadline"
    with pytest.raises(DeadlineExceeded):
        send(sender, weights().items(), 1)


def test_workers_that_wait_hear_at_once_of_a_trainer_that_was_killed(
    child: Callable[[str], Child], workers: Workers
) -> None:
    trainer = child(SENDER)
    found = workers(trainer.line(), range(2), timeout_s=60.0)
    trainer.kill()
    assert [one.finish(20) for one in found] == ["unavailable"] * 2


def test_workers_hear_at_once_that_the_tensors_could_not_be_made(sender: Sender, workers: Workers) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(2)
        raise RuntimeError("a collective failed")

    found = workers(place_of(sender), range(2), timeout_s=60.0)
    with pytest.raises(RuntimeError, match="a collective failed"):
        send(sender, failing(), 2)
    assert [one.finish(20) for one in found] == ["aborted"] * 2


def test_another_version_than_a_worker_asks_for_is_loaded_by_nobody(sender: Sender, workers: Workers) -> None:
    found = workers(place_of(sender), range(2), version=8)
    with pytest.raises(StaleVersion, match="version 7 was sent instead of 8"):
        send(sender, weights().items(), 2)
    assert {one.finish() for one in found} <= {"stale_version", "aborted"}


def test_a_worker_without_the_token_is_shown_out(sender: Sender) -> None:
    with pytest.raises(AccessDenied):
        Taker(sender.address, "another", 0, 5.0)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (torch.ones(2).to_sparse(), UnsupportedValue),
        ("text", UnsupportedValue),
        (torch.ones(2, device="meta"), UnsupportedValue),
    ],
)
def test_ranks_beside_are_not_left_in_a_collective_by_a_tensor_that_is_refused(
    sender: Sender, wrong: Any, error: type[Exception]
) -> None:
    rest = iter([("first", torch.ones(2)), ("wrong", wrong), ("last", torch.ones(2))])
    with pytest.raises(error, match="wrong"):
        send(sender, rest, 0)
    assert list(rest) == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, KeyboardInterrupt])
def test_ranks_beside_are_not_left_in_a_collective_when_memory_runs_out(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def full(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(refit, "pack_into", full)
    rest = iter([(name, torch.ones(1_000_000)) for name in "abcdef"])
    with pytest.raises(error):
        send(sender, rest, 0)
    assert list(rest) == []


def test_two_tensors_of_one_name_are_refused(sender: Sender) -> None:
    with pytest.raises(BadManifest, match="one name"):
        send(sender, [("weight", torch.ones(2)), ("weight", torch.zeros(2))], 0)


def test_an_update_without_tensors_is_refused(sender: Sender) -> None:
    with pytest.raises(InvalidInput, match="no weights"):
        send(sender, [], 0)


def test_an_update_has_one_version(sender: Sender) -> None:
    taker = Taker(sender.address, sender.token, 0, 30.0)

    async def take() -> list[str]:
        return [name async for batch in taker.take(None, 30.0) for name, _ in batch]

    async def update() -> None:
        await asyncio.gather(sender.send(weights().items(), 7, 1, 30.0), take())

    asyncio.run(update())
    again = iter(weights().items())
    with pytest.raises(NotOpen, match="has sent its version"):
        send(sender, again, 1)
    assert list(again) == []
    with pytest.raises(NotOpen, match="has taken the version"):
        asyncio.run(take())
    taker.close()


def test_a_worker_that_leaves_wakes_up_what_waits(sender: Sender) -> None:
    taker = Taker(sender.address, sender.token, 0, 30.0)

    async def take() -> list[Any]:
        waiting = asyncio.ensure_future(anext(taker.take(7, 30.0)))
        await asyncio.sleep(0)  # it begins
        taker.close()
        return await asyncio.gather(waiting, return_exceptions=True)

    [error] = asyncio.run(take())
    assert isinstance(error, ServiceUnavailable)


def test_the_packed_version_is_freed_at_the_end(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[weakref.ref[torch.Tensor]] = []
    add = refit.Offer.add
    monkeypatch.setattr(
        refit.Offer, "add", lambda self, *given: (packed.extend(map(weakref.ref, given[1])), add(self, *given))
    )
    send(sender, weights().items(), 0)
    assert [one() is not None for one in packed] == [True] * 2
    sender.close()
    gc.collect()
    assert [one() for one in packed] == [None] * 2


def damage(monkeypatch: pytest.MonkeyPatch, times: int = 1000) -> None:
    """Serve wrong bytes, so often."""
    serve, left = refit.Offer.bucket, [times]

    def damaged(self: refit.Offer, key: str, index: int) -> torch.Tensor:
        data = serve(self, key, index)
        left[0] -= 1
        return data if left[0] < 0 else data ^ 1

    monkeypatch.setattr(refit.Offer, "bucket", damaged)


def when_verified(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a worker has verified everything and asks for the decision."""
    asked, answer = threading.Event(), refit.Offer.manifest

    def noted(self: refit.Offer, key: str) -> bytes:
        if key == refit.DECIDED:
            asked.set()
        return answer(self, key)

    monkeypatch.setattr(refit.Offer, "manifest", noted)
    return asked
