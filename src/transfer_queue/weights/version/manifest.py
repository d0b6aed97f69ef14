"""What a version of the weights consists of, as canonical JSON.

The same manifest is the same bytes everywhere. `root` names the content (every tensor's name, dtype, shape and bytes)
and is the same however the tensors are packed, ordered or tied, as long as `algo` is the same; (`epoch`, `version`) is
what a trainer calls it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, overload

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.errors import BadManifest, ProtocolError
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.structs import decodable
from transfer_queue.weights.version.boxes import Box, do_tile, whole
from transfer_queue.weights.version.columns import (
    DIGEST_NBYTES,
    Column,
    bytes_of,
    column_of,
    digest_rows,
    digests_from,
    ends_of,
    numbered,
    order_of,
    spread,
    texts_of,
)
from transfer_queue.weights.version.digest import ALGO, DEVICE_ALGO

FORMAT = 1
PIECES = 2  # of versions with tensors in pieces, each an object: is read, and not written any more
COLUMNS = 3  # of versions with tensors in pieces, in columns
CHANGES = 4  # of differences with tensors in pieces, in columns; all others are written in the first format
FORMATS = (FORMAT, PIECES, COLUMNS, CHANGES)
MAX_NBYTES = 256 << 20  # of the JSON: four million pieces' worth
ADAPTER_CONFIG = "adapter_config"  # in an adapter's `meta`: its configuration, as JSON text (there may be floats)
MAX_TOTAL_NBYTES = 1 << 62
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


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What lies in the bucket when that is not the tensor itself but its difference to the base (`delta.read`)."""

    nbytes: Count
    digest: Digest


class TensorPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
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


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
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
    def stored(self) -> Stored:
        """Bytes in the bucket and their digest."""
        return self.delta or Stored(self.nbytes, self.digest)

    @property
    def entry(self) -> Entry:
        return Entry(self.dtype, self.shape, self.digest)


class PieceColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the pieces of tensors lie, in columns (`columns`); in JSON they are in base64.

    `layouts` are the ways in which tensors are in pieces, boxes that tile them, as tensors first need them. `layout`
    says which one each tensor has; -1: it is whole, and its spec says where. Of all pieces, one tensor's after the
    other's, each in the order of its layout: `bucket`, `offset` (of 8 bytes) and `digests` (of 16).

    Of a difference also what lies there: `stored`, bytes of the difference (8; -1: the piece itself, 0: it is
    unchanged, and not there), and `stored_digests` of these bytes (16).
    """

    layouts: tuple[tuple[Box, ...], ...]
    layout: bytes
    bucket: bytes
    offset: bytes
    digests: bytes
    stored: bytes | msgspec.UnsetType = msgspec.UNSET
    stored_digests: bytes | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def of(tensors: Sequence[TensorSpec]) -> PieceColumns:
        """Of format 1 and 2. `BadManifest` for a bucket that no version has."""
        lists = [() if spec.pieces is msgspec.UNSET else spec.pieces for spec in tensors]
        found, layouts = numbered(tuple(piece.box for piece in pieces) for pieces in lists)
        is_whole = np.array([spec.pieces is msgspec.UNSET for spec in tensors], np.bool_)
        used = [] if is_whole.all() else sorted(set(found[~is_whole].tolist()))
        layout = np.where(is_whole, -1, np.searchsorted(used, found))
        pieces = list(itertools.chain.from_iterable(lists))
        try:
            bucket = bytes_of(np.array([piece.bucket for piece in pieces], np.int64))
        except OverflowError as error:
            raise BadManifest(f"a piece is in a bucket that is not there: {error}") from None
        offset = bytes_of(np.array([piece.offset for piece in pieces], np.int64), 8)
        digests = digests_from(piece.digest for piece in pieces).tobytes()
        return PieceColumns(tuple(layouts[at] for at in used), bytes_of(layout), bucket, offset, digests)


class BucketPart(msgspec.Struct, frozen=True, gc=False):
    """What lies in one place of a bucket: a tensor, or a piece of it (its box), or the difference of one. Then `result`
    is the digest of what that leads to."""

    spec: TensorSpec
    piece: Box | None
    bucket: int
    offset: int
    nbytes: int
    digest: str
    result: str | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def box(self) -> Box:
        return self.piece if self.piece is not None else whole(self.spec.shape)


class PartColumns:
    """All that lies in buckets, in columns: the parts of one tensor after those of the other. `counts` of each tensor,
    `layout` as in `PieceColumns`. Takes pieces that were checked (`_check_layouts`)."""

    def __init__(self, tensors: Sequence[TensorSpec], pieces: PieceColumns) -> None:
        self._tensors, self._layouts = tensors, pieces.layouts
        self.layout: Ints = column_of(pieces.layout).astype(np.int64)
        lengths = np.array([*map(len, pieces.layouts), 1], np.int64)  # the last one is that of whole tensors
        self.counts: Ints = lengths[self.layout]
        self.tensor: Ints = np.repeat(np.arange(len(tensors)), self.counts)
        is_piece = self.layout[self.tensor] >= 0
        whole_ones = [tensors[at] for at in np.flatnonzero(self.layout < 0).tolist()]
        stored = [spec.stored for spec in whole_ones]
        self._box = spread(ends_of(lengths)[0][self.layout], self.counts)  # in all layouts, one after the other
        itemsize = np.array([torch_dtype(spec.dtype).itemsize for spec in tensors], np.int64)
        sizes = np.array([*(box.size for boxes in pieces.layouts for box in boxes), 0], np.int64)
        self.bucket = _merged(is_piece, column_of(pieces.bucket), [spec.bucket for spec in whole_ones])
        self.offset = _merged(is_piece, column_of(pieces.offset, 8), [spec.offset for spec in whole_ones])
        nbytes = (sizes[self._box] * itemsize[self.tensor])[is_piece]
        digests = digest_rows(pieces.digests)
        self.is_unchanged = np.zeros(len(is_piece), np.bool_)  # and not in a bucket
        self._results: dict[int, str] = {}  # of what is stored as a difference
        if pieces.stored is not msgspec.UNSET and pieces.stored_digests is not msgspec.UNSET:
            column = column_of(pieces.stored, 8)
            self.is_unchanged[is_piece] = column == 0
            found = np.flatnonzero(column > 0)
            self._results |= zip(np.flatnonzero(is_piece)[found].tolist(), texts_of(digests[found]), strict=True)
            nbytes = np.where(column < 0, nbytes, column)
            digests = np.where((column > 0)[:, None], digest_rows(pieces.stored_digests), digests)
        self.nbytes = _merged(is_piece, nbytes, [one.nbytes for one in stored])
        self.digests: Bytes = np.empty((len(is_piece), DIGEST_NBYTES), np.uint8)
        self.digests[is_piece], self.digests[~is_piece] = digests, digests_from(one.digest for one in stored)
        for at, spec in zip(np.flatnonzero(~is_piece).tolist(), whole_ones, strict=True):
            if spec.delta is not None:
                self._results[at] = spec.digest

    @property
    def needs_base(self) -> bool:
        """Whether what is here leads to tensors only together with those before."""
        return bool(self._results) or bool(self.is_unchanged.any())

    def unchanged(self) -> Iterator[tuple[TensorSpec, Box]]:
        """The pieces of tensors here that are as they were."""
        boxes = list(itertools.chain.from_iterable(self._layouts))
        for at in np.flatnonzero(self.is_unchanged).tolist():
            yield self._tensors[self.tensor[at]], boxes[self._box[at]]

    def boxes_of(self, tensor: int) -> tuple[Box, ...]:
        layout = int(self.layout[tensor])
        return (whole(self._tensors[tensor].shape),) if layout < 0 else self._layouts[layout]

    def made(self, parts: Ints) -> list[BucketPart]:
        """These, as objects."""
        boxes = [*itertools.chain.from_iterable(self._layouts), None]
        columns = (self._box, self.bucket, self.offset, self.nbytes)
        rows = zip(self.tensor[parts].tolist(), *(one[parts].tolist() for one in columns), strict=True)
        digests, results = texts_of(self.digests[parts]), map(self._results.get, parts.tolist())
        return [
            BucketPart(self._tensors[at], boxes[box], bucket, offset, nbytes, digest, result)
            for (at, box, bucket, offset, nbytes), digest, result in zip(rows, digests, results, strict=True)
        ]


def _merged(is_piece: NDArray[np.bool_], pieces: NDArray[Any], whole_ones: Sequence[int]) -> Ints:
    found = np.empty(len(is_piece), np.int64)
    found[is_piece], found[~is_piece] = pieces, whole_ones
    return found


class BucketParts(Sequence["list[BucketPart]"]):
    """The parts of each bucket, in the order of the tensors; made when they are asked for first."""

    def __init__(self, parts: PartColumns, num_buckets: int) -> None:
        self._parts = parts
        order = order_of(parts.bucket)
        self.order: Ints = order[~parts.is_unchanged[order]]
        self._edges = np.searchsorted(parts.bucket[self.order], np.arange(num_buckets + 1)).tolist()
        self._made: dict[int, list[BucketPart]] = {}

    def __len__(self) -> int:
        return len(self._edges) - 1

    @overload
    def __getitem__(self, index: int) -> list[BucketPart]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[BucketPart]]: ...
    def __getitem__(self, index: Any) -> Any:
        at = range(len(self))[index]
        if isinstance(at, range):
            return [self[one] for one in at]
        if at not in self._made:
            self._made[at] = self._parts.made(self.order[self._edges[at] : self._edges[at + 1]])
        return self._made[at]


@decodable
class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A version. `BadManifest` when made of parts that do not fit together.

    full: all of it. delta: the tensors that differ from version `base` with root `base_root`; `root` is the result's.
    adapter: tensors of an adapter called `label`, for any weights, or for those with root `base_root`.
    `aliases` are further names of tensors here (tied weights), `buckets` sizes in bytes, `meta` JSON without floats.
    Format 3 is a full version of which some tensors are in `pieces`; `holders` says which of the trainer's ranks has
    each bucket. Format 2 is the same, with the pieces in the specs; format 4 is a delta of such versions.
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
    pieces: PieceColumns | msgspec.UnsetType = msgspec.UNSET

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
    def parts(self) -> PartColumns:
        """All that lies in buckets."""
        return PartColumns(self.tensors, PieceColumns.of(self.tensors) if self.pieces is msgspec.UNSET else self.pieces)

    @functools.cached_property
    def by_bucket(self) -> BucketParts:
        """What each bucket has, in the order of the tensors."""
        return BucketParts(self.parts, len(self.buckets))

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
            manifest = msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _unreadable(data, error) from None
        if manifest.encode() != data:
            raise BadManifest("the manifest is not in canonical form")
        return manifest


@decodable
class _Head(msgspec.Struct):
    format: int


def _unreadable(data: bytes, error: Exception) -> BadManifest:
    """Another format is named before anything else that may be wrong."""
    try:
        found = msgspec.json.decode(data, type=_Head).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BadManifest(str(error))
    return BadManifest(str(error) if found in FORMATS else _other_format(found))


def _other_format(found: int) -> str:
    return f"manifest format {found}: this release reads {FORMAT} to {CHANGES}"


def expand(entries: Contents, aliases: Mapping[str, str]) -> Contents:
    """`entries` with the aliases as entries of their own."""
    return {**entries, **{alias: entries[name] for alias, name in aliases.items()}}


OTHER_TRAINER = (
    "another trainer, or one that was started anew, needs a run_id of its own (as it has by default), or goes on with "
    "higher numbers"
)


def not_newer(version: int, run_id: str, installed: int) -> str:
    """What a trainer is told whose version is not above the one of its run that is there."""
    return f"version {version} of run {run_id!r} does not follow {installed}, which came before: {OTHER_TRAINER}"


def root_of(contents: Contents) -> str:
    """The digest of a content."""
    return _root((name, *entry) for name, entry in contents.items())


def root_of_specs(specs: Iterable[TensorSpec], aliases: Mapping[str, str]) -> str:
    """The digest of all that these hold, under all names."""
    rows = [(spec.name, spec.dtype, spec.shape, spec.digest) for spec in specs]
    if aliases:
        by_name = {row[0]: row for row in rows}
        rows += [(alias, *by_name[name][1:]) for alias, name in aliases.items()]
    return _root(rows)


def _root(rows: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    return xxh3_128_hexdigest(msgspec.json.encode(sorted(rows, key=itemgetter(0))))


def sharded_digest(shards: Iterable[tuple[Box, str]]) -> str:
    """The digest of a tensor that came in several boxes, each with the digest of its bytes in C order."""
    return xxh3_128_hexdigest(sharded_json(shards))


def sharded_json(shards: Iterable[tuple[Box, str]]) -> bytes:
    return msgspec.json.encode(sorted((*box, digest) for box, digest in shards))


def _check(m: Manifest) -> None:
    if m.format not in FORMATS:
        raise BadManifest(_other_format(m.format))
    if m.algo not in (ALGO, DEVICE_ALGO):
        raise BadManifest(f"digests {m.algo!r}: this release reads {ALGO} and {DEVICE_ALGO}")
    if (m.pieces is not msgspec.UNSET) != (m.format in (COLUMNS, CHANGES)):
        raise BadManifest(f"pieces in columns are those of format {COLUMNS} and {CHANGES}, this is {m.format}")
    if m.format != PIECES and any(spec.pieces is not msgspec.UNSET for spec in m.tensors):
        raise BadManifest(f"tensors in pieces, in format {m.format}")
    if m.format == FORMAT and m.holders is not msgspec.UNSET:
        raise BadManifest(f"holders of buckets, in format {FORMAT}")
    kind = "delta" if m.format == CHANGES else "full"
    if m.format != FORMAT and (m.kind != kind or m.holders is msgspec.UNSET or len(m.holders) != len(m.buckets)):
        raise BadManifest(f"format {m.format} is for {kind} versions, and names the holder of each bucket")
    _check_kind(m)
    _check_specs(m)
    _check_names(m)
    _check_layouts(m)
    _check_places(m)
    if m.kind != "delta" and root_of_specs(m.tensors, m.aliases) != m.root:
        raise BadManifest("the root is not that of the tensors")
    _check_meta(m.meta, "meta")


def _check_kind(m: Manifest) -> None:
    if m.kind == "delta" and m.algo != ALGO:
        raise BadManifest(f"a delta has digests {ALGO}, not {m.algo}")
    if m.kind == "delta" and (m.base is None or m.base_root is None or m.base >= m.version):
        raise BadManifest(f"a delta to version {m.version} on base {m.base} with root {m.base_root}")
    if m.kind != "delta" and m.base is not None:
        raise BadManifest(f"a version of kind {m.kind} has no base version")
    if m.kind == "full" and m.base_root is not None:
        raise BadManifest("a full version has no base")


def _check_specs(m: Manifest) -> None:
    """Tensors of one kind are looked at once."""
    for dtype, shape, nbytes in {(spec.dtype, spec.shape, spec.nbytes): None for spec in m.tensors}:
        if nbytes != math.prod(shape) * torch_dtype(dtype).itemsize:
            raise BadManifest(f"{nbytes} bytes for {dtype} {list(shape)}")
    for spec in m.tensors:
        if spec.delta is not None and m.kind != "delta":
            raise BadManifest(f"{spec.name!r} is stored as a difference, in a version of kind {m.kind}")
        for piece in spec.pieces or ():
            if piece.nbytes != piece.box.size * torch_dtype(spec.dtype).itemsize:
                raise BadManifest(f"{spec.name!r} has a piece {list(piece.lengths)} of {piece.nbytes} bytes")


def _check_layouts(m: Manifest) -> None:
    """Each layout tiles the tensors that have it, and columns have a row for each piece."""
    pieces = PieceColumns.of(m.tensors) if m.pieces is msgspec.UNSET else m.pieces
    try:
        layout, bucket, offset = column_of(pieces.layout), column_of(pieces.bucket), column_of(pieces.offset, 8)
    except ValueError as error:
        raise BadManifest(f"columns of pieces: {error}") from None
    cut = layout[layout >= 0]
    used = numbered(cut.tolist())[1]
    if len(layout) != len(m.tensors) or (layout < -1).any() or used != list(range(len(pieces.layouts))):
        raise BadManifest(f"{len(pieces.layouts)} layouts are not those of {len(m.tensors)} tensors")
    num = int(np.array([*map(len, pieces.layouts), 0], np.int64)[cut].sum())
    if {len(bucket), len(offset)} != {num} or len(pieces.digests) != num * DIGEST_NBYTES:
        raise BadManifest(f"{num} pieces have {len(bucket)} buckets, {len(offset)} offsets")
    for spec, at in zip(m.tensors, layout.tolist(), strict=True):
        if at >= 0 and (not spec.nbytes or spec.bucket or spec.offset):
            raise BadManifest(f"{spec.name!r} is in pieces, and in a place of its own")
    first = {(spec.shape, at): spec.name for spec, at in zip(m.tensors, layout.tolist(), strict=True) if at >= 0}
    for (shape, at), name in first.items():
        if len(shape) > MAX_DIMS or not do_tile(shape, pieces.layouts[at]):
            raise BadManifest(f"the pieces of {name!r} are not its elements, each of them once")
    if num and min(int(bucket.min()), int(offset.min())) < 0:
        raise BadManifest("a piece is in a place before the first")
    _check_stored(m, pieces, num, bucket, offset)


def _check_stored(m: Manifest, pieces: PieceColumns, num: int, bucket: Column, offset: Column) -> None:
    """Pieces of differences say what of them is stored, others do not."""
    if {pieces.stored is msgspec.UNSET, pieces.stored_digests is msgspec.UNSET} != {m.format != CHANGES}:
        raise BadManifest(f"what is stored of pieces is said in format {CHANGES}, this is {m.format}")
    if pieces.stored is msgspec.UNSET or pieces.stored_digests is msgspec.UNSET:
        return
    if (len(pieces.stored), len(pieces.stored_digests)) != (8 * num, DIGEST_NBYTES * num):
        raise BadManifest(f"{num} pieces, and what is stored of others")
    stored = column_of(pieces.stored, 8)
    if (stored < -1).any() or bucket[stored == 0].any() or offset[stored == 0].any():
        raise BadManifest("a piece that is not there has a place, or fewer bytes than none")
    if digest_rows(pieces.stored_digests)[stored <= 0].any():
        raise BadManifest("a piece that is not stored as a difference has the digest of one")


def _check_names(m: Manifest) -> None:
    names = {spec.name for spec in m.tensors}
    if len(names) != len(m.tensors):
        raise BadManifest("two tensors have one name")
    for alias, name in m.aliases.items():
        if alias in names or name not in names:
            raise BadManifest(f"{alias!r} cannot be an alias of {name!r}")


def _check_places(m: Manifest) -> None:
    """Nothing overlaps, and all lies within its bucket."""
    if sum(m.buckets) > MAX_TOTAL_NBYTES:
        raise BadManifest(f"buckets of {sum(m.buckets)} bytes")
    parts = m.parts
    bucket, offset, nbytes = parts.bucket, parts.offset, parts.nbytes
    sizes = np.array(m.buckets, np.int64)
    wrong = np.flatnonzero((bucket >= len(sizes)) & ~parts.is_unchanged)
    if len(wrong):
        raise BadManifest(f"{_name_at(m, wrong[0])!r} is in bucket {bucket[wrong[0]]} of {len(sizes)}")
    if parts.is_unchanged.all():
        return
    wrong = np.flatnonzero(offset > sizes[bucket] - nbytes)
    if len(wrong):
        at = wrong[0]
        raise BadManifest(f"bucket {bucket[at]} has {sizes[bucket[at]]} bytes, {_name_at(m, at)!r} ends beyond")
    start = ends_of(sizes)[0][bucket] + offset  # as if buckets lay one behind the other
    order = m.by_bucket.order
    order = order[nbytes[order] > 0]
    if (np.diff(start[order]) < 0).any():
        order = order[np.argsort(start[order])]
    start = start[order]
    wrong = np.flatnonzero(start[1:] < (start + nbytes[order])[:-1])
    if len(wrong):
        at = order[wrong[0] + 1]
        raise BadManifest(f"{_name_at(m, at)!r} overlaps another tensor in bucket {bucket[at]}")


def _name_at(m: Manifest, part: Any) -> str:
    return m.tensors[m.parts.tensor[part]].name


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
