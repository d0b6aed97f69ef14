"""The contents of messages, by their exact types.

A message can hold a value of any class where a list or a number belongs. So nothing is asked of a content, not even
whether it is true or how long it is, before its exact type is known. All of these raise `TypeError` or `ValueError`,
which whoever decodes turns into `ProtocolError`.
"""

from __future__ import annotations

from typing import Any


def listed(content: Any, count: int | None = None) -> list[Any]:
    """A list of so many values; of any number where none is named."""
    if type(content) is not list or count not in (None, len(content)):
        raise ValueError("not the list that belongs here")
    return content


def of_type(content: Any, *kinds: type) -> Any:
    """A value of exactly one of these types."""
    if type(content) not in kinds:
        raise TypeError(f"a {type(content).__name__} where a {kinds[0].__name__} belongs")
    return content


def ints(content: Any, count: int | None = None) -> list[int]:
    return [of_type(item, int) for item in listed(content, count)]


def pairs(content: Any) -> list[Any]:
    """What a dict is made of."""
    return [listed(pair, 2) for pair in listed(content)]
