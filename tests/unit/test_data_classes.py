"""A message runs no code: not of a class that it names, not of one where something else belongs."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import enum
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from blocks import through
from tensordict import TensorDict

from transfer_queue.codec import arrays, classes, registry, values
from transfer_queue.codec.data_classes import is_data
from transfer_queue.codec.registry import register_type
from transfer_queue.codec.values import Ext, Lifting, encode
from transfer_queue.errors import ProtocolError, UnsupportedValue

T = TypeVar("T")
RAN: list[str] = []


def noting(name: str) -> Any:
    def method(*_: Any) -> Any:
        RAN.append(name)
        return 1

    return method


ran = noting("code")
ASKED = [
    "bool", "len", "iter", "call", "str", "format", "index", "repr", "eq", "hash", "getitem", "contains",
    "int", "float", "array", "fspath", "lt", "reversed", "enter", "next", "complex", "buffer", "torch_function",
]  # fmt: skip
Nosy = dataclasses.dataclass(eq=False, repr=False)(
    type(
        "Nosy",
        (),
        {f"__{name}__": noting(name) for name in ASKED}
        | {"__annotations__": {"path": Any}, "__module__": __name__}
        | {name: noting(name) for name in ("items", "keys", "dim", "tolist", "replace", "encode")}
        | {name: property(noting(name)) for name in ("numerator", "shape", "dtype", "is_nested")},
    )
)


@dataclasses.dataclass
class Trap:
    path: Any = None
    __del__ = __getattribute__ = ran


class TrapTuple(collections.namedtuple("TrapTuple", "a b")):
    def __new__(cls, a: Any, b: Any) -> Any:
        RAN.append("code")
        return super().__new__(cls, a, b)


class TrapFlag(enum.Flag):
    A = 1

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        RAN.append("code")
        return super()._missing_(value)


class TrapNames(enum.Enum):
    A = 1
    __hash__ = ran


class Asks(type):
    def __getattribute__(cls, name: str) -> Any:
        RAN.append("code")
        return super().__getattribute__(name)


@dataclasses.dataclass
class TrapMeta(metaclass=Asks):
    x: int = 0


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(classes, "_missed", set())
    monkeypatch.setattr(registry, "_BY_TYPE", dict(registry._BY_TYPE))
    monkeypatch.setattr(registry, "_BY_NAME", dict(registry._BY_NAME))
    RAN.clear()
    yield
    RAN.clear()


def message(kind: str, name: str, content: Any) -> Ext:
    return Ext(values.CLASS, encode([kind, f"{__name__}:{name}", content]))


def read(message: Any) -> Any:
    return Lifting().unpack(encode(message))


TRAPS = [
    ("d", "Trap", [["path", "/chosen"]], {"path": "/chosen"}), ("n", "TrapTuple", [1, 2], (1, 2)),
    ("f", "TrapFlag", 6, 6), ("e", "TrapNames", ["A", 1], 1), ("d", "TrapMeta", [["x", 2]], {"x": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "content", "plain"), TRAPS)
def test_a_class_with_special_methods_comes_as_plain_data(
    kind: str, name: str, content: Any, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    RAN.clear()
    assert read(message(kind, name, content)) == plain
    assert RAN == []
    assert [name in one.message and "register_type" in one.message for one in caplog.records] == [True]


def test_a_registered_class_comes_as_it_is() -> None:
    for cls in (TrapTuple, TrapFlag, TrapNames):
        register_type(cls)
    assert type(read(message("n", "TrapTuple", [1, 2]))) is TrapTuple
    assert read(message("f", "TrapFlag", 1)) is TrapFlag.A
    assert read(message("e", "TrapNames", ["A", 1])) is TrapNames.A


@dataclasses.dataclass(frozen=True, order=True)
class Generated(Generic[T]):
    a: T
    b: int = dataclasses.field(default=1, repr=False, hash=False)


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Slotted(abc.ABC):
    a: int

    def __post_init__(self) -> None:
        RAN.append("code")

    @property
    def twice(self) -> int:
        return 2 * self.a


class Pair(NamedTuple):
    a: int
    b: int = 2


class Wider(Pair):
    def total(self) -> int:
        return self.a + self.b


class Words(str, enum.Enum):
    A = "a"


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Shown(str, enum.Enum):
    A = "a"

    def __str__(self) -> str:
        return self.value


class Made(enum.Enum):
    A = (1, 2)

    def __init__(self, one: int, two: int) -> None:
        self.sum = one + two


@pytest.mark.parametrize(
    "value",
    [Generated(1), Slotted(2), Pair(1), Wider(1, 3), Words.A, Bits.A | Bits.B, Bits(8), Made.A, Shown.A],
    ids=lambda value: type(value).__name__,
)
def test_what_python_wrote_into_a_class_is_no_code_of_its_own(value: Any) -> None:
    RAN.clear()
    found = through([value])[0]
    assert type(found) is type(value)
    assert found == value
    assert RAN == []


def test_a_method_that_only_looks_generated_is_code() -> None:
    """The file name of what Python generates is that of `python -c`."""
    space: dict[str, Any] = {}
    exec("def __eq__(self, other): return True", space)
    assert is_data(dataclasses.make_dataclass("Own", ["a"]))
    assert not is_data(dataclasses.make_dataclass("Own", ["a"], namespace={"__eq__": space["__eq__"]}))
    shown = {"__repr__": lambda self: "shown"}
    assert not is_data(type("Own", (collections.namedtuple("Own", "a"),), shown))


@pytest.mark.parametrize("kind", [importlib.util._LazyModule, type("Own", (types.ModuleType,), {})])
def test_a_module_that_runs_code_when_it_is_looked_at_is_passed_by(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("looked_at")
    module.Pair = Pair  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "looked_at", module)
    named = Ext(values.CLASS, encode(["n", "looked_at:Pair", [1, 2]]))
    assert type(read(named)) is Pair
    module.__class__ = kind
    assert type(read(named)) is tuple
    assert type(module) is kind, "looking at it would have loaded it"


class Claims:
    """An object that says it is a class."""

    @property
    def __class__(self) -> Any:
        return ran() and type


def test_an_object_that_says_it_is_a_class_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Pair", Claims())
    assert read(message("n", "Pair", [1, 2])) == (1, 2)
    assert RAN == []


# ---- where something else belongs ----

PLACES = [code for code in values._LIFTS if code not in values._RAW]
BUFFERS = list(arrays._LIFTS)
KEYED = {"hash", "eq"}  # of what is registered, as a member of a set or a key


def contents() -> Iterator[Any]:
    """A value of the class in every place that a content could have."""
    nosy = message("d", "Nosy", [["path", 1]])
    yield nosy
    for other in ([], 1, "a", False, None, {}):
        for length in (1, 2, 3, 4):
            for place in range(length):
                yield [nosy if at == place else other for at in range(length)]
    yield from ([[nosy, 1]], [[1, nosy]], ["a", [[nosy, 1]]], [[1], [nosy]], [[nosy], []], [[], [[nosy, 1]]])
    yield from (["2020-01-01", 0, nosy], ["2020-01-01", nosy, False], ["2020-01-01", 0, [nosy, None]])
    yield from ([False, {"a": nosy}, None], [False, {}, nosy], [True, [nosy], None], [False, {}, {"flag": nosy}])
    yield from (["float32", [nosy], 0], [["pixels", "L", [nosy, 1], None, []], 0], [[["a", nosy]], b"abcd"])
    yield from ([["pixels", "L", [1, 1], None, [["a", nosy]]], 0], [["file", nosy, 0], 0], [["file", "PNG", nosy], 0])


@pytest.mark.parametrize("code", [*PLACES, *BUFFERS])
def test_a_value_of_a_class_is_not_asked_where_something_else_belongs(code: int) -> None:
    """Also not of a class whose code the reader allows: it has no business there."""
    register_type(Nosy)
    reader = arrays.BufferReader(lambda number: np.zeros(64, np.uint8))
    reader.fetch([0])
    reader.begin_row([0])
    unpack = Lifting(reader.lift).unpack
    for content in contents():
        with contextlib.suppress(ProtocolError, UnsupportedValue):
            unpack(encode(Ext(code, encode(content))))
        assert set(RAN) <= KEYED, f"{RAN} of {content}"


@pytest.mark.parametrize("code", [values.TUPLE, values.SET, values.DEQUE, values.FRACTION])
def test_a_few_bytes_make_no_large_value(code: int) -> None:
    far = Ext(values.RANGE, encode([0, 1 << 40, 1]))
    for content in (far, [far, None], "1e999999999", ["1e999999999", 1], [far, far]):
        try:
            found = read(Ext(code, encode(content)))
        except ProtocolError:
            continue
        assert len(found) <= 2


def test_keys_of_a_tensordict_are_texts() -> None:
    assert through(TensorDict({"a": TensorDict({"b": torch.ones(2)}, [2])}, [2]))["a", "b"].tolist() == [1, 1]
    with pytest.raises(ProtocolError):
        arrays.BufferReader(lambda number: np.zeros(1, np.uint8)).lift(arrays.TENSORDICT, [[], [[1, 2]]])
