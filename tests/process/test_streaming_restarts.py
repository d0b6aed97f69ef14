"""A loader whose workers begin when the service is another one by then: its loop is told, and never just ends."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from hosts import Host
from streams import dataset, numbers, put, used
from test_journal import Start, lose_power

import transfer_queue as tq
from transfer_queue.errors import LeaseExpired, ServiceRestarted

EIGHT = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.fixture
def tracker() -> Iterator[None]:
    """Ends the process that multiprocessing starts with the first spawned child."""
    yield
    gc.collect()  # its semaphores
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.fixture
def boot(start_host: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Host]]:
    """Starts a service with a journal, at the same address each time."""
    monkeypatch.setenv("TQ_ADDRESS", f"unix:{tmp_path}/run/tq.sock")
    settings: dict[str, Any] = {"durability": "machine", "journal_dir": str(tmp_path / "journal")}
    yield lambda: start_host(host="", run_dir=str(tmp_path / "run"), **settings)
    tq.close()


def waits_for(path: Path, worker: int) -> None:
    """Stands for the seconds that imports of a worker take."""
    until(path.exists, f"the go of worker {worker}")


@pytest.mark.usefixtures("tracker")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_service_that_ended_before_a_worker_had_begun_is_no_end_of_the_loop(
    boot: Callable[[], Host], tmp_path: Path, context: str
) -> None:
    machine = boot()
    tq.init()
    put(tq.get_client(), 8)
    go = tmp_path / "go"
    begins = partial(waits_for, go)
    loader = tq.StreamingDataLoader(
        dataset(), num_workers=1, worker_init_fn=begins, multiprocessing_context=context, prefetch_factor=1
    )
    stream = iter(loader)
    lose_power(machine)
    boot()
    go.touch()
    with pytest.raises((LeaseExpired, ServiceRestarted)):
        next(stream)
    with pytest.raises(ServiceRestarted):
        tq.get_client().stats()
    assert numbers(loader) == EIGHT
    assert used(tq.get_client()) == 8
