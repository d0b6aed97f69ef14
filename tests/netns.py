"""Hosts of their own on one machine: network namespaces joined by a switch, each with one agent process inside.

Needs iproute2 and the right to make namespaces (root). Addresses are 10.77.0.N and fd77::N; nothing outside sees any of
it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKEN = "a-token-nobody-guesses"
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


def ip(*arguments: str) -> str:
    """Run the command of that name; what it prints."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def allowed() -> bool:
    """Whether this process can make network namespaces."""
    name = f"tq-{os.getpid()}-probe"
    if shutil.which("ip") is None:
        return False
    try:
        ip("netns", "add", name)
    except OSError:
        return False
    ip("netns", "del", name)
    return True


class AgentError(Exception):
    """What went wrong inside an agent; `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Network:
    """A switch and hosts 1..N on it."""

    _made = 0

    def __init__(self, hosts: int, run_dir: Path) -> None:
        Network._made += 1
        self._prefix = f"tq-{os.getpid()}-{Network._made}"
        self._switch = self._space("switch")
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        self.hosts = [Host(self, number, run_dir / str(number)) for number in range(1, hosts + 1)]

    def _space(self, name: str) -> str:
        space = f"{self._prefix}-{name}"
        ip("netns", "add", space)
        return space

    def plug_in(self, number: int) -> str:
        """The name of a new namespace with an interface on the switch."""
        space, port = self._space(str(number)), f"port{number}"
        ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        ip("-n", space, "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
        for name in ("lo", "eth0"):
            ip("-n", space, "link", "set", name, "up")
        return space

    def cut(self, number: int) -> None:
        """Nothing reaches or leaves the host from now on."""
        ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        ip("-n", self._switch, "link", "set", f"port{number}", "up")

    def sent_nbytes(self, number: int) -> int:
        """Bytes the host has sent so far."""
        links = json.loads(ip("-n", self._switch, "-s", "-j", "link", "show", "dev", f"port{number}"))
        nbytes: int = links[0]["stats64"]["rx"]["bytes"]
        return nbytes

    def close(self) -> None:
        for host in self.hosts:
            host.close()
            ip("netns", "del", host.space)
        ip("netns", "del", self._switch)


class Host:
    """A namespace and the agent process inside it, which runs the code it is given."""

    def __init__(self, network: Network, number: int, run_dir: Path) -> None:
        self.number = number
        self.ip, self.ip6 = f"10.77.0.{number}", f"fd77::{number}"
        self.run_dir = str(run_dir)
        self.space = network.plug_in(number)
        root = str(Path(__file__).parent.parent)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TQ_")}
        self._agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, f"/var/run/netns/{self.space}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment, "PYTHONPATH": root, "TQ_TOKEN": TOKEN},
        )  # fmt: skip

    def ask(self, code: str) -> None:
        """Start some code; `answer` waits for its end."""
        assert self._agent.stdin is not None
        self._agent.stdin.write(json.dumps(code) + "\n")
        self._agent.stdin.flush()

    def answer(self) -> Any:
        """The `result` that the code set. Raises `AgentError` for what it raised."""
        assert self._agent.stdout is not None
        answer = json.loads(self._agent.stdout.readline())
        if "error" in answer:
            raise AgentError(answer["error"], answer["text"])
        return answer["result"]

    def run(self, code: str) -> Any:
        self.ask(code)
        return self.answer()

    def serve(self, host: str, join: str = "", **client: Any) -> str:
        """Start this host's server; returns its TCP address."""
        conf = {"run_dir": self.run_dir, "server": {"host": host, "join": join}, "client": client}
        return str(self.run(f"tq.init({conf!r}); result = tq.get_client().stats()['tcp']"))

    def close(self) -> None:
        """End the agent, which ends its server."""
        assert self._agent.stdin is not None
        assert self._agent.stdout is not None
        self._agent.stdin.close()
        try:
            self._agent.wait(20)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        self._agent.stdout.close()
