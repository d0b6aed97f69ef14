"""Receivers that give each other the buckets of an update, in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engines import BUCKET_NBYTES, Process, Site, expected, receive
from weights import Net, copy_of, drawn, same

from transfer_queue.errors import ServiceUnavailable, TransferQueueError
from transfer_queue.weights import InPlace, Receiver, StateDictSource, plan
from transfer_queue.weights.transport.tcp import TcpEngine, TcpTrainer

NBYTES = sum(plan(StateDictSource(drawn(Net(), 1)).specs(), BUCKET_NBYTES).buckets)
STALL_S = 1.0  # longer than a busy machine keeps a bucket waiting, which would be sent once more


class Line:
    """A client whose receivers update one after another, the second one after something happened to the first."""

    def __init__(self, first: Process, second: Process, trouble: Callable[[], object]) -> None:
        self.first, self.second = first, second
        self.trouble = trouble

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.info = {**info, "stall_s": STALL_S}
        for one in (self.first, self.second):
            one.call("init_transfer_engine", self.info)

    def start_weight_update(self) -> None:
        for one in (self.first, self.second):
            one.call("start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        if not info.get("abort"):
            self.first.call("update_weights", info)
            self.trouble()
        self.second.call("update_weights", info)

    def finish_weight_update(self, *_: Any) -> None:
        self.second.call("finish_weight_update")


@pytest.fixture
def line(context: Any) -> Iterator[Callable[..., tuple[Line, TcpTrainer]]]:
    made: list[Any] = []

    def start(trouble: Callable[[Line], object], **info: Any) -> tuple[Line, TcpTrainer]:
        pair = [Process(context, receive, "tcp", rank, "swap", "raise", "cpu") for rank in (0, 1)]
        client = Line(*pair, lambda: trouble(client))
        told = {"bucket_nbytes": BUCKET_NBYTES, "peers": True, **info}
        trainer = TcpTrainer.trainer_init(told, client=client, source=StateDictSource(drawn(Net(), 1)))  # type: ignore[arg-type]
        made.extend((*pair, trainer))
        return client, trainer

    yield start
    for one in made:
        one.kill() if isinstance(one, Process) else one.shutdown()


def test_a_second_receiver_is_given_everything_by_the_first(line: Any) -> None:
    client, trainer = line(lambda client: None)
    trainer.send_weights(deadline_s=20)
    assert client.second.call("root") == expected(1)
    assert trainer.num_served_nbytes == client.first.call("served") == NBYTES


def test_what_is_sent_whole_in_place_of_a_difference_is_given_on_as_well(line: Any) -> None:
    client, trainer = line(lambda client: None, anchor_every=3)
    trainer.send_weights(deadline_s=20)  # which the first does not commit, so it lacks the base of the next one
    once = trainer.num_served_nbytes
    assert trainer.send_weights(deadline_s=20).kind == "full"
    assert client.second.call("root") == expected(1)
    assert trainer.num_served_nbytes == client.first.call("served") == 2 * once


def damaged(client: Line) -> None:
    client.first.call("spoil_staged")


def killed(client: Line) -> None:
    client.first.kill()


def frozen(client: Line) -> None:
    client.first.signal(signal.SIGSTOP)


def committed(client: Line) -> None:
    client.first.call("finish_weight_update")


def given_up(client: Line) -> None:
    client.first.call("update_weights", {"abort": True})


def taken_over(client: Line) -> None:
    client.first.call("init_transfer_engine", {**client.info, "run_id": "the next one", "begun": 0.0})


@pytest.mark.parametrize("trouble", [damaged, killed, frozen, committed, given_up, taken_over])
def test_what_the_first_cannot_give_comes_from_the_trainer(line: Any, trouble: Callable[[Line], object]) -> None:
    client, trainer = line(trouble)
    report = trainer.send_weights(deadline_s=20)
    assert client.second.call("root") == expected(1)
    assert trainer.num_served_nbytes == 2 * NBYTES
    assert report.update_s < 10


@pytest.mark.parametrize("info", [{"peers": False}, {}, {"peers": None}])
def test_receivers_of_the_trainers_host_take_from_the_trainer_unless_told_otherwise(line: Any, info: Any) -> None:
    client, trainer = line(lambda client: None, **{"peers": None, **info})
    trainer.send_weights(deadline_s=20)
    assert client.second.call("root") == expected(1)
    assert (trainer.num_served_nbytes, client.first.call("served")) == (2 * NBYTES, 0)


def test_one_that_does_not_ask_takes_from_the_trainer_beside_the_others(line: Any) -> None:
    client, trainer = line(lambda client: None)
    client.second.call("init_transfer_engine", {**client.info, "peers": False})
    trainer.send_weights(deadline_s=20)
    assert client.second.call("root") == expected(1)
    assert trainer.num_served_nbytes == 2 * NBYTES


def test_updates_of_several_receivers_at_once_and_of_differences(site: Callable[..., Site]) -> None:
    here = site("tcp", num=4, peers=True, anchor_every=2)
    for seed in range(1, 7):
        assert here.send(seed).kind == ("delta" if seed % 2 == 0 else "full")
        assert here.roots() == [expected(seed)] * 4
    fds = [one.call("fds") for one in here.receivers]
    here.send(7)
    here.send(8)
    assert [one.call("fds") for one in here.receivers] == fds


def test_a_receiver_killed_among_several_and_a_trainer_killed(site: Callable[..., Site]) -> None:
    here = site("tcp", num=3, peers=True)
    here.send(1)
    here.receivers[1].kill()
    with pytest.raises(TransferQueueError):
        here.send(2)
    here.receivers[1] = here.receiver(1)
    here.end_trainer()
    here.start_trainer()
    assert here.send(3).version == 1
    assert here.roots() == [expected(3)] * 3


def test_a_trainer_killed_while_receivers_fetch_leaves_the_old_version(site: Callable[..., Site]) -> None:
    here = site("tcp", peers=True)
    here.send(1)

    def hook(name: str, when: str) -> None:
        if (name, when) == ("update_weights", "before"):
            here.trainer.signal(signal.SIGSTOP)  # type: ignore[union-attr]
        if (name, when) == ("update_weights", "underway"):
            here.end_trainer()

    with pytest.raises(ServiceUnavailable):
        here.send(2, hook=hook)
    assert here.roots() == [expected(1)] * 2


def test_receivers_that_cannot_reach_each_other_take_from_the_trainer_from_then_on(line: Any) -> None:
    client, trainer = line(lambda client: client.first.call("hide"))
    for version in (1, 2, 3, 4):
        trainer.send_weights(version, deadline_s=20)
        assert client.second.call("root") == expected(1)
        assert trainer.num_served_nbytes == version * 2 * NBYTES
    assert client.second.call("is_apart")


class Together:
    """A client of engines in this process, all at once."""

    def __init__(self, num: int) -> None:
        self.modules = [Wide() for _ in range(num)]
        self.engines = [TcpEngine(Receiver(InPlace(module)), rank=rank) for rank, module in enumerate(self.modules)]
        self._threads = ThreadPoolExecutor(num)

    def _all(self, name: str, *args: Any) -> None:
        for one in [self._threads.submit(getattr(engine, name), *args) for engine in self.engines]:
            one.result()

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._all("init_transfer_engine", info)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        self._all("update_weights", info)

    def finish_weight_update(self, *_: Any) -> None:
        self._all("finish_weight_update")

    def close(self) -> None:
        self._all("shutdown")
        self._threads.shutdown()


class Wide(torch.nn.Module):
    """48 tensors of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(1 << 14) for _ in range(48)])


def test_the_trainer_sends_about_one_model_to_six_receivers() -> None:
    client, weights = Together(6), drawn(Wide(), 5)
    nbytes = sum(one.nbytes for one in weights.values())
    told = {"bucket_nbytes": 1 << 16, "peers": True}
    trainer = TcpTrainer.trainer_init(told, client=client, source=StateDictSource(weights))  # type: ignore[arg-type]
    trainer.send_weights(deadline_s=20)
    assert all(same(copy_of(module), weights) for module in client.modules)
    assert nbytes <= trainer.num_served_nbytes <= 1.5 * nbytes
    assert trainer.num_served_nbytes + sum(one.num_served_nbytes for one in client.engines) == 6 * nbytes
    trainer.shutdown()
    client.close()
