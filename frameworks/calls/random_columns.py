"""Columns of every kind, made by chance from fixed seeds: the same in both packages.

Left out is what differs on purpose, which cases of its own show: tensors of several dtypes in one field, one value for
all rows, numbers and arrays given to `kv_put`, and values whose type that package changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cases import CASES, attempt, batch, jagged
from tensordict import NonTensorData, NonTensorStack

import transfer_queue as tq

SEEDS = 240
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = [rng.randrange(2 if dtype == torch.bool else 100) for _ in range(int(np.prod(shape, dtype=int)))]
    return torch.tensor(numbers, dtype=torch.int64).to(dtype).view(shape)


def value(rng: random.Random) -> Any:
    """What is no tensor and keeps its type there."""
    depth = rng.randrange(3)
    if depth == 0:
        return rng.choice(["", "text", "grüße", "x" * 300, b"\0bytes", None, True, 7, -1.5, 2**40])
    if depth == 1:
        return [value(rng) for _ in range(rng.randrange(3))]
    return {f"k{n}": value(rng) for n in range(rng.randrange(3))}


def dense(rng: random.Random, rows: int, dtype: torch.dtype, dims: int) -> Any:
    shape = (rows, *(rng.randrange(1, 4) for _ in range(dims)))
    made = tensor(rng, shape, dtype)
    return made.transpose(0, -1).contiguous().transpose(0, -1) if rng.random() < 0.3 else made


def ragged(rng: random.Random, rows: int, dtype: torch.dtype, dims: int) -> Any:
    rest = tuple(rng.randrange(1, 4) for _ in range(max(0, dims - 1)))
    return jagged(*[tensor(rng, (rng.randrange(1, 5), *rest), dtype) for _ in range(rows)])


def array(rng: random.Random, rows: int, dtype: torch.dtype, dims: int) -> Any:
    kind = rng.randrange(4)
    if kind == 0:
        return np.array(["".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(rows)])
    if kind == 1:
        return np.array([bytes(rng.choices(b"abc", k=rng.randrange(1, 5))) for _ in range(rows)])
    if kind == 2:
        return np.array([f"2024-01-{rng.randrange(10, 29)}" for _ in range(rows)], "datetime64[s]")
    made = np.empty(rows, object)
    made[:] = [{"n": value(rng)} for _ in range(rows)]
    return made


def objects(rng: random.Random, rows: int, dtype: torch.dtype, dims: int) -> Any:
    values = [value(rng) for _ in range(rows)]
    return NonTensorStack(*[NonTensorData(one) for one in values])


def mixture(rng: random.Random, rows: int, dtype: torch.dtype, dims: int) -> Any:
    """Tensors of any rank among other things."""
    values: list[Any] = []
    for _ in range(rows):
        shape = tuple(rng.randrange(1, 3) for _ in range(rng.randrange(3)))
        values.append(tensor(rng, shape, dtype) if rng.random() < 0.5 else value(rng))
    return NonTensorStack(*[NonTensorData(one) for one in values])


KINDS: list[Callable[[random.Random, int, torch.dtype, int], Any]] = [dense, dense, ragged, array, objects, mixture]


def program(seed: int) -> Any:
    """One to three puts to one field by a random way each, then several ways to read."""
    rng = random.Random(seed)
    part, keys = f"random{seed}", []
    dtype, dims = rng.choice(DTYPES), rng.randrange(4)
    seen: list[Any] = []
    for _ in range(rng.randrange(1, 4)):
        rows = rng.randrange(1, 5)
        new = [f"r{len(keys) + n}" for n in range(rows)]
        kind = rng.choice(KINDS)
        column = kind(rng, rows, dtype, dims if kind is not ragged else max(1, dims))
        if rng.random() < 0.3:
            for key in new:
                cell = tensor(rng, tuple(rng.randrange(1, 3) for _ in range(dims)), dtype)
                cell = cell if rng.random() < 0.6 else rng.choice(["text", None, {"a": "b"}, b"raw"])
                seen.append(attempt(tq.kv_put, key=key, partition_id=part, fields={"x": cell}))
        else:
            seen.append(attempt(tq.kv_batch_put, keys=new, partition_id=part, fields=batch(rows, x=column)))
        keys += new
    for _ in range(3):
        asked = rng.choices(keys, k=rng.randrange(1, len(keys) + 2))
        seen.append(attempt(tq.kv_batch_get, keys=asked, partition_id=part))
    seen.append(attempt(tq.kv_batch_get, keys=keys, partition_id=part))
    tq.kv_clear(keys=keys, partition_id=part)
    return seen


def _case(seed: int) -> Callable[[], Any]:
    def run() -> Any:
        return program(seed)

    run.__name__ = f"random_columns_{seed}"
    return run


CASES.extend(_case(seed) for seed in range(SEEDS))
