"""Weights of the draft model of a server that speculates: in one version with the model's own, or as one apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from transfer_queue.weights.version.sharded import TensorShard
from transfer_queue.weights.version.sources import TensorMeta, WeightSource, parts_of, shards_in

DRAFT = "draft:"  # before the names of a draft's tensors in a version of both; what a version of it alone is called


def with_draft(source: WeightSource, draft: WeightSource) -> WeightSource:
    """Both as one source: a version of it is of the model and of its draft, which receivers take together or not at
    all. `draft` has the names that the draft's own checkpoint has; in a version `DRAFT` stands before them.

    Every rank of a trainer gives its parts of both. A tensor that model and draft share is sent twice.

    Layers that draft and lie in the checkpoint of the model itself (MTP) need none of this: they are in the version
    under the names that they have there.
    """
    return _WithDraft(source, draft)


def carries_draft(names: Iterable[str]) -> bool:
    return any(name.startswith(DRAFT) for name in names)


class _WithDraft:
    def __init__(self, source: WeightSource, draft: WeightSource) -> None:
        self._source, self._draft = source, draft
        self.is_sharded = any(getattr(one, "is_sharded", False) for one in (source, draft))

    def specs(self) -> list[TensorMeta]:
        return [*self._source.specs(), *(one._replace(name=DRAFT + one.name) for one in self._draft.specs())]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._source.tensors()
        for name, tensor in self._draft.tensors():
            yield DRAFT + name, tensor

    def aliases(self) -> dict[str, str]:
        found = {DRAFT + alias: DRAFT + name for alias, name in self._draft.aliases().items()}
        return {**self._source.aliases(), **found}

    def shards(self) -> list[TensorShard]:
        return [*shards_in(self._source), *(one._replace(name=DRAFT + one.name) for one in shards_in(self._draft))]

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from parts_of(self._source)
        for name, tensor in parts_of(self._draft):
            yield DRAFT + name, tensor
