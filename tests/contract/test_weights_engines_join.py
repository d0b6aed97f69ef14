"""Replicas that come late, and the servers that they load from."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from engines import Process, Site, expected

from transfer_queue.errors import (
    AccessDenied,
    DeadlineExceeded,
    DigestMismatch,
    NotInitialized,
    ServiceUnavailable,
    VersionGone,
)
from transfer_queue.wire.address import parse_address

Start = Callable[..., Site]


def late(here: Site, **info: Any) -> Process:
    """A replica that knows the token, and no trainer."""
    one = here.receiver(len(here.receivers))
    here.receivers.append(one)
    one.call("init_transfer_engine", {"address": "", "token": here.init_info["token"], "stall_s": 0.3, **info})
    return one


@pytest.mark.parametrize(("engine", "info"), [("shm", {}), ("tcp", {}), ("tcp", {"anchor_every": 3}), ("disk", {})])
def test_the_newest_version_can_be_had_without_an_update(engine: str, info: dict[str, Any], site: Start) -> None:
    here = site(engine, num=1, **info)
    one = here.receiver(1)
    here.receivers.append(one)
    one.call("init_transfer_engine", here.init_info)
    with pytest.raises(VersionGone, match="no version"):
        one.call("join", {"timeout_s": 5.0})
    for seed in (1, 2):
        here.send(seed)
    newest = here.receiver(2)
    here.receivers.append(newest)
    newest.call("init_transfer_engine", here.init_info)
    if engine == "disk":
        here.end_trainer()
    assert newest.call("join", {"timeout_s": 5.0}) == 2
    assert here.roots() == [expected(2)] * 3


def test_who_joins_while_a_difference_is_being_committed_is_given_all_of_the_version_before(site: Start) -> None:
    here = site("tcp", anchor_every=3)
    here.send(1)
    one = here.receiver(2)
    one.call("init_transfer_engine", here.init_info)
    joined: list[int] = []

    def hook(name: str, when: str) -> None:
        if (name, when) == ("finish_weight_update", "before"):
            joined.append(one.call("join", {"timeout_s": 5.0}))

    try:
        assert here.send(2, hook=hook).kind == "delta"
    finally:
        here.receivers.append(one)
    assert joined == [1]
    assert one.call("join", {"timeout_s": 5.0}) == 2
    assert here.roots() == [expected(2)] * 3


def test_peers_are_enough_when_the_trainer_is_dead(site: Start) -> None:
    here = site("tcp", anchor_every=10)
    for seed in (1, 2, 3):
        here.send(seed)
    peers = [one.call("serve_installed") for one in here.receivers]
    here.end_trainer()
    first = late(here)
    assert first.call("join_peers", peers, 5.0) == 3
    peers.append(first.call("serve_installed"))
    for one in here.receivers[:2]:
        one.kill()
    del here.receivers[:2]
    second = late(here)
    assert second.call("join_peers", peers, 5.0) == 3
    assert here.roots() == [expected(3)] * 2
    assert first.call("installed") == second.call("installed")


def test_a_peer_gives_what_it_has_to_those_that_met_the_trainer_that_followed(site: Start) -> None:
    here = site("tcp")
    here.send(1)
    peers = [one.call("serve_installed") for one in here.receivers]
    here.end_trainer()
    here.start_trainer()  # with a token of its own
    here.end_trainer()
    assert late(here).call("join_peers", peers, 5.0) == 1


def test_what_one_peer_cannot_give_comes_from_others(site: Start) -> None:
    here = site("tcp", num=3)
    here.send(1)
    peers = [one.call("serve_installed") for one in here.receivers]
    here.end_trainer()
    good, spoiled, frozen = here.receivers
    spoiled.call("spoil")
    one = late(here)
    frozen.signal(signal.SIGSTOP)
    assert one.call("join_peers", [peers[1], peers[2], peers[0]], 10.0) == 1
    assert one.call("root") == expected(1)
    frozen.signal(signal.SIGCONT)
    other = late(here)
    good.kill()
    del here.receivers[0]
    with pytest.raises((ServiceUnavailable, DeadlineExceeded, DigestMismatch)):
        other.call("join_peers", [peers[0], peers[1]], 3.0)
    assert other.call("installed").version is None
    assert other.call("join_peers", peers, 5.0) == 1


def test_frozen_peers_do_not_cost_the_good_one_its_chance(site: Start) -> None:
    here = site("tcp", num=1)
    here.send(1)
    good = here.receivers[0].call("serve_installed")
    here.end_trainer()
    with ExitStack() as opened:
        frozen = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        peers = [f"tcp:127.0.0.1:{one.getsockname()[1]}" for one in frozen]
        assert late(here, stall_s=10.0).call("join_peers", [*peers, good], 4.0) == 1


def test_a_dead_peer_and_a_wrong_token(site: Start) -> None:
    here = site("tcp", num=1)
    here.send(1)
    peer = here.receivers[0].call("serve_installed")
    one = late(here, token="guessed")
    with pytest.raises(ServiceUnavailable, match="know our token"):
        one.call("join_peers", [peer], 3.0)
    with pytest.raises(AccessDenied):
        one.call("init_transfer_engine", {**here.init_info, "token": "guessed"})
    with pytest.raises(NotInitialized):
        one.call("start_weight_update")
    here.receivers[0].kill()
    with pytest.raises(ServiceUnavailable, match="no server of weights"):
        late(here).call("join_peers", [peer], 3.0)
    del here.receivers[0]


def test_bytes_that_are_no_request_harm_nobody_else(site: Start) -> None:
    here = site("tcp", num=1)
    address = parse_address(here.init_info["address"])
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0\0\0\0\0" + b"\x93" * 16):
        with socket.create_connection((address.host, address.port), timeout=5) as sock:
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
    assert here.send(1).version == 1
    assert here.roots() == [expected(1)]
