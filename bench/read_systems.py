"""Who holds the rows of a case of `bench.reads`: each puts them, and gives the function that is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.read_cases import CASES, SETTLED, SETTLED_S, Batch, Rows

Read = Callable[[], Any]
NUM_CPUS = 16  # for Ray: TransferQueue 0.1.11 reserves a processor for each of its actors, and waits for ever on two


def by_queue(case: str) -> Read:
    """The `transfer_queue` that this interpreter finds: this repository's, or another tree's."""
    import transfer_queue as tq

    tq.init()
    return _of_queue(tq, case)


def by_released(case: str) -> Read:
    """TransferQueue 0.1.11."""
    import ray

    import transfer_queue as tq

    ray.init(address="local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init()
    return _of_queue(tq, case)


def _of_queue(tq: Any, case: str) -> Read:
    data = CASES[case]()
    if isinstance(data, Batch):
        keys = put_batch(tq, data)
        wanted = [keys[number] for number in data.wanted]
    else:
        rows, order = data
        for number, row in enumerate(rows):
            tq.kv_put(key=f"k{number}", partition_id="p", fields=row)
        wanted = [f"k{number}" for number in order]
        if case in SETTLED:
            time.sleep(SETTLED_S)
    return lambda: tq.kv_batch_get(keys=wanted, partition_id="p")


def put_batch(tq: Any, data: Batch) -> list[str]:
    import torch
    from tensordict import NonTensorStack, TensorDict

    fields: dict[str, Any] = {
        name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, (values, offsets) in data.ragged.items()
    }
    fields |= {name: NonTensorStack(*values) for name, values in data.values.items()}
    count = len(next(iter(data.values.values()))) if data.values else len(next(iter(data.ragged.values()))[1]) - 1
    keys = [f"k{number}" for number in range(count)]
    tq.kv_batch_put(keys=keys, partition_id="p", fields=TensorDict(fields, [count]))
    return keys


def by_ray(case: str) -> Read:
    """Ray's object store, the way a user writes it: one object for each put, and the same TensorDict made of them.
    Tensors are put as arrays: Ray maps those, and copies tensors, which takes thirty times as long."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    data = CASES[case]()
    if isinstance(data, Batch):
        ragged = {name: (values.numpy(), offsets) for name, (values, offsets) in data.ragged.items()}
        reference, wanted = ray.put((ragged, data.values)), data.wanted
        return lambda: of_batch(Batch(*ray.get(reference), wanted))
    rows, order = data
    references = [ray.put({name: as_array(value) for name, value in row.items()}) for row in rows]
    mixed = [references[number] for number in order]
    return lambda: of_rows(ray.get(mixed))


def by_hand(case: str) -> Read:
    """The same TensorDict made of rows that this process holds: no store at all, what any reader has to do."""
    data = CASES[case]()
    if isinstance(data, Batch):
        return lambda: of_batch(data)
    rows, order = data
    return lambda: of_rows([rows[number] for number in order])


def as_array(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


def of_rows(rows: Rows) -> Any:
    import numpy as np
    import torch
    from tensordict import TensorDict

    found = {}
    for name, value in rows[0].items():
        column = [row[name] for row in rows]
        found[name] = joined(column) if isinstance(value, (torch.Tensor, np.ndarray)) else listed(column)
    return TensorDict(found, [len(rows)])


def of_batch(data: Batch) -> Any:
    from tensordict import TensorDict

    found: dict[str, Any] = {}
    for name, (values, offsets) in data.ragged.items():
        marks = offsets.tolist()
        found[name] = joined([values[marks[row] : marks[row + 1]] for row in data.wanted])
    for name, column in data.values.items():
        found[name] = listed(column[row] for row in data.wanted)
    return TensorDict(found, [len(data.wanted)])


def joined(rows: list[Any]) -> Any:
    import numpy as np
    import torch

    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    if isinstance(rows[0], np.ndarray):
        return torch.nested.nested_tensor_from_jagged(torch.from_numpy(np.concatenate(rows)), offsets)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def listed(values: Iterable[Any]) -> Any:
    from tensordict import NonTensorStack

    return NonTensorStack(*values)


SYSTEMS: dict[str, Callable[[str], Read]] = {"queue": by_queue, "0.1.11": by_released, "ray": by_ray, "hand": by_hand}
