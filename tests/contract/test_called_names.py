"""Names beside `__all__` that programs written for TransferQueue 0.1.11 import, read, replace and match."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import transfer_queue as tq
from transfer_queue import interface
from transfer_queue.client.drivers import run
from transfer_queue.client.operations.partitions import PartitionSnapshot, partition_snapshot
from transfer_queue.client.operations.rows import checked_sampling
from transfer_queue.errors import ConfigError, InvalidInput, NotInitialized, ServiceUnavailable, UnsupportedValue
from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions, karmarkar_karp
from transfer_queue.utils.zmq_utils import ZMQServerInfo, process_zmq_server_info
from transfer_queue.wire.arrays import unpack_arrays

# ---- import paths ----


def test_modules_are_attributes_after_a_bare_import(fresh_child: Callable[[str], Any]) -> None:
    code = """
    import sys
    import transfer_queue as tq
    assert not {"torch", "numpy", "msgspec"} & set(sys.modules), "the import is light"
    assert tq.metadata.BatchMeta is tq.BatchMeta
    assert tq.sampler.RankAwareSampler is tq.RankAwareSampler
    assert tq.client.AsyncTransferQueueClient is tq.client.TransferQueueClient is tq.TransferQueueClient
    assert tq.interface.kv_put is tq.kv_put
    assert tq.dataloader.StreamingDataset is tq.StreamingDataset
    assert tq.storage.StorageKeyNotFoundError is tq.StorageKeyNotFoundError is tq.errors.StorageKeyNotFoundError
    assert tq.controller.TransferQueueController.options and tq.utils and tq.config and tq.weights
    assert {"client", "kv_put", "__version__"} <= set(dir(tq))
    """
    fresh_child(code).finish()


def test_import_paths_of_0_1_11(child: Callable[[str], Any]) -> None:
    code = """
    from transfer_queue.client import AsyncTransferQueueClient, TransferQueueClient
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.dataloader.streaming_dataset import StreamingDataset, chunk_batch_fn
    from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
    from transfer_queue.metadata import BatchMeta, KVBatchMeta
    from transfer_queue.sampler.base import BaseSampler
    from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
    from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
    from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler, get_seqlen_balanced_partitions
    from transfer_queue.sampler.sequential_sampler import SequentialSampler
    from transfer_queue.storage import StorageKeyNotFoundError
    from transfer_queue.utils.logging_utils import get_logger
    from transfer_queue.utils.logging_utils import get_logger
    from transfer_queue.utils.zmq_utils import ZMQServerInfo, process_zmq_server_info
    from transfer_queue.wire.arrays import unpack_arrays
    """
    child(code).finish()


# ---- loggers ----


def test_a_logger_has_its_level_and_one_handler(child: Callable[[str], Any]) -> None:
    code = """
    import logging, os, sys
    os.environ.pop("TQ_LOGGING_LEVEL", None)
    from transfer_queue.utils.logging_utils import get_logger
    logger = get_logger("one", default_level="INFO")
    assert get_logger("one", "INFO") is logger is logging.getLogger("one")
    assert (logger.level, len(logger.handlers)) == (logging.INFO, 1)
    record = logging.LogRecord("a", logging.INFO, "", 0, "text", None, None)
    assert logger.handlers[0].format(record).endswith(" - INFO - a - text")
    assert get_logger("one.below").handlers == []
    assert get_logger("two").level == logging.WARNING
    os.environ["TQ_LOGGING_LEVEL"] = "ERROR"
    assert get_logger("three", "INFO").level == logging.ERROR
    os.environ["TQ_LOGGING_LEVEL"] = "debug"
    assert get_logger("four").level == logging.DEBUG
    os.environ["TQ_LOGGING_LEVEL"] = ""
    assert get_logger("five").level == logging.WARNING
    """
    child(code).finish()


# ---- names in the module `interface` ----


def test_the_client_of_this_process_is_where_programs_look_for_it(client: tq.TransferQueueClient) -> None:
    assert interface._TQ_CLIENT is client is interface._maybe_create_tq_client()
    assert interface._TQ_CONTROLLER is None  # there is no Ray here
    tq.close()
    assert interface._TQ_CLIENT is None
    with pytest.raises(AssertionError):
        interface._maybe_create_tq_client()


def test_a_program_may_drop_the_client_and_gets_another(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.set_partition("p", size=1)
    with monkeypatch.context() as patch:
        patch.setattr(interface, "_TQ_CLIENT", None)
        with pytest.raises(NotInitialized):
            tq.get_client()
        conf = {"address": str(client.address)}
        other = interface._maybe_create_tq_client(conf)
        assert other is not client
        assert other.get_partition_list() == ["p"]
        other.close()
    assert tq.get_client() is client


# ---- the client's constructor ----


def test_a_client_is_made_from_what_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    conf = pickle.loads(pickle.dumps(tq.init()))  # noqa: S301  of our own making
    try:
        client = tq.TransferQueueClient("mine", conf.controller.zmq_info, zmq_io_threads=1, zmq_max_sockets=64)
        client.initialize_storage_manager("AsyncSimpleStorageManager", conf.backend.SimpleStorage)
        client.put({"x": torch.arange(2)}, partition_id="p")
        assert tq.get_client().get_partition_list() == ["p"]
        assert client.client_id == "mine"
        client.close()
        assert tq.get_client().get_partition_list() == ["p"]
    finally:
        tq.close()


def test_an_info_survives_pickling_and_shows_where_it_leads() -> None:
    info = ZMQServerInfo("TransferQueueController", "id", "10.0.0.1", {"request_handle_socket": 7})
    assert pickle.loads(pickle.dumps(info)) == info  # noqa: S301  of our own making
    assert info.to_addr("request_handle_socket") == "tcp://10.0.0.1:7"
    assert info.to_dict() == {
        "role": "TransferQueueController", "id": "id", "ip": "10.0.0.1", "ports": {"request_handle_socket": 7}
    }  # fmt: skip
    assert "10.0.0.1" in str(info)


@pytest.mark.parametrize(
    ("info", "error"),
    [
        (None, ValueError),
        ("tcp:127.0.0.1:1", TypeError),
        ({"ip": "127.0.0.1"}, TypeError),
        (ZMQServerInfo("TransferQueueController", "nowhere", "", {}), ConfigError),
        (ZMQServerInfo("TransferQueueController", "gone", "", {}, "unix:/no/such/tq.sock"), ServiceUnavailable),
    ],
)
def test_a_client_needs_the_info_of_a_service(info: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        tq.TransferQueueClient("mine", info)


@pytest.mark.parametrize("wrong", [{"zmq_io_threads": 0}, {"zmq_max_sockets": 0}])
def test_numbers_that_0_1_11_refuses_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        tq.TransferQueueClient("mine", ZMQServerInfo("a", "b", "", {}), **wrong)


def test_another_store_is_refused(client: tq.TransferQueueClient) -> None:
    with pytest.raises(ValueError, match="MooncakeStorageManager"):
        client.initialize_storage_manager("MooncakeStorageManager", {})


def test_only_actors_have_a_server_info() -> None:
    pytest.importorskip("ray")
    assert process_zmq_server_info({}) == {}


# ---- values of NumPy ----


def test_a_sampling_config_may_hold_numpy(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service(controller={"sampler": "RankAwareSampler"})
    client.put({"x": torch.arange(8)}, partition_id="p")
    sampling = {"dp_rank": np.int64(0), "batch_index": np.arange(3)[1], "task_name": np.str_("t"), "partition_id": "p"}
    first = client.get_meta(["x"], np.int64(2), "p", task_name="t", sampling_config=sampling)
    plain = {"dp_rank": 0, "batch_index": 1, "task_name": "t", "partition_id": "p"}
    again = client.get_meta(["x"], 2, "p", task_name="t", sampling_config=plain)
    assert first.global_indexes == again.global_indexes


class ByScore(tq.BaseSampler):
    """The rows with the highest scores, which the request brings as an array."""

    def sample(self, ready_indexes: list[int], batch_size: int, **given: Any) -> tuple[list[int], list[int]]:
        scores = given["scores"] / given["scores"].sum() * given["factors"][0][1]
        best = [ready_indexes[at] for at in np.argsort(-scores)[:batch_size]]
        return best, best


def test_a_sampler_gets_arrays_as_arrays(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service(controller={"sampler": ByScore})
    client.put({"x": torch.arange(4)}, partition_id="p")
    sampling = {"scores": np.array([0.1, 0.9, 0.3, 0.8], np.float32), "factors": (np.arange(1, 3), torch.ones(2))}
    assert client.get_meta(["x"], 2, "p", task_name="t", sampling_config=sampling).global_indexes == [1, 3]


def test_numbers_and_arrays_of_a_sampling_config_travel() -> None:
    given = {
        "a": np.arange(6).reshape(2, 3),
        "b": (1, np.float32(0.5)),
        "c": {"d": torch.tensor(4)},
        "e": np.bool_(True),
    }
    found = unpack_arrays(msgspec.msgpack.decode(msgspec.msgpack.encode(checked_sampling(given))))
    assert found.pop("a").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found == {"b": [1, 0.5], "c": {"d": 4}, "e": True}


@pytest.mark.parametrize("value", [object(), {1: 2}, np.array([object()]), np.datetime64("2020-01-01")])
def test_what_is_neither_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedValue, match="sampling_config"):
        checked_sampling({"a": value})


@pytest.mark.parametrize(
    "content",
    [b"", ("<i8", [2], b"1234567"), ("O", [1], b"12345678"), ("<i8", [-1, -1], b"12345678"), ("what", [], b"")],
)
def test_bytes_that_are_no_array_are_refused(content: Any) -> None:
    data = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    with pytest.raises(InvalidInput):
        unpack_arrays([msgspec.msgpack.Ext(1, data)])


# ---- errors that programs catch and match ----


@pytest.mark.parametrize("divide", [get_seqlen_balanced_partitions, karmarkar_karp])
@pytest.mark.parametrize(("lengths", "parts", "equal"), [([1, 2, 3], 2, True), ([10], 3, False), ([1], 0, False)])
def test_a_division_that_does_not_go_is_an_assertion_error_too(
    divide: Callable[..., Any], lengths: list[int], parts: int, equal: bool
) -> None:
    with pytest.raises(AssertionError):
        divide(lengths, parts, equal)
    with pytest.raises(ValueError, match="parts"):
        divide(lengths, parts, equal)


def keyed(keys: list[str], partition: str = "p", fields: list[str] | None = None) -> tq.KVBatchMeta:
    return tq.KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id=partition, fields=fields or ["f"])


def rows(indexes: list[int], partition: str = "p") -> tq.BatchMeta:
    return tq.BatchMeta(global_indexes=indexes, partition_ids=[partition] * len(indexes))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tq.KVBatchMeta(["a", "b"], [{}]), ValueError, "keys and tags must have same length"),
        (lambda: keyed(["a", "a"]), ValueError, "Got duplicated keys"),
        (lambda: keyed(["a"], fields=["f", "f"]), ValueError, "Got duplicated fields"),
        (lambda: keyed(["a"]).select_keys(["a", "a"]), ValueError, "Contain duplicate keys"),
        (lambda: keyed(["a"]).select_keys(["b"]), RuntimeError, "not found in current batch"),
        (lambda: keyed(["a", "b"]).reorder([0]), ValueError, "does not match"),
        (lambda: keyed(["a", "b"]).reorder([0, 0]), ValueError, "Contain duplicate indexes"),
        (lambda: tq.KVBatchMeta.concat([keyed(["a"]), keyed(["a"])]), ValueError, "Got duplicated keys"),
        (
            lambda: tq.KVBatchMeta.concat([keyed(["a"]), keyed(["b"], fields=["g"])]),
            ValueError,
            "Field names do not match",
        ),
        (lambda: tq.KVBatchMeta.concat([keyed(["a"]), keyed(["b"], "q")]), ValueError, "Partition do not match"),
        (lambda: rows([1]).union(rows([2])), ValueError, "global_indexes do not match"),
        (lambda: rows([1]).union(rows([1], "q")), ValueError, "partition_ids do not match"),
        (lambda: rows([1, 1]).reorder([0, 0]), ValueError, "duplicates"),
    ],
)
def test_texts_that_tests_of_0_1_11_match(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_duplicate_keys_are_refused_in_its_words(client: tq.TransferQueueClient) -> None:
    with pytest.raises(ValueError, match="Got duplicated keys"):
        tq.kv_batch_put(["a", "a"], "p", {"x": [1, 2]})


# ---- a partition as one object ----


def snapshot(client: tq.TransferQueueClient, partition: str) -> PartitionSnapshot | None:
    return run(client.session, partition_snapshot(client.session, partition))


def test_a_snapshot_has_what_the_controller_knows(client: tq.TransferQueueClient) -> None:
    meta = client.put({"x": torch.arange(3), "r": [torch.ones(2), torch.ones(3), torch.ones(1)]}, partition_id="p")
    tq.kv_put("k", "p", {"x": torch.tensor(9), "note": "text"}, tag={"a": 1})
    client.get_meta(["x"], 2, "p", task_name="t")
    found = snapshot(client, "p")
    assert found is not None
    keyed_row = found.keys_mapping["k"]
    assert set(found.field_name_mapping) == {"x", "r", "note"}
    columns = found.field_name_mapping
    assert found.production_status.dtype == torch.int8
    assert [int(found.production_status[keyed_row, columns[name]]) for name in ("x", "r", "note")] == [1, 0, 1]
    assert found.custom_meta == {keyed_row: {"a": 1}}
    assert found.revert_keys_mapping == {keyed_row: "k"}
    assert found.global_indexes == {*meta.global_indexes, keyed_row}
    assert found.consumption_status["t"].tolist() == [1, 1, 0, 0]
    assert (found.total_samples_num, found.total_fields_num) == (4, 3)
    ragged, dense, objects = (found.field_metadata[name] for name in ("r", "x", "note"))
    assert ragged.is_nested
    assert list(ragged.per_sample_shapes.values()) == [(2,), (3,), (1,)]
    assert (dense.is_nested, dense.is_non_tensor, dense.dtype) == (False, False, torch.int64)
    assert (objects.is_non_tensor, objects.global_indexes) == (True, {keyed_row})
    pickle.loads(pickle.dumps(found))  # noqa: S301  of our own making


def test_a_snapshot_tells_reserved_rows_from_claimed_ones(
    service: Callable[..., tq.TransferQueueClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "3")
    client = service()
    meta = client.get_meta(["x"], 2, "p", mode="insert")
    found = snapshot(client, "p")
    assert found is not None
    assert found.global_indexes == set(meta.global_indexes)
    assert len(found.pre_allocated_global_indexes) == 1
    assert not found.production_status.any()


def test_there_is_no_snapshot_of_an_unknown_partition(client: tq.TransferQueueClient) -> None:
    assert snapshot(client, "nobody") is None
