"""A service whose controller writes down what lasts, driven by one seed; what is made of it after everybody is gone.

`python -m ledger_sim SEED` repeats a run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from standby_sim import MAX_ROWS, Simulation, _short

from transfer_queue.controller import Controller
from transfer_queue.controller.facts import ControllerFact, SamplerIs
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.saved_state import decoded
from transfer_queue.controller.snapshot import exported
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.server.standby.recording import RecordingUnit

_states: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


class LedgerSimulation(Simulation):
    """`states[i]` is what would be saved after event i, with its blocks, and `facts[i]` what was written down in it."""

    def __init__(self, seed: int, kind: Callable[..., RecordingUnit] = RecordingUnit) -> None:
        self.ledger = Ledger()
        super().__init__(seed, self.ledger, kind)
        self.states: list[tuple[bytes, list[int]]] = []
        self.facts: list[bytes] = []

    def _look(self) -> None:
        controller = self.service.controller
        assert isinstance(controller, Controller)
        sampler = SamplerIs(msgspec.msgpack.decode(msgspec.msgpack.encode(controller.state.sampler.save_checkpoint())))
        self._write_down([*self.ledger.take(), sampler])
        self.states.append(exported(controller.state))

    def _write_down(self, facts: list[ControllerFact]) -> None:
        self.facts.append(msgspec.msgpack.encode(facts))

    def recovered(self, since: int, event: int) -> Controller:
        """What is made of the state after event `since`, and the facts up to `event`."""
        controller = Controller(self._sampler(), MAX_ROWS, 3, ledger=Ledger())
        recovery = Recovery(controller, *self.states[since], reserved_rows=0)
        for data in self.facts[since + 1 : event + 1]:
            for fact in msgspec.msgpack.decode(data, type=list[ControllerFact]):
                recovery.apply(fact)
        recovery.finish()
        controller.check_invariants()
        return controller


def lasting(sampler: BaseSampler, state: tuple[bytes, list[int]]) -> dict[str, Any]:
    """What is left of a saved state where nothing is lent, as plain values."""
    controller = Controller(sampler, MAX_ROWS, 3)
    controller.restoring.replace(state[0], {block: block for block in state[1]})
    controller.state.groups.forget_holders()
    return plain(controller)


def plain(controller: Controller) -> dict[str, Any]:
    data, blocks = exported(controller.state)
    found: dict[str, Any] = decoded(_states, data)
    del found["lineage"]
    for table in found["tables"]:
        table["returned"] = {name: sorted(one) for name, one in table["returned"].items()}
    found["tables"] = {table["name"]: table for table in found["tables"]}
    return {**found, "blocks": blocks}


def differences(seed: int, events: int = 60, ends: int = 3) -> Iterator[str]:
    """What is otherwise than it was at a few moments of a run."""
    run = LedgerSimulation(seed)
    try:
        run.run(events)
        moments = random.Random(seed)
        for _ in range(ends):
            since, event = sorted(moments.sample(range(events), 2))
            found = plain(run.recovered(since, event))
            wanted = lasting(run._sampler(), run.states[event])
            for name in wanted:
                if found[name] != wanted[name]:
                    yield f"seed {seed}, {since} to {event}: {name} is {_short(found[name], wanted[name])}"
    finally:
        run.close()


if __name__ == "__main__":
    print(*differences(int(sys.argv[1])), sep="\n")
