"""A second `--custom-weight-loader` for the tests: loads that fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vllm_tests.failing import fail

NAME = f"{__name__}.break_loader"


def break_loader(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Of the worker that is told a number greater than 0 the next so many loads fail."""
    ((_, tensor),) = named_tensors
    if int(tensor):
        fail(model, int(tensor))
