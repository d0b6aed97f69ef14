"""How verified tensors become the live weights of a torch module: copied in place, swapped in, or by changing modules.

    InPlace   under the lock, bytes are copied into the live tensors: addresses stay (CUDA graphs, compiled code, views)
    Swap      under the lock, `tensor.data` is set: the pause does not depend on the size; addresses change
    Flip      a second module takes the bytes, then a reference changes: readers never wait; twice the memory

`prepare` does all that can be done, and can fail, while the old weights serve. `commit` is all or nothing.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.errors import (
    CommitFailed,
    DeadlineExceeded,
    Incomplete,
    InvalidInput,
    NotSupported,
    ShapeMismatch,
    UnknownTensor,
)
from transfer_queue.weights.lock import SharedLock
from transfer_queue.weights.manifest import Contents
from transfer_queue.weights.room import copies, write
from transfer_queue.weights.sources import named_weights, ties

READ_TIMEOUT_S = 60.0
Tensors = Mapping[str, torch.Tensor]


class Live(NamedTuple):
    """What a reader sees while it reads: the module, and the tag that its weights were committed with."""

    module: torch.nn.Module
    tag: Any


class Pause(NamedTuple):
    """`pause_s`: how long no forward pass could run. `drain_s`: how long new ones waited for others to end before."""

    pause_s: float
    drain_s: float


class Broken(CommitFailed):
    """The live weights are a mixture now."""


class Target(ABC):
    """A module whose weights are replaced as a whole. Anything but `reading` and `tag` is for one thread at a time."""

    tag: Any = None
    broken = False  # the live weights are a mixture

    @abstractmethod
    def check(self, contents: Contents) -> None:
        """Raise unless this content fits the model: `UnknownTensor`, `ShapeMismatch`, `Incomplete`."""

    @abstractmethod
    def bases(self) -> Tensors:
        """The live tensors, which differences apply to. `ShapeMismatch` when their bytes may not be those received."""

    @abstractmethod
    def prepare(self, staged: Tensors) -> Any:
        """What `commit` needs. Nothing live changes."""

    @abstractmethod
    def commit(self, prepared: Any, tag: Any, timeout_s: float) -> Pause:
        """Make it live, together with `tag`. `DeadlineExceeded` (nothing changed) when readers do not leave in time,
        `CommitFailed` when it failed and was undone, `Broken` when it could not be undone."""

    @abstractmethod
    def reading(self, timeout_s: float) -> AbstractContextManager[Live]:
        """Within it the weights do not change. `CommitFailed` while they are a mixture, `DeadlineExceeded` when they
        are being written for longer than `timeout_s`."""

    @abstractmethod
    def exclusive(self, timeout_s: float) -> AbstractContextManager[float]:
        """Within it nobody reads."""

    @abstractmethod
    def scramble(self, timeout_s: float) -> None:
        """Overwrite the live weights with noise; they are `broken` then. `NotSupported` where a commit may not write
        all of them."""

    @abstractmethod
    def inspecting(self, timeout_s: float) -> AbstractContextManager[torch.nn.Module]:
        """The live module, for a look at weights that do not change meanwhile and may be a mixture."""


class _ModuleTarget(Target):
    """What the modes share: one lock, and names resolved against the module.

    `strict`: a version has to carry every tensor of the model; otherwise those that it lacks keep their values. A
    tensor the model does not have is always refused. `cast`: floating tensors are converted to the model's dtype; the
    receiver takes no deltas then.
    """

    def __init__(self, module: torch.nn.Module, *, strict: bool = True, cast: bool = False) -> None:
        self._module = module
        self._strict = strict
        self._cast = cast
        self._lock = SharedLock()

    def check(self, contents: Contents) -> None:
        slots = named_weights(self._module)
        same = ties(slots)
        _check_known(contents, slots, self._cast)
        held: dict[str, tuple[str, str]] = {}
        for name, entry in contents.items():
            first, digest = held.setdefault(same.get(name, name), (name, entry.digest))
            if digest != entry.digest:
                raise ShapeMismatch(f"{first!r} and {name!r} differ, and the model has one tensor for both")
        missing = {same.get(name, name) for name in slots} - set(held)
        if self._strict and missing:
            raise Incomplete(f"the version lacks {len(missing)} tensors of the model, such as {min(missing)!r}")

    def bases(self) -> Tensors:
        if self._cast:
            raise ShapeMismatch("a target that casts has no base for differences: send a full version")
        return named_weights(self._module)

    def reading(self, timeout_s: float) -> AbstractContextManager[Live]:
        return self._reading(timeout_s)

    @contextmanager
    def _reading(self, timeout_s: float) -> Iterator[Live]:
        with self._lock.reading(timeout_s):
            if self.broken:
                raise CommitFailed("the weights are a mixture since a commit failed: commit a whole version")
            yield Live(self._module, self.tag)

    def exclusive(self, timeout_s: float) -> AbstractContextManager[float]:
        return self._lock.writing(timeout_s)

    def scramble(self, timeout_s: float) -> None:
        with self.exclusive(timeout_s):
            self.broken = True
            for tensor in named_weights(self._module).values():
                top = 2 if tensor.dtype is torch.bool else 256
                noise = torch.randint(top, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8)
                _write(tensor.detach(), noise.view(tensor.dtype).reshape(tensor.shape).to(tensor.device))

    @contextmanager
    def inspecting(self, timeout_s: float) -> Iterator[torch.nn.Module]:
        with self._lock.reading(timeout_s):
            yield self._module


class InPlace(_ModuleTarget):
    """Copies into the live tensors: the pause is a memcpy of what changed.

    `undo`: the old values are copied before the pause, so that a failure in the middle is undone (as much memory again
    as changes, until the commit ends). Without it such a failure leaves the receiver dirty.
    """

    def __init__(self, module: torch.nn.Module, *, strict: bool = True, cast: bool = False, undo: bool = True) -> None:
        super().__init__(module, strict=strict, cast=cast)
        self._undo = undo

    def prepare(self, staged: Tensors) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        slots = named_weights(self._module)
        new = _once(staged, ties(slots))
        live = [slots[name].detach() for name in new]
        moved = [tensor.to(slot.device, slot.dtype) for slot, tensor in zip(live, new.values(), strict=True)]
        old: list[torch.Tensor] | list[None] = copies(live) if self._undo else [None] * len(live)
        return list(zip(live, moved, old, strict=True))

    def commit(self, prepared: Any, tag: Any, timeout_s: float) -> Pause:
        with self._lock.writing(timeout_s) as drain_s:
            start = time.monotonic()
            _synchronize(live for live, _, _ in prepared)
            try:
                for live, new, _ in prepared:
                    _write(live, new)
                _synchronize(live for live, _, _ in prepared)
            except BaseException as error:
                self._restore(prepared, error)
                if not isinstance(error, Exception):
                    raise
                raise CommitFailed(f"copying failed and was undone: {error!r}") from error
            self.tag, self.broken = tag, False
            return Pause(time.monotonic() - start, drain_s)

    def _restore(self, prepared: Any, error: BaseException) -> None:
        was_broken, self.broken = self.broken, True
        if not self._undo:
            raise Broken(f"copying failed in the middle: {error!r}") from error
        try:
            for live, _, old in prepared:
                live.copy_(old)
            _synchronize(live for live, _, _ in prepared)
        except BaseException as worse:
            raise Broken(f"copying failed ({error!r}) and could not be undone: {worse!r}") from worse
        self.broken = was_broken


class Swap(_ModuleTarget):
    """Sets `data` of parameters and buffers: O(number of tensors), whatever their size.

    Addresses change: not for CUDA graphs, nor for tensors that others hold views of (`InPlace` is). The parameters stay
    the same objects. Staged memory becomes the model's.
    """

    def prepare(self, staged: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        slots = named_weights(self._module)
        same = ties(slots)
        new: dict[str, torch.Tensor] = {}
        used: set[int] = set()
        for name, tensor in _once(staged, same).items():
            alike = _alike(slots[name], tensor)
            new[name] = alike.clone() if alike.data_ptr() in used else alike  # tied there, but not in this model
            used.add(new[name].data_ptr())
        objects = {
            id(slot): (slot, new[same.get(name, name)]) for name, slot in slots.items() if same.get(name, name) in new
        }
        return list(objects.values())

    def commit(self, prepared: Any, tag: Any, timeout_s: float) -> Pause:
        _synchronize(new for _, new in prepared)
        with self._lock.writing(timeout_s) as drain_s:
            start = time.monotonic()
            _synchronize(new for _, new in prepared)  # kernels that read the old memory, which may be freed now
            done: list[tuple[torch.Tensor, torch.Tensor]] = []
            try:
                for live, new in prepared:
                    done.append((live, live.data))
                    _point(live, new)
            except BaseException as error:
                for live, old in done:
                    live.data = old
                if not isinstance(error, Exception):
                    raise
                raise CommitFailed(f"swapping failed and was undone: {error!r}") from error
            self.tag, self.broken = tag, False
            pause = Pause(time.monotonic() - start, drain_s)
        done.clear()  # frees the old weights, after the pause
        return pause


class Flip(_ModuleTarget):
    """Two modules of one architecture: one serves while the other takes the next version, then they change roles.

    Readers never wait, and those that are in the old module go on there; a commit waits for those that are still in the
    module it is about to write. `spare` may have any weights at first.
    """

    def __init__(
        self, module: torch.nn.Module, spare: torch.nn.Module, *, strict: bool = True, cast: bool = False
    ) -> None:
        super().__init__(module, strict=strict, cast=cast)
        mine, other = named_weights(module), named_weights(spare)
        if {tensor.data_ptr() for tensor in mine.values()} & {tensor.data_ptr() for tensor in other.values()} - {0}:
            raise InvalidInput("the two modules share weights")
        if ties(mine) != ties(other) or _kinds(mine) != _kinds(other):
            raise InvalidInput("the two modules differ in names, dtypes, shapes or ties of their weights")
        self._spare = spare
        self._behind = set(mine) - set(ties(mine))  # tensors whose values the spare may not have
        self._entered = threading.Condition()
        self._num_readers = {id(module): 0, id(spare): 0}

    def prepare(self, staged: Tensors) -> dict[str, torch.Tensor]:
        return _once(staged, ties(named_weights(self._module)))

    def commit(self, prepared: Any, tag: Any, timeout_s: float) -> Pause:
        with self._entered:  # nobody enters the spare, so it stays empty
            if not self._entered.wait_for(lambda: not self._num_readers[id(self._spare)], timeout_s):
                raise DeadlineExceeded(f"forward passes in the module to write did not end within {timeout_s} s")
        live, spare = named_weights(self._module), named_weights(self._spare)
        _synchronize(spare.values())  # forward passes that left it may have kernels in a queue that read it still
        behind = self._behind - set(prepared)
        self._behind |= set(prepared)
        try:
            for name in behind:
                _write(spare[name].detach(), live[name].detach())
            for name, tensor in prepared.items():
                _write(spare[name].detach(), tensor)
            _synchronize(spare.values())
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            raise CommitFailed(f"writing the spare module failed, the live one is as it was: {error!r}") from error
        start = time.monotonic()
        with self._entered:
            self._module, self._spare, self.tag = self._spare, self._module, tag
        self._behind = set(prepared)
        return Pause(time.monotonic() - start, 0.0)

    def scramble(self, timeout_s: float) -> None:
        raise NotSupported("two modules in turn: the next version may be one that changes little of the other module")

    @contextmanager
    def inspecting(self, timeout_s: float) -> Iterator[torch.nn.Module]:
        with self._reading(timeout_s) as live:
            yield live.module

    @contextmanager
    def _reading(self, timeout_s: float) -> Iterator[Live]:
        with self._lock.reading(timeout_s):
            with self._entered:
                live = Live(self._module, self.tag)
                self._num_readers[id(live.module)] += 1
            try:
                yield live
            finally:
                with self._entered:
                    self._num_readers[id(live.module)] -= 1
                    self._entered.notify_all()


def _write(live: torch.Tensor, new: torch.Tensor) -> None:
    write(live, new)


def _point(live: torch.Tensor, new: torch.Tensor) -> None:
    live.data = new


def _synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the devices of these tensors: a lock holds off threads, not kernels that they left in a queue."""
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _once(staged: Tensors, same: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The staged tensors under the first name that the model has for each."""
    return {same.get(name, name): tensor for name, tensor in staged.items()}


def _alike(live: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` on the device, in the dtype and with the strides of `live`."""
    moved = new.to(live.device, live.dtype)
    if moved.stride() == live.stride():
        return moved
    return torch.empty_like(live.detach()).copy_(moved)


def _kinds(slots: Tensors) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (slot.dtype, slot.shape) for name, slot in slots.items()}


def _check_known(contents: Contents, slots: Tensors, cast: bool) -> None:
    for name, entry in contents.items():
        if name not in slots:
            raise UnknownTensor(f"the model has no {name!r}")
        live = slots[name]
        fits = entry.dtype == dtype_name(live.dtype)
        if not fits and cast:
            fits = live.is_floating_point() and torch_dtype(entry.dtype).is_floating_point
        if not fits or entry.shape != tuple(live.shape):
            raise ShapeMismatch(
                f"{name!r} is {entry.dtype} {list(entry.shape)}, the model's is {live.dtype} {list(live.shape)}"
            )
