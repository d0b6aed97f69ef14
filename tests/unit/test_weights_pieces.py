"""Versions in pieces: plans for shards and wants, packing, sealing, and what receivers make of them."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_weights_boxes import boxes_in, splits
from torch import nn
from weights import in_threads as in_threads
from weights_plans import planned_one_by_one, sealed_one_by_one

from transfer_queue.errors import BadManifest, DigestMismatch, Incomplete, InvalidInput, ProtocolError, ShapeMismatch
from transfer_queue.weights import InPlace, ModuleSource, Receiver, StateDictSource, seal
from transfer_queue.weights.receive.staging import Staging
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.fetching import Source, fetch
from transfer_queue.weights.transport.wants import Specs, WantsReport, WantTables
from transfer_queue.weights.version.boxes import MAX_TAKERS, Box, common, whole, within
from transfer_queue.weights.version.manifest import COLUMNS, FORMAT, PIECES, Manifest
from transfer_queue.weights.version.packing import digests, plan
from transfer_queue.weights.version.pieces import Pieces, pack_shards, wanted_buckets
from transfer_queue.weights.version.plans import ShardPlan, Wants, plan_pieces
from transfer_queue.weights.version.sealing import ShardDigests, seal_pieces
from transfer_queue.weights.version.shard_table import ShardKind, ShardTable
from transfer_queue.weights.version.sharded import TensorShard
from transfer_queue.weights.version.sources import shards_of
from transfer_queue.wire.address import Address

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex128, torch.bool]
Tensors = dict[str, torch.Tensor]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    return torch.randint(
        top, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator
    ).view(dtype).reshape(shape)  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> Tensors:
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    found = {}
    for number in range(draw(st.integers(1, 4))):
        found[f"layer.{number}"] = random_tensor(draw(st.sampled_from(DTYPES)), draw(shapes), number)
    return found


@st.composite
def meshes(draw: st.DrawFn, model: Tensors) -> list[list[TensorShard]]:
    """Each tensor cut into shards, each of which one or several ranks hold."""
    ranks = draw(st.integers(1, 4))
    tables: list[list[TensorShard]] = [[] for _ in range(ranks)]
    for name, tensor in model.items():
        boxes = [whole(tensor.shape)] if not tensor.numel() else draw(splits(whole(tuple(tensor.shape))))
        for box in boxes:
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                tables[rank].append(TensorShard(name, tensor.dtype, tuple(tensor.shape), box))
    return tables


@st.composite
def wants_of(draw: st.DrawFn, model: Tensors) -> Wants:
    some = [name for name, tensor in model.items() if tensor.numel()]
    names = draw(st.sets(st.sampled_from(some))) if some else set()
    return {
        name: tuple(draw(st.lists(boxes_in(tuple(model[name].shape)), min_size=1, max_size=3)))
        for name in sorted(names)
    }


def parts_of(model: Tensors, table: list[TensorShard]) -> Any:
    return ((one.name, model[one.name][within(one.box, whole(one.shape))].contiguous()) for one in table)


def published(
    model: Tensors, tables: list[list[TensorShard]], wants: list[Wants], nbytes: int = 100
) -> tuple[Manifest, list[torch.Tensor]]:
    plans = plan_pieces(tables, wants, nbytes)
    buckets = [[torch.zeros(size, dtype=torch.uint8) for size in where.buckets] for where in plans]
    found = [
        pack_shards(table, parts_of(model, table), where, places)
        for table, where, places in zip(tables, plans, buckets, strict=True)
    ]
    manifest = seal_pieces(tables, plans, found, version=1, epoch="e", aliases={})
    return manifest, list(itertools.chain.from_iterable(buckets))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


class Taking:
    """As much of a target as staging asks."""

    takes_patches = False

    def __init__(self, takes_pieces: bool) -> None:
        self.takes_pieces = takes_pieces


def staged(manifest: Manifest, buckets: list[torch.Tensor], wanted: list[int] | None, takes_pieces: bool) -> Any:
    staging = Staging(manifest, wanted)
    for index in staging.missing:
        staging.stage(index, buckets[index], lend=False, vouched=False)
    return staging.tensors(Taking(takes_pieces))  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whoever_takes_all_has_the_model_whatever_the_shards_and_the_cuts(data: st.DataObject) -> None:
    model = data.draw(models())
    tables, wants = data.draw(meshes(model)), data.draw(st.lists(wants_of(model), max_size=3))
    manifest, buckets = published(model, tables, wants)
    manifest = Manifest.decode(manifest.encode())
    found = staged(manifest, buckets, None, takes_pieces=False)
    assert set(found) == set(model)
    assert all(same_bytes(found[name], tensor) for name, tensor in model.items())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_each_receiver_has_its_wants_from_its_buckets_alone(data: st.DataObject) -> None:
    model = data.draw(models())
    tables, wants = data.draw(meshes(model)), data.draw(st.lists(wants_of(model), min_size=1, max_size=3))
    manifest, buckets = published(model, tables, wants)
    for mine in wants:
        found = staged(manifest, buckets, wanted_buckets(manifest, mine), takes_pieces=True)
        for name, boxes in mine.items():
            for box in boxes:
                have = found[name]
                part = have.of(box) if isinstance(have, Pieces) else have[within(box, whole(have.shape))]
                assert same_bytes(part, model[name][within(box, whole(tuple(model[name].shape)))])


@settings(deadline=None)
@given(st.data())
def test_no_receiver_fetches_bytes_that_it_does_not_want_when_few_cuts_are_needed(data: st.DataObject) -> None:
    """Two ranks that split every tensor along some dimension, as tensor parallelism does."""
    model = {
        f"layer.{number}": random_tensor(
            torch.bfloat16, tuple(data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=3)))
        )
        for number in range(data.draw(st.integers(1, 4)))
    }
    wants: list[Wants] = [{}, {}]
    for name, tensor in model.items():
        dim = data.draw(st.integers(0, tensor.ndim - 1))
        at, n = data.draw(st.integers(1, tensor.shape[dim] - 1)), tensor.shape[dim]
        for rank, (start, length) in enumerate([(0, at), (at, n - at)]):
            box = whole(tuple(tensor.shape))
            start_at = (*box.start[:dim], start, *box.start[dim + 1 :])
            wants[rank][name] = (Box(start_at, (*box.lengths[:dim], length, *box.lengths[dim + 1 :])),)  # type: ignore[index]
    manifest, _ = published(model, [shards_of(StateDictSource(model).specs())], wants)
    for mine in wants:
        fetched = sum(part.nbytes for index in wanted_buckets(manifest, mine) for part in manifest.in_bucket(index))
        assert fetched == sum(box.size * 2 for boxes in mine.values() for box in boxes)


def test_a_version_of_one_rank_that_nobody_cuts_is_in_format_1_and_has_the_same_root() -> None:
    model = {"a": random_tensor(torch.float32, (4, 4)), "b": random_tensor(torch.int8, ())}
    source = StateDictSource(model)
    manifest, _ = published(model, [shards_of(source.specs())], [])
    before = seal(plan(source.specs()), digests(source), version=1, epoch="e")
    assert (manifest.format, manifest.root) == (FORMAT, before.root)
    assert b"pieces" not in manifest.encode()


def test_the_root_is_that_of_the_trainers_layout_however_receivers_cut_it() -> None:
    model = {"a": random_tensor(torch.float32, (8, 8))}
    tables = [[TensorShard("a", torch.float32, (8, 8), Box((at, 0), (4, 8)))] for at in (0, 4)]
    half = {"a": (Box((0, 0), (8, 4)),)}
    one, other = published(model, tables, []), published(model, tables, [half])
    assert one[0].root == other[0].root
    assert (one[0].format, other[0].format) == (COLUMNS, COLUMNS)
    assert len(one[0].parts.boxes_of(0)) == 2
    assert len(other[0].parts.boxes_of(0)) == 4
    assert published(model, [shards_of(StateDictSource(model).specs())], [half])[0].root != one[0].root


def test_copies_are_given_by_the_rank_with_the_least_to_give() -> None:
    tables = [[TensorShard(name, torch.int8, (4,), whole((4,))) for name in "abcd"] for _ in range(4)]
    plans = plan_pieces(tables)
    assert [where.buckets for where in plans] == [(4,)] * 4


def test_replicas_that_drifted_apart_are_found() -> None:
    tables = [[TensorShard("a", torch.int8, (4,), whole((4,)))] for _ in range(2)]
    plans = plan_pieces(tables)
    found = []
    for value, where in enumerate(plans):
        buckets = [torch.zeros(size, dtype=torch.uint8) for size in where.buckets]
        found.append(pack_shards(tables[0], iter([("a", torch.full((4,), value, dtype=torch.int8))]), where, buckets))
    with pytest.raises(ShapeMismatch, match=r"ranks 0 and 1 hold different values of 'a'.*drifted"):
        seal_pieces(tables, plans, found, version=1, epoch="e", aliases={})


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (TensorShard("a", torch.int8, (4,), Box((1,), (3,))), "not its elements"),
        (TensorShard("a", torch.int8, (4,), Box((3,), (1,))), "not its elements"),
        (TensorShard("a", torch.float16, (4,), Box((2,), (2,))), "another one as"),
        (TensorShard("a", torch.int8, (5,), Box((2,), (3,))), "another one as"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(second: TensorShard, why: str) -> None:
    with pytest.raises(ShapeMismatch, match=why):
        plan_pieces([[TensorShard("a", torch.int8, (4,), Box((0,), (2,)))], [second]])


def test_more_tables_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(InvalidInput):
        plan_pieces([[]], [{}] * (MAX_TAKERS + 1))


def test_a_shard_that_the_table_does_not_have_like_that_is_refused() -> None:
    table = [TensorShard("a", torch.int8, (4,), whole((4,)))]
    (where,) = plan_pieces([table])
    for given_tensor in (("b", torch.zeros(4, dtype=torch.int8)), ("a", torch.zeros(3, dtype=torch.int8))):
        with pytest.raises(ShapeMismatch):
            pack_shards(table, iter([given_tensor]), where, [torch.zeros(4, dtype=torch.uint8)])


# columns, against one object at a time

CUT: Tensors = {"a": random_tensor(torch.float32, (4, 4)), "b": random_tensor(torch.float32, (4,))}
CUT_TABLE = shards_of(StateDictSource(CUT).specs())
CUT_WANTS: Wants = {"a": (Box((0, 0), (4, 2)),)}


def put(data: bytes, at: int, number: int, width: int) -> bytes:
    return data[: at * width] + number.to_bytes(width, "little", signed=True) + data[(at + 1) * width :]


def digests_of(
    model: Tensors, tables: list[list[TensorShard]], wants: list[Wants], nbytes: int = 100
) -> list[ShardDigests]:
    return [
        pack_shards(table, parts_of(model, table), where, [torch.zeros(n, dtype=torch.uint8) for n in where.buckets])
        for table, where in zip(tables, plan_pieces(tables, wants, nbytes), strict=True)
    ]


def lying(manifest: Manifest) -> list[list[tuple[Any, ...]]]:
    """What each bucket has."""
    return [
        [(part.name, part.piece, part.bucket, part.offset, part.nbytes, part.digest) for part in parts]
        for parts in manifest.by_bucket
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plans_are_those_that_are_made_shard_by_shard(data: st.DataObject) -> None:
    model = data.draw(models())
    tables, wants = data.draw(meshes(model)), data.draw(st.lists(wants_of(model), max_size=3))
    tables = [data.draw(st.permutations(table)) for table in tables]
    nbytes = data.draw(st.sampled_from([1, 64, 100, 1 << 20]))
    found = [([list(row) for row in one.places], list(one.buckets)) for one in plan_pieces(tables, wants, nbytes)]
    assert found == planned_one_by_one(tables, wants, nbytes)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_sealed_in_columns_is_what_is_sealed_piece_by_piece(data: st.DataObject) -> None:
    model = data.draw(models())
    tables, wants = data.draw(meshes(model)), data.draw(st.lists(wants_of(model), max_size=3))
    found, plans = digests_of(model, tables, wants), plan_pieces(tables, wants, 100)
    new = seal_pieces(tables, plans, found, version=1, epoch="e", aliases={}, names_holders=True)
    old = sealed_one_by_one(tables, planned_one_by_one(tables, wants, 100), found)
    new, old = Manifest.decode(new.encode()), Manifest.decode(old.encode())
    assert (new.format, old.format) == (COLUMNS, PIECES)
    assert (new.root, new.buckets, new.holders, new.contents()) == (old.root, old.buckets, old.holders, old.contents())
    assert lying(new) == lying(old)
    for mine in wants:
        fetched = [
            bucket
            for bucket, parts in enumerate(old.by_bucket)
            if any(common(part.box, box) for part in parts for box in mine.get(part.name, ()))
        ]
        assert wanted_buckets(new, mine) == wanted_buckets(old, mine) == fetched


def test_a_version_in_format_2_is_read_and_has_the_same_bytes_again() -> None:
    body = cut_manifest().encode()
    assert b'"pieces":[[[0,0],[4,2],32,' in body
    assert Manifest.decode(body).encode() == body


def test_a_table_and_a_plan_are_the_same_after_they_travelled() -> None:
    table = ShardTable.of(CUT_TABLE)
    (where,) = plan_pieces([table], [CUT_WANTS])
    told = msgspec.json.decode(msgspec.json.encode((table, where)), type=tuple[ShardTable, ShardPlan])
    told[0].check()
    told[1].check(len(table))
    assert (list(told[0]), told[0].key) == (list(table), table.key)
    assert list(told[1].places) == list(where.places)


@pytest.mark.parametrize(
    "changes",
    [
        {"column": bytes(1)}, {"column": bytes(4)}, {"column": put(bytes(8), 1, 2, 4)}, {"column": b"\xff" * 8},
        {"names": []},
        {"kinds": [ShardKind("float32", (4,), Box((0, 0), (4, 4)))] * 2},
        {"kinds": [ShardKind("float32", (4,), Box((-1,), (4,)))] * 2},
        {"kinds": [ShardKind("float33", (4,), Box((0,), (4,)))] * 2},
    ],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        replace(ShardTable.of(CUT_TABLE), **changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_cells": bytes(1)}, {"num_cells": bytes(4)}, {"num_cells": bytes(8)}, {"boxes": []}, {"buckets": ()},
        {"buckets": (1,)}, {"num_cells": put(put(bytes(8), 0, 3, 4), 1, -1, 4)},
    ],
)  # fmt: skip
def test_a_plan_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    (where,) = plan_pieces([[TensorShard(name, torch.int8, (4,), whole((4,))) for name in "ab"]])
    where.check(2)
    with pytest.raises(ProtocolError):
        replace(where, **changes).check(2)


def test_digests_of_another_number_of_shards_are_refused() -> None:
    with pytest.raises(ProtocolError):
        ShardDigests(bytes(16), bytes(17)).check(1, 1)


# bad manifests


def cut_manifest() -> Manifest:
    """In format 2."""
    found = digests_of(CUT, [CUT_TABLE], [CUT_WANTS])
    return sealed_one_by_one([CUT_TABLE], planned_one_by_one([CUT_TABLE], [CUT_WANTS], 100), found)


def changed(manifest: Manifest, **changes: Any) -> None:
    """A manifest whose first tensor has its first piece changed."""
    spec = manifest.tensors[0]
    first, *rest = spec.pieces  # type: ignore[misc]
    replace(manifest, tensors=(replace(spec, pieces=(replace(first, **changes), *rest)), *manifest.tensors[1:]))


@pytest.mark.parametrize(
    "changes",
    [
        {"start": (0, 1)}, {"start": (1, 0)}, {"lengths": (4, 3)}, {"lengths": (3, 2)}, {"lengths": (4, 0)},
        {"start": (0,)}, {"nbytes": 31}, {"bucket": 7}, {"offset": 1 << 40}, {"offset": 1},
    ],
)  # fmt: skip
def test_pieces_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadManifest):
        changed(cut_manifest(), **changes)


def test_a_missing_or_a_second_piece_is_refused() -> None:
    manifest = cut_manifest()
    spec = manifest.tensors[0]
    for pieces in (spec.pieces[:1], (*spec.pieces, spec.pieces[0]), ()):  # type: ignore[index, misc]
        with pytest.raises(BadManifest):
            replace(manifest, tensors=(replace(spec, pieces=pieces), *manifest.tensors[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: {"layout": one.layout[:-4]},
        lambda one: {"layout": one.layout[:-1]},
        lambda one: {"layout": put(one.layout, 0, 1, 4)},
        lambda one: {"layout": put(one.layout, 0, -1, 4)},
        lambda one: {"layout": put(one.layout, 1, -2, 4)},
        lambda one: {"layout": put(one.layout, 1, 0, 4)},
        lambda one: {"layouts": ()},
        lambda one: {"layouts": (*one.layouts, *one.layouts)},
        lambda one: {"layouts": (one.layouts[0][:1],)},
        lambda one: {"layouts": ((*one.layouts[0], one.layouts[0][0]),)},
        lambda one: {"layouts": ((Box((0,), (4,)), Box((0, 2), (4, 2))),)},
        lambda one: {"layouts": ((Box((0, -2), (4, 4)), Box((0, 2), (4, 2))),)},
        lambda one: {"bucket": one.bucket[:-4]},
        lambda one: {"bucket": one.bucket + bytes(1)},
        lambda one: {"bucket": put(one.bucket, 0, 7, 4)},
        lambda one: {"bucket": put(one.bucket, 0, -1, 4)},
        lambda one: {"offset": one.offset + bytes(8)},
        lambda one: {"offset": put(one.offset, 0, -64, 8)},
        lambda one: {"offset": put(one.offset, 0, 1 << 40, 8)},
        lambda one: {"offset": put(one.offset, 0, 1, 8)},
        lambda one: {"digests": one.digests[:-16]},
        lambda one: {"digests": one.digests[:-1]},
    ],
)
def test_columns_that_do_not_fit_are_refused(change: Any) -> None:
    manifest, _ = published(CUT, [CUT_TABLE], [CUT_WANTS])
    pieces: Any = manifest.pieces
    with pytest.raises(BadManifest):
        replace(manifest, pieces=replace(pieces, **change(pieces)))


def test_columns_are_those_of_formats_3_and_4_only() -> None:
    manifest, _ = published(CUT, [CUT_TABLE], [CUT_WANTS])
    with pytest.raises(BadManifest, match="format 3 and 4, this is 1"):
        replace(manifest, format=FORMAT, holders=msgspec.UNSET)
    with pytest.raises(BadManifest, match="format 3 and 4, this is 2"):
        replace(manifest, format=PIECES)
    with pytest.raises(BadManifest, match="tensors in pieces, in format 3"):
        replace(cut_manifest(), format=COLUMNS, pieces=manifest.pieces)


def test_format_1_has_no_pieces_and_format_2_names_holders() -> None:
    manifest = cut_manifest()
    with pytest.raises(BadManifest, match="in pieces, in format 1"):
        replace(manifest, format=FORMAT, holders=msgspec.UNSET)
    with pytest.raises(BadManifest, match="holder of each bucket"):
        replace(manifest, holders=(0,))
    with pytest.raises(BadManifest, match="holder of each bucket"):
        replace(manifest, holders=msgspec.UNSET)


def test_a_damaged_piece_is_found_by_the_receiver_that_takes_it() -> None:
    model = {"a": random_tensor(torch.float32, (4, 4))}
    half = {"a": (Box((0, 0), (4, 2)),)}
    manifest, buckets = published(model, [shards_of(StateDictSource(model).specs())], [half])
    (mine,) = wanted_buckets(manifest, half)
    buckets[mine][5] ^= 1
    with pytest.raises(DigestMismatch, match="'a'"):
        staged(manifest, buckets, [mine], takes_pieces=True)
    staged(manifest, buckets, [1 - mine], takes_pieces=True)


def test_a_module_takes_a_version_in_pieces() -> None:
    new, live = nn.Linear(6, 4), nn.Linear(6, 4)
    source = ModuleSource(new)
    model = dict(source.tensors())
    manifest, buckets = published(model, [shards_of(source.specs())], [{"weight": (Box((0, 1), (4, 2)),)}])
    receiver = Receiver(InPlace(live))
    for index in receiver.open(manifest, 60):
        receiver.stage(index, buckets[index])
    receiver.verify()
    receiver.commit()
    assert torch.equal(live.weight, new.weight)
    assert torch.equal(live.bias, new.bias)


def test_a_target_that_wants_little_is_asked_for_few_buckets() -> None:
    class First(InPlace):
        def wanted(self, tensors: Metas) -> Wants:
            return {name: (whole(shape),) for name, (_, shape) in tensors.items() if name == "bias"}

    new = nn.Linear(6, 4)
    source = ModuleSource(new)
    mine: Wants = {"bias": (whole((4,)),)}
    manifest, buckets = published(dict(source.tensors()), [shards_of(source.specs())], [mine])
    receiver = Receiver(First(nn.Linear(6, 4)))
    wanted = receiver.open(manifest, 60)
    assert [part.name for index in wanted for part in manifest.in_bucket(index)] == ["bias"]
    assert len(buckets) == 2


def test_a_bucket_that_no_source_has_is_not_waited_for() -> None:
    model = {"a": random_tensor(torch.float32, (8, 8))}
    tables = [[TensorShard("a", torch.float32, (8, 8), Box((at, 0), (4, 8)))] for at in (0, 4)]
    manifest, _ = published(model, tables, [])
    sources = [Source(Address(host="127.0.0.1", port=1), 0)]
    with pytest.raises(Incomplete, match="rank 1"):
        fetch(manifest, [0, 1], sources, lambda *_, **__: None, Deadline(30))


def noted(tables: WantTables, who: str, rank: int, wants: Wants) -> None:
    found = {name: tuple(boxes) for name, boxes in wants.items()}
    tables.note(msgspec.json.encode(WantsReport(who, rank, tables.key, found)))


@pytest.mark.parametrize(("num_workers", "most"), [(32, 1), (2 * MAX_TAKERS, 2)])
def test_each_of_many_workers_fetches_its_own_part(num_workers: int, most: int) -> None:
    """Beyond as many as there are takers, that of a neighbour too."""
    experts = {f"experts.{n:03}": torch.zeros(64) for n in range(num_workers)}
    source = StateDictSource(experts)
    tables = WantTables(Specs.of(source.specs(), {}))
    wants = [{name: (whole((64,)),)} for name in experts]
    for rank, mine in enumerate(wants):
        noted(tables, f"server {rank // 8}", rank, mine)
    manifest, _ = published(experts, [shards_of(source.specs())], list(tables.tables().values()), 1 << 20)
    fetched = [sum(manifest.buckets[one] for one in wanted_buckets(manifest, mine)) for mine in wants]
    assert max(fetched) <= most * 64 * 4


def test_servers_that_are_started_anew_again_and_again_cost_a_trainer_no_memory() -> None:
    source = StateDictSource({f"layers.{n}.weight": torch.zeros(4) for n in range(2000)})
    tables = WantTables(Specs.of(source.specs(), {}))
    wants = {meta.name: (Box((0,), (2,)),) for meta in source.specs()}
    tracemalloc.start()
    try:
        noted(tables, "life 0", 0, wants)
        one = tracemalloc.get_traced_memory()[0]
        for life in range(1, 10):
            noted(tables, f"life {life}", 0, wants)
        assert tracemalloc.get_traced_memory()[0] < 2 * one
    finally:
        tracemalloc.stop()
