"""The shared memory in which torch hands over what workers read. Where that has no room torch drops the batch, with a
traceback of a thread of the worker, and the loader would wait for it for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from transfer_queue.errors import StoreFull

SHARED = "/dev/shm"
AMPLE = 8  # times what is handed over: with as much room nobody waits for others
ROOM_S = 10.0  # for so long a worker waits for the consumer to let go of batches before
AGAIN_S = 0.05
NO_ROOM = "No space left", "Cannot allocate memory"


def share(item: Any, wait: Callable[[], None]) -> None:
    """Move the tensors of what a worker hands over to shared memory, as torch does later. `StoreFull` where it has no
    room. Where there is little of it, `wait` blocks until it is this worker's turn."""
    tensors = list(_tensors(item))
    if _room() < AMPLE * sum(tensor.untyped_storage().nbytes() for tensor in tensors):
        wait()
    deadline = time.monotonic() + ROOM_S
    for tensor in tensors:
        while not _is_shared(tensor, time.monotonic() < deadline):
            time.sleep(AGAIN_S)  # nobody tells of room in a file system


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What cannot be made there is `StoreFull`, with what to do."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise StoreFull(_text(error)) from error


def _room() -> int:
    """Free bytes of the shared memory; none where nothing tells."""
    try:
        there = os.statvfs(SHARED)
    except OSError:
        return 0
    return there.f_bavail * there.f_frsize


def _is_shared(tensor: torch.Tensor, may_wait: bool) -> bool:
    try:
        tensor.untyped_storage().share_memory_()
    except RuntimeError as error:
        if not any(one in str(error) for one in NO_ROOM):
            raise
        if may_wait:
            return False
        raise StoreFull(_text(error)) from None
    return True


def _text(error: Exception) -> str:
    return (
        f"/dev/shm has no room for what workers hand over: {error}. Give it more (in a container `--shm-size=8g`), "
        "have fewer workers, a smaller prefetch_factor or batch, or num_workers=0"
    )


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    """Those that have memory of this host."""
    if isinstance(item, torch.Tensor):
        if item.is_nested and item.layout == torch.jagged:
            yield from _tensors((item.values(), item.offsets()))  # type: ignore[attr-defined]
        elif item.device.type == "cpu" and item.layout == torch.strided and not item.is_nested:
            yield item
    elif isinstance(item, (Mapping, TensorDictBase)):
        for one in item.values():
            yield from _tensors(one)
    elif isinstance(item, (list, tuple)):
        for one in item:
            yield from _tensors(one)
