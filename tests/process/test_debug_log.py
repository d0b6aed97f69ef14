"""TQ_LOGGING_LEVEL=DEBUG: one line for every operation, in the process that does it."""

from __future__ import annotations

import asyncio
import logging
import re
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from paths import SOURCES
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.errors import DeadlineExceeded, InvalidInput, StorageKeyNotFoundError

MS = r"\d+\.\d\d ms"
Lines = Callable[[], list[str]]


@pytest.fixture
def lines(shared: tq.TransferQueueClient, caplog: pytest.LogCaptureFixture) -> Lines:
    """What was logged since the last call, with the times taken out."""
    caplog.set_level(logging.DEBUG, "transfer_queue")

    def found() -> list[str]:
        seen = [record for record in caplog.records if record.name == "transfer_queue"]
        assert all(record.levelno == logging.DEBUG for record in seen)
        caplog.clear()
        return [re.sub(MS, "T", record.getMessage()) for record in seen]

    return found


@pytest.fixture
def part(request: pytest.FixtureRequest, shared: tq.TransferQueueClient) -> Iterator[str]:
    yield request.node.name
    shared.clear_partition(request.node.name)


def test_puts_and_gets_say_what_and_how_much(shared: tq.TransferQueueClient, part: str, lines: Lines) -> None:
    meta = shared.put({"tokens": torch.zeros(4, 3)}, partition_id=part)
    assert lines() == [f"put '{part}': 4 rows x ['tokens'], 64 bytes, T"]
    shared.get_data(meta)
    assert lines() == [f"get_data '{part}': 4 rows x ['tokens'], 48 bytes, T"]
    tq.kv_batch_put(["a", "b"], part, {"x": torch.zeros(2, 20_000), "s": ["one", "two"]})
    (line,) = lines()
    assert re.fullmatch(rf"kv_batch_put '{part}': 2 rows x \['x', 's'\], 16\d{{4}} bytes, T", line)
    tq.kv_batch_get(["b"], part, select_fields=["x"])
    assert lines() == [f"kv_batch_get '{part}': 1 rows x ['x'], 80000 bytes, T"]
    tq.kv_put("a", part, tag={"n": 1})
    assert lines() == [f"kv_put '{part}': 1 rows, 0 bytes, T"]


def test_a_wait_says_for_what_and_how_long(shared: tq.TransferQueueClient, part: str, lines: Lines) -> None:
    shared.put({"x": [1]}, partition_id=part)
    lines()
    shared.get_meta(["x"], 1, part, task_name="t")
    assert lines() == [f"get_meta '{part}': 1 rows x ['x'], 0 bytes, T"]
    with pytest.raises(DeadlineExceeded):
        asyncio.run(shared.async_get_meta(["x"], 1, part, task_name="t", timeout_s=0.02))
    (line,) = lines()
    assert line.startswith(f"get_meta '{part}': DeadlineExceeded after T: partition '{part}': fewer than 1 rows")


def test_other_operations_have_a_line_each(shared: tq.TransferQueueClient, part: str, lines: Lines) -> None:
    shared.set_partition(part, size=2)
    asyncio.run(tq.async_kv_clear(["k"], part))
    shared.get_partition_list()
    tq.kv_list(part)
    assert lines() == [f"set_partition '{part}': T", f"kv_clear '{part}': T", "get_partition_list: T",
                       f"kv_list '{part}': T"]  # fmt: skip


def test_errors_pass_through_and_are_logged(shared: tq.TransferQueueClient, part: str, lines: Lines) -> None:
    with pytest.raises(InvalidInput):
        shared.put({"x": [1]})
    assert lines() == ["put: InvalidInput after T: put needs metadata or a partition_id"]
    meta = shared.put({"x": torch.zeros(2, 40_000)}, partition_id=part)
    shared.clear_samples(meta)
    lines()
    with pytest.raises(StorageKeyNotFoundError):
        shared.put({"y": torch.zeros(2, 40_000)}, metadata=meta)
    (line,) = lines()
    assert line.startswith(f"put '{part}': StorageKeyNotFoundError after T")
    assert shared.stats()["arena_nbytes_used"] < 320_000, "the block of the put was not given up"


def test_without_it_nothing_is_looked_at(
    shared: tq.TransferQueueClient, part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "transfer_queue")
    monkeypatch.setattr("transfer_queue.client.tracing._traced", None)
    assert len(shared.put({"x": [1]}, partition_id=part)) == 1


def program(body: str, level: str) -> list[str]:
    """What a program prints to standard error with TQ_LOGGING_LEVEL, without the times."""
    code = "import transfer_queue as tq\n" + textwrap.dedent(body)
    environment = {"PYTHONPATH": SOURCES, "TQ_LOGGING_LEVEL": level, "PATH": "/usr/bin:/bin"}
    done = CHILDREN.run(["-c", code], environment)
    done.check_returncode()
    return [re.sub(r"^[-\d]+ [:,\d]+", "D", re.sub(MS, "T", line)) for line in done.stderr.splitlines()]


def test_a_program_without_logging_sees_it_on_standard_error() -> None:
    said = program("""
        tq.init()
        tq.get_client().put({"x": [1, 2]}, partition_id="p")
        import logging
        logging.basicConfig(format="mine: %(message)s")
        tq.kv_clear(["k"], "p")
        tq.close()
    """, "debug")  # fmt: skip
    mine = [line for line in said if "p'" in line]
    assert mine == ["D - DEBUG - transfer_queue - put 'p': 2 rows x ['x'], 64 bytes, T", "mine: kv_clear 'p': T"]


def test_a_program_that_asks_for_less_sees_warnings_only() -> None:
    said = program("""
        tq.init()
        tq.get_client().put({"x": [1, 2]}, partition_id="training")
        tq.kv_clear(["k"], "trainign")
        tq.close()
    """, "info")  # fmt: skip
    assert [line for line in said if "put" in line] == []
    assert [line.rpartition(": ")[2] for line in said if "kv_clear" in line] == [
        "there is no partition 'trainign'; the nearest is 'training'"
    ]


def test_a_stream_has_a_line_for_each_batch(shared: tq.TransferQueueClient, part: str, lines: Lines) -> None:
    shared.put({"x": [1, 2, 3, 4]}, partition_id=part)
    stream = tq.StreamingDataset(None, 2, 2, ["x"], part, "t", 0, should_check_consumption_status=True)
    lines()
    assert [data["x"].tolist() for data, _ in stream] == [[1, 2], [3, 4]]
    batches = [line for line in lines() if line.startswith("stream")]
    assert batches == [f"stream '{part}', batch {number}: 2 rows x ['x'], T" for number in (0, 1)]
