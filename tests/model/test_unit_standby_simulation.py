"""A standby of a unit has what its server had, and goes on to what rows need, at random moments of random runs.

`cd tests/helpers && PYTHONPATH=../../src:. python -m unit_sim SEED` repeats one; TQ_UNIT_SEEDS sets how many there are.
"""

from __future__ import annotations

import itertools
import os

import pytest
from unit_sim import differences

SEEDS = int(os.environ.get("TQ_UNIT_SEEDS", "500"))
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_a_standby_of_a_unit_has_what_it_had_and_keeps_what_rows_need(part: int) -> None:
    found = itertools.chain.from_iterable(differences(seed) for seed in range(part, SEEDS, PARTS))
    assert list(itertools.islice(found, 5)) == []
