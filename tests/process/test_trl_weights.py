"""TRL's weight transfer, by the calls of its trainer, to a server of ours in another process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Child, until
from safetensors.torch import save_file

from transfer_queue.errors import DeadlineExceeded, Incomplete, NotOpen, ServiceUnavailable, ShapeMismatch
from transfer_queue.integrations import trl_weights
from transfer_queue.integrations.trl_weights import TrlTransfer
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.version.digest import digest_tensor
from transfer_queue.weights.version.sources import SafetensorsSource

SERVER = """
PORT = 0
import torch
from transfer_queue.weights import Control, Gate, Receiver, Swap
from transfer_queue.weights.http import serve
from transfer_queue.weights.transport import registry
from transfer_queue.weights.version.digest import digest_tensor

model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2)).to(torch.float32)
receiver, gate = Receiver(Swap(model)), Gate()
with serve(Control(registry.engine("tcp")(receiver), receiver, generation=gate), port=PORT, token="token") as server:
    print(server.url)
    while input():
        with receiver.reading() as live:
            digests = [digest_tensor(one.detach()) for one in live.module.parameters()]
        print(live.tag.version, gate.is_paused(), *digests)
"""


@pytest.fixture
def server(child: Callable[[str], Child]) -> Child:
    return child(SERVER)


def new_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))


def given(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As TRL gives them."""
    for name, one in model.named_parameters():
        yield name, one.detach()


def asked(server: Child) -> list[str]:
    """Version, whether generation is paused, digests."""
    server.say("what do you have?")
    return server.line().split()


def test_a_server_has_what_the_iterator_gave_in_every_sync(server: Child) -> None:
    model = new_model()
    transfer = TrlTransfer(WeightSyncClient(server.line(), "token"))
    transfer.init_weight_transfer()
    for step in (1, 2):
        torch.nn.init.constant_(model[0].weight, step)
        transfer.pause()
        assert asked(server)[1] == "True"
        transfer.send_weights(given(model))
        transfer.resume()
        assert asked(server)[1:] == ["False", *(digest_tensor(one.detach()) for one in model.parameters())]
    transfer.destroy()
    transfer.destroy()
    server.say()
    server.finish()


def test_the_first_sync_says_what_the_later_ones_send(child: Callable[[str], Child]) -> None:
    """TRL loads the model by itself: nobody else has its dtypes, and which of its parameters are trained."""
    model, server = new_model().bfloat16(), child(SERVER.replace("torch.float32", "torch.bfloat16"))
    model[0].requires_grad_(False)
    transfer = TrlTransfer(WeightSyncClient(server.line(), "token"))
    transfer.init_weight_transfer()
    for version in ("1", "2"):
        torch.nn.init.constant_(model[1].weight, float(version))
        transfer.pause()
        transfer.send_weights(given(model))
        transfer.resume()
        assert asked(server) == [version, "False", *(digest_tensor(one.detach()) for one in model.parameters())]
    transfer.destroy()
    server.say()
    server.finish()


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As TRL gives a model of which it has frozen a part."""
    yield from ((name, one.detach()) for name, one in model.named_parameters() if one.requires_grad)


def test_what_trl_has_frozen_comes_from_the_checkpoint(server: Child, tmp_path: Path) -> None:
    model, url = new_model(), server.line()
    save_file({**model.state_dict(), "lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    model[0].requires_grad_(False)
    lacking = TrlTransfer(WeightSyncClient(url, "token"))
    lacking.init_weight_transfer()
    with pytest.raises(Incomplete, match="`frozen`"):
        lacking.send_weights(trained(model))
    lacking.destroy()
    transfer = TrlTransfer(WeightSyncClient(url, "token"), frozen=SafetensorsSource(tmp_path))
    transfer.init_weight_transfer()
    for version in ("1", "2"):
        torch.nn.init.constant_(model[1].weight, float(version))
        transfer.send_weights(trained(model))
        assert asked(server) == [version, "False", *(digest_tensor(one.detach()) for one in model.parameters())]
    transfer.destroy()
    server.say()
    server.finish()


def waits(client: WeightSyncClient, caplog: pytest.LogCaptureFixture) -> tuple[TrlTransfer, threading.Thread]:
    """One that has looked for its server in vain, in a thread that goes on looking."""
    caplog.clear()
    transfer = TrlTransfer(client, deadline_s=60.0)
    waiting = threading.Thread(target=transfer.init_weight_transfer)
    waiting.start()
    until(lambda: "do not answer yet" in caplog.text, "a look in vain")
    return transfer, waiting


def comes_up(child: Callable[[str], Child], port: int, waiting: threading.Thread) -> Child:
    """The server that this thread waits for, which ends then."""
    server = child(SERVER.replace("PORT = 0", f"PORT = {port}"))
    server.line()
    waiting.join(20)
    assert not waiting.is_alive()
    return server


def test_a_server_that_still_loads_is_waited_for(
    child: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trl_weights, "LOOK_S", 0.01)
    caplog.set_level("INFO", trl_weights.log.name)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        client = WeightSyncClient(f"http://127.0.0.1:{port}", "token")
        with pytest.raises((ServiceUnavailable, DeadlineExceeded)):  # the time may end between two looks, or in one
            TrlTransfer(client, deadline_s=0.1).init_weight_transfer()
        transfer, waiting = waits(client, caplog)
    server = comes_up(child, port, waiting)
    transfer.send_weights(given(new_model()))
    assert asked(server)[:2] == ["1", "False"]
    transfer.destroy()
    server.say()
    server.finish()


def test_a_server_that_takes_calls_and_is_silent_while_it_loads_is_waited_for(
    child: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trl_weights, "LOOK_S", 0.01)
    monkeypatch.setattr(trl_weights, "ANSWER_S", 0.1)
    caplog.set_level("INFO", trl_weights.log.name)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        client = WeightSyncClient(f"http://127.0.0.1:{port}", "token", timeout_s=1.0)
        with pytest.raises(DeadlineExceeded):
            TrlTransfer(client, deadline_s=0.1).init_weight_transfer()
        transfer, waiting = waits(client, caplog)
    server = comes_up(child, port, waiting)
    transfer.destroy()
    server.say()
    server.finish()


def test_a_pause_of_somebody_else_outlasts_a_sync(server: Child) -> None:
    model, client = new_model(), WeightSyncClient(server.line(), "token")
    transfer = TrlTransfer(client)
    transfer.init_weight_transfer()
    client.pause_generation("keep")
    transfer.pause()
    transfer.send_weights(given(model))
    transfer.resume()
    assert asked(server)[:2] == ["1", "True"]
    transfer.pause()
    client.resume_generation("")
    assert asked(server)[1] == "True"
    transfer.resume()
    assert asked(server)[1] == "False"
    transfer.destroy()
    server.say()
    server.finish()


class OlderClient(WeightSyncClient):
    """Written when a resume had no owner."""

    def resume_generation(self) -> None:  # type: ignore[override]
        super().resume_generation()


def test_a_client_whose_resume_takes_no_owner_goes_on_after_a_sync(server: Child) -> None:
    model = new_model()
    transfer = TrlTransfer(OlderClient(server.line(), "token"))
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(given(model))
    transfer.resume()
    assert asked(server)[:2] == ["1", "False"]
    transfer.destroy()
    server.say()
    server.finish()


def test_an_iterator_that_gives_other_tensors_leaves_the_server_as_it_was(server: Child) -> None:
    model = new_model()
    transfer = TrlTransfer(WeightSyncClient(server.line(), "token"))
    unread = given(model)
    with pytest.raises(NotOpen):
        transfer.send_weights(unread)
    assert list(unread) == []
    transfer.init_weight_transfer()
    transfer.send_weights(given(model))
    before = asked(server)
    other = iter([*given(model)][::-1])
    with pytest.raises(ShapeMismatch, match=r"1\.bias"):
        transfer.send_weights(other)
    assert list(other) == []  # the other ranks are in collectives for them
    assert asked(server) == before
    transfer.destroy()
    server.say()
    server.finish()
