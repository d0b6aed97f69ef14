"""Manifests: canonical bytes, everything checked, a root that names the content."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weights import Net, Tied, drawn, full

from transfer_queue.errors import BadManifest
from transfer_queue.weights import Manifest, ModuleSource, TensorSpec
from transfer_queue.weights.version.manifest import Entry, Stored, root_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6)
DIGEST = "0123456789abcdef" * 2


def spec(name: str = "a", **more: Any) -> TensorSpec:
    parts = {"dtype": "float32", "shape": (2,), "nbytes": 8, "digest": DIGEST, "bucket": 0, "offset": 0}
    return TensorSpec(name, **{**parts, **more})


def made(*specs: TensorSpec, **more: Any) -> Manifest:
    root = root_of({one.name: Entry(one.dtype, one.shape, one.digest) for one in specs})
    parts = {"version": 2, "epoch": "e", "kind": "full", "buckets": (100,), "root": root}
    return Manifest(tensors=specs, **{**parts, **more})


@given(SHAPES, st.text(min_size=1), st.text(), st.dictionaries(st.text(), JSON, max_size=3), st.integers(1, 200))
def test_bytes_and_back(shapes: list[list[int]], epoch: str, label: str, meta: dict[str, Any], nbytes: int) -> None:
    weights = {f"w{index}": torch.zeros(shape) for index, shape in enumerate(shapes)}
    manifest = full(weights, 7, epoch, label=label, meta=meta, bucket_nbytes=nbytes).manifest
    data = manifest.encode()
    assert Manifest.decode(data) == manifest
    assert Manifest.decode(data).encode() == data


@given(st.data())
def test_changed_bytes_are_refused_or_say_something_else(data: st.DataObject) -> None:
    good = full(drawn(Net(), 0), 1, meta={"step": 3}).manifest
    text = bytearray(good.encode())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Manifest.decode(bytes(text))
    except BadManifest:
        return
    assert (found == good) == (text == good.encode())


@given(st.binary(max_size=60))
def test_any_bytes_give_a_typed_error(data: bytes) -> None:
    with pytest.raises(BadManifest):
        Manifest.decode(data)


def test_the_root_is_that_of_the_content() -> None:
    weights = drawn(Net(), 0)
    root = full(weights, 1).manifest.root
    backwards = dict(reversed(weights.items()))
    assert full(backwards, 5, "other", bucket_nbytes=7, label="x").manifest.root == root
    assert full({**weights, "steps": weights["steps"] + 1}, 1).manifest.root != root
    assert full({**weights, "steps": weights["steps"].reshape(1)}, 1).manifest.root != root


def test_tied_and_untied_copies_have_one_root() -> None:
    tied = ModuleSource(Tied())
    manifest = full(tied, 1).manifest
    assert manifest.aliases == {"head.weight": "embed.weight"}
    untied = {name: next(tied.tensors())[1].clone() for name in ("embed.weight", "head.weight")}
    assert full(untied, 1).manifest.root == manifest.root
    assert len(full(untied, 1).manifest.tensors) == 2


def test_key_order_and_spaces_are_not_canonical() -> None:
    data = made(spec()).encode()
    parts = msgspec.json.decode(data)
    for other in (msgspec.json.encode(dict(reversed(parts.items()))), data + b" "):
        with pytest.raises(BadManifest, match="canonical"):
            Manifest.decode(other)


def test_another_format_is_named_before_anything_else_is_read() -> None:
    with pytest.raises(BadManifest, match="format 5: this release reads 1 to 4"):
        Manifest.decode(b'{"format":5,"of":"the future"}')


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda: made(spec(nbytes=9)), "9 bytes for float32"),
        (lambda: made(spec(dtype="float33")), "float33"),
        (lambda: made(spec(offset=96)), "bucket 0 has 100 bytes"),
        (lambda: made(spec(bucket=1)), "bucket 1 of 1"),
        (lambda: made(spec(), spec("b", offset=7)), "overlaps"),
        (lambda: made(spec(), spec(offset=8)), "one name"),
        (lambda: made(spec(), aliases={"a": "a"}), "alias"),
        (lambda: made(spec(), aliases={"b": "c"}), "alias"),
        (lambda: made(spec(), root=DIGEST), "root"),
        (lambda: made(spec(), meta={"lr": 0.1}), "float"),
        (lambda: made(spec(), algo="md5"), "md5"),
        (lambda: made(spec(), kind="delta"), "base"),
        (lambda: made(spec(), kind="delta", base=2, base_root=DIGEST), "base"),
        (lambda: made(spec(), base=1), "no base"),
        (lambda: made(spec(), base_root=DIGEST), "no base"),
        (lambda: made(spec(delta=Stored(4, DIGEST))), "difference"),
        (lambda: Manifest.decode(made(spec()).encode().replace(b'"version":2', b'"version":-2')), "version"),
        (lambda: Manifest.decode(made(spec()).encode().replace(DIGEST.encode(), b"x" * 32)), "digest"),
        (lambda: made(spec("\ud800")).encode(), "surrogates|UTF"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(bad: Any, why: str) -> None:
    with pytest.raises((BadManifest, UnicodeEncodeError), match=why):
        bad()
