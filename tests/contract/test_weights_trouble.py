"""Every call of an update, when its trainer is killed, or a replica is killed, stopped or started anew in it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import until
from fleets import expected
from weights_servers import CODE, METHODS, TOKEN, Leading, Local, Remote

from transfer_queue.errors import DeadlineExceeded, TransferQueueError
from transfer_queue.weights import StateDictSource
from transfer_queue.weights.http import WeightSyncClient

AT_ONCE_S = 10.0  # on a slow machine; the deadline of what is taken over is 600 s


class Place:
    """Servers a and b (b is the one in trouble), and those that lead them."""

    def __init__(self, place: str, child: Callable[[str], Any]) -> None:
        self.place = place
        self.servers: list[Any] = [Remote(child) if place == "http" else Local() for _ in "ab"]
        self.leaders: list[Leading] = []

    def leading(self, kind: str, deadline_s: float = 20.0) -> Leading:
        servers = [one.url for one in self.servers] if self.place == "http" else self.servers
        self.leaders.append(Leading(kind, servers, deadline_s))
        return self.leaders[-1]

    def healthy(self, kind: str) -> list[Any]:
        """Those that are never in trouble: a plain client of this process has one server only."""
        return self.servers[:1] if (self.place, kind) != ("process", "plain") else []

    def in_use(self, kind: str) -> list[Any]:
        return self.servers if (self.place, kind) != ("process", "plain") else self.servers[1:]

    def close(self) -> None:
        for one in self.servers:
            one.mend("stopped")
        for leader in self.leaders:
            leader.close()
        for one in self.servers:
            one.close()


@pytest.fixture
def place(child: Callable[[str], Any]) -> Iterator[Callable[[str], Place]]:
    made: list[Place] = []

    def start(name: str) -> Place:
        made.append(Place(name, child))
        return made[-1]

    yield start
    for one in made:
        one.close()


def serves(one: Any, seed: int) -> bool:
    found = one.ask()
    return (found["root"], found["paused"]) == (expected(seed), False)


@pytest.mark.parametrize("name", ["process", "http"])
@pytest.mark.parametrize("kind", ["plain", "fleet"])
@pytest.mark.parametrize("trouble", ["killed", "stopped", "restarted"])
@pytest.mark.parametrize("call", list(METHODS))
def test_a_replica_in_trouble_costs_the_other_nothing_and_comes_back(
    call: str, trouble: str, kind: str, name: str, place: Callable[[str], Place]
) -> None:
    here = place(name)
    leader = here.leading(kind, deadline_s=4.0 if trouble == "stopped" else 20.0)
    leader.send(1)
    b = here.servers[-1]
    if kind == "plain" and trouble == "stopped" and call in ("abort", "status", "pause", "resume"):
        leader.client._timeout_s = b.patience_s = 1.0  # calls of their own, with the client's time
    is_here = threading.Event()
    leader.before[METHODS[call]] = lambda: (b.trouble(trouble), is_here.set())
    with contextlib.suppress(TransferQueueError):
        leader.provoke(call)
    assert is_here.wait(60), "the trouble"
    sent = call in ("init", "start", "update", "finish") or kind == "fleet"
    if sent and call not in ("abort",):
        for one in here.healthy(kind):
            assert serves(one, 2)
    b.mend(trouble)
    if kind == "plain":
        with contextlib.suppress(TransferQueueError):  # what went wrong in the call before may be told once more
            leader.client.resume_generation()
    leader.deadline_s = 20.0
    leader.send(3)
    if kind == "fleet":
        leader.client.wait_ready(["a", "b"], 20)
    for one in here.in_use(kind):
        assert serves(one, 3)


@pytest.mark.parametrize("kind", ["plain", "fleet"])
@pytest.mark.parametrize("call", list(METHODS))
def test_a_new_trainer_takes_over_at_once_from_one_that_was_killed(
    call: str, kind: str, place: Callable[[str], Place], child: Callable[[str], Any]
) -> None:
    here = place("http")
    dying = child(CODE.format("run_trainer"))
    dying.say(json.dumps([[one.url for one in here.servers], kind, call]))
    assert dying.line() == "here"
    dying.kill()
    new, begun = here.leading(kind), time.monotonic()
    new.send(3)
    assert time.monotonic() - begun < AT_ONCE_S
    if kind == "plain" and call == "pause":
        new.client.resume_generation()  # a pause that was made without an owner is for whoever made it
    for one in here.servers:
        assert serves(one, 3)


@pytest.mark.parametrize("kind", ["plain", "fleet"])
@pytest.mark.parametrize("call", list(METHODS))
def test_a_trainer_that_wakes_after_another_took_over_harms_nothing(
    call: str, kind: str, place: Callable[[str], Place]
) -> None:
    here = place("process")
    old, hanging, awake = here.leading(kind), threading.Event(), threading.Event()
    old.send(1)

    def hang() -> None:
        runs = [one.control.status for one in here.in_use(kind)]
        until(lambda: len({status().run_id for status in runs}) == 1, "the introduction to all")
        hanging.set()
        assert awake.wait(30)

    old.after[METHODS[call]] = hang
    ended: list[Any] = []

    def go_on() -> None:
        try:
            ended.append(old.provoke(call))
        except TransferQueueError as error:
            ended.append(error)

    zombie = threading.Thread(target=go_on)
    zombie.start()
    assert hanging.wait(20)
    new = here.leading(kind)
    new.send(3)
    awake.set()
    zombie.join(30)
    assert ended
    if kind == "plain" and call == "pause":
        here.servers[-1].resume_generation()
    for one in here.in_use(kind):
        until(lambda one=one: serves(one, 3), "that all serve what the new trainer sent")
    new.send(4)
    for one in here.in_use(kind):
        assert serves(one, 4)


def test_calls_whose_caller_gave_them_up_while_the_server_was_stopped_are_not_made(
    place: Callable[[str], Place],
) -> None:
    here = place("http")
    here.leading("plain").send(1)
    server = here.servers[0]
    impatient, patient = (WeightSyncClient(server.url, TOKEN, timeout_s) for timeout_s in (0.2, 30.0))
    calls: list[Callable[[], object]] = [impatient.start_weight_update, lambda: impatient.pause_generation("keep")]
    for call in calls:
        server.trouble("stopped")
        with pytest.raises(DeadlineExceeded):
            call()
        server.mend("stopped")
        found = patient.status()
        assert (found.update, found.paused) == (None, False)


def test_a_plain_client_says_who_missed_a_version(place: Callable[[str], Place]) -> None:
    here = place("http")
    leader = here.leading("plain")
    leader.send(1)
    here.servers[1].trouble("killed")
    report = leader.send(2)
    assert list(report.missed) == [here.servers[1].url]
    here.servers[1].mend("killed")
    assert leader.send(3).missed == {}
    assert all(serves(one, 3) for one in here.servers)


def test_a_new_trainer_begins_while_a_server_of_its_plain_client_is_down(place: Callable[[str], Place]) -> None:
    here = place("http")
    here.leading("plain").send(1)
    here.servers[1].trouble("killed")
    leader = here.leading("plain")
    assert list(leader.send(2).missed) == [here.servers[1].url]
    here.servers[1].mend("killed")
    assert leader.send(3).missed == {}
    assert all(serves(one, 3) for one in here.servers)


def test_the_default_deadlines_do_not_keep_a_healthy_replica_still(place: Callable[[str], Place]) -> None:
    here = place("http")
    leader = here.leading("fleet", deadline_s=60.0)
    leader.send(1)
    leader.before["finish_weight_update"] = lambda: here.servers[1].trouble("stopped")
    running = threading.Thread(target=leader.send, args=(2,))
    running.start()
    begun = time.monotonic()
    healthy = WeightSyncClient(here.servers[0].url, TOKEN)
    until(lambda: healthy.get_weight_version() == "2", "the healthy replica's commit")
    until(lambda: not healthy.is_paused(), "its resume", 5)
    assert time.monotonic() - begun < AT_ONCE_S
    here.servers[1].mend("stopped")
    running.join()
    leader.client.wait_ready(["a", "b"], 30)


def test_a_replica_that_is_frozen_at_the_start_does_not_cost_the_others_the_update(
    place: Callable[[str], Place],
) -> None:
    here = place("http")
    leader = here.leading("fleet", deadline_s=10.0)  # less than a fleet's `call_timeout_s`
    leader.send(1)
    leader.before["start_weight_update"] = lambda: here.servers[1].trouble("stopped")
    leader.send(2)
    assert serves(here.servers[0], 2)
    assert leader.client.ready() == ["a"]
    here.servers[1].mend("stopped")
    leader.client.wait_ready(["a", "b"], 30)


def test_a_server_that_was_started_anew_is_sent_the_adapters_that_it_lacks(place: Callable[[str], Place]) -> None:
    here = place("http")
    leader = here.leading("plain")
    leader.send(1)
    assert leader.trainer is not None
    source = StateDictSource({"a": torch.ones(2)})
    leader.trainer.send_adapter("free", source, {}, for_base=False, deadline_s=20)
    here.servers[1].trouble("restarted")
    leader.send(2)
    assert serves(here.servers[1], 2)
    assert here.servers[1].ask()["adapters"] == ["free"]
    here.servers[1].trouble("restarted")
    leader.trainer.send_adapter("bound", source, {}, deadline_s=20)
    assert serves(here.servers[1], 2)
    assert here.servers[1].ask()["adapters"] == ["bound", "free"]
