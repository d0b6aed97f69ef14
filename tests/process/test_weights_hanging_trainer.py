"""A trainer that hangs, as one that is stopped, takes connections and answers nobody: who waits for it can be woken."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from transfer_queue.errors import TransferQueueError
from transfer_queue.weights import Control, InPlace, ModuleSource, Receiver, StateDictSource, digests, plan, seal
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.fetching import TrainerLink, Transfers
from transfer_queue.weights.transport.protocol import GetSpecs
from transfer_queue.weights.transport.trainer import TrainerEngine
from transfer_queue.wire.address import Address, parse_address

DEADLINE_S = 60.0
SOURCE = StateDictSource({"a": torch.ones(3)})
MANIFEST = seal(plan(SOURCE.specs()), digests(SOURCE), version=1, epoch="run")


@pytest.fixture
def hanging() -> Iterator[tuple[socket.socket, Address]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, parse_address(f"tcp:127.0.0.1:{server.getsockname()[1]}", "token")


def ends_once_interrupted(server: socket.socket, call: Callable[[], object], interrupt: Callable[[], None]) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except TransferQueueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    connection, _ = server.accept()
    with connection:
        assert connection.recv(1)  # the handshake has begun
        begun = time.monotonic()
        interrupt()
        thread.join(DEADLINE_S)
        assert time.monotonic() - begun < 5
    assert errors


def test_a_handshake_of_a_fetch_ends_with_the_update(hanging: tuple[socket.socket, Address]) -> None:
    server, address = hanging
    transfers = Transfers(MANIFEST, lambda *args: None, Deadline(DEADLINE_S), DEADLINE_S)
    ends_once_interrupted(server, lambda: transfers._met(address), transfers.stop)
    assert transfers._peers == []


def test_a_handshake_of_the_link_to_the_trainer_can_be_interrupted(hanging: tuple[socket.socket, Address]) -> None:
    server, address = hanging
    link = TrainerLink()
    link.address = address
    ends_once_interrupted(server, lambda: link.ask(GetSpecs(), Deadline(DEADLINE_S)), link.interrupt)
    assert link._peer is None


@pytest.mark.parametrize("engine", ["tcp", "shm"])
@pytest.mark.parametrize("several", [False, True], ids=["one_address", "two_addresses"])
def test_a_trainer_takes_over_from_one_that_hangs_amid_its_introduction(
    hanging: tuple[socket.socket, Address], engine: str, several: bool
) -> None:
    server, address = hanging
    model = torch.nn.Linear(2, 2)
    receiver = Receiver(InPlace(model))
    control = Control(registry.engine(engine)(receiver), receiver)
    more = {"addresses": [str(address)]} if several and engine == "tcp" else {}
    info = {"run_id": "before", "address": str(address), "token": "token", "timeout_s": DEADLINE_S, **more}
    trainers: list[TrainerEngine] = []

    def take_over() -> None:
        source = ModuleSource(torch.nn.Linear(2, 2))
        trainers.append(registry.trainer(engine).trainer_init({}, client=control, source=source))

    try:
        ends_once_interrupted(server, lambda: control.init_weight_transfer_engine(info), take_over)
        trainers[0].send_weights(deadline_s=DEADLINE_S)
    finally:
        for trainer in trainers:
            trainer.shutdown()
        control.shutdown_weight_transfer_engine()
