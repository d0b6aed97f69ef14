"""The draft model of a vLLM worker, and what of a version is its.

A draft with a checkpoint of its own has the names after `DRAFT`. One whose layers lie in the checkpoint of the model
(MTP) is loaded from the same tensors as that: it is in a version that has such layers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch

from transfer_queue.errors import Incomplete, NotSupported, ShapeMismatch, UnknownTensor
from transfer_queue.integrations.vllm.checkpoint import Checkpoint
from transfer_queue.integrations.vllm.rehearsal import Rehearsal
from transfer_queue.integrations.vllm.reload import reload
from transfer_queue.integrations.workers.reloading import Agrees, Loading, Named, ReloadTarget
from transfer_queue.weights.receive.lazy import Supplied
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.version.drafts import DRAFT
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.plans import Wants

log = logging.getLogger("transfer_queue.weights")
INSIDE = (
    "the draft of this server lies in the checkpoint of its model: send its layers with the weights, as named there"
)
QUANTIZED = "it computes with a copy of the model's head that vLLM quantizes (draft_lm_head_quantization)"


class DraftModel(ReloadTarget):
    """As a target it takes versions of the draft alone, under the names of the draft's own checkpoint. `model_for`: the
    model it drafts for, which owns the modules that both have. `inside`: that one's checkpoint, where the draft is
    loaded from the same. When it is a mixture the model's answers come slower, and are not wrong."""

    _checkpoint: Checkpoint

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        model_config: Any,
        agree: Agrees,
        model_for: torch.nn.Module,
        inside: Checkpoint | None,
    ) -> None:
        """`NotSupported` for a model whose twin cannot be made."""
        ties = getattr(getattr(vllm_config, "speculative_config", None), "method", "") == "draft_model"
        if getattr(getattr(vllm_config, "speculative_config", None), "draft_lm_head_quantization", None):
            raise NotSupported(f"the draft of this server takes no weights: {QUANTIZED}")
        super().__init__(model, Checkpoint(vllm_config, model_config, may_tie=ties), agree)
        self._vllm_config, self._model_config = vllm_config, model_config
        self._inside = inside
        if self._checkpoint.rehearsal is None or (inside is not None and inside.rehearsal is None):
            raise NotSupported("the draft of this server cannot be made without memory: it takes no weights")
        self._rehearsal: Rehearsal = self._checkpoint.rehearsal
        self._given = {path: _taker(self._rehearsal.twin, path) for path in _shared(model_for, model)}
        self._rehearsal.given = tuple(f"{path}." for path in self._given)

    @staticmethod
    def of(
        runner: Any, vllm_config: Any, agree: Agrees, model_for: torch.nn.Module, checkpoint: Checkpoint
    ) -> DraftModel | None:
        """That of vLLM's model runner, the first or the second (V2, with a GPU); None where there is none, or it has no
        weights (n-grams). `NotSupported`."""
        settings = getattr(vllm_config, "speculative_config", None)
        model_config = getattr(settings, "draft_model_config", None)
        find = getattr(runner, "get_draft_model", None)
        model = find() if callable(find) else None
        if settings is None or model_config is None or not isinstance(model, torch.nn.Module):
            return None
        drafter = _drafter(runner)
        make = getattr(drafter, "_create_draft_vllm_config", None)
        is_inside = settings.method != "draft_model" and model_config.model == vllm_config.model_config.model
        made = getattr(drafter, "_draft_vllm_config", None) or (make() if callable(make) else vllm_config)
        return DraftModel(model, made, model_config, agree, model_for, checkpoint if is_inside else None)

    @staticmethod
    def is_elsewhere(runner: Any, vllm_config: Any) -> bool:
        """Whether the last worker of the pipeline has the draft, and this one nothing."""
        return getattr(vllm_config, "speculative_config", None) is not None and _drafter(runner) is None

    def check(self, contents: Contents) -> None:
        """A version of the draft alone."""
        if self._inside is not None:
            raise NotSupported(INSIDE)
        if not contents:
            raise NotSupported("a server cannot be without its draft")
        super().check(contents)

    def check_part(self, contents: Contents) -> None:
        """What of a version of both is the draft's: all of it, or nothing. `UnknownTensor`, `ShapeMismatch`,
        `Incomplete`, `NotSupported`."""
        own = {name.removeprefix(DRAFT): entry for name, entry in contents.items() if name.startswith(DRAFT)}
        if own:
            self.check(own)
        if self._inside is None:
            return
        metas = {name: entry[:2] for name, entry in contents.items()}
        if self._layers(metas):
            lacking = self._known_layers - contents.keys()
            if lacking:
                raise Incomplete(f"the version has a part of the draft, and lacks {min(lacking)!r}")
            self._rehearsal.wants(metas)

    def wanted_part(self, metas: Metas) -> Wants | None:
        """The boxes that it takes of a version of both. None (all) when that cannot be found out."""
        part = self._part(metas)
        if not part:
            return None if part is None else {}
        if self._inside is not None:
            return {name: boxes for name, boxes in self._rehearsal.taken(metas).items() if name in part}
        wants = self._checkpoint.wanted(part)
        return None if wants is None else {DRAFT + name: boxes for name, boxes in wants.items()}

    def part_of(self, version: Loading) -> Loading | None:
        """What of a version is the draft's, by the names that its loader has; None where the draft stays as it is."""
        part = self._part(version.metas) or {}

        def those(held: Mapping[str, Supplied]) -> dict[str, Supplied]:
            return {name: held[self._called(name)] for name in part if self._called(name) in held}

        return Loading(those(version.tensors), those(version.copies), part) if part else None

    def prepare(self, staged: Mapping[str, Any]) -> Loading:
        """`staged`: whole tensors. They are lent: what is kept is copied."""
        prepared = super().prepare(staged)
        kept: dict[str, Supplied] = {name: one.cpu().clone() for name, one in staged.items()}
        return prepared._replace(copies=kept)

    def _load(self, tensors: Named) -> None:
        reload(self._model, tensors, self._vllm_config, self._model_config, self._given)

    def hold(self, version: Loading) -> None:
        super().hold(version)
        self.broken = False

    # names

    def _called(self, name: str) -> str:
        """In a version."""
        return name if self._inside is not None else DRAFT + name

    def _part(self, metas: Metas) -> Metas | None:
        """What of these is the draft's, by the names that its loader has. None when that cannot be found out."""
        if self._inside is None:
            return {name.removeprefix(DRAFT): meta for name, meta in metas.items() if name.startswith(DRAFT)}
        try:
            if not self._layers(metas):
                return {}
            return {name: meta for name, meta in metas.items() if self._rehearsal.taken(metas).get(name)}
        except (UnknownTensor, ShapeMismatch) as error:
            log.warning("which parts of a version are the draft's could not be found out: %s", error)
            return None

    def _layers(self, metas: Metas) -> set[str]:
        """Those that the draft's loader takes, and the model's leaves alone."""
        assert self._inside is not None
        left = self._inside.left_alone(metas)
        return {name for name in left if self._rehearsal.taken(metas).get(name)} if left else set()

    @functools.cached_property
    def _known_layers(self) -> set[str]:
        assert self._inside is not None
        with contextlib.suppress(UnknownTensor, ShapeMismatch):
            return self._layers(self._inside.metas())
        return set()


def _drafter(runner: Any) -> Any:
    """What speculates in vLLM's model runner, by the name that it has in the first or in the second; None: nothing."""
    found = getattr(runner, "drafter", None)
    return getattr(runner, "speculator", None) if found is None else found


def _shared(model: torch.nn.Module, draft: torch.nn.Module) -> list[str]:
    """Paths of the draft's modules with weights that are the model's own: vLLM has one of both of them."""
    theirs, found = set(map(id, model.modules())), list[str]()
    for path, module in draft.named_modules(remove_duplicate=False):
        within = path.startswith(tuple(f"{one}." for one in found))
        if id(module) in theirs and not within and any(True for _ in module.parameters()):
            found.append(path)
    return found


def _taker(twin: torch.nn.Module, path: str) -> torch.nn.Module:
    """What takes the values for it: that of the twin, which has no memory."""
    try:
        return twin.get_submodule(path)
    except AttributeError:  # the draft got it from the model, and its loader knows none
        return torch.nn.Module()
