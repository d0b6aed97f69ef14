"""A trainer that was shut down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from fleets import Site
from weights import Direct, Net, drawn

from transfer_queue.errors import NotOpen
from transfer_queue.weights import InPlace, Receiver, StateDictSource
from transfer_queue.weights.transport import registry

SEND_S = 20.0
CALLS: dict[str, Callable[[Any], object]] = {
    "send_weights": lambda trainer: trainer.send_weights(deadline_s=SEND_S),
    "publish": lambda trainer: trainer.publish(deadline_s=SEND_S),
    "remove_adapter": lambda trainer: trainer.remove_adapter("math", deadline_s=SEND_S),
    "catch_up_infos": lambda trainer: trainer.catch_up_infos(SEND_S),
}


def test_a_replica_that_it_cannot_bring_up_any_more_says_why() -> None:
    site = Site(1)
    site.send(1)
    assert site.trainer is not None
    site.trainer.shutdown()
    site.servers["a"].restart()
    until(lambda: "was shut down" in site.fleet.status()[0].reason, "the reason why it stays behind")
    site.close()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["shm", "tcp", "disk"])
def test_it_says_so_and_sends_nothing(name: str, call: str, tmp_path: Path) -> None:
    client = Direct()
    client.engine = registry.engine(name)(Receiver(InPlace(Net()), adapter=lambda tensors, manifest: None))
    info = {"folder": str(tmp_path)} if name == "disk" else {}
    trainer = registry.trainer(name).trainer_init(info, client=client, source=StateDictSource(drawn(Net(), 1)))
    trainer.send_weights(deadline_s=SEND_S)
    trainer.shutdown()
    with pytest.raises(NotOpen, match="was shut down"):
        CALLS[call](trainer)
    assert client.engine.receiver.installed().version == 1
    trainer.shutdown()
    client.engine.shutdown()
