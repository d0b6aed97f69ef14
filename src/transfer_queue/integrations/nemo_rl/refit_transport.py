"""NeMo-RL's refit transport: weights from the policy to generation workers over tcp, verified before one is loaded.

policy.generation:
  refit_transport: "transfer_queue.integrations.nemo_rl.refit_transport:NemoRefitTransport"
  refit_cfg:
    "transfer_queue.integrations.nemo_rl.refit_transport:NemoRefitTransport": {release_after_refit: true}
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from transfer_queue.errors import ConfigError, NotInitialized
from transfer_queue.integrations.refit import Named, RefitEngine, read_along


class NemoRefitTransport(RefitEngine):
    """`RefitEngine` by the names of NeMo-RL's `CheckpointEngine`: policy rank 0 sends, the others read along.

    An update begins with `prepare`, at all workers, and ends with `finalize`. Versions are 0 and not compared.
    """

    cleanup_after_load = True
    shard_hf_weights = False  # some versions of NeMo-RL read it after `prepare`

    def __init__(self, bucket_size: int, release_after_refit: bool = True, **more: Any) -> None:
        """`more`: as for `RefitEngine`."""
        super().__init__(bucket_size, **more)
        if not release_after_refit:
            raise ConfigError("release_after_refit=False: an update begins with prepare, so it has to be true")
        self._sends: bool | None = None  # None: not told yet

    def prepare(self) -> dict[str, Any]:
        """Every worker offers, as none knows its rank yet; NeMo-RL gives all of it to all."""
        return self._offer()

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        self._num_workers, self._sends = rollout_world_size, worker_rank == 0
        if worker_rank != 0:
            self.finalize()

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """Meet policy rank 0, whose metadata is the first. Raises as `Taker`."""
        self.finalize()
        self._meet(metadata[0], rollout_rank)

    def get_target_weight_layout(self) -> None:
        """Full tensors are sent."""

    async def send_weights(self, weights: Iterable[Named]) -> None:
        """Bring the tensors to all generation workers, as `Sender.send`. `NotInitialized` before
        `init_policy_process_group`."""
        if self._sends is None:
            raise NotInitialized("send_weights: call init_policy_process_group first, which says who sends")
        if self._sends:
            await self._send(weights, 0)
        else:
            read_along(weights)

    async def receive_weight_batches(self) -> AsyncIterator[list[Named]]:
        """The tensors of each bucket, once all workers have verified all of them; raises as `Taker.take`."""
        async for batch in self._take(None):
            yield batch
