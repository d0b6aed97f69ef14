"""What is made of a saved state and the facts after it is what a service has once nobody is left who was there.

`cd tests/helpers && PYTHONPATH=../../src python -m ledger_sim SEED` repeats a run.
"""

from __future__ import annotations

import itertools
import os

import pytest
from ledger_sim import differences

SEEDS = int(os.environ.get("TQ_LEDGER_SEEDS", "300"))
PARTS = 6


@pytest.mark.parametrize("part", range(PARTS))
def test_facts_bring_a_saved_state_to_where_the_controller_was(part: int) -> None:
    found = itertools.chain.from_iterable(differences(seed) for seed in range(part, SEEDS, PARTS))
    assert list(itertools.islice(found, 5)) == []
