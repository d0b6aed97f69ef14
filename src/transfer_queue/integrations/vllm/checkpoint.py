"""Which tensors a model's loader takes: by the headers of its checkpoint, or by a rehearsal without memory.

vLLM's loaders find out in the middle what does not fit, and some take a part of a larger tensor without a word.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.errors import Incomplete, InvalidInput, ShapeMismatch, UnknownTensor
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.sources import INDEX, SafetensorsSource, TensorMeta

log = logging.getLogger("transfer_queue.weights")
HEAD = "lm_head.weight"  # the name that tied models share with their embeddings
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "embeddings.weight")


class Checkpoint:
    """What the server's model was loaded from, or would be. `source` is None when that cannot be read."""

    def __init__(self, vllm_config: Any, model_config: Any) -> None:
        self._vllm_config, self._model_config = vllm_config, model_config
        self.source = _source(model_config)
        self._known = {meta.name: meta for meta in self.source.specs()} if self.source else None
        self._loaded = str(getattr(vllm_config.load_config, "load_format", "auto")) != "dummy"
        self._tied = bool(getattr(model_config.hf_config, "tie_word_embeddings", False))
        self._twin = None if self.source else _twin(vllm_config, model_config)
        self._rehearsed: set[tuple[object, ...]] = set()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """What was loaded at the start, if that is known."""
        return self.source.tensors() if self.source is not None and self._loaded else None

    def check(self, contents: Contents) -> None:
        """Raise unless this is what the loader takes: `UnknownTensor`, `ShapeMismatch`, `Incomplete`."""
        self._check_head(contents)
        if self._known is not None:
            self._compare(contents, self._known)
        else:
            self._rehearse(contents)

    def _check_head(self, contents: Contents) -> None:
        """A tied head is loaded from the embeddings, whatever its own values are."""
        heads = [name for name in contents if name.endswith(HEAD)]
        if not self._tied or not heads:
            return
        same = {contents[name].digest for name in contents if name.endswith(EMBEDDINGS)}
        if same and any(contents[name].digest not in same for name in heads):
            raise ShapeMismatch(f"{heads[0]!r} is not the embeddings, and the model has one tensor for both")

    def _compare(self, contents: Contents, known: dict[str, TensorMeta]) -> None:
        for name, entry in contents.items():
            meta = known.get(name)
            if meta is None:
                if self._tied and name.endswith(HEAD):
                    continue
                raise UnknownTensor(f"the model's checkpoint has no {name!r}")
            given = torch_dtype(entry.dtype)
            alike = given == meta.dtype or (given.is_floating_point and _is_plain(given) and _is_plain(meta.dtype))
            if not alike or entry.shape != meta.shape:
                raise ShapeMismatch(
                    f"{name!r} is {entry.dtype} {list(entry.shape)}, the checkpoint's is {dtype_name(meta.dtype)} "
                    f"{list(meta.shape)}"
                )
        missing = [name for name in known if name not in contents and not (self._tied and name.endswith(HEAD))]
        if missing:
            raise Incomplete(f"the version lacks {len(missing)} tensors of the checkpoint, such as {min(missing)!r}")

    def _rehearse(self, contents: Contents) -> None:
        """Load tensors without memory into a model without memory."""
        assert self._twin is not None
        shown = tuple(sorted((name, entry.dtype, entry.shape) for name, entry in contents.items()))
        if shown in self._rehearsed:
            return
        metas = [
            (name, torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta"))
            for name, entry in contents.items()
        ]
        try:
            loaded = self._twin.load_weights(iter(metas))
        except (KeyError, AttributeError) as error:
            raise UnknownTensor(f"the model's loader does not know {error}") from error
        except ValueError as error:
            kind = UnknownTensor if "no module or parameter" in str(error) else ShapeMismatch
            raise kind(f"the model's loader does not take it: {error}") from error
        except Exception as error:  # loaders raise whatever they run into
            raise ShapeMismatch(f"the model's loader does not take it: {error!r}") from error
        missing = set(dict(self._twin.named_parameters())) - loaded if isinstance(loaded, set) else set()
        if missing:
            raise Incomplete(f"the version leaves {len(missing)} parameters as they were, such as {min(missing)!r}")
        self._rehearsed = {shown}


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _source(model_config: Any) -> SafetensorsSource | None:
    """The folder of safetensors that the configuration names, if it is on this host."""
    folder = Path(str(model_config.model))
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            found = snapshot_download(
                str(model_config.model),
                revision=getattr(model_config, "revision", None),
                allow_patterns=["*.safetensors", INDEX],
                local_files_only=True,
            )
            folder = Path(found)
        return SafetensorsSource(folder)
    except InvalidInput as error:
        log.info("the checkpoint's headers cannot be read, updates will be rehearsed: %s", error)
    except Exception as error:  # noqa: BLE001 a hub that is not there, or not installed
        log.info("no checkpoint of %s on this host, updates will be rehearsed: %r", model_config.model, error)
    return None


def _twin(vllm_config: Any, model_config: Any) -> Any:
    """The same model, with nothing in it."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.copy(vllm_config)  # attention layers enter themselves there by name, once
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(model_config.dtype)
    try:
        with torch.device("meta"):
            return initialize_model(vllm_config=config, model_config=model_config)
    finally:
        torch.set_default_dtype(before)
