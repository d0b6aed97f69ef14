"""Series of partitions through a real service: producers that wait for consumers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import until
from test_standby import DURABLE, kill, server_of, standby_of

import transfer_queue as tq
from transfer_queue.errors import DeadlineExceeded


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_producer_runs_no_further_ahead_than_allowed_and_never_polls(client: Any, ahead: int) -> None:
    opened: list[int] = []

    def produce() -> None:
        for number in range(8):
            tq.open_partition(f"step_{number}", "steps", ahead, ["actor", "critic"], clear=True, timeout_s=60)
            opened.append(number)
            tq.get_client().put({"x": torch.full((4,), number)}, partition_id=f"step_{number}")

    producer = threading.Thread(target=produce)
    producer.start()
    for number in range(8):
        for task in ("actor", "critic"):
            meta = tq.get_client().get_meta(["x"], 4, f"step_{number}", task_name=task, timeout_s=30)
            assert (tq.get_client().get_data(meta)["x"] == number).all()
            assert len(opened) <= number + ahead + 1
            tq.finish_partition(f"step_{number}", task)
    producer.join()
    assert tq.series_status("steps") == {"open": {}, "waiting": []}


def test_who_waits_for_a_partition_is_visible_and_hears_for_whom(client: Any) -> None:
    tq.open_partition("a", "s", 0, ["actor"])
    with pytest.raises(DeadlineExceeded, match=r"'a' \(for actor\)"):
        tq.open_partition("b", "s", 0, timeout_s=0.05)
    waiter = threading.Thread(target=tq.open_partition, args=("b", "s", 0), kwargs={"timeout_s": 60})
    waiter.start()
    until(lambda: tq.series_status("s")["waiting"] == ["b"], "the wait")
    tq.get_client().clear_partition("a")
    waiter.join()
    assert list(tq.series_status("s")["open"]) == ["b"]


def test_a_series_outlives_the_server(service: Any) -> None:
    client = service(**DURABLE)
    tq.open_partition("a", "s", 0, ["actor"], clear=True)
    standby_of(client)
    waiter = threading.Thread(target=tq.open_partition, args=("b", "s", 0), kwargs={"timeout_s": 60.0})
    waiter.start()
    kill(server_of(client))
    tq.finish_partition("a", "actor")
    waiter.join()
    assert list(tq.series_status("s")["open"]) == ["b"]
