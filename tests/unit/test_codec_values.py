"""Python values: exact type and value come back, tensors move as buffers, everything else is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import os
import pathlib
import sys
import threading
import types
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from blocks import assert_rows, block_of, compact, get, put, put_row, rows_of, same, through
from omegaconf import DictConfig
from PIL import Image
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue.codec import classes, registry, values
from transfer_queue.codec.arrays import TENSORDICT, BufferReader
from transfer_queue.codec.plan import plan_batch, plan_row
from transfer_queue.codec.registry import register_type
from transfer_queue.codec.values import Ext, encode
from transfer_queue.errors import InvalidInput, UnsupportedValue


class Point(NamedTuple):
    x: int
    y: Any


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: Any
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", len(self.tokens))


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Opaque({self.value})"


@pytest.fixture
def own_types(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registrations of the test are undone."""
    monkeypatch.setattr(registry, "_BY_TYPE", dict(registry._BY_TYPE))
    monkeypatch.setattr(registry, "_BY_NAME", dict(registry._BY_NAME))
    return


EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
NAMED = datetime.timezone(datetime.timedelta(hours=-3), "south")
PLAIN = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, "", "text",
    "grüße 🙂", "\0", b"", b"\0\xff", [], {}, [1, [2, [3]]], {"a": {"b": [None]}},
    {"__tq_tensordict__": True, "batch_size": [2]}, {"": ""}, {"kind": "ext", "code": 1},
]  # fmt: skip
TYPED = [
    (), (1,), (1, (2, [3, (4,)])), set(), {1, "a"}, frozenset({(1, 2)}), 2**64, -(2**63) - 1, 10**400, 1 + 2j,
    complex(math.nan, -0.0), fractions.Fraction(1, 3), decimal.Decimal("1.10"), decimal.Decimal("NaN"),
    decimal.Decimal("-0E+5"), uuid.UUID(int=5), bytearray(b"ab"), range(3), range(10, 0, -2), "\ud800", "a\udfffb",
    {"\ud800": 1}, {(1, 2): "t", 3: "i", None: 0}, {1: {2: (3,)}}, {b"k": 1}, collections.OrderedDict(b=1, a=2),
    collections.deque([1, (2,)], maxlen=3), collections.deque(),
]  # fmt: skip
TIMES = [
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc),
    datetime.datetime(1, 1, 1, tzinfo=EAST), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=NAMED, fold=1),
    datetime.datetime(2024, 10, 27, 2, fold=1), datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4, EAST, fold=1),
    datetime.time(0), datetime.timedelta(days=-1, seconds=5, microseconds=7), datetime.timedelta.max,
]  # fmt: skip
TORCH = [
    torch.arange(6).view(2, 3), torch.tensor(1.5), torch.empty(0, 3), torch.ones(2, dtype=torch.bfloat16),
    torch.ones(2, 2).to(torch.float8_e4m3fn), torch.tensor([True, False]), torch.randn(3, dtype=torch.complex64),
    torch.tensor([1, 65535], dtype=torch.uint16), torch.randn(4, 4).t()[1:], torch.ones(1).expand(5),
    torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.randn(2,
    dtype=torch.complex64).conj(),
]  # fmt: skip
RECORD = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", "U3"), ("d", [("e", "?")])])
NUMPY = [
    np.arange(6.0).reshape(2, 3), np.array(3), np.zeros((0, 3), np.float16), np.array([1, 2], ">i4"),
    np.zeros(3, RECORD), np.array(["a", "bcd"]), np.array([b"x"]), np.array(["2024-01-01", "NaT"], "M8[ns]"),
    np.array([5], "m8[s]"),
    np.array([1, "a", None, (2,), np.ones(2)], object), np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(9)[::-2], np.broadcast_to(np.array([1.0]), (3,)), np.array([1 + 2j], np.complex64),
    np.array([1], np.longdouble),
    np.float32(1.5), np.float64(1.5), np.int64(3), np.bool_(True), np.str_(""), np.str_("a\0"), np.bytes_(b"a\0"),
    np.datetime64("2024-01-01", "D"), np.timedelta64(5, "ms"), np.zeros(1, RECORD)[0], np.complex64(1j), np.dtype("f4"),
    np.dtype(">i2"), RECORD, np.dtype([("a", "i1"), ("b", "f8")], align=True), np.dtype(object), np.float16("nan"),
]  # fmt: skip


def every_value() -> list[Any]:
    return [*PLAIN, *TYPED, *TIMES, *TORCH, *NUMPY]


# ---- values ----


@pytest.mark.parametrize("value", every_value(), ids=lambda value: f"{type(value).__name__}")
def test_a_value_comes_back_exactly(value: Any) -> None:
    want = value.resolve_conj() if isinstance(value, torch.Tensor) else value
    assert same(through(value), want)
    assert same(through({"key": [value, (value,)]}), {"key": [want, (want,)]})


def test_every_value_in_one_column_whole_by_row_and_joined() -> None:
    values = [v.resolve_conj() if isinstance(v, torch.Tensor) else v for v in every_value()]
    block = put({"x": values}, len(values))
    assert_rows(get(block, "x"), values)
    order = list(reversed(range(len(values))))
    assert_rows(get([block, block], "x", [(row % 2, row, 1) for row in order]), [values[row] for row in order])
    assert_rows(get(compact(block, range(1, len(values), 3)), "x"), values[1::3])


def test_a_bare_value_of_a_row_comes_back_exactly() -> None:
    for value in every_value():
        numbers = type(value) in (bool, int, float) or (type(value) is np.ndarray and value.dtype.kind in "biufc")
        if not isinstance(value, torch.Tensor) and not numbers:
            assert same(rows_of(get(put_row({"x": value}), "x")), [value])


@pytest.mark.parametrize(
    "value", [True, -3, 0.5, [1, 2], [0.5, 1], np.arange(3.0), np.array(2), np.ones((2, 2))], ids=str
)
def test_numbers_of_a_row_make_the_column_that_they_make_in_a_batch(value: Any) -> None:
    column = np.stack([value]) if isinstance(value, np.ndarray) else [value]
    row, batch = put_row({"x": value}), put({"x": column}, 1)
    assert row.layout.columns[0].schema() == batch.layout.columns[0].schema()
    assert same(get(row, "x"), get(batch, "x"))


def test_multimodal_rows_keep_dicts_of_tensors() -> None:
    rows = [
        {"pixel_values": torch.randn(n, 4), "image_grid_thw": torch.tensor([[1, n, 4]]), "text": "a" * n}
        for n in (2, 5)
    ]
    assert_rows(get(put({"x": rows}, 2), "x"), rows)


def test_tensors_in_values_are_views_where_the_block_allows_it() -> None:
    block = put({"x": [{"t": torch.zeros(64)}]}, 1, view=0)
    got = get(block, "x").tolist()[0]["t"]
    assert block.data.ctypes.data <= got.data_ptr() < block.data.ctypes.data + len(block.data)


def test_nested_tensordicts_in_values() -> None:
    inner = TensorDict({"c": torch.arange(2)}, [2])
    stack = NonTensorStack("a", ["b"])
    td = TensorDict({"a": torch.ones(2, 3), "b": inner, "s": stack, "n": NonTensorData("x", batch_size=[2])}, [2])
    got = through({"td": td})["td"]
    assert type(got) is TensorDict
    assert got.batch_size == (2,)
    assert same(got["b", "c"], inner["c"])
    assert got.get("s").tolist() == ["a", ["b"]]
    assert got["n"] == "x"


NO_TENSORS = [5, True, 2.5, [1, 2], [[1], [2, 3]], np.arange(3), {"q": 1}, None, (1, 2), "s"]


@pytest.mark.parametrize("value", NO_TENSORS, ids=str)
def test_what_is_no_tensor_in_a_tensordict_stays_none(value: Any) -> None:
    td = TensorDict({"a": NonTensorData(value, batch_size=[2]), "t": torch.ones(2)}, [2], names=["rows"])
    got = through({"td": td})["td"]
    assert same(got["a"], td["a"])
    assert type(got.get("a")) is type(td.get("a"))
    assert (got.names, got.batch_size) == (["rows"], (2,))


def test_a_stack_of_nothing_comes_back() -> None:
    got = through({"s": NonTensorStack("a")[:0]})["s"]
    assert (type(got), got.batch_size) == (NonTensorStack, (0,))


def test_what_is_too_long_for_msgpack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (bytes(1 << 32), {"deep": (bytes(1 << 32),)}):
        with pytest.raises(UnsupportedValue, match=r"row 0, field 'x': .*too long"):
            put_row({"x": value})
    monkeypatch.setattr("transfer_queue.codec.filling.utf8", lambda text: (0, 1 << 32))
    with pytest.raises(UnsupportedValue, match=r"field 'x': .*4 GiB"):
        put_row({"x": "a" * 1000})


def test_a_tensordict_that_was_stored_before_comes_back() -> None:
    stored = encode([[2], [["a", [1, 2]], ["b", "text"]]])
    reader = BufferReader(lambda number: np.zeros(1, np.uint8))
    got = values.Lifting(reader.lift).unpack(encode(Ext(TENSORDICT, stored)))
    assert (got["a"].tolist(), got["b"], got.batch_size) == ([1, 2], "text", (2,))


def test_a_jagged_tensor_in_a_value() -> None:
    nt = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    assert same(through({"nt": nt})["nt"], nt)


# ---- sharing ----


def test_a_tensor_that_occurs_many_times_is_stored_once() -> None:
    image = torch.randn(64, 64)
    rows = [{"image": image, "n": n} for n in range(16)]
    plan = plan_batch({"x": rows}, 16)
    assert plan.nbytes < image.nbytes + 8192
    assert_rows(get(block_of(plan), "x"), rows)
    assert_rows(get(compact(block_of(plan), [3, 9]), "x"), [rows[3], rows[9]])
    assert len(compact(block_of(plan), [3, 9]).data) < image.nbytes + 4096


@pytest.mark.parametrize("image", [torch.randn(64, 64), np.zeros((64, 64))])
def test_what_was_shared_when_it_was_put_is_shared_when_it_is_read(image: Any) -> None:
    got = get(put({"x": [[image], [image]]}, 2), "x", [(0, 1, 1), (0, 0, 1)]).tolist()
    got[0][0][0, 0] = 7
    assert got[1][0][0, 0] == 7


def test_views_of_one_memory_that_differ_are_stored_apart() -> None:
    base = torch.arange(4.0)
    values = [base, base[:2], base.view(2, 2), base.view(torch.int32), torch.ones(2, dtype=torch.complex64).conj()]
    assert same(through(values), [v.resolve_conj() for v in values])


# ---- registered types ----


@pytest.mark.usefixtures("own_types")
def test_registered_types_come_back_exactly() -> None:
    for cls in (Point, Colour, Level, Rights, Sample):
        register_type(cls)
    register_type(Opaque, to_plain=lambda o: o.value, from_plain=Opaque)
    changed = Sample([1, 2])
    object.__setattr__(changed, "total", 9)
    values = [Point(1, (Colour.RED, torch.ones(2))), Colour.RED, Level.LOW, Rights.READ | Rights.WRITE, Rights(0),
              Sample([1, 2, 3]), changed, Opaque(5), {Colour.RED: Opaque(1)}]  # fmt: skip
    assert same(through(values), values)


def test_unregistered_types_are_refused_with_row_field_and_type() -> None:
    with pytest.raises(UnsupportedValue, match=r"row 1, field 'x': .*Opaque.*register_type"):
        plan_batch({"x": [0, {"deep": [Opaque(1)]}]}, 2)


@pytest.mark.usefixtures("own_types")
def test_a_type_that_only_the_writer_registered_is_named_to_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    register_type(Opaque, to_plain=lambda o: o.value, from_plain=Opaque)
    block = put_row({"x": Opaque(1)})
    monkeypatch.setattr(registry, "_BY_NAME", {})
    with pytest.raises(UnsupportedValue, match="Opaque"):
        get(block, "x")


@pytest.mark.parametrize(
    ("cls", "more"),
    [
        (5, {}), (None, {}), (lambda: 0, {}), (Opaque, {"to_plain": str}), (Opaque, {"from_plain": str}),
        (Opaque, {"to_plain": 5, "from_plain": 6}), (Opaque, {"name": 5, "to_plain": str, "from_plain": str}),
        (Point, {"to_plain": str}),
    ],
)  # fmt: skip
def test_what_is_no_registration_is_refused(cls: Any, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        register_type(cls, **more)


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]  as those of transformers
    loss: float = 0.0


@pytest.mark.usefixtures("own_types")
def test_a_type_whose_fields_are_not_all_of_it_needs_functions() -> None:
    with pytest.raises(InvalidInput, match="to_plain"):
        register_type(Output)
    register_type(Output, to_plain=lambda o: [o.loss, list(o.items())], from_plain=lambda plain: plain)
    assert through(Output(0.5)) == [0.5, []]


@pytest.mark.usefixtures("own_types")
def test_what_was_stored_of_registered_types_by_name_still_comes_back() -> None:
    """As releases before did, also in checkpoints."""
    stored = {Colour: "RED", Rights: 3, Point: [1, 2], Sample: {"tokens": [1, 2], "total": 2}}
    for cls, plain in stored.items():
        register_type(cls)
        name = f"{cls.__module__}:{cls.__qualname__}"
        found = values.Lifting().unpack(values.encode(values.Ext(values.REGISTERED, values.encode([name, plain]))))
        assert type(found) is cls
        assert found == {Colour: Colour.RED, Rights: Rights(3), Point: Point(1, 2), Sample: Sample([1, 2])}[cls]


@pytest.mark.usefixtures("own_types")
def test_functions_of_a_registered_type_count_for_its_subclasses() -> None:
    class Narrower(Opaque):
        pass

    register_type(Opaque, to_plain=lambda o: [type(o).__name__, o.value], from_plain=tuple)
    assert through([Narrower(3), Opaque(1)]) == [("Narrower", 3), ("Opaque", 1)]


class OwnTensor(torch.Tensor):
    pass


class OwnDict(TensorDict):
    pass


class OwnFloat(np.float64):
    pass


class OwnText(np.str_):
    pass


class OwnPath(type(pathlib.Path())):  # type: ignore[misc]
    pass


class OwnConfig(DictConfig):
    pass


class OwnImage(Image.Image):
    pass


OWN = [OwnDict({"a": torch.ones(2)}, [2]), OwnFloat(1.5), OwnText("q"), OwnPath("a"), OwnConfig({"a": 1}), OwnImage()]


@pytest.mark.parametrize("value", OWN, ids=lambda value: type(value).__name__)
def test_a_subclass_is_not_stored_as_its_base(value: Any) -> None:
    with pytest.raises(UnsupportedValue, match=f"{type(value).__name__}.*register_type"):
        put_row({"x": {"deep": value}})


@pytest.mark.usefixtures("own_types")
@pytest.mark.parametrize("value", [*OWN, torch.ones(2).as_subclass(OwnTensor), np.ma.array([1, 2], mask=[0, 1])], ids=
    lambda value: type(value).__name__)  # fmt: skip
def test_functions_of_a_registered_type_count_also_for_tensors_and_arrays(value: Any) -> None:
    register_type(type(value), to_plain=lambda own: type(own).__name__, from_plain=lambda name: ["made", name])
    made = ["made", type(value).__name__]
    assert through({"deep": [value]}) == {"deep": [made]}
    assert rows_of(get(put({"x": [value, value]}, 2), "x")) == [made, made]
    assert rows_of(get(put_row({"x": value}), "x")) == [made]


# ---- types that travel by their fields ----


class Slotted:
    __slots__ = ("x",)
    x: Any


@dataclasses.dataclass
class Widest(Slotted):
    y: int

    @property
    def x2(self) -> int:
        raise AssertionError("reading runs no code of the class")


@dataclasses.dataclass
class Counted:
    n: int
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1
        self.beside = [self.n]


MEMBERS = [
    Point(1, (Colour.RED, torch.ones(2))), Colour.RED, Level.LOW, Rights.READ | Rights.WRITE, Rights(0),
    Sample([1, torch.ones(2)]), Counted(3), Widest(2), {Colour.RED: [Level.LOW]},
]  # fmt: skip


@pytest.mark.parametrize("value", MEMBERS, ids=repr)
def test_enums_dataclasses_and_named_tuples_come_back_as_their_class(value: Any) -> None:
    got = through([value])[0]
    assert same(got, value)
    if dataclasses.is_dataclass(value):
        assert same(vars(got), vars(value))


def test_slots_that_are_no_fields_come_back() -> None:
    value = Widest(2)
    value.x = [0.5]
    got = through([value])[0]
    assert (type(got), got.x, got.y) == (Widest, [0.5], 2)
    assert not hasattr(through([Widest(2)])[0], "x")


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("value", "plain"),
    [(Point(1, 2), (1, 2)), (Colour.RED, 1), (Rights.READ, 1), (Counted(3), {"n": 3, "made": 1, "beside": [3]})],
    ids=repr,
)
def test_without_their_class_they_come_back_as_plain_data_and_a_warning(
    value: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = put({"x": [value, value]}, 2)
    monkeypatch.delattr(sys.modules[__name__], type(value).__name__)
    assert get(block, "x").tolist() == [plain, plain]
    assert [type(value).__name__ in record.message for record in caplog.records] == [True]


@pytest.mark.usefixtures("unwarned")
def test_reading_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = enum.Enum("Unseen", ["A"], module="this_is_not_imported")
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail(f"looked up {name}")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    for module in ("this_is_not_imported", "lazy"):
        unseen.__module__ = module
        assert through([unseen.A]) == [1]
    assert "this_is_not_imported" not in sys.modules


@pytest.mark.usefixtures("unwarned")
def test_a_name_that_means_another_kind_of_thing_here_is_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    block = put({"x": [Point(1, 2)]}, 1)
    for other in (Colour, int, os.system):
        monkeypatch.setattr(sys.modules[__name__], "Point", other)
        assert get(block, "x").tolist() == [(1, 2)]


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No class was missed before."""
    monkeypatch.setattr(classes, "_missed", set())


def test_an_exception_comes_back_as_its_text() -> None:
    assert through([ValueError("bad\nrow"), KeyError("k")]) == ["ValueError: bad\nrow", "KeyError: 'k'"]


PLACES = [pathlib.Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:\\d")]
COUNTS = [
    collections.Counter("abba"), collections.defaultdict(list, a=[1]), collections.defaultdict(None, b=(2,)),
    collections.defaultdict(int, {(1, 2): 3}),
]  # fmt: skip


@pytest.mark.parametrize("value", [*PLACES, *COUNTS], ids=repr)
def test_paths_counters_and_defaultdicts_come_back_exactly(value: Any) -> None:
    got = through([value])[0]
    assert (type(got), got) == (type(value), value)
    assert getattr(got, "default_factory", 0) == getattr(value, "default_factory", 0)


@pytest.mark.usefixtures("own_types")
def test_a_value_the_readers_type_cannot_take_is_refused() -> None:
    register_type(Colour, name="colour", to_plain=lambda c: "BLUE", from_plain=lambda name: Colour[name])
    with pytest.raises(UnsupportedValue, match="BLUE"):
        get(put_row({"x": Colour.RED}), "x")


@pytest.mark.usefixtures("own_types")
def test_a_name_belongs_to_one_type() -> None:
    register_type(Colour, name="thing")
    with pytest.raises(InvalidInput, match="thing"):
        register_type(Level, name="thing")
    with pytest.raises(InvalidInput, match="to_plain"):
        register_type(Opaque)


# ---- refusals ----

FOREIGN = type("Foreign", (), {"__module__": "__main__"})
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
TEXTS = np.dtypes.StringDType() if hasattr(np.dtypes, "StringDType") else None  # since NumPy 2
OWN_ZONE = type("Zone", (datetime.tzinfo,), {"utcoffset": lambda self, moment: None})()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ((i for i in ()), "generator"),
        (threading.Lock(), "lock"),
        (FOREIGN(), "__main__.Foreign"),
        (lambda: 0, "function"),
        (int, "type"),
        (collections.defaultdict(lambda: 0), "defaultdict"),
        (type("S", (str,), {})("a"), "S"),
        (np.ma.array([1, 2], mask=[0, 1]), "MaskedArray"),
        (np.rec.array([(1,)], dtype=[("a", "i4")])[0], "record"),
        (np.zeros(2, [("o", object)]), "object"),
        (np.zeros(2, [("o", object)])[0], "object"),
        (np.zeros(2, "V0"), "V0"),
        *([(np.array(["a"], TEXTS), "astype"), (TEXTS, "StringDType")] if TEXTS else []),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.qint8, "qint8"),
        (CYCLE, "nested too deeply"),
        (datetime.datetime(2024, 1, 1, tzinfo=OWN_ZONE), "tzinfo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_kept_is_refused_with_row_field_and_type(value: Any, named: str) -> None:
    with pytest.raises(UnsupportedValue, match=f"(?s)row 2, field 'bad': .*{named}"):
        plan_batch({"ok": [1, 2, 3], "bad": [None, {}, {"deep": (value,)}]}, 3)
    with pytest.raises(UnsupportedValue, match="field 'bad': "):
        plan_row({"bad": [value]})


@pytest.mark.parametrize("depth", [100, 200, 400, 900])
def test_deep_nesting_is_refused_at_put_or_comes_back(depth: int) -> None:
    for wrap in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {1: inner}):
        value: Any = 0
        for _ in range(depth):
            value = wrap(value)
        try:
            block = put_row({"x": value})
        except UnsupportedValue:
            continue
        assert get(block, "x").tolist()[0] == value


# ---- pickle ----


def test_pickle_needs_the_writers_consent() -> None:
    with pytest.raises(UnsupportedValue, match="allow_pickle"):
        put_row({"x": Opaque(1)})


def test_pickle_needs_the_readers_consent() -> None:
    block = put_row({"x": Opaque(1)}, allow_pickle=True)
    with pytest.raises(UnsupportedValue, match="allow_pickle"):
        get(block, "x")


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 0, (i for i in ())], ids=["lock", "function", "generator"])
def test_what_pickle_cannot_hold_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"row 0, field 'x': .*cannot be pickled"):
        put_row({"x": {"v": value}}, allow_pickle=True)


def test_pickle_keeps_the_value_where_both_consent() -> None:
    assert through([Opaque(1), torch.ones(2)], allow_pickle=True)[0] == Opaque(1)
