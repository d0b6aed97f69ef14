"""Host memory to a GPU at the speed of the bus, whoever the memory belongs to.

A GPU takes bytes from pageable memory at a sixth of the speed from pinned memory (docs/benchmarks.md). But memory that
is pinned cannot be given back, to the machine or to its file, and what is uploaded lies in arenas, versions and
callers' tensors, which are not ours to pin. So threads copy it through small pinned buffers, two each: the GPU takes
one while the thread fills the other. torch keeps these buffers for the next time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.copy import Mover

STEP_NBYTES = 4 << 20  # of a buffer: smaller ones cost more calls, larger ones gain nothing
ALONE_NBYTES = 16 << 20  # torch's own copies are as fast


class Upload(NamedTuple):
    """All bytes of `source`, contiguous on the host, to `into`, contiguous on a GPU: of the same size and dtype."""

    into: torch.Tensor
    source: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.source.nbytes


Span = tuple[torch.Tensor, Bytes]


def fits(into: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether this copy is an `Upload`."""
    return (
        into.device.type == "cuda"
        and source.device.type == "cpu"
        and (into.dtype, into.shape) == (source.dtype, source.shape)
        and is_plain(into)
        and is_plain(source)
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its elements, one after the other."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def upload(uploads: Sequence[Upload], mover: Mover) -> None:
    """Carry out all of them, to one GPU. They begin after what is in this thread's current stream, and have ended when
    this returns. The threads are `mover`'s."""
    total = sum(one.nbytes for one in uploads)
    if total < ALONE_NBYTES:
        for one in uploads:
            one.into.copy_(one.source)
        return
    device = uploads[0].into.device
    before = torch.cuda.current_stream(device).record_event()
    shares = _shares(uploads, total, mover.num_threads)
    mover.together([partial(_send, share, device, before) for share in shares])


def _shares(uploads: Sequence[Upload], total: int, num: int) -> list[list[Span]]:
    """About equal bytes for each of `num` threads, in spans that fit a buffer."""
    shares: list[list[Span]] = [[] for _ in range(num)]
    done = 0
    for span in _spans(uploads):
        shares[min(num - 1, done * num // total)].append(span)
        done += span[1].nbytes
    return [share for share in shares if share]


def _spans(uploads: Sequence[Upload]) -> Iterator[Span]:
    for one in uploads:
        into, source = _flat(one.into), _flat(one.source)
        data = source.numpy()
        for start in range(0, data.nbytes, STEP_NBYTES):
            yield into[start : start + STEP_NBYTES], data[start : start + STEP_NBYTES]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,):  # of one element that was expanded
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _send(spans: Sequence[Span], device: torch.device, before: torch.cuda.Event) -> None:
    stream = torch.cuda.Stream(device)
    stream.wait_event(before)
    buffers = _Buffers(device, stream)
    with torch.cuda.stream(stream):
        for into, data in spans:
            pinned = buffers.room(data.nbytes)
            np.copyto(pinned.numpy(), data)
            into.copy_(pinned, non_blocking=True)
    stream.synchronize()


class _Buffers:
    """Two pinned buffers, filled in turn: one that the GPU still reads is waited for."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        with torch.cuda.device(device):  # pinning makes a context on the current one
            self._buffers = [torch.empty(STEP_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in "ab"]
        self._read: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._filled = 0

    def room(self, nbytes: int) -> torch.Tensor:
        """So many bytes to fill, for a copy that is queued in the stream before this is called again."""
        if self._filled + nbytes > STEP_NBYTES:
            self._read[self._turn] = self._stream.record_event()
            self._turn = 1 - self._turn
            self._filled = 0
            read = self._read[self._turn]
            if read is not None:
                read.synchronize()
        start, self._filled = self._filled, self._filled + nbytes
        return self._buffers[self._turn][start : start + nbytes]
