"""Every odd input comes back exactly, type and value, or is refused before anything is stored (reference/traps.md)."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import threading
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import until
from PIL import Image
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.client.effects import Call
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import BatchMismatch, DeadlineExceeded, InvalidInput, UnsupportedValue
from transfer_queue.wire import messages as m


@pytest.fixture
def part(request: pytest.FixtureRequest, shared: tq.TransferQueueClient) -> Iterator[str]:
    yield "odd"
    shared.clear_partition("odd")


IN_ITSELF: dict[str, Any] = {}
IN_ITSELF["a"] = IN_ITSELF


@dataclasses.dataclass
class Point:
    x: int


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: str


TENSORS: dict[str, torch.Tensor] = {
    "0-dim": torch.tensor(2.5),
    "1-D": torch.arange(3),
    "2-D": torch.arange(6.0).view(2, 3),
    "no elements": torch.zeros(0),
    "(2, 0)": torch.zeros(2, 0),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.tensor([1.0]).expand(4),
    "4-D image": torch.arange(24.0).view(1, 2, 3, 4),
    "strided slice": torch.arange(10)[::3],
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "float16": torch.tensor([1.5], dtype=torch.float16),
    "float8_e4m3fn": torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn),
    "complex64": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "bool": torch.tensor([True, False]),
    "uint8": torch.tensor([255], dtype=torch.uint8),
    "uint16": torch.tensor([65535], dtype=torch.uint16),
    "nan and inf": torch.tensor([float("inf"), -0.0]),
}


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.resolve_conj().contiguous()
    data = plain.reshape(-1).view(torch.uint8).tolist() if plain.numel() else []
    return tensor.dtype, tuple(tensor.shape), data


@pytest.mark.parametrize("name", TENSORS)
def test_tensor(part: str, name: str) -> None:
    tq.kv_put("a", part, {"x": TENSORS[name]})
    got = tq.kv_batch_get("a", part)["x"]
    assert bits(got.unbind()[0]) == bits(TENSORS[name])


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_inside_a_value(part: str, name: str) -> None:
    tq.kv_put("a", part, {"x": {"t": [TENSORS[name]]}})
    assert bits(tq.kv_batch_get("a", part)["x"][0]["t"][0]) == bits(TENSORS[name])


@pytest.mark.parametrize("value", [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 2])
def test_tensor_with_a_graph_comes_back_without(part: str, value: torch.Tensor) -> None:
    tq.kv_put("a", part, {"x": value})
    got = tq.kv_batch_get("a", part)["x"].unbind()[0]
    assert got.tolist() == value.tolist()
    assert not got.requires_grad


EXACT: dict[str, Any] = {
    "str": "text",
    "empty str": "",
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "None": None,
    "int": 7,
    "bool": True,
    "huge int": 1 << 200,
    "negative huge int": -(1 << 80),
    "uint64": (1 << 64) - 1,
    "float": 0.1,
    "complex": 1 + 2j,
    "list": [1, "a", None, [2.5]],
    "dict": {"a": 1, "b": {"c": [1]}},
    "dict with int keys": {1: "a", None: "b"},
    "dict with tuple keys": {(1, 2): "a"},
    "tuple": (1, (2, 3), [4]),
    "set": {1, 2},
    "frozenset": frozenset(["a"]),
    "torch.Size": torch.Size([1, 2]),
    "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
    "date": datetime.date(2024, 2, 29),
    "time": datetime.time(1, 2, 3),
    "timedelta": datetime.timedelta(days=-1, microseconds=5),
    "Decimal": decimal.Decimal("1.10"),
    "UUID": uuid.UUID(int=5),
    "Fraction": fractions.Fraction(1, 3),
    "OrderedDict": collections.OrderedDict([("b", 1), ("a", 2)]),
    "deque": collections.deque([1, 2], maxlen=5),
    "range": range(1, 9, 2),
    "torch dtype": torch.bfloat16,
    "np.int64": np.int64(5),
    "np.float32": np.float32(0.1),
    "lone surrogate": "\ud800",
    "key of a marker": {"__tq_tensordict__": 1},
    "long str": "x" * 3_000_000,
}


@pytest.mark.parametrize("name", EXACT)
def test_value_comes_back_exactly(part: str, name: str) -> None:
    value = EXACT[name]
    tq.kv_put("a", part, {"x": (value,), "n": {"v": value}})
    tq.kv_batch_put(["b", "c"], part, {"m": [{"v": value}, (value, "other")]})
    got = tq.kv_batch_get("a", part)
    assert_same(next(iter(got["x"])), (value,))
    assert_same(next(iter(got["n"])), {"v": value})
    first, second = list(tq.kv_batch_get(["b", "c"], part)["m"])
    assert_same(first, {"v": value})
    assert_same(second, (value, "other"))


@pytest.mark.parametrize(
    "call",
    [
        lambda part: tq.kv_put("\ud800", part, {"x": torch.ones(2)}),
        lambda part: tq.kv_put("a", part, {"\ud800": 1.0}),
        lambda part: tq.kv_put("a", f"{part}\ud800", {"x": 1.0}),
        lambda part: tq.kv_put("a", part, {"x": 1.0}, {"\ud800": 1}),
        lambda part: tq.kv_put("a", part, {"x": torch.ones(1 << 18)}, {"note": "\ud800"}),
        lambda part: tq.get_client().get_meta(["\ud800"], 1, part, task_name="t", timeout_s=0),
        lambda part: tq.group_pool(part, tq.GroupPolicy()).open("\ud800", 1),
    ],
)  # fmt: skip
def test_a_name_that_utf_8_does_not_have_is_refused_and_nothing_is_stored(part: str, call: Any) -> None:
    with pytest.raises(InvalidInput, match="lone surrogate"):
        call(part)
    assert part not in tq.kv_list(part)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("wrap", [list, tuple, lambda inner: {"b": inner[0]}])
def test_a_tag_that_is_nested_too_deep_is_refused_by_name(part: str, wrap: Any) -> None:
    tq.kv_put("a", part, tag={"deep": wrap([nested(63)])})
    assert tq.kv_list(part)[part]["a"] == {"deep": wrap([nested(63)])}
    with pytest.raises(InvalidInput, match=r"name 'deep': .*64 deep"):
        tq.kv_batch_put(["b", "c"], part, {"x": torch.ones(2, 1)}, [{}, {"deep": wrap([nested(64)])}])
    assert list(tq.kv_list(part)[part]) == ["a"]


def further_down(depth: int, call: Any) -> Any:
    return further_down(depth - 1, call) if depth else call()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: frozenset([one]), lambda one: collections.deque([one]), lambda one: collections.OrderedDict(a=one),
        lambda one: {1: one}, lambda one: Pair(one, "b"), Point,
    ],
)  # fmt: skip
def test_all_that_is_nested_in_a_tag_counts_and_is_read_further_down_in_a_stack(part: str, wrap: Any) -> None:
    value: Any = 1
    for _ in range(64):
        value = wrap(value)
    tq.kv_put("a", part, tag={"deep": value})
    told = further_down(300, lambda: dict(tq.kv_list(part)[part]["a"]))
    assert told == {"deep": value} or type(value) is Point, "a class of this file may come back described"
    with pytest.raises(InvalidInput, match=r"name 'deep': .*64 deep"):
        tq.kv_put("b", part, tag={"deep": wrap(value)})


def test_a_tag_that_holds_itself_is_refused(part: str) -> None:
    itself: list[Any] = []
    itself.append(itself)
    doubled: list[Any] = [1]
    for _ in range(64):
        doubled = [doubled, doubled]
    for value in (itself, doubled):
        with pytest.raises(InvalidInput, match="64 deep"):
            tq.kv_put("a", part, tag={"deep": value})


@pytest.mark.parametrize("depth", [65, 900])
def test_a_request_that_is_nested_too_deep_is_refused_by_the_server_and_the_connection_stays(
    shared: tq.TransferQueueClient, part: str, depth: int
) -> None:
    session, tag = shared.session, {"deep": nested(depth)}
    for request in (
        m.Commit(session.next_rid(), part, 1, ["a"], None, [], -1, b"", [tag], 0.0),
        m.OpenGroup(session.next_rid(), part, "g", 1, 1, "", tag, None, None, False),
    ):
        with pytest.raises(InvalidInput, match=f"{type(request).__name__}.*64 deep"):
            session.call(Call(request))
    assert part not in tq.kv_list(part)


BAD_S, HUGE = (float("nan"), "1", True), 1 << 70


def locked(lock: Any, **terms: Any) -> None:
    with lock("a", "odd", **terms):
        pass


@pytest.mark.parametrize(
    "call",
    [
        *(lambda client, bad=bad: client.get_meta(["x"], 1, "odd", task_name="t", timeout_s=bad) for bad in BAD_S),
        *(lambda client, bad=bad: tq.kv_watch("odd", tq.kv_watch("odd"), timeout_s=bad) for bad in BAD_S),
        *(lambda client, bad=bad: locked(tq.kv_global_lock, timeout=bad) for bad in BAD_S),
        *(lambda client, bad=bad: locked(tq.kv_local_lock, timeout=bad) for bad in BAD_S),
        lambda client: locked(tq.kv_global_lock, lease_s="3"),
        lambda client: client.get_meta(["x"], HUGE, "odd", task_name="t", timeout_s=0),
        lambda client: asyncio.run(client.async_get_meta(["x"], HUGE, "odd", task_name="t", timeout_s=0)),
        lambda client: client.admit("t", HUGE, max_staleness=1, rows_per_version=4, timeout_s=0),
        lambda client: tq.set_weight_version(HUGE),
        lambda client: client.kv_retrieve_keys([HUGE], "odd"),
        lambda client: client.allocate({"x": ((True,), torch.int64)}),
        lambda client: client.allocate({"x": ((2.5,), torch.int64)}),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_meant_is_refused(shared: tq.TransferQueueClient, call: Any) -> None:
    with pytest.raises(InvalidInput):
        call(shared)
    assert shared.stats()["rows"] == 0


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, 10**400], ids=["inf", "1e300", "10**400"])
def test_a_time_out_without_end_waits_as_long_as_it_takes(
    shared: tq.TransferQueueClient, part: str, timeout_s: float
) -> None:
    found: list[int] = []

    def wait() -> None:
        found.append(shared.get_meta(["x"], 1, part, task_name="t", timeout_s=timeout_s).size)
        asyncio.run(later())

    async def later() -> None:
        asked = shared.async_get_meta(["x"], 1, part, task_name="u", timeout_s=timeout_s)
        found.append((await asked).size)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: shared.stats()["waiting_requests"] == 1, "a parked request")
    tq.kv_put("a", part, {"x": 1.0})
    waiting.join(30)
    assert found == [1, 1]


@pytest.mark.parametrize("timeout_s", [-1, -1e9, float("-inf")])
def test_a_time_out_below_zero_is_none_at_all(shared: tq.TransferQueueClient, part: str, timeout_s: float) -> None:
    with pytest.raises(DeadlineExceeded, match="within 0 s"):
        shared.get_meta(["x"], 1, part, task_name="t", timeout_s=timeout_s)


def test_a_call_that_cannot_be_sent_leaves_the_event_loop_as_it_was(part: str) -> None:
    async def calls() -> None:
        with pytest.raises(InvalidInput, match="lone surrogate"):
            await tq.async_kv_put("\ud800", part, {"x": torch.ones(2)})
        await tq.async_kv_put("a", part, {"x": torch.ones(2)})

    asyncio.run(calls())
    assert list(tq.kv_list(part)[part]) == ["a"]


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    assert got == expected
    if isinstance(expected, (list, tuple)):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.array(["a", None, {"k": 1}], dtype=object),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.array([(1, 2.0)], dtype=[("i", "i4"), ("f", "f8")]),
        np.array([b"ab"], dtype="S2"),
        np.zeros((0, 2)),
        np.array(5),
        np.array([1, 2], dtype=">i4"),
    ],
)
def test_array(part: str, array: np.ndarray[Any, Any]) -> None:
    tq.kv_put("a", part, {"x": (array,)})
    (got,) = next(iter(tq.kv_batch_get("a", part)["x"]))
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tolist() == array.tolist()


REFUSED: dict[str, Any] = {
    "defaultdict": collections.defaultdict(lambda: 0),
    "lambda": lambda: 0,
    "generator": (i for i in ()),
    "lock": threading.Lock(),
    "object": object(),
    "type": int,
    "sparse tensor": torch.eye(2).to_sparse(),
    "meta tensor": torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_value_that_cannot_be_kept_is_refused_by_name(part: str, name: str) -> None:
    with pytest.raises(UnsupportedValue, match="strange"):
        tq.kv_put("a", part, {"fine": 1, "strange": REFUSED[name]})
    with pytest.raises(UnsupportedValue, match="strange"):
        tq.kv_batch_put(["a", "b"], part, {"fine": [1, 2], "strange": ["ok", {"deep": [REFUSED[name]]}]})
    assert tq.kv_list(part) == {}


@pytest.mark.parametrize("key", ["", "k" * 1_000_000, "\u00e4\u4e2d\U0001f600", "a/b\x00c"])
def test_key_and_field_name(part: str, key: str) -> None:
    tq.kv_put(key, part, {"x": torch.tensor(1)})
    assert list(tq.kv_list(part)[part]) == [key]
    assert tq.kv_batch_get(key, part)["x"].tolist() == [1]
    tq.kv_clear(key, part)
    assert tq.kv_list(part) == {}


def test_empty_field_name(part: str) -> None:
    tq.kv_put("a", part, {"": torch.tensor(1)})
    assert tq.kv_batch_get("a", part)[""].tolist() == [1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_images_that_differ_in_height_and_width(part: str) -> None:
    images = [torch.full((3, 2, 5), 1.0), torch.full((3, 4, 1), 2.0)]
    tq.kv_batch_put(["a", "b"], part, {"x": images})
    got = tq.kv_batch_get(["a", "b"], part)["x"]
    assert got.layout == torch.strided
    assert [bits(row) for row in got.unbind()] == [bits(image) for image in images]


def test_rows_of_different_rank_come_back_as_a_stack(part: str) -> None:
    rows = [torch.ones(2), torch.ones(2, 2)]
    tq.kv_batch_put(["a", "b"], part, {"x": rows})
    assert [bits(row) for row in tq.kv_batch_get(["a", "b"], part)["x"]] == [bits(row) for row in rows]


def test_tensors_and_strings_in_one_column_come_back_as_they_are(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, {"x": [torch.ones(2), "s"]})
    first, second = tq.kv_batch_get(["a", "b"], part)["x"]
    assert (bits(first), second) == (bits(torch.ones(2)), "s")


def test_multimodal_values_keep_their_tensors(part: str) -> None:
    value = {"pixel_values": torch.randn(3, 4), "grid": (1, 2), "parts": [{"t": torch.arange(3)}]}
    tq.kv_put("a", part, {"mm": value})
    got = next(iter(tq.kv_batch_get("a", part)["mm"]))
    assert bits(got["pixel_values"]) == bits(value["pixel_values"])  # type: ignore[arg-type]
    assert got["grid"] == (1, 2)
    assert got["parts"][0]["t"].tolist() == [0, 1, 2]


def test_nested_tensordict_field(part: str) -> None:
    inner = TensorDict({"t": torch.arange(4).view(2, 2), "s": ["a", "b"]}, batch_size=[2])
    tq.kv_batch_put(["a", "b"], part, TensorDict({"in": inner, "x": torch.zeros(2)}, batch_size=[2]))
    got = tq.kv_batch_get(["b", "a"], part)["in"]
    assert got["t"].tolist() == [[2, 3], [0, 1]]
    assert list(got["s"]) == ["b", "a"]


def test_broadcast_string_is_one_value_per_row(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, TensorDict({"s": "shared", "x": torch.zeros(2)}, batch_size=[2]))
    assert list(tq.kv_batch_get(["a", "b"], part)["s"]) == ["shared", "shared"]


def test_a_batch_of_two_dimensions_is_rows_of_the_first(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, TensorDict({"x": torch.arange(6).view(2, 3)}, batch_size=[2, 3]))
    assert [row.tolist() for row in tq.kv_batch_get(["a", "b"], part)["x"].unbind()] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2)], ids=["numpy", "torch"])
def test_integers_of_other_libraries_are_integers(shared: tq.TransferQueueClient, part: str, number: Any) -> None:
    shared.put({"x": torch.zeros(4)}, partition_id=part)
    assert len(shared.take(part, ["x"], number, "taken")[0]) == 2
    assert len(shared.get_meta(["x"], number, part, task_name="fetched")) == 2
    assert len(shared.get_meta(["x"], number, part, mode="insert")) == 2
    shared.set_partition(part, size=number)
    partition = shared.get_partition(part)
    assert partition is not None
    assert partition["size"] == 2
    before = shared.set_weight_version(number, "numbers")
    assert shared.set_weight_version(2, "numbers") == before


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_floats_of_other_libraries_are_floats(shared: tq.TransferQueueClient, part: str, kind: Any) -> None:
    shared.put({"x": torch.zeros(2)}, partition_id=part)
    meta = shared.get_meta(["x"], 1, part, task_name="t", lease_s=kind(9), timeout_s=kind(9))
    assert shared.renew(meta, kind(9)) == 1
    assert len(list(tq.stream(part, ["x"], task="u", batch_size=np.int64(2), lease_s=kind(9)))) == 1


def test_what_is_no_integer_is_refused_by_its_type(shared: tq.TransferQueueClient, part: str) -> None:
    with pytest.raises(InvalidInput, match="batch_size must be an int, got <object"):
        shared.take(part, ["x"], object(), "t")  # type: ignore[call-overload,arg-type]
    with pytest.raises(InvalidInput, match=r"SetPartition: size: Expected `int \| null`, got `float`"):
        shared.set_partition(part, size=np.float32(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "call"),
    [
        ("partition_id: Expected `str`, got `int`", lambda client: client.clear_partition(5)),
        (
            r"data_fields\[1\] is a string, got 1",
            lambda client: client.get_meta(["x", 1], 1, "p", task_name="t"),
        ),
        ("batch_size must be an int, got '1'", lambda client: client.take("p", ["x"], "1", "t")),
        ("lease_s: expected a number of seconds, got 'x'", lambda client: client.take("p", ["x"], 1, "t", lease_s="x")),
        ("metadata is a BatchMeta, got int", lambda client: client.get_data(5)),
        ("metadata is a BatchMeta, got int", lambda client: client.clear_samples(5)),
        ("metadata is a BatchMeta, got int", lambda client: client.set_custom_meta(5)),
        ("metadata is a BatchMeta, got int", lambda client: client.put({"x": [1]}, metadata=5)),
        ("metadata is a BatchMeta, got str", lambda client: client.ack("5")),
        ("data_fields is a list of names, got 5", lambda client: client.check_production_status(5, "p")),
        ("slices is a dict", lambda client: client.take("p", ["x"], 1, "t", slices=True)),
        ("slices has .'x', 5", lambda _: tq.kv_batch_get("k", "p", "y", slices={"x": Slice(0, 1), 5: Slice(0, 1)})),
        ("sampling_config: lists and dicts", lambda client: client.take("p", ["x"], 1, "t", sampling_config=IN_ITSELF)),
        ("sizes is a dict", lambda client: client.set_partition("p", sizes="x")),
        ("meta is a KVBatchMeta, got NoneType", lambda _: tq.kv_batch_get_by_meta(None)),  # type: ignore[arg-type]
        ("since is what an earlier kv_watch", lambda _: tq.kv_watch("p", True)),  # type: ignore[arg-type]
        ("device 9223372036854775808", lambda _: tq.kv_batch_get("k", "p", device=2**63)),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_a_wrong_type_is_named(shared: tq.TransferQueueClient, told: str, call: Any) -> None:
    with pytest.raises(InvalidInput, match=told):
        call(shared)


@pytest.mark.parametrize(
    ("told", "call"),
    [
        ("sampling_config is a dict", lambda client: client.take("p", ["x"], 1, "t", sampling_config=5)),
        ("data_parser is a function", lambda _: tq.kv_put("k", "p", {"x": 1}, data_parser=5)),  # type: ignore[arg-type]
        ("tags is a list of dicts", lambda _: tq.kv_batch_put(["k"], "p", tags=5)),  # type: ignore[arg-type]
        ("select_fields is a name or", lambda _: tq.kv_batch_get("k", "p", 5)),  # type: ignore[arg-type]
        ("select_fields is a name or", lambda _: tq.kv_batch_get("k", "p", [[]])),  # type: ignore[list-item]
    ],
)
def test_what_stands_where_something_else_is_expected_is_named(
    shared: tq.TransferQueueClient, told: str, call: Any
) -> None:
    with pytest.raises(UnsupportedValue, match=told):
        call(shared)


def test_a_place_to_fill_that_is_no_tensor_is_refused(shared: tq.TransferQueueClient, part: str) -> None:
    metadata = shared.put({"x": torch.ones(2, 2)}, partition_id=part)
    with pytest.raises(InvalidInput, match="is a dict, expected a tensor"):
        shared.get_data(metadata, out={"x": {}})  # type: ignore[dict-item]


def test_a_wrong_key_is_shown(shared: tq.TransferQueueClient) -> None:
    with pytest.raises(UnsupportedValue, match="got 5 among them"):
        tq.kv_batch_get(["a", 5], "p")  # type: ignore[list-item]


def test_an_argument_of_a_wrong_type_ends_no_connection(
    shared: tq.TransferQueueClient, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def calls() -> TensorDict:
        waiting = asyncio.ensure_future(shared.async_take(part, ["x"], 1, "t"))
        while not shared.stats()["waiting_requests"]:
            await asyncio.sleep(0.001)
        with pytest.raises(InvalidInput, match="task_name"):
            await shared.async_take(part, ["x"], 1, 5)  # type: ignore[call-overload,arg-type]
        assert shared.stats()["waiting_requests"] == 1
        await shared.async_put({"x": torch.ones(1, 2)}, partition_id=part)
        return (await waiting)[1]

    assert asyncio.run(calls())["x"][0].tolist() == [1, 1]
    assert "closed a connection" not in capfd.readouterr().err


def test_allocate_takes_dtypes_by_name(shared: tq.TransferQueueClient) -> None:
    room = shared.allocate({"a": ((2, 3), "float32"), "b": ((2,), "torch.bfloat16")})
    assert [room[name].dtype for name in ("a", "b")] == [torch.float32, torch.bfloat16]
    for wrong in ("flot", np.float32, None):
        with pytest.raises(InvalidInput, match="expected a dtype of torch"):
            shared.allocate({"a": ((2, 3), wrong)})  # type: ignore[dict-item]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_data_parser_may_see_strided_nested_columns(part: str) -> None:
    images = torch.nested.nested_tensor([torch.zeros(2, 3), torch.ones(4, 5)])
    tq.kv_batch_put(["a", "b"], part, TensorDict({"x": images}, [2]), data_parser=lambda columns: columns)
    assert [row.shape for row in tq.kv_batch_get(["a", "b"], part)["x"].unbind()] == [(2, 3), (4, 5)]
    with pytest.raises(BatchMismatch):
        tq.kv_batch_put(["a", "b"], part, TensorDict({"x": images}, [2]), data_parser=lambda columns: {"x": 3})


def test_arrays_with_negative_strides_are_stored_once_as_they_are(part: str) -> None:
    rows = np.arange(2 * 300 * 300.0).reshape(2, 300, 300)[:, ::-1]
    tq.kv_batch_put(["a", "b"], part, {"x": rows}, dedupe=True)
    tq.kv_put("c", part, {"x": rows[0]}, dedupe=True)
    found = tq.kv_batch_get(["a", "b", "c"], part, dense=True)["x"].numpy()
    assert np.array_equal(found, np.concatenate([rows, rows[:1]]))


def test_a_lazy_stack_of_rows_of_different_shapes_is_refused_with_what_works(part: str) -> None:
    lazy = TensorDict.lazy_stack([TensorDict({"x": torch.ones(n)}, []) for n in (2, 3)])
    with pytest.raises(UnsupportedValue, match=r"field 'x': .* put a mapping of columns, and batch.get\('x', as_list="):
        tq.kv_batch_put(["a", "b"], part, lazy)
    tq.kv_batch_put(["a", "b"], part, {"x": lazy.get("x", as_list=True)})
    assert [len(row) for row in tq.kv_batch_get(["a", "b"], part)["x"].unbind()] == [2, 3]


class Signal:
    """Its constructor looks at what it is made of."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples, self.energy = samples, float(samples.sum())


LOOKED_AT = 1 << 17  # elements: more bytes than are copied one by one


@pytest.mark.parametrize("copy", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize("count", [1, 3])
def test_values_that_are_looked_at_while_they_are_made_are_whole(part: str, copy: bool, count: int) -> None:
    """Large bytes are copied together at the end of a read; until then the memory for them holds anything."""
    tq.register_type(Signal, to_plain=lambda one: one.samples, from_plain=Signal)
    pixels = np.random.default_rng(0).integers(0, 255, (count, 512, 512, 3), dtype=np.uint8)
    marks = torch.arange(0, 2 * LOOKED_AT + 1, 2)
    for number in range(count):
        value = {
            "image": Image.fromarray(pixels[number]),
            "jagged": torch.nested.nested_tensor_from_jagged(torch.arange(2.0 * LOOKED_AT) + number, marks),
            "signal": Signal(torch.full((LOOKED_AT,), float(number))),
        }
        tq.kv_put(str(number), part, {"x": value})
    found = tq.kv_batch_get([str(number) for number in range(count)], part, copy=copy)["x"]
    for number, one in enumerate(found[row] for row in range(count)):
        assert np.array_equal(np.asarray(one["image"]), pixels[number])
        assert torch.equal(one["jagged"].offsets(), marks)
        assert torch.equal(one["jagged"].values(), torch.arange(2.0 * LOOKED_AT) + number)
        assert one["signal"].energy == number * LOOKED_AT
