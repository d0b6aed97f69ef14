"""Enums, dataclasses and named tuples by the name of their class and their fields.

The reader takes a class only where it has imported it already: it looks in `sys.modules` and in the dictionaries of
modules and classes, so that no name in a message imports anything or runs a module's `__getattr__`. It never calls the
class either: fields are set on a bare object. Without the class a value comes back as plain data.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

from transfer_queue.errors import ProtocolError, UnsupportedValue

ENUM, FLAG, DATACLASS, NAMEDTUPLE = "e", "f", "d", "n"
HEAP_TYPE = 1 << 9  # CPython's flag of classes that are written in Python
MAIN = ("__main__", "__mp_main__")  # a script, and the same script in a process that it spawned

log = logging.getLogger("transfer_queue")
_missed: set[str] = set()


def kind_of(cls: type) -> str | None:
    """How values of `cls` travel; None when they have no fields by which they could."""
    if issubclass(cls, enum.Flag):
        return FLAG
    if issubclass(cls, enum.Enum):
        return ENUM
    if issubclass(cls, tuple):
        return NAMEDTUPLE if isinstance(getattr(cls, "_fields", None), tuple) else None
    if dataclasses.is_dataclass(cls) and all(base is object or base.__flags__ & HEAP_TYPE for base in cls.__mro__):
        return DATACLASS  # what a base written in C holds beside the fields, as a dict does, would be lost
    return None


def fields_of(value: Any, kind: str, lower: Callable[[Any], Any]) -> Any:
    """What makes up a value of such a class, lowered. Raises `UnsupportedValue` that names the field."""
    cls = type(value)
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
    names += [name for name in getattr(value, "__dict__", ()) if name not in names]
    return [[name, _lowered(cls, name, getattr(value, name), lower)] for name in names]


def _lowered(cls: type, name: str, value: Any, lower: Callable[[Any], Any]) -> Any:
    try:
        return lower(value)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{cls.__qualname__}.{name}: {error}") from None


def rebuilt(kind: str, place: str, content: Any, known: type | None = None) -> Any:
    """The value of a class "module:qualified name", or of `known` in its place; plain data where this process has not
    imported it."""
    cls = known or _imported(place)
    try:
        if cls is not None and kind_of(cls) == kind:
            return _made(cls, kind, content)
        plain = _plain(kind, content)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ProtocolError(f"a damaged value of {place}: {error}") from None
    if place not in _missed:
        _missed.add(place)
        text = "values of %s come back as plain data: import its module, or register the class, before reading"
        log.warning(text, place.replace(":", "."))
    return plain


def _imported(place: str) -> type | None:
    name, _, path = place.partition(":")
    for module in MAIN if name in MAIN else (name,):
        found: Any = sys.modules.get(module)
        for step in path.split("."):
            found = vars(found).get(step) if found is not None and hasattr(found, "__dict__") else None
        if isinstance(found, type):
            return found
    return None


def _made(cls: Any, kind: str, content: Any) -> Any:
    if kind == FLAG:
        return cls(content)
    if kind == ENUM:
        member = cls.__members__.get(content[0])
        if member is None:
            raise UnsupportedValue(f"{cls.__qualname__} has no member {content[0]!r} here: another version of it?")
        return member
    if kind == NAMEDTUPLE:
        if len(content) != len(cls._fields):
            raise UnsupportedValue(f"{cls.__qualname__} has other fields here than where it was put")
        return tuple.__new__(cls, content)
    value = object.__new__(cls)
    held = getattr(value, "__dict__", None)
    for name, item in content:
        if type(name) is str and isinstance(inspect.getattr_static(cls, name, None), types.MemberDescriptorType):
            object.__setattr__(value, name, item)  # a slot
        elif held is not None:
            held[name] = item  # past a frozen class, and past properties of that name
        else:
            raise UnsupportedValue(f"{cls.__qualname__} has no field {name!r} here: another version of it?")
    return value


def _plain(kind: str, content: Any) -> Any:
    if kind == FLAG:
        return content
    if kind == ENUM:
        return content[1] if len(content) == 2 else content[0]
    if kind == NAMEDTUPLE:
        return tuple(content)
    return {str(name): item for name, item in content}
