"""A model that is loaded by a method of its own, `load_weights`, as a target. Versions are whole checkpoints; the
loader cuts out what belongs in this worker.

A loader that fails leaves a mixture. So nothing is loaded before it was checked, and after a failure the version before
is loaded again, from its host copy, which is kept anyway: differences apply to it.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from transfer_queue.errors import CommitFailed, NotSupported, StaleBase
from transfer_queue.integrations.workers.headers import Headers
from transfer_queue.memory.heap import trim_later
from transfer_queue.weights.receive.lazy import Supplied, supplied
from transfer_queue.weights.receive.targets import Broken, Live, Metas, Pause, Target
from transfer_queue.weights.version.manifest import Contents

log = logging.getLogger("transfer_queue.weights")
Named = Iterable[tuple[str, torch.Tensor]]
Agrees: TypeAlias = "Callable[[bool, float], bool | None]"  # `Ranks.all`


class Loading(NamedTuple):
    """What is to be loaded, as far as this worker has it, and the same on the host (the very same tensors where they
    came there). `metas`: every tensor of the version, in the order of loading."""

    tensors: dict[str, Supplied]
    copies: dict[str, Supplied]
    metas: Metas


class ReloadTarget(Target):
    """`agree` tells whether the other workers of this server took the version too: all commit, or all go back; where it
    does not know, what is here counts as a mixture. It is called once in every commit (`voted`). Commits run in the
    thread that runs the forward passes."""

    def __init__(self, model: torch.nn.Module, checkpoint: Headers, agree: Agrees) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._agree = agree
        self._held: dict[str, Supplied] | None = None  # what is installed, as far as it was wanted here
        self._held_metas: Metas = {}
        self._metas: Metas = {}  # of the version that was checked last
        self.voted = False

    def check(self, contents: Contents) -> None:
        self._checkpoint.check(contents)
        self._metas = {name: contents[name][:2] for name in in_layers(list(contents))}

    def bases(self) -> Mapping[str, Supplied]:
        if self._held is None:
            raise StaleBase("nothing was installed here yet: send a full version")
        return self._held

    def prepare(self, staged: Mapping[str, Supplied]) -> Loading:
        held = self._held or {}
        new = {name: staged.get(name, held.get(name)) for name in self._metas}
        there = {name: tensor for name, tensor in new.items() if tensor is not None}
        return Loading(there, {name: tensor.cpu() for name, tensor in there.items()}, self._metas)

    def commit(self, prepared: Loading, tag: Any, timeout_s: float) -> Pause:
        start = time.monotonic()
        fault: Exception | None = None
        try:
            self.load_version(prepared)
        except Exception as error:  # loaders raise whatever they run into
            log.exception("loading failed")
            fault = error
        self.voted = True
        agreed = self._agree(fault is None, timeout_s - (time.monotonic() - start))
        if agreed is None:
            self.broken = True
            raise Broken("another worker of this server did not say whether it could load the version")
        if not agreed:
            self._go_back(repr(fault) if fault else "another worker of this server could not load it")
        self.hold(prepared)
        self.tag, self.broken, self.dropped = tag, False, False
        trim_later()  # what the reload has freed: half of this worker's share of the model
        return Pause(time.monotonic() - start, 0.0)

    def _go_back(self, why: str) -> None:
        """Load what was there before, and raise. After a mixture there is nothing that all workers had."""
        if self.broken:
            raise Broken(f"loading failed, and the weights were a mixture before: {why}")
        self.broken = True
        try:
            is_known = self.load_before()
        except Exception as worse:  # as above
            log.exception("loading the version before failed")
            raise Broken(f"loading failed ({why}), and so did going back: {worse!r}") from worse
        if not is_known:
            raise Broken(f"loading failed, and there is no copy of what was there before: {why}")
        self.broken = self.dropped = False
        raise CommitFailed(f"loading failed, the version before was loaded again: {why}")

    def load_version(self, version: Loading) -> None:
        self._load(supplied(version.tensors, version.metas))

    def load_before(self) -> bool:
        """What is installed, or what the server began with. False: there is no copy of it, and nothing was loaded."""
        before: Named | None = self._checkpoint.tensors() if self._held is None else None
        if self._held is not None:
            before = supplied(self._held, self._held_metas)
        if before is not None:
            self._load(before)
        return before is not None

    def hold(self, version: Loading) -> None:
        """It is installed: keep what going back takes."""
        self._held, self._held_metas = version.copies, version.metas

    @abstractmethod
    def _load(self, tensors: Named) -> None:
        """All of it, through the model's loader. On an error the model has tensors, of whichever version."""

    # readers: the worker's own thread, which commits too

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[Live]:
        if self.broken:
            raise CommitFailed("the weights are a mixture since a commit failed: commit a whole version")
        yield Live(self._model, self.tag)

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[float]:
        yield 0.0

    def scramble(self, timeout_s: float) -> None:
        raise NotSupported("the server has a route of its own for that")

    @contextmanager
    def inspecting(self, timeout_s: float) -> Iterator[torch.nn.Module]:
        yield self._model


def in_layers(names: list[str]) -> list[str]:
    """What is not in a numbered layer in its place, and the others by layer: a loader may
    gather what it makes one tensor of, and vLLM's frees that when the layer's last tensor has come."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        key = (name, -1) if at is None else (".".join(parts[:at]), int(parts[at]))
        groups.setdefault(key, []).append(name)
    return [name for group in groups.values() for name in group]
