"""Engines by their names, and those of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from transfer_queue.errors import InvalidInput
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.disk import DiskEngine, DiskTrainer
from transfer_queue.weights.transport.shm import ShmEngine
from transfer_queue.weights.transport.tcp import TcpEngine


def test_engines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.names() == ["collective", "cuda_ipc", "disk", "shm", "tcp"]
    assert registry.engine() is ShmEngine
    assert registry.trainer("disk") is DiskTrainer
    with pytest.raises(InvalidInput, match="no engine 'rdma'"):
        registry.engine("rdma")
    for place in ("somewhere", "a:b c", ":C"):
        with pytest.raises(InvalidInput, match="module:Class"):
            registry.register("mine", place)
    with pytest.raises(InvalidInput, match="already"):
        registry.register("tcp", "elsewhere:Engine")
    monkeypatch.setattr(registry, "_places", dict(registry._places))
    registry.register("mine", "transfer_queue.weights.transport.tcp:TcpEngine")
    registry.register("mine", "transfer_queue.weights.transport.tcp:TcpEngine")
    assert registry.engine("mine") is TcpEngine
    registry.register("broken", "no_such_module:Engine")
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        registry.engine("broken")
    registry.register("other", "pathlib:Path")
    with pytest.raises(InvalidInput, match="not an Engine"):
        registry.engine("other")


def test_engines_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = [
        EntryPoint("theirs", "transfer_queue.weights.transport.disk:DiskEngine", registry.GROUP),
        EntryPoint("twice", "one:Engine", registry.GROUP),
        EntryPoint("twice", "two:Engine", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: brought if group == registry.GROUP else [])
    assert {"theirs", "twice", "shm"} <= set(registry.names())
    assert registry.engine("theirs") is DiskEngine
    with pytest.raises(InvalidInput, match="several packages"):
        registry.engine("twice")
    with pytest.raises(InvalidInput, match="already"):
        registry.register("theirs", "mine:Engine")
