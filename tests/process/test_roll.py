"""ROLL's transfer backend: rows of tensors and arrays, read elsewhere, with exactly the fields that were asked for."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Child

import transfer_queue as tq
from transfer_queue.errors import ConfigError, InvalidInput, NotReady, NotSupported, UnknownRows, UnsupportedValue
from transfer_queue.integrations import roll

FIELDS: dict[str, Any] = {
    "input_ids": torch.arange(12).reshape(3, 4),
    "rewards": torch.tensor([0.0, 0.5, 1.0]),
    "tags": np.array(["math", "code", "math"], dtype=object),
    "turns": np.array([{"n": 1}, None, [1, 2]], dtype=object),
    "scores": np.array([1.5, 2.5, 3.5]),
    "boxes": np.arange(6).reshape(3, 2),
}
IDS = ["a", "b", "c"]


@pytest.fixture
def backend(client: tq.TransferQueueClient) -> Iterator[None]:
    """ROLL's driver has named TransferQueue."""
    roll.init_transfer_backend(SimpleNamespace(backend_name="TransferQueue", backend_config={}))
    yield
    roll.init_transfer_backend(None)
    roll._is_off = False


def objects(column: Any) -> list[Any]:
    return [one.tolist() if isinstance(one, np.ndarray) else one for one in column]


def test_rows_come_back_in_the_order_of_the_keys_as_they_were(backend: None) -> None:
    batch = roll.put("step_0", IDS, FIELDS, 3)
    assert (len(batch), batch.partition, batch.fields) == (3, "step_0", set(FIELDS))
    found = roll.get("step_0", ["c", "a", "a"], list(FIELDS))
    order = [2, 0, 0]
    assert set(found.keys()) == set(FIELDS)
    assert found["input_ids"].equal(FIELDS["input_ids"][order])
    assert not found["input_ids"].is_nested
    assert found["rewards"].equal(FIELDS["rewards"][order])
    for name in ("tags", "turns", "scores", "boxes"):
        assert objects(found[name]) == objects([FIELDS[name][at] for at in order]), name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_its_rows(backend: None, layout: torch.layout) -> None:
    rows = [torch.zeros(2), torch.ones(2)]
    roll.put("step_0", ["a", "b"], {"x": torch.nested.nested_tensor(rows, layout=layout)}, 2)
    assert roll.get("step_0", ["b", "a"], ["x"])["x"].tolist() == [[1, 1], [0, 0]]


def test_a_batch_that_travels_is_read_where_it_arrives(backend: None, child: Callable[[str], Child]) -> None:
    batch = roll.put("step_0", IDS, FIELDS, 3)
    told = pickle.dumps(batch)
    assert pickle.loads(told).cache is None  # noqa: S301
    reader = child(f"""
        import pickle
        batch = pickle.loads({told!r})
        print(sorted(batch.materialize(["input_ids", "tags"]).keys()), batch.cache["input_ids"].sum().item())
        print(list(batch.materialize()["tags"]))
        batch.drop()
    """)
    assert reader.finish().splitlines() == ["['input_ids', 'tags'] 66", "['math', 'code', 'math']"]
    assert tq.kv_list("step_0") == {}


def test_a_batch_may_have_no_rows(backend: None) -> None:
    batch = roll.put("step_0", [], {"x": torch.ones(0, 8, dtype=torch.int64), "t": np.array([], object)}, 0)
    assert (len(batch), batch.materialize(["x"])["x"].shape) == (0, (0, 8))
    travelled = pickle.loads(pickle.dumps(batch))  # noqa: S301
    found = travelled.materialize()
    assert (found.batch_size, {name: len(found[name]) for name in found.keys()}) == ((0,), {"x": 0, "t": 0})  # noqa: SIM118
    travelled.drop()
    assert tq.kv_list("step_0") == {}
    with pytest.raises(InvalidInput):
        roll.put("step_0", ["a"], {"x": torch.ones(0)}, 0)


def test_later_columns_join_the_rows(backend: None) -> None:
    roll.put("step_0", IDS, {"x": torch.ones(3, 2)}, 3)
    roll.put("step_0", IDS[:2], {"y": torch.zeros(2)}, 2)
    assert set(roll.get("step_0", IDS[:2], ["x", "y"]).keys()) == {"x", "y"}
    with pytest.raises(NotReady, match=r"\['y'\]"):
        roll.get("step_0", IDS, ["x", "y"])


@pytest.mark.parametrize(
    ("fields", "size", "error", "text"),
    [
        ({"x": [1, 2, 3]}, 3, UnsupportedValue, "'x' is a list"),
        ({"x": torch.ones(3), "y": np.zeros(2)}, 3, InvalidInput, "'x': 3, 'y': 2"),
        ({"x": torch.ones(3)}, 4, InvalidInput, "a batch of 4 rows"),
        ({"x": torch.ones(2)}, 2, InvalidInput, "3 keys with fields of 2 rows"),
        ({"x": torch.tensor(1.0)}, 3, InvalidInput, "has no rows"),
        ({}, 3, InvalidInput, "one at least"),
    ],
    ids=["list", "sizes", "batch_size", "ids", "scalar", "none"],
)
def test_bad_columns_are_refused_and_nothing_is_stored(
    backend: None, fields: dict[str, Any], size: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        roll.put("step_0", IDS, fields, size)
    assert tq.kv_list("step_0") == {}


def test_the_errors_are_those_that_roll_expects() -> None:
    assert issubclass(UnsupportedValue, TypeError)
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(NotReady, ValueError)


def test_what_is_not_there_is_an_error_and_never_left_out(backend: None) -> None:
    roll.put("step_0", IDS, {"x": torch.ones(3)}, 3)
    with pytest.raises(NotReady):
        roll.get("step_0", IDS, ["x", "other"])
    with pytest.raises(UnknownRows):
        roll.get("step_0", ["a", "z"], ["x"])
    assert roll.get("step_0", IDS, []).batch_size == torch.Size([3])
    roll.delete("step_0", ["a", "z"], ["x"])
    assert set(tq.kv_list("step_0")["step_0"]) == {"b", "c"}


def test_without_a_backend_put_gives_nothing_and_reads_are_errors() -> None:
    roll.init_transfer_backend(SimpleNamespace(backend_name=None, backend_config=None))
    try:
        assert roll.put("step_0", IDS, FIELDS, 3) is None
        for call in (roll.get, roll.delete):
            with pytest.raises(NotSupported):
                call("step_0", IDS, ["x"])
    finally:
        roll._is_off = False


def test_another_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'Mooncake'"):
        roll.init_transfer_backend(SimpleNamespace(backend_name="Mooncake", backend_config={}))


def test_a_forked_process_has_a_client_of_its_own(backend: None) -> None:
    roll.put("step_0", IDS, {"x": torch.arange(3)}, 3)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        found = roll.get("step_0", IDS, ["x"])["x"].tolist()
        roll.put("step_0", ["d"], {"x": torch.tensor([9])}, 1)
        os.write(writing, repr(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "[0, 1, 2]"
    os.waitpid(pid, 0)
    assert roll.get("step_0", ["d", "a"], ["x"])["x"].tolist() == [9, 0]


def test_install_has_rolls_own_functions_use_it(backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLL itself is on no package index: here is a module of its name that looks like its own."""
    module: Any = ModuleType(roll.MODULE)
    for name in ("roll", "roll.distributed", "roll.distributed.scheduler"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, roll.MODULE, module)
    with pytest.raises(NotSupported, match="TransferQueueClient"):
        roll.install()
    module.tq, module.TransferQueueClient = None, object
    roll.install()
    roll.install()
    assert module.tq is tq
    client = module.TransferQueueClient()
    monkeypatch.undo()
    client.put("step_0", IDS, {"x": torch.arange(3)}, 3)
    assert client.get("step_0", ["c"], ["x"])["x"].tolist() == [2]
    client.delete("step_0", IDS, ["x"])
    assert tq.kv_list("step_0") == {}
