"""A standby has what the server had, to the bit, whenever the server is killed: thousands of moments of random runs.

`cd tests/helpers && PYTHONPATH=../../src python -m standby_sim SEED` repeats one.
"""

from __future__ import annotations

import itertools
import os

import pytest
from standby_sim import differences

SEEDS = int(os.environ.get("TQ_STANDBY_SEEDS", "500"))
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_a_standby_has_what_the_server_had(part: int) -> None:
    found = itertools.chain.from_iterable(differences(seed) for seed in range(part, SEEDS, PARTS))
    assert list(itertools.islice(found, 5)) == []
