"""The calls that bring updates to servers: what a trainer makes, and what a server answers.

Client    vLLM's four calls, to every receiver: all that a trainer needs
 ├─ Partial    of several servers: those that do not answer are left out of an update, and come back by themselves
 ├─ Follower   a fleet: it judges what its replicas report, and brings late ones up
 └─ Member     one server, as a fleet wants it: it also has a status, pauses and aborts
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from transfer_queue.errors import InvalidInput, StaleBase, TransferQueueError
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.receive.status import ServerStatus

log = logging.getLogger("transfer_queue.weights")
# Parts of the time left for an update that a server may take for a call, before the others go on without it.
START_SHARE, UPDATE_SHARE, FINISH_SHARE = 0.3, 0.8, 0.8
START_S = 10.0  # at most: nothing is moved


class Client(Protocol):
    """The way to the receivers (vLLM's `VLLMWeightSyncClient`). Each call goes to all of them; infos are JSON."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> object: ...

    def start_weight_update(self) -> object: ...

    def update_weights(self, update_info: dict[str, Any]) -> object: ...

    def finish_weight_update(self, weight_version: str | None = None) -> object: ...


def check_client(client: object) -> None:
    """Refuse an URL, an engine or a list of servers in the place of a client. vLLM's `LLM` has the calls, too."""
    if not callable(getattr(client, "init_weight_transfer_engine", None)):
        raise InvalidInput(
            f"client is a {type(client).__qualname__}: give WeightSyncClient(urls, token), Control(engine, receiver), "
            "a Fleet, or another object with vLLM's calls"
        )


class Partial(ABC):
    """A client of several servers, called by name here, that goes on without some of them."""

    @abstractmethod
    def allow(self, timeout_s: float | None) -> None:
        """All calls of an update that begins now have this long, together; None: it is over. In between, a server that
        does not answer its part in time is left out, as long as another one is left."""

    @abstractmethod
    def missed(self) -> dict[str, str]:
        """Who was left out since `allow`, and why."""

    @abstractmethod
    def unmet(self) -> list[str]:
        """Who has refused to start, as no trainer was introduced there, or an update is open."""

    @abstractmethod
    def member(self, name: str) -> Any:
        """That server alone."""

    @abstractmethod
    def leave_out(self, name: str, error: TransferQueueError) -> None:
        """Go on without it, until the next `allow`. Raises `error` when nobody is left."""


class Follower(ABC):
    """A client that looks after its receivers: it judges what they report, and brings late ones up by itself."""

    @abstractmethod
    def follow(self, publisher: Any) -> None:
        """The trainer engine (`TrainerEngine`) whose versions these are."""

    @abstractmethod
    def allow(self, timeout_s: float | None) -> None:
        """All calls of the update that begins now have this long, together; None: it is over."""

    def lacks_base(self) -> bool:
        """Whether the next version is also for receivers that do not have the one before: it is to be all of it."""
        return False


class Member(Client, Protocol):
    """One server: a `WeightSyncClient` with one URL, or a `Control` of this process."""

    def get_weight_version(self) -> str: ...

    def status(self) -> ServerStatus: ...

    def pause_generation(
        self, mode: Mode = "abort", clear_cache: bool = True, owner: str = "", lease_s: float | None = None
    ) -> object:
        """`owner`: the run that it is for; it ends by itself after `lease_s`, or when another run takes over. A server
        that knows neither ignores both (vLLM)."""

    def resume_generation(self, owner: str | None = None) -> object:
        """End the pause of that owner (None: all). A server that knows no owners goes on. A member whose method has no
        `owner` is called without it: see `takes_owner`."""

    def abort_weight_update(self) -> object: ...


def missed_by(client: object) -> dict[str, str]:
    """Who was left out of the update, and why; the log says so, too."""
    found = client.missed() if isinstance(client, Partial) else {}
    for name, why in found.items():
        log.warning("%s did not take part in the update: %s", name, why)
    return found


def foremost(errors: Iterable[TransferQueueError]) -> TransferQueueError:
    """Of what several servers have said, what their trainer is to hear: the first `StaleBase`, after which it sends all
    of the version, which mends that whatever the others lack; else the first."""
    said = list(errors)
    return next((error for error in said if isinstance(error, StaleBase)), said[0])


def takes_owner(method: Callable[..., object]) -> bool:
    """Whether this method of a member has a parameter `owner`. `resume_generation` had none in earlier releases, and
    members were written for those."""
    try:
        return "owner" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # it has no signature that can be looked at
        return False
