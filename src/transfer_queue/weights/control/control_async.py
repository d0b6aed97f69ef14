"""`Control` for an event loop: vLLM's `AsyncLLM` has the same methods."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from transfer_queue.background_call import LEAVE_S, BackgroundCall
from transfer_queue.errors import InternalError, ServiceUnavailable
from transfer_queue.weights.control.control import Control, UpdateInfo
from transfer_queue.weights.receive.checker import Comparison
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.receive.status import ServerStatus

NUM_THREADS = 8
T = TypeVar("T")


class AsyncControl:
    """`Control` for an event loop: the same methods as coroutines. What blocks runs in threads, at most `NUM_THREADS`
    (then `ServiceUnavailable`); a cancelled call goes on in its thread until it ends by itself."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self._free = threading.BoundedSemaphore(NUM_THREADS)

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        await self._run(lambda: self.control.init_weight_transfer_engine(init_info))

    async def start_weight_update(self) -> None:
        await self._run(self.control.start_weight_update)

    async def start_draft_weight_update(self) -> None:
        self.control.start_draft_weight_update()

    async def update_weights(self, update_info: UpdateInfo) -> None:
        await self._run(lambda: self.control.update_weights(update_info))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._run(lambda: self.control.finish_weight_update(weight_version))

    async def abort_weight_update(self, reason: str = "somebody asked to") -> bool:
        return await self._run(lambda: self.control.abort_weight_update(reason))

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._run(self.control.shutdown_weight_transfer_engine)

    async def get_weight_version(self) -> str:
        return self.control.get_weight_version()

    async def update_weight_version(self, new_version: str) -> None:
        self.control.update_weight_version(new_version)

    async def status(self) -> ServerStatus:
        return await self._run(self.control.status)

    async def pause_generation(
        self, mode: Mode = "abort", clear_cache: bool = True, owner: str = "", lease_s: float | None = None
    ) -> None:
        await self._run(lambda: self.control.pause_generation(mode, clear_cache, owner, lease_s))

    async def resume_generation(self, owner: str | None = None) -> None:
        if owner is None:
            self.control.resume_generation()  # also while all threads wait for pauses
        else:
            await self._run(lambda: self.control.resume_generation(owner))

    async def is_paused(self) -> bool:
        return self.control.is_paused()

    async def abort_requests(self, request_ids: Collection[str] | None = None) -> int:
        return self.control.abort_requests(request_ids)

    async def compute_weight_checksums(self) -> dict[str, str]:
        return await self._run(self.control.compute_weight_checksums)

    async def compare_weights(self, baseline: Mapping[str, str]) -> Comparison:
        return await self._run(lambda: self.control.compare_weights(baseline))

    async def reset_weights(self) -> None:
        await self._run(self.control.reset_weights)

    async def get_world_size(self, include_dp: bool = True) -> int:
        return self.control.get_world_size(include_dp)

    async def _run(self, call: Callable[[], T]) -> T:
        if not self._free.acquire(blocking=False):
            raise ServiceUnavailable(f"{NUM_THREADS} calls are running: try again")
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def work() -> T:
            try:
                return call()
            finally:
                self._free.release()
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(over.set)

        try:
            made = BackgroundCall("tq-control", work)
        except RuntimeError:  # there is no thread to be had
            self._free.release()
            raise
        await over.wait()
        made.ended(LEAVE_S)
        try:
            return made.outcome()
        except Exception:
            raise
        except BaseException as error:  # it is not the loop's, which it would end
            raise InternalError(f"the call ended with {error!r}") from error
