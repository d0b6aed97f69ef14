"""The trainer's way to the rollout workers: every version of the policy goes to all of them, whatever they do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import transfer_queue as tq
from demo.line import Lines
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.engines import registry

_DEADLINE_S = 60.0


class Publisher:
    """Sends `policy` to the rollout workers at these addresses."""

    def __init__(self, policy: nn.Module, addresses: Sequence[str], token: str) -> None:
        self._client = Lines(addresses, token, _DEADLINE_S)
        self._trainer = registry.trainer("shm").trainer_init({}, client=self._client, source=ModuleSource(policy))

    def publish(self) -> None:
        """Announce and send the weights as they are now, as the next version, from 1 on; returns when all have them.

        It is announced first: workers that may start more samples now do so with the old weights, and get the new ones
        between two tokens. Such samples count as one version older.
        """
        tq.set_weight_version(self._trainer.version + 1, self._trainer.epoch)
        self._trainer.send_weights(deadline_s=_DEADLINE_S)

    def close(self) -> None:
        self._trainer.shutdown()
        self._client.close()
