"""A GPU's memory to the host at the speed of the bus (`pinned`), for whoever reads it step by step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.pinned import STEP_NBYTES, PinnedBuffers, pinned_for

SMALL_NBYTES = 256 << 10  # torch's own copy is as fast


def downloaded(flat: torch.Tensor) -> Iterator[Bytes]:
    """The bytes of a flat uint8 tensor on another device, in steps of `STEP_NBYTES`, as they are once what is in this
    thread's current stream is done. Go through all of them, or close the iterator.

    Each step is the caller's to change, and valid until the next one is asked for, which arrives meanwhile.
    """
    if flat.device.type != "cuda" or flat.nbytes <= SMALL_NBYTES:
        yield from _at_once(flat)
        return
    before = torch.cuda.current_stream(flat.device).record_event()
    with pinned_for(flat.device) as buffers:
        yield from _at_once(flat) if buffers is None else _through(buffers, flat, before)


def _at_once(flat: torch.Tensor) -> Iterator[Bytes]:
    host = flat.cpu().numpy()
    for start in range(0, len(host), STEP_NBYTES):
        yield host[start : start + STEP_NBYTES]


def _through(buffers: PinnedBuffers, flat: torch.Tensor, before: torch.cuda.Event) -> Iterator[Bytes]:
    buffers.stream.wait_event(before)
    parts = flat.split(STEP_NBYTES)

    def begin(number: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        place = buffers.pair[number % 2][: len(parts[number])]
        with torch.cuda.stream(buffers.stream):
            place.copy_(parts[number], non_blocking=True)
        return place, buffers.stream.record_event()

    coming = begin(0)
    try:
        for number in range(len(parts)):
            here, arrived = coming
            arrived.synchronize()
            if number + 1 < len(parts):
                coming = begin(number + 1)
            yield here.numpy()
    finally:
        coming[1].synchronize()
