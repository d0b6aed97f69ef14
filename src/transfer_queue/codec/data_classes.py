"""Which classes are data and nothing else: what uses a value of one runs no code of the class.

A message can name any class of this process and choose what its values hold. Whoever reads the message then asks for
their truth, hash or text, copies them, or lets go of them, and would run methods of a class that nobody meant to have
there. So a class that only a message names is taken where each special method of it, and of its bases, is one that
Python wrote: `dataclasses`, `collections.namedtuple` and `enum` make theirs, and these touch the fields alone. Methods
and properties that are called by their name are the reader's own business.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import types
import typing
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

HEAP_TYPE = 1 << 9  # CPython's flag of classes that are written in Python
METACLASSES = (type, enum.EnumMeta, abc.ABCMeta)  # none of them lets a class run code where its values are used
# What runs when a class is made, when it is called, or when something is asked of the class.
OF_THE_CLASS = frozenset(("__init__", "__post_init__", "__init_subclass__", "__class_getitem__", "__subclasshook__",
    "__annotate__", "__annotate_func__"))  # fmt: skip
CONSTANTS = frozenset((type(None), bool, int, float, str, bytes, tuple, list, dict, frozenset))  # never called
PLACES = (types.GetSetDescriptorType, types.MemberDescriptorType)  # `__dict__`, `__weakref__` and slots
WRITTEN_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.BuiltinFunctionType)
KEY_METHODS = frozenset(("__hash__", "__eq__"))
# Sunder names by which an enum's own code makes members of a flag that were not there yet.
MAKERS = ("_missing_", "_create_pseudo_member_", "_iter_member_", "_iter_member_by_value_", "_iter_member_by_def_")


def is_class(found: Any) -> bool:
    """Whether it is a class, of a metaclass without code of its own."""
    return type(found) in METACLASSES


@lru_cache(maxsize=1024)
def is_data(cls: type) -> bool:
    """Whether values of `cls`, for which `is_class` is true, run no code of it. Runs none of it either."""
    if issubclass(cls, enum.Enum) and not issubclass(cls, enum.Flag):
        # Its members were there before, and nothing of the message is in them. But they may be keys.
        return all(_has_plain_methods(base, KEY_METHODS) for base in _written_bases(cls))
    return all(
        _is_flag_of_data(base) if type(base) is enum.EnumMeta else _is_plain_base(base) for base in _written_bases(cls)
    )


def _written_bases(cls: type) -> Iterator[type]:
    """The classes of `cls` that are written in Python, and not by Python itself."""
    for base in cls.__mro__:
        if base.__flags__ & HEAP_TYPE and base not in (typing.Generic, abc.ABC) and not _is_of(enum, base):
            yield base


def _is_of(module: types.ModuleType, base: type) -> bool:
    return vars(module).get(base.__name__) is base


def _special(cls: type) -> Iterator[tuple[str, Any]]:
    """The special methods that `cls` itself has."""
    for name, value in vars(cls).items():
        if name[:2] == "__" == name[-2:] and name not in OF_THE_CLASS and type(value) not in CONSTANTS:
            yield name, value


def _is_plain_base(cls: type) -> bool:
    """Of a dataclass, of a named tuple, or of a class beside them."""
    own = vars(cls)
    made = _made_by_dataclass(cls) if "__dataclass_params__" in own else _made_by_namedtuple(own.get("_fields"))
    for name, value in _special(cls):
        if isinstance(value, PLACES) or value is vars(object).get(name) or _is_written_by(dataclasses, value):
            continue
        if name == "__dataclass_params__" or (name == "__new__" and not issubclass(cls, tuple)):
            continue  # a dataclass is made, and copied, without arguments of the message
        if not _are_alike(value, made.get(name)):
            return False
    return True


def _is_flag_of_data(cls: type) -> bool:
    """Of a flag: its values are made when they are read."""
    own = vars(cls)
    if not all(_is_written_by(enum, own[name]) for name in MAKERS if name in own):
        return False
    return _has_plain_methods(cls)


def _has_plain_methods(cls: type, names: frozenset[str] | None = None) -> bool:
    """Whether Python itself wrote its special methods, or those of these names."""
    return all(
        isinstance(value, (*PLACES, *WRITTEN_IN_C)) or _is_written_by(enum, value)
        for name, value in _special(cls)
        if names is None or name in names
    )


def _is_written_by(module: types.ModuleType, value: Any) -> bool:
    """Whether it is a function of that module, which the module gives to classes."""
    found = _unbound(value)
    return type(found) is types.FunctionType and found.__globals__ is vars(module) and "__wrapped__" not in vars(found)


def _unbound(value: Any) -> Any:
    return value.__func__ if type(value) in (classmethod, staticmethod, types.MethodType) else value


def _made_by_dataclass(cls: Any) -> Mapping[str, Any]:
    """What `dataclass` writes into a class with these fields."""
    asked = cls.__dataclass_params__
    fields = [
        (field.name, object, dataclasses.field(repr=field.repr, hash=field.hash, compare=field.compare))
        for field in dataclasses.fields(cls)
    ]
    return vars(
        dataclasses.make_dataclass(
            "Twin",
            fields,
            init=False,
            eq=asked.eq,
            order=asked.order,
            unsafe_hash=asked.unsafe_hash,
            frozen=asked.frozen,
        )
    )


def _made_by_namedtuple(fields: Any) -> Mapping[str, Any]:
    if type(fields) is not tuple:
        return {}
    try:
        return vars(collections.namedtuple("Twin", fields))
    except (TypeError, ValueError):
        return {}  # names that no named tuple can have


def _are_alike(one: Any, other: Any) -> bool:
    """Whether both are functions of the same code. A file name would not tell: that of code in `python -c` is the one
    of code that Python generates."""
    one, other = _unbound(one), _unbound(other)
    if type(one) is not types.FunctionType or type(other) is not types.FunctionType:
        return False
    mine, theirs = one.__code__, other.__code__
    if (mine.co_code, mine.co_names, mine.co_consts) != (theirs.co_code, theirs.co_names, theirs.co_consts):
        return False
    inside, also = vars(one).get("__wrapped__"), vars(other).get("__wrapped__")
    return inside is also is None or _are_alike(inside, also)
