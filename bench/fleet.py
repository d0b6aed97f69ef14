"""Writer and reader agents of every system, started when first needed and replaced when one was lost."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.agent import FROM_REPOSITORY, ROOT
from bench.process import Agent, AgentError

PEERS = ("tq", "ray")
NUM_CPUS = 16
START_DEADLINE_S = 120.0
CONFIG: dict[str, Any] = {"controller": {"polling_mode": True}}


class Unavailable(RuntimeError):
    """This system can't be measured; the text says why."""


@dataclass(frozen=True)
class Pair:
    """The two processes between which a system carries data."""

    writer: Agent
    reader: Agent

    @property
    def alive(self) -> bool:
        return self.writer.alive and self.reader.alive


class Fleet:
    """Owns every process of a run. `peer_python` makes or finds the peers' interpreter and may raise."""

    def __init__(self, peer_python: Callable[[], Path] | None, logs: Path) -> None:
        self.connections: dict[str, dict[str, Any]] = {}
        self._find_peer_python = peer_python
        self._peer_python: Path | None = None
        self._logs = logs
        self._pairs: dict[str, Pair] = {}
        self._failed: dict[str, str] = {}
        self._head: Agent | None = None
        self._plain: Agent | None = None
        self._num_started = 0
        self._cwd = tempfile.TemporaryDirectory(prefix="tqb-cwd-")
        self._token = secrets.token_hex(32)

    def agent(
        self, name: str, system: str, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Agent:
        """Start one agent of a system, with these variables besides; the caller ends it. May raise Unavailable."""
        python = self._python(system)
        self._num_started += 1
        log = self._logs / f"{self._num_started:02d}-{name}.log"
        variables = self._environment(system) | dict(environment or {})
        return Agent(name, system, python, variables, Path(self._cwd.name), log, prefix)

    def pair(self, system: str, config: dict[str, Any] | None = None) -> Pair:
        """The system's writer and reader, started if there are none or one was lost.

        Raises Unavailable when they can't be started; a peer that failed to start is not tried again.
        """
        if system in self._failed:
            raise Unavailable(self._failed[system])
        pair = self._pairs.get(system)
        if pair is not None and pair.alive:
            return pair
        self.discard(system)
        try:
            self._pairs[system] = pair = self._start(system, config or CONFIG)
        except (AgentError, OSError, RuntimeError) as error:
            if system in PEERS:
                self._failed[system] = str(error)
            raise Unavailable(str(error)) from error
        return pair

    def has(self, system: str) -> bool:
        """Whether the system's agents run now."""
        return system in self._pairs and self._pairs[system].alive

    @contextmanager
    def fresh(self, system: str, config: dict[str, Any]) -> Iterator[Pair]:
        """A writer and reader that nothing was done with, started with `config`; ended afterwards."""
        self.discard(system)
        try:
            yield self.pair(system, config)
        finally:
            self.discard(system)

    @contextmanager
    def crew(self, system: str, num: int) -> Iterator[list[Agent]]:
        """`num` more processes that joined the system of `pair`; ended afterwards."""
        agents: list[Agent] = []
        try:
            for number in range(num):
                agents.append(self.agent(f"{system}-{number}", system))
            connection = self.connections[system]
            joining = [agent.send("life.attach", connection=connection) for agent in agents]
            for agent, operation in zip(agents, joining, strict=True):
                agent.receive(operation, START_DEADLINE_S)
            yield agents
        finally:
            for agent in agents:
                agent.end()

    def plain(self) -> Agent:
        """An agent of our interpreter that joins no system: it copies memory and builds payloads."""
        if self._plain is None or not self._plain.alive:
            self._plain = self.agent("plain", "plain")
        return self._plain

    def cluster_pid(self) -> int:
        """Process that started the peers' Ray cluster; its descendants are the cluster."""
        assert self._head is not None
        return self._head.pid

    def discard(self, system: str) -> None:
        """End a system's agents, if it has any."""
        pair = self._pairs.pop(system, None)
        if pair is not None:
            pair.reader.end()
            pair.writer.end()

    def rest(self) -> None:
        """End all agents that earlier cases left, and the memory that they keep. They start anew when needed."""
        for system in list(self._pairs):
            self.discard(system)
        if self._plain is not None:
            self._plain.end()

    def close(self) -> None:
        """End every process that was started."""
        self.rest()
        if self._head is not None:
            self._head.end()
        self._cwd.cleanup()

    def _start(self, system: str, config: dict[str, Any]) -> Pair:
        options: dict[str, Any] = {"config": config}
        if system in PEERS:
            options["cluster"] = self._cluster()
        agents: list[Agent] = []
        try:
            for role in ("writer", "reader"):
                agents.append(self.agent(f"{system}-{role}", system))
            writer, reader = agents
            connection = writer.call("life.serve", START_DEADLINE_S, options=options)
            self.connections[system] = connection
            reader.call("life.attach", START_DEADLINE_S, connection=connection)
        except BaseException:
            for agent in reversed(agents):
                agent.end()
            raise
        return Pair(writer, reader)

    def _cluster(self) -> str:
        if self._head is None or not self._head.alive:
            self._head = self.agent("ray-head", "ray-head")
            self.connections["ray-head"] = self._head.call(
                "life.serve", START_DEADLINE_S, options={"num_cpus": NUM_CPUS}
            )
        return str(self.connections["ray-head"]["cluster"])

    def _python(self, system: str) -> Path:
        if system == "ours-ray" and importlib.util.find_spec("ray") is None:
            raise Unavailable(f"{sys.executable} does not have ray")
        return Path(sys.executable) if system in FROM_REPOSITORY else self._peers()

    def _peers(self) -> Path:
        if self._find_peer_python is None:
            raise Unavailable("peers were switched off")
        if self._peer_python is None:
            self._peer_python = self._find_peer_python()
        return self._peer_python

    def _environment(self, system: str) -> dict[str, str]:
        """Without PYTHONPATH and addresses of other runs: a peer must not find our package, nor ours a foreign server.

        The cluster gets a token of its own, so that Ray writes none into the home directory.
        """
        dropped = ("PYTHONPATH", "RAY_", "TQ_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        if system in ("ours", "plain"):
            return kept
        if system == "ours-ray":
            kept["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))  # for the workers of Ray
        return kept | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
