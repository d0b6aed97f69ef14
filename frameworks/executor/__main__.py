"""Plays the programs of `frameworks.differential` with the package of this interpreter.

`python frameworks/executor [ray]` reads a program a line, `[number, sampler, calls]` in JSON, and answers each with a
line: the outcomes of its calls. It imports nothing of this repository but what lies beside it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import own_sampler
from omegaconf import OmegaConf
from other_clients import OtherClients
from player import Player

import transfer_queue as tq


def main(needs_ray: bool) -> None:
    """Answer until the input ends. Whatever else prints to standard output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.environ["PYTHONPATH"] = os.path.dirname(__file__)  # the controllers import `own_sampler`
    cluster = ""
    os.dup2(2, 1)
    if needs_ray:
        import ray

        cluster = ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False).address_info["address"]
    running: Any = None
    others: OtherClients | None = None
    config: Any = None
    for line in sys.stdin:
        number, sampler, calls = json.loads(line)
        if sampler != running:
            if others is not None:
                others.close()
                tq.close()
            name, given = running = sampler
            kind = getattr(tq, name, None) or getattr(own_sampler, name)
            controller = {"polling_mode": True, "sampler": kind(**given)}
            config = tq.init(OmegaConf.create({"controller": controller}, flags={"allow_objects": True}))
            others = OtherClients(config, cluster)
        assert others is not None
        print(json.dumps(Player(number, config, others).play(calls)), file=answers, flush=True)
    if others is not None:
        others.close()
        tq.close()


if __name__ == "__main__":
    main(needs_ray="ray" in sys.argv[1:])
