"""Memory for what is staged, and copying at the speed of memory.

Fresh small pages take bytes eight times slower than huge or touched ones (docs/benchmarks.md). So staging memory is
huge-page-advised, and stays with the process for the next update: up to `KEEP_NBYTES`, or, where the kernel may take
it meanwhile when it is short of memory, up to `LENT_PART` of the machine's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from transfer_queue.codec.layout import ALIGN
from transfer_queue.memory import uploads
from transfer_queue.memory.copy import Mover
from transfer_queue.memory.pool import Pool
from transfer_queue.memory.tensors import is_plain
from transfer_queue.memory.uploads import Upload, upload

KEEP_NBYTES = 1 << 30
LENT_PART = 0.25
T = TypeVar("T")
_pool: Pool
_mover: Mover


def _start() -> None:
    """Also in a forked child: another thread of the parent may have been amid an allocation, or a copy."""
    global _pool, _mover
    _pool, _mover = Pool(KEEP_NBYTES, lends_idle=True), Mover()
    if _pool.lends_idle:
        _pool.keep_nbytes = max(KEEP_NBYTES, int(LENT_PART * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


_start()
os.register_at_fork(after_in_child=_start)


def room(nbytes: int) -> torch.Tensor:
    """Uninitialised bytes; they go back to the pool with the last tensor over them."""
    return torch.from_numpy(_pool.allocate(nbytes))


def warm(sizes: Sequence[int], times: int = 1) -> None:
    """Have memory for pieces of these sizes ready, `times` over, up to `KEEP_NBYTES`: the first updates take their
    bytes as fast as later ones then. Takes about 0.2 s a GB."""
    held: list[torch.Tensor] = []
    left = KEEP_NBYTES
    for nbytes in [nbytes for _ in range(times) for nbytes in sizes]:
        left -= nbytes
        if left < 0:
            break
        held.append(room(nbytes).zero_())


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies, each on its device; those on the CPU together in one piece of staging memory."""
    sizes = [-(-one.nbytes // ALIGN) * ALIGN if one.device.type == "cpu" else 0 for one in tensors]
    parts = room(sum(sizes)).split(sizes)
    found = []
    for one, part in zip(tensors, parts, strict=True):
        if one.nbytes and one.device.type == "cpu":
            made = part[: one.nbytes].view(one.dtype).reshape(one.shape)
            write(made, one.detach())
            found.append(made)
        else:
            found.append(one.detach().clone(memory_format=torch.contiguous_format))
    return found


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor itself, or, where it is on another device, a copy in staging memory. Torch copies it faster
    than one thread does by pinned buffers (16 and 8 GB/s of an H200)."""
    if tensor.device.type == "cpu":
        return tensor
    return room(tensor.nbytes).view(tensor.dtype).reshape(tensor.shape).copy_(tensor)


def upload_all(pairs: Iterable[tuple[torch.Tensor, T]]) -> list[tuple[torch.Tensor, T]]:
    """Write each second one into the first where that is plain bytes from the host to a GPU, all of them together. The
    other pairs."""
    to_gpu: dict[torch.device, list[Upload]] = {}
    others = []
    for into, source in pairs:
        if isinstance(source, torch.Tensor) and uploads.fits(into, source):
            to_gpu.setdefault(into.device, []).append(Upload(into, source))
        else:
            others.append((into, source))
    for found in to_gpu.values():
        upload(found, _mover)
    return others


def write(into: torch.Tensor, source: torch.Tensor) -> None:
    """`into.copy_(source)`; large plain copies on the CPU by several threads."""
    alike = into.device.type == source.device.type == "cpu" and (into.dtype, into.shape) == (source.dtype, source.shape)
    if alike and is_plain(into) and is_plain(source):
        _mover.move([(into.data_ptr(), source.data_ptr(), into.nbytes)])
    else:
        into.copy_(source)
