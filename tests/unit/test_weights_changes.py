"""Differences between versions in pieces: found by several ranks, applied by receivers of any kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_weights_pieces import CUT, CUT_TABLE, CUT_WANTS, Tensors, meshes, models, parts_of, same_bytes, wants_of
from test_weights_sources import Direct
from weights import Net, drawn
from weights import in_threads as in_threads

from transfer_queue.errors import BadManifest, ProtocolError, StaleBase, VersionGone
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights import InPlace, Receiver, StateDictSource
from transfer_queue.weights.receive.results import Results
from transfer_queue.weights.receive.staging import Staging
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.base import whole_of
from transfer_queue.weights.version import anchor as anchor_module
from transfer_queue.weights.version.anchor import VersionAnchor
from transfer_queue.weights.version.boxes import whole, within
from transfer_queue.weights.version.delta import Patch
from transfer_queue.weights.version.manifest import CHANGES, Manifest
from transfer_queue.weights.version.pieces import Pieces, wanted_buckets
from transfer_queue.weights.version.plans import ShardPlan, Wants, plan_pieces
from transfer_queue.weights.version.sealing import PackedCells, Sealing, seal_pieces
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.weights.version.sharded import TensorShard
from transfer_queue.weights.version.sources import shards_of
from transfer_queue.weights.version.stored_cells import StoredCells

Buckets = list[torch.Tensor]


class Pair(NamedTuple):
    """A version and the next one, which came as a difference."""

    first: Manifest
    buckets: Buckets
    whole: Manifest
    change: Manifest
    changed: Buckets
    anchors: list[VersionAnchor]


def sealed(tables: Any, plans: list[ShardPlan], found: Any, version: int) -> Manifest:
    return seal_pieces(tables, plans, found, version=version, epoch="e", aliases={})


def pair_of(old: Tensors, new: Tensors, tables: list[list[TensorShard]], wants: list[Wants]) -> Pair:
    """As the ranks of a trainer make it, and after they have followed."""
    plans = plan_pieces(tables, wants, 100)
    columns = [ShardTable.of(table) for table in tables]
    packed = [
        VersionAnchor.pack(column, parts_of(old, table), where)
        for column, table, where in zip(columns, tables, plans, strict=True)
    ]
    anchors = [anchor for anchor, _ in packed]
    first = sealed(tables, plans, [found for _, found in packed], 1)
    buckets = [bucket.clone() for anchor in anchors for bucket in anchor.buckets]
    changes = [anchor.compare(parts_of(new, table)) for anchor, table in zip(anchors, tables, strict=True)]
    found = [one.digests for one in changes]
    second = sealed(tables, plans, found, 2)
    change = Sealing(tables, plans, found).changes(first, second, [one.stored for one in changes])
    for anchor, one in zip(anchors, changes, strict=True):
        anchor.follow(one)
    changed = list(itertools.chain.from_iterable(one.buckets for one in changes))
    return Pair(first, buckets, second, Manifest.decode(change.encode()), changed, anchors)


@st.composite
def altered(draw: st.DrawFn, model: Tensors) -> Tensors:
    """The model with a few bytes, many, or none of each tensor changed."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = {}
    for name, tensor in model.items():
        new = tensor.clone()
        data = byte_view(new).numpy()
        hit = random.random(len(data)) < draw(st.sampled_from([0, 0.02, 0.2, 1]))
        data[hit] ^= np.uint8(1)
        found[name] = new
    return found


class Having:
    """As much of a target as results ask: these live tensors."""

    def __init__(self, live: Any, *, takes_patches: bool = False, takes_pieces: bool = False) -> None:
        self._live = live
        self.takes_patches, self.takes_pieces = takes_patches, takes_pieces

    def bases(self) -> Any:
        return self._live


def staging_of(manifest: Manifest, buckets: Buckets, wanted: list[int] | None = None) -> Staging:
    made = Staging(manifest, wanted)
    for index in made.missing:
        made.stage(index, buckets[index], lend=False, vouched=False)
    return made


def results(pair: Pair, target: Having, wanted: list[int] | None = None) -> dict[str, Any]:
    staging = staging_of(pair.change, pair.changed, wanted)
    return Results(pair.change, staging.parts(), target).tensors()  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_a_difference_of_any_shards_and_cuts_leads_to_the_new_model(data: st.DataObject, takes_patches: bool) -> None:
    old = data.draw(models())
    new = data.draw(altered(old))
    tables, wants = data.draw(meshes(old)), data.draw(st.lists(wants_of(old), max_size=3))
    pair = pair_of(old, new, tables, wants)
    live = {name: tensor.clone() for name, tensor in old.items()}
    found = results(pair, Having(live, takes_patches=takes_patches))
    assert set(found) == {name for name in old if not same_bytes(old[name], new[name])}
    for name, value in found.items():
        if isinstance(value, Patch):
            value.apply(live[name])
        else:
            live[name] = value
    assert all(same_bytes(live[name], new[name]) for name in new)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_receivers_of_pieces_have_their_wants_of_the_new_model(data: st.DataObject) -> None:
    old = data.draw(models())
    new = data.draw(altered(old))
    tables, wants = data.draw(meshes(old)), data.draw(st.lists(wants_of(old), min_size=1, max_size=3))
    pair = pair_of(old, new, tables, wants)
    for mine in wants:
        target = Having({}, takes_pieces=True)
        held = staging_of(pair.first, pair.buckets, wanted_buckets(pair.first, mine)).tensors(target)  # type: ignore[arg-type]
        found = held | results(pair, Having(held, takes_pieces=True), wanted_buckets(pair.change, mine))
        for name, boxes in mine.items():
            for box in boxes:
                have = found[name]
                part = have.of(box) if isinstance(have, Pieces) else have[within(box, whole(tuple(have.shape)))]
                assert same_bytes(part, new[name][within(box, whole(tuple(new[name].shape)))])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_who_follows_has_packed_the_new_model(data: st.DataObject) -> None:
    old = data.draw(models())
    new = data.draw(altered(old))
    tables, wants = data.draw(meshes(old)), data.draw(st.lists(wants_of(old), max_size=3))
    pair = pair_of(old, new, tables, wants)
    fresh = pair_of(new, new, tables, wants)
    assert pair.whole == replace(fresh.first, version=2)
    assert whole_of(pair.first, pair.change) == pair.whole
    now = [bucket for anchor in pair.anchors for bucket in anchor.buckets]
    held = staging_of(pair.whole, now).tensors(Having({}))  # type: ignore[arg-type]
    assert all(same_bytes(held[name], tensor) for name, tensor in new.items())  # type: ignore[arg-type]


def cut_pair(at: tuple[int, int] | None = (1, 3)) -> Pair:
    """Of a tensor in two halves, of which an element of the second one changed, or none."""
    new = {name: tensor.clone() for name, tensor in CUT.items()}
    if at is not None:
        new["a"][at] += 1
    return pair_of(CUT, new, [CUT_TABLE], [CUT_WANTS])


def test_only_the_piece_that_changed_is_sent() -> None:
    pair = cut_pair()
    assert pair.change.format == CHANGES
    assert [spec.name for spec in pair.change.tensors] == ["a"]
    (part,) = itertools.chain.from_iterable(pair.change.by_bucket)
    assert part.box.start == (0, 2)
    assert len(list(pair.change.parts.unchanged())) == 1


def test_a_version_in_which_nothing_changed_has_no_bytes() -> None:
    pair = cut_pair(None)
    assert (pair.change.tensors, pair.change.buckets, pair.changed) == ((), (), [])
    assert pair.change.root == pair.first.root


def test_weights_that_somebody_else_changed_are_no_base() -> None:
    big = {"a": torch.zeros(64, 64)}
    new = {"a": big["a"].clone()}
    new["a"][3, 60] = 1
    table = [TensorShard("a", torch.float32, (64, 64), whole((64, 64)))]
    pair = pair_of(big, new, [table], [{"a": (whole((64, 64))._replace(lengths=(64, 32)),)}])
    big["a"][5, 50] = 7
    for more in ({}, {"takes_patches": True}, {"takes_pieces": True}):
        with pytest.raises(StaleBase, match="not what it was"):
            results(pair, Having(big, **more))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda m: replace(m, kind="full", base=None, base_root=None), "is for delta versions"),
        (lambda m: replace(m, pieces=replace(m.pieces, stored_digests=b"")), "what is stored of"),
        (lambda m: replace(m, pieces=replace(m.pieces, stored=(-2).to_bytes(8, "little", signed=True) * 2)), "fewer"),
        (lambda m: replace(m, pieces=replace(m.pieces, stored_digests=b"1" * 32)), "has the digest of one"),
        (lambda m: replace(m, pieces=replace(m.pieces, bucket=bytes([1, 0, 0, 0] * 2))), "a place"),
        (lambda m: replace(m, buckets=(8,)), "ends beyond"),
    ],
)
def test_differences_in_pieces_that_make_no_sense_are_refused(bad: Any, why: str) -> None:
    with pytest.raises(BadManifest, match=why):
        bad(cut_pair().change)


def test_a_rank_that_has_packed_something_else_is_found_out() -> None:
    (where,) = plan_pieces([CUT_TABLE], [CUT_WANTS])
    anchor, digests = VersionAnchor.pack(ShardTable.of(CUT_TABLE), parts_of(CUT, CUT_TABLE), where)
    stored = anchor.compare(parts_of(CUT, CUT_TABLE)).stored
    PackedCells(digests, stored).check(2, where, compares=True)
    for packed in (PackedCells(digests), PackedCells(digests, StoredCells(b"", b"")), PackedCells(digests, replace(
        stored, nbytes=(-2).to_bytes(8, "little", signed=True) * 3
    ))):  # fmt: skip
        with pytest.raises(ProtocolError):
            packed.check(2, where, compares=True)


@pytest.fixture
def trainer() -> Iterator[Any]:
    """Over tcp, with a receiver, and `weights` that are sent."""
    weights = drawn(Net(), 1)
    engine = registry.engine("tcp")(Receiver(InPlace(Net())))
    made = registry.trainer("tcp").trainer_init(
        {"anchor_every": 10, "keep": 2}, client=Direct(engine), source=StateDictSource(weights)
    )
    made.weights = weights
    yield made
    made.shutdown()
    engine.shutdown()


def send(trainer: Any) -> str:
    """An element changes; the key of all of the version, which late receivers are given."""
    trainer.weights["first.weight"].view(-1)[trainer.version] += 1
    trainer.send_weights(deadline_s=30)
    return str(trainer._newest[""].key)


def test_what_a_late_receiver_reads_stays_as_it_was(trainer: Any) -> None:
    first = send(trainer)
    before = trainer.store.bucket(first, 0).clone()
    second = send(trainer)
    assert torch.equal(trainer.store.bucket(first, 0), before)
    assert not torch.equal(trainer.store.bucket(second, 0), before)


def test_what_nobody_reads_is_written_where_it_lies(trainer: Any) -> None:
    first = send(trainer)
    where = trainer._base.anchor.buckets[0].data_ptr()
    second = send(trainer)
    assert trainer.store.bucket(second, 0).data_ptr() == where
    with pytest.raises(VersionGone):
        trainer.store.bucket(first, 0)


def test_an_interrupt_while_the_base_follows_is_followed_by_a_full_version(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(trainer)
    follow = VersionAnchor.follow

    def half(self: VersionAnchor, changes: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VersionAnchor, "follow", half)
    with pytest.raises(KeyboardInterrupt):
        send(trainer)
    monkeypatch.setattr(VersionAnchor, "follow", follow)
    trainer.weights["first.weight"] += 1
    assert [trainer.send_weights(deadline_s=30).kind for _ in range(2)] == ["full", "delta"]


@pytest.mark.parametrize("where", ["room", "copying", "comparing"])
def test_a_source_is_gone_through_where_what_is_done_with_it_fails(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The other ranks gather its tensors with this one."""
    weights = drawn(Net(), 1)
    source = StateDictSource(weights)
    table = ShardTable.of(shards_of(source.specs()))
    (plan,) = plan_pieces([table], bucket_nbytes=100)
    anchor, _ = VersionAnchor.pack(table, source.tensors(), plan)
    given: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in source.tensors():
            given.append(name)
            yield name, tensor

    def fail(*args: Any) -> None:
        raise MemoryError("as much as that there is not")

    failing = {"room": "room", "copying": "pack_shards", "comparing": "ready"}[where]
    monkeypatch.setattr(anchor_module, failing, fail)
    with pytest.raises(MemoryError):
        anchor.compare(tensors()) if where == "comparing" else VersionAnchor.pack(table, tensors(), plan)
    assert given == list(weights)


def test_of_a_source_that_fails_nothing_more_is_asked() -> None:
    weights = drawn(Net(), 1)
    table = ShardTable.of(shards_of(StateDictSource(weights).specs()))
    (plan,) = plan_pieces([table], bucket_nbytes=100)
    asked: list[int] = []

    class Failing(Iterator[tuple[str, torch.Tensor]]):
        def __next__(self) -> tuple[str, torch.Tensor]:
            asked.append(1)
            raise RuntimeError("a rank did not come")

    with pytest.raises(RuntimeError, match="did not come"):
        VersionAnchor.pack(table, Failing(), plan)
    assert len(asked) == 1
