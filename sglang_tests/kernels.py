"""What stands in for packages that are only built for GPUs (`stand_in`). SGLang itself runs as it was published.

sgl_kernel (sglang-kernel): on a CPU without AMX one of its kernels is called, which writes where a request's tokens lie
in the cache. It is here, in torch. SGLang imports some others by name; they raise when they are called.

torchvision: its two operators that its own modules register something for are declared, and do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

KERNELS = "sgl_kernel"


def stand_in() -> None:
    """In each process, before SGLang or transformers is imported. Repeatable."""
    if KERNELS in sys.modules:
        return
    kernels: Any = ModuleType(KERNELS)
    kernels.__spec__ = ModuleSpec(KERNELS, None)
    kernels.__getattr__ = _missing
    kernels.assign_req_to_token_pool_cpu = _assign
    sys.modules[KERNELS] = kernels
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _assign(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, width: int
) -> None:
    """Of each row of `table` what lies between its start and its end becomes the next so many `places`."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[at : at + end - start].to(table.dtype)
        at += end - start


def _missing(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{KERNELS}.{name} is not there without the package")

    return kernel
