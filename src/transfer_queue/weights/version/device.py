"""Digests of bytes where they lie, so that weights on a GPU are checked without a copy to the host.

`mix64x2`: each 64-bit word (the last one padded with zeros) is mixed with its place, and two sums over all words,
modulo 2**64, are the digest. One changed word always changes it; words that changed places, or several changed ones,
are missed by chance only. It is the same on every device, and no more against attacks than xxh3.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch

from transfer_queue.errors import DigestMismatch, InvalidInput
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights.version.digest import ALGO, DEVICE_ALGO, Buffer, digest_tensor, host_bytes
from transfer_queue.weights.version.manifest import BucketPart
from transfer_queue.weights.version.tensor_memory import on_host, room

STEP = 4 << 20  # words at a time: twice as many bytes as these have are needed meanwhile


def ready(tensor: torch.Tensor) -> torch.Event | None:
    """What another thread waits for (`synchronize`) before it reads a tensor that this thread's stream may be writing;
    None on the CPU."""
    if tensor.device.type == "cpu":
        return None
    return torch.accelerator.current_stream(tensor.device).record_event()


def wait_until(written: torch.Event, device: torch.device) -> None:
    """`written` by the thread that has this from `ready`. In a thread that has no GPU of its own yet, waiting may give
    it the first one, with half a gigabyte of that one's memory."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        written.synchronize()


def digest_at(tensor: torch.Tensor, algo: str) -> str:
    """The digest of a contiguous tensor's bytes; xxh3 needs a copy of them on the host."""
    if algo not in (ALGO, DEVICE_ALGO):
        raise InvalidInput(f"digests {algo!r}: there are {ALGO} and {DEVICE_ALGO}")
    return digest_tensor(tensor) if algo == ALGO else mix64x2(byte_view(tensor))


def mix64x2(data: torch.Tensor) -> str:
    """Of flat uint8. Waits for the device."""
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    whole = data.numel() // 8
    words = data[: whole * 8]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    _add(sums, words.view(torch.int64), 0)
    if data.numel() % 8:
        last = torch.zeros(8, dtype=torch.uint8, device=data.device)
        last[: data.numel() % 8] = data[whole * 8 :]
        _add(sums, last.view(torch.int64), whole)
    return "".join(f"{number % 2**64:016x}" for number in sums.tolist())


def _add(sums: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """The words' shares, the first of which is in place `first`. The mixing is splitmix64's finaliser (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014), a bijection, and one more round for the second."""
    for start in range(0, words.numel(), STEP):
        part = words[start : start + STEP]
        place = torch.arange(first + start, first + start + part.numel(), dtype=torch.int64, device=words.device)
        mixed = place.add_(1).mul_(_signed(0x9E3779B97F4A7C15)).add_(part)
        _fold(mixed, 30).mul_(_signed(0xBF58476D1CE4E5B9))
        _fold(mixed, 27).mul_(_signed(0x94D049BB133111EB))
        sums[0] += _fold(mixed, 31).sum()
        sums[1] += _fold(mixed.mul_(_signed(0xFF51AFD7ED558CCD)), 33).sum()


def _fold(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`words ^= words >> bits`, shifting in zeros."""
    return words.bitwise_xor_(words.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1))


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def staged(
    data: Buffer, nbytes: int, parts: Iterable[BucketPart], algo: str, lend: bool, to_host: bool
) -> torch.Tensor:
    """The bucket, checked where it lies; a copy unless lent, on the same device or `to_host`. `DigestMismatch`."""
    source = data if isinstance(data, torch.Tensor) else torch.from_numpy(host_bytes(data))
    if source.dtype != torch.uint8 or tuple(source.shape) != (nbytes,):
        raise DigestMismatch(f"a bucket came as {source.dtype} {list(source.shape)} instead of {nbytes} bytes")
    leaves = to_host and source.device.type != "cpu"
    place = source
    if leaves and algo == ALGO:
        place = on_host(source)
    elif not (lend or leaves):
        place = room(nbytes) if source.device.type == "cpu" else torch.empty_like(source)
        place.copy_(source)
    for part in parts:
        if digest_at(place[part.offset : part.offset + part.nbytes], algo) != part.digest:
            raise DigestMismatch(f"bucket {part.bucket}: the bytes of {part.name!r} are not those of the manifest")
    return on_host(place) if leaves else place
