"""The calls that `differential/cases.py` compares: one program for both packages, run by the interpreter of each.

`python frameworks/calls OUT [ray]` writes one JSON line a case: its name and what it returned or raised. Of this
repository it imports only what lies beside it.
"""

from __future__ import annotations

import json
import sys

import by_key
import by_row
import of_metadata
from cases import CASES, outcome
from omegaconf import OmegaConf

import transfer_queue as tq

__all__ = ["by_key", "by_row", "of_metadata"]


def main(out: str, needs_ray: bool) -> None:
    """Run every case against a service of its own and write a line for each to `out`."""
    if needs_ray:
        import ray

        ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    with open(out, "w", encoding="utf-8") as sink:
        for function in CASES:
            print(json.dumps([function.__name__, outcome(function)]), file=sink, flush=True)
    tq.close()


if __name__ == "__main__":
    main(sys.argv[1], needs_ray="ray" in sys.argv[2:])
