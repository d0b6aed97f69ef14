"""A journal that ends at any byte brings back what there was when its last whole entry was written.

`cd tests/helpers && PYTHONPATH=../../src python -m journal_sim SEED` repeats a run.
"""

from __future__ import annotations

import itertools
import os

import pytest
from journal_sim import differences

SEEDS = int(os.environ.get("TQ_JOURNAL_SEEDS", "200"))
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_a_journal_that_ends_anywhere_brings_back_what_there_was(part: int) -> None:
    found = itertools.chain.from_iterable(differences(seed) for seed in range(part, SEEDS, PARTS))
    assert list(itertools.islice(found, 5)) == []
