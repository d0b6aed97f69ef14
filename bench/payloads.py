"""The batches that are measured, as plain columns that every system can be given; deterministic by their seed.

Shapes are those of reinforcement-learning runs: TransferQueue's own perftest (dense; complex: a third dense, a third
ragged, a third strings of four bytes a token), Qwen2.5-VL image tensors, and a step of a 4 B GRPO run (T1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dense:
    """Rows of one shape: (N, ...)."""

    rows: Array


@dataclass(frozen=True)
class Ragged:
    """Rows whose first dimension differs."""

    rows: list[Array]


@dataclass(frozen=True)
class Objects:
    """Rows of Python values; arrays inside dicts stand for tensors where a system speaks torch."""

    rows: list[Any]


Column = Dense | Ragged | Objects
Columns = dict[str, Column]


def build(spec: dict[str, Any]) -> Columns:
    """Make the batch of a specification {"kind", ...sizes}. Raises KeyError for an unknown kind."""
    arguments = {name: value for name, value in spec.items() if name != "kind"}
    return BUILDERS[spec["kind"]](**arguments)


def num_rows(columns: Columns) -> int:
    return len(next(iter(columns.values())).rows)


def nbytes(columns: Columns) -> int:
    """Payload bytes: array buffers, UTF-8 text, and 8 bytes for each number in an object."""
    return sum(_column_nbytes(column) for column in columns.values())


def _column_nbytes(column: Column) -> int:
    if isinstance(column, Dense):
        return column.rows.nbytes
    return sum(_value_nbytes(row) for row in column.rows)


def _value_nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(len(key) + _value_nbytes(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(_value_nbytes(item) for item in value)
    return 8


def dense(rows: int, fields: int, width: int, seed: int = 0) -> Columns:
    """`fields` columns f0.. of (rows, width) float32."""
    rng = np.random.default_rng(seed)
    return {f"f{i}": Dense(rng.random((rows, width), dtype=np.float32)) for i in range(fields)}


def complex_(rows: int, seq: int, seed: int = 0) -> Columns:
    """Three dense (rows, seq) float32, three ragged of 1..seq, three strings of 4 x seq characters, one dict column."""
    rng = np.random.default_rng(seed)
    columns: Columns = {f"dense{i}": Dense(rng.random((rows, seq), dtype=np.float32)) for i in range(3)}
    for i in range(3):
        lengths = rng.integers(1, seq + 1, rows)
        columns[f"ragged{i}"] = Ragged([rng.random(n, dtype=np.float32) for n in lengths])
    for i in range(3):
        letters = rng.integers(97, 123, rows * 4 * seq, dtype=np.uint8).tobytes().decode()
        columns[f"text{i}"] = Objects([letters[k : k + 4 * seq] for k in range(0, len(letters), 4 * seq)])
    columns["info"] = Objects(
        [
            {"uid": f"sample-{i}", "turns": i % 7, "score": i / 8, "tools": ["search", "python"], "done": True}
            for i in range(rows)
        ]
    )
    return columns


def images(rows: int, patches: int = 1564, seed: int = 0) -> Columns:
    """What a Qwen2.5-VL processor makes of a 640x480 picture: one dict a row, 7.4 MB of float32 each."""
    rng = np.random.default_rng(seed)
    grid = np.array([[1, 34, 46]], dtype=np.int64)
    pictures = [
        {"pixel_values": rng.random((patches, 1176), dtype=np.float32), "image_grid_thw": grid + i} for i in range(rows)
    ]
    return {"multi_modal_inputs": Objects(pictures)}


def tokens(rows: int, seed: int = 0) -> Columns:
    """A step of profile T1, as a rollout writes it: prompts of about 200 tokens, lognormal responses up to 2048."""
    rng = np.random.default_rng(seed)
    prompt = np.clip(rng.lognormal(5.2, 0.4, rows), 32, 512).astype(int)
    response = np.clip(rng.lognormal(6.9, 0.6, rows), 16, 2048).astype(int)
    lengths = list(zip(prompt, response, strict=True))
    return {
        "tokens": Ragged([rng.integers(0, 151936, p + r) for p, r in lengths]),
        "loss_mask": Ragged([np.ones(r, dtype=np.int64) for _, r in lengths]),
        "rollout_log_probs": Ragged([-rng.random(r, dtype=np.float32) for _, r in lengths]),
        "reward": Dense(rng.integers(0, 2, rows).astype(np.float32)),
        "response_length": Dense(response.astype(np.int64)),
    }


BUILDERS: dict[str, Callable[..., Columns]] = {
    "dense": dense,
    "complex": complex_,
    "images": images,
    "tokens": tokens,
}
"""By the name that a specification's "kind" gives."""


def as_lists(columns: Columns) -> dict[str, list[Any]]:
    """The same batch as plain Python lists, the form in which inference engines answer."""
    return {
        name: column.rows.tolist()
        if isinstance(column, Dense)
        else [row.tolist() if isinstance(row, np.ndarray) else row for row in column.rows]
        for name, column in columns.items()
    }
