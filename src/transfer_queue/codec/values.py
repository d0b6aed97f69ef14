"""Python values as msgpack with the exact type kept.

msgpack alone turns tuples and sets into lists, enums into their values and datetimes into strings. `lower` rewrites a
value so that everything msgpack would change travels as a typed extension; `lift` is the decoder's hook that undoes
it. Tensors and arrays leave the message: `Buffers` collects them and the message holds their number.

Two kinds of values do not come back as they were: an exception comes back as its text, an array of another library
(DLPack) as a tensor.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import struct
import sys
import traceback
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec

from transfer_queue.codec import classes, configs
from transfer_queue.codec.exact import ints, listed, of_type, pairs
from transfer_queue.codec.layout import DAMAGED
from transfer_queue.codec.registry import by_name, registered
from transfer_queue.errors import ProtocolError, UnsupportedValue

Ext = msgspec.msgpack.Ext
encode = msgspec.msgpack.Encoder().encode

TUPLE, SET, FROZENSET, BIGINT, COMPLEX, DATETIME, DATE, TIME, TIMEDELTA, DECIMAL, UUID, FRACTION, BYTEARRAY = range(
    1, 14
)
DICT, SURROGATE, REGISTERED, PICKLE, RANGE, ORDERED, DEQUE = range(14, 21)
PATH, COUNTER, DEFAULTDICT, CONFIG, CLASS = range(21, 26)
ARRAY_CODES = range(40, 60)  # tensors, arrays and TensorDicts: codec.arrays

_PATHS = (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
_ATOMS = frozenset((str, int, float, bool, type(None), bytes))


class Buffers(Protocol):
    """The array side of a value; implemented by `codec.arrays`, absent for tags."""

    def lower(self, value: Any, lower: Callable[[Any], Any]) -> Any:
        """`value` as an extension, or NotImplemented when it is no array."""

    def exchange(self, value: Any, lower: Callable[[Any], Any]) -> Any:
        """An array of another library as a tensor, likewise."""


def is_plain(value: Any) -> bool:
    """Whether msgpack keeps type and value of everything in `value` (given that integers fit into 64 bits)."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is list:
        return all(type(item) in _ATOMS or is_plain(item) for item in value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or not (type(item) in _ATOMS or is_plain(item)):
                return False
        return True
    return False


def pack(value: Any, buffers: Buffers | None = None, allow_pickle: bool = False) -> bytes:
    """`value` as msgpack bytes, or `UnsupportedValue` naming the type that cannot be kept."""
    try:
        if is_plain(value):
            return encode(value)
    except (OverflowError, UnicodeEncodeError):
        pass  # integers beyond 64 bits and lone surrogates take the typed path
    except RecursionError:
        raise UnsupportedValue("the value is nested too deeply") from None
    except msgspec.EncodeError as error:
        raise _too_long(error) from None
    try:
        return encode(Lowering(buffers, allow_pickle).lower(value))
    except RecursionError:
        raise UnsupportedValue("the value is nested too deeply") from None
    except msgspec.EncodeError as error:
        raise _too_long(error) from None


def _too_long(error: Exception) -> UnsupportedValue:
    """msgpack counts bytes and items in 32 bits."""
    return UnsupportedValue(f"a text, bytes or a list is too long ({error}): put it in parts, or as a tensor")


class Lowering:
    """One value on its way to msgpack."""

    def __init__(self, buffers: Buffers | None, allow_pickle: bool) -> None:
        self.buffers = buffers
        self.allow_pickle = allow_pickle

    def lower(self, value: Any) -> Any:
        kind: Any = type(value)
        rule = _RULES.get(kind)
        if rule is not None:
            return rule(self, value)
        if kind in _ATOMS:
            return value
        registration = registered(kind)
        if registration is not None and registration.to_plain is not None:
            return self.ext(REGISTERED, [registration.name, registration.to_plain(value)])
        if self.buffers is not None:
            found = self.buffers.lower(value, self.lower)
            if found is not NotImplemented:
                return found
        found = self._of_family(value)
        if found is not NotImplemented:
            return found
        if self.allow_pickle and registration is None:
            from transfer_queue.codec import opaque

            return Ext(PICKLE, opaque.dump(value))
        if self.buffers is not None:
            found = self.buffers.exchange(value, self.lower)
            if found is not NotImplemented:
                return found
        fields = classes.kind_of(kind)
        if fields is not None:
            place = f"{kind.__module__}:{kind.__qualname__}" if registration is None else registration.name
            return Ext(CLASS, encode([fields, place, classes.fields_of(value, fields, self.lower)]))
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise UnsupportedValue(f"a value of type {name} cannot be stored with its type kept: {advice(value)}")

    def _of_family(self, value: Any) -> Any:
        """Values that are known by a base class; NotImplemented for others. A user's subclass of a path or a config is
        none of them: its base would come back."""
        if type(value) in _PATHS:
            concrete = isinstance(value, pathlib.Path)
            return self.ext(PATH, [concrete, isinstance(value, pathlib.PureWindowsPath), str(value)])
        if isinstance(value, BaseException):
            return self.lower("".join(traceback.format_exception_only(value)).rstrip())
        omegaconf = sys.modules.get("omegaconf")
        if omegaconf is not None and configs.is_config(omegaconf, value):
            return self.ext(CONFIG, configs.taken_apart(omegaconf, value))
        return NotImplemented

    def ext(self, code: int, content: Any) -> Any:
        return Ext(code, encode(self.lower(content)))

    def _int(self, value: int) -> Any:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return Ext(BIGINT, hex(value).encode())

    def _str(self, value: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:
            return Ext(SURROGATE, value.encode("utf-8", "surrogatepass"))
        return value

    def _list(self, value: list[Any]) -> Any:
        return [self.lower(item) for item in value]

    def _dict(self, value: dict[Any, Any]) -> Any:
        if all(type(key) is str and type(self._str(key)) is str for key in value):
            return {key: self.lower(item) for key, item in value.items()}
        return self.ext(DICT, [[key, item] for key, item in value.items()])

    def _datetime(self, value: datetime.datetime) -> Any:
        if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
            raise UnsupportedValue(f"a datetime with tzinfo {value.tzinfo!r} cannot be stored exactly")
        return self.ext(DATETIME, [value.isoformat(), value.fold, _zone(value.tzinfo)])

    def _time(self, value: datetime.time) -> Any:
        if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
            raise UnsupportedValue(f"a time with tzinfo {value.tzinfo!r} cannot be stored exactly")
        return self.ext(TIME, [value.isoformat(), value.fold, _zone(value.tzinfo)])


def _zone(zone: datetime.tzinfo | None) -> Any:
    if zone is None or zone is datetime.timezone.utc:
        return zone is not None
    name = zone.tzname(None)
    offset = zone.utcoffset(None)
    default = datetime.timezone(offset).tzname(None) if offset is not None else None
    return [offset, None if name == default else name]


FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, bytes, frozenset)}


def _default(low: Lowering, value: defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and FACTORIES.get(name) is not factory:
        raise UnsupportedValue(f"the factory of a defaultdict, {factory!r}, is code: convert it with dict(...)")
    return low.ext(DEFAULTDICT, [name, [[key, item] for key, item in value.items()]])


def advice(value: Any) -> str:
    """What to do with a value that cannot be stored."""
    kind = type(value)
    for base in (dict, list, tuple, set, frozenset, str, bytes, int, float):
        if isinstance(value, base):
            return f"convert it with {base.__name__}(...), or register it with transfer_queue.register_type"
    if classes.is_tensorclass(value):
        return "convert it with .to_tensordict()"
    if hasattr(value, "model_dump"):
        return "convert it with .model_dump(), or register it with transfer_queue.register_type"
    if kind.__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        return "convert it with .item() or .tolist()"
    if callable(value) and hasattr(value, "__qualname__"):
        return "it is code: store its name"
    if hasattr(value, "state_dict"):
        return "store its .state_dict(), or register it with transfer_queue.register_type"
    if hasattr(value, "fileno") or hasattr(value, "acquire"):
        return "it belongs to this process: store what it holds"
    if hasattr(value, "__next__"):
        return "it can be read only once: make a list of it"
    how = "set client.allow_pickle on writer and reader"
    return f"register {kind.__qualname__} with transfer_queue.register_type, or {how}"


_RULES: dict[type, Callable[[Lowering, Any], Any]] = {
    int: Lowering._int,
    str: Lowering._str,
    list: Lowering._list,
    dict: Lowering._dict,
    tuple: lambda low, v: low.ext(TUPLE, list(v)),
    set: lambda low, v: low.ext(SET, list(v)),
    frozenset: lambda low, v: low.ext(FROZENSET, list(v)),
    complex: lambda low, v: Ext(COMPLEX, struct.pack("<dd", v.real, v.imag)),
    datetime.datetime: Lowering._datetime,
    datetime.date: lambda low, v: Ext(DATE, v.isoformat().encode()),
    datetime.time: Lowering._time,
    datetime.timedelta: lambda low, v: Ext(TIMEDELTA, encode([v.days, v.seconds, v.microseconds])),
    decimal.Decimal: lambda low, v: Ext(DECIMAL, str(v).encode()),
    uuid.UUID: lambda low, v: Ext(UUID, v.bytes),
    fractions.Fraction: lambda low, v: low.ext(FRACTION, [v.numerator, v.denominator]),
    bytearray: lambda low, v: Ext(BYTEARRAY, bytes(v)),
    range: lambda low, v: low.ext(RANGE, [v.start, v.stop, v.step]),
    OrderedDict: lambda low, v: low.ext(ORDERED, [[key, item] for key, item in v.items()]),
    deque: lambda low, v: low.ext(DEQUE, [list(v), v.maxlen]),
    defaultdict: _default,
    Counter: lambda low, v: low.ext(COUNTER, [[key, item] for key, item in v.items()]),
}


_SEQUENCES, _MAPPINGS = {list, tuple, set, frozenset, deque}, {dict, OrderedDict, defaultdict, Counter}


def is_too_deep(value: Any, most: int) -> bool:
    """Whether values are nested more than `most` deep in this one, of all types that are taken apart to be stored: each
    takes some of the stack of whoever decodes it."""
    level = _parts_of_each([value])
    for _ in range(most):
        if not level:
            return False
        level = _parts_of_each(chain.from_iterable(level))
    return bool(level)


def _parts_of_each(values: Iterable[Any]) -> list[Iterable[Any]]:
    """Each value once: one may be in many places, or in itself."""
    distinct = {id(one): one for one in values if type(one) not in _ATOMS}
    return [parts for one in distinct.values() if (parts := _parts(one)) is not None]


def _parts(value: Any) -> Iterable[Any] | None:
    """The values that are decoded inside of it, None where it has none."""
    kind: Any = type(value)
    if kind in _SEQUENCES:
        return value
    if kind in _MAPPINGS:
        return chain(value, value.values())
    registration = registered(kind)
    if registration is not None and registration.to_plain is not None:
        return (registration.to_plain(value),)
    fields = classes.kind_of(kind)
    if fields == classes.NAMEDTUPLE:
        return value
    if fields == classes.DATACLASS:
        return [item for _, item in classes.fields_of(value, fields, lambda one: one)]
    return None


ARRAY_HEADER = struct.Struct(">BI")  # msgpack's array 32
FEW, SHORT_NBYTES = 8, 1024  # values fewer, or longer on average, are decoded one by one: joining them is a copy


class Lifting:
    """Decodes what `pack` made. `arrays` rebuilds the extensions of `ARRAY_CODES`."""

    def __init__(self, arrays: Callable[[int, Any], Any] | None = None, allow_pickle: bool = False) -> None:
        self._arrays = arrays
        self._allow_pickle = allow_pickle
        self.unpack: Callable[[Any], Any] = msgspec.msgpack.Decoder(ext_hook=self._lift).decode

    def unpack_all(self, messages: Sequence[memoryview], count: int) -> list[Any] | None:
        """The `count` values whose messages lie in these, one after the other, in one call of the decoder. None where
        that gains nothing, and where some are damaged, or too deep: taken one by one they say which."""
        if count <= FEW or sum(map(len, messages)) > SHORT_NBYTES * count:
            return None
        try:
            found: list[Any] = self.unpack(b"".join((ARRAY_HEADER.pack(0xDD, count), *messages)))
        except DAMAGED:
            return None
        return found

    def _lift(self, code: int, data: memoryview) -> Any:
        if code in ARRAY_CODES:
            if self._arrays is None:
                raise ProtocolError("an array where none may be")
            return self._arrays(code, self.unpack(data))
        if code == REGISTERED:
            return self._registered(self.unpack(data))
        if code == PICKLE:
            return self._pickled(bytes(data))
        if code == CLASS:
            return self._of_class(self.unpack(data))
        rule = _LIFTS.get(code)
        if rule is None:
            raise ProtocolError(f"unknown extension {code}")
        content = data if code in _RAW else self.unpack(data)
        try:
            return rule(content)
        except (ValueError, TypeError, ArithmeticError, LookupError, struct.error) as error:
            raise ProtocolError(f"a damaged value (extension {code}): {error}") from None

    def _registered(self, content: Any) -> Any:
        if type(content) is not list or len(content) != 2 or type(content[0]) is not str:
            raise ProtocolError("a damaged value of a registered type")
        name, plain = content
        registration = by_name(name)
        if registration is None:
            raise UnsupportedValue(f"the sample holds a {name!r}: call transfer_queue.register_type for it here too")
        try:
            return registration.from_plain(plain)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise UnsupportedValue(f"{registration.cls} cannot be rebuilt from {plain!r:.200}: {error}") from error

    def _of_class(self, content: Any) -> Any:
        if type(content) is not list or len(content) != 3 or type(content[1]) is not str:
            raise ProtocolError("a damaged value of a class")
        kind, place, fields = content
        if type(kind) is not str or kind not in (classes.ENUM, classes.FLAG, classes.DATACLASS, classes.NAMEDTUPLE):
            raise ProtocolError(f"a damaged value of {place}")
        registration = by_name(place)
        known = registration.cls if registration is not None and registration.to_plain is None else None
        return classes.rebuilt(kind, place, fields, known)

    def _pickled(self, data: bytes) -> Any:
        if not self._allow_pickle:
            raise UnsupportedValue(
                "the sample holds a pickled value: set client.allow_pickle on this reader to load it"
            )
        from transfer_queue.codec import opaque

        return opaque.load(data)


def _lift_moment(content: Any, cls: Any) -> Any:
    text, fold, zone = listed(content, 3)
    moment = cls.fromisoformat(of_type(text, str)).replace(fold=of_type(fold, int))
    if type(zone) is bool:
        return moment.replace(tzinfo=datetime.timezone.utc) if zone else moment
    offset, name = listed(zone, 2)
    of_type(offset, datetime.timedelta)
    return moment.replace(tzinfo=datetime.timezone(offset) if name is None else datetime.timezone(offset, name))


def _lift_path(content: Any) -> Any:
    concrete, windows, text = listed(content, 3)
    of_type(text, str)
    if of_type(concrete, bool) and of_type(windows, bool) == isinstance(pathlib.PurePath(), pathlib.PureWindowsPath):
        return pathlib.Path(text)
    return pathlib.PureWindowsPath(text) if of_type(windows, bool) else pathlib.PurePosixPath(text)


def _lift_default(content: Any) -> Any:
    name, items = listed(content, 2)
    return defaultdict(None if name is None else FACTORIES[of_type(name, str)], dict(pairs(items)))


def _lift_deque(content: Any) -> Any:
    items, most = listed(content, 2)
    return deque(listed(items), None if most is None else of_type(most, int))


_RAW = frozenset((BIGINT, COMPLEX, DATE, DECIMAL, UUID, BYTEARRAY, SURROGATE))  # their bytes are not msgpack
_LIFTS: dict[int, Callable[[Any], Any]] = {
    TUPLE: lambda content: tuple(listed(content)),
    SET: lambda content: set(listed(content)),
    FROZENSET: lambda content: frozenset(listed(content)),
    BIGINT: lambda data: int(bytes(data).decode(), 16),
    COMPLEX: lambda data: complex(*struct.unpack("<dd", data)),
    DATETIME: lambda content: _lift_moment(content, datetime.datetime),
    DATE: lambda data: datetime.date.fromisoformat(bytes(data).decode()),
    TIME: lambda content: _lift_moment(content, datetime.time),
    TIMEDELTA: lambda content: datetime.timedelta(*ints(content, 3)),
    DECIMAL: lambda data: decimal.Decimal(bytes(data).decode()),
    UUID: lambda data: uuid.UUID(bytes=bytes(data)),
    FRACTION: lambda content: fractions.Fraction(*ints(content, 2)),
    BYTEARRAY: bytearray,
    DICT: lambda content: dict(pairs(content)),
    SURROGATE: lambda data: bytes(data).decode("utf-8", "surrogatepass"),
    RANGE: lambda content: range(*ints(content, 3)),
    ORDERED: lambda content: OrderedDict(pairs(content)),
    DEQUE: _lift_deque,
    PATH: _lift_path,
    COUNTER: lambda content: Counter(dict(pairs(content))),
    DEFAULTDICT: _lift_default,
    CONFIG: configs.put_together,
}
