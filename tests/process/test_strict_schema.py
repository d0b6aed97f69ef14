"""`strict_schema`: rows of a field are all of one dtype, rank and kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transfer_queue as tq
from transfer_queue.errors import SchemaConflict

ONE, SQUARE = torch.ones(2), torch.zeros(2, 2)


def test_strict_schema_refuses_early_for_a_call_or_for_all(service: Any) -> None:
    client = service(controller={"strict_schema": True})
    tq.kv_put("a", "p", {"x": ONE})
    for other in (ONE.double(), SQUARE, None):
        with pytest.raises(SchemaConflict, match="'x'"):
            tq.kv_put("b", "p", {"x": other})
    tq.kv_put("b", "p", {"x": None}, strict_schema=False)
    with pytest.raises(SchemaConflict):
        client.put({"x": SQUARE}, partition_id="p")
    assert tq.kv_list("p") == {"p": {"a": {}, "b": {}}}
