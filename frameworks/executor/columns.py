"""Columns and cells of every kind, made from a description of plain data: the same ones in both interpreters."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

Maker = Callable[[random.Random, int, dict[str, Any]], Any]
COLUMNS: dict[str, Maker] = {}


def maker(function: Maker) -> Maker:
    COLUMNS[function.__name__] = function
    return function


def column(what: dict[str, Any], rows: int) -> Any:
    """`rows` rows of the kind, dtype and number of dimensions that `what` names, with the numbers of its seed."""
    kind = what["kind"] if rows else "dense"  # no other kind can be empty
    return COLUMNS[kind](random.Random(what["seed"]), rows, what)


def cell(what: dict[str, Any]) -> Any:
    """The value of one row, as `kv_put` takes it."""
    rng = random.Random(what["seed"])
    if what["kind"] == "tensor":
        return tensor(rng, shape(rng, what["dims"]), what["dtype"])
    if what["kind"] == "array":
        return tensor(rng, (rng.randrange(4),), what["dtype"]).numpy()
    if what["kind"] == "nested":
        return ragged(rng, 2, what)
    if what["kind"] == "lock":
        return threading.Lock()
    if what["kind"] == "number":
        return rng.choice([7, -1.5, True, 2**40])
    made = value(rng)
    if isinstance(made, list):
        return [*made, "text"]
    return "text" if type(made) in (int, float, bool) else made


# ---- tensors ----


def shape(rng: random.Random, dims: int) -> tuple[int, ...]:
    """Extents of 1 to 3; one in twelve is 0."""
    return tuple(rng.choice([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0]) for _ in range(dims))


def tensor(rng: random.Random, size: tuple[int, ...], dtype: str) -> torch.Tensor:
    numbers = [rng.randrange(2 if dtype == "bool" else 100) for _ in range(int(np.prod(size, dtype=int)))]
    return torch.tensor(numbers, dtype=torch.int64).to(getattr(torch, dtype)).view(size)


@maker
def dense(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    return tensor(rng, (rows, *shape(rng, what["dims"])), what["dtype"])


@maker
def view(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    """Rows that do not lie one after the other: every second one, reversed extents, a part, one repeated."""
    size = shape(rng, max(1, what["dims"]))
    way = rng.randrange(4)
    if way == 0:
        return tensor(rng, (2 * rows, *size), what["dtype"])[::2]
    if way == 1:
        return tensor(rng, (*reversed(size), rows), what["dtype"]).permute(*range(len(size), -1, -1))
    if way == 2:
        return tensor(rng, (rows + 2, *size), what["dtype"])[1:-1]
    return tensor(rng, (1, *size), what["dtype"]).expand(rows, *size)


@maker
def ragged(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    rest = shape(rng, what["dims"] - 1) if what["dims"] > 1 else ()
    parts = [tensor(rng, (rng.randrange(0 if rng.random() < 0.1 else 1, 5), *rest), what["dtype"]) for _ in range(rows)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@maker
def nested(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    """Nested with torch's strided layout: every extent may differ."""
    parts = [tensor(rng, shape(rng, max(1, what["dims"])), what["dtype"]) for _ in range(rows)]
    return torch.nested.as_nested_tensor(parts, layout=torch.strided)


@maker
def tensors(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    """Tensors of any shape, one by one."""
    parts = [
        tensor(rng, shape(rng, rng.choice([what["dims"], what["dims"], 1, 2])), what["dtype"]) for _ in range(rows)
    ]
    return NonTensorStack(*[NonTensorData(part) for part in parts])


# ---- what is no tensor ----


def value(rng: random.Random, depth: int = 0) -> Any:
    """What keeps its type there, too."""
    way = rng.randrange(5 if depth < 2 else 3)
    if way < 3:
        return rng.choice(["", "text", "grüße", "x" * 300, b"\0bytes", None, True, 7, -1.5, 2**40])
    if way == 3:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {f"k{number}": value(rng, depth + 1) for number in range(rng.randrange(3))}


def stack(values: list[Any]) -> Any:
    return NonTensorStack(*[NonTensorData(one) for one in values])


@maker
def objects(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    return stack([value(rng) for _ in range(rows)])


@maker
def texts(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    return NonTensorStack(*["".join(rng.choices("abcé", k=rng.randrange(5))) for _ in range(rows)])


@maker
def dicts(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    return NonTensorStack(*[{"n": value(rng), "at": number} for number in range(rows)])


@maker
def nothing(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    return stack([None] * rows)


@maker
def mixture(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    """Tensors of any rank among other things."""
    one = [lambda: tensor(rng, shape(rng, rng.randrange(3)), what["dtype"]), lambda: value(rng), lambda: None]
    return stack([rng.choice(one)() for _ in range(rows)])


@maker
def numbers(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    """Python's numbers, given as a list: TensorDict makes a tensor of them."""
    return [rng.randrange(100) if what["dtype"] == "int64" else rng.randrange(100) / 4 for _ in range(rows)]


@maker
def array(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    way = rng.randrange(6)
    if way == 0:
        return np.array(["".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(rows)])
    if way == 1:
        return np.array([bytes(rng.choices(b"abc", k=rng.randrange(1, 5))) for _ in range(rows)])
    if way == 2:
        return np.array([f"2024-01-{rng.randrange(10, 29)}" for _ in range(rows)], "datetime64[s]")
    if way == 3:
        return tensor(rng, (rows, *shape(rng, what["dims"])), what["dtype"]).numpy()
    made = np.empty(rows, object)
    made[:] = [value(rng) if way == 4 else {"n": value(rng)} for _ in range(rows)]
    return made


@maker
def locks(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    """What nothing can store, in the last row."""
    return stack([*("text" for _ in range(rows - 1)), threading.Lock()])


@maker
def held(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    """`NonTensorData` that holds one item per row."""
    return NonTensorData([value(rng) for _ in range(rows)], batch_size=[rows])


@maker
def shared(rng: random.Random, rows: int, what: dict[str, Any]) -> Any:
    """`NonTensorData` that holds one value for all rows."""
    return NonTensorData(rng.choice(["text", 7, None, {"a": 1}]), batch_size=[rows])
