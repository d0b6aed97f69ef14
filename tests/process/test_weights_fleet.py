"""Fleets: two phases, fences, and catching up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateResult
from typing import Any

import pytest
import torch
from conftest import freeze, until
from fleets import SEND_S, Server, Site, expected
from weights import Direct

from transfer_queue.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    ServiceUnavailable,
    StaleVersion,
    UnknownTensor,
    WrongEpoch,
)
from transfer_queue.weights import State, StateDictSource
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.transport import registry

Start = Callable[..., Site]


def sending_until(here: Site, condition: Callable[[], bool], what: str) -> int:
    """Send one version after the other; the seed of the last one."""
    seed = 1

    def is_so() -> bool:
        nonlocal seed
        seed += 1
        here.send(seed)
        return condition()

    until(is_so, what, 10)
    return seed


@pytest.fixture
def site() -> Iterator[Start]:
    made: list[Site] = []

    def start(*args: Any, **more: Any) -> Site:
        made.append(Site(*args, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_all_replicas_commit_a_version_together(site: Start) -> None:
    here = site(3)
    assert here.fleet.ready() == []
    for seed in (1, 2, 3):
        here.send(seed)
        assert here.fleet.ready() == ["a", "b", "c"]
        assert set(here.roots().values()) == {expected(seed)}
    report = here.fleet.last
    assert report is not None
    assert (report.version, report.committed, report.missed, report.pause_s) == (3, ("a", "b", "c"), {}, 0.0)
    assert [(one.version, one.label, one.reason) for one in here.fleet.status()] == [(3, "3", "")] * 3


def test_no_replica_commits_before_all_that_will_have_verified(site: Start) -> None:
    here = site(2)
    here.send(1)
    seen: list[str] = []
    here.servers["b"].hooks["update_weights"] = lambda: seen.append(here.servers["a"].root())
    b = here.servers["b"].receiver
    verified: list[bool] = []
    here.servers["a"].hooks["finish_weight_update"] = lambda: verified.append(
        b.state in (State.READY, State.COMMITTING) or b.installed().version == 2
    )
    here.send(2)
    assert (seen, verified) == ([expected(1)], [True])


def test_a_replica_that_cannot_take_a_version_is_fenced_and_catches_up(site: Start) -> None:
    here = site(2)
    here.send(1)
    fenced: list[list[str]] = []
    here.servers["a"].hooks["finish_weight_update"] = lambda: fenced.append(here.fleet.ready())
    here.servers["b"].faults["update_weights"] = DigestMismatch("bytes were damaged")
    here.send(2)
    assert fenced[0] == ["a"], "fenced before anybody has committed"
    assert here.fleet.last is not None
    assert here.fleet.last.missed == {"b": "bytes were damaged"}
    here.fleet.wait_ready(["a", "b"], 10)
    assert set(here.roots().values()) == {expected(2)}
    assert not here.servers["b"].gate.is_paused()


def test_a_fenced_replica_is_paused_until_it_is_ready(site: Start) -> None:
    here = site(2)
    here.send(1)
    b = here.servers["b"]
    paused: list[bool] = []
    b.hooks["start_weight_update"] = lambda: paused.append(b.gate.is_paused())
    b.faults["update_weights"] = DigestMismatch("once")
    here.send(2)
    here.fleet.wait_ready(["b"], 10)
    assert paused == [False, True]
    assert not b.gate.is_paused()


def test_who_was_paused_by_a_fence_goes_on_with_the_next_version(site: Start) -> None:
    here = site(1)
    here.send(1)
    a = here.servers["a"]

    def refuse() -> None:
        raise DigestMismatch("damaged every time")

    a.hooks["update_weights"] = refuse
    a.restart()
    until(lambda: a.gate.is_paused(), "the pause of a replica that cannot catch up")
    a.hooks.clear()
    here.send(2)  # nobody is ready: it is for all
    here.fleet.wait_ready(["a"], 10)
    assert a.root() == expected(2)
    assert not a.gate.is_paused()


def test_who_was_paused_by_a_fence_goes_on_when_it_leaves_the_fleet(site: Start) -> None:
    here = site(2)
    here.send(1)
    b = here.servers["b"]

    def refuse() -> None:
        raise DigestMismatch("damaged every time")

    b.hooks["update_weights"] = refuse
    here.send(2)
    until(lambda: b.gate.is_paused(), "the pause of a replica that cannot catch up")
    here.fleet.leave("b")
    assert not b.gate.is_paused()


def test_a_version_that_nobody_can_take_is_given_up(site: Start) -> None:
    here = site(2)
    here.send(1)
    for one in here.servers.values():
        one.faults["update_weights"] = UnknownTensor("the model has no such thing")
    with pytest.raises(UnknownTensor, match=r"0 of 2 replicas have verified it: a: .*; b: "):
        here.send(2)
    assert here.fleet.ready() == ["a", "b"]
    assert set(here.roots().values()) == {expected(1)}
    assert here.send(3).version == 3


def test_with_min_ready_all_one_fault_is_enough_to_give_it_up(site: Start) -> None:
    here = site(2, min_ready=None)
    here.send(1)
    here.servers["b"].faults["update_weights"] = DigestMismatch("damaged")
    with pytest.raises(DigestMismatch):
        here.send(2)
    assert here.fleet.ready() == ["a", "b"]
    assert set(here.roots().values()) == {expected(1)}
    c = here.add("c")
    assert c.root() == expected(1), "what was given up is not what late ones get"
    here.send(3)
    assert set(here.roots().values()) == {expected(3)}


def test_with_min_ready_all_a_ready_one_that_does_not_answer_its_heartbeat_is_one_of_them(site: Start) -> None:
    here = site(2, min_ready=None)
    here.send(1)
    b, asked = here.servers["b"], threading.Event()
    b.hooks["status"] = lambda: (asked.set(), b.released.wait(20))
    assert asked.wait(20)
    with pytest.raises(ServiceUnavailable, match="1 of 2 replicas"):
        here.send(2, deadline_s=1.0)
    assert set(here.roots().values()) == {expected(1)}
    b.hooks.clear()
    b.released.set()
    here.send(3)
    assert set(here.roots().values()) == {expected(3)}


@pytest.mark.parametrize("anchor_every", [1, 10])
@pytest.mark.parametrize("engine", ["shm", "tcp", "disk"])
def test_a_late_replica_gets_the_newest_version(engine: str, anchor_every: int, site: Start, tmp_path: Any) -> None:
    if engine == "disk" and anchor_every > 1:
        return
    info = {"folder": str(tmp_path / "v")} if engine == "disk" else {"anchor_every": anchor_every}
    here = site(1, engine, info)
    kinds = [here.send(seed).kind for seed in (1, 2, 3)]
    assert kinds == ["full"] + (["delta"] * 2 if anchor_every > 1 else ["full"] * 2)
    late = here.add("late")
    assert late.root() == expected(3)
    assert here.send(4).kind == kinds[1]
    assert set(here.roots().values()) == {expected(4)}


@pytest.mark.parametrize("anchor_every", [1, 1000])
def test_a_replica_that_versions_overtake_on_its_way_to_each_is_taken_along_by_the_next(
    site: Start, anchor_every: int
) -> None:
    here = site(1, "tcp", {"anchor_every": anchor_every})
    here.send(1)
    late = here.servers["late"] = Server("tcp")

    def wait_for_a_newer_version() -> None:
        before = here.fleet.newest()
        until(lambda: here.fleet.newest() != before, "a newer version", 10)

    late.hooks["init_weight_transfer_engine"] = wait_for_a_newer_version  # whenever its own thread brings it one
    here.fleet.join("late", late)
    newest = sending_until(here, lambda: here.fleet.ready() == ["a", "late"], "the replica's turn")
    assert set(here.roots().values()) == {expected(newest)}
    assert not late.gate.is_paused()


def test_a_replica_that_is_too_slow_for_a_version_holds_up_one_of_them_only(site: Start) -> None:
    here = site(1, "tcp")
    here.send(1)
    late = here.servers["late"] = Server("tcp")
    begun: list[int] = []

    def begin() -> None:
        before = here.fleet.newest()
        if here.fleet._round is not None and any(one.name == "late" for one in here.fleet._round.members):
            begun.append(1)
            raise DeadlineExceeded("too slow")
        until(lambda: here.fleet.newest() != before, "a newer version", 10)

    late.hooks["start_weight_update"] = begin
    here.fleet.join("late", late)
    newest = sending_until(here, lambda: bool(begun), "a round with it")
    for seed in range(newest + 1, newest + 21):
        here.send(seed)
    assert here.fleet.ready() == ["a"]
    assert len(begun) == 1
    late.hooks.clear()
    here.fleet.wait_ready(["late"], 40)  # it rests longer after each failure, for 30 s at most
    assert set(here.roots().values()) == {expected(seed)}


def test_a_replica_that_was_started_anew_is_found_out_and_caught_up(site: Start) -> None:
    here = site(2)
    here.send(1)
    here.servers["b"].stop()
    until(lambda: here.fleet.ready() == ["a"], "the fence")
    here.send(2)
    here.servers["b"].restart()
    here.fleet.wait_ready(["b"], 10)
    assert here.servers["b"].root() == expected(2)


def test_a_replica_that_lacks_the_base_gets_all_of_the_version_where_another_one_is_down(site: Start) -> None:
    here = site(2, "tcp", {"anchor_every": 10}, heartbeat_s=30.0)
    here.send(1)
    a, b = here.servers["a"], here.servers["b"]
    b.hooks["start_weight_update"] = lambda: (b.hooks.pop("start_weight_update"), b.restart())
    a.faults["update_weights"] = ServiceUnavailable("it ended just now")
    a.hooks["abort_weight_update"] = a.stop
    assert here.send(2).kind == "full"
    assert here.fleet.last is not None
    assert here.fleet.last.committed == ("b",)
    assert b.root() == expected(2)


def test_a_commit_that_fails_at_one_replica_fences_it(site: Start) -> None:
    here = site(2)
    here.send(1)
    here.servers["a"].faults["finish_weight_update"] = CommitFailed("copying failed")
    here.send(2)
    assert here.fleet.last is not None
    assert (here.fleet.last.committed, list(here.fleet.last.missed)) == (("b",), ["a"])
    here.fleet.wait_ready(["a", "b"], 10)
    assert set(here.roots().values()) == {expected(2)}


def after_a_commit_that_failed_everywhere(site: Start) -> Site:
    """Version 2 was decided, nobody has committed it, and the only replica was brought to it since."""
    here = site(1)
    here.send(1)
    here.servers["a"].faults["finish_weight_update"] = CommitFailed("copying failed")
    with pytest.raises(CommitFailed, match="nobody has committed"):
        here.send(2)
    here.fleet.wait_ready(["a"], 10)
    return here


def test_a_commit_that_fails_everywhere_is_told_and_made_good(site: Start) -> None:
    here = after_a_commit_that_failed_everywhere(site)
    assert here.servers["a"].root() == expected(2)


def test_an_adapter_is_for_the_version_that_was_decided_also_where_no_replica_has_committed_it(site: Start) -> None:
    here = after_a_commit_that_failed_everywhere(site)
    assert here.trainer is not None
    here.trainer.send_adapter("a", StateDictSource({"x": torch.ones(2)}), {}, deadline_s=10)
    installed = here.servers["a"].receiver.installed()
    assert (installed.version, list(installed.adapters), installed.outdated) == (2, ["a"], ())


def test_a_number_that_a_run_has_given_to_other_weights_before_makes_no_replica_ready(site: Start) -> None:
    here = site(2, info={"run_id": "job"})
    here.send(1)
    before, here.fleet = here.fleet, Fleet(here.servers, heartbeat_s=0.02, call_timeout_s=5.0)
    before.close()
    here.servers["b"].restart()
    here.start_trainer()  # it counts from 1 again
    here.send(2)
    asked: list[bool] = []
    here.servers["a"].hooks["status"] = lambda: asked.append(True)
    until(lambda: len(asked) > 2, "its thread to ask it")
    assert here.fleet.ready() == ["b"]
    assert here.roots() == {"a": expected(1), "b": expected(2)}
    here.send(3)
    here.fleet.wait_ready(["a", "b"], 10)
    assert set(here.roots().values()) == {expected(3)}


def test_a_replica_that_hangs_costs_the_others_no_version(site: Start) -> None:
    here = site(2)
    here.send(1)
    b = here.servers["b"]
    b.hooks["update_weights"] = lambda: b.released.wait(30)
    assert here.send(2, deadline_s=1.0).version == 2
    assert here.fleet.ready() == ["a"]
    b.hooks.clear()
    b.released.set()
    here.fleet.wait_ready(["b"], 10)
    assert set(here.roots().values()) == {expected(2)}


def update_again(here: Site) -> None:
    assert here.send(3).version == 3


def begin_another_run(here: Site) -> None:
    here.start_trainer()
    assert here.send(3).version == 1


@pytest.mark.parametrize("go_on", [update_again, begin_another_run])
def test_who_goes_on_after_an_update_that_was_late_waits_for_its_calls(
    site: Start, go_on: Callable[[Site], None]
) -> None:
    here = site(1)
    here.send(1)
    a = here.servers["a"]
    a.hooks["update_weights"] = lambda: a.released.wait(30)
    with pytest.raises(DeadlineExceeded):
        here.send(2, deadline_s=0.3)
    a.hooks.clear()
    with ThreadPoolExecutor(1) as threads:
        going_on = threads.submit(go_on, here)
        with pytest.raises(LateResult):
            going_on.result(0.1)
        a.released.set()
        going_on.result(2 * SEND_S)
    assert a.root() == expected(3)


def test_versions_rise_within_an_epoch_and_epochs_end(site: Start) -> None:
    here = site(1)
    here.send(1)
    first = here.trainer
    assert first is not None
    here.fleet.start_weight_update()
    with pytest.raises(StaleVersion):
        here.fleet.update_weights({"version": 1, "epoch": first.epoch})
    here.start_trainer()
    assert here.send(7).version == 1
    here.fleet.start_weight_update()
    with pytest.raises(WrongEpoch):
        here.fleet.update_weights({"version": 9, "epoch": first.epoch})
    here.fleet.update_weights({"version": 9, "abort": True})
    assert here.servers["a"].root() == expected(7)


def test_members_join_and_leave_at_any_time(site: Start) -> None:
    here = site(0)
    here.send(1)
    assert here.add("x").root() == expected(1)
    y = here.add("y", wait_s=None)
    here.send(2)
    here.fleet.wait_ready(["x", "y"], 10)
    here.fleet.leave("x")
    here.send(3)
    assert (here.fleet.ready(), y.root()) == (["y"], expected(3))
    assert here.servers["x"].root() == expected(2)
    with pytest.raises(InvalidInput, match="member already"):
        here.fleet.join("y", Server())
    with pytest.raises(InvalidInput, match="no replica"):
        here.fleet.leave("x")


@pytest.mark.parametrize("name", ["call_timeout_s", "catch_up_timeout_s", "heartbeat_s"])
def test_a_time_that_nobody_can_wait_for_is_refused_when_a_fleet_is_made(name: str) -> None:
    for seconds in (float("inf"), float("nan"), -1.0, "10"):
        with pytest.raises(InvalidInput, match="a number of seconds"):
            Fleet(**{name: seconds})


@pytest.mark.parametrize("member", ["http://127.0.0.1:8000", None, StateDictSource({})])
def test_what_is_no_client_is_no_member(member: Any) -> None:
    server = Server()
    with pytest.raises(InvalidInput, match="replica 'b' is no client"):
        Fleet({"a": server, "b": member})
    server.stop()


@pytest.mark.parametrize("status", [None, {"label": "1"}])
def test_a_member_that_answers_nonsense_is_fenced_until_it_answers(site: Start, status: Any) -> None:
    class Odd(Server):
        is_odd = True

        def status(self) -> Any:
            return status if self.is_odd else self.control.status()

    here = site(1)
    here.send(1)
    odd = here.servers["odd"] = Odd()
    here.fleet.join("odd", odd)
    until(lambda: "as its status" in here.fleet.status()[1].reason, "it to be found out")
    assert here.fleet.ready() == ["a"]
    odd.is_odd = False
    here.fleet.wait_ready(["odd"], 10)
    assert odd.root() == expected(1)


def test_a_member_that_lacks_a_call_is_fenced_with_its_name(site: Start) -> None:
    here = site(1)
    here.send(1)
    here.fleet.join("b", Direct())  # type: ignore[arg-type]
    until(lambda: "b has no method 'get_weight_version'" in here.fleet.status()[1].reason, "it to be found out")
    assert here.send(2).version == 2
    assert here.fleet.ready() == ["a"]


def test_waiting_for_a_replica_that_cannot_be_reached_says_why(site: Start) -> None:
    here = site(1)
    here.send(1)
    dead = Server()
    dead.stop()
    here.servers["dead"] = dead
    with pytest.raises(DeadlineExceeded, match="nobody listens"):
        here.fleet.join("dead", dead, wait_s=0.2)
    lonely = Fleet({"dead": dead})
    with pytest.raises(ServiceUnavailable, match="nobody met the trainer"):
        registry.trainer("shm").trainer_init({}, client=lonely, source=here.source)
    lonely.close()


def test_requests_see_one_version_over_a_pause(site: Start) -> None:
    here = site(1, pause="keep")
    here.send(1)
    a = here.servers["a"]
    states: list[bool] = []
    a.hooks["finish_weight_update"] = lambda: states.append(a.gate.is_paused())
    here.send(2)
    assert states == [True]
    assert not a.gate.is_paused()
    assert here.fleet.last is not None
    assert here.fleet.last.pause_s > 0


def test_adapters_are_versions_of_the_fleet_too(site: Start) -> None:
    here = site(2)
    here.send(1)
    trainer = here.trainer
    assert trainer is not None
    for label, for_base in (("bound", True), ("free", False)):
        trainer.send_adapter(label, StateDictSource({"x": torch.ones(2)}), {}, for_base=for_base, deadline_s=10)
    assert here.fleet.ready() == ["a", "b"]
    late = here.add("late")
    assert sorted(late.receiver.installed().adapters) == ["bound", "free"]
    here.send(2)
    later = here.add("later")
    assert sorted(later.receiver.installed().adapters) == ["free"], "the other is for weights that are gone"
    here.servers["a"].faults["update_weights"] = DigestMismatch("damaged")
    trainer.remove_adapter("free", deadline_s=10)
    here.fleet.wait_ready(["a", "b", "late", "later"], 10)
    assert here.add("last").receiver.installed().adapters == {}


def add_adapter(here: Site, seed: int) -> None:
    assert here.trainer is not None
    here.trainer.send_adapter("free", StateDictSource({"x": torch.ones(2)}), {}, for_base=False, deadline_s=10)


@pytest.mark.parametrize("update", [add_adapter, Site.send])
def test_a_server_that_was_started_anew_is_not_ready_with_what_an_update_brings_alone(
    site: Start, update: Callable[[Site, int], Any]
) -> None:
    here = site(2, call_timeout_s=0.5)
    here.send(1)
    add_adapter(here, 1)
    server, committed = here.servers["a"], threading.Event()

    def restart() -> None:
        del server.hooks["start_weight_update"]
        server.restart()

    server.hooks["start_weight_update"] = restart
    server.hooks["finish_weight_update"] = committed.set
    server.hooks["status"] = lambda: committed.is_set() and server.released.wait(10)
    update(here, 2)
    assert committed.is_set()
    assert here.fleet.ready() == ["b"]
    server.released.set()
    here.fleet.wait_ready(["a"], 10)
    assert sorted(server.receiver.installed().adapters) == ["free"]
    assert len(set(here.roots().values())) == 1


def test_a_server_that_was_started_anew_and_first_sent_a_difference_is_not_ready_without_its_adapters(
    site: Start,
) -> None:
    here = site(1, "tcp", {"anchor_every": 10}, call_timeout_s=0.5)
    here.send(1)
    add_adapter(here, 1)
    server, committed = here.servers["a"], threading.Event()
    server.hooks["status"] = lambda: committed.is_set() and server.released.wait(10)
    server.hooks["start_weight_update"] = lambda: (server.hooks.pop("start_weight_update"), server.restart())
    server.hooks["finish_weight_update"] = committed.set
    assert here.send(2).kind == "full"
    assert committed.is_set()
    assert here.fleet.ready() == []
    server.released.set()
    here.fleet.wait_ready(["a"], 10)
    assert sorted(server.receiver.installed().adapters) == ["free"]


def test_an_adapter_that_came_before_any_weights_is_asked_of_all_replicas(site: Start) -> None:
    here = site(2)
    here.servers["a"].faults["finish_weight_update"] = CommitFailed("copying failed")
    add_adapter(here, 1)
    assert here.servers["a"].receiver.installed().adapters == {}
    here.send(1)
    here.fleet.wait_ready(["a", "b"], 10)
    assert sorted(here.servers["a"].receiver.installed().adapters) == ["free"]


def test_over_http(site: Start) -> None:
    here = site(0)
    one, two = Server(), Server()
    here.servers.update(one=one, two=two)
    with serve(one.control, token="t") as first, serve(two.control, token="t") as second:
        here.fleet.join("one", WeightSyncClient(first.url, "t"))
        here.send(1)
        here.fleet.join("two", WeightSyncClient(second.url, "t"), wait_s=10)
        here.send(2)
        assert here.fleet.ready() == ["one", "two"]
        assert set(here.roots().values()) == {expected(2)}
        assert [found.label for found in here.fleet.status()] == ["2", "2"]
        here.fleet.close()


REPLICA = """
    import sys
    sys.path.insert(0, "tests/helpers")
    import torch
    torch.set_num_threads(1)
    from weights import Net, copy_of, root
    from transfer_queue.weights import Control, Receiver, Swap
    from transfer_queue.weights.transport import registry
    from transfer_queue.weights.http import serve
    module = Net()
    receiver = Receiver(Swap(module))
    with serve(Control(registry.engine("tcp")(receiver), receiver), token="t") as server:
        print(server.url)
        while input():
            print(root(copy_of(module)))
"""


def test_killed_and_frozen_processes(site: Start, child: Callable[[str], Any]) -> None:
    here = site(0, "tcp", call_timeout_s=4.0)
    processes = {name: child(REPLICA) for name in ("killed", "frozen", "well")}
    for name, process in processes.items():
        here.fleet.join(name, WeightSyncClient(process.line(), "t", timeout_s=3.0))
    here.send(1)
    assert here.fleet.ready() == ["killed", "frozen", "well"]
    processes["killed"].kill()
    freeze(processes["frozen"].pid)
    here.send(2, deadline_s=30.0)
    assert here.fleet.ready() == ["well"]
    processes["frozen"].process.send_signal(signal.SIGCONT)
    here.fleet.wait_ready(["frozen", "well"], 30)
    for name in ("frozen", "well"):
        processes[name].say("?")
        assert processes[name].line() == expected(2)
    here.fleet.close()
