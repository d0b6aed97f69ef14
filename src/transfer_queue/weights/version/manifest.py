"""What a version of the weights consists of, as canonical JSON.

The same manifest is the same bytes everywhere. `root` names the content (every tensor's name, dtype, shape and bytes)
and is the same however the tensors are packed, ordered or tied, as long as `algo` is the same; (`epoch`, `version`) is
what a trainer calls it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.errors import BadManifest, ProtocolError
from transfer_queue.structs import decodable
from transfer_queue.weights.version.boxes import Box, do_tile, whole
from transfer_queue.weights.version.digest import ALGO, DEVICE_ALGO

FORMAT = 1
PIECES = 2  # the format of versions with tensors in pieces; all others are written in the first
MAX_NBYTES = 256 << 20  # of the JSON: two million pieces' worth
ADAPTER_CONFIG = "adapter_config"  # in an adapter's `meta`: its configuration, as JSON text (there may be floats)
MAX_DIMS = 8  # of a tensor in pieces: a piece has two to that power of corners
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Kind: TypeAlias = Literal["full", "delta", "adapter"]
_canonical = msgspec.json.Encoder(order="deterministic")


class Entry(NamedTuple):
    """One tensor of a version's content; `digest` is that of its bytes in memory."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


Contents: TypeAlias = "dict[str, Entry]"


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in the bucket when that is not the tensor itself but its difference to the base (`delta.decode`)."""

    nbytes: Count
    digest: Digest


class TensorPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A box of a tensor (`start`, `lengths`), in C order, where it lies, and the digest of its bytes."""

    start: tuple[Count, ...]
    lengths: tuple[Count, ...]
    nbytes: Count
    digest: Digest
    bucket: Count
    offset: Count

    @property
    def box(self) -> Box:
        return Box(self.start, self.lengths)


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor (`nbytes` and `digest` are those of the whole tensor) and where it lies, or its `pieces` do.

    The digest of one that came in several shards is that of their boxes and digests (`sharded_digest`).
    """

    name: Name
    dtype: str
    shape: tuple[Count, ...]
    nbytes: Count
    digest: Digest
    bucket: Count
    offset: Count
    delta: Stored | None = None
    pieces: tuple[TensorPiece, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def parts(self) -> tuple[BucketPart, ...]:
        """What lies in buckets."""
        if self.pieces is msgspec.UNSET:
            return (BucketPart(self, None, self.bucket, self.offset, *msgspec.structs.astuple(self.stored)),)
        return tuple(BucketPart(self, one, one.bucket, one.offset, one.nbytes, one.digest) for one in self.pieces)

    @property
    def stored(self) -> Stored:
        """Bytes in the bucket and their digest."""
        return self.delta or Stored(self.nbytes, self.digest)

    @property
    def entry(self) -> Entry:
        return Entry(self.dtype, self.shape, self.digest)


class BucketPart(NamedTuple):
    """What lies in one place of a bucket: a tensor, its difference, or a piece of it."""

    spec: TensorSpec
    piece: TensorPiece | None
    bucket: int
    offset: int
    nbytes: int
    digest: str

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def box(self) -> Box:
        return self.piece.box if self.piece is not None else whole(self.spec.shape)


@decodable
class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A version. `BadManifest` when made of parts that do not fit together.

    full: all of it. delta: the tensors that differ from version `base` with root `base_root`; `root` is the result's.
    adapter: tensors of an adapter called `label`, for any weights, or for those with root `base_root`.
    `aliases` are further names of tensors here (tied weights), `buckets` sizes in bytes, `meta` JSON without floats.
    Format 2 is a full version of which some tensors are in pieces; `holders` says which of the trainer's ranks has each
    bucket.
    """

    format: int = FORMAT
    version: Count
    epoch: Name
    kind: Kind
    base: Count | None = None
    base_root: Digest | None = None
    label: str = ""
    algo: str = ALGO
    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str] = {}
    buckets: tuple[Count, ...]
    root: Digest
    meta: dict[str, Any] = {}
    holders: tuple[Count, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        try:
            _check(self)
        except ProtocolError as error:
            raise BadManifest(str(error)) from None

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return sum(self.buckets)

    def contents(self) -> Contents:
        """Every name, aliases too, and what it holds."""
        return expand({spec.name: spec.entry for spec in self.tensors}, self.aliases)

    @functools.cached_property
    def key(self) -> str:
        """Names the manifest: the content, its packing and what it is called."""
        return xxh3_128_hexdigest(self.encode())

    @functools.cached_property
    def by_bucket(self) -> list[list[BucketPart]]:
        """What each bucket has, in the order of the tensors."""
        found: list[list[BucketPart]] = [[] for _ in self.buckets]
        for spec in self.tensors:
            for part in spec.parts:
                found[part.bucket].append(part)
        return found

    def in_bucket(self, index: int) -> list[BucketPart]:
        return self.by_bucket[index]

    def holder(self, bucket: int) -> int:
        """The trainer's rank that has it."""
        return 0 if self.holders is msgspec.UNSET else self.holders[bucket]

    def encode(self) -> bytes:
        """Canonical JSON."""
        try:
            return _canonical.encode(self)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadManifest(f"the manifest is not JSON: {error}") from None

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """The manifest with these bytes; `BadManifest` for any others than `encode` made, and for other formats."""
        if len(data) > MAX_NBYTES:
            raise BadManifest(f"a manifest of {len(data)} bytes, at most {MAX_NBYTES}")
        try:
            found = msgspec.json.decode(data, type=_Head).format
            if found not in (FORMAT, PIECES):
                raise BadManifest(f"manifest format {found}: this release reads {FORMAT} and {PIECES}")
            manifest = msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadManifest(str(error)) from None
        if manifest.encode() != data:
            raise BadManifest("the manifest is not in canonical form")
        return manifest


@decodable
class _Head(msgspec.Struct):
    format: int


def expand(entries: Contents, aliases: Mapping[str, str]) -> Contents:
    """`entries` with the aliases as entries of their own."""
    return {**entries, **{alias: entries[name] for alias, name in aliases.items()}}


def root_of(contents: Contents) -> str:
    """The digest of a content."""
    return xxh3_128_hexdigest(msgspec.json.encode([(name, *contents[name]) for name in sorted(contents)]))


def sharded_digest(shards: Iterable[tuple[Box, str]]) -> str:
    """The digest of a tensor that came in several boxes, each with the digest of its bytes in C order."""
    return xxh3_128_hexdigest(msgspec.json.encode(sorted((*box, digest) for box, digest in shards)))


def _check(m: Manifest) -> None:
    if m.format not in (FORMAT, PIECES) or m.algo not in (ALGO, DEVICE_ALGO):
        raise BadManifest(
            f"format {m.format} with digests {m.algo!r}: this release reads {FORMAT}, {PIECES}, {ALGO}, {DEVICE_ALGO}"
        )
    if m.format == FORMAT:
        if m.holders is not msgspec.UNSET or any(spec.pieces is not msgspec.UNSET for spec in m.tensors):
            raise BadManifest(f"tensors in pieces, in format {FORMAT}")
    elif m.kind != "full" or m.holders is msgspec.UNSET or len(m.holders) != len(m.buckets):
        raise BadManifest(f"format {PIECES} is for full versions, and names the holder of each bucket")
    if m.kind == "delta" and m.algo != ALGO:
        raise BadManifest(f"a delta has digests {ALGO}, not {m.algo}")
    if m.kind == "delta" and (m.base is None or m.base_root is None or m.base >= m.version):
        raise BadManifest(f"a delta to version {m.version} on base {m.base} with root {m.base_root}")
    if m.kind != "delta" and m.base is not None:
        raise BadManifest(f"a version of kind {m.kind} has no base version")
    if m.kind == "full" and m.base_root is not None:
        raise BadManifest("a full version has no base")
    for spec in m.tensors:
        _check_spec(m, spec)
    _check_names(m)
    _check_places(m)
    if m.kind != "delta" and root_of(m.contents()) != m.root:
        raise BadManifest("the root is not that of the tensors")
    _check_meta(m.meta, "meta")


def _check_spec(m: Manifest, spec: TensorSpec) -> None:
    nbytes = math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize
    if spec.nbytes != nbytes:
        raise BadManifest(f"{spec.name!r}: {spec.nbytes} bytes for {spec.dtype} {list(spec.shape)}")
    if spec.delta is not None and m.kind != "delta":
        raise BadManifest(f"{spec.name!r} is stored as a difference, in a version of kind {m.kind}")
    if spec.pieces is not msgspec.UNSET:
        _check_pieces(spec, spec.pieces)


def _check_pieces(spec: TensorSpec, pieces: tuple[TensorPiece, ...]) -> None:
    if not spec.nbytes or spec.bucket or spec.offset:
        raise BadManifest(f"{spec.name!r} is in pieces, and in a place of its own")
    if len(spec.shape) > MAX_DIMS or not do_tile(spec.shape, tuple(piece.box for piece in pieces)):
        raise BadManifest(f"the pieces of {spec.name!r} are not its elements, each of them once")
    itemsize = torch_dtype(spec.dtype).itemsize
    for piece in pieces:
        if piece.nbytes != piece.box.size * itemsize:
            raise BadManifest(f"{spec.name!r} has a piece {list(piece.lengths)} of {piece.nbytes} bytes")


def _check_names(m: Manifest) -> None:
    names = {spec.name for spec in m.tensors}
    if len(names) != len(m.tensors):
        raise BadManifest("two tensors have one name")
    for alias, name in m.aliases.items():
        if alias in names or name not in names:
            raise BadManifest(f"{alias!r} cannot be an alias of {name!r}")


def _check_places(m: Manifest) -> None:
    """Nothing overlaps, and all lies within its bucket. By columns: there may be millions of pieces."""
    specs, places = [], []
    for spec in m.tensors:
        if spec.pieces is msgspec.UNSET:
            specs.append(spec)
            places.append((spec.bucket, spec.offset, spec.stored.nbytes))
        else:
            specs += [spec] * len(spec.pieces)
            places += [(piece.bucket, piece.offset, piece.nbytes) for piece in spec.pieces]
    bucket, offset, nbytes = np.array(places, np.int64).reshape(-1, 3).T
    sizes = np.array(m.buckets, np.int64)
    wrong = np.flatnonzero(bucket >= len(sizes))
    if len(wrong):
        raise BadManifest(f"{specs[wrong[0]].name!r} is in bucket {bucket[wrong[0]]} of {len(sizes)}")
    wrong = np.flatnonzero(offset > sizes[bucket] - nbytes)
    if len(wrong):
        at = wrong[0]
        raise BadManifest(f"bucket {bucket[at]} has {sizes[bucket[at]]} bytes, {specs[at].name!r} ends beyond")
    order = np.lexsort((nbytes, offset, bucket))
    bucket, offset, nbytes = bucket[order], offset[order], nbytes[order]
    wrong = np.flatnonzero((bucket[1:] == bucket[:-1]) & (offset[1:] < offset[:-1] + nbytes[:-1]))
    if len(wrong):
        name = specs[order[wrong[0] + 1]].name
        raise BadManifest(f"{name!r} overlaps another tensor in bucket {bucket[wrong[0]]}")


def _check_meta(value: object, where: str) -> None:
    """Floats are refused: they have many spellings."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        children: Iterator[tuple[object, object]] = iter(value.items())
    elif isinstance(value, list):
        children = iter(enumerate(value))
    elif value is None or isinstance(value, (str, bool)) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return
    else:
        raise BadManifest(f"{where} is a {type(value).__name__} that a manifest cannot hold")
    for key, child in children:
        _check_meta(child, f"{where}[{key!r}]")
