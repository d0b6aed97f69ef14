"""A process may have told torch to make its tensors elsewhere: `torch.set_default_device`, `with torch.device(...)`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq

COLUMNS: dict[str, Any] = {
    "uniform": torch.arange(6.0).view(3, 2),
    "no elements": torch.zeros(3, 0),
    "ragged": torch.nested.as_nested_tensor([torch.arange(n) for n in (2, 0, 3)], layout=torch.jagged),
    "two ragged dimensions": [torch.ones(2, 3), torch.ones(1, 2), torch.ones(3, 1)],
    "lists": [[1, 2], [3], []],
    "mixed": [torch.ones(2), "text", None],
    "arrays": [np.arange(2), np.arange(3), np.arange(0)],
    "tensors among others": [torch.ones(2, 3), torch.ones(1, 2), "text"],
    "dicts": NonTensorStack({"a": torch.ones(2)}, {"a": torch.ones(3)}, {"a": 1}),
}


def values_of(column: Any) -> list[Any]:
    rows = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
    return [row.tolist() if isinstance(row, (torch.Tensor, np.ndarray)) else repr(row) for row in rows]


@pytest.mark.parametrize("name", COLUMNS)
def test_what_is_written_and_read_lies_in_the_memory_of_the_host(name: str, shared: tq.TransferQueueClient) -> None:
    before = shared.put({"x": COLUMNS[name]}, partition_id="default device")
    expected = values_of(shared.get_data(before)["x"])
    with torch.device("meta"):
        after = shared.put({"x": COLUMNS[name]}, partition_id="default device")
        found = shared.get_data(after)["x"]
        again = shared.get_data(before)["x"]
        alone, two = shared.get_data(after[1:2])["x"], shared.get_data(after[:2])["x"]
    assert values_of(found) == values_of(again) == expected
    assert values_of(alone) == expected[1:2]
    assert values_of(two) == expected[:2]
    shared.clear_partition("default device")


def test_padding_is_filled_in_the_memory_of_the_host(shared: tq.TransferQueueClient) -> None:
    meta = shared.put(TensorDict({"x": COLUMNS["ragged"]}, [3]), partition_id="default device")
    with torch.device("meta"):
        found = shared.get_data(meta, pad=7)["x"]
    assert found.tolist() == [[0, 1, 7], [7, 7, 7], [0, 1, 2]]
    shared.clear_partition("default device")


def test_allocated_tensors_lie_in_the_memory_of_the_host(shared: tq.TransferQueueClient) -> None:
    with torch.device("meta"):
        room = shared.allocate({"x": ((2, 3), torch.float32), "e": ((2, 0), torch.int8)})
        assert {one.device.type for one in (room["x"], room["e"])} == {"cpu"}
        room["x"][:] = torch.ones(2, 3, device="cpu")
        meta = room.commit("default device")
    assert shared.get_data(meta)["x"].values().tolist() == [1.0] * 6
    shared.clear_partition("default device")
