"""New memory for many tensors with a short pause: parameters are replaced by others for as long as changing them takes.

Setting `tensor.data` takes about a microsecond; an entry of a dict is set in a tenth of it. So while nobody reads each
parameter gives way, in its module, to a stand-in over the new memory. After the pause the parameter itself takes the
new memory and returns to its place: whoever reads meanwhile gets one of the two, which are the same bytes.

What somebody besides the modules holds (an optimizer, a list of weights such as that of `torch.nn.LSTM`) would be read
past the stand-in, so it is set one by one in the pause; so are buffers, and whatever is no plain `torch.nn.Parameter`.
A tensor that was made in inference mode takes no other memory (views of it would raise): another one takes its places.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from transfer_queue.errors import CommitFailed
from transfer_queue.weights.receive.slots import Entry, Place, Slots, places_of, replacement

Pair = tuple[torch.Tensor, torch.Tensor]  # live, and what has its new memory
LARGE = 4  # parameters of one module: `dict.update` is quicker for so many
log = logging.getLogger("transfer_queue.weights")


class StandIn(NamedTuple):
    """`other` is to stand in for `live` at these places."""

    live: torch.Tensor
    new: torch.Tensor
    other: torch.Tensor
    places: list[Place]


class Exchange:
    """The new memory of a module's tensors: `ready`, then `turn` while nobody reads, then `put_back` (or `undo`)."""

    def __init__(self, module: torch.nn.Module, pairs: Sequence[Pair]) -> None:
        self.devices = {new.device for _, new in pairs if new.device.type != "cpu"}
        self._pairs: list[Pair] = []  # to be set one by one
        self._slots = Slots()  # of these, and of what others take the places of
        self._stand_ins: list[StandIn] = []
        self._to_other: list[Entry] = []
        self._to_live: list[Entry] = []
        self._at_once: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what `_to_other` says of large modules
        self._few: list[Entry] = []  # and of the others
        self._olds: list[Pair] = []
        places = places_of(module)
        for live, new in pairs:
            found = places.get(id(live), [])
            if found and _is_plain(live):
                other = torch.nn.Parameter(new, requires_grad=live.requires_grad)
                self._stand_ins.append(StandIn(live, new, other, found))
            else:
                self._add_single(live, new, found)

    def _add_single(self, live: torch.Tensor, new: torch.Tensor, places: Sequence[Place]) -> None:
        if live.is_inference() and places:
            self._slots.add(places, replacement(live, new))
        else:
            self._pairs.append((live, new))
            self._slots.add(places, live)

    @property
    def num_single(self) -> int:
        """How many are set one by one."""
        return len(self._pairs)

    def ready(self) -> None:
        """Just before the pause: those that somebody else holds by now are to be set one by one. `CommitFailed` when a
        parameter is no longer where it was."""
        self._to_other, self._to_live = [], []  # of an earlier try
        alone = _references_to_one()
        kept: list[StandIn] = []
        for one in self._stand_ins:
            for held, name in one.places:
                if held.get(name) is not one.live:
                    raise CommitFailed(f"the module has another {name!r} than when the update was verified")
            if sys.getrefcount(one.live) == alone + len(one.places) and _is_free(one.live, one.other):
                kept.append(one)
            else:
                self._add_single(one.live, one.new, one.places)
        self._stand_ins = kept
        for live, _, other, places in kept:
            self._to_other += [(held, name, other) for held, name in places]
            self._to_live += [(held, name, live) for held, name in places]
        self._group()
        for held, name, _ in self._to_live:
            held.get(name)  # brings it into the processor's cache: a shorter pause

    def _group(self) -> None:
        by_module: dict[int, list[Entry]] = {}
        for entry in self._to_other:
            by_module.setdefault(id(entry[0]), []).append(entry)
        self._at_once, self._few = [], []
        for entries in by_module.values():
            if len(entries) < LARGE:
                self._few += entries
            else:
                self._at_once.append((entries[0][0], {name: other for _, name, other in entries}))

    def turn(self) -> None:
        """In the pause. What it raises leaves a mixture, until `undo`."""
        self._slots.look()
        self._olds = [(live, live.data) for live, _ in self._pairs]
        for live, new in self._pairs:
            point(live, new)
        self._slots.put_back()
        for held, others in self._at_once:
            held.update(others)
        for held, name, other in self._few:
            held[name] = other

    def undo(self) -> None:
        for live, old in self._olds:
            live.data = old
        self._slots.undo()
        for held, name, live in self._to_live:
            held[name] = live

    def put_back(self) -> None:
        """After the pause: the parameters take their places again. Frees the old memory."""
        self._olds = []
        try:
            for live, new, _, _ in self._stand_ins:
                live.data = new
        except RuntimeError:
            log.exception("parameters were replaced by others with the same bytes")
            return
        for (held, name, live), (_, _, other) in zip(self._to_live, self._to_other, strict=True):
            if held.get(name) is other:  # else somebody has put another one there
                held[name] = live
        self._to_other, self._few, self._at_once = [], [], []
        alone = _references_to_one()
        for one in self._stand_ins:
            if one.other.requires_grad and (sys.getrefcount(one.other) > alone or _num_uses(one.other) > 1):
                _lead(one.other, one.live)


def point(live: torch.Tensor, new: torch.Tensor) -> None:
    live.data = new


def _is_plain(live: torch.Tensor) -> bool:
    """Whether a stand-in for it would lack nothing, today."""
    is_simple = type(live) is torch.nn.Parameter and live.is_leaf and not live.is_inference() and not live.__dict__
    return is_simple and _is_free(live, live)


def _is_free(live: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        live.grad is None
        and not live._backward_hooks
        and not getattr(live, "_post_accumulate_grad_hooks", None)
        and not weakref.getweakrefcount(live)
        and live.requires_grad == other.requires_grad
    )


def _references_to_one() -> int:
    """What `sys.getrefcount` says of a tensor in a `StandIn` that nobody else holds."""
    one = StandIn(torch.nn.Parameter(torch.empty(0)), torch.empty(0), torch.empty(0), [])
    return sys.getrefcount(one.live)


def _num_uses(tensor: Any) -> int:
    """A graph of autograd is one."""
    return int(tensor._use_count())


def _lead(other: torch.Tensor, live: torch.Tensor) -> None:
    """What comes as the gradient of `other` is added to that of `live`."""

    def add(came: torch.Tensor) -> None:
        if came.grad is not None:
            live.grad = came.grad if live.grad is None else live.grad + came.grad
            came.grad = None

    add(other)
    other.register_post_accumulate_grad_hook(add)
