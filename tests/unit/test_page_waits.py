"""Waits in few words, values as short texts, and what a second brought: the parts of the page without a service."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from transfer_queue.page import journey
from transfer_queue.page.journey import image_of
from transfer_queue.page.previews import preview
from transfer_queue.page.printable import ident, printable
from transfer_queue.page.rates import RateWindow
from transfer_queue.page.waits import short
from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages.overview import (
    PartitionOverview,
    RowInspected,
    TaskOverview,
    ViewOverview,
    WaitOverview,
)


def wait(call: str = "get_meta", partition: str = "p", task: str = "actor", lacks: str = "") -> WaitOverview:
    return WaitOverview(call, partition, task, b"", 1.0, 1.0, lacks, ["prompt", "reward"] if call == "get_meta" else [])


def wait_for(wanted: int) -> WaitOverview:
    return WaitOverview("get_meta", "p", "actor", b"", 1.0, 1.0, "", ["prompt", "reward"], wanted)


def with_ready(found: dict[str, PartitionOverview], ready: int) -> dict[str, PartitionOverview]:
    found["p"].tasks[0].views.append(ViewOverview(["prompt", "reward"], ready, None))
    return found


def partition(rows: int, declared: int | None = None, **written: int) -> dict[str, PartitionOverview]:
    fields = [FieldSchema(name, "dense", "float32", ()) for name in written]
    view = ViewOverview(["prompt", "critic_value"], 0, None)  # the task asked for that before
    task = TaskOverview("actor", 0, 0, 0, 0, 0, None, 0, [view])
    return {"p": PartitionOverview("p", rows, declared, {}, fields, list(written.values()), [task], 0)}


@pytest.mark.parametrize(
    ("told", "known", "text"),
    [
        (wait(), partition(16, prompt=16, reward=4), "actor waits for 12 × reward"),
        (wait(), partition(16, prompt=16), "actor waits for 16 × reward"),
        (wait(), partition(4, 16, prompt=4, reward=4), "actor waits for 12 more rows"),
        (wait(), partition(4, prompt=4, reward=4), "actor waits for more rows"),
        (wait(), {}, "actor waits for partition p"),
        (wait("admit", ""), {}, "actor waits in admit"),
        (wait("put", "", ""), {}, "put waits for room"),
        (wait("put", "new", ""), {}, "put waits for room"),
        (wait("open_partition", "step_1", ""), {}, "open_partition waits for its turn"),
        (wait("select", "p", "", "3 groups: the pool of 'p' ..."), {}, "select waits for 3 groups"),
        (wait("load", "p", ""), partition(1), "load waits"),
    ],
)
def test_a_wait_names_what_is_missing(told: WaitOverview, known: dict[str, PartitionOverview], text: str) -> None:
    assert short(told, known) == text


@pytest.mark.parametrize(
    ("wanted", "known", "text"),
    [
        (64, partition(8656, prompt=8656), "actor waits for 64 × reward"),
        (16, with_ready(partition(16, prompt=16, reward=4), 4), "actor waits for 12 × reward"),
        (8, with_ready(partition(16, prompt=16, reward=14), 0), "actor waits for 2 × reward and 6 more rows"),
        (8, with_ready(partition(16, prompt=16, reward=15), 6), "actor waits for 1 × reward and 1 more row"),
        (8, with_ready(partition(16, prompt=16, reward=16), 6), "actor waits for 2 more rows"),
        (8, with_ready(partition(16, prompt=16, reward=16), 9), "actor waits for more rows"),  # of one group, or so
    ],
)
def test_a_wait_names_how_much_of_it_is_needed(wanted: int, known: dict[str, PartitionOverview], text: str) -> None:
    assert short(wait_for(wanted), known) == text


class Trap:
    """Whoever asks it anything runs code of its own."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __repr__(self) -> str:
        raise AssertionError("repr")

    __str__ = __len__ = __repr__  # type: ignore[assignment]


class Texts(str):
    def __getitem__(self, at: Any) -> str:
        raise AssertionError("getitem")


def test_no_code_of_a_value_runs() -> None:
    for value in Trap(), [Trap()], {"a": Trap()}, [[[[[[Trap()]]]]]]:
        assert len(preview(value)["text"]) < 200
    assert preview(Texts("x"))["text"].endswith("Texts>")


@pytest.mark.parametrize(
    "value",
    [
        2**10_000, "\x00" * 10_000, b"\xff" * 10_000, [10**300] * 10_000, {str(at): "x" * 5000 for at in range(100)},
        torch.full((3,), float("nan")), torch.zeros(0), torch.zeros(2, 2, dtype=torch.complex64), np.array(["a", "b"]),
        torch.zeros((), dtype=torch.bool), torch.zeros(10, dtype=torch.bfloat16), set(range(10_000)), None,
    ],
)  # fmt: skip
def test_any_value_has_a_short_preview(value: Any) -> None:
    found = preview(value)
    assert len(found["type"]) < 200
    assert len(found["text"]) < 9000  # a character that is written out takes four


def test_a_list_of_itself_ends() -> None:
    value: list[Any] = []
    value.append(value)
    assert preview(value)["text"] == "[[[[[1 items]]]]]"


def test_names_are_cut_and_written_out() -> None:
    assert printable("a\x1b[0m\u202eb") == "a\\x1b[0m\\u202eb"
    assert printable("x" * 121) == "x" * 120 + "… (121 characters)"
    assert len({ident("a"), ident("b"), ident("a" * 10_000)}) == 3


class Inspected:
    """As much of a client as an image needs whose value somebody else reads."""

    def __init__(self, *shape: int) -> None:
        self.field = FieldSchema("x", "ragged", "uint8", shape)

    def inspect_row(self, *_: Any) -> RowInspected:
        return RowInspected(0, 0, None, {}, [self.field], [], None, None, [], [])


@pytest.mark.parametrize(("shape", "asked"), [((-1, 1 << 20), [64]), ((-1, 4), [1 << 20]), ((-1, 1 << 27), [])])
def test_of_long_rows_of_any_length_a_beginning_of_bounded_size_is_read(
    shape: Any, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int | None] = []

    def read(*given: Any) -> torch.Tensor:
        most.append(given[-1])
        return torch.zeros(1)

    monkeypatch.setattr(journey, "_read", read)
    assert image_of(Inspected(*shape), "p", 0, ident("x")) is None  # type: ignore[arg-type]
    assert most == asked


def test_rates_count_what_came_and_not_what_was_cleared() -> None:
    rates = RateWindow()
    assert rates.per_s("x") == 0
    for at, count in enumerate([10, 20, 0, 10]):
        rates.add(float(at), {"x": count})
    assert rates.per_s("x") == 20 / 3
    rates.forget()
    assert rates.per_s("x") == 0
