"""The field schema of a BatchMeta: derived from a TensorDict, selected, private to each meta."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue.errors import InvalidInput
from transfer_queue.metadata import BatchMeta

DENSE: dict[str, Any] = {"dtype": torch.float32, "shape": torch.Size([2]), "is_nested": False, "is_non_tensor": False}


def untouched(size: int, tags: list[dict[str, Any]] | None = None) -> BatchMeta:
    return BatchMeta._build(np.arange(size), "p", {"a": DENSE}, True, tags)


def test_add_fields_derives_the_schema_and_makes_the_rows_ready() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strided nested tensors are a prototype
        strided = torch.nested.as_nested_tensor([torch.zeros(i + 1, i + 2) for i in range(3)], layout=torch.strided)
    jagged = torch.nested.as_nested_tensor([torch.zeros(i + 1, 2) for i in range(3)], layout=torch.jagged)
    data = TensorDict(
        {
            "flat": torch.zeros(3, dtype=torch.int8),
            "dense": torch.zeros(3, 2, 4),
            "jagged": jagged,
            "turned": jagged.transpose(1, 2),
            "strided": strided,
            "objects": NonTensorStack("x", "y", "z"),
        },
        batch_size=3,
    )
    meta = BatchMeta([1, 2, 3], ["p"] * 3)
    assert meta.add_fields(data) is meta
    assert meta.is_ready
    schema = meta.field_schema
    assert (schema["flat"]["dtype"], schema["flat"]["shape"]) == (torch.int8, (1,))
    assert schema["dense"] == {**DENSE, "shape": (2, 4)}
    assert schema["jagged"]["per_sample_shapes"] == [(1, 2), (2, 2), (3, 2)]
    assert schema["jagged"]["is_nested"]
    assert schema["turned"]["per_sample_shapes"] == [(2, 1), (2, 2), (2, 3)]
    assert schema["strided"]["per_sample_shapes"] == [(1, 2), (2, 3), (3, 4)]
    assert schema["objects"] == {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


def test_add_fields_can_leave_readiness_alone() -> None:
    meta = BatchMeta([1], ["p"])
    assert not meta.add_fields(TensorDict({"a": torch.zeros(1, 2)}, batch_size=1), set_all_ready=False).is_ready


def test_add_fields_reaches_only_this_meta() -> None:
    meta = untouched(2)
    other = meta.copy()
    meta.add_fields(TensorDict({"new": torch.zeros(2, 1)}, batch_size=2))
    assert other.field_names == ["a"]


def test_add_fields_of_no_rows_changes_nothing_and_of_other_sizes_is_refused() -> None:
    meta = untouched(2)
    assert meta.add_fields(TensorDict({"x": torch.zeros(0)}, batch_size=0)) == untouched(2)
    for size in ([3], []):
        with pytest.raises(InvalidInput):
            meta.add_fields(TensorDict({}, batch_size=size))


def test_select_fields_ignores_unknown_names_and_keeps_readiness() -> None:
    meta = BatchMeta([1], ["p"], {"a": DENSE}, np.ones(1), _custom_backend_meta=[{"a": 1, "b": 2, "_x": 3}])
    chosen = meta.select_fields(["a", "zz"])
    assert (chosen.field_names, chosen._custom_backend_meta) == (["a"], [{"a": 1, "_x": 3}])
    assert meta.select_fields([]).is_ready
    with pytest.raises(InvalidInput):
        meta.select_fields("a")
