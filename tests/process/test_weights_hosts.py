"""Servers that listen everywhere tell others an address at which they can be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Child
from netns import Network
from weights import Net

from tools.netns import allowed, ip
from transfer_queue.errors import ServiceUnavailable
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

BROADCAST = """
import psutil, torch
from transfer_queue.weights import StateDictSource
from transfer_queue.weights.transport.collective import CollectiveTrainer, CollectiveTrainerInfo
info = CollectiveTrainerInfo(world_size=2, **{told!r})
trainer = CollectiveTrainer(info, None, StateDictSource({{"weight": torch.zeros(2)}}))
port = trainer.receivers_info()["port"]
found = psutil.Process().net_connections("inet")
print(*[one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port])
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


PAIR = """
import threading
class Pair:
    init_weight_transfer_engine = start_weight_update = finish_weight_update = lambda self, *_: None
    def update_weights(self, info):
        self.info = info
        told.set()
        assert done.wait(30)
told, done = threading.Event(), threading.Event()
client, source = Pair(), StateDictSource({{f"part{{number}}": torch.full((1 << 20,), 7.0) for number in range(16)}})
trainer = registry.trainer("tcp").trainer_init({{"host": {host!r}}}, client=client, source=source)
thread = threading.Thread(target=lambda: trainer.send_weights(deadline_s=60))
thread.start()
assert told.wait(30)
result = [trainer.receivers_info(), client.info]
"""
TAKES = """
from transfer_queue.weights import InPlace, Receiver
from transfer_queue.weights.transport.tcp import TcpEngine
module = torch.nn.Module()
for number in range(16):
    module.register_buffer(f"part{{number}}", torch.zeros(1 << 20))
engine = TcpEngine(Receiver(InPlace(module)))
engine.init_transfer_engine({info!r})
engine.start_weight_update()
engine.update_weights({update!r})
result = [engine._sharing.address, engine.num_served_nbytes]
"""


def test_receivers_on_other_hosts_give_each_other_what_the_trainer_sent_once(network: Network) -> None:
    one, two = network.hosts
    three = network.add()
    one.run("from transfer_queue.weights import StateDictSource\nfrom transfer_queue.weights.transport import registry")
    info, update = one.run(PAIR.format(host="0.0.0.0"))
    for host in (two, three):
        address, _ = host.run(TAKES.format(info=info, update=update))
        assert address.startswith(f"tcp:{host.ip}:")
    nbytes = 16 << 22
    assert one.run("result = trainer.num_served_nbytes") == nbytes
    assert two.run("result = engine.num_served_nbytes") == nbytes
    for host in (two, three):
        host.run("engine.finish_weight_update(); engine.shutdown(); result = 0")
        assert host.run("result = float(module.part3.sum())") == 7.0 * (1 << 20)
    one.run("done.set(); thread.join(); trainer.shutdown(); result = 0")


def test_a_receiver_that_sees_one_network_of_the_trainers_host_finds_it_there(network: Network, tmp_path: Path) -> None:
    one, _ = network.hosts
    other = Network(1, tmp_path / "other", network=78, first=2)
    two = other.hosts[0]
    other.plug_in(1, one.space, "eth1")
    for host, way in ((one, "10.77.0.254"), (two, "10.78.0.254")):  # nobody is there: that a packet goes there is all
        ip("-n", host.space, "route", "add", "default", "via", way)
    info = one.run(TRAINER.format(host="0.0.0.0"))
    assert info["address"].startswith(f"tcp:{one.ip}:")
    assert [address.rpartition(":")[0] for address in info["addresses"]] == ["tcp:10.78.0.1"]
    assert two.run(RECEIVER.format(info=info)) == 42.0
    one.run("trainer.shutdown(); result = 0")
    other.close()


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


@pytest.mark.parametrize(("told", "where"), [({}, "127.0.0.1"), ({"host": "127.0.0.2"}, "127.0.0.2")])
def test_a_broadcast_listens_where_it_was_told_and_on_loopback_otherwise(
    told: dict[str, str], where: str, child: Callable[[str], Child]
) -> None:
    assert child(BROADCAST.format(told=told)).finish() == where


def test_a_broadcast_that_cannot_listen_where_it_was_told_says_so() -> None:
    info = {"world_size": 2, "host": "192.0.2.99"}
    with pytest.raises(ServiceUnavailable, match="assign requested address"):
        registry.trainer("collective").trainer_init(info, client=Nobody(), source=ModuleSource(Net()))  # type: ignore[arg-type]


def test_a_server_over_http_gives_a_url_that_others_can_use() -> None:
    receiver = Receiver(InPlace(Net()))
    with http.serve(Control(TcpEngine(receiver), receiver), "0.0.0.0", token="t" * 16) as server:
        assert reachable(server.url.split("/")[2].rpartition(":")[0])
        assert http.WeightSyncClient(server.url, "t" * 16).get_world_size() == 1
