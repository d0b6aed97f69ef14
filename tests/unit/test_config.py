"""Settings: the keys and variables of 0.1.11 are there, wrong ones are named, none is dropped in silence."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from paths import ROOT

import transfer_queue as tq
from transfer_queue.config import ConfigWarning, from_env, merged, server_config
from transfer_queue.errors import ConfigError
from transfer_queue.server.settings import MEMORY_SHARE, ServerConfig, default_budget

DEFAULTS_OF_0_1_11: dict[str, Any] = {
    "metrics.enabled": False, "metrics.port": 0,
    "controller.sampler": "SequentialSampler", "controller.polling_mode": False, "controller.zmq_info": None,
    "backend.storage_backend": "SimpleStorage",
    "backend.SimpleStorage.total_storage_size": None, "backend.SimpleStorage.num_data_storage_units": 2,
    "backend.SimpleStorage.required_node_resource": None, "backend.SimpleStorage.zmq_info": None,
    "backend.SimpleStorage.ssd_offload.enabled": False, "backend.SimpleStorage.ssd_offload.path": None,
    "backend.SimpleStorage.ssd_offload.threshold_bytes": 1048576,
    "backend.SimpleStorage.ssd_offload.glibc_mmap_threshold_bytes": 1048576,
    "backend.MooncakeStore.auto_init": True, "backend.MooncakeStore.metadata_server": "localhost:50050",
    "backend.MooncakeStore.master_server_address": "localhost:50051", "backend.MooncakeStore.local_hostname": "",
    "backend.MooncakeStore.protocol": "tcp", "backend.MooncakeStore.global_segment_size": 4 << 30,
    "backend.MooncakeStore.local_buffer_size": 1 << 30, "backend.MooncakeStore.device_name": "",
    "backend.MooncakeStore.hard_pin": None, "backend.MooncakeStore.offload.enabled": False,
    "backend.MooncakeStore.offload.file_storage_path": "/tmp/mooncake_offload",
    "backend.MooncakeStore.offload.local_buffer_size_bytes": 2 << 30, "backend.MooncakeStore.offload.use_uring": False,
    "backend.MooncakeStore.offload.heartbeat_interval_seconds": 2, "backend.MooncakeStore.offload.client_port": 42052,
    "backend.MooncakeStore.offload.eviction_high_watermark_ratio": 0.9,
    "backend.MooncakeStore.offload.eviction_ratio": 0.1, "backend.MooncakeStore.use_gdr": False,
    "backend.MooncakeStore.gdr_staging_buffer_mb": 1024,
    "backend.Yuanrong.auto_init": True, "backend.Yuanrong.worker_port": 31501,
    "backend.Yuanrong.metastore_port": 2379, "backend.Yuanrong.enable_yr_npu_transport": False,
    "backend.Yuanrong.ds_max_workers": 1, "backend.Yuanrong.enable_rdma": False,
    "backend.Yuanrong.ucx_env_vars": {}, "backend.Yuanrong.worker_args": "--shared_memory_size_mb 8192",
}  # fmt: skip
VARIABLES_OF_0_1_11 = [
    "TQ_CONTROLLER_GET_METADATA_TIMEOUT",
    "TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL",
    "TQ_CONTROLLER_ZMQ_MAX_SOCKETS",
    "TQ_PRE_ALLOC_SAMPLE_NUM",
    "TQ_NUM_THREADS",
    "TQ_CLIENT_ZMQ_IO_THREADS",
    "TQ_CLIENT_ZMQ_MAX_SOCKETS",
    "TQ_SOCKET_POOL_SIZE",
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS",
    "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT",
    "TQ_DATA_UPDATE_RESPONSE_TIMEOUT",
    "TQ_STORAGE_HANDSHAKE_TIMEOUT",
    "TQ_STORAGE_HANDSHAKE_RETRY_INTERVAL",
    "TQ_STORAGE_HANDSHAKE_MAX_RETRIES",
    "TQ_STORAGE_POLLER_TIMEOUT",
    "TQ_STORAGE_ZMQ_BACKLOG",
    "TQ_ACCEPT_PROBE_INTERVAL",
    "TQ_LOGGING_LEVEL",
    "TQ_PERF_LOG_FLUSH_INTERVAL",
    "TQ_METRICS_COLLECT_INTERVAL",
    "TQ_METRICS_STORAGE_TIMEOUT",
    "TQ_STORAGE_SLOW_REQUEST_SECONDS",
    "TQ_STORAGE_LARGE_PAYLOAD_MB",
    "TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL",
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_PRE_ALLOC_SAMPLE_NUM", "TQ_NUM_THREADS", "TQ_LOGGING_LEVEL", "TQ_ALLOW_PICKLE"):
        monkeypatch.delenv(name, raising=False)


def started_with(conf: Any = None) -> ServerConfig:
    return server_config(merged(conf), "", 0)


def nested(name: str, value: Any) -> dict[str, Any]:
    first, _, rest = name.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize("name", DEFAULTS_OF_0_1_11)
def test_every_key_of_0_1_11_has_its_default(name: str) -> None:
    found = OmegaConf.select(merged(None), name, default="missing")
    assert (OmegaConf.to_container(found) if isinstance(found, DictConfig) else found) == DEFAULTS_OF_0_1_11[name]


def test_the_config_of_verl_passes_in_silence() -> None:
    simple = {"total_storage_size": 100_000, "num_data_storage_units": 8}
    conf = {
        "enable": True,
        "metrics": {"enabled": True, "port": 9123},
        "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": simple, "MooncakeStore": {"protocol": "rdma"}},
    }
    assert started_with(conf).metrics_port == 9123
    assert started_with(OmegaConf.create(conf)).max_rows == 100_000


def test_the_config_that_init_returned_passes_again() -> None:
    conf = merged({"metrics": {"enabled": True}})
    conf.metrics.endpoint, conf.address = "127.0.0.1:9", "unix:/nowhere"
    conf.controller.zmq_info = {"ip": "127.0.0.1"}
    started_with(conf)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("metrics.prot", "metrics.port"),
        ("controler", "controller"),
        ("client.timeout", "client.timeout_s"),
        ("backend.SimpleStorage.total_storage_sizes", "backend.SimpleStorage.total_storage_size"),
        ("client.pool_bytes", "client.pool_nbytes"),
    ],
)
def test_an_unknown_key_is_named_with_its_nearest(name: str, nearest: str) -> None:
    with pytest.warns(ConfigWarning, match=rf"^{re.escape(name)} is not .*{re.escape(nearest)}") as seen:
        started_with(nested(name, 1))
    assert len(seen) == 1


def test_an_unknown_section_is_named_once() -> None:
    with pytest.warns(ConfigWarning) as seen:
        started_with({"monitoring": {"port": 1, "deeper": {"x": 2}}})
    assert [str(one.message).split()[0] for one in seen] == ["monitoring"]


def test_free_sections_take_any_key() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        started_with({"backend": {"Yuanrong": {"ucx_env_vars": {"UCX_TLS": "rc_x"}}}})


def test_a_variable_that_is_probably_a_slip_is_named_with_the_one_that_was_meant(
    service: Callable[..., tq.TransferQueueClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TQ_ADRESS", "TQ_HISTORY_SEED", "TQDM_DISABLE", "TQ_STORAGE_ZMQ_BACKLOG", "TQ_TRACES"):
        monkeypatch.setenv(name, "1")
    with pytest.warns(ConfigWarning) as seen:
        service()
    assert [re.findall("TQ_[A-Z]+", str(one.message)) for one in seen] == [
        ["TQ_ADRESS", "TQ_ADDRESS"], ["TQ_TRACES", "TQ_TRACE"],
    ]  # fmt: skip


def test_init_warns_and_starts(service: Callable[..., tq.TransferQueueClient]) -> None:
    with pytest.warns(ConfigWarning, match=r"server\.hots .* server\.host"):
        client = service(server={"hots": "0.0.0.0"})
    assert client.stats()["partitions"] == 0


def test_disk_offload_of_the_other_package_is_spilling(tmp_path: Path) -> None:
    offload = {"enabled": True, "path": str(tmp_path)}
    config = started_with({"backend": {"SimpleStorage": {"ssd_offload": offload, "spill_nbytes": 1 << 20}}})
    assert (config.spill_dir, config.spill_nbytes) == (str(tmp_path), 1 << 20)
    assert started_with({"backend": {"SimpleStorage": {"spill_dir": tmp_path}}}).spill_dir == str(tmp_path)
    assert started_with({}).spill_dir is None
    urls = {"server": {"journal_dir": "s3://bucket/tq"}}, {"backend": {"SimpleStorage": {"spill_dir": "file:///x"}}}
    for place in urls:
        with pytest.raises(ConfigError, match="is a URL, expected a directory of this host"):
            started_with(place)
    for wrong in ({"enabled": True}, {"enabled": "yes", "path": str(tmp_path)}):
        with pytest.raises(ConfigError, match="ssd_offload"):
            started_with({"backend": {"SimpleStorage": {"ssd_offload": wrong}}})
    with pytest.raises(ConfigError, match="spill_dir"):
        started_with({"backend": {"SimpleStorage": {"ssd_offload": offload, "spill_dir": "/elsewhere"}}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metrics", True), ("metrics", None), ("backend", "SimpleStorage"), ("client", [1]),
        ("backend.SimpleStorage", 3), ("backend.SimpleStorage.ssd_offload", None),
        ("metrics.enabled", "yes"), ("metrics.enabled", 1), ("metrics.port", -1),
        ("metrics.port", 65536), ("metrics.port", "9123"), ("metrics.port", None), ("metrics.port", True),
        ("server.port", 70_000), ("controller.polling_mode", "false"), ("client.allow_pickle", "no"),
        ("client.timeout_s", "soon"), ("client.timeout_s", 0), ("client.copy_threads", 1.5), ("client.spin_us", -1),
        ("server.spin_us", -1), ("server.spin_us", "never"),
        ("client.pool_nbytes", "1G"), ("backend.SimpleStorage.total_storage_size", "many"),
        ("backend.SimpleStorage.budget_nbytes", 0), ("backend.SimpleStorage.trim_after_s", -1),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(name)}: .*{re.escape(repr(value))}"):
        started_with(nested(name, value))


@pytest.mark.parametrize(
    "conf",
    [
        {"client": {"timeout_s": "${nope}"}}, {"server": {"journal_dir": "${oc.env:TQ_TEST_NOT_SET}"}},
        {"mine": "${a."},
    ],
)  # fmt: skip
def test_a_reference_that_leads_nowhere_is_a_config_error(conf: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="conf does not fit"):
        merged(conf)


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="Nonsense"):
        started_with({"backend": {"storage_backend": "Nonsense"}})


def test_ray_store_needs_no_section() -> None:
    conf = started_with({"backend": {"storage_backend": "RayStore", "RayStore": None}})
    assert (conf.engine, conf.engine_settings) == ("RayStore", {})
    conf = started_with({"backend": {"storage_backend": "RayStore"}})
    assert conf.engine_settings == {"address": None, "durable": False}
    with pytest.raises(ConfigError, match=r"backend\.RayStore\.durable"):
        started_with({"backend": {"RayStore": {"durable": "often"}}})


def test_metrics_are_off_by_default_and_local() -> None:
    assert started_with().metrics_port is None
    conf = started_with({"metrics": {"enabled": True}})
    assert (conf.metrics_port, conf.host) == (0, "")


@pytest.mark.parametrize("name", ["TQ_PRE_ALLOC_SAMPLE_NUM", "TQ_NUM_THREADS", "TQ_LOGGING_LEVEL", "TQ_ALLOW_PICKLE"])
def test_a_wrong_variable_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "loud")
    with pytest.raises(ConfigError, match=name):
        from_env()


def test_variables_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = started_with()
    assert (plain.reserved_rows, plain.client["copy_threads"], plain.logging_level) == (1, None, "WARNING")
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "16")
    monkeypatch.setenv("TQ_NUM_THREADS", "3")
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "info")
    conf = started_with()
    assert (conf.reserved_rows, conf.client["copy_threads"], conf.logging_level) == (16, 3, "INFO")
    assert started_with({"client": {"copy_threads": 2}}).client["copy_threads"] == 2


@pytest.fixture
def level() -> Iterator[None]:
    log = logging.getLogger("transfer_queue")
    before = log.level
    yield
    log.setLevel(before)


@pytest.mark.usefixtures("level")
def test_the_logging_level_counts_in_clients(
    service: Callable[..., tq.TransferQueueClient], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "ERROR")
    client = service()
    client.get_data(tq.BatchMeta.empty())
    assert caplog.messages == []
    logging.getLogger("transfer_queue").setLevel(logging.WARNING)
    client.get_data(tq.BatchMeta.empty())
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("listed", "files", "limit"),
    [
        ("0::/a/b", {"a/memory.max": "max", "a/b/memory.max": "1000000", "memory.max": "9000000"}, 1_000_000),
        ("0::/user/step", {"user/memory.max": "800000", "user/step/memory.max": "1000000"}, 800_000),
        ("0::/docker/7", {"memory.max": "700000"}, 700_000),  # of a container, which sees no other
        ("1:name=systemd:/x\n4:cpu,memory:/job/step\n0::/", {"memory/job/memory.limit_in_bytes": "600000"}, 600_000),
        ("4:memory:/docker/7", {"memory/memory.limit_in_bytes": "500000"}, 500_000),
        ("0::/a", {"b/memory.max": "1"}, None),
        ("", {}, None),
    ],
)
def test_the_default_budget_is_a_share_of_the_least_control_group(
    tmp_path: Path, listed: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in {"proc/self/cgroup": listed, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    limit = limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert default_budget(tmp_path) == int(limit * MEMORY_SHARE)


def test_every_variable_is_documented() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"TQ_[A-Z0-9_]+", text))
    files = (ROOT / "src" / "transfer_queue").rglob("*.py")
    read = {name for file in files for name in re.findall(r"\bTQ_[A-Z0-9_]+", file.read_text(encoding="utf-8"))}
    assert "TQ_ADDRESS" in read
    assert read <= documented
    assert set(VARIABLES_OF_0_1_11) <= documented


def test_every_key_of_config_yaml_is_documented() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    settings = text.partition("## Settings")[2].partition("\n## ")[0]
    for name in ("metrics", "controller.zmq_info", "num_data_storage_units", "required_node_resource", "ssd_offload",
                 "budget_nbytes", "trim_after_s", "arena_dir", "run_dir", "address", "MooncakeStore", "Yuanrong",
                 "RayStore"):  # fmt: skip
        assert name in settings, name


def test_mooncake_keeps_rows_in_arenas_unless_there_is_a_pool() -> None:
    def chosen(**section: Any) -> tuple[str, dict[str, Any], str]:
        conf = merged({"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": section}})
        found = server_config(conf, "/run", 0)
        return found.engine, found.transport, found.durability

    told = {"name": "Mooncake", "settings": {"protocol": "rdma", "device_name": "mlx5_0", "local_hostname": ""}}
    assert chosen(protocol="rdma", device_name="mlx5_0") == ("", told, "process")
    assert chosen(pool=True)[:2] == ("MooncakeStore", {})
    assert chosen(auto_init=False)[:2] == ("MooncakeStore", {}), "a master that is found has a pool"
    assert chosen(auto_init=False, pool=False)[0] == ""


def test_settings_of_a_pool_without_one_are_said_to_have_no_effect() -> None:
    section = {"global_segment_size": 1}
    conf = merged({"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": section}})
    with pytest.warns(ConfigWarning, match="global_segment_size has no effect without pool: true"):
        server_config(conf, "/run", 0)


@pytest.mark.parametrize("section", [{"offload": {"enabled": True}}, {"use_gdr": True}])
def test_what_mooncake_is_not_used_for_is_refused(section: dict[str, Any]) -> None:
    conf = merged({"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": section}})
    with pytest.raises(ConfigError, match=f"MooncakeStore.{next(iter(section))}"):
        server_config(conf, "/run", 0)
