"""What a field is: its dtype, the shape of a row, and how its rows are stored. Free of torch."""

from __future__ import annotations

import msgspec

DENSE = "dense"
RAGGED = "ragged"
VARIED = "varied"
OBJECTS = "objects"
NESTED = "nested"
MIXED = "mixed"
INTEGERS = frozenset(f"int{bits}" for bits in (8, 16, 32, 64)) | {"uint8"}
NUMBERS = INTEGERS | {"float16", "float32", "float64", "bfloat16"}


class FieldSchema(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One field of one put, or of all puts to a partition.

    `kind`: "dense" (all rows have `shape`), "ragged" (one dimension differs, -1 in `shape`), "varied" (same rank,
    several dimensions differ, -1 each), "objects" (anything else), "nested" (a TensorDict; `shape` is its batch
    shape beyond the rows), "mixed" (rows of several kinds, ranks or dtypes). `dtype` is torch's name without the
    module, "" for objects, nested and mixed. `weak`: int64 made of Python's ints, which take the dtype of the field's
    other numbers, as they do in one list.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    weak: bool = False

    def conflict(self, other: FieldSchema) -> str | None:
        """Why rows of `other` are not like those of this schema, or None."""
        mine, theirs = self._family(), other._family()
        if mine != theirs:
            return f"field {self.name!r} holds {mine}, the put brings {theirs}"
        if mine == "tensors" and self._dtype_with(other) is None:
            return f"field {self.name!r} holds dtype {self.dtype}, the put brings {other.dtype}"
        if mine == "tensors" and len(self.shape) != len(other.shape):
            return f"field {self.name!r} holds rows of {len(self.shape)} dims, the put brings {len(other.shape)}"
        return None

    def differs_in_dtype(self, other: FieldSchema) -> bool:
        """Whether rows of both are tensors that cannot be one tensor because of their dtypes."""
        tensors = self._family() == other._family() == "tensors"
        return tensors and len(self.shape) == len(other.shape) and self._dtype_with(other) is None

    def takes_whole_numbers(self, other: FieldSchema) -> bool:
        """Whether rows of one are integers and those of the other floats, which may hold them exactly."""
        return len({self.dtype, other.dtype} & INTEGERS) == 1 and {self.dtype, other.dtype} <= NUMBERS

    def merged(self, other: FieldSchema) -> FieldSchema:
        """The schema that covers rows of both."""
        if self == other or (self._family() == other._family() != "tensors"):
            return self
        if self.conflict(other) is not None:
            return FieldSchema(self.name, MIXED, "", ())
        shape = tuple(a if a == b else -1 for a, b in zip(self.shape, other.shape, strict=True))
        kind = (DENSE, RAGGED, VARIED)[min(sum(d == -1 for d in shape), 2)]
        dtype = self._dtype_with(other) or ""
        return FieldSchema(self.name, kind, dtype, shape, self.weak and other.weak)

    def _dtype_with(self, other: FieldSchema) -> str | None:
        """The dtype of rows of both; None when they have none in common."""
        if self.dtype == other.dtype:
            return self.dtype
        if self.weak and other.dtype in NUMBERS:
            return other.dtype
        return self.dtype if other.weak and self.dtype in NUMBERS else None

    def _family(self) -> str:
        families = {OBJECTS: "objects", NESTED: "nested TensorDicts", MIXED: "rows of several kinds"}
        return families.get(self.kind, "tensors")
