"""A GPU's memory to the host at the speed of the bus, for whoever reads it step by step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transfer_queue.memory.bytes import Bytes

STEP_NBYTES = 4 << 20
SMALL_NBYTES = 256 << 10  # torch's own copy is as fast


def downloaded(flat: torch.Tensor) -> Iterator[Bytes]:
    """The bytes of a flat uint8 tensor on another device, which has been written, in steps of `STEP_NBYTES`.

    Each step is the caller's to change, and valid until the next one is asked for: the next one arrives meanwhile, in
    a second pinned buffer. Pageable memory, into which torch copies, takes bytes at a third of the speed.
    """
    if flat.device.type != "cuda" or flat.nbytes <= SMALL_NBYTES:
        host = flat.cpu().numpy()
        for start in range(0, len(host), STEP_NBYTES):
            yield host[start : start + STEP_NBYTES]
        return
    parts = flat.split(STEP_NBYTES)
    stream = torch.cuda.Stream(flat.device)
    with torch.cuda.device(flat.device):  # pinning makes a context on the current one
        buffers = [torch.empty(len(parts[0]), dtype=torch.uint8, device="cpu", pin_memory=True) for _ in parts[:2]]

    def begin(number: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        place = buffers[number % 2][: len(parts[number])]
        with torch.cuda.stream(stream):
            place.copy_(parts[number], non_blocking=True)
        return place, stream.record_event()

    coming = begin(0)
    for number in range(len(parts)):
        here, arrived = coming
        arrived.synchronize()
        if number + 1 < len(parts):
            coming = begin(number + 1)
        yield here.numpy()
