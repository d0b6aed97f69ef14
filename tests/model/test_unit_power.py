"""The power of a unit's machine goes at any moment of a run: what rows need is in its journal, and no more comes back.

`cd tests/helpers && PYTHONPATH=../../src:. python -m unit_power_sim SEED` runs a seed; TQ_UNIT_POWER_SEEDS: how many.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from unit_power_sim import lost

SEEDS = int(os.environ.get("TQ_UNIT_POWER_SEEDS", "200"))
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_a_unit_has_what_rows_need_after_its_machine_lost_its_power(part: int) -> None:
    found: list[str] = []
    for seed in range(part, SEEDS, PARTS):
        found += asyncio.run(lost(seed))
    assert found == []
