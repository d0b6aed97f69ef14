"""Types of the user's own that the object codec carries by two plain functions, or by a name of their own.

A registered type is known on the wire by that name: reading constructs only what this process registered itself.
Enums, dataclasses and named tuples travel without being registered (`codec.classes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, NamedTuple

from transfer_queue.codec.classes import DATACLASS, ENUM, FLAG, NAMEDTUPLE, kind_of, rebuilt
from transfer_queue.codec.exact import of_type
from transfer_queue.errors import InvalidInput


class Registration(NamedTuple):
    """`to_plain`: None where values travel by their fields (`codec.classes`)."""

    name: str
    cls: type
    to_plain: Callable[[Any], Any] | None
    from_plain: Callable[[Any], Any]


_BY_TYPE: dict[type, Registration] = {}
_BY_NAME: dict[str, Registration] = {}


def register_type(
    cls: type,
    *,
    name: str | None = None,
    to_plain: Callable[[Any], Any] | None = None,
    from_plain: Callable[[Any], Any] | None = None,
) -> type:
    """Let samples hold values of `cls` and its subclasses; call it in every process that writes or reads them.

    `to_plain` returns a value the codec can carry and `from_plain` rebuilds the original from it; what a subclass comes
    back as is up to them, unless it is registered as well. Enums, dataclasses and named tuples need no functions, and
    where their class is imported before reading they need not be registered, unless it has special methods of its own:
    registering it lets a message make values that run them. `name` defaults to module and qualified name. Usable as a
    class decorator. Functions run in any thread: those of many values in one that holds up no event loop. Raises
    `InvalidInput` for a type without functions, or with one of the two, and a name taken by another type.
    """
    _check(cls, name, to_plain, from_plain)
    name = name or f"{cls.__module__}:{cls.__qualname__}"
    if to_plain is None or from_plain is None:
        to_plain, from_plain = None, _from_fields(cls)
    held = _BY_NAME.get(name)
    if held is not None and held.cls is not cls and held.cls.__qualname__ != cls.__qualname__:
        raise InvalidInput(f"the name {name!r} is registered for {held.cls}")
    _BY_TYPE[cls] = _BY_NAME[name] = Registration(name, cls, to_plain, from_plain)
    return cls


def _check(cls: object, name: object, to_plain: object, from_plain: object) -> None:
    if not isinstance(cls, type):
        raise InvalidInput(f"cls is a class, got {cls!r:.200}")
    if not isinstance(name, (str, NoneType)):
        raise InvalidInput(f"name is a string or None, got {name!r:.200}")
    if (to_plain is None) != (from_plain is None):
        raise InvalidInput(f"{cls}: give both of to_plain and from_plain, or neither")
    if to_plain is not None and not (callable(to_plain) and callable(from_plain)):
        raise InvalidInput(f"{cls}: to_plain and from_plain are functions")


def _from_fields(cls: Any) -> Callable[[Any], Any]:
    """Rebuilds what earlier releases stored of a type that was registered without functions."""
    kind = kind_of(cls)
    if kind is None:
        raise InvalidInput(f"{cls} is no enum, named tuple or plain dataclass: give to_plain and from_plain")
    place = f"{cls.__module__}:{cls.__qualname__}"
    if kind == ENUM:
        return lambda name: rebuilt(ENUM, place, [name], cls)
    if kind in (NAMEDTUPLE, FLAG):
        return lambda plain: rebuilt(kind, place, plain, cls)
    return lambda plain: rebuilt(DATACLASS, place, _fields(plain), cls)


def _fields(plain: Any) -> list[list[Any]]:
    return [[name, item] for name, item in of_type(plain, dict).items()]


def registered(cls: type) -> Registration | None:
    """The registration of exactly `cls`, else that of the nearest base that has functions of its own."""
    if not _BY_TYPE:
        return None
    found = _BY_TYPE.get(cls)
    if found is not None:
        return found
    for base in cls.__mro__[1:]:
        found = _BY_TYPE.get(base)
        if found is not None and found.to_plain is not None:
            return found
    return None


def has_functions(values: Iterable[Any]) -> bool:
    """Whether some of them are of types that were registered with functions."""
    if not _BY_TYPE:
        return False
    found = map(registered, set(map(type, values)))
    return any(one is not None and one.to_plain is not None for one in found)


def by_name(name: str) -> Registration | None:
    return _BY_NAME.get(name)
