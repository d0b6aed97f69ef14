"""MooncakeStore on two hosts with addresses of their own, one of which is cut off: where TQ_ENGINES names it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import until
from netns import AgentError, Host, Network

from tools.netns import allowed

pytestmark = pytest.mark.skipif(
    "MooncakeStore" not in os.environ.get("TQ_ENGINES", "") or not allowed(), reason="needs Mooncake, and root"
)

WIDTH, WITHIN_S = 1 << 20, 4.0
PUT = "tq.kv_batch_put({keys!r}, 'p', {{'x': torch.full(({count}, {width}), {value})}})"
GET = "data = tq.kv_batch_get({keys!r}, 'p'); result = [float(row.sum()) / row.numel() for row in data['x'].unbind()]"


@pytest.fixture(params=[False, True], ids=["arenas", "pool"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Network, Host, Host]]:
    """The controller's host and one that joined it."""
    network = Network(2, tmp_path)
    one, two = network.hosts
    pool = {"pool": True, "master_server_address": f"{one.ip}:0", "global_segment_size": 256 << 20}
    settings = pool if request.param else {}
    backend = {"storage_backend": "MooncakeStore", "MooncakeStore": settings}
    address = one.serve(one.ip, backend=backend, timeout_s=WITHIN_S)
    two.serve("", join=f"tcp:{address}", timeout_s=WITHIN_S)
    yield network, one, two
    network.close()


def put(host: Host, keys: list[str], value: float) -> None:
    host.run(PUT.format(keys=keys, count=len(keys), width=WIDTH, value=value))


def got(host: Host, keys: list[str]) -> list[float]:
    found: list[float] = host.run(GET.format(keys=keys))
    return found


def has(host: Host, keys: list[str], values: list[float]) -> bool:
    try:
        return got(host, keys) == values
    except AgentError:
        return False


def test_a_host_that_is_cut_off_is_told_so_in_time_and_nothing_is_lost(hosts: tuple[Network, Host, Host]) -> None:
    network, one, two = hosts
    put(one, ["a", "b"], 1.0)
    put(two, ["c", "d"], 2.0)
    assert got(one, ["c", "a"]) == [2.0, 1.0]
    network.cut(two.number)
    try:
        for call in (lambda: got(two, ["a"]), lambda: put(two, ["e"], 3.0)):
            begun = time.monotonic()
            with pytest.raises(AgentError) as caught:
                call()
            assert caught.value.kind in ("DeadlineExceeded", "ServiceUnavailable")
            assert time.monotonic() - begun < WITHIN_S + 4  # a put has 2 s more for its answer
        assert got(one, ["b"]) == [1.0]
        put(one, ["f"], 4.0)
    finally:
        network.mend(two.number)
    until(lambda: has(two, ["f", "a"], [4.0, 1.0]), "the return of the network")
    until(lambda: has(one, ["c", "d"], [2.0, 2.0]), "the return of the host")
    put(two, ["e"], 5.0)
    assert got(one, ["e"]) == [5.0]
