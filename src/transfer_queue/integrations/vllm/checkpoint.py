"""Which tensors a model's loader takes: by the headers of its checkpoint, or by a rehearsal (`rehearsal`)."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

from transfer_queue.errors import Incomplete, ShapeMismatch, UnknownTensor
from transfer_queue.integrations.vllm.rehearsal import Rehearsal
from transfer_queue.integrations.workers.headers import Headers, checkpoint_of
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.plans import Wants

log = logging.getLogger("transfer_queue.weights")


class Checkpoint(Headers):
    """What a model of the server was loaded from, or would be. `may_tie`: its configuration tells if it ties."""

    def __init__(self, vllm_config: Any, model_config: Any, *, may_tie: bool = True) -> None:
        super().__init__(
            checkpoint_of(str(model_config.model), getattr(model_config, "revision", None)),
            loaded=str(getattr(vllm_config.load_config, "load_format", "auto")) != "dummy",
            tied=may_tie and bool(getattr(model_config.hf_config, "tie_word_embeddings", False)),
        )
        self.rehearsal = _rehearsal(vllm_config, model_config, self.source is not None)

    def check(self, contents: Contents) -> None:
        super().check(contents)
        if self._known is None and self.rehearsal is not None:
            self.rehearsal.wants({name: entry[:2] for name, entry in contents.items()})

    def wanted(self, metas: Metas) -> Wants | None:
        """The boxes of tensors like these that this worker's loader takes; None (all) when that cannot be found out."""
        if self.rehearsal is None:
            return None
        try:
            return self.rehearsal.wants(metas)
        except (UnknownTensor, ShapeMismatch, Incomplete) as error:
            log.warning("which parts of a version are needed here could not be found out, all are fetched: %s", error)
            return None

    def left_alone(self, metas: Metas) -> set[str]:
        """Those of tensors like these that the model's loader leaves alone. None of them where there is no rehearsal.
        `UnknownTensor`, `ShapeMismatch`."""
        if self.rehearsal is None:
            return set()
        taken = self.rehearsal.taken(metas)
        return {name for name in metas if not taken.get(name)}

    def _may_lack(self, name: str) -> bool:
        """Also what the loader leaves alone: layers of a draft in the same checkpoint, which not every trainer has."""
        return super()._may_lack(name) or name in self._left_alone

    @functools.cached_property
    def _left_alone(self) -> set[str]:
        with contextlib.suppress(UnknownTensor, ShapeMismatch):
            return self.left_alone(self.metas())
        return set()


def _rehearsal(vllm_config: Any, model_config: Any, is_known: bool) -> Rehearsal | None:
    """None when the model's twin cannot be made: then only the headers of a checkpoint tell what fits."""
    try:
        return Rehearsal(vllm_config, model_config)
    except Exception as error:  # whatever a model's constructor runs into
        if not is_known:
            raise
        log.warning("this model cannot be made without memory, whole versions are fetched: %r", error)
        return None
