"""verl's checkpoint engine "tq": weights from the trainer to rollout workers over tcp, verified before one is loaded.

actor_rollout_ref.rollout.checkpoint_engine:
  backend: tq
  custom_backend_module: transfer_queue.integrations.verl_weights

verl imports this module in every process, which registers the engine. Without verl it cannot be imported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from transfer_queue.errors import InvalidInput
from transfer_queue.integrations.refit import Named, RefitEngine, read_along

try:
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
except ModuleNotFoundError as error:
    raise ImportError(f"this is a checkpoint engine of verl, but {error.name!r} is not installed") from error

NAME = "tq"


@CheckpointEngineRegistry.register(NAME)
class VerlCheckpointEngine(RefitEngine, CheckpointEngine):
    """`RefitEngine` by the names that verl 0.9.1 calls: actor rank 0 sends, the other actors read along.

    `prepare` begins an update, so an engine serves as many as there are, also after one that failed. The version is
    verl's `global_steps`; without it versions are 0 and not compared.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **more: Any) -> None:
        """`more`: `engine_kwargs.tq` of verl's settings, as for `RefitEngine`."""
        super().__init__(bucket_size, **more)
        self._is_master = is_master

    def prepare(self) -> dict[str, Any]:
        """Where the rollout workers find the trainer, and a token; nothing of all others."""
        if self._is_master:
            return self._offer()
        self.finalize()
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What `init_process_group` is told at each worker. `InvalidInput` unless one actor is the master."""
        found = [one for one in metadata[:actor_wg_world_size] if one]
        if len(found) != 1:
            raise InvalidInput(f"{len(found)} of {actor_wg_world_size} actor workers are the master: one is needed")

        def told(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "num_workers": [rollout_world_size] * len(ranks), "offer": found * len(ranks)}

        return told([-1] * actor_wg_world_size), told(list(range(rollout_world_size)))

    def init_process_group(self, rank: int, num_workers: int, offer: dict[str, Any]) -> None:
        """Meet the sender, at a rollout worker (`rank` from 0; actors have -1). Raises as `Taker`."""
        self._num_workers = num_workers
        if rank >= 0:
            self._meet(offer, rank)

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> dict[str, float]:
        """Bring the tensors to all rollout workers, as `Sender.send`. Returns what verl adds to its metrics."""
        if not self._is_master:
            read_along(weights)
            return {}
        report = await self._send(weights, global_steps or 0)
        return {
            "checkpoint_engine/payload_mbytes": report.nbytes / (1 << 20),
            "checkpoint_engine/pack_s": report.pack_s,
            "checkpoint_engine/take_s": report.take_s,
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """Every tensor, once all rollout workers have verified all of them; raises as `Taker.take`."""
        async for batch in self._take(global_steps):
            for one in batch:
                yield one
