"""What a field is: its dtype, the shape of a row, and how its rows are stored. Free of torch."""

from __future__ import annotations

import msgspec

DENSE = "dense"
RAGGED = "ragged"
VARIED = "varied"
OBJECTS = "objects"
NESTED = "nested"


class FieldSchema(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One field of one put.

    `kind`: "dense" (all rows have `shape`), "ragged" (one dimension differs, -1 in `shape`), "varied" (same rank,
    several dimensions differ, -1 each), "objects" (anything else), "nested" (a TensorDict; `shape` is its batch
    shape beyond the rows). `dtype` is torch's name without the module, "" for objects and nested.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]

    def conflict(self, other: FieldSchema) -> str | None:
        """Why rows of `other` cannot be stored in a field that has this schema, or None."""
        mine, theirs = self._family(), other._family()
        if mine != theirs:
            return f"field {self.name!r} holds {mine}, the put brings {theirs}"
        if mine == "tensors" and self.dtype != other.dtype:
            return f"field {self.name!r} holds dtype {self.dtype}, the put brings {other.dtype}"
        if mine == "tensors" and len(self.shape) != len(other.shape):
            return f"field {self.name!r} holds rows of {len(self.shape)} dims, the put brings {len(other.shape)}"
        return None

    def merged(self, other: FieldSchema) -> FieldSchema:
        """The schema that covers rows of both; the two must not conflict."""
        if self == other or self._family() != "tensors":
            return self
        shape = tuple(a if a == b else -1 for a, b in zip(self.shape, other.shape, strict=True))
        kind = (DENSE, RAGGED, VARIED)[min(sum(d == -1 for d in shape), 2)]
        return FieldSchema(self.name, kind, self.dtype, shape)

    def _family(self) -> str:
        return {OBJECTS: "objects", NESTED: "nested TensorDicts"}.get(self.kind, "tensors")
