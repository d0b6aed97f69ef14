"""How programs written for TransferQueue name a service to a client: `ZMQServerInfo`, without ZeroMQ here."""

from __future__ import annotations

from typing import Any

from transfer_queue.errors import ConfigError
from transfer_queue.wire.address import Address, parse_address

REQUESTS = "request_handle_socket"  # the port that TransferQueue's clients ask
_known: dict[str, list[Address]] = {}  # by `ZMQServerInfo.id`: what this process was told, tokens among it


class ZMQServerInfo:
    """A service as configurations and Ray carry it: who it is, and where. It has no token, so it may be printed.

    `id` differs for every service. `ports` has the TCP port at `ip` as "request_handle_socket", where there is one;
    `address` is where processes of its host reach it.
    """

    def __init__(self, role: str, id: str, ip: str, ports: dict[str, int], address: str = "") -> None:
        self.role = role
        self.id = id
        self.ip = ip
        self.ports = ports
        self.address = address

    def to_addr(self, port_name: str) -> str:
        """`tcp://HOST:PORT` of one of `ports`; KeyError for another name."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"tcp://{host}:{self.ports[port_name]}"

    def to_dict(self) -> dict[str, Any]:
        """The attributes that TransferQueue's has."""
        return {"role": self.role, "id": self.id, "ip": self.ip, "ports": self.ports}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZMQServerInfo) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"ZMQServerInfo(role={self.role}, id={self.id}, ip={self.ip}, ports={self.ports})"


def server_info(address: Address) -> ZMQServerInfo:
    """The info of a service that this process reaches at `address`."""
    ports = {} if address.is_local else {REQUESTS: address.port}
    info = ZMQServerInfo("TransferQueueController", f"TransferQueueController_{address}", address.host, ports)
    info.address = str(address) if address.is_local else ""
    remember(info, [address])
    return info


def remember(info: ZMQServerInfo, addresses: list[Address]) -> None:
    """Where this process reaches the service of `info`, the best address first."""
    _known[info.id] = addresses


def addresses_of(info: ZMQServerInfo) -> list[Address]:
    """Where to try, in order: what this process was told, else the address on this host, then TCP with TQ_TOKEN.

    Raises `ConfigError` where `info` names no place.
    """
    found = list(_known.get(info.id, ()))
    if not found and info.address:
        found.append(parse_address(info.address))
    if not found and REQUESTS in info.ports:
        host = f"[{info.ip}]" if ":" in info.ip else info.ip
        found.append(parse_address(f"tcp:{host}:{info.ports[REQUESTS]}"))
    if not found:
        raise ConfigError(f"{info} names no place of a service: take what process_zmq_server_info(controller) returns")
    return found
