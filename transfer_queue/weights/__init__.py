"""Weights reach running modules whole, verified and fast. Only `engines` opens sockets.

A version is made by the trainer:
    sources         where weights come from: a module, a state dict, a folder of safetensors files
    packing         tensors into buckets and back
    delta           the exact difference to an earlier version
    manifest        a version as canonical JSON: tensors, their digests, the root that names the content
    digest, device  digests of bytes, on the host and where a GPU has them

A receiver takes it, and makes it live, all or nothing:
    receiver         open, stage, verify, commit; what is installed; who may read
    update_session   the one open update: whose it is, how far it has come, until when it may go on
    staging          the buckets that have arrived, each checked, in memory of its own
    staging_memory   that memory
    compatibility    whether a version fits a model
    targets          how tensors become the live ones: copied in place, swapped in, or by changing modules
    stand_ins        new memory for many tensors with a short pause
    lock             many readers or one writer
    adapters         LoRA adapters, which forward passes choose by label

A server is asked for it:
    control          the calls that a trainer may make
    control_async    the same for an event loop
    status           what a server says about itself
    gate, pauses     where requests pass, so that generation can be paused; whose pause it is
    checker          digests of what is live, to compare servers
    spans            which versions made which tokens of a sample

engines    move versions between processes: shm, tcp, disk, collective, cuda_ipc
fleet      a trainer's replicas: two-phase commits, fences, late ones catch up
http       the calls of `control` over HTTP, in both directions
vllm       receivers inside vLLM's workers
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.weights.adapters import Lora as Lora
    from transfer_queue.weights.control import Control as Control
    from transfer_queue.weights.control_async import AsyncControl as AsyncControl
    from transfer_queue.weights.delta import DeltaSource as DeltaSource
    from transfer_queue.weights.gate import Gate as Gate
    from transfer_queue.weights.manifest import Manifest as Manifest
    from transfer_queue.weights.manifest import TensorSpec as TensorSpec
    from transfer_queue.weights.packing import Packed as Packed
    from transfer_queue.weights.packing import Plan as Plan
    from transfer_queue.weights.packing import digests as digests
    from transfer_queue.weights.packing import pack as pack
    from transfer_queue.weights.packing import plan as plan
    from transfer_queue.weights.packing import seal as seal
    from transfer_queue.weights.packing import unpack as unpack
    from transfer_queue.weights.receiver import CommitInfo as CommitInfo
    from transfer_queue.weights.receiver import Receiver as Receiver
    from transfer_queue.weights.receiver import State as State
    from transfer_queue.weights.receiver import VersionInfo as VersionInfo
    from transfer_queue.weights.sources import ModuleSource as ModuleSource
    from transfer_queue.weights.sources import SafetensorsSource as SafetensorsSource
    from transfer_queue.weights.sources import StateDictSource as StateDictSource
    from transfer_queue.weights.sources import WeightSource as WeightSource
    from transfer_queue.weights.spans import Span as Span
    from transfer_queue.weights.spans import Spans as Spans
    from transfer_queue.weights.targets import Flip as Flip
    from transfer_queue.weights.targets import InPlace as InPlace
    from transfer_queue.weights.targets import Swap as Swap
    from transfer_queue.weights.targets import Target as Target

_HOMES = {
    "adapters": ("Lora",),
    "control": ("Control",),
    "control_async": ("AsyncControl",),
    "delta": ("DeltaSource",),
    "gate": ("Gate",),
    "manifest": ("Manifest", "TensorSpec"),
    "packing": ("Packed", "Plan", "digests", "pack", "plan", "seal", "unpack"),
    "receiver": ("CommitInfo", "Receiver", "State", "VersionInfo"),
    "sources": ("ModuleSource", "SafetensorsSource", "StateDictSource", "WeightSource"),
    "spans": ("Span", "Spans"),
    "targets": ("Flip", "InPlace", "Swap", "Target"),
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
