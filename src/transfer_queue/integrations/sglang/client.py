"""Drives SGLang servers for a trainer of ours: its four calls become posts to `/update_weights_from_tensor`.

SGLang (0.5.23) takes such posts within a session only, and lets a server that was not paused finish all its requests
first. So each call is: pause, open a session, post, close it, go on. All but `finish` pause in place, for the time of a
few small messages: requests that run go on where they were.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeAlias, TypeVar

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import ConfigError, InvalidInput, NotSupported, ProtocolError, TransferQueueError
from transfer_queue.integrations.sglang.payload import LOADER, WorkerCall, to_text
from transfer_queue.weights.http.bodies import check_token
from transfer_queue.weights.http.peer import Answer, HttpPeer

log = logging.getLogger("transfer_queue.weights")
TIMEOUT_S = 300.0
PauseMode: TypeAlias = Literal["retract", "in_place", "abort"]
T = TypeVar("T")


class SGLangClient:
    """One update for all servers, each of which commits in all of its workers or in none.

    `pause`: what becomes of running requests while a version is committed. "retract": they wait, and are computed anew
    with the new weights; "abort": they end; "in_place": they go on with what was computed with the weights before,
    and so do cached prefixes, which the others forget. A call raises what the first server raised, once all have
    answered. `token`: the server's API key.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str = "",
        *,
        transport: Literal["tcp", "shm"] = "tcp",
        pause: PauseMode = "retract",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`ConfigError` for URLs that are none, or twice the same."""
        found = [urls] if isinstance(urls, str) else list(urls)
        if not found or len(set(found)) != len(found):
            raise ConfigError(f"urls of different servers are needed, not {found}")
        check_token(token)
        self._peers = [HttpPeer.of(url, token) for url in found]
        self._transport: Literal["tcp", "shm"] = transport
        self._pause: PauseMode = pause
        self._paused: PauseMode | None = None  # by `pause_generation`
        self._timeout_s = timeout_s

    # updates

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """`NotSupported` for servers that a call of ours would end, as they were started without our loader."""
        self._tell(WorkerCall("init", self._transport, dict(init_info)))

    def start_weight_update(self) -> None:
        self._tell(WorkerCall("start", self._transport))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._tell(WorkerCall("update", self._transport, dict(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit. The label is set with it, also where the workers could not: the trainer hears that, and sets it back
        (`update_weight_version`)."""
        self._tell(WorkerCall("finish", self._transport), weight_version)

    def silent_workers(self) -> int:
        """All of them."""
        return sum(self._all(self._num_workers))

    # versions

    def update_weight_version(self, new_version: str) -> None:
        body = {"new_version": new_version, "abort_all_requests": False}
        self._all(lambda peer: self._post(peer, "/update_weight_version", body))

    def get_weight_version(self) -> str:
        """`unknown` when they differ."""
        found = self._all(lambda peer: peer.call("GET", "/model_info", None, self._timeout_s))
        labels = {str(one.get("weight_version", "")) for one in found}
        return labels.pop() if len(labels) == 1 else "unknown"

    # generation

    def pause_generation(self, mode: PauseMode = "retract") -> None:
        """Until `resume_generation`. Updates in between neither pause nor go on."""
        self._all(lambda peer: self._post(peer, "/pause_generation", {"mode": mode}))
        self._paused = mode

    def resume_generation(self) -> None:
        self._all(self._go_on)
        self._paused = None

    # one call of one server

    def _tell(self, call: WorkerCall, label: str | None = None) -> None:
        def tell(peer: HttpPeer) -> None:
            payloads = [to_text(call)] * self._num_workers(peer)
            body = {
                "serialized_named_tensors": payloads, "load_format": LOADER, "flush_cache": False,
                "weight_version": label, "selector": "target",
            }  # fmt: skip
            with self._pausing(peer, self._pause if call.method == "finish" else "in_place"):
                with self._session(peer, takes_over=call.method == "init"):
                    self._post(peer, "/update_weights_from_tensor", body)
                if call.method == "finish" and (self._paused or self._pause) != "in_place":
                    self._forget_cache(peer)

        self._all(tell)

    def _num_workers(self, peer: HttpPeer) -> int:
        """Asked before each call: a server that was started anew without our loader would end."""
        found = peer.call("GET", "/server_info", None, self._timeout_s)
        if LOADER not in (found.get("custom_weight_loader") or ()):
            raise NotSupported(f"{peer.url} was started without --custom-weight-loader {LOADER}")
        if found.get("weight_cache_mode", "off") != "off":
            raise NotSupported(f"{peer.url} shares its weights: --weight-cache-mode has to be off")
        for name in ("dp_size", "pp_size", "attn_dp_size"):
            if found.get(name, 1) != 1:
                raise NotSupported(f"{peer.url} has a {name} of {found[name]}: only tensor-parallel servers are taken")
        size = found.get("tp_size")
        if not isinstance(size, int):
            raise ProtocolError(f"{peer.url}/server_info does not say how many workers there are")
        return size

    @contextmanager
    def _pausing(self, peer: HttpPeer, mode: PauseMode) -> Iterator[None]:
        if self._paused is not None:
            yield
            return
        try:
            self._post(peer, "/pause_generation", {"mode": mode})
            yield
        except BaseException:  # an interrupt must not leave it paused
            with suppress(TransferQueueError):
                self._go_on(peer)
            raise
        self._go_on(peer)

    @contextmanager
    def _session(self, peer: HttpPeer, takes_over: bool) -> Iterator[None]:
        """One that a trainer left open when it died locks out all others: the next trainer's `init` ends it."""
        try:
            self._post(peer, "/begin_weight_update", {"selector": "target"})
        except InvalidInput:
            if not takes_over:
                raise
            self._post(peer, "/end_weight_update", {})
            self._post(peer, "/begin_weight_update", {"selector": "target"})
        try:
            yield
        except BaseException:
            with suppress(TransferQueueError):
                self._post(peer, "/end_weight_update", {})
            raise
        self._post(peer, "/end_weight_update", {})

    def _forget_cache(self, peer: HttpPeer) -> None:
        """The version is committed, whatever comes of it."""
        try:
            self._post(peer, "/flush_cache", {})
        except ProtocolError:
            return  # its good answer is a sentence
        except TransferQueueError as error:
            log.warning("prefixes of the weights before may be in use still: %s", error)

    def _go_on(self, peer: HttpPeer) -> None:
        self._post(peer, "/continue_generation", {"torch_empty_cache": False})

    def _post(self, peer: HttpPeer, path: str, body: Answer) -> None:
        peer.call("POST", path, body, self._timeout_s)

    def _all(self, ask: Callable[[HttpPeer], T]) -> list[T]:
        calls = [BackgroundCall("tq-sglang-client", ask, peer) for peer in self._peers]
        for call in calls:  # all of them, before anything is raised: none goes on beside what follows
            call.ended(math.inf)
        return [call.outcome() for call in calls]
