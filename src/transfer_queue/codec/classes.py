"""Enums, dataclasses and named tuples by the name of their class and their fields.

The reader takes a class only where it has imported it already: it looks in `sys.modules` and in the dictionaries of
modules and classes, so that no name in a message imports anything or runs a module's `__getattr__`. It never calls the
class either: fields are set on a bare object. A class that it did not register is data and nothing else
(`codec.data_classes`), so that using the value runs no code of it. Any other value comes back as plain data.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, cast

from transfer_queue.codec.data_classes import HEAP_TYPE, is_class, is_data
from transfer_queue.codec.exact import listed, of_type, pairs
from transfer_queue.errors import ProtocolError, UnsupportedValue

ENUM, FLAG, DATACLASS, NAMEDTUPLE = "e", "f", "d", "n"
TENSORCLASS = "_is_tensorclass"  # how tensordict marks them
MOST_MISSED = 1000  # classes that are remembered as missed, and warned of
MAIN = ("__main__", "__mp_main__")  # a script, and the same script in a process that it spawned

log = logging.getLogger("transfer_queue")
_missed: set[str] = set()


def is_tensorclass(value: Any) -> bool:
    return bool(getattr(type(value), TENSORCLASS, False))


@functools.lru_cache(maxsize=1024)
def kind_of(cls: type) -> str | None:
    """How values of `cls` travel; None when they have no fields by which they could."""
    if issubclass(cls, enum.Flag):
        return FLAG
    if issubclass(cls, enum.Enum):
        return ENUM
    if issubclass(cls, tuple):
        return NAMEDTUPLE if type(inspect.getattr_static(cls, "_fields", None)) is tuple else None
    if inspect.getattr_static(cls, TENSORCLASS, False) is True:
        return None  # its fields lie in a TensorDict
    if dataclasses.is_dataclass(cls) and all(base is object or base.__flags__ & HEAP_TYPE for base in cls.__mro__):
        return DATACLASS  # what a base written in C holds beside the fields, as a dict does, would be lost
    return None


def fields_of(value: Any, kind: str, lower: Callable[[Any], Any]) -> Any:
    """What makes up a value of such a class, lowered. Raises `UnsupportedValue` that names the field."""
    cls: Any = type(value)
    if kind == FLAG:
        return lower(value.value)
    if kind == ENUM:
        try:
            return [value.name, lower(value.value)]
        except UnsupportedValue:
            return [value.name]  # the reader needs the class
    if kind == NAMEDTUPLE:
        if getattr(value, "__dict__", None):
            raise UnsupportedValue(f"a {cls.__qualname__} with attributes beside its fields cannot be stored")
        return [_lowered(cls, name, item, lower) for name, item in zip(cls._fields, value, strict=True)]
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    names += [name for name in _slots(cls) if name not in names and hasattr(value, name)]
    names += [name for name in getattr(value, "__dict__", ()) if name not in names]
    return [[name, _lowered(cls, name, getattr(value, name), lower)] for name in names]


@functools.lru_cache(maxsize=256)
def _slots(cls: type) -> tuple[str, ...]:
    """The names of its slots, as its values have them."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    return tuple(name for name in names if isinstance(inspect.getattr_static(cls, name), types.MemberDescriptorType))


def _lowered(cls: type, name: str, value: Any, lower: Callable[[Any], Any]) -> Any:
    try:
        return lower(value)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{cls.__qualname__}.{name}: {error}") from None


def rebuilt(kind: str, place: str, content: Any, known: type | None = None) -> Any:
    """The value of a class "module:qualified name", or of `known` in its place; plain data where this process has not
    imported it, or may not make a value of it because a message says so."""
    cls = known or _imported(place)
    usable = cls is not None and kind_of(cls) == kind
    try:
        if cls is not None and usable and (cls is known or is_data(cls)):
            return _made(cls, kind, content)
        plain = _plain(kind, content)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ProtocolError(f"a damaged value of {place}: {error}") from None
    if place not in _missed and len(_missed) < MOST_MISSED:
        _missed.add(place)
        log.warning(CODE if usable else ABSENT, place.replace(":", "."))
    return plain


ABSENT = (
    "values of %s come back as plain data, because there is no such class here: "
    "import its module, or register the class with transfer_queue.register_type, before reading"
)
CODE = (
    "values of %s come back as plain data, because the class has special methods of its own: "
    "transfer_queue.register_type(cls) in this process makes them come back as their class"
)


def _imported(place: str) -> type | None:
    """The class, where it is in a module that is imported. Looking for it runs no code: not that of a module that
    imports itself when it is looked at, nor of an object that says it is a class."""
    name, _, path = place.partition(":")
    for module in MAIN if name in MAIN else (name,):
        found: Any = sys.modules.get(module)
        if type(found) is not types.ModuleType:
            continue
        content: Any = object.__getattribute__(found, "__dict__")
        for step in path.split("."):
            found = content.get(step)
            content = vars(found) if is_class(found) else {}
        if is_class(found):
            return cast(type, found)
    return None


def _named(content: Any) -> list[Any]:
    """The name of a member of an enum, and its value where it has one that travels."""
    of_type(listed(content)[0], str)
    return content


def _fields(content: Any) -> list[Any]:
    """Names and values."""
    for name, _ in pairs(content):
        of_type(name, str)
    return content


def _made(cls: Any, kind: str, content: Any) -> Any:
    if kind == FLAG:
        return cls(of_type(content, int))  # looks it up, or combines members; both are code of `enum`
    if kind == ENUM:
        name = _named(content)[0]
        member = cls.__members__.get(name)
        if member is None:
            raise UnsupportedValue(f"{cls.__qualname__} has no member {name!r} here: another version of it?")
        return member
    if kind == NAMEDTUPLE:
        if len(listed(content)) != len(cls._fields):
            raise UnsupportedValue(f"{cls.__qualname__} has other fields here than where it was put")
        return tuple.__new__(cls, content)
    value = object.__new__(cls)
    held = getattr(value, "__dict__", None)
    for name, item in _fields(content):
        if isinstance(inspect.getattr_static(cls, name, None), types.MemberDescriptorType):
            object.__setattr__(value, name, item)  # a slot
        elif held is not None:
            held[name] = item  # past a frozen class, and past properties of that name
        else:
            raise UnsupportedValue(f"{cls.__qualname__} has no field {name!r} here: another version of it?")
    return value


def _plain(kind: str, content: Any) -> Any:
    if kind == FLAG:
        return of_type(content, int)
    if kind == ENUM:
        return _named(content)[-1]
    return tuple(listed(content)) if kind == NAMEDTUPLE else dict(_fields(content))
