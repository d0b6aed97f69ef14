"""Parts of rows: a range of tokens, or what one rank of several takes; no other bytes are moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hosts import Host
from hypothesis import given, settings
from hypothesis import strategies as st

import transfer_queue as tq
from transfer_queue import Slice
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.errors import InvalidInput, SchemaConflict

LENGTHS = [5, 1, 12, 7, 3]
KEYS = [f"k{n}" for n in range(len(LENGTHS))]


def experts(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 127, (length, 6, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)


ROWS = [experts(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture
def part(shared: tq.TransferQueueClient, request: pytest.FixtureRequest) -> Iterator[str]:
    """A partition with ragged rows, dense ones and texts."""
    name = request.node.name
    fields = {"experts": ROWS, "dense": torch.stack([experts(4, n) for n in range(len(ROWS))]), "text": list("abcde")}
    tq.kv_batch_put(KEYS, name, fields)
    yield name
    shared.clear_partition(name)


def expected(row: torch.Tensor, one: Slice) -> torch.Tensor:
    """By torch alone."""
    length = row.shape[one.dim]
    if one.zigzag:
        bounds = [length * n // (2 * one.parts) for n in range(2 * one.parts + 1)]
        chunks = (one.part, 2 * one.parts - 1 - one.part)
        return torch.cat([row.narrow(one.dim, bounds[n], bounds[n + 1] - bounds[n]) for n in chunks], dim=one.dim)
    if one.parts > 1:
        first, stop = length * one.part // one.parts, length * (one.part + 1) // one.parts
        return row.narrow(one.dim, first, stop - first)
    at = [slice(None)] * row.dim()
    at[one.dim] = slice(one.start, one.stop)
    return row[tuple(at)]


WAYS = {
    "a range": Slice(1, 4),
    "to the end": Slice(2),
    "the last tokens": Slice(-2),
    "all but the last": Slice(0, -1),
    "beyond": Slice(100, 200),
    "rank 1 of 3": Slice.of_rank(1, 3),
    "rank 0 of 2 in zigzag": Slice.of_rank(0, 2, zigzag=True),
    "rank 1 of 2 in zigzag": Slice.of_rank(1, 2, zigzag=True),
    "layers of a stage": Slice.of_rank(1, 2, dim=1),
    "some experts": Slice(2, 5, dim=2),
    "layers in zigzag": Slice.of_rank(1, 3, dim=1, zigzag=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_part_of_each_row_is_read(part: str, way: str) -> None:
    one = WAYS[way]
    found = tq.kv_batch_get(KEYS, part, slices={"experts": one, "dense": one})
    assert all(torch.equal(row, expected(was, one)) for row, was in zip(found["experts"], ROWS, strict=True))
    for number, row in enumerate(found["dense"]):
        assert torch.equal(row, expected(experts(4, number), one))
    assert list(found["text"]) == list("abcde")


def test_rows_in_any_order_and_of_several_puts(part: str) -> None:
    tq.kv_put("alone", part, {"experts": experts(9, 40)})
    keys = ["k3", "alone", "k0", "k1"]
    found = tq.kv_batch_get(keys, part, "experts", slices={"experts": Slice.of_rank(0, 2)})["experts"]
    rows = [ROWS[3], experts(9, 40), ROWS[0], ROWS[1]]
    assert all(torch.equal(row, was[: len(was) // 2]) for row, was in zip(found, rows, strict=True))


def test_plain_tensors_where_they_are_asked_for(part: str) -> None:
    found = tq.kv_batch_get(KEYS, part, "dense", dense=True, slices={"dense": Slice(1, 3)})["dense"]
    assert found.shape == (5, 2, 6, 8)
    assert torch.equal(found[2], experts(4, 2)[1:3])
    padded = tq.kv_batch_get(KEYS, part, "experts", pad=-1, slices={"experts": Slice(0, 4)})["experts"]
    assert padded.shape == (5, 4, 6, 8)
    assert padded[1, 1:].unique().tolist() == [-1]


def test_rows_without_numbers_have_parts_without_numbers(part: str) -> None:
    rows = {"inner": torch.zeros(2, 3, 0, 2), "first": torch.zeros(2, 0, 3), "last": torch.zeros(2, 4, 3, 0)}
    tq.kv_batch_put(["z0", "z1"], f"{part} zeros", rows)
    for one in (Slice(0, 2), Slice(0, 1, 1), Slice.of_rank(1, 2, dim=1, zigzag=True)):
        got = tq.kv_batch_get(["z0", "z1"], f"{part} zeros", dense=True, slices=dict.fromkeys(rows, one))
        for name, whole in rows.items():
            assert got[name].shape[1:] == expected(whole[0], one).shape
    tq.kv_clear(["z0", "z1"], f"{part} zeros")


def test_by_metadata(shared: tq.TransferQueueClient) -> None:
    meta = shared.put({"experts": ROWS}, partition_id="meta")
    found = shared.get_data(meta, slices={"experts": Slice(0, 2)})["experts"]
    assert all(torch.equal(row, was[:2]) for row, was in zip(found, ROWS, strict=True))
    shared.clear_partition("meta")


def test_fields_that_are_not_there_are_left_out_as_in_any_get(part: str) -> None:
    found = tq.kv_batch_get(KEYS, part, ["dense", "later"], slices={"later": Slice(0, 2)})
    assert sorted(found.keys()) == ["dense"]


BAD = {
    "texts": ("text", Slice(0, 2)),
    "a dimension that is not there": ("experts", Slice(0, 2, dim=3)),
    "a rank beyond": ("experts", Slice.of_rank(2, 2)),
    "a rank below": ("experts", Slice.of_rank(-1, 2)),
    "a range and a rank": ("experts", Slice(1, None, 0, 0, 2)),
    "no ranks": ("experts", Slice.of_rank(0, 0)),
    "half a token": ("experts", Slice(1.5)),  # type: ignore[arg-type]
    "no slice of ours": ("experts", slice(0, 2)),
}


@pytest.mark.parametrize("why", BAD)
def test_parts_that_rows_do_not_have_are_refused_by_name(part: str, why: str) -> None:
    name, one = BAD[why]
    with pytest.raises(InvalidInput, match=name):
        tq.kv_batch_get(KEYS, part, slices={name: one})


def test_the_dtype_is_that_of_the_rows_that_are_read(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("ints", "dtypes", fields={"x": [1, 2, 3]})
    tq.kv_put("floats", "dtypes", fields={"x": torch.tensor([1.5, 2.5])})
    for key, expected in (("ints", torch.tensor([1, 2])), ("floats", torch.tensor([1.5, 2.5]))):
        found = tq.kv_batch_get([key], "dtypes", slices={"x": Slice(0, 2)})["x"][0]
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
    with pytest.raises(SchemaConflict, match="float32 and int64"):
        tq.kv_batch_get(["ints", "floats"], "dtypes", slices={"x": Slice(0, 2)})
    shared.clear_partition("dtypes")


def test_out_takes_whole_rows_only(shared: tq.TransferQueueClient) -> None:
    meta = shared.put({"x": torch.zeros(2, 4)}, partition_id="out")
    with pytest.raises(InvalidInput, match="out takes whole rows"):
        shared.get_data(meta, out={"x": torch.zeros(2, 4)}, slices={"x": Slice(0, 2)})
    shared.clear_partition("out")


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), parts=st.integers(1, 5), zigzag=st.booleans())
def test_the_parts_of_all_ranks_are_the_whole_row(lengths: list[int], parts: int, zigzag: bool) -> None:
    import numpy as np

    seen = [list[int]() for _ in lengths]
    for rank in range(parts):
        for first, stop in Slice.of_rank(rank, parts, zigzag=zigzag).ranges(np.array(lengths)):
            for row, (a, b) in enumerate(zip(first.tolist(), stop.tolist(), strict=True)):
                seen[row] += range(a, b)
    assert [sorted(tokens) for tokens in seen] == [list(range(length)) for length in lengths]


def test_parts_of_fields_that_are_not_read_are_refused(shared: tq.TransferQueueClient) -> None:
    meta = shared.put({"x": torch.zeros(2, 4)}, partition_id="typo")
    with pytest.raises(InvalidInput, match=r"slices has \['y'\]"):
        shared.get_data(meta, slices={"y": Slice(0, 2)})
    with pytest.raises(InvalidInput, match=r"slices has \['y'\]"):
        shared.take("typo", ["x"], 2, "t", slices={"y": Slice(0, 2)})
    assert len(shared.take("typo", ["x"], 2, "t")[0]) == 2
    tq.kv_batch_put(["a"], "typo", fields={"x": torch.zeros(1, 4)})
    for fields in (None, ["x"]):
        with pytest.raises(InvalidInput, match=r"slices has \['y'\]"):
            tq.kv_batch_get(["a"], "typo", fields, slices={"y": Slice(0, 2)})
    shared.clear_partition("typo")


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_of_two_hosts_are_cut_alike(start_host: Callable[..., Host], dim: int) -> None:
    head = start_host()
    other = start_host(head.tcp)
    here, there = (torch.arange(2.0 * 40 * 6 * 500).view(2, 40, 6, 500) + shift for shift in (0, 5))
    head.kv_put(["a", "b"], "p", {"x": here})
    other.kv_put(["c", "d"], "p", {"x": there})
    put = {"a": here[0], "b": here[1], "c": there[0], "d": there[1]}
    for keys in (["b", "a"], ["a", "d"], ["d", "a", "c"]):
        found = head.kv_get(keys, "p", dense=True, slices={"x": Slice(1, 5, dim)})["x"]
        assert torch.equal(found, torch.stack([put[key] for key in keys]).narrow(dim + 1, 1, 4))


def test_over_a_network_only_the_part_is_moved(start_host: Callable[..., Host]) -> None:
    head = start_host()
    other = start_host(head.tcp)
    rows = [experts(40_000, n) for n in range(4)]  # 3.8 MB each
    head.kv_put(KEYS[:4], "p", {"experts": rows, "n": torch.arange(4)})
    session = other.client.session
    moved: list[int] = []
    allocate = session.pool.allocate

    def counted(nbytes: int) -> Any:
        moved.append(nbytes)
        return allocate(nbytes)

    session.pool.allocate = counted  # type: ignore[method-assign]
    one = Slice.of_rank(1, 4)
    found = run(session, kv.kv_batch_get(session, KEYS[:4], "p", slices={"experts": one}))
    assert all(torch.equal(row, expected(was, one)) for row, was in zip(found["experts"], rows, strict=True))
    assert found["n"].tolist() == [0, 1, 2, 3]
    part = sum(row.nbytes for row in rows) // 4
    assert part <= moved[0] < 1.01 * part  # what came over the network; then it is gathered
    assert len(moved) <= 2
