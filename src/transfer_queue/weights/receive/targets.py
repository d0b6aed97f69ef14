"""How verified tensors become the live weights of a torch module: copied in place, swapped in, or by changing modules.

    InPlace   under the lock, bytes are copied into the live tensors: addresses stay (CUDA graphs, compiled code, views)
    Swap      under the lock, tensors are given other memory: the pause does not depend on the size; addresses change
    Flip      a second module takes the bytes, then a reference changes: readers never wait; twice the memory

`prepare` does all that can be done, and can fail, while the old weights serve. `commit` is all or nothing.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from transfer_queue.errors import (
    CommitFailed,
    DeadlineExceeded,
    InvalidInput,
    NotSupported,
    StaleBase,
)
from transfer_queue.memory.handles import synchronize
from transfer_queue.weights.receive.compatibility import alike, check_fits, expect_shaped, kinds, once
from transfer_queue.weights.receive.lock import SharedLock
from transfer_queue.weights.receive.slots import Place, Slots, places_of, replacement, within_parameters, writable
from transfer_queue.weights.receive.stand_ins import Exchange
from transfer_queue.weights.version.delta import Patch
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.plans import Wants
from transfer_queue.weights.version.sources import check_module, named_weights, ties
from transfer_queue.weights.version.tensor_memory import copies, upload_all, write
from transfer_queue.weights.version.threads import helpers_called

READ_TIMEOUT_S = 60.0
MANY_ELEMENTS = 1 << 18  # of patches: writing these takes longer than starting threads
Tensors = Mapping[str, torch.Tensor]
Staged: TypeAlias = "torch.Tensor | Patch"
Metas: TypeAlias = "Mapping[str, tuple[str, tuple[int, ...]]]"  # by name: dtype and shape


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
    takes_patches = False  # `prepare` may be given differences
    takes_pieces = False  # `prepare` may be given tensors in pieces
    stages_on_host = False  # also what comes in a GPU's memory
    broken = False  # the live weights are a mixture
    dropped = False  # they are gone, by the server's wish: the installed version may be committed once more

    def wanted(self, tensors: Metas) -> Wants | None:
        """Which boxes of a version's tensors are taken here; None for all of them. `check` has passed, or is to come.

        May be called by another thread than the readers', and changes nothing live.
        """
        del tensors
        return None

    @abstractmethod
    def check(self, contents: Contents) -> None:
        """Raise unless this content fits the model: `UnknownTensor`, `ShapeMismatch`, `Incomplete`."""

    @abstractmethod
    def bases(self) -> Mapping[str, Any]:
        """The live tensors, or the pieces of them that are here (`pieces.Pieces`), which differences apply to.
        `StaleBase` when their bytes may not be those received."""

    @abstractmethod
    def prepare(self, staged: Mapping[str, Any]) -> Any:
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
        check_module(module)
        self._module = module
        self._strict = strict
        self._cast = cast
        self._lock = SharedLock()

    def check(self, contents: Contents) -> None:
        check_fits(contents, named_weights(self._module), self._strict, self._cast)

    def bases(self) -> Tensors:
        if self._cast:
            raise StaleBase("a target that casts has no base for differences: send a full version")
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
                noise = torch.randint(top, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8, device="cpu")
                _put(tensor.detach(), noise.view(tensor.dtype).reshape(tensor.shape).to(tensor.device))

    @contextmanager
    def inspecting(self, timeout_s: float) -> Iterator[torch.nn.Module]:
        with self._lock.reading(timeout_s):
            yield self._module


class _Change(NamedTuple):
    """New bytes for a live tensor, and what takes them back."""

    live: torch.Tensor
    new: Staged
    old: Staged | None

    def write(self) -> None:
        _put(self.live, self.new)


class _Changes(NamedTuple):
    """What is written, and what is at the module's places then."""

    writes: list[_Change]
    slots: Slots


class InPlace(_ModuleTarget):
    """Copies into the live tensors: the pause is a memcpy of what changed.

    A copy that fails in the middle is done again from the start; when that fails too the receiver is dirty. `undo`: the
    old values are copied before the pause (as much memory again as changes, until the commit ends), and put back.

    `stage_on`: where a version for a module on a GPU waits for its commit. None: where it came, in memory of the host
    or, by `cuda_ipc`, of the GPU. "device": there, so that the pause is a copy within the GPU; until the commit ends
    this needs as much of its memory as the version. "host": then an update needs a few megabytes there, for a
    difference, or none (without `undo`). What a difference changes is written in the pause in any case.
    """

    takes_patches = True

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        strict: bool = True,
        cast: bool = False,
        undo: bool = False,
        stage_on: Literal["host", "device"] | None = None,
    ) -> None:
        if stage_on not in (None, "host", "device"):
            raise InvalidInput(f'stage_on is {stage_on!r}: None, "host" or "device"')
        super().__init__(module, strict=strict, cast=cast)
        self._undo = undo
        self._stages_on_device = stage_on == "device"
        self.stages_on_host = stage_on == "host"

    def prepare(self, staged: Mapping[str, Any]) -> _Changes:
        slots = named_weights(self._module)
        same = ties(slots)
        new = once(staged, same)
        places = places_of(self._module)
        apart = {id(slot) for slot in slots.values() if not writable(slot)}
        apart |= within_parameters(slots, same) & places.keys()
        here = {name: value for name, value in new.items() if id(slots[name]) not in apart}
        whole = [name for name, value in here.items() if isinstance(value, torch.Tensor)]
        lives = [slots[name].detach() for name in whole]
        old: list[Any] = copies(lives) if self._undo else [None] * len(lives)
        news = [new[name].to(live.dtype) for name, live in zip(whole, lives, strict=True)]
        if self._stages_on_device:
            news = moved(news, lives)
        made = [_Change(*one) for one in zip(lives, news, old, strict=True)]
        for name, patch in here.items():
            if isinstance(patch, Patch):
                live = slots[name].detach()
                made.append(_Change(live, patch, patch.before(live) if self._undo else None))
        return _Changes(made, _slots_of(slots, new, same, places, apart))

    def commit(self, prepared: _Changes, tag: Any, timeout_s: float) -> Pause:
        with self._lock.writing(timeout_s) as drain_s:
            start = time.monotonic()
            interrupt: BaseException | None = None
            prepared.slots.look()
            _synchronize(tensor for change in prepared.writes for tensor in (change.live, change.new))
            try:
                self._write(prepared)
            except BaseException as error:  # noqa: BLE001 an interrupt is raised once the weights are whole
                self._mend(prepared, error)
                interrupt = error if not isinstance(error, Exception) else None
            self.tag, self.broken = tag, False
            pause = Pause(time.monotonic() - start, drain_s)
        if interrupt is not None:
            raise interrupt
        return pause

    def _write(self, prepared: _Changes) -> None:
        writes = prepared.writes
        patches = [change for change in writes if isinstance(change.new, Patch) and change.live.device.type == "cpu"]
        is_much = sum(len(change.new.indices) for change in patches if isinstance(change.new, Patch)) >= MANY_ELEMENTS
        apart = set(map(id, patches)) if is_much else set()
        _put_all((change.live, change.new) for change in writes if id(change) not in apart)
        if is_much:
            with helpers_called("tq-commit") as helpers:
                list(helpers.map(_Change.write, patches))
        _synchronize(change.live for change in writes)
        prepared.slots.put_back()

    def _mend(self, prepared: _Changes, error: BaseException) -> None:
        """Return with the new bytes in place, or raise: with the old ones there, or `Broken`."""
        was_broken, self.broken = self.broken, True
        try:
            if self._undo:
                _put_all((change.live, change.old) for change in prepared.writes)
                _synchronize(change.live for change in prepared.writes)
                prepared.slots.undo()
            else:
                self._write(prepared)
        except BaseException as worse:
            raise Broken(f"copying failed ({error!r}) and could not be mended: {worse!r}") from worse
        self.broken = was_broken
        if self._undo:
            if not isinstance(error, Exception):
                raise error
            raise CommitFailed(f"copying failed and was undone: {error!r}") from error


class Swap(_ModuleTarget):
    """Gives parameters and buffers other memory, whatever their size: a tenth of a microsecond for each parameter that
    only modules hold, one for each other tensor (`stand_ins`).

    Addresses change: not for CUDA graphs, nor for tensors that others hold views of (`InPlace` is). The parameters stay
    the same objects. Staged memory becomes the model's.
    """

    def prepare(self, staged: Tensors) -> Exchange:
        slots = named_weights(self._module)
        same = ties(slots)
        new: dict[str, torch.Tensor] = {}
        used: set[int] = set()
        found = once(staged, same)
        lives = [slots[name] for name in found]
        for name, tensor in zip(found, moved(found.values(), lives), strict=True):
            made = alike(slots[name], tensor)
            new[name] = made.clone() if made.data_ptr() in used else made  # tied there, but not in this model
            used.add(new[name].data_ptr())
        objects = {
            id(slot): (slot, new[same.get(name, name)]) for name, slot in slots.items() if same.get(name, name) in new
        }
        return Exchange(self._module, list(objects.values()))

    def commit(self, prepared: Exchange, tag: Any, timeout_s: float) -> Pause:
        _wait_for(prepared.devices)
        prepared.ready()
        with self._lock.writing(timeout_s) as drain_s:
            start = time.monotonic()
            _wait_for(prepared.devices)  # kernels that read the old memory, which may be freed now
            try:
                prepared.turn()
            except BaseException as error:
                prepared.undo()
                if not isinstance(error, Exception):
                    raise
                raise CommitFailed(f"swapping failed and was undone: {error!r}") from error
            self.tag, self.broken = tag, False
            pause = Pause(time.monotonic() - start, drain_s)
        prepared.put_back()
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
        check_module(spare)
        mine, other = named_weights(module), named_weights(spare)
        expect_shaped({**mine, **other})
        if {tensor.data_ptr() for tensor in mine.values()} & {tensor.data_ptr() for tensor in other.values()} - {0}:
            raise InvalidInput("the two modules share weights")
        if ties(mine) != ties(other) or kinds(mine) != kinds(other):
            raise InvalidInput("the two modules differ in names, dtypes, shapes or ties of their weights")
        for weights in (mine, other):
            _expect_writable(weights)
        self._spare = spare
        self._behind = set(mine) - set(ties(mine))  # tensors whose values the spare may not have
        self._kept: set[str] = set()  # that the version which was checked last lacks: the server may change them
        self._entered = threading.Condition()
        self._num_readers = {id(module): 0, id(spare): 0}
        self._reads: ContextVar[Sequence[Live]] = ContextVar("tq-reads", default=())  # one, or none any more

    def check(self, contents: Contents) -> None:
        super().check(contents)
        spare = named_weights(self._spare)
        _expect_writable(spare)  # a forward pass may have assigned a buffer
        same = ties(spare)
        self._kept = set(spare) - set(same) - {same.get(name, name) for name in contents}

    def prepare(self, staged: Tensors) -> dict[str, torch.Tensor]:
        return once(staged, ties(named_weights(self._module)))

    def commit(self, prepared: Any, tag: Any, timeout_s: float) -> Pause:
        with self._entered:  # nobody enters the spare, so it stays empty
            if not self._entered.wait_for(lambda: not self._num_readers[id(self._spare)], timeout_s):
                raise DeadlineExceeded(f"forward passes in the module to write did not end within {timeout_s} s")
        live, spare = named_weights(self._module), named_weights(self._spare)
        _synchronize(spare.values())  # forward passes that left it may have kernels in a queue that read it still
        behind = (self._behind | self._kept) - set(prepared)
        self._behind |= set(prepared)
        try:
            _put_all((spare[name].detach(), live[name].detach()) for name in behind)
            _put_all((spare[name].detach(), tensor) for name, tensor in prepared.items())
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
            outer = self._reads.get()  # who reads within reading sees the same version
            with self._entered:
                live = outer[0] if outer else Live(self._module, self.tag)
                self._num_readers[id(live.module)] += 1
            found = [live]
            self._reads.set(found)
            try:
                yield live
            finally:
                self._reads.set(outer)
                with self._entered:
                    found.clear()  # a task that was started within has it, and may go on
                    self._num_readers[id(live.module)] -= 1
                    self._entered.notify_all()


def _expect_writable(weights: Tensors) -> None:
    """Flip writes each tensor where it lies."""
    name = next((name for name, one in weights.items() if not writable(one)), None)
    if name is not None:
        raise NotSupported(
            f"elements of {name!r} share memory, as after expand: Flip cannot write them one by one; give it memory "
            "of its own (clone), or use InPlace or Swap, which replace it"
        )


def _slots_of(
    slots: Tensors,
    new: Mapping[str, Staged],
    same: Mapping[str, str],
    places: Mapping[int, list[Place]],
    apart: set[int],
) -> Slots:
    """What belongs at the places of a module once these are written. `apart`: the ids of those that get new memory."""
    found = Slots()
    for slot, value in {id(slots[name]): (slots[name], new.get(same.get(name, name))) for name in slots}.values():
        if id(slot) in apart and (value is not None or writable(slot)):
            memory = torch.empty(slot.shape, dtype=slot.dtype, device=slot.device)
            memory.copy_(value if isinstance(value, torch.Tensor) else slot.detach())
            if isinstance(value, Patch):
                value.apply(memory)
            found.add(places.get(id(slot), ()), replacement(slot, memory))
        elif value is not None:
            found.add(places.get(id(slot), ()), slot)
    return found


def moved(tensors: Collection[torch.Tensor], lives: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, each on the device of its live one: itself, or a copy that lies like that and has its dtype."""
    found = [
        one if one.device == live.device else torch.empty_like(live.detach())
        for one, live in zip(tensors, lives, strict=True)
    ]
    _put_all((made, one) for made, one in zip(found, tensors, strict=True) if made is not one)
    return found


def _put_all(changes: Iterable[tuple[torch.Tensor, Staged | None]]) -> None:
    for live, new in upload_all(changes):
        assert new is not None
        _put(live, new)


def _put(live: torch.Tensor, new: Staged) -> None:
    if isinstance(new, Patch):
        new.apply(live)
    else:
        write(live, new)


def _synchronize(tensors: Iterable[Staged]) -> None:
    """Wait for the devices of these tensors: a lock holds off threads, not kernels that they left in a queue."""
    _wait_for({tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)})


def _wait_for(devices: Iterable[torch.device]) -> None:
    for device in devices:
        synchronize(device)
