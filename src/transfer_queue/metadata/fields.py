"""Field schema: `{field: {dtype, shape, is_nested, is_non_tensor[, per_sample_shapes]}}`.

`per_sample_shapes` holds one tuple per row and exists only for ragged fields; `shape` is one row's shape. A schema is
never changed in place once a meta holds it, so slices of a meta share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from transfer_queue.arguments import items, mapping, text
from transfer_queue.errors import InvalidInput, SchemaConflict
from transfer_queue.metadata.columns import Where, check_length, take
from transfer_queue.metadata.merge import copy_dict

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Schema: TypeAlias = "dict[str, dict[str, Any]]"

_SHAPES = "per_sample_shapes"


def copy_schema(schema: Mapping[str, Mapping[str, Any]]) -> Schema:
    """A copy that may be changed without reaching `schema`."""
    return {name: _copy_spec(spec) for name, spec in schema.items()}


def _copy_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    shapes = spec.get(_SHAPES)
    if shapes is None:
        return copy_dict(spec)
    rest = copy_dict({key: value for key, value in spec.items() if key != _SHAPES})
    return {**rest, _SHAPES: list(shapes)}  # the shapes themselves are tuples: no need to copy 8192 of them deeply


def check_schema(schema: Mapping[str, Mapping[str, Any]], size: int) -> None:
    """InvalidInput unless it is a dict of dicts by name, in which every ragged field has one shape per row."""
    for name, spec in mapping(schema, "field_schema").items():
        what = f"field_schema of {text(name, 'a field of field_schema')!r}"
        if mapping(spec, what).get(_SHAPES) is not None:
            check_length(items(spec[_SHAPES], f"per_sample_shapes in {what}"), size, f"per_sample_shapes in {what}")


def take_schema(schema: Schema, where: Where) -> Schema:
    """The schema of the rows at `where`; `schema` itself when it has no ragged field."""
    if not any(spec.get(_SHAPES) is not None for spec in schema.values()):
        return schema
    return {
        name: spec if spec.get(_SHAPES) is None else {**spec, _SHAPES: take(spec[_SHAPES], where)}
        for name, spec in schema.items()
    }


def row_shapes(spec: dict[str, Any], size: int) -> list[Any]:
    """The shape of each of `size` rows."""
    shapes = spec.get(_SHAPES)
    return [spec.get("shape")] * size if shapes is None else list(shapes)


def check_joinable(schemas: Sequence[Schema]) -> None:
    """Raises:
    InvalidInput: the field names differ.
    SchemaConflict: a field has two dtypes.
    """
    first = schemas[0]
    for position, schema in enumerate(schemas):
        if schema.keys() != first.keys():
            raise InvalidInput(
                f"concat: field_names of chunk {position} differ from chunk 0: {sorted(schema)} against {sorted(first)}"
            )
        for name, spec in schema.items():
            if spec.get("dtype") != first[name].get("dtype"):
                raise SchemaConflict(
                    f"concat: field {name!r} is {spec.get('dtype')} in chunk {position}, "
                    f"{first[name].get('dtype')} in chunk 0 (dtype mismatch)"
                )


def concat_schema(schemas: Sequence[Schema], sizes: Sequence[int]) -> Schema:
    """The schema of all rows: ragged where a chunk is ragged or two chunks differ in shape."""
    if all(schema is schemas[0] for schema in schemas) and take_schema(schemas[0], slice(0)) is schemas[0]:
        return schemas[0]  # chunks of one meta
    return {name: _join([schema.get(name, {}) for schema in schemas], sizes) for name in schemas[0]}


def _join(specs: list[dict[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    dense = {tuple(spec["shape"]) for spec in specs if spec.get("shape") is not None and not spec.get(_SHAPES)}
    nested = any(spec.get("is_nested", False) for spec in specs) or len(dense) > 1
    joined = {
        "dtype": specs[0].get("dtype"),
        "shape": None if nested else specs[0].get("shape"),
        "is_nested": nested,
        "is_non_tensor": specs[0].get("is_non_tensor", False),
    }
    if nested or any(spec.get(_SHAPES) for spec in specs):
        joined[_SHAPES] = list(chain.from_iterable(map(row_shapes, specs, sizes)))
    return joined


def schema_of(batch: TensorDict, size: int) -> Schema:
    """The schema of a batch of `size` > 0 rows. A 1-D column has rows of shape (1,).

    Raises:
        InvalidInput: a field does not have one entry per row.
    """
    import torch

    return {
        name: _tensor_spec(name, value, size) if isinstance(value, torch.Tensor) else _object_spec(name, value, size)
        for name, value in batch.items()
    }


def _object_spec(name: str, value: Any, size: int) -> dict[str, Any]:
    shape = getattr(value, "batch_size", None)  # a broadcast NonTensorData has a batch size, but need not have a length
    check_length(value if not shape else range(shape[0]), size, f"field {name!r}")
    return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


def _tensor_spec(name: str, value: torch.Tensor, size: int) -> dict[str, Any]:
    check_length(range(value.size(0)), size, f"field {name!r}")
    spec = {"dtype": value.dtype, "shape": None, "is_nested": value.is_nested, "is_non_tensor": False}
    if value.is_nested:
        shapes = _nested_shapes(value)
        return {**spec, "shape": _size(shapes[0]), _SHAPES: shapes}
    return {**spec, "shape": value.shape[1:] if value.ndim > 1 else _size((1,))}


def _size(shape: Sequence[int]) -> torch.Size:
    import torch

    return torch.Size(shape)


def _nested_shapes(value: Any) -> list[tuple[int, ...]]:
    """Row shapes from the offsets of a jagged tensor, without making 8192 views."""
    import torch

    ragged: int = getattr(value, "_ragged_idx", 0)
    if value.layout != torch.jagged or ragged < 1:
        return [tuple(row.shape) for row in value.unbind()]
    lengths = value.lengths() if value.lengths() is not None else value.offsets().diff()
    inner: list[Any] = [repeat(extent) for extent in value.values().shape]
    inner[ragged - 1] = lengths.tolist()
    return list(zip(*inner, strict=False))
