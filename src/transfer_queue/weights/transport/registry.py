"""Engines by name. A package brings more through the entry-point group `transfer_queue.weight_engines`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from transfer_queue.errors import InvalidInput
from transfer_queue.weights.transport.base import Engine
from transfer_queue.weights.transport.trainer import TrainerEngine

GROUP = "transfer_queue.weight_engines"
DEFAULT = "shm"
_HERE = "transfer_queue.weights.transport"
_places = {
    "collective": f"{_HERE}.collective:CollectiveEngine",
    "cuda_ipc": f"{_HERE}.cuda_ipc:CudaIpcEngine",
    "disk": f"{_HERE}.disk:DiskEngine",
    "shm": f"{_HERE}.shm:ShmEngine",
    "tcp": f"{_HERE}.tcp:TcpEngine",
}


def register(name: str, place: str) -> None:
    """Make the `Engine` class at `module:Class` known; imported on first use. `InvalidInput` for a name in use."""
    module, colon, attribute = place.partition(":")
    if not (name and module and colon and attribute.isidentifier()):
        raise InvalidInput(f"engine {name!r} at {place!r}: expected module:Class")
    if _find(name) not in (None, place):
        raise InvalidInput(f"there is an engine {name!r} already, at {_find(name)}")
    _places[name] = place


def names() -> list[str]:
    """Every engine that `engine` knows, sorted."""
    return sorted({*_places, *(entry.name for entry in entry_points(group=GROUP))})


def engine(name: str = DEFAULT) -> type[Engine]:
    """The class of the inference side."""
    place = _find(name)
    if place is None:
        raise InvalidInput(f"no engine {name!r}, there are {', '.join(names())}")
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"engine {name!r} at {place} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise InvalidInput(f"{place} is not an Engine")
    return found


def trainer(name: str = DEFAULT) -> type[TrainerEngine]:
    """The class of the trainer's side."""
    return engine(name).trainer


def _find(name: str) -> str | None:
    """Where the engine is. Two packages with one name are refused: which one came first would be chance."""
    if name in _places:
        return _places[name]
    found = sorted({entry.value for entry in entry_points(group=GROUP) if entry.name == name})
    if len(found) > 1:
        raise InvalidInput(f"several packages bring an engine {name!r}: {', '.join(found)}")
    return found[0] if found else None
