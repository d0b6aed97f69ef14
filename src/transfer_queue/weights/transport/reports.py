"""What receivers report to their trainer, and what silent ones need: workers whose calls never raise (vLLM's).

A silent worker answers at once, whatever happens. Only a report says that it has done a step, or why not.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

from transfer_queue.errors import InvalidInput, NotSupported, TransferQueueError, attempt, error_from_code
from transfer_queue.weights.transport.clients import Partial
from transfer_queue.weights.transport.deadline import Deadline, TimedCall, TimedCalls
from transfer_queue.weights.transport.info import Outcome
from transfer_queue.weights.transport.serving import Empty, WeightServer, listen_tcp

log = logging.getLogger("transfer_queue.weights")
LOOK_S = 2.0  # between two looks at who is waited for: whoever has ended is found in seconds
UNKNOWN = "unknown"  # the label of a server that may have weights other than it says


class Reports:
    """Taken by the transport's own server, or, once somebody silent is met, by one that does nothing else."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._server: WeightServer | None = None
        self._own: WeightServer | None = None
        self._making = threading.Lock()
        self._info: dict[str, Any] = {}
        self._committed: dict[str, set[tuple[str, int]]] = {}  # replica -> workers that reported so, since `forget`
        self._adopted: set[str] = set()  # replicas that count as the nameless one

    def come_to(self, server: WeightServer) -> None:
        """The transport has a way for them."""
        self._server = server

    def info(self, silent: int) -> dict[str, Any]:
        """What `silent` workers have to be told besides; nothing where the transport has a way."""
        with self._making:  # replicas are met at the same time
            if silent and self._server is None:
                token = secrets.token_urlsafe(24)
                listening, address = listen_tcp(self._host, 0)
                self._server = self._own = WeightServer(listening, token, Empty())
                self._info = {"report_to": address, "report_token": token}
            return self._info

    def adopt(self, replica: str) -> None:
        """It may be one of a plain client's servers, which have no names: what it reports is heard with theirs, too."""
        self._adopted.add(replica)

    def forget(self, replica: str) -> None:
        """What has come from it so far is about earlier steps."""
        self._committed.pop(replica, None)
        if self._server is not None:
            self._server.outcomes(self._called(replica))

    def _called(self, replica: str) -> set[str]:
        return {replica} if replica else {"", *self._adopted}

    def hear(
        self, replica: str, version: int | None, key: str, silent: int, deadline: Deadline, installed: bool = False,
        look: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Wait until all `silent` workers of the replica have reported this step of the version (None: the meeting).
        Raises what anybody reports instead. `look` is called every `LOOK_S` meanwhile: who has ended reports nothing.
        """
        well: set[tuple[str, int]] = set()
        wait_s = 0.0
        while self._server is not None:
            came = [one for one in self._come(replica, wait_s) if one.version in (version, None)]
            came = [one for one in came if one.key in ("", key)]  # others were given up
            for outcome in {(one.who, one.rank): one for one in came}.values():  # the last word of each
                if outcome.code:
                    raise error_from_code(outcome.code, f"rank {outcome.rank}: {outcome.text}")
                if outcome.silent and (outcome.version, outcome.installed) == (version, installed):
                    well.add((outcome.who, outcome.rank))
            if len(well) >= silent:
                return
            if wait_s:
                look()
            wait_s = min(deadline.left(f"waiting for the reports of {silent - len(well)} of {silent} workers"), LOOK_S)

    def num_committed(self, replica: str) -> int:
        """How many of its workers have committed something since `forget`."""
        self._come(replica, 0.0)
        return len(self._committed.get(replica, ()))

    def _come(self, replica: str, wait_s: float) -> list[Outcome]:
        """What it reports within that time."""
        came = [] if self._server is None else self._server.outcomes(self._called(replica), wait_s)
        done = {(one.who, one.rank) for one in came if one.installed}
        self._committed.setdefault(replica, set()).update(done)
        return came

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._server = self._own = None


def has(client: object, method: str) -> bool:
    """Whether its class has it: proxies answer to every name."""
    return callable(getattr(type(client), method, None))


def silent_workers(client: Any) -> int:
    """How many workers behind it never raise."""
    return int(client.silent_workers()) if has(client, "silent_workers") else 0


def count_silent(client: Any, given: int | None, deadline: Deadline) -> tuple[int, set[str]]:
    """How many workers behind a trainer's client never raise (`given`, where that was said), and which servers of a
    `Partial` did not answer. Such a one may have some: see `expect_not_silent`."""
    if given is not None:
        return int(given), set()
    if not isinstance(client, Partial):
        return int(TimedCall(silent_workers, client).result(deadline)), set()
    client.allow(deadline.left())
    try:
        return int(TimedCall(silent_workers, client).result(deadline)), set(client.missed())
    finally:
        client.allow(None)


def expect_not_silent(client: Any) -> None:
    """`NotSupported` for a server with such workers, where a trainer waits for no reports."""
    if silent_workers(client):
        raise NotSupported("this server's workers only report, those of other servers do not: make them a fleet")


def shown_label(client: Any, before: str) -> str:
    """What the servers of a client call their weights: "" where they differ, `before` where they do not say."""
    if not has(client, "get_weight_version"):
        return before
    try:
        return str(client.get_weight_version())
    except NotSupported:
        return before
    except InvalidInput:
        return ""


def relabel(client: Any, label: str) -> None:
    """Silent workers took the label of a version and may not have taken its weights."""
    if has(client, "update_weight_version"):
        attempt("taking back a label", lambda: client.update_weight_version(label), log)


def take_back_label(
    client: Any, calls: TimedCalls, reports: Reports, silent: int, before: str, timeout_s: float
) -> None:
    """Silent workers took the label of a version, or will by a call that is late, and may not have taken its weights:
    where none did they have `before` again, and where some did nobody knows what they have."""

    def take_back(_: object = None) -> None:
        num_committed = reports.num_committed("")
        if num_committed < silent:
            relabel(client, UNKNOWN if num_committed else before)

    for call in calls.late():
        call.leave(take_back)
    calls.begin(take_back).ended(timeout_s)


def forget_caches(client: Any) -> None:
    """Have servers drop what they computed with the weights before."""
    if has(client, "reset_prefix_cache"):
        try:
            client.reset_prefix_cache()
        except TransferQueueError as error:  # the version is committed all the same
            log.warning("caches of the weights before may be in use still: %s", error)
