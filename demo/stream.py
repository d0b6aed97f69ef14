"""The rows of step after step, for a worker that adds a field to all of them and may be killed anywhere."""

from __future__ import annotations

from collections.abc import Iterator

from demo.port import Port, Rows
from demo.settings import Settings
from demo.tables import train_partition


def samples(port: Port, settings: Settings, fields: list[str]) -> Iterator[Rows]:
    """All rows that this task has not acknowledged yet, a read at a time; ends after the last step.

    Which those are says the queue, so a worker that takes the place of another one goes on where that one was.
    """
    for step in range(port.trained(), settings.steps):
        partition = train_partition(step)
        left = settings.rows_per_step - port.num_used(partition)
        while left > 0:
            rows = port.take(
                partition, fields, settings.rows_per_read, meanwhile=lambda step=step: port.trained() > step
            )
            if rows is None:
                break  # the trainer has done this step
            port.pass_by("taken", step)
            yield rows
            left -= len(rows)
