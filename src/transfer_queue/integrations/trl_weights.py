"""TRL's asynchronous trainer on versions: what it sends is verified at the servers and committed whole.

from transfer_queue.integrations.trl_weights import TrlTransfer
trainer = AsyncGRPOTrainer(..., weight_transfer=TrlTransfer(WeightSyncClient(url, token)))
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transfer_queue.errors import DeadlineExceeded, Incomplete, NotOpen, ServiceUnavailable
from transfer_queue.integrations.refit import Named, read_along
from transfer_queue.integrations.workers.headers import HEAD
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.clients import takes_owner
from transfer_queue.weights.transport.deadline import Deadline, TimedCall
from transfer_queue.weights.transport.trainer import TrainerEngine
from transfer_queue.weights.version.sources import TensorMeta, WeightSource

log = logging.getLogger("transfer_queue.weights")
DEADLINE_S = 600.0
LOOK_S = 2.0  # between two looks whether servers answer
ANSWER_S = 30.0  # a look is given up then: a call that came while they load may never be answered


class TrlTransfer:
    """The five methods of TRL 1.16's `weight_transfer`, in the place of its own over NCCL, on the main process. It is a
    source of weights, too: a version is what TRL's iterator gives, read once, in TRL's thread, and what is frozen.

    The servers keep their weights, paused, when a sync fails; it raises what `TrainerEngine.send_weights` raises.
    """

    def __init__(
        self,
        client: WeightSyncClient,
        *,
        frozen: WeightSource | None = None,
        deadline_s: float = DEADLINE_S,
        **init_info: Any,
    ) -> None:
        """`frozen` has the tensors that TRL does not train, and so does not give, such as those of a vision tower:
        `SafetensorsSource(folder)` of the checkpoint, of which these are kept, on the host. A head
        (`lm_head.weight`) is not taken from there: TRL trains it, or has it as the embeddings. `init_info`: of the
        transport tcp, as `host`."""
        self._client, self._frozen, self._deadline_s = client, frozen, deadline_s
        self._init_info = init_info
        self._specs: list[TensorMeta] = []
        self._given: Iterator[Named] = iter(())
        self._rest: list[Named] = []  # of every version, after what is given
        self._trainer: TrainerEngine | None = None
        self._is_open = False
        self._run_id = ""  # of the trainer that was there last: its are the pauses

    def init_weight_transfer(self) -> None:
        """Wait until all servers answer, for `deadline_s` at most: one that loads its model does not, or takes the call
        and is silent. They meet the trainer in the first sync. Raises `ServiceUnavailable` or `DeadlineExceeded`."""
        give_up = time.monotonic() + self._deadline_s
        while True:
            try:
                left_s = max(0.0, give_up - time.monotonic())
                TimedCall(self._client.silent_workers).result(Deadline(min(left_s, ANSWER_S)), "an answer")
                break
            except (ServiceUnavailable, DeadlineExceeded) as error:
                if time.monotonic() + LOOK_S > give_up:
                    raise
                log.info("the inference servers do not answer yet: %s", error)
            time.sleep(LOOK_S)
        self._run_id = str(self._init_info.get("run_id") or secrets.token_hex(8))
        self._is_open = True

    def pause(self) -> None:
        """In the name of the run: it ends once another one takes over."""
        self._client.pause_generation("keep", **self._named(self._client.pause_generation))

    def send_weights(self, iterator: Iterator[Named]) -> None:
        """Returns when every server has committed the version.

        Nothing but the first iterator says what TRL sends: it is read to its end, to the host, before it is packed.
        The next ones are read as they are packed, and have to give the same names, dtypes and shapes
        (`ShapeMismatch`). `Incomplete`: the servers' model has more than was given and is `frozen`.
        """
        try:
            if not self._is_open:
                raise NotOpen("init_weight_transfer was not called")
            deadline = Deadline(self._deadline_s)
            self._given = iterator
            trainer = self._trainer or self._met(iterator)
            trainer.send_weights(deadline_s=deadline.left())
        except Incomplete as error:
            raise Incomplete(f"{error}: TRL gives what it trains, the rest has to come as `frozen`") from error
        finally:
            self._given = iter(())
            read_along(iterator)  # after a fault the other ranks are still in its collectives

    def _met(self, iterator: Iterable[Named]) -> TrainerEngine:
        """The trainer, once it has met the servers, with the first version read."""
        first = deque((name, tensor.detach().cpu()) for name, tensor in iterator)
        names = {name for name, _ in first}
        rest = self._frozen.tensors() if self._frozen is not None else iter(())
        self._rest = [(name, tensor.cpu()) for name, tensor in rest if not (name in names or name.endswith(HEAD))]
        self._specs = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in (*first, *self._rest)]
        self._given = _drained(first)
        info = {**self._init_info, "run_id": self._run_id}
        self._trainer = registry.trainer("tcp").trainer_init(info, client=self._client, source=self)
        return self._trainer

    def resume(self) -> None:
        """End that pause, and nobody else's."""
        self._client.resume_generation(**self._named(self._client.resume_generation))

    def _named(self, call: Callable[..., object]) -> dict[str, Any]:
        """What tells the client whose pause it is, where it can be told."""
        return {"owner": self._run_id} if self._run_id and takes_owner(call) else {}

    def destroy(self) -> None:
        """Leave the servers, which keep their weights. Repeatable."""
        self._is_open = False
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()

    # a source of weights

    def specs(self) -> list[TensorMeta]:
        return list(self._specs)

    def tensors(self) -> Iterator[Named]:
        for name, tensor in itertools.chain(self._given, self._rest):
            yield name, tensor.detach().contiguous()

    def aliases(self) -> dict[str, str]:
        return {}


def _drained(found: deque[Named]) -> Iterator[Named]:
    """Each of them, and no longer held then."""
    while found:
        yield found.popleft()
