"""Spans of OpenTelemetry, through its API alone: who installs no SDK gets none.

Names of attributes are those of messaging where these fit, and `tq.*` otherwise. There is no convention for a queue of
samples yet: `rl.*` is a proposal (open-telemetry/semantic-conventions-genai, issue 88), and about loops.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

TAG = "traceparent"  # of a row: the span that wrote it, as W3C writes it
MAX_LINKS = 128
MAX_TEXT = 1024
OPERATION_TYPES = {"w": "send", "r": "receive", "u": "settle"}
KINDS = {"w": "PRODUCER", "r": "CONSUMER"}


class Telemetry:
    """The tracer that the program has set up, as OpenTelemetry's API gives it."""

    def __init__(self, api: Any, propagator: Any) -> None:
        self._api = api
        self._tracer = api.get_tracer("transfer_queue")
        self._propagator = propagator

    @classmethod
    def found(cls) -> Telemetry | None:
        """None where the API is not installed."""
        try:
            api = importlib.import_module("opentelemetry.trace")
            propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError:
            return None
        return cls(api, propagation.TraceContextTextMapPropagator())

    def span(self, name: str, action: str) -> Any:
        """A span that begins now, within the current one; it is not made the current one."""
        return self._tracer.start_span(name, kind=self._api.SpanKind[KINDS.get(action, "CLIENT")])

    def parent_of(self, span: Any) -> str:
        """What names the span in a tag; "" where nobody records it."""
        if not span.is_recording():
            return ""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._api.set_span_in_context(span))
        return carrier.get(TAG, "")

    def link(self, span: Any, tags: Iterable[Mapping[str, Any]]) -> None:
        """Link the span to those that wrote rows with these tags, `MAX_LINKS` at most. Anybody writes tags: those that
        name no span are ignored."""
        own = self.parent_of(span)
        written = dict.fromkeys(tag[TAG] for tag in tags if type(tag.get(TAG)) is str and tag[TAG] != own)
        for text in list(written)[:MAX_LINKS]:
            found = self._api.get_current_span(self._propagator.extract({TAG: text}, context={})).get_span_context()
            if found.is_valid:
                span.add_link(found)

    def fail(self, span: Any, error: BaseException) -> None:
        """The span ends with this error."""
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(self._api.StatusCode.ERROR, str(error)[:MAX_TEXT])

    def end(self, span: Any, attributes: Mapping[str, Any]) -> None:
        """The span is over, now."""
        span.set_attributes({"messaging.system": "transfer_queue", **attributes})
        span.end()
