"""What `inspect`, `help`, type hints and autospec show of everything public: what callers see, not how it is run."""

from __future__ import annotations

import inspect
import pydoc
import typing
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

import transfer_queue as tq
from transfer_queue.client.transfer.allocation import Allocation

FUNCTIONS = {name: getattr(tq, name) for name in tq.__all__ if inspect.isfunction(getattr(tq, name))}
METHODS = {
    f"{cls.__name__}.{name}": method
    for cls in (tq.TransferQueueClient, Allocation)
    for name, method in inspect.getmembers(cls, inspect.isfunction)
    if not name.startswith("_") and name in vars(cls)
}
CALLABLES = {**FUNCTIONS, **METHODS}
IN_A_BLOCK = {"async_stream", "async_kv_local_lock", "async_kv_global_lock"}  # `async for` and `async with`, not await


def test_all_are_looked_at() -> None:
    assert {"kv_put", "async_kv_put", "init", "admit"} <= set(FUNCTIONS)
    assert {"TransferQueueClient.put", "TransferQueueClient.async_get_meta", "Allocation.commit"} <= set(METHODS)


@pytest.mark.parametrize("name", CALLABLES)
def test_the_signature_is_the_public_one(name: str) -> None:
    found = inspect.signature(CALLABLES[name])
    assert "session" not in found.parameters
    passed_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} if "locked" not in name else set()
    assert not {one.kind for one in found.parameters.values()} & passed_on
    assert found.return_annotation is not inspect.Signature.empty
    assert "Operation" not in str(found)
    assert ("self" in found.parameters) == (name in METHODS)


@pytest.mark.parametrize("name", CALLABLES)
def test_type_hints_resolve_to_what_is_shown(name: str) -> None:
    shown = inspect.signature(CALLABLES[name])
    hints = typing.get_type_hints(CALLABLES[name])
    assert set(hints) == {*shown.parameters, "return"} - {"self"}


@pytest.mark.parametrize("name", CALLABLES)
def test_the_name_is_the_public_one_and_help_shows_it(name: str) -> None:
    function = CALLABLES[name]
    assert function.__name__ == name.rpartition(".")[2]
    assert f"{function.__name__}(" in pydoc.plain(pydoc.render_doc(function))
    awaited = function.__name__.startswith("async_") and name not in IN_A_BLOCK
    assert inspect.iscoroutinefunction(function) == awaited


@pytest.mark.parametrize("name", [name for name in CALLABLES if "async_" not in name])
def test_both_forms_of_a_call_take_the_same(name: str) -> None:
    owner, _, short = name.rpartition(".")
    twin = CALLABLES.get(f"{owner}.async_{short}" if owner else f"async_{short}")
    if twin is not None:
        ours, theirs = inspect.signature(CALLABLES[name]).parameters, inspect.signature(twin).parameters
        assert set(theirs) <= set(ours), "loader workers are processes: an asynchronous stream has none"
        assert [ours[one].default for one in theirs] == [one.default for one in theirs.values()]


def test_an_autospec_takes_what_the_function_takes() -> None:
    function = mock.create_autospec(tq.kv_put)
    function("a", "p", {"x": 1}, tag={})
    function(key="a", partition_id="p", fields=None)
    with pytest.raises(TypeError):
        function("a", "p", session=None)
    with pytest.raises(TypeError):
        function("a")


def test_an_autospec_of_the_client_takes_what_its_methods_take() -> None:
    client = mock.create_autospec(tq.TransferQueueClient, instance=True)
    client.put({"x": [1]}, partition_id="p")
    client.get_meta(["x"], 2, "p", task_name="t", timeout_s=1)
    with pytest.raises(TypeError):
        client.get_meta()
    with pytest.raises(TypeError):
        client.put({"x": [1]}, partitions="p")
    assert isinstance(client.async_put, mock.AsyncMock)


def test_a_bound_method_hides_self() -> None:
    client = tq.TransferQueueClient.__new__(tq.TransferQueueClient)
    methods: list[Callable[..., Any]] = [client.put, client.async_put]
    assert all("self" not in inspect.signature(one).parameters for one in methods)
