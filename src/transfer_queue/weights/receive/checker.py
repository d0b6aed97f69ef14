"""SHA-256 of every live tensor, to compare servers with each other or with what was sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from transfer_queue.weights.version.digest import host_bytes
from transfer_queue.weights.version.sources import named_weights


class Comparison(NamedTuple):
    """`mismatches`: the keys that differ or that only one side has, sorted."""

    match: bool
    mismatches: list[str]


def checksums(module: torch.nn.Module, rank: int = 0) -> dict[str, str]:
    """Hex digests by `rank<n>:<name>`. Reads all bytes; a tensor on another device is copied to the host for it."""
    found = {}
    for name, tensor in named_weights(module).items():
        data = host_bytes(tensor.detach().contiguous().cpu())
        found[f"rank{rank}:{name}"] = hashlib.sha256(data.data).hexdigest()
    return found


def compare(found: Mapping[str, str], baseline: Mapping[str, str]) -> Comparison:
    wrong = sorted(key for key in {*found, *baseline} if found.get(key) != baseline.get(key))
    return Comparison(not wrong, wrong)
