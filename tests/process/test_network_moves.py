"""A host whose address changes while its storage unit runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import until
from netns import AgentError, Host, Network

from tools.netns import allowed

pytestmark = pytest.mark.skipif(not allowed(), reason="making network namespaces needs root")

PUT = "tq.kv_put({key!r}, 'p', {{'x': torch.full((1 << 18,), {value})}})"
GET = "result = tq.kv_batch_get({key!r}, 'p')['x'][0, 0].item()"
UNITS = "result = [one for one in tq.get_client().stats()['units'].values() if not one['away']]"
LISTENS = """
import psutil
pid = tq.get_client().stats()['pid']
result = sorted({c.laddr.ip for c in psutil.Process(pid).net_connections('inet') if c.status == 'LISTEN'})
"""
PID = "result = tq.get_client().stats()['pid']"
KILL = f"import os; {PID}; os.kill(result, 9)"
LEFT_S = 60.0  # a connection from an address that is gone ends after 15 to 20 s (`wire.address.tune`)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Host 1 has the controller, host 2 has a unit of its own, with a row."""
    made = Network(2, tmp_path)
    one, two = made.hosts
    two.serve("", join=f"tcp:{one.serve(one.ip, timeout_s=2.0)}")
    two.run(PUT.format(key="a", value=7.0))
    yield made
    made.close()


def reads(host: Host, key: str, value: float) -> bool:
    try:
        return bool(host.run(GET.format(key=key)) == value)
    except AgentError:
        return False


def is_at(network: Network, address: str) -> bool:
    return [one["address"].rpartition(":")[0] for one in network.hosts[0].run(UNITS)] == [address]


def move(network: Network, to: int) -> None:
    """Host 2 gets another address, and its unit is there."""
    network.move(2, to)
    until(lambda: is_at(network, f"10.77.0.{to}"), "the unit at its new address", LEFT_S)


def test_a_unit_whose_host_gets_another_address_is_found_there(network: Network) -> None:
    one, two = network.hosts
    move(network, 33)
    assert reads(one, "a", 7.0)
    until(lambda: reads(two, "a", 7.0), "its own clients")
    assert two.run(LISTENS) == ["10.77.0.33"]
    two.run(PUT.format(key="b", value=8.0))
    assert reads(one, "b", 8.0)


def test_the_standby_of_a_unit_takes_over_at_the_new_address(network: Network) -> None:
    one, two = network.hosts
    move(network, 33)
    until(lambda: reads(two, "a", 7.0), "its own clients")
    before = two.run(KILL)
    until(lambda: two.run(PID) != before, "the standby")
    until(lambda: is_at(network, "10.77.0.33"), "the unit that joins again")
    assert reads(one, "a", 7.0)
    assert two.run(LISTENS) == ["10.77.0.33"]
