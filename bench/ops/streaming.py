"""A producer and a StreamingDataLoader in another process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench import digest, payloads
from bench.session import Session

TASK = "bench"
SEEDS = 8
"""Different micro-batches; they repeat after these."""


def produce(session: Session, partition: str, num: int, rows: int, pace_s: float, lead_s: float) -> dict[str, Any]:
    """Put `num` micro-batches of `rows` rows, `pace_s` apart from begin to begin, the first after `lead_s`.

    Monotonic nanoseconds at which each put had returned. The field "number" says which row of the stream a row is.
    """
    batches = [micro_batch(session, number, rows) for number in range(num)]
    begin = time.monotonic() + lead_s
    done = []
    for number, batch in enumerate(batches):
        time.sleep(max(0.0, begin + number * pace_s - time.monotonic()))
        session.system.put(partition, [f"row-{number * rows + i:07d}" for i in range(rows)], batch)
        done.append(time.monotonic_ns())
    return {"done_ns": done}


def micro_batch(session: Session, number: int, rows: int) -> Any:
    """A few rows of a token step in the system's own form."""
    columns = payloads.tokens(rows, seed=number % SEEDS)
    columns["number"] = payloads.Dense(np.arange(number * rows, (number + 1) * rows, dtype=np.int64))
    return session.system.batch(columns)


def consume(session: Session, partition: str, num: int, rows: int) -> dict[str, Any]:
    """Monotonic nanoseconds at which each of `num` micro-batches was in the hands of the loader's user.

    Rows come in order and each once, with the tokens that were written; raises WrongBytes otherwise.
    """
    stream = micro_batches(session, partition, rows)
    held, sums = [], [tokens_sum(micro_batch(session, number, rows)) for number in range(SEEDS)]
    for number in range(num):
        batch, _ = next(stream)
        held.append(time.monotonic_ns())
        if batch["number"].tolist() != list(range(number * rows, (number + 1) * rows)):
            raise digest.WrongBytes(f"micro-batch {number} has the rows {batch['number'].tolist()}")
        if tokens_sum(batch) != sums[number % SEEDS]:
            raise digest.WrongBytes(f"the tokens of micro-batch {number} differ")
        del batch
    stream.close()
    return {"held_ns": held}


def micro_batches(session: Session, partition: str, rows: int) -> Any:
    """Generator over a fresh dataset in a loader without workers."""
    dataset = session.tq.StreamingDataset(
        config=session.system.config,  # type: ignore[attr-defined]
        batch_size=rows,
        micro_batch_size=rows,
        data_fields=["tokens", "loss_mask", "rollout_log_probs", "reward", "number"],
        partition_id=partition,
        task_name=TASK,
        dp_rank=0,
    )
    loader = session.tq.StreamingDataLoader(dataset, num_workers=0)

    def stream() -> Iterator[Any]:
        yield from loader

    return stream()


def tokens_sum(batch: Any) -> int:
    return int(batch["tokens"].values().sum())
