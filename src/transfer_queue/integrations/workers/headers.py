"""The checkpoint that a server's model was loaded from: which tensors there are, by its headers, and their values.

Loaders find out in the middle what does not fit, and some take a part of a larger tensor, or leave out what they do not
know, without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.errors import Incomplete, InvalidInput, ShapeMismatch, UnknownTensor, UnsupportedValue
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.sources import INDEX, SafetensorsSource, TensorMeta

log = logging.getLogger("transfer_queue.weights")
HEAD = "lm_head.weight"  # the name that tied models share with their embeddings
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "embeddings.weight")


class Headers:
    """`source` is None when the checkpoint cannot be read here. `loaded`: the model began with its values. `tied`: the
    model has one tensor for the embeddings and the head."""

    def __init__(self, source: SafetensorsSource | None, *, loaded: bool, tied: bool) -> None:
        self.source = source
        self._known = {meta.name: meta for meta in source.specs()} if source else None
        self._loaded, self._tied = loaded, tied

    def metas(self) -> Metas:
        """Dtypes and shapes in the checkpoint, as far as it can be read here."""
        known = (self._known or {}).values()
        return {meta.name: (dtype_name(meta.dtype), meta.shape) for meta in known}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """What was loaded at the start, if that is known."""
        return self.source.tensors() if self.source is not None and self._loaded else None

    def check(self, contents: Contents) -> None:
        """Raise unless this is what the loader takes, as far as that is known: `UnknownTensor`, `ShapeMismatch`,
        `Incomplete`."""
        self._check_head(contents)
        if self._known is not None:
            self._compare(contents, self._known)

    def _check_head(self, contents: Contents) -> None:
        """A tied head is loaded from the embeddings, whatever its own values are."""
        heads = [name for name in contents if name.endswith(HEAD)]
        if not self._tied or not heads:
            return
        same = {contents[name].digest for name in contents if name.endswith(EMBEDDINGS)}
        if same and any(contents[name].digest not in same for name in heads):
            raise ShapeMismatch(
                f"{heads[0]!r} is not the embeddings, and the model has one tensor for both: tie them at the trainer, "
                "do not send the head, or serve a model whose configuration unties them (tie_word_embeddings)"
            )

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
        missing = [name for name in known if name not in contents and not self._may_lack(name)]
        if missing:
            raise Incomplete(f"the version lacks {len(missing)} tensors of the checkpoint, such as {min(missing)!r}")

    def _may_lack(self, name: str) -> bool:
        """Whether a version is whole without this tensor of the checkpoint."""
        return self._tied and name.endswith(HEAD)


def checkpoint_of(model: str, revision: str | None) -> SafetensorsSource | None:
    """The folder of safetensors with this path, or of this model of the hub, if it is on this host."""
    folder = Path(model)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            found = snapshot_download(
                model,
                revision=revision,
                allow_patterns=["*.safetensors", INDEX],
                local_files_only=True,
            )
            folder = Path(found)
        return SafetensorsSource(folder)
    except (InvalidInput, UnsupportedValue) as error:
        log.info("the headers of the checkpoint %s cannot be read: %s", model, error)
    except (ImportError, OSError, ValueError) as error:  # a hub that is not there, or not installed
        log.info("no checkpoint of %s on this host: %r", model, error)
    return None


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
