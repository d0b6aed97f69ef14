"""A trainer that stops at a point of an update, says so, and waits to be killed:
`python -m vllm_tests.dying URL TOKEN TRANSPORT SEED TIED POINT`."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from transfer_queue.weights import ModuleSource
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.transport import registry
from vllm_tests.models import drawn

POINTS = ("introduced", "started", "fetching", "verified", "finished")


def stop_here() -> None:
    os.write(1, b"here\n")  # at once, whole: two threads that serve workers may come here together
    threading.Event().wait()


class Stopping:
    """What a client's class has before it, to stop around the calls."""

    point = ""

    def update_weights(self, update_info: Any) -> None:
        if self.point == "started":
            stop_here()
        super().update_weights(update_info)  # type: ignore[misc]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self.point == "verified":
            stop_here()
        super().finish_weight_update(weight_version)  # type: ignore[misc]
        if self.point == "finished":
            stop_here()


class Client(Stopping, WeightSyncClient):
    pass


def main(url: str, token: str, transport: str, seed: str, tied: str, point: str) -> None:
    run(Client(url, token, timeout_s=60), transport, seed, tied, point)


def run(client: Any, transport: str, seed: str, tied: str, point: str) -> None:
    client.point = point
    source = ModuleSource(drawn(int(seed), tied == "tied"))
    trainer: Any = registry.trainer(transport).trainer_init({}, client=client, source=source)
    if point == "introduced":
        stop_here()
    if point == "fetching":
        trainer.store.bucket = trainer.store.lend = lambda *_: stop_here()
    trainer.send_weights(deadline_s=60)


if __name__ == "__main__":
    main(*sys.argv[1:])
