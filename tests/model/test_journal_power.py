"""The power goes at any moment of a run, and the disk forgets what it was not told to sync: what was promised is there.

`cd tests/helpers && PYTHONPATH=../../src python -m power_sim SEED` runs a seed.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from power_sim import lost

SEEDS = int(os.environ.get("TQ_POWER_SEEDS", "200"))
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_that_was_promised_is_lost_with_the_power(part: int) -> None:
    found: list[str] = []
    for seed in range(part, SEEDS, PARTS):
        found += asyncio.run(lost(seed))
    assert found == []
