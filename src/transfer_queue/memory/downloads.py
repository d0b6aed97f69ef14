"""A GPU's memory to the host at the speed of the bus (`lanes`), for whoever reads it step by step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.lanes import STEP_NBYTES, Lane, lane_to

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
    with lane_to(flat.device) as lane:
        yield from _at_once(flat) if lane is None else _through(lane, flat, before)


def _at_once(flat: torch.Tensor) -> Iterator[Bytes]:
    host = flat.cpu().numpy()
    for start in range(0, len(host), STEP_NBYTES):
        yield host[start : start + STEP_NBYTES]


def _through(lane: Lane, flat: torch.Tensor, before: torch.cuda.Event) -> Iterator[Bytes]:
    lane.stream.wait_event(before)
    parts = flat.split(STEP_NBYTES)

    def begin(number: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        place = lane.buffers[number % 2][: len(parts[number])]
        with torch.cuda.stream(lane.stream):
            place.copy_(parts[number], non_blocking=True)
        return place, lane.stream.record_event()

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
