"""The calls of a trainer that bring adapters, and a draft by itself: versions beside those of the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import InvalidInput
from transfer_queue.weights.transport.pending import PendingAdapter, SyncReport
from transfer_queue.weights.version.drafts import DRAFT, carries_draft
from transfer_queue.weights.version.sources import StateDictSource, WeightSource


class AdapterCalls(ABC):
    """Of a trainer engine, whose weights come from `_source`."""

    _source: WeightSource

    def send_adapter(
        self,
        label: str,
        source: WeightSource,
        config: Mapping[str, Any],
        *,
        version: int | None = None,
        for_base: bool = True,
        deadline_s: float,
    ) -> SyncReport:
        """Bring an adapter to every receiver, as `version` of `label` (default: the next number of that label).

        Until all have committed, and when anything fails, the one before serves, as with `send_weights`. `config` is
        JSON, such as PEFT's adapter_config.json. `for_base`: it is for the weights that were sent last, and no others
        (`InvalidInput` when none were); else receivers take it whatever their weights are.
        """
        return self._send_adapter(source, PendingAdapter.of(label, source, config), for_base, version, deadline_s)

    def remove_adapter(self, label: str, *, version: int | None = None, deadline_s: float) -> SyncReport:
        """Have every receiver drop it: a version of it without tensors. Receivers that have none take that too."""
        return self._send_adapter(StateDictSource({}), PendingAdapter.none(label), False, version, deadline_s)

    def send_draft(self, source: WeightSource, *, version: int | None = None, deadline_s: float) -> SyncReport:
        """Bring the weights of the draft model to every receiver, under the names of its own checkpoint, as `version`
        of the draft (default: its next number). The model's own stay.

        All or nothing, as `send_weights`. `InvalidInput` where that brings the draft too (`with_draft`).
        """
        if carries_draft(spec.name for spec in self._source.specs()):
            raise InvalidInput("the draft is in the versions of this trainer: send_weights brings both")
        return self._send_adapter(source, PendingAdapter(DRAFT, None, {}), False, version, deadline_s)

    @abstractmethod
    def _send_adapter(
        self, source: WeightSource, adapter: PendingAdapter, for_base: bool, version: int | None, deadline_s: float
    ) -> SyncReport:
        """Bring this adapter to every receiver, in its turn."""
