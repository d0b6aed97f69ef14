"""Sources, plans, packing and unpacking."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from weights import Net, Tied, drawn, same
from weights import in_threads as in_threads

from transfer_queue.errors import InvalidInput, ShapeMismatch, UnsupportedValue
from transfer_queue.weights import (
    ModuleSource,
    SafetensorsSource,
    StateDictSource,
    digests,
    pack,
    plan,
    seal,
    unpack,
)
from transfer_queue.weights.version import threads
from transfer_queue.weights.version.digest import digest_tensor
from transfer_queue.weights.version.packing import pack_into
from transfer_queue.weights.version.sources import TensorMeta

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex128, torch.int64]
ODD = {
    "scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "bool": torch.tensor([True, False, True]),
    "fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e5m2), "bf16": torch.ones(3, dtype=torch.bfloat16),
    "slanted": torch.arange(12.0).reshape(3, 4).t(), "complex": torch.tensor([1 + 2j]).conj(),
}  # fmt: skip
metas = st.builds(
    lambda dtype, shape: TensorMeta("", dtype, tuple(shape)),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3),
)


def sized(*nbytes: int) -> list[TensorMeta]:
    return [TensorMeta(str(index), torch.uint8, (one,)) for index, one in enumerate(nbytes)]


@given(st.lists(metas, max_size=12), st.integers(1, 300))
def test_a_plan_is_aligned_and_without_overlap(specs: list[TensorMeta], bucket_nbytes: int) -> None:
    found = plan(specs, bucket_nbytes)
    end, bucket = 0, 0
    for place, spec in zip(found.placements, specs, strict=True):
        assert place[:3] == spec
        assert place.offset % 64 == 0
        assert (place.bucket == bucket and place.offset >= end) or (place.bucket, place.offset) == (bucket + 1, 0)
        bucket, end = place.bucket, place.offset + place.nbytes
        assert end <= found.buckets[bucket]
    for index, nbytes in enumerate(found.buckets):
        inside = [place for place in found.placements if place.bucket == index]
        assert nbytes == max(place.offset + place.nbytes for place in inside)
        assert nbytes <= bucket_nbytes or sum(place.nbytes > 0 for place in inside) == 1


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own() -> None:
    assert plan(sized(10, 500, 10, 20), 100).buckets == (10, 500, 84)


@pytest.mark.parametrize("align", [1, 64])
def test_packing_and_unpacking_give_back_every_dtype_and_shape(align: int) -> None:
    source = StateDictSource(ODD)
    where = plan(source.specs(), 64, align)
    manifest = seal(where, digests(source), version=1, epoch="e")
    found: dict[str, torch.Tensor] = {}
    for packed in pack(source, where):
        views = unpack(packed.data, manifest.in_bucket(packed.bucket))
        assert packed.digests == {name: digest_tensor(tensor) for name, tensor in views.items()}
        found.update({name: tensor.clone() for name, tensor in views.items()})
    assert [(name, one.dtype, one.shape) for name, one in found.items()] == [
        (name, one.dtype, one.shape) for name, one in ODD.items()
    ]
    assert same(comparable(found), comparable(ODD))


def comparable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """torch does not compare fp8."""
    return {name: one.view(torch.uint8) if one.dtype == torch.float8_e5m2 else one for name, one in tensors.items()}


def test_digests_without_packing_are_the_same() -> None:
    source = ModuleSource(Net())
    packed = [one.digests for one in pack(source, plan(source.specs(), 64))]
    assert digests(source) == {name: digest for one in packed for name, digest in one.items()}


class Watched(StateDictSource):
    """Says when each tensor was asked for."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.asked = [threading.Event() for _ in weights]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for event, found in zip(self.asked, super().tensors(), strict=True):
            event.set()
            yield found


def test_the_next_bucket_is_packed_while_one_is_moved_and_no_third() -> None:
    source = Watched({str(index): torch.full((64,), index, dtype=torch.uint8) for index in range(4)})
    buffers = [torch.empty(64, dtype=torch.uint8) for _ in range(2)]
    for packed in pack(source, plan(source.specs(), 64), buffers):
        if packed.bucket < 3:
            assert source.asked[packed.bucket + 1].wait(10)
        assert not any(event.is_set() for event in source.asked[packed.bucket + 2 :])
        assert packed.data.data_ptr() == buffers[packed.bucket % 2].data_ptr()
        assert packed.data.tolist() == [packed.bucket] * 64


def test_a_small_version_is_packed_by_its_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = StateDictSource({"large": torch.arange(100_000), "small": torch.ones(3)})
    where = plan(source.specs())
    (place,) = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in where.buckets)
    monkeypatch.setattr(threads, "ALONE_NBYTES", sum(where.buckets))
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", None)
        assert pack_into(source, where, [place]) == digests(source)


def test_packing_may_be_given_up() -> None:
    source = ModuleSource(Net())
    packing: Any = pack(source, plan(source.specs(), 64))
    assert next(packing).bucket == 0
    packing.close()


def test_a_source_that_changed_since_the_plan_is_refused() -> None:
    where = plan(ModuleSource(Net(8)).specs())
    for other in (ModuleSource(Net(4)), StateDictSource({})):
        with pytest.raises(ShapeMismatch, match="instead of"):
            list(pack(other, where))


def test_small_buffers_are_refused() -> None:
    source = ModuleSource(Net())
    with pytest.raises(InvalidInput):
        pack(source, plan(source.specs(), 64), [torch.empty(10, dtype=torch.uint8)] * 2)


def test_a_module_gives_tied_weights_once_and_no_temporary_buffers() -> None:
    module = Tied()
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    source = ModuleSource(module)
    assert [name for name, _ in source.tensors()] == ["embed.weight"] == [spec.name for spec in source.specs()]
    assert source.aliases() == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("bad", [torch.ones(2, device="meta"), torch.ones(2).to_sparse(), 3.5])
def test_what_is_no_plain_tensor_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(UnsupportedValue, match="'w'"):
        StateDictSource({"w": bad})


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    weights = drawn(Net(), 3)
    save_file(weights, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert same(dict(source.tensors()), weights)
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source.tensors()] == source.specs()


def test_a_sharded_folder_gives_what_its_index_names(tmp_path: Path) -> None:
    weights = drawn(Net(), 3)
    names = sorted(weights)
    files = {"b.safetensors": names[:2], "a.safetensors": names[2:]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part} | {"unused": torch.ones(1)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in files.items() for name in part}}))
    found = dict(SafetensorsSource(tmp_path).tensors())
    assert same(found, weights)
    assert list(found) == [*names[2:], *names[:2]]


def save_indexed(folder: Path, weights: dict[str, torch.Tensor], files: list[str]) -> None:
    """As savers of checkpoints do: each tensor in one of the files, by turns."""
    where = {name: files[at % len(files)] for at, name in enumerate(sorted(weights))}
    for file in files:
        save_file({name: weights[name] for name in where if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_of_a_checkpoint_that_took_the_place_of_another_its_own_tensors_are_read(tmp_path: Path) -> None:
    save_indexed(tmp_path, drawn(Net(), 1), ["a-of-2.safetensors", "b-of-2.safetensors"])
    source = SafetensorsSource(tmp_path)
    save_indexed(tmp_path, drawn(Net(), 2), ["a-of-3.safetensors", "b-of-3.safetensors", "c-of-3.safetensors"])
    found = list(source.tensors())
    assert same(dict(found), drawn(Net(), 2))
    assert [name for name, _ in found] == [meta.name for meta in source.specs()]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda now: now | {"more": torch.ones(1)}, "got 'more'"),
        (lambda now: {"steps": now["steps"]}, r"lost 'first\.bias'"),
        (lambda now: now | {"steps": now["steps"].float()}, r"'steps' is torch\.float32 \[\]"),
        (None, "header"),
    ],
)
def test_a_folder_that_has_other_tensors_than_at_first_is_refused(tmp_path: Path, change: Any, why: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file(drawn(Net(), 1), file)
    source = SafetensorsSource(tmp_path)
    if change is None:
        file.write_bytes(file.read_bytes()[:100])
    else:
        save_file(change(drawn(Net(), 1)), file)
    with pytest.raises(InvalidInput, match=why):
        list(source.tensors())


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"w": "../a.safetensors"}}',
        '{"weight_map": {"w": "gone.safetensors"}}',
        '{"weight_map": {"w": "a.safetensors"}}',
        '{"weight_map": 3}',
        "[]",
        "{",
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: str) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidInput):
        SafetensorsSource(tmp_path)


def test_an_empty_folder_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="0 safetensors"):
        SafetensorsSource(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 30)
    with pytest.raises(InvalidInput, match=r"a\.safetensors"):
        SafetensorsSource(tmp_path)
