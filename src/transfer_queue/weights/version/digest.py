"""Bytes of tensors and their digests.

xxh3 finds every accident and no attack: who may send weights is decided before, by whoever accepts a connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import torch
from xxhash import xxh3_128, xxh3_128_hexdigest

from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights.version.tensor_memory import on_host

ALGO = "xxh3_128"
DEVICE_ALGO = "mix64x2"  # computed where the bytes lie (`device`)
STEP_NBYTES = 512 << 10  # stays in a core's cache between the copy and the digest of a step
Buffer: TypeAlias = "torch.Tensor | Bytes | bytes | bytearray | memoryview"


def host_bytes(buffer: Buffer) -> Bytes:
    """The bytes of a CPU buffer, without a copy, as a flat array. It may be read-only."""
    if isinstance(buffer, torch.Tensor):
        return byte_view(buffer).numpy()
    return np.frombuffer(buffer, np.uint8)


def digest_of(data: Bytes) -> str:
    """Hex digest of a flat array (36 GB/s a core)."""
    return xxh3_128_hexdigest(data.data)


def digest_tensor(tensor: torch.Tensor) -> str:
    """Hex digest of a tensor's bytes; one on another device is copied to the host for it."""
    return digest_of(byte_view(on_host(tensor.contiguous())).numpy())


def copy_and_digest(into: Bytes, source: Bytes) -> str:
    """`into[:] = source`, and the digest of what `into` has then: `source` may be memory that others write."""
    if into.shape != source.shape:
        raise ValueError(f"{source.nbytes} bytes for a place of {into.nbytes}")
    if into.nbytes <= STEP_NBYTES:
        np.copyto(into, source)
        return xxh3_128_hexdigest(into.data)
    return collect_and_digest(into, [source])


def collect_and_digest(into: Bytes, sources: Iterable[Bytes]) -> str:
    """As `copy_and_digest`, of sources that fill `into` one after the other."""
    state, at = xxh3_128(), 0
    for source in sources:
        for start in range(0, source.nbytes, STEP_NBYTES):
            step = source[start : start + STEP_NBYTES]
            part = into[at : at + step.nbytes]
            np.copyto(part, step)
            state.update(part.data)
            at += step.nbytes
    return state.hexdigest()
