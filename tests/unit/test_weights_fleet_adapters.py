"""Adapters for replicas that lack the weights they are for."""

from __future__ import annotations

import pytest
from engines import CONFIG
from fleets import SEND_S, Site
from weights import lora

from transfer_queue.errors import StaleBase
from transfer_queue.weights import StateDictSource


def test_the_only_replica_that_was_started_anew_is_brought_the_weights_and_takes_the_adapter_then() -> None:
    site = Site(1, heartbeat_s=SEND_S)  # nobody finds out before the adapter is sent
    trainer, adapter = site.trainer, StateDictSource(lora(1))
    assert trainer is not None
    site.send(1)
    site.servers["a"].restart()
    with pytest.raises(StaleBase, match="send it again"):
        trainer.send_adapter("math", adapter, CONFIG, deadline_s=SEND_S)
    site.fleet.wait_ready(["a"], SEND_S / 2)
    report = trainer.send_adapter("math", adapter, CONFIG, deadline_s=SEND_S)
    installed = site.servers["a"].receiver.installed()
    assert (installed.version, installed.adapters["math"].version) == (1, report.version)
    assert site.fleet.ready() == ["a"]
    site.close()
