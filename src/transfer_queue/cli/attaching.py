"""Which service is meant, and a session or client of it.

Commands that only look use a session and `answer`: they start in a fifth of the time, because a client imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from transfer_queue.errors import DeadlineExceeded, InvalidInput, NotInitialized, ServiceUnavailable

if TYPE_CHECKING:
    from transfer_queue.client.client import TransferQueueClient
    from transfer_queue.client.effects import Operation
    from transfer_queue.client.session import Session
    from transfer_queue.server.host_registry import ServerEntry

T = TypeVar("T")
COMMAND_WIDTH = 80
CONNECT_S = 5.0

Address = Annotated[
    str | None,
    typer.Option(help="unix:PATH, tcp:HOST:PORT or a run directory; default TQ_ADDRESS, else your only service here."),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def chosen(address: str | None) -> str:
    """The address that was given, or TQ_ADDRESS, or that of the only service of this user on this host.

    Raises `NotInitialized` where there is none, `InvalidInput` where there are several, with a list of them.
    """
    import os

    from transfer_queue.server import host_registry

    known = address or os.environ.get("TQ_ADDRESS")
    if known:
        return known
    running = host_registry.running()
    services = [entry for entry in running if not entry.join] or running  # a unit is a part of one
    if not services:
        raise NotInitialized(
            "no service of this user runs on this host: start one with `tq serve`, or name one with --address"
        )
    if len(services) > 1:
        raise InvalidInput(
            f"{len(services)} services of this user run here, name one with --address:\n{_list(services)}"
        )
    return services[0].address


def _list(services: Sequence[ServerEntry]) -> str:
    lines = [("address", "pid", "age", "for", "command")]
    for entry in services:
        lines.append(
            (entry.address, str(entry.server.pid), _age(entry.age_s), entry.job or "-", entry.command[:COMMAND_WIDTH])
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _age(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def opened(address: str | None) -> Session:
    """A session with the service that was chosen. Raises as `chosen`, and what a session raises, with a remedy."""
    from transfer_queue.client.session import Session
    from transfer_queue.wire.address import parse_address

    place = parse_address(chosen(address))
    with remedied():
        return Session(place, CONNECT_S)


@contextmanager
def remedied() -> Iterator[None]:
    """Errors of a service that cannot be reached say what to do."""
    try:
        yield
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{error}: it is stopped (SIGCONT wakes it) or busy; try again") from None
    except ServiceUnavailable as error:
        if type(error) is not ServiceUnavailable:
            raise
        text = f"{error}: start it with `tq serve`, or name another one with --address"
        raise ServiceUnavailable(text) from None


@contextmanager
def session(address: str | None) -> Iterator[Session]:
    """As `opened`, closed in the end."""
    found = opened(address)
    try:
        yield found
    finally:
        found.close()


def attached(address: str | None) -> TransferQueueClient:
    """A client of the service that was chosen; `with` closes it. Raises as `opened`."""
    from transfer_queue.client.client import TransferQueueClient

    return TransferQueueClient.of(opened(address))


def answer(session: Session, operation: Operation[T]) -> T:
    """The result of an operation that does nothing but ask, one question after the other, and is given no rows."""
    from transfer_queue.client.effects import Call

    try:
        effect = next(operation)
        while True:
            assert type(effect) is Call
            effect = operation.send(session.call(effect))
    except StopIteration as stop:
        return stop.value
