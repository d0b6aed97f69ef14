"""Servers that listen everywhere tell others an address at which they can be reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from netns import Network
from weights import Net

from tools.netns import allowed
from transfer_queue.weights import Control, InPlace, ModuleSource, Receiver, http
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.collective import CollectiveTrainer, CollectiveTrainerInfo
from transfer_queue.weights.transport.reports import Reports
from transfer_queue.weights.transport.tcp import TcpEngine
from transfer_queue.wire.address import advertised, is_everywhere, is_here

TRAINER = """
import threading
from transfer_queue.weights import StateDictSource
from transfer_queue.weights.transport import registry
class Nobody:
    init_weight_transfer_engine = start_weight_update = update_weights = finish_weight_update = lambda self, *_: None
source = StateDictSource({{"weight": torch.full((2, 3), 7.0)}})
trainer = registry.trainer("tcp").trainer_init({{"host": {host!r}}}, client=Nobody(), source=source)
trainer.send_weights(deadline_s=20)
result = trainer.receivers_info()
"""
RECEIVER = """
from transfer_queue.weights import InPlace, Receiver
from transfer_queue.weights.transport.tcp import TcpEngine
module = torch.nn.Linear(3, 2, bias=False)
engine = TcpEngine(Receiver(InPlace(module)))
engine.init_transfer_engine({info!r})
engine.join(timeout_s=20)
engine.shutdown()
result = float(module.weight.sum())
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if not allowed():
        pytest.skip("only root may make network namespaces")
    made = Network(2, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_another_host_fetches_from_a_trainer_that_listens_everywhere(network: Network, host: str) -> None:
    one, two = network.hosts
    info = one.run(TRAINER.format(host=host))
    assert info["address"].startswith(f"tcp:{one.ip}:" if host == "0.0.0.0" else f"tcp:[{one.ip6}]:")
    assert two.run(RECEIVER.format(info=info)) == 42.0
    one.run("trainer.shutdown(); result = 0")


def reachable(host: str) -> bool:
    return not is_everywhere(host) and is_here(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_every_address_is_told_as_one_of_this_host(host: str) -> None:
    assert reachable(advertised(host))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "trainer.example", "10.1.2.3"])
def test_a_chosen_address_is_told_as_it_is(host: str) -> None:
    assert advertised(host) == host


class Nobody:
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.told = init_info


def test_reports_broadcasts_and_replicas_are_told_where_they_are_reached() -> None:
    reports = Reports("0.0.0.0")
    addresses = [reports.info(1)["report_to"]]
    reports.close()
    engine = TcpEngine(Receiver(InPlace(Net())))
    addresses.append(engine.serve_installed("0.0.0.0", token="t"))
    engine.shutdown()
    trainer = registry.trainer("tcp").trainer_init(
        {"host": "0.0.0.0"},
        client=Nobody(),
        source=ModuleSource(Net()),  # type: ignore[arg-type]
    )
    addresses.append(trainer.receivers_info()["address"])
    trainer.shutdown()
    broadcast = CollectiveTrainer.__new__(CollectiveTrainer)
    broadcast.info = CollectiveTrainerInfo(world_size=2, host="0.0.0.0")
    broadcast._store, broadcast._round = SimpleNamespace(port=1), 0
    addresses.append(f"tcp:{broadcast.receivers_info()['host']}")
    assert all(reachable(one.split(":")[1]) for one in addresses)


def test_a_server_over_http_gives_a_url_that_others_can_use() -> None:
    receiver = Receiver(InPlace(Net()))
    with http.serve(Control(TcpEngine(receiver), receiver), "0.0.0.0", token="t") as server:
        assert reachable(server.url.split("/")[2].rpartition(":")[0])
        assert http.WeightSyncClient(server.url, "t").get_world_size() == 1
