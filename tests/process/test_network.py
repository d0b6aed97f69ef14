"""Three hosts with addresses of their own: what crosses the network, and what happens when it is cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import until
from netns import AgentError, Host, Network

from tools.netns import allowed

pytestmark = pytest.mark.skipif(not allowed(), reason="making network namespaces needs root")

MB = 1 << 20
PUT = "tq.kv_batch_put({keys!r}, {partition!r}, {{'x': torch.full(({count}, {width}), {value})}})"
GET = "data = tq.kv_batch_get({keys!r}, {partition!r}); result = [row[0].item() for row in data['x'].unbind()]"


def put(host: Host, keys: list[str], partition: str, value: float, width: int = 4) -> None:
    host.run(PUT.format(keys=keys, partition=partition, count=len(keys), width=width, value=float(value)))


def get(host: Host, keys: list[str], partition: str) -> list[float]:
    values: list[float] = host.run(GET.format(keys=keys, partition=partition))
    return values


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Host 1 has the controller, hosts 2 and 3 have units of their own."""
    network = Network(3, tmp_path_factory.mktemp("hosts"))
    one, two, three = network.hosts
    address = one.serve(one.ip, timeout_s=2.0)
    for host in (two, three):
        host.serve("", join=f"tcp:{address}")
    yield network
    network.close()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Callable[[int], Network]]:
    made: list[Network] = []

    def make(hosts: int) -> Network:
        made.append(Network(hosts, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("width", [4, 2 * MB // 4], ids=["small", "large"])
def test_hosts_read_each_others_rows(cluster: Network, width: int) -> None:
    partition = f"rows-{width}"
    for host in cluster.hosts:
        put(host, [f"{host.number}-{row}" for row in range(3)], partition, host.number, width)
    for host in cluster.hosts:
        assert get(host, ["3-1", "1-0", "2-2", "3-0"], partition) == [3, 1, 2, 3]


def test_units_serve_on_the_address_that_leads_to_the_controller(cluster: Network) -> None:
    units = cluster.hosts[0].run("result = tq.get_client().stats()['units']")
    assert {unit["address"].rpartition(":")[0] for unit in units.values()} == {"10.77.0.2", "10.77.0.3"}


def test_a_put_stays_on_its_host_and_a_reader_there_needs_no_network(cluster: Network) -> None:
    before = [cluster.sent_nbytes(host.number) for host in cluster.hosts]
    put(cluster.hosts[1], ["a"], "here", 5, 16 * MB // 4)
    assert get(cluster.hosts[1], ["a"], "here") == [5]
    for host, sent in zip(cluster.hosts, before, strict=True):
        assert cluster.sent_nbytes(host.number) - sent < 64 << 10


def test_every_byte_that_is_read_elsewhere_crosses_the_network_once(cluster: Network) -> None:
    put(cluster.hosts[1], ["a"], "there", 6, 16 * MB // 4)
    before = [cluster.sent_nbytes(host.number) for host in cluster.hosts]
    assert get(cluster.hosts[2], ["a"], "there") == [6]
    sent = [cluster.sent_nbytes(host.number) - was for host, was in zip(cluster.hosts, before, strict=True)]
    assert 16 * MB <= sent[1] < 17 * MB
    assert sent[0] < 64 << 10
    assert sent[2] < MB, "acknowledgements only"


def test_a_waiting_reader_is_woken_across_hosts(cluster: Network) -> None:
    cluster.hosts[1].ask(
        "meta = tq.get_client().get_meta(['x'], 2, 'woken', task_name='t', timeout_s=20.0); result = len(meta)"
    )
    put(cluster.hosts[2], ["a", "b"], "woken", 1)
    assert cluster.hosts[1].answer() == 2


def test_a_stranger_on_the_network_is_refused(cluster: Network, network: Callable[[int], Network]) -> None:
    code = """
import os
from transfer_queue.client.session import Session
from transfer_queue.wire.address import Address
try:
    Session(Address(host='10.77.0.1', port={port}, token='a guess'))
except Exception as error:
    result = type(error).__name__
"""
    port = int(cluster.hosts[0].run("result = tq.get_client().stats()['tcp']").rpartition(":")[2])
    assert cluster.hosts[2].run(code.format(port=port)) == "AccessDenied"


def test_nothing_listens_on_other_addresses(cluster: Network) -> None:
    code = """
import psutil
pid = tq.get_client().stats()['pid']
result = sorted({c.laddr.ip for c in psutil.Process(pid).net_connections('inet') if c.status == 'LISTEN'})
"""
    assert [host.run(code) for host in cluster.hosts] == [["10.77.0.1"], ["10.77.0.2"], ["10.77.0.3"]]


def test_hosts_with_ipv6_addresses(network: Callable[[int], Network]) -> None:
    net = network(2)
    one, two = net.hosts
    address = one.serve(one.ip6)
    assert address.startswith("[fd77::1]:")
    two.serve("", join=f"tcp:{address}")
    put(two, ["a"], "p", 3, MB)
    assert get(one, ["a"], "p") == [3]


def test_a_host_that_is_cut_off_fails_promptly_and_works_again_when_it_is_back(cluster: Network) -> None:
    one, two, three = cluster.hosts
    for host in cluster.hosts:
        put(host, [str(host.number)], "cut", host.number, 2 * MB // 4)
    cluster.cut(3)
    try:
        started = time.monotonic()
        for host in (one, three):
            with pytest.raises(AgentError) as caught:
                get(host, ["3"] if host is one else ["1"], "cut")
            assert caught.value.kind in ("DeadlineExceeded", "ServiceUnavailable")
        with pytest.raises(AgentError):
            put(three, ["4"], "cut", 4, 2 * MB // 4)
        assert time.monotonic() - started < 20
        assert get(two, ["1", "2"], "cut") == [1, 2]
        put(two, ["5"], "cut", 5)
    finally:
        cluster.mend(3)
    until(lambda: works(lambda: get(one, ["3"], "cut") == [3]), "the return of the host")
    until(lambda: works(lambda: get(three, ["1", "5"], "cut") == [1, 5]), "the return of the network")
    put(three, ["6"], "cut", 6)
    assert get(two, ["6", "3"], "cut") == [6, 3]


def works(attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except AgentError:
        return False


def test_rows_of_a_host_that_was_given_up_for_away_are_there_when_it_returns(cluster: Network) -> None:
    one, _, three = cluster.hosts
    put(three, ["a"], "long", 7, 2 * MB // 4)
    unit = next(
        number
        for number, unit in one.run("result = tq.get_client().stats()['units']").items()
        if unit["address"].startswith("10.77.0.3:")
    )
    away = f"result = tq.get_client().stats()['units'][{unit!r}]['away']"
    cluster.cut(3)
    try:
        until(lambda: bool(one.run(away)), "the loss of the connection", 40)
        started = time.monotonic()
        with pytest.raises(AgentError, match="away") as caught:
            get(one, ["a"], "long")
        assert caught.value.kind == "ServiceUnavailable"
        assert time.monotonic() - started < 1
    finally:
        cluster.mend(3)
    until(lambda: not one.run(away), "the return of the unit", 40)
    # A connection from before the cut sends again only when TCP's own delay is over, which has grown meanwhile.
    until(lambda: works(lambda: get(one, ["a"], "long") == [7]), "the rows", 60)
    until(lambda: works(lambda: get(three, ["a"], "long") == [7]), "the end of the cut for its own clients")
