"""Boxes: tiling, cuts along wants, and views of tensors that are not there."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.weights.version.boxes import (
    MAX_PIECES,
    Box,
    box_of_view,
    common,
    cut,
    do_tile,
    run_of,
    strides_within,
    whole,
    within,
)

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return Box(tuple(starts), tuple(draw(st.integers(1, n - at)) for n, at in zip(shape, starts, strict=True)))


@st.composite
def splits(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """Boxes that tile a box, by cutting it in two again and again."""
    dims = [dim for dim, n in enumerate(box.lengths) if n > 1]
    if not dims or not depth or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.lengths[dim] - 1))
    low = Box(box.start, (*box.lengths[:dim], at, *box.lengths[dim + 1 :]))
    start = (*box.start[:dim], box.start[dim] + at, *box.start[dim + 1 :])
    high = Box(start, (*box.lengths[:dim], box.lengths[dim] - at, *box.lengths[dim + 1 :]))
    return draw(splits(low, depth - 1)) + draw(splits(high, depth - 1))


def count(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    found = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        found[within(box, whole(shape))] += 1
    return found


@given(st.data())
def test_boxes_tile_just_when_each_element_is_in_one(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes = data.draw(splits(whole(shape)))
    change = data.draw(st.sampled_from(["none", "drop", "twice", "other"]))
    if change == "drop":
        boxes = boxes[1:]
    elif change == "twice":
        boxes = [*boxes, boxes[0]]
    elif change == "other":
        boxes = [data.draw(boxes_in(shape)), *boxes[1:]]
    assert do_tile(shape, tuple(boxes)) == bool((count(shape, boxes) == 1).all())


@pytest.mark.parametrize("box", [Box((0,), (4, 1)), Box((0, 0), (4,)), Box((0, 4), (4, 0)), Box((-1, 0), (5, 4))])
def test_a_box_of_another_kind_tiles_nothing(box: Box) -> None:
    assert not do_tile((4, 4), (box,))


@given(st.data())
def test_the_cells_of_a_shard_tile_it_and_each_has_the_same_takers(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    shard = data.draw(boxes_in(shape))
    wants = tuple(tuple(data.draw(st.lists(boxes_in(shape), max_size=3))) for _ in range(data.draw(st.integers(0, 3))))
    cells = cut(shard, wants)
    held = torch.zeros(shape, dtype=torch.int64)
    held[within(shard, whole(shape))] = 1
    assert torch.equal(count(shape, [cell.box for cell in cells]), held)
    if len(cells) == 1 and math.prod(shape) > MAX_PIECES:
        return
    for cell, (number, table) in product(cells, enumerate(wants)):
        takes = count(shape, list(table))[within(cell.box, whole(shape))] > 0
        assert takes.all() == takes.any() == bool(cell.takers >> number & 1)


def test_neighbours_with_the_same_takers_are_one_cell() -> None:
    """As two workers take the experts of a tensor that holds all of them."""
    experts = range(128)
    wants = tuple(
        tuple(Box((expert, part * 32 + rank * 16, 0), (1, 16, 8)) for expert in experts for part in (0, 1))
        for rank in (0, 1)
    )
    assert [(cell.box.start[1], cell.box.lengths, cell.takers) for cell in cut(whole((128, 64, 8)), wants)] == [
        (0, (128, 16, 8), 1), (16, (128, 16, 8), 2), (32, (128, 16, 8), 1), (48, (128, 16, 8), 2),
    ]  # fmt: skip


def test_a_shard_of_too_many_cells_stays_whole_for_all_that_take_of_it() -> None:
    rows = range(0, 4 * MAX_PIECES, 2)
    shard = whole((4 * MAX_PIECES, 2))
    cells = cut(shard, (tuple(Box((row, 0), (1, 2)) for row in rows), (), (Box((0, 0), (1, 1)),)))
    assert [(cell.box, cell.takers) for cell in cells] == [(shard, 0b101)]


@given(st.data())
def test_what_lies_in_one_run_is_found(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box = data.draw(boxes_in(shape))
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    inside = numbers[within(box, whole(shape))].flatten()
    run = run_of(box, shape)
    in_order = bool((inside.diff() == 1).all())
    assert (run is not None) == in_order
    if run is not None:
        assert torch.equal(numbers.flatten()[run], inside)


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """What loaders do to a tensor before they copy."""
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["narrow", "transpose", "unflatten", "flatten", "unsqueeze", "select", "stride"]))
        if not tensor.ndim and kind != "unsqueeze":
            continue
        dim = draw(st.integers(0, max(0, tensor.ndim - 1)))
        if kind == "narrow":
            at = draw(st.integers(0, tensor.shape[dim] - 1))
            tensor = tensor.narrow(dim, at, draw(st.integers(1, tensor.shape[dim] - at)))
        elif kind == "transpose":
            tensor = tensor.transpose(dim, draw(st.integers(0, tensor.ndim - 1)))
        elif kind == "unflatten":
            factors = [n for n in range(1, tensor.shape[dim] + 1) if tensor.shape[dim] % n == 0]
            tensor = tensor.unflatten(dim, (draw(st.sampled_from(factors)), -1))
        elif kind == "flatten" and tensor.is_contiguous():
            tensor = tensor.view(-1)
        elif kind == "unsqueeze" and tensor.ndim < 6:
            tensor = tensor.unsqueeze(dim)
        elif kind == "select":
            tensor = tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1)))
        elif kind == "stride":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 2))),)]
    return tensor


@settings(max_examples=400)
@given(st.data())
def test_a_view_is_the_same_over_just_its_box(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    view = data.draw(views(tensor))
    box = box_of_view(shape, view.shape, view.stride(), int(view.storage_offset()))
    covered = {int(one) for one in view.flatten()}
    if box is None:
        return
    part = torch.cat([torch.tensor([-1]), tensor[within(box, whole(shape))].flatten()])[1:].reshape(box.lengths)
    assert covered == {int(one) for one in part.flatten()}
    strides = strides_within(box.lengths, shape, view.shape, view.stride())
    assert torch.equal(part.as_strided(view.shape, strides, part.storage_offset()), view)


@given(st.data())
def test_a_box_seen_as_a_view_is_that_box(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box = data.draw(boxes_in(shape))
    view = torch.empty(shape, device="meta")[within(box, whole(shape))]
    assert box_of_view(shape, view.shape, view.stride(), int(view.storage_offset())) == box


def test_what_two_boxes_share() -> None:
    assert common(Box((0, 0), (4, 4)), Box((2, 3), (4, 4))) == Box((2, 3), (2, 1))
    assert common(Box((0, 0), (4, 4)), Box((4, 0), (1, 1))) is None
