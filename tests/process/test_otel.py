"""Operations as spans of OpenTelemetry: within the program's own, and linked to those that wrote the rows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from paths import SOURCES
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.errors import ConfigError, DeadlineExceeded

Spans = Callable[[], list[ReadableSpan]]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """The program's: a process has one provider for all of its life."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter, client: tq.TransferQueueClient) -> Iterator[Spans]:
    """What ended since the last call, while operations are spans."""

    def found() -> list[ReadableSpan]:
        ended = list(exporter.get_finished_spans())
        exporter.clear()
        return ended

    exporter.clear()
    with tq.trace.start(otel=True):
        yield found


def named(span: ReadableSpan) -> str:
    """As a tag names it."""
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def test_a_put_is_a_span_within_the_programs_and_its_rows_name_it(client: tq.TransferQueueClient, spans: Spans) -> None:
    with trace.get_tracer("program").start_as_current_span("rollout"):
        meta = client.put({"x": torch.zeros(2, 3)}, partition_id="train")
    put, rollout = spans()
    assert (put.name, put.kind) == ("put", SpanKind.PRODUCER)
    assert put.parent == rollout.get_span_context()
    assert dict(put.attributes or {}) == {
        "messaging.system": "transfer_queue", "messaging.operation.name": "put", "messaging.operation.type": "send",
        "messaging.destination.name": "train", "messaging.batch.message_count": 2, "tq.nbytes": 64, "tq.waited_s": 0.0,
    }  # fmt: skip
    assert client.get_meta(["x"], 2, "train", task_name="t").custom_meta == [{"traceparent": named(put)}] * 2
    assert len(meta) == 2


def test_the_result_of_a_group_is_a_put_whose_rows_name_it(client: tq.TransferQueueClient, spans: Spans) -> None:
    pool = tq.group_pool("groups", tq.GroupPolicy())
    pool.open("g", 2)
    one, other = pool.claim(2)
    spans()
    pool.finish(one, {"x": torch.zeros(1, 3)})
    pool.finish_batch([other.result()], {"x": torch.zeros(1, 3)})
    puts = spans()
    assert [(put.name, put.kind) for put in puts] == [(name, SpanKind.PRODUCER) for name in ("finish", "finish_batch")]
    batch = pool.select(1)
    assert batch.metadata.custom_meta == [{"traceparent": named(put)} for put in puts]
    assert linked(spans()[0]) == [put.context.span_id for put in puts]


@pytest.mark.parametrize("way", ["get_meta", "take", "stream", "get_data", "by_meta"])
def test_a_get_is_linked_to_the_spans_that_wrote_its_rows(
    client: tq.TransferQueueClient, spans: Spans, way: str
) -> None:
    metas = [tq.kv_put(key, "train", {"x": torch.zeros(3)}) for key in ("a", "b")]
    puts = [one.context.span_id for one in spans()]
    if way == "by_meta":
        for meta in metas:
            tq.kv_batch_get_by_meta(meta)
        assert [linked(one) for one in spans()] == [[number] for number in puts]
        return
    if way == "take":
        client.take("train", ["x"], 2, "t")
    elif way == "stream":
        client.set_partition("train", size=2)
        assert [len(batch) for batch in tq.stream("train", ["x"], task="t", batch_size=2)] == [2]
    else:
        meta = client.get_meta(["x"], 2, "train", task_name="t")
        if way == "get_data":
            spans()
            client.get_data(meta)
    found = [one for one in spans() if one.name == way and one.links]
    assert [linked(one) for one in found] == [puts]
    assert found[0].kind is SpanKind.CONSUMER


def test_awaited_operations_are_spans_within_the_tasks_that_await_them(
    client: tq.TransferQueueClient, spans: Spans
) -> None:
    async def one(key: str) -> None:
        with trace.get_tracer("program").start_as_current_span(key):
            await tq.async_kv_put(key, "train", {"x": torch.zeros(3)})

    async def both() -> None:
        await asyncio.gather(one("a"), one("b"))

    asyncio.run(both())
    found = spans()
    parents = {span.context.span_id: span.name for span in found}
    assert sorted(parents[span.parent.span_id] for span in found if span.name == "kv_put") == ["a", "b"]


def test_tags_of_the_writer_stay_and_are_joined_by_its_span(client: tq.TransferQueueClient, spans: Spans) -> None:
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 3)}, tags=[{"n": 1}, {"traceparent": own}])
    (put,) = spans()
    assert tq.kv_list("p")["p"] == {"a": {"traceparent": named(put), "n": 1}, "b": {"traceparent": own}}
    client.take("p", ["x"], 2, "t")
    assert linked(spans()[-1]) == [put.context.span_id, 0xB7AD6B7169203331]


def test_tags_that_name_no_span_are_ignored(client: tq.TransferQueueClient, spans: Spans) -> None:
    tags: list[dict[str, Any]] = [{"traceparent": wrong} for wrong in ("", "00-1-2-01", 7, "x" * 10_000)]
    tq.kv_batch_put(["a", "b", "c", "d"], "p", {"x": torch.zeros(4, 3)}, tags=tags)
    client.take("p", ["x"], 4, "t")
    assert linked(spans()[-1]) == []


def test_an_operation_that_fails_is_a_span_with_its_error(client: tq.TransferQueueClient, spans: Spans) -> None:
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], 1, "p", task_name="t", timeout_s=0.05)
    (span,) = spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "DeadlineExceeded"
    assert (span.attributes or {})["tq.waited_s"] >= 0.05


def test_rows_of_a_span_that_is_not_recorded_have_no_tag(client: tq.TransferQueueClient, spans: Spans) -> None:
    unsampled = trace.NonRecordingSpan(trace.SpanContext(1, 2, False, trace.TraceFlags(0)))
    with trace.use_span(unsampled):
        client.put({"x": [1]}, partition_id="p")
    assert client.get_meta(["x"], 1, "p", task_name="t").custom_meta == [{}]
    assert [one.name for one in spans()] == ["get_meta"]


def test_after_the_end_nothing_is_a_span(client: tq.TransferQueueClient, spans: Spans) -> None:
    tq.trace.stop()
    client.put({"x": [1]}, partition_id="p")
    assert spans() == []
    assert client.get_meta(["x"], 1, "p", task_name="t").custom_meta == [{}]


def program(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import transfer_queue as tq\n" + textwrap.dedent(body)
    return CHILDREN.run(["-c", code], {"PYTHONPATH": SOURCES, "PATH": "/usr/bin:/bin", **environment})


PUT = 'tq.init(); tq.kv_put("a", "p", {"x": [1]}); print(tq.kv_list("p")); tq.close()'


def test_without_an_sdk_the_program_does_what_it_did() -> None:
    done = program(PUT, TQ_OTEL="1")
    assert (done.stdout, done.stderr) == ("{'p': {'a': {}}}\n", "")


def test_without_the_api_one_warning_says_so() -> None:
    done = program("import sys; sys.modules['opentelemetry.trace'] = None\n" + PUT, TQ_OTEL="1")
    assert done.stdout == "{'p': {'a': {}}}\n"
    assert done.stderr.count("opentelemetry-api is not installed") == 1


def test_a_switch_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_OTEL", "yes")
    with pytest.raises(ConfigError, match="TQ_OTEL"):
        tq.init()


def test_processes_that_are_started_do_the_same(spans: Spans) -> None:
    assert os.environ["TQ_OTEL"] == "1"
