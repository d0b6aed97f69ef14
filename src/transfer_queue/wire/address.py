"""Where a server is: `unix:PATH` or `tcp:HOST:PORT`, and the token that opens it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
from typing import NamedTuple

from transfer_queue.errors import ConfigError
from transfer_queue.wire.peer import check_peer, still_listens
from transfer_queue.wire.token import token_from_environment

PEER_TIMEOUT_S = 15
MAX_CANDIDATES = 8
SIOCGIFADDR = 0x8915
HOST_AND_PORT = re.compile(r"[\w.\-]+:\d{1,5}", re.ASCII)
TIMEVAL = struct.Struct("@ll")
TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)


class SocketMissing(OSError):
    """A server that runs cannot be reached: its socket was removed."""


class Address(NamedTuple):
    """`path` names a unix socket; otherwise `host` and `port` count, and `token` must be the server's."""

    path: str = ""
    host: str = ""
    port: int = 0
    token: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"Address({self})"  # without the token

    @property
    def is_local(self) -> bool:
        return bool(self.path)

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected socket, blocking with the given timeout. Raises OSError; `AccessDenied`, which is one, where a
        unix socket may be another user's (`peer.check_peer`); and `reach`'s."""
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                limit_sending(sock, timeout_s)  # connect(2) on unix(7) waits so long for a place in a full queue
                self.reach(sock)
                check_peer(self.path, sock)
                sock.settimeout(timeout_s)
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self.host, self.port), timeout=timeout_s)
        tune(sock)
        return sock

    def reach(self, sock: socket.socket) -> None:
        """Connect a unix socket with this one. Raises OSError; `SocketMissing` where nothing lies there any more, but
        the server that made it runs."""
        try:
            sock.connect(self.path)
        except FileNotFoundError as error:
            if not still_listens(self.path):
                raise
            raise SocketMissing(
                f"the socket {self.path} was removed while its server runs. Who is connected can go on: save there "
                "what it holds, end the service, and name a run_dir (TQ_RUN_DIR) that nobody clears"
            ) from error


def limit_sending(sock: socket.socket, timeout_s: float) -> None:
    """Let no connect or send take longer (SO_SNDTIMEO, socket(7))."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(timeout_s))


def timeval(timeout_s: float) -> bytes:
    """A limit as the socket options take it; never zero, which would be none."""
    seconds = int(timeout_s)
    return TIMEVAL.pack(seconds, max(int((timeout_s - seconds) * 1e6), 0 if seconds else 1))


def tune(sock: socket.socket) -> None:
    """Send at once, and notice within `PEER_TIMEOUT_S` that the other host is gone (tcp(7))."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PEER_TIMEOUT_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PEER_TIMEOUT_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, PEER_TIMEOUT_S * 1000)


def is_everywhere(host: str) -> bool:
    """Whether listening on `host` means every address of this host (0.0.0.0, ::, and other ways to write them)."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][4][0]
    except OSError:
        return False  # a name
    address = ipaddress.ip_address(found)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether a host is named so that each host means itself."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_loopback_header(host: str) -> bool:
    """Whether a Host header, with or without a port, names this machine to itself (a foreign name means DNS
    rebinding)."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name.lower())


def is_here(host: str) -> bool:
    """Whether an address is one of this host. Nothing is sent (bind(2))."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def host_towards(address: Address) -> str:
    """The address of this host on the way to `address`: what it sends from. Nothing is sent (connect(2) on udp(7))."""
    family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        return str(probe.getsockname()[0])


def advertised(host: str) -> str:
    """What others are to be told of a server that listens on `host`: the same, unless that means every address. Then
    the one that this host sends from to far away, else one of its network interfaces, else its loopback."""
    if not is_everywhere(host):
        return host
    far, near = ("2001:db8::1", "::1") if ":" in host else ("192.0.2.1", "127.0.0.1")  # of documentation (RFC 5737)
    with contextlib.suppress(OSError):  # no way to there
        return host_towards(Address(host=far, port=9))
    return next(iter(_addresses6() if ":" in host else _addresses()), near)


def candidates(host: str) -> list[str]:
    """What others may be told of a server that listens on `host`: `advertised` first, then, if it listens everywhere,
    the host's other addresses, for those that are in another network."""
    first = advertised(host)
    if not is_everywhere(host):
        return [first]
    return list(dict.fromkeys([first, *(_addresses6() if ":" in host else _addresses())]))[:MAX_CANDIDATES]


def _addresses6() -> list[str]:
    """The global IPv6 addresses of this host's interfaces (/proc/net/if_inet6: their scope is 00)."""
    try:
        with open("/proc/net/if_inet6") as file:
            lines = [line.split() for line in file]
    except OSError:
        return []
    return [str(ipaddress.IPv6Address(bytes.fromhex(line[0]))) for line in lines if line[3] == "00"]


def _addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, without the loopback (SIOCGIFADDR, netdevice(7))."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [one for one in found if not is_loopback(one)]


def parse_address(text: str, token: str = "") -> Address:
    """The address in `text`; a bare path or a run directory means its unix socket. A path becomes absolute: it is for
    processes that are elsewhere, and for this one when it has gone elsewhere.

    The token comes from `token`, else from the environment variable TQ_TOKEN, else from the file TQ_TOKEN_FILE names.
    Raises `ConfigError`.
    """
    if text.startswith("tcp:"):
        host, colon, port = text[4:].rpartition(":")
        if not colon or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
            raise ConfigError(f"address {text!r}: expected tcp:HOST:PORT")
        return Address(host=host.strip("[]"), port=int(port), token=token or token_from_environment())
    path = text.removeprefix("unix:")
    if not path:
        raise ConfigError("an empty address")
    if path == text and HOST_AND_PORT.fullmatch(text) and not os.path.exists(text):
        raise ConfigError(f"address {text!r}: no such path; a server that is reached by TCP is tcp:{text}")
    path = path if path.startswith(("/", "\0")) else os.path.abspath(path)
    return Address(path=os.path.join(path, "tq.sock") if os.path.isdir(path) else path)
