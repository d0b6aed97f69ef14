"""Hosts of their own on one machine: network namespaces joined by a switch.

Needs iproute2 and the right to make namespaces (root). Addresses are 10.77.0.N and fd77::N; nothing outside sees any of
it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess


def ip(*arguments: str) -> str:
    """Run the command of that name; what it prints."""
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
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


class Switch:
    """A bridge in a namespace of its own, and whoever is plugged in. Names hold the maker's process id."""

    _made = 0

    def __init__(self, number: int = 77) -> None:
        """`number`: what hosts have in place of the 77 in their addresses."""
        self.number = number
        Switch._made += 1
        self._prefix = f"tq-{os.getpid()}-{Switch._made}"
        self._spaces: list[str] = []
        self._switch = self._space("switch")
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")

    def _space(self, name: str) -> str:
        space = f"{self._prefix}-{name}"
        ip("netns", "add", space)
        self._spaces.append(space)
        return space

    def plug_in(self, number: int, host: str = "", device: str = "eth0") -> str:
        """The name of a namespace (a new one, or `host`) with an interface of that name on the switch."""
        space, port = host or self._space(str(number)), f"port{number}"
        ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", space)
        ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        ip("-n", space, "addr", "add", f"10.{self.number}.0.{number}/24", "dev", device)
        ip("-n", space, "addr", "add", f"fd{self.number}::{number}/64", "dev", device, "nodad")
        for name in ("lo", device):
            ip("-n", space, "link", "set", name, "up")
        return space

    def move(self, number: int, to: int) -> None:
        """Give the host the IPv4 address of number `to` in place of its own, as a new lease of DHCP does."""
        space = f"{self._prefix}-{number}"
        ip("-n", space, "addr", "del", f"10.{self.number}.0.{number}/24", "dev", "eth0")
        ip("-n", space, "addr", "add", f"10.{self.number}.0.{to}/24", "dev", "eth0")

    def cut(self, number: int) -> None:
        """Nothing reaches or leaves the host from now on."""
        ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        ip("-n", self._switch, "link", "set", f"port{number}", "up")

    def limit(self, number: int, mbits: int) -> None:
        """The host's link carries no more than that in each direction from now on (tc-tbf(8))."""
        for space, name in ((self._switch, f"port{number}"), (f"{self._prefix}-{number}", "eth0")):
            rate = ("rate", f"{mbits}mbit", "burst", "256kb", "latency", "20ms")
            _run("tc", "-n", space, "qdisc", "replace", "dev", name, "root", "tbf", *rate)

    def sent_nbytes(self, number: int) -> int:
        """Bytes the host has sent so far."""
        links = json.loads(ip("-n", self._switch, "-s", "-j", "link", "show", "dev", f"port{number}"))
        nbytes: int = links[0]["stats64"]["rx"]["bytes"]
        return nbytes

    def close(self) -> None:
        """Remove every namespace; one lives on without a name until the last process inside it ends."""
        while self._spaces:
            ip("netns", "del", self._spaces.pop())
