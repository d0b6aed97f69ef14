"""`tq doctor` between hosts with addresses of their own: what crosses the network, and what is said if nothing does."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doctors import DoctorHost, Led, lead

from tools.netns import Switch, allowed, ip

pytestmark = pytest.mark.skipif(not allowed(), reason="making network namespaces needs root")

NBYTES = 32 << 20
PORT = 7001
HERE = "this host"


class Hosts:
    """Host 1 leads, the others serve."""

    def __init__(self) -> None:
        self.switch = Switch(78)
        self._spaces = {1: self.switch.plug_in(1)}
        self.agents: dict[int, DoctorHost] = {}

    def serve(self, number: int, *arguments: str, first: str = "") -> DoctorHost:
        space = self._spaces[number] = self.switch.plug_in(number)
        self.agents[number] = DoctorHost(*arguments, place=self.at(number), space=space, first=first)
        return self.agents[number]

    def at(self, number: int) -> str:
        return HERE if number == 1 else f"10.78.0.{number}:{PORT}"

    def lead(self, *arguments: str) -> Led:
        return lead(*arguments, others=[self.at(number) for number in self.agents], space=self._spaces[1])

    def refuse(self, one: int, other: int) -> None:
        """Nothing goes between the two any more."""
        ip("-n", self._spaces[one], "route", "add", "prohibit", f"10.78.0.{other}")

    def pairs(self, *numbers: int) -> set[tuple[str, str]]:
        return set(itertools.permutations(map(self.at, numbers), 2))

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        self.switch.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], tuple[str, ...]]:
    """The arguments for rows in files of a directory, which all hosts of this machine share."""

    def make() -> tuple[str, ...]:
        rows, config = tmp_path / "rows", tmp_path / "tq.yaml"
        rows.mkdir()
        config.write_text(json.dumps({"backend": {"Files": {"url": f"file://{rows}"}}}))
        return "--backend", "Files", "--config", str(config)

    return make


def test_every_host_reads_what_every_other_host_wrote(hosts: Hosts) -> None:
    simple = ("--backend", "SimpleStorage")
    for number in (2, 3):
        hosts.serve(number, *simple)
    done = hosts.lead(*simple)
    assert (done.code, done.errors, done.said["works"], done.troubles) == (0, "", True, [])
    assert done.pairs == dict.fromkeys(hosts.pairs(1, 2, 3), True)
    for number in (1, 2, 3):
        assert hosts.switch.sent_nbytes(number) >= 2 * NBYTES, "two others read of each host"
    for number, host in enumerate(done.said["hosts"], 1):
        assert host["host"] == hosts.at(number)
        assert host["address"].startswith(f"10.78.0.{number}:")
        assert {"transfer-queue", "torch", "msgspec"} <= set(host["libraries"])
        assert host["free_nbytes"] > 0
        assert isinstance(host["rdma_devices"], list)
    assert hosts.agents[2].close() == 0


def test_hosts_that_cannot_reach_each_other_are_named_though_both_reach_the_first(hosts: Hosts) -> None:
    simple = ("--backend", "SimpleStorage")
    for number in (2, 3):
        hosts.serve(number, *simple)
    hosts.refuse(2, 3)
    done = hosts.lead(*simple, "--timeout-s", "3")
    assert (done.code, done.said["works"]) == (1, False)
    assert {pair for pair, works in done.pairs.items() if not works} == hosts.pairs(2, 3)
    assert set(done.pairs) == hosts.pairs(1, 2, 3)
    assert {code for _, code in done.troubles} <= {"unavailable", "deadline"}
    assert all(f"let {hosts.at(2)} reach" in one["remedy"] or f"let {hosts.at(3)} reach" in one["remedy"]
               for one in done.said["troubles"])  # fmt: skip


def test_a_host_that_is_cut_off_is_named_and_the_others_are_tried(hosts: Hosts) -> None:
    simple = ("--backend", "SimpleStorage")
    for number in (2, 3):
        hosts.serve(number, *simple)
    hosts.switch.cut(3)
    began = time.monotonic()
    done = hosts.lead(*simple, "--timeout-s", "3")
    assert time.monotonic() - began < 90
    assert done.code == 1
    assert done.pairs == dict.fromkeys(hosts.pairs(1, 2), True)
    assert [where for where, _ in done.troubles] == [hosts.at(3)]
    assert f"--serve {hosts.at(3)}" in done.said["troubles"][0]["remedy"]


def test_files_of_a_directory_that_all_hosts_share(hosts: Hosts, files: Callable[[], tuple[str, ...]]) -> None:
    arguments = files()
    hosts.serve(2, *arguments)
    done = hosts.lead(*arguments)
    assert (done.code, done.pairs) == (0, dict.fromkeys(hosts.pairs(1, 2), True))
    assert "fsspec" in done.said["hosts"][1]["libraries"]
    rows = Path(arguments[-1]).parent / "rows"
    assert list(rows.glob("tq-*")) == [], "what was written is deleted"


def test_a_directory_that_a_host_has_for_itself_is_no_shared_one(
    hosts: Hosts, files: Callable[[], tuple[str, ...]]
) -> None:
    arguments = files()
    rows = Path(arguments[-1]).parent / "rows"
    hosts.serve(2, *arguments, first=f"mount -t tmpfs none {rows}")
    done = hosts.lead(*arguments, "--timeout-s", "5")
    assert (done.code, set(done.pairs.values())) == (1, {False})
    assert [where.partition(" ")[2].partition(" from")[0] for where, _ in done.troubles] == ["writes", "reads"]
    assert all("is a mount away, or is this another place?" in one["text"] for one in done.said["troubles"])


def test_a_full_disk_is_said_of_the_host_that_has_it(hosts: Hosts, files: Callable[[], tuple[str, ...]]) -> None:
    arguments = files()
    rows = Path(arguments[-1]).parent / "rows"
    hosts.serve(2, *arguments, first=f"mount -t tmpfs -o size=8m none {rows}")
    done = hosts.lead(*arguments, "--timeout-s", "3")
    assert done.code == 1
    assert (f"{hosts.at(2)} writes", "store_full") in done.troubles
