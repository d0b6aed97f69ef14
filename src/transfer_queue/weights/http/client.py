"""Drives inference servers over HTTP: ours, and vLLM's (development mode). It has the methods of vLLM's
`VLLMWeightSyncClient`, so a vLLM trainer engine takes it, and those for pauses, versions and checks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlencode

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    NotInitialized,
    NotOpen,
    NotSupported,
    ProtocolError,
    ServiceUnavailable,
    TransferQueueError,
    UpdateInProgress,
    WrongEpoch,
    kept,
)
from transfer_queue.weights.control.control import UpdateInfo
from transfer_queue.weights.http.bodies import check_token, run_header
from transfer_queue.weights.http.peer import Answer, HttpPeer
from transfer_queue.weights.receive.checker import Comparison
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.receive.status import ServerStatus, decode
from transfer_queue.weights.receive.update_session import run_of
from transfer_queue.weights.transport.clients import FINISH_SHARE, START_S, START_SHARE, UPDATE_SHARE, Partial, foremost

_REFUSED = (UpdateInProgress, NotOpen, NotInitialized, NotSupported, AccessDenied, WrongEpoch)
TIMEOUT_S = 300.0
ABORT_TIMEOUT_S = 10.0
INIT_SHARE, MEMBER_SHARE, LEAST_S = 0.5, 0.5, 1.0  # as `START_SHARE`; of that much time at least
T = TypeVar("T")


class _Update:
    """One update of a trainer, for its calls: those of one before, which may end late, note nothing here. `until`: its
    end, None outside of an update. `out`: who is left out of it, and why. `unmet`: who has to be introduced first."""

    def __init__(
        self, until: float | None, out: dict[str, TransferQueueError] | None = None, unmet: list[str] | None = None
    ) -> None:
        self.until = until
        self.out = out or {}
        self.unmet = unmet or []

    @property
    def left_s(self) -> float | None:
        return None if self.until is None else max(self.until - time.monotonic(), LEAST_S)


class WeightSyncClient(Partial):
    """Calls one server, or all of several at the same time. Every call ends within `timeout_s`.

    With several, a call that fails anywhere raises one server's error (`foremost`), naming each, and the others have
    done it; `failures` has the errors by URL. A `start` or `update` that fails on one of them is aborted on all. Within
    an update of a trainer engine (`allow`) a server that does not answer in time is left out of it instead.
    `token` is sent to every server ("": none; vLLM wants none, or its API key). Raises the typed errors of our
    servers; for vLLM's, `InternalError` where it answers 500, and `NotSupported` for routes that its version does not
    have. Thread-safe but for `failures`.
    """

    def __init__(self, urls: str | Sequence[str], token: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self.failures: dict[str, TransferQueueError] = {}
        found = [urls] if isinstance(urls, str) else list(urls)
        if not found or len(set(found)) != len(found):
            raise ConfigError(f"urls of different servers are needed, not {found}")
        check_token(token)
        self._peers = [HttpPeer.of(url, token) for url in found]
        self._timeout_s = timeout_s
        self._run_id = ""  # of the trainer that was introduced last: servers of ours are told whose calls these are
        self._update = _Update(None)  # the trainer's

    # updates

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._step("/init_weight_transfer_engine", {"init_info": dict(init_info)}, INIT_SHARE)
        self._run_id = run_of(init_info)

    def start_weight_update(self) -> None:
        self._update.unmet.clear()
        self._step("/start_weight_update", None, START_SHARE, START_S, aborts=True)

    def update_weights(self, update_info: UpdateInfo) -> None:
        """The same for every server; a list has one part for each rank."""
        self._step("/update_weights", {"update_info": update_info}, UPDATE_SHARE, aborts=True)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit. When that fails on some servers, the others have the new weights: see `failures`."""
        body = {} if weight_version is None else {"weight_version": weight_version}
        self._step("/finish_weight_update", body, FINISH_SHARE)

    def abort_weight_update(self) -> None:
        """End the open update. Servers without the route (vLLM) are left as they are."""
        self._all(self._abort)

    def shutdown_weight_transfer_engine(self) -> None:
        """Servers without the route (vLLM before 0.32) are left as they are. `WrongEpoch` once another took over."""
        headers = run_header(self._run_id)
        self._all(lambda peer: peer.optional("/shutdown_weight_transfer_engine", self._timeout_s, headers))

    # servers that do not answer

    def allow(self, timeout_s: float | None) -> None:
        """See `Partial`. Within it a call waits for a part of the time that is left: the others need the rest."""
        if timeout_s is None:
            self._update = _Update(None, dict(self._update.out), list(self._update.unmet))
        else:
            self._update = _Update(time.monotonic() + timeout_s)

    def missed(self) -> dict[str, str]:
        return {url: str(error) for url, error in self._update.out.items()}

    def unmet(self) -> list[str]:
        return [url for url in self._update.unmet if url not in self._update.out]

    def member(self, name: str) -> WeightSyncClient:
        token = next(peer.token for peer in self._peers if peer.url == name)
        left_s = self._update.left_s
        found = WeightSyncClient(
            name, token, min(self._timeout_s, math.inf if left_s is None else MEMBER_SHARE * left_s)
        )
        found._run_id = self._run_id
        return found

    def leave_out(self, name: str, error: TransferQueueError) -> None:
        self._update.out[name] = kept(error)
        if len(self._update.out) == len(self._peers):
            raise error

    def _step(
        self, path: str, body: Answer | None, share: float, most_s: float = math.inf, aborts: bool = False
    ) -> None:
        """A call of an update. Within `allow`, servers that do not answer in their share of the time are left out, and
        those that only have to be introduced to the trainer are noted, as long as others take part."""
        update, share_s = self._update, None
        failures: dict[str, TransferQueueError] = {}
        left_s = update.left_s
        if left_s is not None:
            share_s = min(share * left_s, most_s)
        peers = [peer for peer in self._peers if share_s is None or peer.url not in update.out]
        try:
            self._post(path, body, share_s, peers, failures)
        except TransferQueueError:
            if left_s is not None and self._may_go_on(path, failures, update):
                return
            for peer in self._peers if aborts else ():
                # A server that refused has no update of ours: one that is open there is somebody else's.
                if peer.url not in update.out and not isinstance(failures.get(peer.url), _REFUSED):
                    with suppress(TransferQueueError):
                        self._abort(peer)
            raise

    def _may_go_on(self, path: str, failures: Mapping[str, TransferQueueError], update: _Update) -> bool:
        lost: tuple[type[TransferQueueError], ...] = (ServiceUnavailable, DeadlineExceeded)
        if path in ("/update_weights", "/finish_weight_update"):
            lost += (NotOpen, NotInitialized)  # it was started anew since, or somebody ended the update there
        if path != "/start_weight_update":
            lost += (UpdateInProgress,)  # it did not do it: somebody else's call came between
        for url, error in failures.items():
            if isinstance(error, lost):
                update.out[url] = error
            elif isinstance(error, (NotInitialized, UpdateInProgress)):
                update.unmet.append(url)
            else:
                return False
        return len(update.out) < len(self._peers)

    # versions and checks

    def get_weight_version(self) -> str:
        """The label that all have. `InvalidInput` when they differ: ask `get_weight_versions`."""
        found = self.get_weight_versions()
        if len(set(found.values())) > 1:
            raise InvalidInput(f"the servers have different versions: {found}")
        return next(iter(found.values()))

    def get_weight_versions(self) -> dict[str, str]:
        """Labels by URL."""
        return self._get("/weight_info", lambda answer: str(answer["weight_version"]))

    def update_weight_version(self, new_version: str) -> None:
        """Give what is live another label. `WrongEpoch` where another run took over."""
        self._post("/update_weight_version", {"new_version": new_version})

    def compute_weight_checksums(self) -> dict[str, dict[str, str]]:
        """SHA-256 of every tensor, by URL."""
        body = {"action": "checksum"}
        return self._ask("POST", "/weight_checker", body, lambda answer: dict(answer["checksums"]))

    def reset_weights(self) -> None:
        self._post("/weight_checker", {"action": "reset"})

    def compare_weights(self, baseline: Mapping[str, str]) -> dict[str, Comparison]:
        """By URL."""
        body = {"action": "compare", "baseline": dict(baseline)}
        return self._ask("POST", "/weight_checker", body, lambda found: Comparison(found["match"], found["mismatches"]))

    def get_world_size(self, include_dp: bool = True) -> int:
        """Of all servers together."""
        path = f"/get_world_size?include_dp={str(include_dp).lower()}"
        return sum(self._get(path, lambda answer: int(answer["world_size"])).values())

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with earlier weights; requests that run are computed anew. Servers without the route
        (ours: they have no such cache) are left as they are."""

        def reset(peer: HttpPeer) -> None:
            with suppress(NotSupported, ProtocolError):  # older ones answer nothing
                if not peer.call("POST", "/reset_prefix_cache", None, self._timeout_s).get("success", True):
                    peer.call("POST", "/reset_prefix_cache?reset_running_requests=true", None, self._timeout_s)

        self._all(reset)

    def silent_workers(self) -> int:
        """How many workers answer 200 whatever happens, and report elsewhere: vLLM's, with our plug-in. Within `allow`
        servers that do not answer are left out, where the others have no such workers."""
        update = self._update
        failures: dict[str, TransferQueueError] = {}
        limit_s = min(self._timeout_s, math.inf if update.left_s is None else INIT_SHARE * update.left_s)

        def count(peer: HttpPeer) -> int:
            try:
                peer.call("GET", "/tqw/status", None, limit_s)
            except NotSupported:
                size = peer.call("GET", "/get_world_size?include_dp=true", None, limit_s).get("world_size")
                if type(size) is not int:
                    raise ProtocolError(f"{peer.url} says that its world size is {size!r}") from None
                return size
            return 0

        found: dict[str, int] = {}

        def note(peer: HttpPeer) -> None:
            found[peer.url] = count(peer)

        try:
            self._all(note, failures=failures)
        except TransferQueueError:
            is_lost = all(isinstance(one, (ServiceUnavailable, DeadlineExceeded)) for one in failures.values())
            if update.until is None or not is_lost or not found or any(found.values()):
                raise
            update.out |= failures
        return sum(found.values())

    def status(self) -> ServerStatus:
        """What the server says about itself: one of vLLM has only a label, and whether it is paused. `InvalidInput`
        with several servers: ask `statuses`."""
        if len(self._peers) != 1:
            raise InvalidInput("several servers have several statuses: ask for statuses()")
        return next(iter(self.statuses().values()))

    def statuses(self) -> dict[str, ServerStatus]:
        """By URL."""

        def ask(peer: HttpPeer) -> ServerStatus:
            try:
                return decode(peer.call("GET", "/tqw/status", None, self._timeout_s))
            except NotSupported:
                label = str(peer.call("GET", "/weight_info", None, self._timeout_s).get("weight_version", ""))
            paused = False
            with suppress(NotSupported):
                paused = bool(peer.call("GET", "/is_paused", None, self._timeout_s).get("is_paused", False))
            return ServerStatus(label=label, paused=paused)

        return self._all(ask)

    # generation

    def pause_generation(
        self, mode: Mode = "abort", clear_cache: bool = True, owner: str = "", lease_s: float | None = None
    ) -> None:
        """`owner`, `lease_s`: see `Control`; vLLM's servers ignore them."""
        query = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        query |= {"owner": owner} if owner else {}
        query |= {"lease_s": str(lease_s)} if lease_s is not None else {}
        self._post("/pause?" + urlencode(query))

    def resume_generation(self, owner: str | None = None) -> None:
        """`owner`: see `Control`; vLLM's servers ignore it."""
        self._post("/resume" if owner is None else "/resume?" + urlencode({"owner": owner}))

    def is_paused(self) -> bool:
        """Whether all are."""
        return all(self._get("/is_paused", lambda answer: bool(answer["is_paused"])).values())

    def abort_requests(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all) wherever they run; how many."""
        body = {} if request_ids is None else {"request_ids": list(request_ids)}
        return sum(self._ask("POST", "/abort_requests", body, lambda answer: int(answer["aborted"])).values())

    # calls

    def _abort(self, peer: HttpPeer) -> None:
        with suppress(NotSupported):
            timeout_s = min(self._timeout_s, ABORT_TIMEOUT_S)
            peer.call("POST", "/tqw/abort_weight_update", None, timeout_s, run_header(self._run_id))

    def _post(
        self,
        path: str,
        body: Answer | None = None,
        timeout_s: float | None = None,
        peers: list[HttpPeer] | None = None,
        failures: dict[str, TransferQueueError] | None = None,
    ) -> None:
        """Each has `timeout_s`. `peers`, `failures`: see `_all`."""
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        headers = run_header(self._run_id)
        self._all(lambda peer: peer.call("POST", path, body, limit_s, headers), peers, failures)

    def _get(self, path: str, take: Callable[[Answer], T]) -> dict[str, T]:
        return self._ask("GET", path, None, take)

    def _ask(self, method: str, path: str, body: Answer | None, take: Callable[[Answer], T]) -> dict[str, T]:
        def ask(peer: HttpPeer) -> T:
            answer = peer.call(method, path, body, self._timeout_s)
            try:
                return take(answer)
            except (KeyError, TypeError, ValueError) as error:
                raise ProtocolError(f"{path} was answered with {str(answer)[:200]}: {error!r}") from None

        return self._all(ask)

    def _all(
        self,
        ask: Callable[[HttpPeer], T],
        peers: list[HttpPeer] | None = None,
        failures: dict[str, TransferQueueError] | None = None,
    ) -> dict[str, T]:
        """At the same time (`peers`: only these). `failures` are of this call alone: one that nobody waits for any
        more may end beside it."""
        asked = self._peers if peers is None else peers
        failed = {} if failures is None else failures
        found: dict[str, T] = {}
        self.failures = failed
        if len(asked) == 1:
            (peer,) = asked
            try:
                return {peer.url: ask(peer)}
            except TransferQueueError as error:
                failed[peer.url] = kept(error)
                raise
        for url, call in {peer.url: BackgroundCall("tq-weights-client", ask, peer) for peer in asked}.items():
            call.ended(math.inf)
            try:
                found[url] = call.outcome()
            except TransferQueueError as error:
                failed[url] = kept(error)
        if failed:
            said = "; ".join(f"{url}: {error}" for url, error in failed.items())
            raise type(foremost(failed.values()))(f"{len(failed)} of {len(asked)} servers: {said}")
        return found
