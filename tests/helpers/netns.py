"""Hosts of their own on one machine (tools/netns.py), each with one agent process inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from paths import SOURCES
from zygote import CHILDREN

from tools.netns import Switch

TOKENS = {"TQ_TOKEN": "a-token-nobody-guesses", "TQ_UNIT_TOKEN": "a-token-of-units-alone"}
AGENT = """
import ctypes, json, os, sys, traceback
space = os.open(sys.argv[1], os.O_RDONLY)
assert ctypes.CDLL(None, use_errno=True).setns(space, 0x40000000) == 0, "setns"  # CLONE_NEWNET
os.close(space)
import torch
import transfer_queue as tq
names = {"tq": tq, "torch": torch}
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "agent", "exec"), names)
        answer = {"result": names.pop("result", None)}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
tq.close()
"""


class AgentError(Exception):
    """What went wrong inside an agent; `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Network(Switch):
    """A switch and hosts 1..N on it (or `first` and on)."""

    def __init__(self, hosts: int, run_dir: Path, network: int = 77, first: int = 1) -> None:
        super().__init__(network)
        self.hosts = [Host(self, number, run_dir / str(number)) for number in range(first, first + hosts)]

    def add(self) -> Host:
        """One host more."""
        last = self.hosts[-1]
        made = Host(self, last.number + 1, Path(last.run_dir).parent / str(last.number + 1))
        self.hosts.append(made)
        return made

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        super().close()


class Host:
    """A namespace and the agent process inside it, which runs the code it is given."""

    def __init__(self, network: Network, number: int, run_dir: Path) -> None:
        self.number = number
        self.ip, self.ip6 = f"10.{network.number}.0.{number}", f"fd{network.number}::{number}"
        self.run_dir = str(run_dir)
        self.space = network.plug_in(number)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TQ_")}
        self._agent = CHILDREN.start(
            ["-c", AGENT, f"/var/run/netns/{self.space}"], {**environment, "PYTHONPATH": SOURCES, **TOKENS}
        )

    def ask(self, code: str) -> None:
        """Start some code; `answer` waits for its end."""
        self._agent.stdin.write(json.dumps(code).encode() + b"\n")
        self._agent.stdin.flush()

    def answer(self) -> Any:
        """The `result` that the code set. Raises `AgentError` for what it raised."""
        answer = json.loads(self._agent.stdout.readline())
        if "error" in answer:
            raise AgentError(answer["error"], answer["text"])
        return answer["result"]

    def run(self, code: str) -> Any:
        self.ask(code)
        return self.answer()

    def serve(self, host: str, join: str = "", backend: dict[str, Any] | None = None, **client: Any) -> str:
        """Start this host's server; returns its TCP address."""
        conf: dict[str, Any] = {"run_dir": self.run_dir, "server": {"host": host, "join": join}, "client": client}
        if backend is not None:
            conf["backend"] = backend
        return str(self.run(f"tq.init({conf!r}); result = tq.get_client().stats()['tcp']"))

    def close(self) -> None:
        """End the agent, which ends its server."""
        self._agent.stdin.close()
        try:
            self._agent.wait(20)
        except subprocess.TimeoutExpired:
            self._agent.send_signal(signal.SIGKILL)
            self._agent.wait()
        self._agent.stdout.close()
