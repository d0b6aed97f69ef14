"""Arguments as callers give them: what is no flag, name, list or dict is refused before anything is sent.

Each function returns the value, and raises `InvalidInput` that names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from transfer_queue.errors import InvalidInput

T = TypeVar("T")


def flag(value: Any, name: str) -> bool:
    """True, False, 1, 0, or one such value of NumPy or torch, as a bool. Nothing else counts: a text such as "false" is
    true in Python, and of an array nobody knows what it says."""
    if type(value) is bool:
        return value
    one = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(one, int) and one in (0, 1):
        return bool(one)
    raise InvalidInput(f"{name} is True or False, got {value!r:.200}")


def number(value: Any, name: str) -> float:
    """A number of Python's, of NumPy's, or in a tensor without dimensions, as a float."""
    one = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(one, (int, float)):
        raise InvalidInput(f"{name} is a number, got {value!r:.200}")
    return float(one)


def text(value: Any, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise InvalidInput(f"{name} is a string, got {value!r:.200}")
    return value


def instance(value: Any, kind: type[T], name: str) -> T:
    """What has this type."""
    if not isinstance(value, kind):
        raise InvalidInput(f"{name} is a {kind.__name__}, got {value!r:.200}")
    return value


def instances(values: Any, kind: type[T], name: str) -> list[T]:
    """What has this type, as a list."""
    return [instance(one, kind, f"{name}, place {place},") for place, one in enumerate(items(values, name))]


def items(values: Any, name: str) -> list[Any]:
    """What can be gone through, as a list. One text is none of its letters, and a dict none of its keys."""
    if isinstance(values, (str, bytes, Mapping)):
        raise InvalidInput(f"{name} is a list, not one {type(values).__qualname__}: got {values!r:.200}")
    try:
        return list(values)
    except TypeError:  # also that of arrays without dimensions, which look as if they had items
        raise InvalidInput(f"{name} is a list, got {values!r:.200}") from None


def texts(values: Any, name: str) -> list[str]:
    """Strings, as a list."""
    found = items(values, name)
    for one in found:
        if not isinstance(one, str):
            raise InvalidInput(f"{name} is a list of strings, got {one!r:.200} in it")
    return found


def mapping(value: Any, name: str) -> Mapping[Any, Any]:
    """A dict, or what has keys and values as one."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name} is a dict, got {value!r:.200}")
    return value


def mappings(values: Any, name: str) -> list[Mapping[Any, Any]]:
    """Dicts, as a list."""
    return [mapping(one, f"{name}, row {row},") for row, one in enumerate(items(values, name))]
