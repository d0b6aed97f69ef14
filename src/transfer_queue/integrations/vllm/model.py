"""A model in a vLLM worker as a target, with the draft model beside it where the server speculates.

Loading goes through vLLM's layerwise reload (`reload`), which leaves the model unusable when it fails:
`workers.reloading` goes back then, with both models.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace

from transfer_queue.errors import CommitFailed, NotSupported
from transfer_queue.integrations.vllm.checkpoint import Checkpoint
from transfer_queue.integrations.vllm.draft import DraftModel
from transfer_queue.integrations.vllm.reload import reload
from transfer_queue.integrations.workers.reloading import Agrees, Loading, Named, ReloadTarget, in_layers
from transfer_queue.weights.receive.lazy import outermost
from transfer_queue.weights.receive.targets import Metas, Pause
from transfer_queue.weights.version.drafts import DRAFT
from transfer_queue.weights.version.manifest import Contents, Manifest
from transfer_queue.weights.version.plans import Wants

log = logging.getLogger("transfer_queue.weights")


class LoadedModel(ReloadTarget):
    """`draft`: that of this worker, once it is known. `no_draft`: why there is none; "" where another worker has it.
    `asleep`: vLLM has given up the memory of the weights, which may not be touched."""

    takes_pieces = True
    asleep = False
    draft: DraftModel | None = None
    no_draft = "this server has no draft model that takes weights"
    _checkpoint: Checkpoint

    def __init__(self, model: torch.nn.Module, vllm_config: Any, agree: Agrees) -> None:
        super().__init__(model, Checkpoint(vllm_config, vllm_config.model_config), agree)
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config
        self._is_drafting = False  # the commit has touched the draft

    def find_draft(self, runner: Any) -> None:
        """Look for the draft model of vLLM's model runner."""
        try:
            self.draft = DraftModel.of(runner, self._vllm_config, self._agree, self._model, self._checkpoint)
        except NotSupported as error:
            log.warning("%s", error)
            self.no_draft = str(error)
            return
        if DraftModel.is_elsewhere(runner, self._vllm_config):
            self.no_draft = ""

    def fall_asleep(self, level: int) -> None:
        """Level 1 brings the weights back, 2 does not: then those of the version that is installed are to be loaded
        again, with those of a draft that came alone."""
        self.asleep = True
        if level > 1:
            self.dropped = True
            kept = {label: one for label, one in self.tag.adapters.items() if label != DRAFT}
            self.tag = replace(self.tag, adapters=kept)

    def _check_awake(self) -> None:
        if self.asleep:
            raise CommitFailed("the weights of this server are asleep: wake_up(tags=['weights']), then send them")

    def commit(self, prepared: Loading, tag: Any, timeout_s: float) -> Pause:
        self._check_awake()  # it may have fallen asleep in the update
        return super().commit(prepared, tag, timeout_s)

    def check(self, contents: Contents) -> None:
        """vLLM may move experts between workers with EPLB (`NotSupported`): the loader takes others then than when the
        model was made, by which the version was fetched."""
        if getattr(self._vllm_config.parallel_config, "enable_eplb", False):
            raise NotSupported("this server moves experts between its workers: start it without --enable-eplb")
        self._check_awake()
        own = {name: entry for name, entry in contents.items() if not name.startswith(DRAFT)}
        if len(own) < len(contents) and self.draft is None and self.no_draft:
            raise NotSupported(self.no_draft)
        super().check(own)
        if self.draft is not None:
            self.draft.check_part(contents)
        self._metas = {name: contents[name][:2] for name in in_layers(list(contents))}

    def wanted(self, tensors: Metas) -> Wants | None:
        own = self._checkpoint.wanted(_own(tensors))
        if own is None or self.draft is None:
            return own
        drafts = self.draft.wanted_part(tensors)
        if drafts is None:
            return None
        return {name: _joined(own.get(name, ()), drafts.get(name, ())) for name in {**own, **drafts}}

    def prepare_draft(self, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> Loading | None:
        """Of a version of the draft alone. None where another worker has it."""
        self._check_awake()
        if self.draft is not None:
            self.draft.check(manifest.contents())
            return self.draft.prepare(tensors)
        if self.no_draft:
            raise NotSupported(self.no_draft)
        return None

    def commit_draft(self, prepared: Loading | None) -> None:
        """All workers of this server load it, or go back to the draft before (`CommitFailed`)."""
        self._check_awake()
        self.voted = True
        if self.draft is not None and prepared is not None:
            self.draft.commit(prepared, None, 0.0)
        elif not self._agree(True, 0.0):
            raise CommitFailed("another worker of this server did not load the draft")

    def _load(self, tensors: Named) -> None:
        reload(self._model, tensors, self._vllm_config, self._model_config)

    def load_version(self, version: Loading) -> None:
        self._is_drafting = False
        super().load_version(version._replace(metas=_own(version.metas)))
        part = self._drafts(version)
        if self.draft is not None and part is not None:
            self._is_drafting = True
            self.draft.load_version(part)

    def load_before(self) -> bool:
        return super().load_before() and (self.draft is None or not self._is_drafting or self.draft.load_before())

    def hold(self, version: Loading) -> None:
        super().hold(version._replace(metas=_own(version.metas)))
        part = self._drafts(version)
        if self.draft is not None and part is not None:
            self.draft.hold(part)

    def _drafts(self, version: Loading) -> Loading | None:
        return None if self.draft is None else self.draft.part_of(version)


def _own(metas: Metas) -> Metas:
    """Without what is the draft's by its name."""
    return {name: meta for name, meta in metas.items() if not name.startswith(DRAFT)}


def _joined(some: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    return outermost([*some, *others]) if some and others else some or others
