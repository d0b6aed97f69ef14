"""A call of a trainer's on its way to SGLang's workers: JSON in a tensor of bytes, which is all that SGLang carries.

Its route takes a pickle of named tensors for each tensor-parallel rank, in base64, and reads that with an unpickler
that knows tensors and little else. Ours are written here, and read nowhere: a worker is given the tensor.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any, Literal

import msgspec
import torch

from transfer_queue.errors import InvalidInput
from transfer_queue.structs import decodable

LOADER = "transfer_queue.integrations.sglang.loader.load"  # what `--custom-weight-loader` names
NAME = "transfer_queue"


@decodable
class WorkerCall(msgspec.Struct, frozen=True):
    """`info`: as the engine `transport` takes it."""

    method: Literal["init", "start", "update", "finish"]
    transport: Literal["tcp", "shm"]
    info: dict[str, Any] = {}


def to_tensor(call: WorkerCall) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.json.encode(call)), dtype=torch.uint8)


def from_tensor(tensor: torch.Tensor) -> WorkerCall:
    """`InvalidInput` for any other tensor."""
    try:
        return msgspec.json.decode(tensor.cpu().numpy().tobytes(), type=WorkerCall)
    except (msgspec.DecodeError, TypeError) as error:
        raise InvalidInput(f"not a call of a trainer's: {error}") from None


def to_text(call: WorkerCall) -> str:
    """For one rank. A plain pickle has the bytes in it; that of torch.multiprocessing names memory of this host."""
    return base64.b64encode(pickle.dumps([(NAME, to_tensor(call))], protocol=4)).decode()
