"""Arrays of other libraries, which say what they are by DLPack alone, are tensors where they are put."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import transfer_queue as tq
from transfer_queue.bridge import Numbers, Ragged, RolloutBridge, RolloutSchema
from transfer_queue.codec import lists
from transfer_queue.errors import InvalidInput, SchemaViolation, UnsupportedValue

pytestmark = pytest.mark.usefixtures("shared")


class Exporter:
    """An array of which nothing is known but that it exports `held`."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __dlpack__(self, **how: Any) -> Any:
        return self.held.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()


class FirstVersion(Exporter):
    """One of the first version of the protocol, which knows neither versions nor read-only memory."""

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.held.__dlpack__()


def test_a_column_is_a_tensor() -> None:
    given = torch.arange(6.0).view(2, 3)
    tq.kv_batch_put(["a", "b"], "column", {"x": Exporter(given), "n": Exporter(torch.tensor([1, 2]))})
    found = tq.kv_batch_get(["a", "b"], "column", dense=True)
    assert torch.equal(found["x"], given)
    assert found["n"].tolist() == [1, 2]


def test_a_row_is_a_tensor() -> None:
    tq.kv_put("a", "row", {"x": Exporter(torch.arange(3)), "s": Exporter(torch.tensor(2.5))})
    found = tq.kv_batch_get("a", "row", dense=True)
    assert found["x"].tolist() == [[0, 1, 2]]
    assert found["s"].tolist() == [2.5]


def test_a_list_of_rows_is_ragged_as_one_of_tensors_is() -> None:
    tq.kv_batch_put(["a", "b"], "rows", {"x": [Exporter(torch.arange(2)), Exporter(torch.arange(3))]})
    assert [row.tolist() for row in tq.kv_batch_get(["a", "b"], "rows")["x"].unbind()] == [[0, 1], [0, 1, 2]]


def test_inside_of_an_object_it_is_a_tensor_too() -> None:
    tq.kv_put("a", "object", {"o": {"x": Exporter(torch.arange(3)), "y": [None, Exporter(torch.ones(1))]}})
    (found,) = tq.kv_batch_get("a", "object")["o"].tolist()
    assert torch.equal(found["x"], torch.arange(3))
    assert found["y"][1].tolist() == [1.0]


def test_put_without_keys_and_with_metadata() -> None:
    client = tq.get_client()
    meta = client.put({"x": Exporter(torch.arange(4))}, partition_id="meta")
    client.put({"y": Exporter(torch.ones(4))}, metadata=meta)
    assert client.get_data(meta)["y"].tolist() == [1.0] * 4


def test_cells_stored_once_may_come_from_other_libraries() -> None:
    big = torch.arange(40_000).view(1, -1).expand(2, -1).contiguous()
    tq.kv_batch_put(["a", "b"], "dedupe", {"x": Exporter(big)}, dedupe=True)
    assert torch.equal(tq.kv_batch_get(["a", "b"], "dedupe", dense=True)["x"], big)


def test_memory_is_shared_where_torch_permits() -> None:
    held = torch.ones(4)
    assert lists.exchanged(Exporter(held)).data_ptr() == held.data_ptr()


def test_read_only_memory_is_put_and_stays_as_it_is() -> None:
    held = np.arange(4.0)
    held.flags.writeable = False
    tq.kv_batch_put(["a", "b", "c", "d"], "read-only", {"x": Exporter(held)})
    found = tq.kv_batch_get(["a", "b", "c", "d"], "read-only")["x"]
    found += 1
    assert held.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_exporter_of_the_first_version_gives_only_memory_that_may_be_written() -> None:
    held = np.arange(2.0)
    tq.kv_batch_put(["a", "b"], "first version", {"x": FirstVersion(held)})
    assert tq.kv_batch_get(["a", "b"], "first version")["x"].tolist() == [0.0, 1.0]
    held.flags.writeable = False
    with pytest.raises(UnsupportedValue, match=r"field 'x': .*[rR]ead-?only"):
        tq.kv_batch_put(["a", "b"], "first version", {"x": FirstVersion(held)})


def test_an_array_of_arrow_is_a_column() -> None:
    tq.kv_batch_put(["a", "b"], "arrow", {"x": pa.array([1.5, 2.5])})
    assert tq.kv_batch_get(["a", "b"], "arrow")["x"].tolist() == [1.5, 2.5]


def test_what_cannot_be_exported_is_refused_by_field_and_nothing_is_stored() -> None:
    class Broken(Exporter):
        def __dlpack__(self, **how: Any) -> Any:
            raise BufferError("the memory was given away")

    for value in (Broken(torch.ones(2)), Exporter(torch.ones(2, requires_grad=True))):
        with pytest.raises(UnsupportedValue, match=r"field 'x'.*put a copy of it"):
            tq.kv_batch_put(["a", "b"], "broken", {"x": value})
    with pytest.raises(UnsupportedValue, match=r"field 'x'.*the memory was given away"):
        tq.kv_put("a", "broken", {"x": Broken(torch.ones(2))})
    with pytest.raises(InvalidInput, match="'y' has 3 rows, expected 2"):
        tq.kv_batch_put(["a", "b"], "broken", {"x": Exporter(torch.ones(2)), "y": Exporter(torch.ones(3))})
    assert "broken" not in tq.kv_list()


def test_a_registered_type_stays_what_it_is() -> None:
    class Own(Exporter):
        pass

    tq.register_type(Own, name="Own", to_plain=lambda own: own.held.tolist(), from_plain=lambda plain: Own(plain))
    tq.kv_batch_put(["a", "b"], "registered", {"x": [Own(torch.ones(1)), Own(torch.ones(2))]})
    assert [type(value) for value in tq.kv_batch_get(["a", "b"], "registered")["x"].tolist()] == [Own, Own]


def test_the_bridge_takes_columns_and_rows_of_them(shared: tq.TransferQueueClient) -> None:
    schema = RolloutSchema({"tokens": Ragged(), "rewards": Numbers(), "values": Ragged(dtype="float32", optional=True)})
    bridge = RolloutBridge(shared, schema)
    rows = [Exporter(torch.arange(2)), [7], Exporter(torch.arange(3))]
    bridge.put("step", {"tokens": rows, "rewards": Exporter(torch.ones(3))})
    found = bridge.fetch("step", "critic", columns=["tokens", "rewards"])
    assert [row.tolist() for row in found["tokens"]] == [[0, 1], [7], [0, 1, 2]]
    assert found["rewards"].tolist() == [1.0, 1.0, 1.0]
    bridge.write_back(found, {"values": Exporter(torch.zeros(3, 2))})
    assert [len(row) for row in bridge.fetch("step", "actor", columns=["values"])["values"]] == [2, 2, 2]


def test_the_bridge_refuses_by_row_and_field_what_cannot_be_exported(shared: tq.TransferQueueClient) -> None:
    class Broken(Exporter):
        def __dlpack__(self, **how: Any) -> Any:
            raise BufferError("elsewhere")

    bridge = RolloutBridge(shared, RolloutSchema({"tokens": Ragged()}))
    with pytest.raises(SchemaViolation, match=r"row 1, field 'tokens': .*elsewhere") as found:
        bridge.put("refused", {"tokens": [[1], Broken(torch.arange(2))]})
    assert (found.value.row, found.value.field) == (1, "tokens")


def test_a_new_value_of_a_cell_is_a_tensor() -> None:
    tq.kv_put("a", "update", {"x": torch.zeros(2), "n": torch.ones(2)})
    tq.kv_update("a", "update", "x", Exporter(torch.ones(2)), "add")
    tq.kv_update("a", "update", {"x": Exporter(torch.ones(2))}, None, "append")
    tq.kv_update("a", "update", ["n"], {"n": Exporter(torch.full((2,), 7.0))}, "max")
    found = tq.kv_batch_get("a", "update", dense=True)
    assert (found["x"].tolist(), found["n"].tolist()) == ([[1.0] * 4], [[7.0] * 2])
