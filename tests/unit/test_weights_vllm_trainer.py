"""vLLM's sources of weights as ours, and what its factory makes of them, without vLLM."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weights import Net, root

from transfer_queue.errors import InvalidInput, NotSupported, UnsupportedValue
from transfer_queue.integrations.vllm.source import GatheredSource, PlacedSource, dealt, vllm_source
from transfer_queue.integrations.vllm.trainer import FactoryInfo, FactoryTrainer
from transfer_queue.weights import ModuleSource, StateDictSource
from transfer_queue.weights.version.sources import parts_of, table_of

TENSORS = {f"layer.{index}": torch.full((index + 1, 4), float(index)) for index in range(7)}


class Source:
    """As of vLLM 0.32. Counts what was read of it."""

    def __init__(self) -> None:
        self.num_read = 0

    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=name, dtype=one.dtype, shape=one.shape) for name, one in TENSORS.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for found in TENSORS.items():
            self.num_read += 1
            yield found


class Later(Source):
    """`metadata` is a property, and full tensors have a method of their own."""

    @functools.cached_property
    def metadata(self) -> list[Any]:  # type: ignore[override]
        return super().metadata()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it has full tensors")


class Divided(Source):
    """A rank of two pipeline stages."""

    def __init__(self, held: set[str]) -> None:
        super().__init__()
        self._held = held

    def held_names(self) -> set[str]:
        return self._held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in super().__iter__():
            yield name, tensor if name in self._held else None


class Placed(Later):
    """As of vLLM 0.33: each tensor has owners, on a mesh, and a placement for each axis of it (a dimension that is
    split, or None). `modes`: what it implements."""

    LAYOUT: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, ...]], ...] = (
        ((0, 1, 2, 3), (2, 2), (0, None)), ((3, 1, 0, 2), (2, 2), (0, 1)), ((2, 3), (2,), (0,)),
        ((0, 1, 2, 3), (2, 2), (0, 0)), ((1, 2, 3), (3,), (1,)), ((0, 2), (2,), (None,)), ((3,), (1,), (0,)),
    )  # fmt: skip

    def __init__(self, rank: int, modes: tuple[str, ...] = ("full", "local")) -> None:
        super().__init__()
        self._rank, self._modes = rank, modes

    @functools.cached_property
    def metadata(self) -> list[Any]:  # type: ignore[override]
        return [
            SimpleNamespace(
                name=name, dtype=one.dtype, shape=tuple(one.shape), owners=owners, mesh_shape=mesh,
                placements=tuple(SimpleNamespace(**({} if dim is None else {"dim": dim})) for dim in dims),
            )
            for (name, one), (owners, mesh, dims) in zip(TENSORS.items(), self.LAYOUT, strict=True)
        ]  # fmt: skip

    def implements_iter_full(self) -> bool:
        return "full" in self._modes

    def implements_iter_local(self) -> bool:
        return "local" in self._modes

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for (name, tensor), (owners, _, _) in zip(TENSORS.items(), self.LAYOUT, strict=True):
            if self._rank in owners:
                self.num_read += 1
                yield name, tensor

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for (name, tensor), (owners, mesh, dims) in zip(self.iter_full(), self._own(), strict=True):
            place = owners.index(self._rank)
            local = tensor
            for axis, dim in enumerate(dims):
                at = place // math.prod(mesh[axis + 1 :]) % mesh[axis]
                if dim is not None:
                    chunks = local.chunk(mesh[axis], dim)
                    local = chunks[at] if at < len(chunks) else local.narrow(dim, 0, 0)
            yield name, local

    def _own(self) -> list[Any]:
        return [one for one in self.LAYOUT if self._rank in one[0]]


def test_what_each_rank_has_lies_where_the_placements_say() -> None:
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in TENSORS.items()}
    for rank in range(4):
        given = Placed(rank)
        source = vllm_source(given, rank, 4)
        assert isinstance(source, PlacedSource)
        assert source.is_sharded
        table = table_of(source)
        reading = parts_of(source)
        for shard, (name, part) in zip(table, [next(reading) for _ in table], strict=True):
            assert (shard.name, shard.box.lengths) == (name, tuple(part.shape))
            here = tuple(slice(at, at + n) for at, n in zip(*shard.box, strict=True))
            found[name][here] = part
        assert given.num_read == len(given._own())
        with pytest.raises(UnsupportedValue, match="several ranks"):
            source.tensors()
    assert root(found) == root(TENSORS)


def test_a_rank_is_dealt_only_what_it_owns() -> None:
    found: list[str] = []
    for rank in range(4):
        given = Placed(rank, ("full",))
        source = vllm_source(given, rank, 4)
        assert isinstance(source, GatheredSource)
        parts = dict(parts_of(source))
        assert root(parts) == root({name: TENSORS[name] for name in parts})
        assert given.num_read == len(given._own())
        found += parts
    assert sorted(found) == sorted(TENSORS)


def test_a_source_that_contradicts_its_placements_is_refused() -> None:
    given = Placed(0)
    given.metadata[3].placements = given.metadata[0].placements
    with pytest.raises(UnsupportedValue, match=r"part of 'layer\.3' is \(1, 4\), and \(2, 4\) by its placements"):
        dict(parts_of(vllm_source(given, 0, 4)))
    with pytest.raises(InvalidInput, match="owned by rank 3 of a trainer that has 2"):
        vllm_source(Placed(0), 0, 2)


def test_a_source_of_local_parts_alone_has_all_where_there_is_one_rank() -> None:
    given = Placed(0, ("local",))
    given.LAYOUT = tuple(((0,), (1,), (0,)) for _ in TENSORS)
    source = vllm_source(given)
    assert not source.is_sharded  # type: ignore[attr-defined]
    assert root(dict(source.tensors())) == root(TENSORS)


@pytest.mark.parametrize("kind", [Source, Later])
def test_a_source_of_one_rank_gives_all(kind: type[Source]) -> None:
    source = vllm_source(kind())
    assert isinstance(source, GatheredSource)
    assert [spec.name for spec in source.specs()] == list(TENSORS)
    assert root(dict(source.tensors())) == root(TENSORS)


@pytest.mark.parametrize("world", [2, 3, 9])
def test_ranks_share_the_tensors_and_read_all_of_them(world: int) -> None:
    given = [Source() for _ in range(world)]
    found: list[str] = []
    for rank, one in enumerate(given):
        source = vllm_source(one, rank, world)
        table = table_of(source)
        reading = parts_of(source)
        parts = [next(reading) for _ in table]  # it is read no further
        assert [name for name, _ in parts] == [shard.name for shard in table]
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in parts)
        assert one.num_read == len(TENSORS)
        found += [name for name, _ in parts]
    assert sorted(found) == sorted(TENSORS)


def test_ranks_are_dealt_about_the_same_bytes() -> None:
    specs = vllm_source(Source()).specs()
    loads = [sum(TENSORS[name].nbytes for name in names) for names in dealt(specs, 3, [range(3)] * len(specs))]
    assert max(loads) - min(loads) <= max(tensor.nbytes for tensor in TENSORS.values()) / 2


def test_a_rank_that_holds_a_part_gives_that() -> None:
    names = set(list(TENSORS)[:3])
    source = vllm_source(Divided(names), 0, 2)
    assert {shard.name for shard in table_of(source)} == names == {name for name, _ in parts_of(source)}
    assert len(source.specs()) == len(TENSORS)
    with pytest.raises(UnsupportedValue, match="no full tensor"):
        dict(source.tensors())
    with pytest.raises(InvalidInput, match="not in the metadata"):
        vllm_source(Divided({"surplus"}), 0, 2)


def test_what_is_no_source_is_refused() -> None:
    own = StateDictSource(TENSORS)
    assert vllm_source(own) is own
    assert isinstance(vllm_source(Net()), ModuleSource)
    with pytest.raises(InvalidInput, match="no source of weights"):
        vllm_source(None)
    with pytest.raises(NotSupported, match="give the module itself"):
        vllm_source(SimpleNamespace(mesh=lambda: None, metadata=list))


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"rank": 0, "backend": "nccl"}, "no backend 'nccl'"),
        ({"rank": 2, "world": 2, "backend": "tq_tcp"}, "rank 2 of 2"),
        ({"rank": 0, "world": 2, "backend": "tq_shm"}, "tq_tcp has several"),
        ({"rank": 0}, "give `silent`"),
    ],
)
def test_what_the_factory_cannot_make(info: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        FactoryTrainer.trainer_init(FactoryInfo(**info), client=SimpleNamespace(), source=Source())


def test_a_source_with_a_part_is_no_trainer_of_one_rank() -> None:
    with pytest.raises(UnsupportedValue, match="only parts"):
        FactoryTrainer.trainer_init(
            FactoryInfo(rank=0, options={"silent": 0}), client=SimpleNamespace(), source=Divided({"layer.1"})
        )
