"""Whatever happens to a fleet: every replica serves one decided version, the ready ones the newest; all come back."""

from __future__ import annotations

import contextlib

from fleets import Site, expected
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from transfer_queue.errors import CommitFailed, DigestMismatch, ServiceUnavailable, TransferQueueError

WHO = st.integers(0, 9)
FAULTS = {
    "start_weight_update": ServiceUnavailable("the connection is lost"),
    "update_weights": DigestMismatch("damaged"),
    "finish_weight_update": CommitFailed("copying failed"),
    "status": ServiceUnavailable("the connection is lost"),
}


class Fleets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.site = Site(2, info={"anchor_every": 3})
        self.decided: dict[tuple[int, str], int] = {}
        self.initial = {one.root() for one in self.site.servers.values()}
        self.seed = 0

    def _server(self, who: int) -> str:
        return sorted(self.site.servers)[who % len(self.site.servers)]

    @rule()
    def send(self) -> None:
        self.seed += 1
        before = self.site.fleet.newest()
        if self.site.trainer is None:
            return
        with contextlib.suppress(TransferQueueError):
            self.site.send(self.seed)
        after = self.site.fleet.newest()
        if after is not None and after != before:
            self.decided[after.version, after.epoch] = self.seed

    @rule(who=WHO, call=st.sampled_from(sorted(FAULTS)))
    def fail_once(self, who: int, call: str) -> None:
        self.site.servers[self._server(who)].faults[call] = FAULTS[call]

    @rule(who=WHO)
    def end(self, who: int) -> None:
        self.site.servers[self._server(who)].down = True

    @rule(who=WHO)
    def start_anew(self, who: int) -> None:
        server = self.site.servers[self._server(who)]
        server.restart()
        self.initial.add(server.root())

    @precondition(lambda self: len(self.site.servers) < 4)
    @rule()
    def join(self) -> None:
        name = f"late{len(self.initial)}"
        self.initial.add(self.site.add(name, wait_s=None).root())

    @precondition(lambda self: len(self.site.servers) > 1)
    @rule(who=WHO)
    def leave(self, who: int) -> None:
        name = self._server(who)
        self.site.fleet.leave(name)
        self.site.servers.pop(name).stop()

    @rule()
    def start_trainer(self) -> None:
        with contextlib.suppress(ServiceUnavailable):  # nobody is there to meet it
            self.site.start_trainer()

    @invariant()
    def each_serves_a_whole_version(self) -> None:
        possible = self.initial | {expected(seed) for seed in self.decided.values()}
        assert set(self.site.roots().values()) <= possible

    @invariant()
    def the_ready_ones_serve_the_newest_unless_they_ended_since(self) -> None:
        newest = self.site.fleet.newest()
        for one in self.site.fleet.status():
            if one.ready:
                assert newest is not None
                assert (one.version, one.label) == (newest.version, newest.label)

    def teardown(self) -> None:
        try:
            for server in self.site.servers.values():
                server.faults.clear()
                if server.down:
                    server.restart()
            if self.site.trainer is None:
                self.site.start_trainer()
            self.seed += 1
            self.site.send(self.seed)
            self.site.fleet.wait_ready(list(self.site.servers), 15)
            assert set(self.site.roots().values()) == {expected(self.seed)}
        finally:
            self.site.close()


def test_any_order_of_versions_faults_joins_and_leaves() -> None:
    few = settings(
        max_examples=12, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # threads take part: smaller examples would fail at other places
    )  # fmt: skip
    run_state_machine_as_test(Fleets, settings=few)  # type: ignore[no-untyped-call]
