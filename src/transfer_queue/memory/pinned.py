"""Pinned buffers between the host and a GPU, with a stream for them, kept for as long as the process lives.

A GPU moves bytes of pinned memory three to six times as fast as those of other memory (docs/benchmarks.md). But memory
that is pinned cannot be given back, to the machine or to its file, and what is moved here lies in arenas, versions and
callers' tensors, which are not ours to pin. So it goes through buffers that are: the GPU moves one while a thread
copies the other.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

STEP_NBYTES = 4 << 20  # of a buffer: smaller ones cost more calls, larger ones gain nothing


class PinnedBuffers:
    """Two of them and a stream. For one thread at a time, which has the GPU as its current device meanwhile: else a
    context would be made on another one, half a gigabyte of its memory."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)  # of those that torch gives to nobody who does not ask
        with torch.inference_mode(False):  # buffers that were made within it could not be written outside
            self.pair = [_pinned(STEP_NBYTES) for _ in range(2)]


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


_idle: defaultdict[torch.device, list[PinnedBuffers]] = defaultdict(list)
_lock = threading.Lock()


@contextmanager
def pinned_for(device: torch.device) -> Iterator[PinnedBuffers | None]:
    """Buffers that nobody else uses; None where memory cannot be pinned. The GPU is the current device within.

    What the caller has queued in their stream has to be done when it leaves, also by an error.
    """
    with torch.cuda.device(device):
        with _lock:
            found = _idle[device].pop() if _idle[device] else None
        if found is None:
            with suppress(RuntimeError):  # the machine has no memory to spare for it
                found = PinnedBuffers(device)
        try:
            yield found
        finally:
            if found is not None:
                with _lock:
                    _idle[device].append(found)
