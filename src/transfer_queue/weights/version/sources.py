"""Where weights come from: a module, a state dict, or a folder of safetensors files."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.parameter import is_lazy

from transfer_queue.errors import InvalidInput, UnknownTensor, UnsupportedValue
from transfer_queue.weights.version.boxes import whole
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.weights.version.sharded import Held, TensorShard, held_of, is_sharded, local_of

SHARDED = "have every rank send its own (tcp, with `rank`, `world` and `meet`), or give full_tensor()"
LAZY = "has no shape yet, its module is lazy: call that once before"
EXTRA_STATE = "_extra_state"  # what torch's `Module.get_extra_state` gives; not weights
COMPILED = "_orig_mod"  # what torch.compile calls the module within
Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
INDEX = "model.safetensors.index.json"
_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "C64": torch.complex64,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    _SAFETENSORS["F8_E8M0"] = torch.float8_e8m0fnu


class TensorMeta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Named tensors in an order that is the same every time. The weights must not change while they are read.

    Every method is called in the thread that sends (`send_weights`, `pack`), so its `no_grad`, its device and its
    current stream hold. What `tensors` gives may be the result of work that is still queued on that stream.
    """

    def specs(self) -> list[TensorMeta]:
        """What `tensors` gives, without loading it."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Contiguous tensors, one at a time, on any device. Each stays as it is while it is referenced.

        Trainer engines begin this once for each version, and go through it to the end unless the version is given up.
        """

    def aliases(self) -> dict[str, str]:
        """Further names of the tensors (tied weights): alias -> name."""


def check_source(source: object) -> None:
    """Refuse a module or a state dict in the place of a source."""
    if not callable(getattr(source, "specs", None)):
        raise InvalidInput(
            f"source is a {type(source).__qualname__}: give ModuleSource(module), StateDictSource(tensors) or a source "
            "of your own"
        )


def check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise InvalidInput(f"a torch.nn.Module is expected, got a {type(module).__qualname__}")


@runtime_checkable
class ShardSource(WeightSource, Protocol):
    """A source that gives what this rank holds, where it may be one of several."""

    def shards(self) -> list[TensorShard]:
        """What `parts` gives, without loading it."""

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`, but each one just a box of the tensor called so; a name may come several times."""


class StateDictSource:
    """The tensors of a mapping, in its order. Those that share all their memory are given once, under their first name.

    `rename` says what they are to be called (see `new_names`). Of DTensors (FSDP2, HSDP, tensor parallelism) it gives
    the parts that are here (`shards`, `parts`), and no tensors (`is_sharded`). Raises `UnsupportedValue` for what is no
    dense tensor with memory: a quantized, sparse or meta one, or a DTensor of summands.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, rename: Rename | None = None) -> None:
        if isinstance(tensors, torch.nn.Module):
            raise InvalidInput("a mapping of tensors is expected, got a module: give ModuleSource(module)")
        if not callable(getattr(tensors, "items", None)):
            text = f"a mapping of tensors is expected, got a {type(tensors).__name__}"
            raise InvalidInput(f"{text}: give dict(..) of pairs of names and tensors")
        for name, tensor in tensors.items():
            check_plain(name, local_of(tensor) if is_sharded(tensor) else tensor)
        self._called = called = new_names(list(tensors), rename)
        tensors = {called[name]: tensor for name, tensor in tensors.items()}
        self._aliases = ties(tensors)
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in self._aliases}
        self.is_sharded = any(map(is_sharded, self._tensors.values()))
        if self.is_sharded:
            self.shards()  # raises for what cannot be given

    @functools.cached_property
    def _held(self) -> list[Held]:
        return [one for name, tensor in self._tensors.items() for one in held_of(name, tensor)]

    def specs(self) -> list[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            if is_sharded(tensor):
                raise UnsupportedValue(f"only a part of {name!r} is here, it is a DTensor: {SHARDED}")
            yield name, tensor.detach().resolve_conj().resolve_neg().contiguous()

    def shards(self) -> list[TensorShard]:
        return [held.shard for held in self._held]

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shard, local in self._held:
            tensor = self._tensors[shard.name]
            here = local_of(tensor) if is_sharded(tensor) else tensor.detach()
            part = here[local].reshape(shard.box.lengths)  # another one where the whole tensor has no elements
            yield shard.name, part.resolve_conj().resolve_neg().contiguous()

    def aliases(self) -> dict[str, str]:
        return dict(self._aliases)


class ModuleSource(StateDictSource):
    """The parameters and persistent buffers that a module has when they are read, also those that replaced others.

    What torch.compile and DistributedDataParallel put before names, anywhere in the module, is left out (see
    `named_weights`); `rename` is asked for what remains, once. Names, shapes and ties stay what they were at first:
    reading raises `InvalidInput` when the module has others.
    """

    def __init__(self, module: torch.nn.Module, *, rename: Rename | None = None) -> None:
        check_module(module)
        self._module = module
        super().__init__(named_weights(module), rename=rename)
        _ = self._first_shapes  # now: those of a tensor may change

    @functools.cached_property
    def _first_shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def specs(self) -> list[TensorMeta]:
        self._look_again()
        return super().specs()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._look_again()
        return super().tensors()

    def shards(self) -> list[TensorShard]:
        self._look_again()
        return super().shards()

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._look_again()
        return super().parts()

    def _look_again(self) -> None:
        """A forward pass that assigns a buffer, `.to()`, and `load_state_dict(assign=True)` replace tensors."""
        found = named_weights(self._module)
        if found.keys() != self._called.keys():
            other = min(found.keys() ^ self._called.keys())
            raise InvalidInput(f"the module {'got' if other in found else 'lost'} {other!r} since its source was made")
        now = {self._called[name]: tensor for name, tensor in found.items()}
        replaced = [name for name, before in self._tensors.items() if now[name] is not before]
        for name in replaced:
            check_plain(name, local_of(now[name]) if is_sharded(now[name]) else now[name])
        for name, shape in self._first_shapes.items():
            if now[name].shape != shape:
                text = f"{name!r} is {list(now[name].shape)}, and was {list(shape)}"
                raise InvalidInput(f"{text} when the module's source was made")
        for alias, name in self._aliases.items():
            if not ties({name: now[name], alias: now[alias]}):
                raise InvalidInput(f"{alias!r} was {name!r} when the module's source was made, and is not any more")
        if replaced:
            self._tensors = {name: now[name] for name in self._tensors}
            self.__dict__.pop("_held", None)


class Once:
    """The tensors of a source, read when made, for those who need them several times. Holds them."""

    def __init__(self, source: WeightSource) -> None:
        self._specs = source.specs()
        self._aliases = source.aliases()
        self._tensors = list(source.tensors())

    def specs(self) -> list[TensorMeta]:
        return list(self._specs)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors

    def aliases(self) -> dict[str, str]:
        return dict(self._aliases)


class SafetensorsSource:
    """The tensors of a folder: those its index names, or its only *.safetensors file. Mapped, never all in memory.

    Another checkpoint may take the place of the one before: the folder is looked at whenever tensors are read. Names,
    dtypes and shapes stay what they were at first: reading raises `InvalidInput` when the folder has others, or cannot
    be read. Its files are to be replaced, not written to: of a mapped one that is cut short the system ends the reader.
    `rename` says what tensors are to be called (see `new_names`)."""

    def __init__(self, folder: str | Path, *, rename: Rename | None = None) -> None:
        self._folder = Path(folder)
        with contextlib.ExitStack() as files:
            self._found = {name: meta for name, (meta, _) in _opened(self._folder, files).items()}
        self._called = new_names(list(self._found), rename)

    def specs(self) -> list[TensorMeta]:
        return [meta._replace(name=self._called[name]) for name, meta in self._found.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with contextlib.ExitStack() as files:
            now = _opened(self._folder, files)
            if now.keys() != self._found.keys():
                other = min(now.keys() ^ self._found.keys())
                text = f"{self._folder} {'got' if other in now else 'lost'} {other!r}"
                raise InvalidInput(f"{text} since its source was made")
            for name, before in self._found.items():
                meta = now[name][0]
                if meta != before:
                    text = f"{name!r} is {meta.dtype} {list(meta.shape)} in {self._folder}, and was {before.dtype}"
                    raise InvalidInput(f"{text} {list(before.shape)} when its source was made")
            for name, called in self._called.items():
                yield called, now[name][1].get_tensor(name)

    def aliases(self) -> dict[str, str]:
        return {}


def _opened(folder: Path, files: contextlib.ExitStack) -> dict[str, tuple[TensorMeta, Any]]:
    """Each tensor of a folder, and the file that has it, which is open until `files` ends, whatever takes its place."""
    found = {}
    for file, wanted in sorted(_shards(folder).items()):
        path = folder / file
        try:
            opened = files.enter_context(safe_open(path, framework="pt"))
            names = sorted(opened.keys())
            if wanted is not None and not wanted <= set(names):
                raise InvalidInput(f"{path} lacks {sorted(wanted - set(names))[:3]}, which the index names")
            for name in names if wanted is None else sorted(wanted):
                part = opened.get_slice(name)
                found[name] = TensorMeta(name, _dtype(name, part.get_dtype()), tuple(part.get_shape())), opened
        except (SafetensorError, OSError) as error:
            raise InvalidInput(f"{path}: {error}") from None
    return found


def shards_of(specs: Iterable[TensorMeta]) -> list[TensorShard]:
    """Of whole tensors."""
    return [TensorShard(name, dtype, shape, whole(shape)) for name, dtype, shape in specs]


def table_of(source: WeightSource) -> ShardTable:
    """What it gives here (`parts_of`)."""
    return ShardTable.of(shards_in(source))


def shards_in(source: WeightSource) -> list[TensorShard]:
    return source.shards() if isinstance(source, ShardSource) else shards_of(source.specs())


def parts_of(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    return source.parts() if isinstance(source, ShardSource) else iter(source.tensors())


class ReadThrough(Iterator[tuple[str, torch.Tensor]]):
    """What a source gives, which is gone through to its end also where what is done with it fails within the context:
    a source may have all ranks of a trainer gather each tensor, and the others would wait for this one. Where the
    source itself fails nothing more is asked of it."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._is_giving = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        self._is_giving = True
        found = next(self._tensors)
        self._is_giving = False
        return found

    def __enter__(self) -> ReadThrough:
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        if kind is not None and not self._is_giving:
            with torch.no_grad():
                for _ in self._tensors:
                    pass


def named_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; tied ones under each of their names. They are the module's own.

    Names are those of the module within: `_orig_mod.` (torch.compile) and, where the module is a
    DistributedDataParallel or DataParallel, `module.` are left out wherever they stand. A module that somebody has
    called `module` keeps its name.
    """
    found: dict[str, torch.Tensor] = {}
    _add_state(module, "", found)
    if not any("module." in name or COMPILED in name for name in found):
        return found
    wrapped = {
        f"{path}.module" if path else "module" for path, part in module.named_modules() if isinstance(part, _PARALLEL)
    }
    called = {name: _within(name, wrapped) for name in found}
    if len(set(called.values())) < len(called):
        return found
    return {called[name]: tensor for name, tensor in found.items()}


def _add_state(module: torch.nn.Module, prefix: str, found: dict[str, torch.Tensor]) -> None:
    """What `state_dict(keep_vars=True)` gives, in its order, without extra state. It is asked itself where somebody has
    changed what it does; elsewhere it would take most of the time of many small modules."""
    if not _has_plain_state(module):
        state = module.state_dict(prefix=prefix, keep_vars=True)
        found.update((name, tensor) for name, tensor in state.items() if name.rpartition(".")[2] != EXTRA_STATE)
        return
    left_out = module._non_persistent_buffers_set
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found[prefix + name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in left_out:
            found[prefix + name] = buffer
    for name, part in module._modules.items():
        if part is not None:
            _add_state(part, f"{prefix}{name}.", found)


def _has_plain_state(module: torch.nn.Module) -> bool:
    """Whether nobody has a hand in its own part of a state dict."""
    kind, plain = type(module), torch.nn.Module
    if kind.state_dict is not plain.state_dict or kind._save_to_state_dict is not plain._save_to_state_dict:
        return False
    return not (module._state_dict_hooks or module._state_dict_pre_hooks or "state_dict" in module.__dict__)


def new_names(names: Sequence[str], rename: Rename | None) -> dict[str, str]:
    """What each is to be called. torch.compile's `_orig_mod.` is left out; then `rename` is asked, a function, or a map
    from old names to new ones (those that it lacks stay).

    `UnknownTensor` when the map has a name that is not there, `InvalidInput` when two would be called the same, or a
    name is no text.
    """
    strange = next((name for name in names if not isinstance(name, str)), None)
    if strange is not None:
        raise InvalidInput(f"tensors are called by texts, not by {strange!r}")
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        raise InvalidInput(f"rename is a {type(rename).__name__}: give a map from old names to new ones, or a function")
    plain = {name: _within(name, ()) for name in names}
    if len(set(plain.values())) < len(plain):
        plain = {name: name for name in names}
    if isinstance(rename, Mapping):
        unknown = sorted(set(rename) - set(plain.values()))
        if unknown:
            raise UnknownTensor(f"there is no {unknown[0]!r} to be renamed ({len(unknown)} such names)")
        called = {name: rename.get(now, now) for name, now in plain.items()}
    else:
        called = {name: rename(now) if rename else now for name, now in plain.items()}
    first: dict[str, str] = {}
    for name, new in called.items():
        if not isinstance(new, str) or not new:
            raise InvalidInput(f"{name!r} cannot be called {new!r}")
        if first.setdefault(new, name) != name:
            raise InvalidInput(f"{first[new]!r} and {name!r} would both be called {new!r}")
    return called


def _within(name: str, wrapped: Collection[str]) -> str:
    """The name without what compiled modules and those at the paths `wrapped` have put into it."""
    steps = name.split(".")
    return ".".join(
        step
        for at, step in enumerate(steps)
        if at == len(steps) - 1 or not (step == COMPILED or (wrapped and ".".join(steps[: at + 1]) in wrapped))
    )


def weights_called(module: torch.nn.Module, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """These of `named_weights` (and perhaps others), without going through all of them where that is possible."""
    found: dict[str, torch.Tensor] = {}
    for name in names:
        path, _, last = name.rpartition(".")
        part: torch.nn.Module | None = module
        for step in path.split(".") if path else ():
            part = None if part is None else part._modules.get(step)
        held = None if part is None else part._parameters.get(last, part._buffers.get(last))
        if held is None:
            return named_weights(module)  # a module with a state dict of its own kind
        found[name] = held
    return found


def ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """alias -> first name, for tensors that are the same memory seen the same way. Empty tensors are never tied."""
    first: dict[object, str] = {}
    found = {}
    for name, tensor in tensors.items():
        key: object
        if is_sharded(tensor):  # by identity: an empty part has no address, so ranks would disagree
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
        elif tensor.numel():
            seen = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
            key = (tensor.device, tensor.data_ptr(), seen)
            if first.setdefault(key, name) != name:
                found[name] = first[key]
    return found


def check_plain(name: str, tensor: object) -> None:
    """`UnsupportedValue` for what is no dense tensor with memory."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedValue(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if is_lazy(tensor):
        raise UnsupportedValue(f"{name!r} {LAZY}")
    is_dense = type(tensor.data) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_nested
    if not is_dense or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedValue(f"{name!r} is not a plain dense tensor with memory ({type(tensor.data).__name__})")


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """File name -> names of its tensors (None: all)."""
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    files = [path.name for path in folder.glob("*.safetensors")]
    if len(files) != 1:
        raise InvalidInput(f"{folder} has no {INDEX}, and {len(files)} safetensors files")
    return {files[0]: None}


def _indexed(path: Path) -> dict[str, set[str] | None]:
    found: dict[str, set[str] | None] = {}
    try:
        for name, file in dict(json.loads(path.read_bytes())["weight_map"]).items():
            if not isinstance(file, str) or Path(file).name != file:
                raise InvalidInput(f"{path} leads to {file!r}, outside of its folder")
            wanted = found.setdefault(file, set())
            assert wanted is not None
            wanted.add(name)
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise InvalidInput(f"{path} is not an index of safetensors: {error}") from None
    return found


def _dtype(name: str, spelled: str) -> torch.dtype:
    try:
        return _SAFETENSORS[spelled]
    except KeyError:
        raise UnsupportedValue(f"{name!r} is of safetensors' dtype {spelled}, which is not read") from None
