"""Memory that other processes map, and handles to it that are JSON: of a GPU (CUDA IPC, by torch), or of the host."""

from __future__ import annotations

import os
import secrets
from typing import Annotated, Any

import msgspec
import torch

from transfer_queue.errors import InvalidInput, NotSupported, ServiceUnavailable
from transfer_queue.memory import memfd
from transfer_queue.memory.private_map import map_private

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Opaque = Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]  # base64 in JSON


class CudaHandle(msgspec.Struct, frozen=True, tag="cuda"):
    """What torch's `UntypedStorage._share_cuda_` gives, with the GPU's UUID instead of its number in one process.

    `name`: no other memory ever has it. `memory`: a cudaIpcMemHandle_t of 64 bytes and what torch adds to it."""

    name: str
    device: str
    memory: Annotated[bytes, msgspec.Meta(min_length=64, max_length=4096)]
    nbytes: Count
    offset: Count
    counter: Opaque
    counter_offset: Count
    event: Annotated[bytes, msgspec.Meta(max_length=4096)]
    event_sync: bool


class HostHandle(msgspec.Struct, frozen=True, tag="host"):
    """A memory file of a process on this host."""

    name: str
    pid: Count
    fd: Count
    nbytes: Count


Handle = CudaHandle | HostHandle


def device_called(name: torch.device | str) -> torch.device:
    """torch's device of this name; "cuda" is the GPU that is current in this thread. `InvalidInput` for no device's
    name."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(f"device {name!r}: {error}") from None
    if device == torch.device("cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def uuid_of(device: torch.device) -> str:
    """How this device is called in every process; `NotSupported` without it."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise NotSupported(f"{device} is no GPU that this process sees")
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device:
    """`NotSupported` when this process does not see that GPU."""
    if uuid == "cpu":
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if uuid_of(torch.device("cuda", index)) == uuid:
            return torch.device("cuda", index)
    raise NotSupported(f"the memory is on the GPU {uuid}, which this process does not see: use another engine")


class Shared:
    """Memory to write, and handles to it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.name = secrets.token_hex(16)
        self._fd = -1
        if device.type == "cpu":
            self._fd = memfd.create(None, self.name)
            os.ftruncate(self._fd, max(nbytes, 1))
            self.data = torch.frombuffer(memfd.map_shared(self._fd, max(nbytes, 1)), dtype=torch.uint8)
        else:
            self.data = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)

    def export(self) -> Handle:
        """For one process, which has to open it once."""
        if self._fd >= 0:
            return HostHandle(self.name, os.getpid(), self._fd, self.data.nbytes)
        shared: Any = self.data.untyped_storage()
        _, memory, nbytes, offset, counter, counter_offset, event, event_sync = shared._share_cuda_()
        uuid = uuid_of(self.data.device)
        return CudaHandle(self.name, uuid, memory, nbytes, offset, counter, counter_offset, event, event_sync)

    def close(self) -> None:
        """Receivers that have it mapped may go on to read it."""
        del self.data
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def opened(handle: Handle) -> torch.Tensor:
    """Memory of another process, as flat bytes; it is let go of with the last tensor over it.

    `NotSupported` for that of a GPU that is not here, `ServiceUnavailable` when it cannot be mapped (any more)."""
    try:
        return _opened_file(handle) if isinstance(handle, HostHandle) else _opened_gpu(handle)
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, NotSupported):
            raise
        raise ServiceUnavailable(f"the memory cannot be mapped: {error}") from error


def _opened_file(handle: HostHandle) -> torch.Tensor:
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{handle.name} "):
            raise ServiceUnavailable("that memory is gone, there is other memory in its place")
        mapped = map_private(fd, handle.nbytes)  # nothing can be written; pages show what the trainer writes
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _opened_gpu(handle: CudaHandle) -> torch.Tensor:
    device = device_of(handle.device)
    torch.cuda.init()
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(
        device.index, handle.memory, handle.nbytes, handle.offset, handle.counter, handle.counter_offset,
        handle.event, handle.event_sync,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def synchronize(device: torch.device) -> None:
    """Wait for what is queued there."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
