"""Which versions of the weights made which tokens of a sample, for the tags of its row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from transfer_queue.errors import InvalidInput


class Tag(Protocol):
    """`Live.tag` of a receiver (`VersionInfo`)."""

    @property
    def version(self) -> int | None: ...
    @property
    def epoch(self) -> str: ...


class Span(NamedTuple):
    """Tokens from `start` to before `end` were made by `version` of the trainer's run."""

    run_id: str
    version: int
    start: int
    end: int

    @property
    def epoch(self) -> str:
        """The run, by its older name."""
        return self.run_id


class Spans:
    """Filled while a sample, or a batch in step, is generated:

    with receiver.reading() as live:
        ...                      # one token, or a few
        spans.add(live.tag)
    tq.kv_put(key, partition, fields, tag={**spans.tag(), ...})

    `spans` are those of a server that tells them, as vLLM's `WeightVersionSpan(version, start, end)`, of the run
    `run_id` (`epoch`: its older name); their versions have to be numbers.
    """

    def __init__(self, spans: Iterable[Any] = (), run_id: str = "", *, epoch: str = "") -> None:
        self.spans: list[Span] = []
        for span in spans:
            self._append(run_id or epoch, _number(span.version), span.start, span.end)

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def add(self, tag: Tag, tokens: int = 1) -> None:
        """The next `tokens` tokens came from these weights. `InvalidInput` before a version was installed."""
        if tag.version is None:
            raise InvalidInput("the weights have no version yet: commit one before samples are made")
        self._append(tag.epoch, tag.version, self.num_tokens, self.num_tokens + tokens)

    def tag(self, tokens: int | None = None) -> dict[str, Any]:
        """Tags of a row with the first `tokens` tokens (None: all), plain data.

        `weight_epoch` and `weight_version`: the oldest that took part, by which rows are judged. `weight_versions`:
        [[version, start, end], ...]; where there were several runs, `weight_epochs` has that of each. Nothing when no
        tokens were made.
        """
        last = self.num_tokens if tokens is None else tokens
        taken = [span._replace(end=min(span.end, last)) for span in self.spans if span.start < last]
        taken = taken or self.spans[:1]  # an empty response is as old as what would have made it
        if not taken:
            return {}
        runs = [span.run_id for span in taken]
        oldest = min(span.version for span in taken if span.run_id == runs[0])
        found: dict[str, Any] = {
            "weight_epoch": runs[0],
            "weight_version": oldest,
            "weight_versions": [[span.version, span.start, min(span.end, max(last, span.start))] for span in taken],
        }
        return found if len(set(runs)) == 1 else {**found, "weight_epochs": runs}

    def _append(self, run_id: str, version: int, start: int, end: int) -> None:
        if start != self.num_tokens or end < start:
            raise InvalidInput(f"a span from {start} to {end} after {self.num_tokens} tokens")
        before = self.spans[-1] if self.spans else None
        if before is not None and (before.run_id, before.version) == (run_id, version):
            self.spans[-1] = before._replace(end=end)
        else:
            self.spans.append(Span(run_id, version, start, end))


def _number(version: object) -> int:
    try:
        return int(version)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise InvalidInput(f"weight version {version!r} is not a number: ages cannot be told from it") from None
