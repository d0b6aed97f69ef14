"""Tensors, arrays and TensorDicts inside Python values: pulled out of the message as aligned buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor, NonTensorData, NonTensorStack, TensorDict

from transfer_queue.codec import images, lists
from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.codec.exact import ints, listed, of_type, pairs
from transfer_queue.codec.layout import MAX_DIMS, checked_offsets
from transfer_queue.codec.nested import Offsets, constructed, flattened, strided, trimmed
from transfer_queue.codec.values import Ext, encode
from transfer_queue.errors import ProtocolError, UnsupportedValue
from transfer_queue.memory.bytes import Bytes

TENSOR, NDARRAY, NPSCALAR, OBJECT_ARRAY, DTYPE, SIZE, TENSORDICT, JAGGED, NP_DTYPE, DEVICE, STACK, IMAGE, STRIDED = (
    range(40, 53)
)

# NumPy parses the text of a dtype as Python: SyntaxError.
DAMAGES = (LookupError, ArithmeticError, RuntimeError, TypeError, ValueError, AttributeError, SyntaxError)

Source = torch.Tensor | np.ndarray[Any, Any]


def nbytes_of(source: Source) -> int:
    return source.nbytes if isinstance(source, np.ndarray) else source.numel() * source.element_size()


class BufferWriter:
    """Collects the buffers of one objects column. A tensor that occurs several times is stored once.

    `refs` lists the buffer number of every occurrence; a message refers to the occurrences of its own row by
    position, so rows can be cut out and joined without touching messages.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.refs: list[int] = []
        self._row_start = 0
        self._known: dict[tuple[Any, ...], int] = {}
        self._images: dict[int, tuple[Any, list[Any], Bytes]] = {}  # by id; copies of a prompt share theirs

    def end_row(self) -> None:
        self._row_start = len(self.refs)

    def lower(self, value: Any, lower: Callable[[Any], Any]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, lower)
        if isinstance(value, np.ndarray):
            return self._ndarray(value, lower)
        if isinstance(value, np.generic) and type(value) is value.dtype.type:
            return _ext(NPSCALAR, _scalar(value, lower))
        if isinstance(value, torch.dtype):
            return Ext(DTYPE, encode(dtype_name(value)))
        if isinstance(value, torch.Size):
            return _ext(SIZE, list(value))
        if isinstance(value, torch.device):
            return Ext(DEVICE, encode(str(value)))
        if isinstance(value, np.dtype):
            return _ext(NP_DTYPE, _describe(value, lower))
        if isinstance(value, NonTensorData):
            return lower(value.data)
        if isinstance(value, NonTensorStack) and value.stack_dim == 0:
            return _ext(STACK, [lower(item) for item in value.tensordicts])
        if type(value) is TensorDict:
            return _ext(TENSORDICT, _taken_apart(value, lower))
        if images.is_image(value):
            return self._image(value)
        return NotImplemented

    def exchange(self, value: Any, lower: Callable[[Any], Any]) -> Any:
        return self._tensor(lists.exchanged(value), lower) if lists.is_exporter(value) else NotImplemented

    def _tensor(self, value: torch.Tensor, lower: Callable[[Any], Any]) -> Any:
        if value.is_nested:
            if value.layout != torch.jagged:
                return _ext(STRIDED, [lower(part) for part in flattened(value.detach())])
            plain: Any = value
            check_jagged(value)
            if plain._lengths is not None:
                plain = _without_holes(value)
            values, offsets = trimmed(plain)
            return _ext(JAGGED, [lower(values), lower(offsets), plain._ragged_idx])
        check_tensor(value)
        value = value.detach()
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg())
        ref = self._ref(value, key if value.numel() and value.device.type == "cpu" else None)
        return _ext(TENSOR, [dtype_name(value.dtype), list(value.shape), ref])

    def _ndarray(self, value: np.ndarray[Any, Any], lower: Callable[[Any], Any]) -> Any:
        if isinstance(value, np.ma.MaskedArray):
            raise UnsupportedValue("a MaskedArray cannot be stored: fill it first")
        if type(value) is not np.ndarray:
            raise UnsupportedValue(f"an array of type {type(value)} cannot be stored with its type kept")
        if value.dtype.hasobject:
            if value.dtype.kind == "T":
                raise UnsupportedValue(f"an array of {value.dtype} cannot be stored: put .astype(object) of it")
            if value.dtype.kind != "O":
                raise UnsupportedValue(f"a structured array with object fields ({value.dtype}) cannot be stored")
            return _ext(OBJECT_ARRAY, [list(value.shape), [lower(item) for item in value.ravel().tolist()]])
        if not value.dtype.itemsize:
            raise UnsupportedValue(f"an array of dtype {value.dtype} has no bytes to store")
        place = value.__array_interface__["data"][0]
        key = (place, value.dtype.str, value.shape, value.strides) if value.size and value.dtype.names is None else None
        return _ext(NDARRAY, [_describe(value.dtype, lower), list(value.shape), self._ref(value, key)])

    def _image(self, value: Any) -> Any:
        held = self._images.get(id(value))
        if held is None:
            held = self._images[id(value)] = (value, *images.taken_apart(value))
        _, description, data = held
        key = (data.__array_interface__["data"][0], data.nbytes, IMAGE) if data.size else None
        return _ext(IMAGE, [description, self._ref(data, key)])

    def _ref(self, source: Source, key: tuple[Any, ...] | None) -> int:
        number = self._known.get(key) if key is not None else None
        if number is None:
            number = len(self.sources)
            self.sources.append(source)
            if key is not None:
                self._known[key] = number
        self.refs.append(number)
        return len(self.refs) - 1 - self._row_start


def _ext(code: int, content: Any) -> Any:
    return Ext(code, encode(content))


def _taken_apart(value: TensorDict, lower: Callable[[Any], Any]) -> list[Any]:
    """Batch size and items of a TensorDict; then, where there are any, its items that are no tensors, as numbers would
    become tensors, and the names of its dimensions."""
    items: list[Any] = []
    others: list[Any] = []
    for key, item in value.items():
        (others if isinstance(item, NonTensorData) else items).append([key, lower(item)])
    names = list(value.names)
    content = [list(value.batch_size), items]
    return [*content, others, names] if others or any(name is not None for name in names) else content


def _without_holes(value: torch.Tensor) -> Any:
    return torch.nested.nested_tensor(list(value.unbind()), layout=torch.jagged)


def check_tensor(value: torch.Tensor) -> None:
    """`UnsupportedValue`, saying what to do, for tensors that are not plain strided memory. Touches no memory."""
    kind = type(value)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        _check_class(value)
    if value.layout is not torch.strided or value.is_quantized:
        what = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.").replace("_", " ")
        how = ".dequantize()" if value.is_quantized else ".to_dense()"
        raise UnsupportedValue(f"a {what} tensor cannot be stored: put {how} of it")
    if value.dim() > MAX_DIMS:
        raise UnsupportedValue(f"a tensor of {value.dim()} dimensions cannot be stored")
    try:
        if value.data_ptr() or not value.numel():
            return
    except RuntimeError:
        raise UnsupportedValue(
            "a tensor inside a torch.func transform has no memory of its own: put it outside"
        ) from None
    if value.device.type == "meta":
        raise UnsupportedValue("a tensor on the meta device has no data to store")
    raise UnsupportedValue("the memory of the tensor was freed (as FSDP does with parameters): gather it first")


def _check_class(value: torch.Tensor) -> None:
    """Subclasses that stand for other tensors have no memory, and reading it would crash the process."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(value, "full_tensor") and hasattr(value, "to_local"):
        how = "put .full_tensor() of it for all of the tensor, .to_local() for this rank's part"
        raise UnsupportedValue(f"a DTensor cannot be stored: {how}")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedValue(f"a {name} has no memory of its own: put a plain tensor of its values")
    if kind is not MemoryMappedTensor and getattr(value, "__dict__", None):  # its attributes say where it lies
        names = sorted(vars(value))[:4]
        raise UnsupportedValue(f"a {name} with attributes {names} would lose them: put .as_subclass(torch.Tensor)")


def check_jagged(value: Any) -> None:
    """As `check_tensor`, of the parts of a jagged tensor."""
    for part in (value._values, value._offsets, value._lengths):
        if part is not None:
            check_tensor(part)


def _describe(dtype: np.dtype[Any], lower: Callable[[Any], Any]) -> Any:
    if dtype.kind == "T":
        raise UnsupportedValue(f"the dtype {dtype!r} cannot be stored exactly")  # NumPy would write that of objects
    descr = np.lib.format.dtype_to_descr(dtype)
    if dtype.kind == "V":
        again = np.lib.format.descr_to_dtype(descr)
        if again != dtype or again.type is not dtype.type:
            raise UnsupportedValue(f"the dtype {dtype!r} cannot be stored exactly")
    return lower(descr)


def _scalar(value: np.generic, lower: Callable[[Any], Any]) -> list[Any]:
    if isinstance(value, np.str_):  # as text and bytes: their dtype cannot tell zeros at the end from padding
        return ["U", lower(value[:])]
    if isinstance(value, np.bytes_):
        return ["S", bytes(value)]
    if value.dtype.hasobject:
        raise UnsupportedValue(f"a structured value with object fields ({value.dtype}) cannot be stored: put .item()")
    if not value.dtype.itemsize:
        raise UnsupportedValue("a numpy void of no bytes cannot be stored")
    return [_describe(value.dtype, lower), value.tobytes()]


class BufferReader:
    """Rebuilds arrays of one row after the other from the buffers of a column.

    `span(number)` gives the bytes of a buffer: a writable view, or memory of the reader. Every occurrence of a buffer
    in one read shares memory, as it did when it was put.
    """

    def __init__(self, span: Callable[[int], Bytes]) -> None:
        self._span = span
        self._refs: Sequence[int] = []
        self._spans: dict[int, Bytes] = {}
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}

    def fetch(self, numbers: Iterable[int]) -> None:
        """Ask for the bytes of these buffers, all that the next rows refer to."""
        for number in numbers:
            if number not in self._spans:
                self._spans[number] = self._span(number)

    def close(self) -> None:
        """All values are made. Whoever decodes is in a cycle with this, and must not keep the bytes until it is taken
        apart."""
        self._spans, self._tensors = {}, {}
        del self._span

    def begin_row(self, refs: Sequence[int]) -> None:
        self._refs = refs

    def lift(self, code: int, content: Any) -> Any:
        rule = _LIFTS.get(code)
        if rule is None:
            raise ProtocolError(f"unknown extension {code}")
        try:
            return rule(self, content)
        except (ProtocolError, UnsupportedValue):
            raise
        except DAMAGES as error:
            raise ProtocolError(f"a damaged array in a value: {error}") from None

    def _bytes(self, ref: Any) -> Bytes:
        return self._spans[self._refs[of_type(ref, int)]]

    def _tensor(self, content: Any) -> torch.Tensor:
        name, shape, ref = listed(content, 3)
        number = self._refs[of_type(ref, int)]
        shape, name = ints(shape), of_type(name, str)
        if 0 in shape:
            return torch.empty(shape, dtype=torch_dtype(name), device="cpu")
        flat = self._tensors.get((number, name))
        if flat is None:
            flat = torch.from_numpy(self._bytes(ref)).view(torch_dtype(name))
            self._tensors[number, name] = flat
        return flat.view(shape)

    def _ndarray(self, content: Any) -> np.ndarray[Any, Any]:
        descr, shape, ref = listed(content, 3)
        return self._bytes(ref).view(_np_dtype(descr)).reshape(ints(shape))

    def _object_array(self, content: Any) -> np.ndarray[Any, Any]:
        shape, items = listed(content, 2)
        flat = np.empty(len(listed(items)), object)
        for number, item in enumerate(items):
            flat[number] = item
        return flat.reshape(ints(shape))

    def _tensordict(self, content: Any) -> TensorDict:
        if len(listed(content)) == 2:
            content = [*content, [], None]
        batch_size, items, others, names = listed(content, 4)
        found = TensorDict({_key(k): v for k, v in pairs(items)}, batch_size=ints(batch_size), names=_names(names))
        for key, item in pairs(others):
            found.set_non_tensor(_key(key), item)
        return found

    def _jagged(self, content: Any) -> torch.Tensor:
        values, offsets, ragged = listed(content, 3)
        _check_parts(values, offsets)
        if (
            not 1 <= of_type(ragged, int) <= values.dim()
            or offsets.dim() != 1
            or offsets.dtype not in (torch.int32, torch.int64)
        ):
            raise ProtocolError("not the parts of a jagged tensor")
        marks = checked_offsets(offsets.numpy(), values.shape[ragged - 1], "a jagged tensor")
        if marks[0] or marks[-1] != values.shape[ragged - 1]:
            raise ProtocolError("the offsets of a jagged tensor do not cover its values")
        return constructed(values, Offsets.of(marks), ragged)

    def _strided(self, content: Any) -> torch.Tensor:
        values, sizes = listed(content, 2)
        _check_parts(values, sizes)
        if values.dim() != 1 or sizes.dim() != 2 or sizes.dtype != torch.int64 or bool((sizes < 0).any()):
            raise ProtocolError("not the parts of a strided nested tensor")
        lengths = [math.prod(row) for row in sizes.tolist()]  # numbers of any size
        if sum(lengths) != len(values):
            raise ProtocolError("the sizes of a strided nested tensor do not cover its values")
        return strided(values, sizes)

    def _stack(self, content: Any) -> NonTensorStack:
        parts = [item if isinstance(item, NonTensorStack) else NonTensorData(item) for item in listed(content)]
        return NonTensorStack(*parts)


def _check_parts(*parts: Any) -> None:
    for part in parts:
        if of_type(part, torch.Tensor).is_nested:
            raise ProtocolError("a nested tensor inside of another")


def _key(key: Any) -> Any:
    """A key of a TensorDict: a text, or texts."""
    if type(key) in (list, tuple):
        return tuple(of_type(item, str) for item in key)
    return of_type(key, str)


def _names(names: Any) -> list[str | None] | None:
    """The names of the dimensions of a TensorDict."""
    return None if names is None else [of_type(name, str, type(None)) for name in listed(names)]


def _npscalar(content: Any) -> Any:
    descr, data = listed(content, 2)
    if type(descr) is str and descr in ("U", "S"):
        return np.str_(of_type(data, str)) if descr == "U" else np.bytes_(of_type(data, bytes))
    return np.frombuffer(of_type(data, bytes), _np_dtype(descr))[0]


def _np_dtype(descr: Any) -> np.dtype[Any]:
    _check_descr(descr)
    return np.lib.format.descr_to_dtype(descr)


def _check_descr(descr: Any) -> None:
    if type(descr) in (list, tuple):
        for item in descr:
            _check_descr(item)
    else:
        of_type(descr, str, int)


_LIFTS: dict[int, Callable[[BufferReader, Any], Any]] = {
    TENSOR: BufferReader._tensor,
    NDARRAY: BufferReader._ndarray,
    NPSCALAR: lambda reader, content: _npscalar(content),
    OBJECT_ARRAY: BufferReader._object_array,
    DTYPE: lambda reader, content: torch_dtype(of_type(content, str)),
    SIZE: lambda reader, content: torch.Size(ints(content)),
    TENSORDICT: BufferReader._tensordict,
    JAGGED: BufferReader._jagged,
    STACK: BufferReader._stack,
    STRIDED: BufferReader._strided,
    NP_DTYPE: lambda reader, content: _np_dtype(content),
    DEVICE: lambda reader, content: torch.device(of_type(content, str)),
    IMAGE: lambda reader, content: images.put_together(listed(content, 2)[0], reader._bytes(content[1])),
}
