"""Tensors that have no memory of their own: refused by name, with what to do, before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import MemoryMappedTensor, TensorDict, tensorclass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import transfer_queue as tq
from transfer_queue.errors import UnsupportedValue


@pytest.fixture
def part(shared: tq.TransferQueueClient) -> Iterator[str]:
    yield "strange"
    shared.clear_partition("strange")


def refused(part: str, tensor: Any, text: str, *, rows: bool = True) -> None:
    """Every way to put it is refused, naming the field."""
    ways = [
        lambda: tq.kv_put("a", part, {"fine": 1, "odd": tensor}),
        lambda: tq.kv_put("a", part, {"odd": {"deep": [tensor]}}),
        lambda: tq.kv_batch_put(["a", "b"], part, {"odd": [tensor, tensor]}),
        lambda: tq.kv_batch_put(["a", "b"], part, {"odd": [tensor, "other"]}),
        lambda: tq.get_client().put({"odd": [{"t": tensor}]}, partition_id=part),
    ]
    if rows:
        ways.append(lambda: tq.kv_batch_put(["a", "b"], part, {"odd": tensor}))
    for way in ways:
        with pytest.raises(UnsupportedValue, match=f"(?s)'odd'.*{text}"):
            way()
    assert tq.kv_list(part) == {}


@pytest.mark.usefixtures("shared")
def test_a_dtensor_names_full_tensor_and_to_local(part: str) -> None:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(2, 3), DeviceMesh("cpu", [0]), [Shard(0)])
        refused(part, tensor, re.escape("put .full_tensor()") + ".*" + re.escape(".to_local()"))
        refused(part, torch.nn.Parameter(tensor), "full_tensor")
        tq.kv_batch_put(["a", "b"], part, {"x": tensor.full_tensor()})
    finally:
        dist.destroy_process_group()


def test_a_fake_tensor(part: str) -> None:
    with FakeTensorMode():
        tensor = torch.ones(2, 3)
    refused(part, tensor, "FakeTensor")


def test_tensors_without_memory(part: str) -> None:
    freed = torch.ones(2, 3)
    freed.untyped_storage().resize_(0)
    refused(part, freed, "freed")
    refused(part, torch.empty(2, 3, device="meta"), "meta device")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["sparse coo", "sparse csr", "mkldnn", "quantized"])
def test_layouts_that_are_not_strided(part: str, layout: str) -> None:
    dense = torch.eye(2)
    made = {
        "sparse coo": dense.to_sparse,
        "sparse csr": dense.to_sparse_csr,
        "mkldnn": dense.to_mkldnn,
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    }[layout]()
    refused(part, made, f"{layout} tensor cannot be stored: put .*(dense|dequantize)")


def test_tensors_inside_a_transform(part: str) -> None:
    def inside(row: torch.Tensor) -> torch.Tensor:
        refused(part, row, "transform", rows=False)
        return row

    torch.func.vmap(inside)(torch.ones(2, 3))


class Plain(torch.Tensor):
    """A subclass that has its values, and nothing else."""


def test_a_subclass_comes_back_as_a_tensor_unless_it_would_lose_something(part: str) -> None:
    tensor = torch.arange(4.0).view(2, 2).as_subclass(Plain)
    tq.kv_batch_put(["a", "b"], part, {"x": tensor})
    assert tq.kv_batch_get(["a", "b"], part, dense=True)["x"].tolist() == [[0, 1], [2, 3]]
    tensor.unit = "metre"  # type: ignore[attr-defined]
    tq.kv_clear(["a", "b"], part)
    refused(part, tensor, r"'unit'.*as_subclass")


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(2, 3, dtype=torch.complex64).conj(), torch.randn(2, dtype=torch.complex64).conj().imag,
     torch.arange(6.0).view(2, 3).t(), torch.ones(1).expand(3), torch.nn.Parameter(torch.ones(2)),
     torch.ones(3, requires_grad=True) * 2, torch.arange(8)[::3], torch.empty(2, 0), torch.tensor(1.0)[None]],
    ids=["conj", "neg", "transposed", "expanded", "parameter", "graph", "strided", "empty", "view"],
)  # fmt: skip
def test_views_come_back_as_their_values(part: str, tensor: torch.Tensor) -> None:
    keys = [str(row) for row in range(len(tensor))]
    tq.kv_batch_put(keys, part, {"x": tensor})
    tq.kv_put("one", part, {"x": tensor[0], "deep": {"t": tensor}})
    got = tq.kv_batch_get(keys, part, dense=True)["x"]
    assert torch.equal(got, tensor.detach().resolve_conj().resolve_neg())
    assert torch.equal(tq.kv_batch_get("one", part)["deep"][0]["t"], tensor.detach().resolve_conj().resolve_neg())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_is_its_rows(part: str) -> None:
    rows = [torch.ones(2, 3), torch.ones(1, 4)]
    tq.kv_batch_put(["a", "b"], part, {"x": torch.nested.nested_tensor(rows)})
    assert [torch.equal(a, b) for a, b in zip(tq.kv_batch_get(["a", "b"], part)["x"].unbind(), rows, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_in_a_list_come_back(part: str) -> None:
    rows = [torch.nested.nested_tensor([torch.full((n, 3), n), torch.ones(1, 3)]) for n in (2, 4)]
    tq.kv_batch_put(["a", "b"], part, {"x": rows})
    got = list(tq.kv_batch_get(["a", "b"], part)["x"])
    assert [row.layout for row in got] == [torch.strided, torch.strided]
    assert [torch.equal(a, b) for row, want in zip(got, rows, strict=True) for a, b in zip(row, want, strict=True)] == [
        True
    ] * 4


def test_a_nested_tensor_of_fake_ones(part: str) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        values, offsets = torch.ones(4), torch.tensor([0, 1, 4])
        nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    with pytest.raises(UnsupportedValue, match=r"'odd'.*FakeTensor"):
        tq.kv_batch_put(["a", "b"], part, {"odd": nested})


def test_a_memory_mapped_tensor_is_a_tensor(part: str) -> None:
    """What `TensorDict.memmap_` and `load_memmap` give."""
    mapped = MemoryMappedTensor.from_tensor(torch.arange(6.0).view(2, 3))
    for number, column in enumerate((mapped, [mapped[0], mapped[1]], TensorDict({"x": mapped}, [2]).memmap_()["x"])):
        tq.kv_batch_put(["a", "b"], part, {f"x{number}": column, "cell": [{"t": mapped[0]}, mapped]})
        tq.kv_put("c", part, {f"x{number}": mapped[1], "cell": None})
        td = tq.kv_batch_get(["b", "a", "c"], part)
        assert [row.tolist() for row in td[f"x{number}"].unbind()] == [mapped[n].tolist() for n in (1, 0, 1)]
        assert torch.equal(td["cell"][0], mapped)
        assert td["cell"][1]["t"].tolist() == mapped[0].tolist()
        assert type(td["cell"][0]) is torch.Tensor


def test_a_memory_mapped_column_shares_equal_rows(part: str) -> None:
    mapped = MemoryMappedTensor.from_tensor(torch.ones(2, 20_000))
    tq.kv_batch_put(["a", "b"], part, {"x": mapped}, dedupe=True)
    assert tq.kv_batch_get(["a", "b"], part, dense=True)["x"].equal(torch.ones(2, 20_000))


@tensorclass
class Sample:
    x: torch.Tensor
    name: str


def test_a_tensorclass_says_to_make_a_tensordict(part: str) -> None:
    one = Sample(x=torch.ones(3), name="a", batch_size=[])
    refused(part, one, re.escape(".to_tensordict()"), rows=False)
    tq.kv_put("a", part, {"x": [one.to_tensordict()]})
    assert tq.kv_batch_get("a", part)["x"][0][0]["name"] == "a"


@pytest.mark.parametrize("as_batch", [True, False])
def test_a_batch_or_column_that_is_a_tensorclass_says_so_too(part: str, as_batch: bool) -> None:
    rows = Sample(x=torch.ones(2, 3), name="a", batch_size=[2])
    with pytest.raises(UnsupportedValue, match=re.escape(": put .to_tensordict() of it")):
        tq.kv_batch_put(["a", "b"], part, rows if as_batch else {"t": rows})
    assert tq.kv_list(part) == {}
