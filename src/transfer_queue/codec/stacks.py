"""Python values as the NonTensorStack that a get returns, at the cost of a list.

A stack of tensordict has an object of several dictionaries for every value: three to twenty microseconds each, and each
a thing that the garbage collector looks at. So ours keeps the values, and makes a member when somebody looks at it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, NonTensorStack

from transfer_queue.errors import ProtocolError

Method = TypeVar("Method", bound=Callable[..., Any])


def stack(values: list[Any], inner: tuple[int, ...] = ()) -> NonTensorStack:
    """The values as a stack; rows are lists nested as deep as `inner`, the batch shape beyond the rows, is long.

    It keeps `values`, which must not be changed any more.
    """
    if inner:
        if any(type(row) is not list or len(row) != inner[0] for row in values):
            raise ProtocolError(f"rows that are not {inner[0]} values each")
        return NonTensorStack(*[stack(row, inner[1:]) for row in values])
    if not values:
        return NonTensorStack()
    found = NonTensorStack(NonTensorData(None))  # tensordict's own initial state, whatever release it is
    found.tensordicts = Members(values)
    found._batch_size = torch.Size([len(values)])
    return found


def members(values: Sequence[Any]) -> list[NonTensorData]:
    """What `NonTensorData(value)` gives for each; releases of tensordict that make scalars quickly make all quickly."""
    found: list[Any] = NonTensorStack(*[None] * len(values)).tensordicts
    for member, value in zip(found, values, strict=True):
        member._non_tensordict["data"] = unwrapped(value)
    return found


def unwrapped(value: Any) -> Any:
    """A stack inside a value is the list of its values, and a wrapped value is the value, as NonTensorData has them."""
    if type(value) is NonTensorStack:
        return value.tolist()
    return value.data if isinstance(value, NonTensorData) else value


class Members(list[NonTensorData]):
    """A list of members of which those that nobody has looked at are not made yet.

    The list itself holds None in their places. Whatever may see many of them, or changes the list, makes all of them
    first; from then on it is a list like any other. Pickled, it is a plain list.
    """

    __slots__ = ("_values",)

    def __init__(self, values: list[Any]) -> None:
        super().__init__([None] * len(values))  # type: ignore[list-item]
        self._values: list[Any] | None = values

    def _fill(self) -> None:
        values = self._values
        if values is None:
            return
        known = list.copy(self)
        made = members([value for value, member in zip(values, known, strict=True) if member is None])
        rest = iter(made)
        list.__setitem__(self, slice(None), [next(rest) if member is None else member for member in known])
        self._values = None

    def __getitem__(self, at: Any) -> Any:
        values = self._values  # before the place: another thread may make all members in between
        found = list.__getitem__(self, at)
        if values is None:
            return found
        if found is None:
            found = members([values[at]])[0]
            list.__setitem__(self, at, found)
        elif type(found) is list:
            self._fill()
            found = list.__getitem__(self, at)
        return found

    def __iter__(self) -> Iterator[NonTensorData]:
        self._fill()
        return list.__iter__(self)

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)

    def __copy__(self) -> list[NonTensorData]:
        return list(self)


def _filled(method: Method) -> Method:
    """The method of a list whose members are all made."""

    @functools.wraps(method)
    def call(self: Members, *args: Any, **more: Any) -> Any:
        self._fill()
        return method(self, *args, **more)

    return call  # type: ignore[return-value]


for _name in (
    "__add__", "__contains__", "__delitem__", "__eq__", "__ge__", "__gt__", "__iadd__", "__imul__", "__le__", "__lt__",
    "__mul__", "__ne__", "__repr__", "__reversed__", "__rmul__", "__setitem__", "append", "clear", "copy", "count",
    "extend", "index", "insert", "pop", "remove", "reverse", "sort",
):  # fmt: skip
    setattr(Members, _name, _filled(getattr(list, _name)))
