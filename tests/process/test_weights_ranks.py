"""Trainers of several ranks (FSDP2 and its kin, on gloo), whose shards come together in servers; ranks in trouble."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Child, until
from weights import root
from weights_ranks import CODE, WORLD, Model, drawn, nudged

from transfer_queue.errors import InvalidInput
from transfer_queue.weights import Control, Receiver, StateDictSource, Swap
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.transport import registry

TOKEN = "only for these tests"


class Ranks:
    """The processes, each of which answers what it was told."""

    def __init__(self, start: Callable[[str], Child], url: str | list[str], mesh: str, **more: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        setting = json.dumps({"port": port, "mesh": mesh, "urls": url, "token": TOKEN, **more})
        self.all = [start(CODE.format(rank)) for rank in range(WORLD)]
        for one in self.all:
            one.say(setting)
        assert [one.line() for one in self.all] == ["ready"] * WORLD

    def tell(self, text: str, ranks: list[int] | None = None) -> None:
        for rank in range(WORLD) if ranks is None else ranks:
            self.all[rank].say(text)

    def send(self, deadline_s: float = 20.0, ranks: list[int] | None = None, how: str = "send") -> list[dict[str, Any]]:
        """What each of these says of an update, in their order."""
        ranks = list(range(WORLD)) if ranks is None else ranks
        self.tell(f"{how} {deadline_s}", ranks)
        return [json.loads(self.all[rank].line()) for rank in ranks]

    def send_while(self, how: str, step: str, rank: int) -> list[dict[str, Any]]:
        """What the others say of the update after a good one, in which this rank is stopped (`hang`, `die`)."""
        self.tell("train 5")
        self.send()
        self.tell("train 6")
        self.tell(f"{how} {step}", [rank])
        self.tell("send 3", [rank])
        return self.send(3.0, [one for one in range(WORLD) if one != rank])


class Site:
    def __init__(self, start: Callable[[str], Child]) -> None:
        self._start = start
        self.module = Model()
        self.receiver = Receiver(Swap(self.module))
        self.engine = registry.engine("tcp")(self.receiver)
        self.server = serve(Control(self.engine, self.receiver), port=0, token=TOKEN)

    def ranks(self, mesh: str = "fsdp", **more: Any) -> Ranks:
        return Ranks(self._start, self.server.url, mesh, **more)

    def has(self, seed: int, *nudges: int) -> bool:
        """Whether the server has these weights, bit for bit."""
        model = drawn(seed)
        for number in nudges:
            nudged(model, number)
        mine, wanted = self.module.state_dict(), model.state_dict()
        return all(
            torch.equal(mine[name].view(-1).view(torch.uint8), wanted[name].view(-1).view(torch.uint8))
            for name in wanted
        )


@pytest.fixture
def site(child: Callable[[str], Child]) -> Iterator[Site]:
    made = Site(child)
    with made.server:
        yield made
    made.engine.shutdown()


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "dim1", "fsdp_tp"])
def test_the_shards_of_all_ranks_are_the_weights_of_the_server(site: Site, mesh: str) -> None:
    ranks = site.ranks(mesh)
    for version, seed in enumerate([5, 6], 1):
        ranks.tell(f"train {seed}")
        reports = ranks.send()
        assert reports == [reports[0]] * WORLD
        assert reports[0]["version"] == version
        assert site.has(seed)
        assert site.receiver.installed().root == reports[0]["root"]
    assert reports[0]["nbytes"] < 1.6 * sum(tensor.nbytes for tensor in drawn(0).state_dict().values())  # once, aligned


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "dim1"])
def test_shards_on_a_gpu(site: Site, mesh: str) -> None:
    ranks = site.ranks(mesh, device="cuda", info={"anchor_every": 9})
    ranks.tell("train 5")
    assert [one["kind"] for one in ranks.send()] == ["full"] * WORLD
    assert site.has(5)
    ranks.tell("nudge 1")
    assert [one["kind"] for one in ranks.send()] == ["delta"] * WORLD
    assert site.has(5, 1)


def test_receivers_of_several_ranks_give_each_other_what_they_have(site: Site, child: Callable[[str], Child]) -> None:
    other = Site(child)
    with other.server:
        info = {"peers": True, "bucket_nbytes": 256}
        ranks = Ranks(child, [site.server.url, other.server.url], "fsdp_tp", info=info)
        for version, seed in enumerate([5, 6], 1):
            ranks.tell(f"train {seed}")
            assert [one["version"] for one in ranks.send()] == [version] * WORLD
            assert site.has(seed)
            assert other.has(seed)
        assert site.engine.num_served_nbytes + other.engine.num_served_nbytes > 0
    other.engine.shutdown()


def test_a_fleet_is_brought_up_by_all_ranks_and_survives_one_in_trouble(
    site: Site, child: Callable[[str], Child]
) -> None:
    other = Site(child)
    with other.server:
        fleet = {"a": site.server.url, "b": other.server.url}
        ranks = Ranks(child, [], "hsdp", fleet=fleet, info={"anchor_every": 9})
        ranks.tell("train 5")
        ranks.send()
        ranks.tell("nudge 1")
        assert [one["kind"] for one in ranks.send(how="publish")] == ["delta"] * WORLD
        assert site.has(5, 1)
        assert other.has(5, 1)
        with torch.no_grad():
            other.module.layers[0].up.weight[0, 0] += 1
        ranks.tell("nudge 2")
        assert [one["kind"] for one in ranks.send()] == ["delta"] * WORLD  # one that can take it is enough
        until(lambda: other.has(5, 1, 2), "that the other one has caught up", 30)
        ranks.tell("train 6")
        found = ranks.send(1.0, [0, 1, 2])
        assert all("rank 3 did not come" in one["text"] for one in found)
        assert site.has(5, 1, 2)
        assert [one["version"] for one in ranks.send()] == [4] * WORLD
        until(lambda: site.has(6) and other.has(6), "the next version at both", 30)
    other.engine.shutdown()


def test_all_ranks_publish(site: Site) -> None:
    ranks = site.ranks()
    for version, seed in enumerate([5, 6], 1):
        ranks.tell(f"train {seed}")
        assert [one["version"] for one in ranks.send(how="publish")] == [version] * WORLD
        assert site.has(seed)
    ranks.tell("train 7")
    found = ranks.send(1.0, [0, 1, 2], how="publish")
    assert all("rank 3 did not come" in one["text"] for one in found)
    assert [one["version"] for one in ranks.send()] == [3] * WORLD
    assert site.has(7)


@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_hear_at_once_of_one_that_gets_no_thread_for_what_it_published(site: Site, rank: int) -> None:
    ranks = site.ranks()
    ranks.tell("starve", [rank])
    found = ranks.send(60, how="publish")
    assert all(one["took_s"] < 30 for one in found)
    assert all("can't start new thread" in found[one]["text"] for one in (0, rank))
    assert not any("error" in one for one in ranks.send(how="publish"))
    assert site.has(0)


def test_ranks_that_gather_full_tensors_give_what_is_dealt_to_them(site: Site) -> None:
    """As a source of vLLM's does it: all of them read all tensors, or those that read on would wait for ever."""
    ranks = site.ranks("fsdp_tp", gathers=True)
    for version, seed in enumerate([5, 6], 1):
        ranks.tell(f"train {seed}")
        reports = ranks.send()
        assert reports == [reports[0]] * WORLD
        assert reports[0]["version"] == version
        assert site.has(seed)


@pytest.mark.parametrize("anchor_every", [1, 10])
def test_a_late_server_gets_the_buckets_of_all_ranks(site: Site, anchor_every: int) -> None:
    ranks = site.ranks(info={"anchor_every": anchor_every})
    kinds = []
    for step in ("train 7", "nudge 3", "nudge 4"):
        ranks.tell(step)
        kinds.append(ranks.send()[0]["kind"])
    assert kinds[1] == ("full" if anchor_every == 1 else "delta")
    late = Model()
    receiver = Receiver(Swap(late))
    engine = registry.engine("tcp")(receiver)
    told = site.engine._control.address
    assert told is not None
    engine.init_transfer_engine({"address": f"tcp:{told.host}:{told.port}", "token": told.token})
    engine.join(timeout_s=20)
    engine.shutdown()
    assert root(dict(late.state_dict())) == root(dict(site.module.state_dict()))


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "dim1", "fsdp_tp"])
def test_ranks_send_what_changed(site: Site, mesh: str) -> None:
    ranks = site.ranks(mesh, info={"anchor_every": 10})
    ranks.tell("train 5")
    first = ranks.send()[0]
    nudges: list[int] = []
    for number in (1, 4, 9):
        nudges.append(number)
        ranks.tell(f"nudge {number}")
        reports = ranks.send()
        assert reports == [reports[0]] * WORLD
        assert reports[0]["kind"] == "delta"
        assert reports[0]["nbytes"] < first["nbytes"] / 5
        assert site.has(5, *nudges)
        assert site.receiver.installed().root == reports[0]["root"]
    ranks.tell("train 6")
    assert ranks.send()[0]["kind"] == "delta"  # all of it, which is not smaller
    assert site.has(6)


def test_ranks_publish_what_changed(site: Site) -> None:
    ranks = site.ranks("fsdp_tp", info={"anchor_every": 10})
    ranks.tell("train 5")
    ranks.send(how="publish")
    for nudges in ([1], [1, 4]):
        ranks.tell(f"nudge {nudges[-1]}")
        assert [one["kind"] for one in ranks.send(how="publish")] == ["delta"] * WORLD
        assert site.has(5, *nudges)
    with torch.no_grad():
        site.module.layers[0].up.weight[0, 0] += 1
    ranks.tell("nudge 3")
    assert [one["kind"] for one in ranks.send(how="publish")] == ["full"] * WORLD
    assert site.has(5, 1, 4, 3)


def test_a_server_that_lacks_the_base_of_a_difference_is_sent_all_of_it_by_all_ranks(site: Site) -> None:
    ranks = site.ranks("fsdp_tp", info={"anchor_every": 10})
    ranks.tell("train 5")
    ranks.send()
    with torch.no_grad():
        site.module.layers[0].up.weight[0, 0] += 1
    ranks.tell("nudge 3")
    assert [one["kind"] for one in ranks.send()] == ["full"] * WORLD
    assert site.has(5, 3)
    ranks.tell("nudge 2")
    assert [one["kind"] for one in ranks.send()] == ["delta"] * WORLD
    assert site.has(5, 3, 2)


def test_after_a_rank_was_frozen_in_a_difference_the_next_version_is_whole_or_good(site: Site) -> None:
    ranks = site.ranks(info={"anchor_every": 10})
    found = ranks.send_while("hang", "served", 2)
    assert {one["error"] for one in found} == {"DeadlineExceeded"}
    assert site.has(5)
    os.kill(ranks.all[2].pid, signal.SIGCONT)
    assert "error" in json.loads(ranks.all[2].line())
    ranks.tell("nudge 1")
    reports = ranks.send()
    assert reports == [reports[0]] * WORLD
    assert site.has(6, 1)


def test_replicas_that_drifted_apart_are_named_on_every_rank(site: Site) -> None:
    ranks = site.ranks("hsdp")
    ranks.tell("train 5")
    ranks.send()
    ranks.tell("drift", [3])
    found = ranks.send()
    assert {one["error"] for one in found} == {"ShapeMismatch"}
    assert all("drifted apart" in one["text"] for one in found)
    assert site.has(5)
    ranks.tell("train 6")
    assert ranks.send()[0]["version"] == 2
    assert site.has(6)


def test_ranks_that_send_different_versions_are_refused_before_anything_is_packed(site: Site) -> None:
    ranks = site.ranks()
    ranks.tell("train 5")
    ranks.tell("number 7", [0, 1, 3])
    ranks.tell("number 8", [2])
    found = ranks.send()
    assert {one["error"] for one in found} == {"InvalidInput"}
    assert all("rank 2 sends version 8, rank 0 7" in one["text"] for one in found)
    assert [one["version"] for one in ranks.send()] == [1] * WORLD
    assert site.has(5)


def test_a_rank_with_another_model_is_named_on_every_rank(site: Site) -> None:
    ranks = site.ranks()
    ranks.tell("train 5")
    ranks.tell("widen", [3])
    found = ranks.send()
    assert {one["error"] for one in found} == {"ShapeMismatch"}
    assert all("rank 3 has" in one["text"] or "another one as" in one["text"] for one in found)
    assert site.receiver.installed().version is None


@pytest.mark.parametrize("step", ["offer", "packed", "served"])
def test_of_a_rank_that_is_killed_all_others_hear_in_time(site: Site, step: str) -> None:
    found = site.ranks().send_while("die", step, 2)
    assert {one["error"] for one in found} <= {"DeadlineExceeded", "ServiceUnavailable"}
    assert all(one["took_s"] < 3 + 2 for one in found)
    assert site.has(5)


@pytest.mark.parametrize("step", ["offer", "packed", "served"])
def test_a_rank_that_was_frozen_is_in_the_next_update(site: Site, step: str) -> None:
    ranks = site.ranks()
    found = ranks.send_while("hang", step, 2)
    assert {one["error"] for one in found} == {"DeadlineExceeded"}
    assert all("rank 2 did not come" in one["text"] and one["took_s"] < 3 + 2 for one in found)
    assert site.has(5)
    os.kill(ranks.all[2].pid, signal.SIGCONT)
    assert "error" in json.loads(ranks.all[2].line())
    assert [one["version"] for one in ranks.send()] == [2] * WORLD
    assert site.has(6)


@pytest.mark.parametrize("step", ["offer", "packed", "served"])
def test_of_a_leader_that_is_gone_all_others_hear_in_time(site: Site, step: str) -> None:
    found = site.ranks().send_while("die", step, 0)
    assert {one["error"] for one in found} <= {"DeadlineExceeded", "ServiceUnavailable"}
    assert all(one["took_s"] < 3 + 2 for one in found)
    assert site.has(5)


def test_a_rank_that_comes_too_late_is_in_the_next_update(site: Site) -> None:
    ranks = site.ranks()
    ranks.tell("train 5")
    found = ranks.send(1.0, [0, 1, 2])
    assert {one["error"] for one in found} == {"DeadlineExceeded"}
    assert all("rank 3 did not come" in one["text"] for one in found)
    assert [one["version"] for one in ranks.send()] == [1] * WORLD
    assert site.has(5)


def test_ranks_meet_at_an_address_that_they_are_given(site: Site, child: Callable[[str], Child]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = """
        import sys, torch
        from transfer_queue.weights import StateDictSource
        from transfer_queue.weights.http import WeightSyncClient
        from transfer_queue.weights.transport import registry
        from transfer_queue.weights.version.boxes import Box
        from transfer_queue.weights.version.sharded import TensorShard

        class Half(StateDictSource):
            def shards(self):
                return [TensorShard("weight", torch.float32, (4, 4), Box(({rank} * 2, 0), (2, 4)))]
            def parts(self):
                yield "weight", torch.full((2, 4), float({rank}))

        source = Half({{"weight": torch.empty(4, 4)}})
        info = {{"rank": {rank}, "world": 2, "meet": "tcp:127.0.0.1:{port}", "token": "t", "timeout_s": 20}}
        if {rank} == 0:
            client = WeightSyncClient({url!r}, {token!r}, timeout_s=20)
            trainer = registry.trainer("tcp").trainer_init({{**info, "port": {port}}}, client=client, source=source)
        print("ready", flush=True)
        sys.stdin.readline()
        if {rank} == 1:
            trainer = registry.trainer("tcp").trainer_init(info, client=None, source=source)
        print(trainer.send_weights(deadline_s=20).version, flush=True)
        trainer.shutdown()
    """
    live = torch.nn.Linear(4, 4, bias=False)
    receiver = Receiver(Swap(live))
    engine = registry.engine("tcp")(receiver)
    try:
        with serve(Control(engine, receiver), port=0, token=TOKEN) as server:
            told = {"port": port, "url": server.url, "token": TOKEN}
            ranks = [child(code.format(rank=rank, **told)) for rank in range(2)]
            for one in ranks:
                assert one.line() == "ready"
                one.say()
            assert [one.line() for one in ranks] == ["1", "1"]
    finally:
        engine.shutdown()
    assert live.weight[:, 0].tolist() == [0, 0, 1, 1]


def meeting(child: Callable[[str], Child], *, has_store: bool = True) -> list[Child]:
    """Two ranks of a process group. `meet SECONDS`: they meet, rank 0 with a client; `alone`: without one; `reduce`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = """
        import os, sys, torch
        import torch.distributed as dist
        from transfer_queue.weights import StateDictSource
        from transfer_queue.weights.transport import registry

        class Nobody:
            def init_weight_transfer_engine(self, info):
                pass

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
        dist.init_process_group("gloo", rank={rank}, world_size=2)
        if not {has_store}:
            del dist.distributed_c10d._get_default_store
        source, met = StateDictSource({{}}), []
        print("ready", flush=True)
        for line in sys.stdin:
            what, _, timeout_s = line.strip().partition(" ")
            info = {{"rank": {rank}, "world": 2, "timeout_s": float(timeout_s or 60)}}
            try:
                if what == "reduce":
                    total = torch.tensor([{rank} + 1.0])
                    dist.all_reduce(total)
                    print(total.item(), flush=True)
                    continue
                client = None if what == "alone" or {rank} else Nobody()
                met.append(registry.trainer("tcp").trainer_init(info, client=client, source=source))
                print("met", flush=True)
            except Exception as error:
                print(type(error).__name__, error, flush=True)
        for one in met:
            one.shutdown()
        dist.destroy_process_group()
    """
    ranks = [child(code.format(rank=rank, port=port, has_store=has_store)) for rank in range(2)]
    assert [one.line() for one in ranks] == ["ready"] * 2
    return ranks


def said(ranks: list[Child], text: str) -> list[str]:
    for one in ranks:
        one.say(text)
    return [one.line() for one in ranks]


@pytest.mark.parametrize("has_store", [True, False])
def test_what_keeps_rank_0_from_meeting_is_raised_by_all_ranks(child: Callable[[str], Child], has_store: bool) -> None:
    ranks = meeting(child, has_store=has_store)
    for _ in range(2):
        assert said(ranks, "alone") == [
            "InvalidInput rank 0 needs a client for the receivers",
            "InvalidInput rank 0: rank 0 needs a client for the receivers",
        ]
    assert said(ranks, "meet 60") == ["met", "met"]
    assert said(ranks, "reduce") == ["3.0", "3.0"]
    assert [one.finish() for one in ranks] == ["", ""]


def test_a_rank_that_did_not_wait_for_rank_0_leaves_the_group_as_it_was_and_meets_it_at_its_next_call(
    child: Callable[[str], Child],
) -> None:
    ranks = meeting(child)
    assert said(ranks[1:], "meet 0.2")[0].startswith("DeadlineExceeded")
    assert said(ranks, "meet 60") == ["met", "met"]
    assert said(ranks, "reduce") == ["3.0", "3.0"]
    assert [one.finish() for one in ranks] == ["", ""]


def test_a_rank_that_comes_when_rank_0_has_given_up_is_told_so_and_both_meet_at_their_next_calls(
    child: Callable[[str], Child],
) -> None:
    ranks = meeting(child)
    late = "rank 1 did not come to `trainer_init` in time: `timeout_s` has to cover the slowest rank"
    assert said(ranks[:1], "meet 0.5") == [f"DeadlineExceeded {late}"]
    assert said(ranks[1:], "meet 60") == [f"DeadlineExceeded rank 0: {late}"]
    assert said(ranks, "meet 60") == ["met", "met"]
    assert said(ranks, "reduce") == ["3.0", "3.0"]
    assert [one.finish() for one in ranks] == ["", ""]


@pytest.mark.parametrize("info", [{"rank": 2}, {"rank": -1}, {"meet": "tcp:127.0.0.1:1"}])
def test_settings_of_ranks_that_make_no_sense_are_refused(info: dict[str, Any]) -> None:
    source = StateDictSource({"weight": torch.empty(2)})
    given = {"rank": 0, "world": 2, **info}
    with pytest.raises(InvalidInput):
        registry.trainer("tcp").trainer_init(given, client=WeightSyncClient("http://127.0.0.1:1", "t"), source=source)


def test_the_last_report_reaches_all_ranks_though_rank_0_leaves_at_once(site: Site) -> None:
    ranks = site.ranks()
    for rank in ranks.all:
        rank.say("train 5")
        rank.say("last 20")
    assert [json.loads(rank.line())["version"] for rank in ranks.all] == [1] * WORLD
    assert [rank.finish() for rank in ranks.all] == [""] * WORLD
    assert site.has(5)
