"""Metrics over HTTP: right values at once, cheap to ask for, nothing open when they are off."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from conftest import until
from prometheus_client.parser import text_string_to_metric_families
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue import config as settings
from transfer_queue.controller import Controller
from transfer_queue.errors import ConfigError, DeadlineExceeded
from transfer_queue.launch import local
from transfer_queue.sampler import SequentialSampler
from transfer_queue.schema import FieldSchema
from transfer_queue.server.metrics.counters import BOUNDS, Histogram, MeteredService
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m

Service = Callable[..., tq.TransferQueueClient]
ON = {"enabled": True}


class Scrape:
    """One answer of the endpoint, parsed."""

    def __init__(self, endpoint: str | None = None) -> None:
        status, self.text = get(endpoint or tq.get_metrics_endpoint() or "", "/metrics")
        assert status == 200
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}

    def value(self, name: str, **labels: str) -> float | None:
        """The sample with exactly these labels."""
        found = [s for f in self.families.values() for s in f.samples if s.name == name and s.labels == labels]
        assert len(found) <= 1
        return found[0].value if found else None

    def labels(self, name: str) -> list[dict[str, str]]:
        return [sample.labels for sample in self.families[name].samples]


def get(endpoint: str, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(endpoint, timeout=10)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(count, 4), "y": torch.ones(count)}, batch_size=[count])


def test_values_are_right_at_once(service: Service) -> None:
    client = service(metrics=ON, backend={"SimpleStorage": {"total_storage_size": 40}})
    client.put(rows(8), partition_id="p")
    client.get_meta(["x"], batch_size=6, partition_id="p", task_name="actor")
    client.get_meta(["x"], batch_size=2, partition_id="q", mode="insert")
    now = Scrape()
    assert now.value("tq_partitions_total") == 2
    assert now.value("tq_partition_samples_total", partition_id="p") == 8
    assert now.value("tq_partition_samples_total", partition_id="q") == 2
    assert now.value("tq_partition_production_progress", partition_id="p", task_name="all") == 1
    assert now.value("tq_partition_production_progress", partition_id="p", task_name="actor") == 1
    assert now.value("tq_partition_production_progress", partition_id="q", task_name="all") == 0
    assert now.value("tq_partition_consumption_progress", partition_id="p", task_name="actor") == 0.75
    assert now.value("tq_storage_capacity_total", storage_unit_id="0") == 40
    assert now.value("tq_storage_active_keys_total", storage_unit_id="0") == 10
    assert now.value("tq_storage_utilization_ratio", storage_unit_id="0") == 0.25
    stats = client.stats()
    assert now.value("tq_arena_used_bytes") == stats["arena_nbytes_used"]
    assert now.value("tq_arena_budget_bytes") == stats["arena_nbytes_budget"]
    assert now.value("tq_sessions") == 1
    client.clear_partition("p")
    after = Scrape()
    assert after.value("tq_partitions_total") == 1
    assert after.labels("tq_partition_samples_total") == [{"partition_id": "q"}]
    assert after.labels("tq_partition_consumption_progress") == []
    uptime = now.value("tq_controller_uptime_seconds"), after.value("tq_controller_uptime_seconds")
    assert 0 < (uptime[0] or 0) < (uptime[1] or 0)
    assert (after.value("tq_controller_memory_rss_bytes") or 0) > 1 << 20


def test_requests_are_counted_by_the_names_of_0_1_11(service: Service) -> None:
    client = service(metrics=ON)
    tq.kv_batch_put(["a", "b", "c"], "p", rows(3))
    tq.kv_put("a", "p", tag={"n": 1})
    tq.kv_batch_get(["a", "b"], "p")
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get(["nobody"], "p")
    tq.kv_list("p")
    tq.kv_clear(["a", "b"], "p")
    client.clear_partition("p")
    now = Scrape()
    expected = {
        ("controller", "NOTIFY_DATA_UPDATE"): (1, 0, 3),
        ("controller", "SET_CUSTOM_META"): (1, 0, 1),
        ("controller", "KV_LIST"): (1, 0, 0),
        ("controller", "CLEAR_META"): (1, 0, 2),
        ("controller", "CLEAR_PARTITION"): (1, 0, 0),
        ("storage", "PUT_DATA"): (1, 0, 3),
        ("storage", "GET_DATA"): (2, 1, 2),
        ("storage", "CLEAR_DATA"): (2, 0, 2),
    }
    for (role, op), counts in expected.items():
        name = f"tq_{role}_request"
        found = tuple(now.value(f"{name}{kind}_total", op_type=op) for kind in ("", "_errors", "_samples"))
        assert found == counts, (role, op)
        assert now.value(f"{name}_duration_seconds_count", op_type=op) == counts[0]
        assert (now.value(f"{name}_duration_seconds_sum", op_type=op) or 0) > 0
    assert now.value("tq_storage_requests_arrived", storage_unit_id="0") == 5
    assert now.value("tq_storage_request_ops", storage_unit_id="0", op_type="GET_DATA") == 2
    p50 = now.value("tq_storage_request_latency_p50", storage_unit_id="0", op_type="GET_DATA")
    p99 = now.value("tq_storage_request_latency_p99", storage_unit_id="0", op_type="GET_DATA")
    assert 0 < (p50 or 0) <= (p99 or 0) < 5


def test_the_buckets_of_0_1_11_are_there_and_finer_ones(service: Service) -> None:
    service(metrics=ON)
    tq.kv_put("a", "p", {"x": 1})
    family = Scrape().families["tq_controller_request_duration_seconds"]
    buckets = [s for s in family.samples if s.name.endswith("_bucket") and s.labels["op_type"] == "NOTIFY_DATA_UPDATE"]
    limits = [float(s.labels["le"]) for s in buckets]
    assert {0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, float("inf")} < set(limits)
    assert limits == sorted(limits)
    assert limits[0] < 0.0001
    counts = [s.value for s in buckets]
    assert counts == sorted(counts)
    assert counts[-1] == 1


def test_bytes_in_and_out(service: Service) -> None:
    client = service(metrics=ON)
    before = Scrape()
    assert before.value("tq_written_bytes_total") == before.value("tq_read_bytes_total") == 0
    large = torch.zeros(64, 4096)
    client.put(TensorDict({"x": large}, batch_size=64), partition_id="p")
    client.put(rows(2), partition_id="p")
    written = Scrape().value("tq_written_bytes_total") or 0
    assert large.nbytes < written < large.nbytes + 4096
    meta = client.get_meta(["x"], batch_size=64, partition_id="p", task_name="t")
    view = client.get_data(meta)["x"]
    now = Scrape()
    assert large.nbytes <= (now.value("tq_read_bytes_total") or 0) <= written
    assert (now.value("tq_pinned_bytes") or 0) >= large.nbytes
    del view


def test_indexes_in_use_are_right_over_rounds(service: Service) -> None:
    client = service(metrics=ON)
    for _ in range(4):
        client.put(rows(10), partition_id="p")
        assert Scrape().value("tq_global_index_allocated_total") == 10
        client.clear_partition("p")
        now = Scrape()
        assert now.value("tq_global_index_allocated_total") == now.value("tq_global_index_reusable_total") == 0


def test_waiting_and_wake_ups(service: Service, child: Callable[[str], Any]) -> None:
    client = service(metrics=ON)
    waiter = child("""
        import transfer_queue as tq
        tq.init()
        print(tq.get_client().get_meta(["x"], 2, "p", task_name="t", timeout_s=20).size)
    """)
    until(lambda: Scrape().value("tq_waiting_requests", role="controller") == 1, "the wait")
    parked = Scrape()
    assert parked.value("tq_parked_requests_total", op_type="GET_META") == 1
    assert parked.value("tq_wakeups_total", op_type="GET_META") == 0
    client.put(rows(2), partition_id="p")
    assert waiter.finish() == "2"
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], batch_size=2, partition_id="p", task_name="t", timeout_s=0.05)
    now = Scrape()
    assert now.value("tq_waiting_requests", role="controller") == 0
    assert now.value("tq_wakeups_total", op_type="GET_META") == 2
    assert now.value("tq_wait_seconds_count", op_type="GET_META") == 2
    assert now.value("tq_controller_request_samples_total", op_type="GET_META") == 2
    assert (now.value("tq_wait_seconds_sum", op_type="GET_META") or 0) > 0.05
    assert (now.value("tq_controller_request_duration_seconds_sum", op_type="GET_META") or 1) < 0.05


def test_a_task_that_waits_for_rows_is_seen_although_others_are_put(
    service: Service, child: Callable[[str], Any]
) -> None:
    client = service(metrics={"enabled": True})
    waiter = child(
        "import transfer_queue as tq; tq.init(); print('in', flush=True)\n"
        "tq.get_client().get_meta(['reward'], 1, 'p', task_name='actor', timeout_s=60)"
    )
    assert waiter.line() == "in"
    waits = {"partition_id": "p", "task_name": "actor"}
    name = "tq_oldest_fetch_wait_seconds"
    until(lambda: (Scrape().value(name, **waits) or 0) > 0, "the wait")  # for a partition that is not there yet
    client.put(rows(2), partition_id="p")
    client.get_meta(["x"], 1, "p", task_name="other")
    now = Scrape()
    assert (now.value(name, **waits) or 0) > 0
    assert now.value(name, partition_id="p", task_name="other") == 0
    tq.kv_put("a", "p", {"reward": torch.tensor(1.0)})
    assert Scrape().value(name, **waits) == 0


def test_a_scrape_of_a_hundred_partitions_is_quick_and_each_family_comes_once(service: Service) -> None:
    client = service(metrics=ON)
    for number in range(100):
        client.put(rows(1000), partition_id=f"p{number}")
        client.get_meta(["x"], batch_size=500, partition_id=f"p{number}", task_name="actor")
    took = []
    for _ in range(5):
        started = time.perf_counter()
        status, text = get(tq.get_metrics_endpoint() or "", "/metrics")
        took.append(time.perf_counter() - started)
        assert status == 200
    assert min(took) < 0.05
    headers = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers))
    now = Scrape()
    assert len(now.labels("tq_partition_samples_total")) == 100
    assert {s.value for s in now.families["tq_partition_consumption_progress"].samples} == {0.5}


def test_names_with_odd_characters(service: Service) -> None:
    client = service(metrics=ON)
    name = 'a "quoted"\\ name\nof two lines: é'
    client.put(rows(1), partition_id=name)
    assert Scrape().value("tq_partition_samples_total", partition_id=name) == 1


def test_disabled_means_no_endpoint_and_no_listener(service: Service) -> None:
    client = service()
    assert tq.get_metrics_endpoint() is None
    server = psutil.Process(client.stats()["pid"])
    assert [c for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN] == []
    tq.close()
    assert tq.get_metrics_endpoint() is None


def test_a_server_without_metrics_does_not_load_their_library(child: Callable[[str], Any]) -> None:
    code = "import sys, transfer_queue.server.process; print('prometheus_client' in sys.modules)"
    assert child(code).finish() == "False"


def test_everybody_learns_the_endpoint_and_it_ends_with_the_service(
    service: Service, child: Callable[[str], Any]
) -> None:
    client = service(metrics=ON)
    endpoint = tq.get_metrics_endpoint()
    assert endpoint is not None
    assert endpoint.startswith("127.0.0.1:")
    code = "import transfer_queue as tq; print(tq.get_metrics_endpoint())"
    assert child(code).finish() == endpoint
    server = psutil.Process(client.stats()["pid"])
    listening = [c.laddr for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [f"{a.ip}:{a.port}" for a in listening] == [endpoint]
    lingering = http.client.HTTPConnection(endpoint)
    lingering.connect()  # and asks nothing
    tq.close()
    lingering.close()
    with pytest.raises(ConnectionRefusedError):
        get(endpoint, "/metrics")


def test_the_first_caller_gets_the_endpoint_in_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    conf = tq.init({"metrics": ON, "enable": True})
    try:
        assert conf.metrics.endpoint == tq.get_metrics_endpoint()
    finally:
        tq.close()
    conf = tq.init()
    try:
        assert conf.metrics.endpoint is None
    finally:
        tq.close()


def test_two_services_on_one_host(service: Service) -> None:
    service(metrics=ON)
    tq.kv_put("a", "mine", {"x": 1})
    conf = settings.server_config(settings.merged({"metrics": ON}), "", 0)
    other = local.start(conf)
    try:
        from transfer_queue.client.session import Session
        from transfer_queue.wire.address import parse_address

        session = Session(parse_address(other.address))
        endpoint = session.config["metrics_endpoint"]
        session.close()
        assert endpoint != tq.get_metrics_endpoint()
        assert Scrape(endpoint).value("tq_partitions_total") == 0
        assert Scrape().value("tq_partitions_total") == 1
    finally:
        other.stop()


def test_a_port_in_use_is_named_promptly(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service(metrics=ON)
    port = int((tq.get_metrics_endpoint() or "").rpartition(":")[2])
    started = time.monotonic()
    with pytest.raises(ConfigError, match=f"metrics.port.*:{port}"):
        local.start(settings.server_config(settings.merged({"metrics": {"enabled": True, "port": port}}), "", 0))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/metrics", "GET", {"Host": "localhost:1"}, 200),
        ("/metrics?name[]=x", "GET", {}, 200),
        ("/metrics", "GET", {"Host": "evil.example"}, 403),
        ("/metrics", "GET", {"Origin": "http://evil.example"}, 403),
        ("/metrics", "POST", {}, 405),
        ("/", "GET", {}, 404),
        ("/../metrics", "GET", {}, 404),
    ],
)
def test_only_scrapers_of_this_host_are_answered(
    metered: str, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    assert get(metered, path, method, headers)[0] == status


@pytest.fixture
def metered(service: Service) -> str:
    service(metrics=ON)
    return tq.get_metrics_endpoint() or ""


@pytest.mark.parametrize("junk", [b"\r\n\r\n", b"\x00" * 100_000, b"GET\r\n\r\n", b"x" * 20_000 + b"\r\n\r\n", b""])
def test_junk_on_the_port_disturbs_nobody(metered: str, junk: bytes) -> None:
    visitors = [http.client.HTTPConnection(metered, timeout=10) for _ in range(40)]
    for visitor in visitors:
        visitor.connect()
        try:
            visitor.sock.sendall(junk)
        except OSError:
            continue  # turned away already
    tq.kv_put("a", "p", {"x": 1})
    for visitor in visitors:
        visitor.close()
    until(lambda: answers(metered), "an answer")
    assert Scrape(metered).value("tq_controller_request_total", op_type="NOTIFY_DATA_UPDATE") == 1


def answers(endpoint: str) -> bool:
    try:
        return get(endpoint, "/metrics")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


@pytest.fixture
def counted() -> Iterator[MeteredService]:
    unit = Unit(1 << 20)
    yield MeteredService(Controller(SequentialSampler(), reserved_rows=0), unit)
    unit.close()


def test_a_defect_counts_as_an_error(counted: MeteredService, monkeypatch: pytest.MonkeyPatch) -> None:
    session = counted.sessions.attach(b"client", local=True)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(counted.controller, "handle", broken)
    with pytest.raises(ZeroDivisionError):
        counted.handle(m.ListPartitions(1), memoryview(b""), session, "ticket", time.monotonic())
    meter = counted.meters("controller")["GET_LIST_PARTITIONS"]
    assert (meter.busy.count, meter.errors) == (1, 1)


def test_a_waiter_that_leaves_is_forgotten(counted: MeteredService) -> None:
    session = counted.sessions.attach(b"client", local=True)
    fetch = m.Fetch(1, "p", ["x"], 1, "t", {}, 10.0, False)
    assert counted.handle(fetch, memoryview(b""), session, "ticket", time.monotonic()) is None
    counted.detach(session, {"ticket"}, 0.0)
    commit = m.Commit(1, "p", 1, None, None, [FieldSchema("x", "dense", "uint8", ())], 0, b"", None, 0.0)
    other = counted.sessions.attach(b"other", local=True)
    assert counted.handle(commit, memoryview(b"a"), other, "later", time.monotonic()) is not None
    meter = counted.meters("controller")["GET_META"]
    assert (meter.parked, meter.waits.count) == (1, 0)
    assert not counted._parked


def test_an_answer_nobody_took_is_forgotten_with_its_session(counted: MeteredService) -> None:
    session = counted.sessions.attach(b"client", local=True)
    fetch = m.Fetch(1, "p", ["x"], 1, "t", {}, 10.0, False)
    counted.handle(fetch, memoryview(b""), session, "ticket", time.monotonic())
    assert counted._parked
    counted.detach(session, set(), 0.0)
    assert not counted._parked


def test_a_message_without_a_name_is_called_as_its_type(counted: MeteredService) -> None:
    session = counted.sessions.attach(b"client", local=True)
    counted.handle(m.GetPartition(1, "p"), memoryview(b""), session, "ticket", time.monotonic())
    assert list(counted.meters("controller")) == ["GET_PARTITION"]


def test_quantiles_lie_in_their_bucket() -> None:
    values = Histogram()
    assert values.quantile(0.99) == 0
    for _ in range(99):
        values.observe(0.002)
    values.observe(0.3)
    assert 0.001 < values.quantile(0.5) <= 0.005
    assert 0.25 < values.quantile(0.999) <= 0.5
    values.observe(60.0)
    assert values.quantile(1.0) == BOUNDS[-1]
    assert values.count == 101
