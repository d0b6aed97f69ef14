"""What a loader takes of tensors that are not there, in a rehearsal, and what it loads from the pieces that came."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from transfer_queue.codec.dtypes import dtype_name
from transfer_queue.weights.receive.lazy import Notes, lazies, supplied
from transfer_queue.weights.version.boxes import Box, whole, within
from transfer_queue.weights.version.pieces import Pieces
from transfer_queue.weights.version.plans import Wants

Takes = Callable[[torch.Tensor], torch.Tensor]  # what a loader copies of a tensor


def rehearsed(source: torch.Tensor, dtype: torch.dtype, takes: Takes) -> Wants:
    metas = {"w": (dtype_name(source.dtype), tuple(source.shape))}
    notes = Notes(metas)
    for _, lazy in lazies(metas, notes):
        taken = takes(lazy)
        torch.empty(taken.shape, dtype=dtype, device="meta").copy_(taken)
    return notes.wants()


def loaded(held: Pieces, dtype: torch.dtype, takes: Takes) -> torch.Tensor:
    ((_, lazy),) = supplied({"w": held}, {"w": (dtype_name(held.dtype), held.shape)})
    taken = takes(lazy)
    return torch.empty(taken.shape, dtype=dtype).copy_(taken)


def pieces_of(source: torch.Tensor, wants: Wants) -> Pieces:
    """As they come: in a bucket, among others."""
    bucket, at, parts = torch.full((4096,), 7, dtype=torch.uint8), 64, []
    for box in wants["w"]:
        data = source[within(box, whole(tuple(source.shape)))].contiguous()
        place = bucket[at : at + data.nbytes]
        place.copy_(data.view(-1).view(torch.uint8))
        parts.append((box, place.view(source.dtype).view(data.shape)))
        at += data.nbytes + 64
    return Pieces(source.dtype, tuple(source.shape), parts)


VIEWS: dict[str, Takes] = {
    "rows": lambda w: w.narrow(0, 4, 4).view(torch.uint8),
    "columns": lambda w: w.narrow(1, 4, 4).view(torch.uint8),
    "rows of a view": lambda w: w.view(torch.uint8).narrow(0, 4, 4),
    "turned": lambda w: w.narrow(0, 4, 4).view(torch.uint8).t(),
}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("takes", VIEWS.values(), ids=VIEWS)
def test_a_loader_that_takes_bytes_gets_those_of_a_plain_load(dtype: torch.dtype, takes: Takes) -> None:
    source = (torch.arange(64.0) - 30).view(8, 8).to(dtype)
    wants = rehearsed(source, torch.uint8, takes)
    assert torch.equal(loaded(pieces_of(source, wants), torch.uint8, takes), takes(source))


def doubled_part(w: torch.Tensor) -> torch.Tensor:
    part = w.narrow(0, 4, 4)
    part.mul_(2)
    return part


def doubled_through_a_view(w: torch.Tensor) -> torch.Tensor:
    w[2:6, 1:3] *= 2
    w.t()[0].fill_(5)
    return w.narrow(0, 4, 4)


def written_into(w: torch.Tensor) -> torch.Tensor:
    w[:2].copy_(w[4:6])
    return w.narrow(0, 0, 4)


def doubled_bytes(w: torch.Tensor) -> torch.Tensor:
    return w.narrow(0, 4, 4).mul_(2).view(torch.int32)


def changed_through_its_bytes(w: torch.Tensor) -> torch.Tensor:
    part = w.narrow(0, 4, 4)
    flat = part.view(torch.uint8)
    flat ^= 0x80
    flat[:, 1:3].split(1, dim=1)[1].fill_(9)
    return part


def doubled_in_a_list(w: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([w.narrow(0, 4, 2), w.narrow(0, 6, 2)], 2.0)
    return w.narrow(0, 4, 4)


def doubled_as_the_result(w: torch.Tensor) -> torch.Tensor:
    part = w.narrow(0, 4, 4)
    torch.mul(part, 2, out=part)
    return part


CHANGES: dict[str, Takes] = {
    "part": doubled_part, "view": doubled_through_a_view, "copy": written_into, "bytes": doubled_bytes,
    "through bytes": changed_through_its_bytes, "list": doubled_in_a_list, "result": doubled_as_the_result,
}  # fmt: skip


@pytest.mark.parametrize("takes", CHANGES.values(), ids=CHANGES)
def test_what_a_loader_changes_in_place_is_so_for_it_and_for_nobody_else(takes: Takes) -> None:
    source = torch.arange(64.0).view(8, 8)
    dtype = torch.int32 if takes is doubled_bytes else source.dtype
    held = pieces_of(source, rehearsed(source, dtype, takes))
    halves = [(box, source[within(box, whole((8, 8)))].clone()) for box in (Box((0, 0), (4, 8)), Box((4, 0), (4, 8)))]
    for one in (held, Pieces(source.dtype, (8, 8), halves)):
        for _ in range(2):  # the second time to go back to what was installed
            assert torch.equal(loaded(one, dtype, takes), takes(source.clone()))
