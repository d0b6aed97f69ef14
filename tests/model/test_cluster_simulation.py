"""Servers of three hosts and their clients on one clock, killed, frozen and cut off: what was answered is so.

`cd tests/helpers && PYTHONPATH=../../src:. python -m cluster_sim SEED` repeats a run and prints what happened in it;
TQ_CLUSTER_SEEDS sets how many there are.
"""

from __future__ import annotations

import itertools
import os

import pytest
from cluster_sim import wrong

SEEDS = int(os.environ.get("TQ_CLUSTER_SEEDS", "100"))
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_what_was_answered_is_so_whatever_becomes_of_servers_links_and_clients(part: int) -> None:
    found = itertools.chain.from_iterable(wrong(seed) for seed in range(part, SEEDS, PARTS))
    assert list(itertools.islice(found, 5)) == []
