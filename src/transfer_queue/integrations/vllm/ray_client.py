"""Ray actors that are vLLM servers, or hold a `Control`, for a trainer of ours: what vLLM's `RayVLLMWeightSyncClient`
is for its own trainers.

Errors come as they were raised in the actor, in the time of the client, and labels and caches are brought up to date.
Ray is imported by whoever made the handles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from transfer_queue.errors import DeadlineExceeded, InvalidInput, ServiceUnavailable

TIMEOUT_S = 300.0  # of a call, as vLLM's HTTP client has
Request = Callable[..., Any]


class RayActorClient:
    """One update for all actors. A call returns once every actor has answered, or raises what the first one raised."""

    def __init__(
        self, handles: Sequence[Any], init_request: Request, update_request: Request, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """The requests are vLLM's, as its actors take them: of `init_info` and `update_info`. `InvalidInput` without
        an actor."""
        if not handles:
            raise InvalidInput("a client of no actors")
        self._handles = list(handles)
        self._init_request, self._update_request = init_request, update_request
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_weight_transfer_engine", self._init_request(init_info=init_info))

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update_weights", self._update_request(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The label is set once all have finished, as vLLM's client does."""
        self._all("finish_weight_update")
        if weight_version is not None:
            self.update_weight_version(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._all("update_weight_version", new_version)

    def get_weight_version(self) -> str:
        """`unknown` when they differ."""
        found = {str(one) for one in self._all("get_weight_version")}
        return found.pop() if len(found) == 1 else "unknown"

    def reset_prefix_cache(self) -> None:
        """Of those that have one."""
        self._all("reset_prefix_cache", only=[one for one in self._handles if hasattr(one, "reset_prefix_cache")])

    def silent_workers(self) -> int:
        """Of all actors: what they say, or the workers that answer to a `collective_rpc`. `InvalidInput` for an actor
        that has neither."""
        return sum(self._silent_of(one) for one in self._handles)

    def _silent_of(self, handle: Any) -> int:
        if hasattr(handle, "silent_workers"):
            return int(self._all("silent_workers", only=[handle])[0])
        if hasattr(handle, "collective_rpc"):
            return len(self._all("collective_rpc", "check_health", only=[handle])[0])
        raise InvalidInput("an actor without collective_rpc does not know how many workers it has: give `silent`")

    def _all(self, method: str, *args: Any, only: list[Any] | None = None) -> list[Any]:
        ray: Any = sys.modules["ray"]
        calls = [getattr(handle, method).remote(*args) for handle in (self._handles if only is None else only)]
        if not calls:
            return []
        _, late = ray.wait(calls, num_returns=len(calls), timeout=self._timeout_s)
        try:
            answers = [ray.get(call) for call in calls if call not in late]
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # what the actor raised, without Ray's class around it
        except ray.exceptions.RayActorError as error:
            raise ServiceUnavailable(f"{method}: the actor is gone: {error}") from None
        if late:
            raise DeadlineExceeded(
                f"{method}: {len(late)} of {len(calls)} actors did not answer in {self._timeout_s} s"
            )
        return answers
