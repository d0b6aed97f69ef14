"""Which replicas the weights of trainers go to, as they say themselves. Only people who look depend on it."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from transfer_queue.errors import InvalidInput
from transfer_queue.wire import messages as m

MAX_REPLICAS, MAX_WORDS = 4096, 300  # of one trainer; characters of a reason


class ReportedFleets:
    """What each session said last. It is forgotten when the session ends: then nobody knows."""

    requests = (m.ReportReplicas,)

    def __init__(self) -> None:
        self._said: dict[bytes, tuple[float, list[m.ReplicaStatus]]] = {}

    def handle(self, message: m.ReportReplicas, ticket: Hashable, session: bytes, now: float) -> m.Reply:
        """`InvalidInput` for more replicas than are kept."""
        if len(message.replicas) > MAX_REPLICAS:
            raise InvalidInput(f"{len(message.replicas)} replicas of one trainer: at most {MAX_REPLICAS} are kept")
        self._said.pop(session, None)
        if message.replicas:
            self._said[session] = (now, message.replicas)
        return m.Done(message.rid)

    def end_session(self, session: bytes) -> None:
        self._said.pop(session, None)

    def listed(self, now: float) -> list[m.FleetOverview]:
        """All of them, with the seconds that have passed since they were reported."""
        found = []
        for session, (at, replicas) in self._said.items():
            ago_s = max(0.0, now - at)
            aged = [
                msgspec.structs.replace(
                    one, name=one.name[:MAX_WORDS], label=one.label[:MAX_WORDS], reason=one.reason[:MAX_WORDS],
                    since_s=one.since_s + ago_s, heard_s=None if one.heard_s is None else one.heard_s + ago_s,
                )
                for one in replicas
            ]  # fmt: skip
            found.append(m.FleetOverview(session, ago_s, aged))
        return found
