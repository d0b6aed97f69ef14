"""Tensor columns: every row comes back with its dtype, shape and bits, however it was put or read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from blocks import assert_rows, block_of, compact, get, put, put_row, rows_of, same, schema_of
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue.codec.assemble import Assembler
from transfer_queue.codec.cells import cell_in, tensor_tag
from transfer_queue.codec.needed import index_ranges, value_ranges
from transfer_queue.codec.plan import plan_batch, plan_empty, plan_row
from transfer_queue.codec.rows import BlockBytes, Copier
from transfer_queue.errors import InvalidInput, ProtocolError, SchemaConflict, UnsupportedValue

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")}, key=str
)


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any dtype, from small bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    return (torch.arange(size, dtype=torch.int64) % 2).to(torch.uint8).view(dtype).view(shape)


def as_bytes(row: torch.Tensor) -> torch.Tensor:
    return row.contiguous().reshape(-1).view(torch.uint8)


def jagged(*rows: torch.Tensor, dim: int = 1) -> torch.Tensor:
    values = torch.cat(rows, dim - 1)
    offsets = torch.tensor([0, *np.cumsum([row.shape[dim - 1] for row in rows])])
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)


def ids(*lengths: int) -> list[torch.Tensor]:
    """2-D position ids (3, L) of each length."""
    return [torch.arange(3 * n).view(3, n) + 100 * n for n in lengths]


def two_blocks(one: Any, other: Any, rows: tuple[int, int]) -> list[Any]:
    return [put({"x": one}, rows[0]), put({"x": other}, rows[1])]


# ---- kinds ----


def test_dense_rows_come_back_as_a_uniform_jagged_tensor() -> None:
    x = torch.randn(5, 7)
    got = get(put({"x": x}, 5), "x")
    assert got.layout == torch.jagged
    assert torch.equal(got.offsets(), torch.arange(6) * 7)
    assert_rows(got, list(x))


def test_rows_without_dimensions_come_back_dense() -> None:
    x = torch.tensor([3, 1, 2])
    assert same(get(put({"x": x}, 3), "x"), x)


def test_one_row_without_dimensions() -> None:
    assert same(get(put_row({"x": torch.tensor(2.5)}), "x"), torch.tensor([2.5]))


@pytest.mark.parametrize("shape", [(4, 0), (4, 2, 0), (4, 0, 3)])
def test_rows_without_elements(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert_rows(get(put({"x": x}, 4), "x"), list(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    x = bits(dtype, 6, 4)
    for column in (x, [x[:2], x[2:5], x[5:]], [x[:2], x[:, :1]]):
        rows = list(x.unbind()) if column is x else list(column)
        block = put({"x": column}, len(rows))
        for pick in (None, [(0, 1, 1), (0, 0, 2)]):
            got = rows_of(get(block, "x", pick))
            want = rows if pick is None else [rows[1], rows[0], rows[1]]
            assert [row.dtype for row in got] == [dtype] * len(want)
            assert [row.shape for row in got] == [row.shape for row in want]
            assert all(torch.equal(as_bytes(a), as_bytes(b.clone(memory_format=torch.contiguous_format)))
                       for a, b in zip(got, map(plain, want), strict=True))  # fmt: skip


def plain(row: torch.Tensor) -> torch.Tensor:
    """Contiguous, as integers where torch cannot copy the dtype."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return row.view(kinds.get(row.element_size(), row.dtype))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(8, 6)[::2],
        torch.randn(6, 4).t(),
        torch.randn(1, 6).expand(4, 6),
        torch.randn(4, 2, 5).transpose(1, 2),
        torch.randn(4, 3, dtype=torch.complex64).conj(),
        torch.randn(4, 3, dtype=torch.complex64).conj().imag,
        torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(4, 3, requires_grad=True),
        torch.nn.Parameter(torch.randn(4, 3)) * 2,
    ],
    ids=["strided", "transposed", "expanded", "inner", "conj", "neg", "channels-last", "leaf", "graph"],
)
def test_a_column_of_any_memory_order(x: torch.Tensor) -> None:
    assert_rows(get(put({"x": x}, 4), "x"), [row.clone() for row in x.detach().resolve_conj().resolve_neg()])


def test_ragged_rows_from_lists_and_from_jagged_tensors() -> None:
    rows = [torch.arange(n) for n in (3, 0, 5)]
    assert_rows(get(put({"x": rows}, 3), "x"), rows)
    assert_rows(get(put({"x": jagged(*rows)}, 3), "x"), rows)


def test_two_dimensional_position_ids_keep_their_ragged_dimension() -> None:
    rows = ids(4, 2, 7)
    for column in (rows, jagged(*rows, dim=2)):
        got = get(put({"x": column}, 3), "x")
        assert got._ragged_idx == 2
        assert_rows(got, rows)


def test_uniform_rows_keep_the_ragged_dimension_of_the_field() -> None:
    block = put({"x": jagged(*ids(4, 4, 7), dim=2)}, 3)
    got = get(block, "x", [(0, 0, 2)])
    assert got._ragged_idx == 2
    assert_rows(got, ids(4, 4))
    other = put({"x": torch.stack(ids(5, 5))}, 2)
    joined = get([block, other], "x", [(1, 0, 2)])
    assert joined._ragged_idx == 2
    assert_rows(joined, ids(5, 5))


def test_a_jagged_tensor_with_holes() -> None:
    holed = torch.nested.narrow(torch.arange(24).view(4, 6), 1, torch.tensor([0, 1, 2, 3]), torch.tensor([2, 5, 1, 3]),
                                layout=torch.jagged)  # fmt: skip
    assert_rows(get(put({"x": holed}, 4), "x"), [row.clone() for row in holed.unbind()])


def test_a_slice_of_a_jagged_tensor_stores_only_its_rows() -> None:
    whole = jagged(*[torch.arange(n) for n in (3, 1000, 2)])
    offsets = whole.offsets()[2:]
    tail = torch.nested.nested_tensor_from_jagged(whole.values(), offsets)
    plan = plan_batch({"x": tail}, 1)
    assert plan.nbytes < 1000
    assert_rows(get(block_of(plan), "x"), [torch.arange(2)])


def test_images_of_different_height_and_width() -> None:
    rows = [torch.randn(3, 4, 5), torch.randn(3, 2, 7), torch.randn(3, 6, 1)]
    got = get(put({"x": rows}, 3), "x")
    assert got.is_nested
    assert got.layout == torch.strided
    assert_rows(got, rows)


def test_images_of_one_size_are_dense() -> None:
    x = torch.randn(4, 3, 8, 8)
    assert_rows(get(put({"x": x}, 4), "x"), list(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_strided_nested_tensor() -> None:
    rows = [torch.randn(2, 3), torch.randn(3, 2)]
    assert_rows(get(put({"x": torch.nested.nested_tensor(rows)}, 2), "x"), rows)


def test_rows_of_different_rank_or_dtype_are_objects() -> None:
    rows = [torch.ones(2), torch.ones(2, 2), torch.tensor(1)]
    got = get(put({"x": rows}, 3), "x")
    assert isinstance(got, NonTensorStack)
    assert_rows(got, rows)


def test_whole_dense_blocks_are_views_where_the_block_allows_it() -> None:
    block = put({"x": torch.zeros(4, 8)}, 4, view=0)
    got = get(block, "x")
    got.values().fill_(1)
    assert bool((block.data.view(np.float32)[:32] == 1).all())


def test_rows_are_copies_where_the_block_does_not_allow_views() -> None:
    block = put({"x": torch.zeros(4, 8), "y": [torch.zeros(2, 3), torch.zeros(3, 2)] * 2}, 4)
    for field in ("x", "y"):
        for row in rows_of(get(block, field)):
            row.fill_(1)
    assert_rows(get(block, "x"), [torch.zeros(8)] * 4)
    assert same(rows_of(get(block, "y"))[0], torch.zeros(2, 3))


# ---- selecting and joining ----


def test_two_blocks_of_equal_layout_do_not_mix() -> None:
    for make in (
        lambda k: torch.full((2, 3), k),
        lambda k: [torch.full((2, 3), k), torch.full((3, 2), k)],
        lambda k: [{"a": torch.full((3,), k)}] * 2,
        lambda k: [torch.full((2,), k), torch.full((3,), k)],
    ):
        blocks = two_blocks(make(1), make(2), (2, 2))
        assert_rows(get(blocks, "x"), [*make(1), *make(2)])


def test_dense_and_ragged_blocks_join() -> None:
    ragged = [torch.arange(n) for n in (2, 5)]
    blocks = two_blocks(torch.zeros(2, 3, dtype=torch.int64), ragged, (2, 2))
    got = get(blocks, "x", [(1, 1, 1), (0, 0, 2), (1, 0, 1)])
    assert_rows(got, [ragged[1], *torch.zeros(2, 3, dtype=torch.int64), ragged[0]])


def test_blocks_ragged_in_different_dimensions_join() -> None:
    one, other = ids(4, 2), [torch.ones(n, 5, dtype=torch.int64) for n in (2, 6)]
    varied = [torch.zeros(1, 2, dtype=torch.int64), torch.zeros(7, 1, dtype=torch.int64)]
    blocks = [*two_blocks(one, other, (2, 2)), put({"x": varied}, 2), put({"x": torch.ones(1, 9, 9).long()}, 1)]
    got = get(blocks, "x", [(2, 1, 1), (0, 0, 2), (1, 1, 1), (3, 0, 1)])
    assert_rows(got, [varied[1], *one, other[1], torch.ones(9, 9).long()])


def test_many_single_rows_of_one_block() -> None:
    x = torch.arange(40).view(20, 2)
    order = [19, 3, 4, 0, 7, 7, 2, 11, 12, 13, 5]
    assert_rows(get(put({"x": x}, 20), "x", [(0, row, 1) for row in order]), [x[row] for row in order])


def test_out_receives_dense_rows() -> None:
    x = torch.randn(4, 3)
    out = torch.empty(3, 3)
    assert get(put({"x": x}, 4), "x", [(0, 3, 1), (0, 0, 2)], out={"x": out}) is out
    assert torch.equal(out, x[[3, 0, 1]])


@pytest.mark.parametrize("out", [torch.empty(4, 2), torch.empty(3, 3), torch.empty(4, 3, dtype=torch.float64)])
def test_out_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(InvalidInput, match="out\\['x'\\]"):
        get(put({"x": torch.ones(4, 3)}, 4), "x", out={"x": out})


def test_compaction_keeps_the_selected_rows() -> None:
    rows = {"a": torch.randn(6, 2), "b": ids(1, 2, 3, 4, 5, 6), "c": [torch.randn(n, 7 - n) for n in range(1, 7)],
            "d": [{"t": torch.full((n,), n)} for n in range(6)], "e": list("abcdef")}  # fmt: skip
    block = compact(put(rows, 6), [1, 4], ["b", "c", "d", "e"])
    assert [c.name for c in block.layout.columns] == ["b", "c", "d", "e"]
    for field in "bcde":
        assert_rows(get(block, field), [rows[field][1], rows[field][4]])  # type: ignore[index]


# ---- nested TensorDicts ----


def test_nested_tensordict_comes_back_with_batch_size_and_keys() -> None:
    inner = TensorDict({"a": torch.randn(3, 2), "b": TensorDict({"c": torch.arange(3)}, [3]), "s": list("xyz")}, [3])
    got = get(put({"x": inner}, 3), "x", [(0, 1, 2)])
    assert type(got) is TensorDict
    assert same(got["a"], inner["a"][1:])
    assert same(got["b", "c"], torch.tensor([1, 2]))
    assert got["s"] == ["y", "z"]


def test_nested_tensordict_of_more_batch_dimensions() -> None:
    strings = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
    inner = TensorDict({"a": torch.randn(2, 2, 3), "s": strings, "n": NonTensorData("z", batch_size=[2, 2])}, [2, 2])
    got = get(put({"x": inner}, 2), "x")
    assert got.batch_size == (2, 2)
    assert same(got["a"], inner["a"])
    assert got.get("s").tolist() == [["a", "b"], ["c", "d"]]
    assert got.get("n").tolist() == [["z", "z"], ["z", "z"]]


def test_nested_tensordicts_of_two_blocks_join_by_key_not_by_order() -> None:
    one = TensorDict({"a": torch.ones(1, 2), "b": torch.zeros(1)}, [1])
    other = TensorDict({"b": torch.ones(1), "a": torch.zeros(1, 2)}, [1])
    got = get(two_blocks(one, other, (1, 1)), "x")
    assert same(got["a"], torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert same(got["b"], torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(
    "other",
    [
        TensorDict({"a": torch.ones(1, 2, dtype=torch.int32)}, [1]),
        TensorDict({"a": torch.ones(1, 2), "b": torch.ones(1)}, [1]),
        TensorDict({"a": ["text"]}, [1]),
        TensorDict({"a": TensorDict({}, [1])}, [1]),
    ],
    ids=["dtype", "keys", "kind", "nesting"],
)
def test_nested_tensordicts_that_differ_are_refused_instead_of_cast_or_cut(other: TensorDict) -> None:
    one = TensorDict({"a": torch.ones(1, 2)}, [1])
    for first, second in ((one, other), (other, one)):
        with pytest.raises(SchemaConflict, match=r"field '[xa]'"):
            get(two_blocks(first, second, (1, 1)), "x")


def test_a_broadcast_string_is_every_row() -> None:
    assert get(put(TensorDict({"x": "shared"}, batch_size=2), 2), "x").tolist() == ["shared", "shared"]


# ---- refusals ----


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.empty(3, 3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3, 3), 1.0, 0, torch.qint8),
        lambda: torch.ones(3, 3).to_mkldnn(),
    ],
    ids=["coo", "csr", "meta", "quantized", "mkldnn"],
)
def test_a_tensor_that_is_not_plain_memory_is_refused_by_name(make: Any) -> None:
    for plan in (
        lambda: plan_batch({"x": make()}, 3),
        lambda: plan_row({"x": make()}),
        lambda: plan_batch({"x": [make()] * 3}, 3),
        lambda: plan_batch({"x": [{"a": make()}]}, 1),
    ):
        with pytest.raises(UnsupportedValue, match=r"field 'x'.*tensor"):
            plan()


@pytest.mark.parametrize(
    "column",
    [torch.ones(3, 2), [1, 2, 3], jagged(torch.ones(2)), np.ones(4), NonTensorStack("a"), ["a"], torch.ones(())],
)
def test_a_column_of_another_length_is_refused(column: Any) -> None:
    with pytest.raises(InvalidInput, match="field 'x'"):
        plan_batch({"ok": torch.ones(2), "x": column}, 2)


@pytest.mark.parametrize("column", ["text", 5, None, {"a": 1}, {1, 2}])
def test_a_column_that_is_no_sequence_is_refused(column: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"field 'x'.*got"):
        plan_batch({"x": column}, 2)


def test_field_names_that_are_not_strings_are_refused() -> None:
    for plan in (plan_row, lambda fields: plan_batch(fields, 1)):
        with pytest.raises(InvalidInput, match="field names"):
            plan({("a", "b"): [1]})


def test_a_nested_tensor_is_no_row() -> None:
    with pytest.raises(InvalidInput, match="field 'x'"):
        plan_row({"x": jagged(torch.ones(2))})


# ---- plans ----


def test_planning_reads_no_data_and_aligns_every_part() -> None:
    plan = plan_batch({"a": torch.ones(3, 5), "b": [[1], [2, 3], []], "c": ["x", b"y", None]}, 3)
    layout = block_of(plan).layout
    assert all(offset % 64 == 0 for column in layout.columns for offset, _ in column.parts)
    assert [field.name for field in plan.schema()] == ["a", "b", "c"]


def test_an_empty_plan_has_a_place_for_every_column() -> None:
    plan = plan_empty({"a": ((4, 2), torch.float32), "b": ((4,), torch.int64)})
    assert [c.parts for c in block_of(plan).layout.columns] == [[(0, 32)], [(64, 32)]]


@pytest.mark.parametrize("specs", [{}, {"a": ()}, {"a": (4, -1)}, {"a": (-4,)}, {"a": (0, 2)}, {"a": (1,), "b": (2,)}])
def test_an_empty_plan_of_impossible_shapes_is_refused(specs: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(InvalidInput):
        plan_empty({name: (shape, torch.float32) for name, shape in specs.items()})


def test_the_schema_of_a_field_widens_over_its_blocks() -> None:
    blocks = two_blocks(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), (2, 2))
    assert schema_of(blocks, "x").shape == (3, -1)
    assert schema_of(blocks, "x").kind == "ragged"


# ---- scattered rows ----


@pytest.mark.parametrize(
    "column",
    [
        torch.arange(24.0).view(12, 2), torch.arange(12), [torch.arange(n) for n in range(12)],
        [torch.ones(n, 3) * n for n in range(12)], [torch.empty(n, 0) for n in range(12)],
        [f"row {n}" for n in range(12)], [{"n": n, "s": np.float32(n)} for n in range(12)],
    ],
    ids=["dense", "scalars", "ragged", "ragged of two dimensions", "ragged of no bytes", "strings", "values"],
)  # fmt: skip
def test_rows_from_anywhere_in_a_block_are_those_that_runs_give(column: Any) -> None:
    block, rows = put({"x": column}, 12), [7, 0, 3, 3, 11, 4, 2, 9, 9, 1]
    schema = schema_of([block], "x")
    found = Assembler(Copier(), False).scattered(schema, block, np.array(rows))
    assert_rows(found, [column[row] for row in rows])
    assert_rows(get(block, "x", [(0, row, 1) for row in rows]), [column[row] for row in rows])


def test_many_blocks_of_a_row_each_give_the_rows_of_a_list() -> None:
    rows = [torch.arange(n % 5) + 100 * n for n in range(40)]
    blocks = [put({"x": [row], "s": [f"row {n}"]}, 1) for n, row in enumerate(rows)]
    assert_rows(get(blocks, "x"), rows)
    assert_rows(get(blocks, "s"), [f"row {n}" for n in range(40)])
    dense = [put({"x": torch.full((1, 3), float(n))}, 1) for n in range(40)]
    assert_rows(get(dense, "x"), [torch.full((3,), float(n)) for n in range(40)])
    mixed = [dense[0], put({"x": [torch.ones(3, dtype=torch.bool)]}, 1), *dense[1:9]]
    with pytest.raises(SchemaConflict):
        get(mixed, "x", schema=dense[0].layout.columns[0].schema())


def test_rows_that_are_not_in_the_block_are_refused() -> None:
    block = put({"x": torch.arange(4)}, 4)
    for rows in ([4], [-1], [0, 9]):
        with pytest.raises(ProtocolError, match="not in their block"):
            Assembler(Copier(), False).scattered(schema_of([block], "x"), block, np.array(rows))


def test_rows_of_several_lengths_and_no_bytes_need_none() -> None:
    rows = [torch.zeros(n, 0) for n in (2, 3, 1)]
    block = put({"x": rows, "other": torch.ones(3, 4)}, 3)
    image = BlockBytes(np.full(len(block.data), 0xCC, np.uint8), block.layout, -1)
    for ranges in (index_ranges(block.layout, {"x"}), value_ranges(image, np.array([0, 2]), {"x"})):
        for first, end in ranges:
            image.data[first:end] = block.data[first:end]
    assert [tuple(row.shape) for row in rows_of(get(image, "x", [(0, 2, 1), (0, 0, 1)]))] == [(1, 0), (2, 0)]
    column = block.layout.column("x")
    assert column is not None
    cell = cell_in(block, column, 1)
    assert cell is not None
    assert (cell.tag, cell.nbytes) == (tensor_tag("float32", (3, 0)), len(cell.tag))
