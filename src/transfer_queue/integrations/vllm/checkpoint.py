"""Which tensors a model's loader takes: by the headers of its checkpoint, or by a rehearsal (`rehearsal`).

vLLM's loaders find out in the middle what does not fit, and some take a part of a larger tensor without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.errors import Incomplete, InvalidInput, ShapeMismatch, UnknownTensor
from transfer_queue.integrations.vllm.rehearsal import Rehearsal
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.plans import Wants
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
        self._rehearsal = _rehearsal(vllm_config, model_config, self.source is not None)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """What was loaded at the start, if that is known."""
        return self.source.tensors() if self.source is not None and self._loaded else None

    def check(self, contents: Contents) -> None:
        """Raise unless this is what the loader takes: `UnknownTensor`, `ShapeMismatch`, `Incomplete`."""
        self._check_head(contents)
        if self._known is not None:
            self._compare(contents, self._known)
        elif self._rehearsal is not None:
            self._rehearsal.wants({name: entry[:2] for name, entry in contents.items()})

    def wanted(self, metas: Metas) -> Wants | None:
        """The boxes of tensors like these that this worker's loader takes; None (all) when that cannot be found out."""
        if self._rehearsal is None:
            return None
        try:
            return self._rehearsal.wants(metas)
        except (UnknownTensor, ShapeMismatch, Incomplete) as error:
            log.warning("which parts of a version are needed here could not be found out, all are fetched: %s", error)
            return None

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


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _rehearsal(vllm_config: Any, model_config: Any, is_known: bool) -> Rehearsal | None:
    """None when the model's twin cannot be made: then only the headers of a checkpoint tell what fits."""
    try:
        return Rehearsal(vllm_config, model_config)
    except Exception as error:  # whatever a model's constructor runs into
        if not is_known:
            raise
        log.warning("this model cannot be made without memory, whole versions are fetched: %r", error)
        return None


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
    except (ImportError, OSError, ValueError) as error:  # a hub that is not there, or not installed
        log.info("no checkpoint of %s on this host, updates will be rehearsed: %r", model_config.model, error)
    return None
