"""What a server says about itself: the one shape of it, for `Control`, HTTP in both directions, and fleets."""

from __future__ import annotations

from typing import Any

import msgspec

from transfer_queue.errors import ProtocolError
from transfer_queue.structs import decodable
from transfer_queue.weights.receive.receiver import State, VersionInfo


class OpenUpdate(msgspec.Struct, frozen=True):
    """The session that is open: whose, which, how far, and for how many seconds it may go on (None: no end is set)."""

    run_id: str
    update_id: int
    phase: str
    left_s: float | None


@decodable
class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`installed` None: the server only has labels (vLLM). `label` is "" while the weights are a mixture. `run_id`: the
    trainer that was introduced last. `life`: another one each time the server is started ("": not known).
    `paused_by`: the run that a pause was made for, of several the one of `run_id`; "" for somebody else's. `answers`:
    whether it has a model that answers requests; an archive has none."""

    label: str
    installed: VersionInfo | None = None
    state: State = State.IDLE
    initialised: bool = False
    paused: bool = False
    paused_by: str = ""
    run_id: str = ""
    update: OpenUpdate | None = None
    life: str = ""
    answers: bool = True

    @property
    def updating(self) -> bool:
        """Whether an update is open."""
        return self.update is not None


def encode(status: ServerStatus) -> dict[str, Any]:
    """As JSON. `updating`, and `epoch` for a run, are there for readers of earlier releases."""
    found: dict[str, Any] = msgspec.to_builtins(status)
    found["updating"] = status.updating
    if found["installed"] is not None:
        for one in (found["installed"], *found["installed"]["adapters"].values()):
            one["epoch"] = one["run_id"]
    return found


def decode(found: Any) -> ServerStatus:
    """`ProtocolError` for what is not a status. Earlier releases say `epoch` for `run_id`; unknown keys are ignored."""
    try:
        installed = dict(found["installed"]) if found.get("installed") is not None else None
        if installed is not None:
            adapters = {label: _renamed(one) for label, one in dict(installed.get("adapters") or {}).items()}
            installed = {**_renamed(installed), "adapters": adapters}
        return msgspec.convert({**found, "installed": installed}, ServerStatus)
    except (msgspec.ValidationError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ProtocolError(f"not the status of a server: {error!r}") from None


def _renamed(found: Any) -> dict[str, Any]:
    found = dict(found)
    return found if "run_id" in found or "epoch" not in found else {**found, "run_id": found["epoch"]}
