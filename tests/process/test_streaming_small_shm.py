"""Loaders with workers where /dev/shm, through which torch hands over batches, is small: in a container it is."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

SMALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if (
    libc.unshare(0x20000)
    or libc.mount(b"none", b"/", None, 0x4000 | 1 << 18, None)
    or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size={size}")
):
    print("not permitted", flush=True)
    sys.exit()
os.environ.pop("TQ_ADDRESS", None)
import torch
import transfer_queue as tq
from transfer_queue.dataloader import handing_over
from transfer_queue.errors import StoreFull
handing_over.ROOM_S = {room_s}
tq.init()
tq.get_client().set_partition("p", size=16)
rows = {{"x": torch.rand(16, 1 << 18), "o": [{{"n": n}} for n in range(16)]}}
tq.kv_batch_put([str(n) for n in range(16)], "p", rows)

def read(**how):
    return sum(len(batch) for batch in tq.stream("p", ["x", "o"], task="t", batch_size=4, **how))
"""


@pytest.fixture
def with_small_shm(child: Callable[[str], Any]) -> Callable[..., str]:
    """Runs code beside 16 rows of 1 MiB, with so small a /dev/shm; what it printed."""

    def run(size: str, code: str, room_s: float = 10.0) -> str:
        printed: str = child(SMALL.format(size=size, room_s=room_s) + textwrap.dedent(code)).finish()
        if printed == "not permitted":
            pytest.skip("file systems cannot be mounted here")
        return printed

    return run


@pytest.mark.parametrize("size", ["64k", "3m"], ids=["for locks", "for a batch"])
def test_a_loader_for_whose_batches_there_is_no_shared_memory_says_so_and_loses_none(
    with_small_shm: Callable[..., str], size: str
) -> None:
    code = """
        try:
            read(num_workers=2)
        except StoreFull as error:
            assert "/dev/shm has no room" in str(error) and "num_workers=0" in str(error), error
        print(read())
        tq.close()
    """
    assert with_small_shm(size, code, room_s=0.1) == "16"


def test_a_worker_waits_for_shared_memory_until_the_consumer_let_go_of_a_batch(
    with_small_shm: Callable[..., str],
) -> None:
    code = """
        print(read(num_workers=2, prefetch=True))
        tq.close()
    """
    assert with_small_shm("9m", code) == "16"


def test_a_batch_that_is_read_ahead_takes_no_room_of_one_that_comes_before_it(
    with_small_shm: Callable[..., str],
) -> None:
    """Where the second is as slow as to let the third overtake it."""
    code = """
        overtaken = torch.multiprocessing.get_context("fork").Semaphore(0)
        is_shared = handing_over._is_shared

        def share(tensor, may_wait):
            first = float(tensor.view(-1)[0])
            if first == 4:
                overtaken.acquire(timeout=1)
            done = is_shared(tensor, may_wait)
            if first == 8:
                overtaken.release()
            return done

        handing_over._is_shared = share
        numbered = torch.arange(16.0).repeat_interleave(1 << 18).view(16, 1 << 18)
        tq.kv_batch_put([str(n) for n in range(16)], "q", {"x": numbered})
        print(sum(len(batch) for batch in tq.stream("q", ["x"], task="t", batch_size=4, num_workers=2, prefetch=True)))
        tq.close()
    """
    assert with_small_shm("9m", code) == "16"
