"""Plain tensors on request: dense where rows agree, padded where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import InvalidInput


@pytest.fixture
def part(shared: tq.TransferQueueClient) -> Iterator[str]:
    yield "dense"
    shared.clear_partition("dense")


def put(part: str, **fields: Any) -> list[str]:
    keys = [str(row) for row in range(len(next(iter(fields.values()))))]
    tq.kv_batch_put(keys, part, fields)
    return keys


def test_images_go_straight_into_a_convolution(part: str) -> None:
    images = torch.randn(4, 3, 8, 8)
    keys = put(part, image=images, label=torch.arange(4))
    assert tq.kv_batch_get(keys, part)["image"].is_nested, "as in TransferQueue 0.1.11"
    td = tq.kv_batch_get(keys, part, dense=True)
    assert torch.equal(td["image"], images)
    assert torch.nn.Conv2d(3, 1, 3)(td["image"]).shape == (4, 1, 6, 6)
    assert np.asarray(td["image"]).shape == (4, 3, 8, 8)
    assert torch.cat([td["image"], td["image"]]).shape == (8, 3, 8, 8)
    assert torch.equal(td["label"], torch.arange(4))


def test_dense_data_is_a_view_where_rows_lie_together(part: str, shared: tq.TransferQueueClient) -> None:
    meta = shared.put({"x": torch.zeros(64, 4096)}, partition_id=part)
    td = shared.get_data(meta)
    assert tq.to_dense(td)["x"].data_ptr() == td["x"].values().data_ptr()


def test_rows_of_different_length_need_a_padding(part: str) -> None:
    keys = put(part, ids=[[1, 2, 3], [4]])
    with pytest.raises(InvalidInput, match=r"'ids'.*pad="):
        tq.kv_batch_get(keys, part, dense=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_one_small_float_among_empty_rows_is_padded(part: str, dtype: torch.dtype) -> None:
    rows = [torch.tensor([], dtype=dtype), torch.tensor([2.0]).to(dtype)]
    tq.kv_batch_put(["a", "b"], part, fields={"x": rows})
    found = tq.kv_batch_get(["a", "b"], part, pad=0)["x"]
    assert found.dtype == dtype
    assert found.float().tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_rows_of_unsigned_numbers_are_padded(part: str, dtype: torch.dtype) -> None:
    ragged = [torch.tensor([7], dtype=dtype), torch.tensor([8, 9], dtype=dtype)]
    varied = [torch.tensor([[7, 8]]).to(dtype), torch.tensor([[8], [9]]).to(dtype)]
    td = tq.kv_batch_get(put(part, ragged=ragged, varied=varied), part, pad=65535)
    assert td["ragged"].dtype == td["varied"].dtype == dtype
    assert td["ragged"].tolist() == [[7, 65535], [8, 9]]
    assert td["varied"].tolist() == [[[7, 8], [65535, 65535]], [[8, 65535], [9, 65535]]]


@pytest.mark.parametrize(
    ("dtype", "named"), [(torch.float16, "has no 65535000"), (torch.bits8, "cannot fill")], ids=str
)
def test_a_dtype_that_cannot_be_padded_so_is_named(part: str, dtype: torch.dtype, named: str) -> None:
    rows = [torch.ones(n * dtype.itemsize, dtype=torch.uint8).view(dtype) for n in (1, 2)]
    with pytest.raises(InvalidInput, match=f"'x' is {dtype}, which .*{named}"):
        tq.kv_batch_get(put(part, x=rows), part, pad=65535000)


def test_a_number_pads_every_field_on_the_right(part: str, shared: tq.TransferQueueClient) -> None:
    meta = shared.put({"ids": [[1, 2, 3], [4]], "p": [[0.5], [0.25, 1.0]], "name": ["a", "b"]}, partition_id=part)
    td = shared.get_data(meta, pad=-1)
    assert td["ids"].tolist() == [[1, 2, 3], [4, -1, -1]]
    assert td["p"].tolist() == [[0.5, -1.0], [0.25, 1.0]]
    assert list(td["name"]) == ["a", "b"]


def test_left_to_a_multiple_with_a_mask(part: str) -> None:
    keys = put(part, ids=[[1, 2, 3], [4]])
    td = tq.kv_batch_get(keys, part, pad=tq.Padding(value=9, side="left", multiple=4, mask=True))
    assert td["ids"].tolist() == [[9, 1, 2, 3], [9, 9, 9, 4]]
    assert td["ids_mask"].tolist() == [[False, True, True, True], [False, False, False, True]]


def test_rows_of_one_length_are_rounded_up_as_well(part: str) -> None:
    keys = put(part, ids=[[1, 2, 3], [4, 5, 6]], image=torch.ones(2, 3, 5))
    td = tq.kv_batch_get(keys, part, pad=tq.Padding(multiple=4, mask="{}_own"))
    assert td["ids"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 0]]
    assert td["ids_own"].sum() == 6
    assert td["image"].shape == (2, 3, 5), "sizes of an image are not lengths"
    assert td["image_own"].all()


def test_a_mapping_pads_fields_in_their_own_way(part: str) -> None:
    keys = put(part, ids=[[1], [2, 3]], logp=[[0.5], [0.5, 0.5]], same=[[1, 1], [2, 2]])
    td = tq.kv_batch_get(keys, part, pad={"ids": tq.Padding(value=7, side="left"), "logp": 0.0})
    assert td["ids"].tolist() == [[7, 1], [2, 3]]
    assert td["logp"].tolist() == [[0.5, 0.0], [0.5, 0.5]]
    assert td["same"].tolist() == [[1, 1], [2, 2]]
    with pytest.raises(InvalidInput, match="'logp'"):
        tq.kv_batch_get(keys, part, pad={"ids": 0})
    with pytest.raises(InvalidInput, match="other"):
        tq.kv_batch_get(keys, part, pad={"ids": 0, "logp": 0, "other": 0})


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_that_differ_in_several_dimensions(part: str, side: str) -> None:
    rows = [torch.ones(2, 3), torch.full((3, 1), 2.0)]
    keys = put(part, x=rows)
    td = tq.kv_batch_get(keys, part, pad=tq.Padding(value=0, side=side, mask=True))
    for row, got, own in zip(rows, td["x"], td["x_mask"], strict=True):
        assert torch.equal(got[own].view(row.shape), row)
        assert got[~own].eq(0).all()
        assert got.shape == (3, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [(torch.tensor([1, 2], dtype=torch.uint8), -1), (torch.tensor([1, 2]), 0.5), (torch.tensor([1, 2]), float("nan")),
     (torch.tensor([True, False]), 2), (torch.tensor([1, 2]), 1 << 63), (torch.tensor([1.0, 2.0]), 10**400)],
    ids=["uint8", "fraction", "nan", "bool", "63 bits", "huge"],
)  # fmt: skip
def test_a_value_the_dtype_does_not_have_is_refused(part: str, field: torch.Tensor, value: float) -> None:
    keys = put(part, x=[field, field[:1]])
    with pytest.raises(InvalidInput, match="'x'"):
        tq.kv_batch_get(keys, part, pad=value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float64, 1e300), (torch.int64, 16777217.0), (torch.uint64, (1 << 64) - 1), (torch.int64, np.int32(-7)),
     (torch.float32, np.float32(0.1))],
    ids=["float64", "whole", "uint64", "numpy int", "numpy float"],
)  # fmt: skip
def test_every_number_that_the_dtype_has_can_be_padded_with(part: str, dtype: torch.dtype, value: float) -> None:
    keys = put(part, x=[torch.ones(1, dtype=dtype), torch.ones(2, dtype=dtype)])
    padded = tq.kv_batch_get(keys, part, pad=tq.Padding(value=value, multiple=np.int64(2)))["x"]
    assert (padded.shape, padded.tolist()[0]) == ((2, 2), [1, value])


@pytest.mark.parametrize("pad", ["0", None, {"x": "0"}], ids=str)
def test_a_bad_padding_is_refused_before_anything_is_fetched(part: str, pad: Any) -> None:
    if pad is None:
        for bad in (
            {"side": "up"},
            {"multiple": 0},
            {"multiple": True},
            {"multiple": 2**63},
            {"value": "0"},
            {"mask": 1},
        ):
            with pytest.raises(InvalidInput):
                tq.Padding(**bad)
        return
    with pytest.raises(InvalidInput, match="number"):
        tq.kv_batch_get(["no such key"], part, pad=pad)


def test_a_mask_never_replaces_a_field(part: str) -> None:
    keys = put(part, response=[[1], [2, 3]], response_mask=[[1], [1, 0]])
    with pytest.raises(InvalidInput, match="'response_mask'"):
        tq.kv_batch_get(keys, part, pad=tq.Padding(mask=True))


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    inner=st.sampled_from([(), (2,), (2, 3)]),
    dim=st.integers(0, 2),
    side=st.sampled_from(["left", "right"]),
    multiple=st.integers(1, 4),
)
def test_padding_is_what_a_loop_over_rows_does(
    lengths: list[int], inner: tuple[int, ...], dim: int, side: str, multiple: int
) -> None:
    dim = min(dim, len(inner))
    rows = [torch.randint(1, 9, (*inner[:dim], length, *inner[dim:])) for length in lengths]
    nested = torch.nested.nested_tensor([row.movedim(dim, 0).contiguous() for row in rows], layout=torch.jagged)
    td = TensorDict({"x": nested}, [len(rows)])
    got = tq.to_dense(td, tq.Padding(value=0, side=side, multiple=multiple, mask=True))
    size = max(lengths)
    if len(set(lengths)) > 1 or not inner:
        size = -(-size // multiple) * multiple
    for row, own, mask in zip(rows, got["x"], got["x_mask"], strict=True):
        want = torch.zeros(size, *inner, dtype=torch.int64)
        at = slice(0, row.shape[dim]) if side == "right" else slice(size - row.shape[dim], size)
        want[at] = row.movedim(dim, 0)
        assert torch.equal(own, want)
        assert torch.equal(mask, want != 0)


def test_take_gives_plain_tensors_and_a_refused_padding_takes_nothing(
    part: str, shared: tq.TransferQueueClient
) -> None:
    put(part, ids=[[1, 2], [3]])
    with pytest.raises(InvalidInput, match="number"):
        shared.take(part, ["ids"], 2, "t", pad="0")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="'ids'"):
        shared.take(part, ["ids"], 2, "t", dense=True)
    meta, data = shared.take(part, ["ids"], 2, "t", pad=0)
    assert data["ids"].tolist() == [[1, 2], [3, 0]]
    assert len(meta) == 2


ROWS: dict[str, Any] = {
    "first dimension": [torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)],
    "second dimension": [torch.arange(6.0).view(3, 2), torch.arange(3.0).view(3, 1)],
    "both": [torch.arange(6.0).view(3, 2), torch.arange(2.0).view(1, 2)[:, :1]],
    "one shape": [torch.arange(3), torch.arange(3, 6)],
    "numbers": [torch.tensor(1), torch.tensor(2)],
    "no elements": [torch.zeros(2, 0), torch.zeros(1, 0)],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("alone", [False, True])
def test_one_row_is_as_plain_as_to_dense_makes_it(
    name: str, alone: bool, part: str, shared: tq.TransferQueueClient
) -> None:
    rows = ROWS[name]
    metas = [shared.put({"x": [row]}, partition_id=part) for row in rows] if alone else []
    whole = metas[0].concat(metas) if alone else shared.put({"x": rows}, partition_id=part)
    for number, row in enumerate(rows):
        found = shared.get_data(whole[number : number + 1], dense=True)["x"]
        assert not found.is_nested
        assert found.dtype == row.dtype
        assert torch.equal(found, row[None])
        assert torch.equal(found, tq.to_dense(shared.get_data(whole[number : number + 1]))["x"])


def test_what_lies_in_a_tensordict_stays_as_it_is(part: str, shared: tq.TransferQueueClient) -> None:
    inner = TensorDict({"j": torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}, [2])
    meta = shared.put({"td": inner}, partition_id=part)
    for rows in (meta, meta[:1]):
        assert shared.get_data(rows, dense=True)["td"]["j"].is_nested


def test_to_dense_gives_another_tensordict(part: str, shared: tq.TransferQueueClient) -> None:
    data = shared.get_data(shared.put({"name": ["a", "b"]}, partition_id=part))
    tq.to_dense(data)["more"] = torch.zeros(2)
    assert "more" not in data.keys()  # noqa: SIM118
