"""A stand-in for `build_dp_schedule` of vime and slime, as far as its shape goes: groups in steps of so many, static
micro-batches, dealt to ranks in turn."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

Made = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]
CONFIG = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def install(monkeypatch: pytest.MonkeyPatch, framework: str = "vime", argument: str = "group_indices") -> None:
    """As if the framework were installed. `argument`: what it calls the groups, which its versions do not agree on."""
    module = ModuleType(f"{framework}.utils.dp_schedule")
    named = {"group_indices": _by_group, "rollout_indices": _by_rollout, "other": _build}
    module.build_dp_schedule = named[argument]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def _by_group(
    args: Any, config: Any, lengths: Sequence[int], *, global_batch_size: int, group_indices: Sequence[int]
) -> Made:
    return _build(args, config, lengths, global_batch_size, group_indices)


def _by_rollout(
    args: Any, config: Any, lengths: Sequence[int], *, global_batch_size: int, rollout_indices: Sequence[int]
) -> Made:
    return _build(args, config, lengths, global_batch_size, rollout_indices)


def _build(args: Namespace, config: Mapping[str, int], lengths: Sequence[int], size: int, ids: Sequence[int]) -> Made:
    groups: dict[int, list[int]] = {}
    for row, group in zip(range(len(lengths)), ids, strict=True):
        groups.setdefault(group, []).append(row)
    order, ranks, each = list(groups), config["dp_size"], args.micro_batch_size
    assert len(order) >= size, f"num_groups ({len(order)}) < global_batch_size ({size})"
    partitions: list[list[int]] = [[] for _ in range(ranks)]
    indices: list[list[list[int]]] = [[] for _ in range(ranks)]
    numbers = []
    for first in range(0, len(order) - size + 1, size):  # what makes no whole step is dropped
        rows = [row for group in order[first : first + size] for row in groups[group]]
        assert len(rows) % (ranks * each) == 0, f"{len(rows)} rows for {ranks} ranks and micro-batches of {each}"
        numbers.append(len(rows) // each // ranks)
        for number, begin in enumerate(range(0, len(rows), each)):
            part, own = partitions[number % ranks], rows[begin : begin + each]
            indices[number % ranks].append(list(range(len(part), len(part) + len(own))))
            part.extend(own)
    return partitions, indices, numbers, [size] * len(numbers)
