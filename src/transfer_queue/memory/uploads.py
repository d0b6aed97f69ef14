"""Host memory to a GPU at the speed of the bus, whoever the memory belongs to (`pinned`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.copy import Mover
from transfer_queue.memory.pinned import STEP_NBYTES, PinnedBuffers, pinned_for
from transfer_queue.memory.tensors import byte_view, is_plain

ALONE_NBYTES = 16 << 20  # torch's own copies are as fast


class Upload(NamedTuple):
    """All bytes of `source`, plain on the host, to `into`, plain on a GPU: of the same shape and dtype."""

    into: torch.Tensor
    source: torch.Tensor


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


def upload(uploads: Sequence[Upload], mover: Mover) -> None:
    """Carry out all of them, to one GPU. They begin after what is in this thread's current stream, and have ended when
    this returns. The threads are `mover`'s."""
    total = sum(one.source.nbytes for one in uploads)
    if total < ALONE_NBYTES:
        for one in uploads:
            one.into.copy_(one.source)
        return
    device = uploads[0].into.device
    before = torch.cuda.current_stream(device).record_event()
    is_inference = torch.is_inference_mode_enabled()  # else its tensors cannot be written in other threads
    shares = _shares(uploads, total, mover.num_threads)
    mover.together([partial(_send, share, device, before, is_inference) for share in shares])


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
        into, data = byte_view(one.into), byte_view(one.source).numpy()
        for start in range(0, data.nbytes, STEP_NBYTES):
            yield into[start : start + STEP_NBYTES], data[start : start + STEP_NBYTES]


def _send(spans: Sequence[Span], device: torch.device, before: torch.cuda.Event, is_inference: bool) -> None:
    with torch.inference_mode(is_inference), pinned_for(device) as buffers:
        if buffers is None:
            before.synchronize()
            for into, data in spans:
                into.copy_(torch.from_numpy(data))
            return
        buffers.stream.wait_event(before)
        filling = _InTurn(buffers)
        try:
            with torch.cuda.stream(buffers.stream):
                for into, data in spans:
                    place = filling.room(data.nbytes)
                    np.copyto(place.numpy(), data)
                    into.copy_(place, non_blocking=True)
        finally:
            buffers.stream.record_event().synchronize()


class _InTurn:
    """Buffers that are filled in turn: one that the GPU still reads is waited for."""

    def __init__(self, buffers: PinnedBuffers) -> None:
        self._buffers = buffers
        self._read: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._filled = 0

    def room(self, nbytes: int) -> torch.Tensor:
        """So many bytes to fill, for a copy that is queued in the stream before this is called again."""
        if self._filled + nbytes > STEP_NBYTES:
            self._read[self._turn] = self._buffers.stream.record_event()
            self._turn = 1 - self._turn
            self._filled = 0
            read = self._read[self._turn]
            if read is not None:
                read.synchronize()
        start, self._filled = self._filled, self._filled + nbytes
        return self._buffers.pair[self._turn][start : start + nbytes]
