"""Tensors that are not there: what a model's loader takes of a checkpoint, and loading from just that.

A loader is given a `Lazy` for each tensor of the checkpoint. Views of one are views of nothing, so shape, strides and
offset of a view say what it covers. In a rehearsal, on a model without memory, that is only noted (`Notes`); later the
same loader is served from the parts that have come (`Supply`). All is caught where torch's operators are called: a
loader may use whatever it likes, and one that computes before it copies just takes a larger part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.errors import NotSupported
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.version.boxes import Box, box_of_view, lies_in, strides_within, whole
from transfer_queue.weights.version.pieces import Pieces
from transfer_queue.weights.version.plans import Wants

aten: Any = torch.ops.aten
Supplied: TypeAlias = "torch.Tensor | Pieces"


class Taking(Protocol):
    def __call__(self, name: str, view: torch.Tensor) -> torch.Tensor:
        """The data of a view (on meta) of the tensor called so; or, where there is none, the view."""

    def counted(self, name: str, view: torch.Tensor) -> None:
        """A loader took this view into a tensor without memory: its data is not needed."""

    def changing(self, name: str) -> None:
        """A loader is about to write into this tensor, whose views see that; nobody else does."""


class Cast(NamedTuple):
    """A view of other elements than the tensor's, or of such a view."""

    func: Any
    args: tuple[Any, ...]
    more: Mapping[str, Any]
    at: int | None  # of several

    def of(self, data: torch.Tensor) -> torch.Tensor:
        made = self.func(data, *self.args, **self.more)
        found: torch.Tensor = made if self.at is None else made[self.at]
        return found


class Lazy(torch.Tensor):
    """A tensor of the checkpoint, or a view of one. `take` is called when something needs its data."""

    _name: str
    _view: torch.Tensor  # on meta, of the tensor's own elements
    _casts: tuple[Cast, ...]  # what is seen of that: its bytes are no box of the tensor
    _take: Taking

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, name: str, view: torch.Tensor, take: Taking, casts: tuple[Cast, ...] = ()) -> Lazy:
        make: Any = torch.Tensor._make_wrapper_subclass
        seen = _cast(view, casts)
        self: Lazy = make(
            cls, seen.shape, strides=seen.stride(), storage_offset=seen.storage_offset(), dtype=seen.dtype,
            device="cpu", requires_grad=False,
        )  # fmt: skip
        self._name, self._view, self._take, self._casts = name, view, take, casts
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Lazy({self._name!r}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first: Any = args[0] if args else None
        if getattr(func, "is_view", False) and isinstance(first, Lazy):
            return first._viewed(func, args[1:], kwargs or {})
        if func is aten.copy_.default and isinstance(args[1], Lazy) and not isinstance(first, Lazy):
            return _copied(func, first, args[1])
        if func is aten._local_scalar_dense.default and isinstance(first, Lazy):
            found = first._data()
            return 0 if found.is_meta else func(found)
        for written in _written(func, args, kwargs or {}):
            written._take.changing(written._name)
        tree_map: Any = torch.utils._pytree.tree_map
        given = tree_map(lambda one: one._data() if isinstance(one, Lazy) else one, (args, kwargs or {}))
        return func(*given[0], **given[1])

    def _viewed(self, func: Any, args: tuple[Any, ...], more: Mapping[str, Any]) -> Any:
        if self._casts and func is aten.as_strided.default:  # the data may lie otherwise
            raise NotSupported(f"a loader takes elements of {self._name!r} as another dtype, by strides")
        made = func(self._seen(), *args, **more)
        several = isinstance(made, (list, tuple))
        views = list(made) if several else [made]
        if self._casts or any(one.dtype != self.dtype for one in views):
            casts = [Cast(func, args, more, at if several else None) for at in range(len(views))]
            found = [Lazy(self._name, self._view, self._take, (*self._casts, one)) for one in casts]
        else:
            found = [Lazy(self._name, one, self._take) for one in views]
        return found if several else found[0]

    def _seen(self) -> torch.Tensor:
        return _cast(self._view, self._casts)

    def _data(self) -> torch.Tensor:
        return _cast(self._take(self._name, self._view), self._casts)


def _cast(data: torch.Tensor, casts: Iterable[Cast]) -> torch.Tensor:
    for cast in casts:
        data = cast.of(data)
    return data


def _written(func: Any, args: Sequence[Any], more: Mapping[str, Any]) -> Iterator[Lazy]:
    """What this operator changes in place, also in lists."""
    if not func._schema.is_mutable:
        return
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else more.get(argument.name)
            for one in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(one, Lazy) and one.numel():
                    yield one


def _copied(func: Any, into: torch.Tensor, source: Lazy) -> torch.Tensor:
    """A rehearsal writes nothing: a twin may have tensors with memory, some of them the live model's."""
    if into.is_meta:
        source._take.counted(source._name, source._view)
        func(into, source._seen())
        return into
    found = source._data()
    if not found.is_meta:
        func(into, found)
    return into


def lazies(metas: Metas, take: Taking) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape) in metas.items():
        yield name, Lazy(name, torch.empty(shape, dtype=torch_dtype(dtype), device="meta"), take)


class Notes:
    """What a loader took in a rehearsal. A part that is no box counts as the whole tensor: more bytes, never wrong
    ones."""

    def __init__(self, metas: Metas) -> None:
        self._metas = metas
        self._boxes: dict[str, dict[Box, None]] = {}

    def __call__(self, name: str, view: torch.Tensor) -> torch.Tensor:
        shape = self._metas[name][1]
        if view.numel():
            box = box_of_view(shape, view.shape, view.stride(), int(view.storage_offset())) or whole(shape)
            self._boxes.setdefault(name, {})[box] = None
        return view

    def counted(self, name: str, view: torch.Tensor) -> None:
        self(name, view)

    def changing(self, name: str) -> None:
        self._boxes.setdefault(name, {})[whole(self._metas[name][1])] = None

    def wants(self) -> Wants:
        return {name: outermost(list(boxes)) for name, boxes in self._boxes.items()}


def outermost(boxes: list[Box]) -> tuple[Box, ...]:
    """Without those that lie in another."""
    kept: list[Box] = []
    for box in sorted(boxes, key=lambda one: -one.size):
        if not any(lies_in(box, other) for other in kept):
            kept.append(box)
    return tuple(sorted(kept))


class Supply:
    """Loads a tensor from what came of it, which stays as it is. `LookupError` for what did not come: the loader took
    another way than in the rehearsal."""

    def __init__(self, held: Supplied | None) -> None:
        self._held = held

    def __call__(self, name: str, view: torch.Tensor) -> torch.Tensor:
        if not view.numel():
            return torch.empty(view.shape, dtype=view.dtype)
        held = self._held
        if held is None:
            raise LookupError(f"nothing of {name!r} is here")
        if isinstance(held, torch.Tensor):
            return held.as_strided(view.shape, view.stride(), held.storage_offset() + view.storage_offset())
        box = box_of_view(held.shape, view.shape, view.stride(), int(view.storage_offset()))
        if box is None:
            return held.whole().as_strided(view.shape, view.stride(), view.storage_offset())
        part = held.of(box).contiguous()
        strides = strides_within(box.lengths, held.shape, view.shape, view.stride())
        return part.as_strided(view.shape, strides, part.storage_offset())

    def counted(self, name: str, view: torch.Tensor) -> None:
        """A loader counts what it gets before it loads: nothing of what came is needed for that."""

    def changing(self, name: str) -> None:
        if isinstance(self._held, Pieces):
            self._held = self._held.whole().clone(memory_format=torch.contiguous_format)


def supplied(tensors: Mapping[str, Supplied], metas: Metas) -> Iterator[tuple[str, torch.Tensor]]:
    """For a loader: those that are whole as they are, the others, also those of which nothing came, as `Lazy`. It may
    write into these, and not into the whole ones: differences, and going back, need them as they came."""
    for name, meta in metas.items():
        held = tensors.get(name)
        if isinstance(held, torch.Tensor):
            yield name, held
        else:
            yield from lazies({name: meta}, Supply(held))
