"""What each rank of a mesh holds of a tensor, by its coordinate alone: no processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from transfer_queue.errors import UnsupportedValue
from transfer_queue.weights import StateDictSource
from transfer_queue.weights.version.boxes import Box, whole, within
from transfer_queue.weights.version.plans import plan_pieces
from transfer_queue.weights.version.sharded import TensorShard, boxes_held

Mesh = tuple[tuple[int, ...], tuple[Any, ...]]  # sizes of the axes, and a placement for each


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh]:
    """A shape, uneven and empty ones too, on a mesh of up to three axes, in any order of placements."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Any] = []
    for axis in range(len(sizes)):
        kinds: list[st.SearchStrategy[Any]] = [st.just(Replicate())]
        if shape:
            dims = st.integers(0, len(shape) - 1)
            kinds.append(dims.map(Shard))
            later = sizes[axis + 1 :]
            if later:  # as FSDP2 makes it of a dimension that a later axis divides already
                kinds.append(st.builds(_StridedShard, dims, split_factor=st.sampled_from(later)))
        placements.append(draw(st.one_of(kinds)))
    return shape, (sizes, tuple(placements))


def local_of(data: torch.Tensor, mesh: Mesh, coordinate: tuple[int, ...]) -> torch.Tensor:
    """What torch leaves there: one placement after the other takes its part of what the ones before left."""
    for size, placement, at in zip(*mesh, coordinate, strict=True):
        if not placement.is_replicate():
            data = placement._split_tensor(data, size, with_padding=False, contiguous=True)[0][at]
    return data


def ranks_of(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size) for size in mesh[0]))


@given(layouts())
def test_boxes_are_what_torch_leaves_at_each_rank(layout: tuple[tuple[int, ...], Mesh]) -> None:
    shape, mesh = layout
    data = torch.arange(whole(shape).size).view(shape)
    for coordinate in ranks_of(mesh):
        local = local_of(data, mesh, coordinate)
        found = boxes_held(shape, mesh[0], coordinate, mesh[1])
        assert sum(box.size for box, _ in found) == local.numel()
        for box, place in found:
            assert torch.equal(local[place], data[within(box, whole(shape))])


@given(layouts())
def test_the_boxes_of_all_ranks_make_a_plan_that_gives_each_element_once(
    layout: tuple[tuple[int, ...], Mesh],
) -> None:
    shape, mesh = layout
    tables = [
        [TensorShard("a", torch.uint8, shape, box) for box, _ in boxes_held(shape, mesh[0], coordinate, mesh[1])]
        for coordinate in ranks_of(mesh)
    ]
    given_out = torch.zeros(shape, dtype=torch.int64)
    for plan in plan_pieces(tables):
        for places in plan.places:
            for place in places:
                given_out[within(place.box, whole(shape))] += 1
    assert bool((given_out == 1).all())


def test_a_dimension_that_two_axes_divide_is_several_boxes() -> None:
    """FSDP2 over tensor parallelism: 7 rows to two parallel parts first, each of them to two ranks."""
    mesh = (2, 2), (_StridedShard(0, split_factor=2), Shard(0))
    found = {one: [box for box, _ in boxes_held((7,), mesh[0], one, mesh[1])] for one in ranks_of(mesh)}
    rows = sorted(row for boxes in found.values() for (row,), (n,) in boxes for row in range(row, row + n))
    assert rows == list(range(7))
    assert found[0, 0][0] == Box((0,), (2,))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sharded_tensor_without_elements_is_given_by_every_rank_as_a_plain_one_is(dim: int) -> None:
    plain = StateDictSource({"empty": torch.empty(0, 3)})
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.empty(0, 1 if dim else 3)
        given = DTensor.from_local(local, mesh, [Shard(dim)], shape=torch.Size([0, 3]), stride=(3, 1))
        source = StateDictSource({"empty": given})
        assert source.shards() == plain.shards()
        assert [(name, part.shape) for name, part in source.parts()] == [("empty", (0, 3))]
    finally:
        dist.destroy_process_group()


def test_summands_are_refused_by_name() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        summed = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(UnsupportedValue, match=r"'layer.weight'.*summands"):
            StateDictSource({"layer.weight": summed})
    finally:
        dist.destroy_process_group()
