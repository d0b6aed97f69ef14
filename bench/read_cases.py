"""What the cases of `bench.reads` hold: rows as asynchronous rollouts write them, and the order they are read in."""

from __future__ import annotations

from typing import Any, NamedTuple

NUM_ROWS = 1024
NUM_STRINGS = 10_000
SETTLED_S = 4.0
EXPERTS_NBYTES = 237_000_000
Rows = list[dict[str, Any]]


class Batch(NamedTuple):
    """One put: ragged columns as (values, offsets), columns of values as lists. `wanted`: the rows that are read."""

    ragged: dict[str, tuple[Any, Any]]
    values: dict[str, list[Any]]
    wanted: list[int]


def words(number: int, count: int) -> str:
    return " ".join(f"w{number}-{word}" for word in range(count))


def generator() -> Any:
    import torch

    return torch.Generator().manual_seed(1)


def alone() -> tuple[Rows, list[int]]:
    """1024 rows of 10 fields, each put alone, read in random order."""
    import torch

    found: Rows = []
    random = generator()
    for number, length in enumerate(torch.randint(200, 4000, (NUM_ROWS,), generator=random).tolist()):
        row: dict[str, Any] = {f"t{field}": torch.arange(length, dtype=torch.int64) for field in range(3)}
        row |= {f"f{field}": torch.arange(length, dtype=torch.float32) for field in range(3)}
        row |= {"prompt": words(number, 50), "answer": words(number, 5)}
        found.append(row | {"score": torch.tensor([1.0]), "info": {"id": number}})
    return found, torch.randperm(NUM_ROWS, generator=random).tolist()


def later() -> tuple[Rows, list[int]]:
    """The same rows, read when they have been there for `SETTLED_S`."""
    return alone()


def later_in_order() -> tuple[Rows, list[int]]:
    """And read in the order in which they were put."""
    return alone()[0], list(range(NUM_ROWS))


def ragged(step: int = 1) -> Batch:
    """1024 ragged rows of 8 fields in one put, read in random order."""
    import torch

    random = generator()
    lengths = torch.randint(200, 5000, (NUM_ROWS,), generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    steps = torch.arange(int(offsets[-1]))
    fields = {f"f{field}": (steps.float() if field % 2 else steps.clone(), offsets) for field in range(8)}
    return Batch(fields, {}, torch.randperm(NUM_ROWS, generator=random).tolist()[::step])


def quarter() -> Batch:
    """256 of them in random order."""
    return ragged(4)


def strided() -> Batch:
    """Every fourth row of them in order: the share of one of four data-parallel ranks."""
    return ragged()._replace(wanted=list(range(0, NUM_ROWS, 4)))


def half() -> Batch:
    """Every second of them in order."""
    return ragged()._replace(wanted=list(range(0, NUM_ROWS, 2)))


def eighth() -> Batch:
    """Every eighth of them in order."""
    return ragged()._replace(wanted=list(range(0, NUM_ROWS, 8)))


def experts() -> Batch:
    """The experts that every token of 512 responses was routed to: arrays of (tokens, layers, experts), 237 MB in all.
    They are all looked at, too."""
    import numpy as np

    random = np.random.default_rng(1)
    lengths = random.integers(200, 2000, 512)
    lengths = lengths * EXPERTS_NBYTES // (int(lengths.sum()) * 48 * 8)
    rows = [random.integers(0, 128, (length, 48, 8), dtype=np.uint8) for length in lengths.tolist()]
    return Batch({}, {"experts": rows}, list(range(len(rows))))


def strings(step: int = 1) -> Batch:
    """10,000 rows of 2 short strings."""
    fields = {name: [f"{name} {number}" for number in range(NUM_STRINGS)] for name in "ab"}
    return Batch({}, fields, list(range(0, NUM_STRINGS, step)))


def second() -> Batch:
    """Every second of them."""
    return strings(2)


def traces() -> Batch:
    """1024 tool traces of 12 turns, which are dicts."""

    def turn(row: int, number: int) -> dict[str, Any]:
        call = {"id": f"call_{row}_{number}", "function": {"name": "search", "arguments": "x" * 60}}
        return {"role": "assistant", "content": f"c{row}-{number} " * 20, "tool_calls": [call]}

    rows = [[turn(row, number) for number in range(12)] for row in range(NUM_ROWS)]
    return Batch({}, {"s": rows}, list(range(NUM_ROWS)))


CASES: dict[str, Any] = {
    case.__name__: case
    for case in (
        alone, later, later_in_order, ragged, quarter, half, strided, eighth, experts, strings, second, traces,
    )
}  # fmt: skip
LOOKED_AT = frozenset({"experts"})
SETTLED = frozenset({"later", "later_in_order"})
