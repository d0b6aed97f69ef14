"""Work on a GPU's tensors in another thread than the one that asks for it, in the order that the asker may expect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def in_these_streams(work: Callable[[], T]) -> Callable[[], T]:
    """`work`, for another thread, which will run it in the streams that are this thread's now: it sees what was queued
    here before, and what is queued here afterwards sees it. Likewise in inference mode, if this thread is.

    A thread begins with the default stream of each GPU, which does not wait for other streams. So a copy there could
    read a tensor before a kernel has written it. GPUs whose stream is the default one are left alone: entering it
    would make a context on each, half a gigabyte.
    """
    if not torch.cuda.is_initialized():
        return work
    here = torch.cuda.current_device()
    is_inference = torch.is_inference_mode_enabled()
    found = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
    others = [stream for stream in found if stream.cuda_stream and stream.device.index != here]

    def ordered() -> T:
        with contextlib.ExitStack() as entered:
            entered.enter_context(torch.cuda.device(here))
            entered.enter_context(torch.inference_mode(is_inference))
            for stream in [*others, found[here]]:
                entered.enter_context(torch.cuda.stream(stream))
            return work()

    return ordered
