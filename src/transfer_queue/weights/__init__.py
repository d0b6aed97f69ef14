"""Weights reach running modules whole, verified and fast. Only `transport` and `http` open sockets.

version    what a version is, and how a trainer makes one
receive    a process that takes versions and makes them live, all or nothing
transport  moves versions between processes: shm, tcp, disk, collective, cuda_ipc
control    the calls that a trainer may make to a server
http       those calls over HTTP, in both directions
fleet      a trainer's replicas: two-phase commits, fences, late ones catch up
dcp        versions as checkpoints: torch.distributed.checkpoint reads and writes them
archive    versions in a folder that other sites follow

A layer knows only those above it in this list, with one exception: `fleet`, `http`, `dcp` and `archive` do not know
each other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.weights.control.control import Control as Control
    from transfer_queue.weights.control.control_async import AsyncControl as AsyncControl
    from transfer_queue.weights.receive.adapters import Lora as Lora
    from transfer_queue.weights.receive.gate import Gate as Gate
    from transfer_queue.weights.receive.receiver import CommitInfo as CommitInfo
    from transfer_queue.weights.receive.receiver import Receiver as Receiver
    from transfer_queue.weights.receive.receiver import State as State
    from transfer_queue.weights.receive.receiver import VersionInfo as VersionInfo
    from transfer_queue.weights.receive.targets import Flip as Flip
    from transfer_queue.weights.receive.targets import InPlace as InPlace
    from transfer_queue.weights.receive.targets import Swap as Swap
    from transfer_queue.weights.receive.targets import Target as Target
    from transfer_queue.weights.version.drafts import with_draft as with_draft
    from transfer_queue.weights.version.manifest import Manifest as Manifest
    from transfer_queue.weights.version.manifest import TensorSpec as TensorSpec
    from transfer_queue.weights.version.packing import Packed as Packed
    from transfer_queue.weights.version.packing import Plan as Plan
    from transfer_queue.weights.version.packing import digests as digests
    from transfer_queue.weights.version.packing import pack as pack
    from transfer_queue.weights.version.packing import plan as plan
    from transfer_queue.weights.version.packing import seal as seal
    from transfer_queue.weights.version.packing import unpack as unpack
    from transfer_queue.weights.version.sources import ModuleSource as ModuleSource
    from transfer_queue.weights.version.sources import SafetensorsSource as SafetensorsSource
    from transfer_queue.weights.version.sources import StateDictSource as StateDictSource
    from transfer_queue.weights.version.sources import WeightSource as WeightSource
    from transfer_queue.weights.version.spans import Span as Span
    from transfer_queue.weights.version.spans import Spans as Spans

_HOMES = {
    "receive.adapters": ("Lora",),
    "control.control": ("Control",),
    "control.control_async": ("AsyncControl",),
    "receive.gate": ("Gate",),
    "version.drafts": ("with_draft",),
    "version.manifest": ("Manifest", "TensorSpec"),
    "version.packing": ("Packed", "Plan", "digests", "pack", "plan", "seal", "unpack"),
    "receive.receiver": ("CommitInfo", "Receiver", "State", "VersionInfo"),
    "version.sources": ("ModuleSource", "SafetensorsSource", "StateDictSource", "WeightSource"),
    "version.spans": ("Span", "Spans"),
    "receive.targets": ("Flip", "InPlace", "Swap", "Target"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'transfer_queue.weights' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"transfer_queue.weights.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
