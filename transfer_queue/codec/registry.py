"""Types of the user's own that the object codec carries by two plain functions, or by a name of their own.

A registered type is known on the wire by that name: reading constructs only what this process registered itself.
Enums, dataclasses and named tuples travel without being registered (`codec.classes`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from transfer_queue.errors import InvalidInput


class Registration(NamedTuple):
    name: str
    cls: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]
    standard: bool  # by its fields: those of a subclass may be others


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
    where their class is imported before reading they need not be registered. `name` defaults to module and qualified
    name. Usable as a class decorator. Raises `InvalidInput` for a type without functions, or a name taken by another
    type.
    """
    name = name or f"{cls.__module__}:{cls.__qualname__}"
    standard = to_plain is None or from_plain is None
    if to_plain is None or from_plain is None:
        to_plain, from_plain = _standard(cls)
    held = _BY_NAME.get(name)
    if held is not None and held.cls is not cls and held.cls.__qualname__ != cls.__qualname__:
        raise InvalidInput(f"the name {name!r} is registered for {held.cls}")
    _BY_TYPE[cls] = _BY_NAME[name] = Registration(name, cls, to_plain, from_plain, standard)
    return cls


def _standard(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(cls, enum.Flag):
        return (lambda member: member.value), cls
    if issubclass(cls, enum.Enum):
        return (lambda member: member.name), (lambda name: cls[name])
    if dataclasses.is_dataclass(cls):
        return _fields_of, lambda plain: _from_fields(cls, plain)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return list, (lambda plain: cls(*plain))
    raise InvalidInput(f"{cls} is no enum, dataclass or named tuple: give to_plain and from_plain")


def _fields_of(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _from_fields(cls: type, plain: dict[str, Any]) -> Any:
    """Made by the constructor, then every field set as it was stored: `__post_init__` may compute fields anew."""
    kwargs = {field.name: plain[field.name] for field in dataclasses.fields(cls) if field.init and field.name in plain}
    value = cls(**kwargs)
    for name, content in plain.items():
        object.__setattr__(value, name, content)
    return value


def by_type(cls: type) -> Registration | None:
    """The registration of exactly `cls`."""
    return _BY_TYPE.get(cls)


def by_base(cls: type) -> Registration | None:
    """The registration of the nearest base of `cls` that has functions of its own."""
    for base in cls.__mro__[1:]:
        found = _BY_TYPE.get(base)
        if found is not None and not found.standard:
            return found
    return None


def by_name(name: str) -> Registration | None:
    return _BY_NAME.get(name)
