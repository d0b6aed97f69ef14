"""save_checkpoint and load_checkpoint of a running service."""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import Child, until
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue import checkpoint
from transfer_queue.client.session import Session
from transfer_queue.client.transfer import snapshots
from transfer_queue.errors import DeadlineExceeded, InvalidInput, NotInitialized, UnsupportedValue
from transfer_queue.saved import local, reading
from transfer_queue.wire.address import Address

Service = Callable[..., tq.TransferQueueClient]
FILES = {"metadata.json", "controller.msgpack", "blocks.msgpack", "blocks-00000.bin"}


def equal(one: Any, other: Any) -> bool:
    """The same type and content, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.is_nested:
            return one.dtype == other.dtype and all(map(equal, one.unbind(), other.unbind()))
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, TensorDict):
        return one.batch_size == other.batch_size and equal(dict(one.items()), dict(other.items()))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if hasattr(one, "tolist") and not isinstance(one, (list, tuple)):
        return equal(one.tolist(), other.tolist())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def world(client: tq.TransferQueueClient, tasks: tuple[str, ...] = ("t",)) -> dict[str, Any]:
    """Everything a user can ask about every partition, rows by key included."""
    found: dict[str, Any] = {"list": {p: dict(keys.items()) for p, keys in tq.kv_list().items()}}
    for name in client.get_partition_list():
        keys = list(found["list"].get(name, {}))
        found[name] = {
            "partition": client.get_partition(name),
            "consumption": [client.get_consumption_status(task, name) for task in tasks],
            "rows": {key: tq.kv_batch_get(key, name, copy=True) for key in keys if readable(key, name)},
        }
    return found


def readable(key: str, partition: str) -> bool:
    try:
        tq.kv_batch_get(key, partition)
    except ValueError:
        return False
    return True


def cell(key: str, partition: str, field: str) -> Any:
    return tq.kv_batch_get(key, partition, field)[field][0]


def restart() -> tq.TransferQueueClient:
    tq.close()
    tq.init()
    return tq.get_client()


def values() -> dict[str, Any]:
    """A column of two rows of every kind that is stored in its own way."""
    return {
        "dense": torch.arange(6.0).reshape(2, 3),
        "half": torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        "ragged": torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged),
        "varied": [torch.ones(2, 3), torch.zeros(4, 1)],
        "nested": TensorDict({"in": torch.arange(4).reshape(2, 2), "text": ["a", "b"]}, batch_size=[2]),
        "text": ["", "zwei ü"],
        "things": [{"t": (1, 2), "s": {3}, "d": datetime.date(2024, 2, 29)}, [None, b"x", 1 << 70]],
        "arrays": [np.arange(4, dtype=np.uint16), {"pixels": torch.ones(3, 3, dtype=torch.uint8)}],
        "large": torch.arange(2 << 20, dtype=torch.int32).reshape(2, -1),
    }


def test_every_kind_of_value_and_tag_comes_back_in_a_new_service(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    for name, column in values().items():
        tq.kv_batch_put(["one", "two"], f"of {name}", {name: column})
    tags = [{"n": 1, "when": datetime.datetime(2024, 1, 2), "of": (1, [2])}, {}]
    tq.kv_batch_put(["one", "two"], "all", values(), tags=tags)
    tq.kv_put("one", "all", {"late": torch.tensor([1.0]), "text": "replaced"}, tag={"n": 2})
    client.set_partition("all", size=7, metadata={"step": 3, "in": {"list": [1, 2.5]}})
    client.set_partition("empty", size=1)
    before = world(client)
    tq.save_checkpoint(tmp_path / "ck")
    client = restart()
    tq.load_checkpoint(str(tmp_path / "ck"))
    assert equal(world(client), before)
    assert set(os.listdir(tmp_path)) == {"ck"}
    assert set(os.listdir(tmp_path / "ck")) == FILES
    assert client.stats()["pinned_nbytes"] == {}


def test_consumption_production_and_reserved_rows_continue(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    client.put(TensorDict({"x": torch.arange(6.0)}, batch_size=[6]), partition_id="p")
    reserved = client.get_meta(["x"], 2, "p", mode="insert")
    taken = client.get_meta(["x"], 4, "p", task_name="t")
    before = [client.get_consumption_status("t", "p"), client.get_production_status(["x"], "p")]
    tq.save_checkpoint(tmp_path / "ck")
    client = restart()
    tq.load_checkpoint(tmp_path / "ck")
    assert equal([client.get_consumption_status("t", "p"), client.get_production_status(["x"], "p")], before)
    rest = client.get_meta(["x"], 2, "p", task_name="t")
    assert not set(rest.global_indexes) & set(taken.global_indexes)
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], 1, "p", task_name="t", timeout_s=0.05)
    client.put(TensorDict({"x": torch.tensor([7.0, 8.0])}, batch_size=[2]), reserved)
    late = client.get_meta(["x"], 2, "p", task_name="t")
    assert late.global_indexes == reserved.global_indexes
    assert client.get_data(late)["x"].flatten().tolist() == [7.0, 8.0]


def test_sampled_batches_are_repeated_after_a_load(service: Service, tmp_path: Path) -> None:
    grpo = {"sampler": "GRPOGroupNSampler"}
    client = service(controller=grpo)
    client.put(TensorDict({"x": torch.arange(8)}, batch_size=[8]), partition_id="p")
    config = {"dp_rank": 1, "batch_index": 0}
    first = client.get_meta(["x"], 2, "p", task_name="t", sampling_config=config).global_indexes
    tq.save_checkpoint(tmp_path / "ck")
    tq.close()
    tq.init({"controller": grpo})
    tq.load_checkpoint(tmp_path / "ck")
    client = tq.get_client()
    assert client.get_meta(["x"], 2, "p", task_name="t", sampling_config=config).global_indexes == first
    assert not set(client.get_meta(["x"], 2, "p", task_name="t").global_indexes) & set(first)


def test_restored_rows_are_written_and_cleared_like_any_other(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 50_000), "y": torch.ones(2)}, tags=[{"n": 1}, {"n": 2}])
    tq.save_checkpoint(tmp_path / "ck")
    client = restart()
    tq.load_checkpoint(tmp_path / "ck")
    tq.kv_put("a", "p", {"x": torch.full((50_000,), 5.0)}, tag={"m": 3})
    new = client.put(TensorDict({"x": torch.ones(1, 50_000)}, batch_size=[1]), partition_id="p")
    assert new.global_indexes[0] > max(client.kv_retrieve_meta(["a", "b"], "p").global_indexes)
    assert tq.kv_list("p") == {"p": {"a": {"n": 1, "m": 3}, "b": {"n": 2}}}
    assert [float(cell(key, "p", "x")[0]) for key in ("a", "b")] == [5.0, 0.0]
    client.clear_partition("p")
    until(lambda: client.stats()["arena_nbytes_used"] == 0, "the release of all blocks")


def test_loading_replaces_what_is_there_and_spares_what_is_read(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(100_000)}, tag={"v": 1})
    index = client.kv_retrieve_meta("a", "p").global_indexes
    tq.save_checkpoint(tmp_path / "ck")
    tq.kv_clear("a", "p")
    tq.kv_put("b", "q", {"x": torch.full((100_000,), 7.0)})
    held = cell("b", "q", "x")
    highest = client.kv_retrieve_meta("b", "q").global_indexes[0]
    tq.load_checkpoint(tmp_path / "ck")
    assert tq.kv_list() == {"p": {"a": {"v": 1}}}
    assert client.kv_retrieve_meta("a", "p").global_indexes == index
    assert bool((held == 7.0).all())
    tq.kv_put("c", "r", {"x": torch.zeros(1)})
    assert client.kv_retrieve_meta("c", "r").global_indexes[0] > highest
    assert client.stats()["blocks"] == 2


def test_a_waiting_fetch_is_answered_by_a_load(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.arange(2)})
    tq.save_checkpoint(tmp_path / "ck")
    client.clear_partition("p")
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(client.get_meta(["x"], 2, "p", task_name="t")))
    waiter.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "the wait")
    tq.load_checkpoint(tmp_path / "ck")
    waiter.join()
    assert client.get_data(found[0])["x"].flatten().tolist() == [0, 1]


def test_saving_again_replaces_the_checkpoint(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    for value in (1, 2):
        tq.kv_put("a", "p", {"x": torch.tensor([value])})
        tq.save_checkpoint(tmp_path / "deep" / "ck", metadata={"step": value})
    assert os.listdir(tmp_path / "deep") == ["ck"]
    content = json.loads((tmp_path / "deep" / "ck" / "metadata.json").read_text())
    assert (content["user_metadata"], content["storage_saved"]) == ({"step": 2}, True)
    tq.kv_clear("a", "p")
    tq.load_checkpoint(tmp_path / "deep" / "ck")
    assert cell("a", "p", "x").tolist() == [2]


def test_what_is_saved_while_somebody_writes_into_it_can_be_loaded(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who allocated a block may write there after its commit: readers see that, and a checkpoint is of some moment."""
    room = client.allocate({"x": ((4, 100_000), torch.float32)})
    x = room["x"].zero_()
    room.commit("p", keys=list("abcd"))
    write = local._LocalNewFile.write

    def write_and_change(file: Any, data: bytes | memoryview) -> None:
        write(file, data)
        x.add_(1.0)

    monkeypatch.setattr(local._LocalNewFile, "write", write_and_change)
    tq.save_checkpoint(tmp_path / "ck")
    monkeypatch.undo()
    tq.load_checkpoint(tmp_path / "ck")
    assert len(cell("a", "p", "x")) == 100_000


def test_an_empty_service_and_a_link_to_a_directory(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    tq.save_checkpoint(tmp_path / "link")
    tq.kv_put("a", "p", {"x": torch.zeros(1)})
    tq.load_checkpoint(tmp_path / "link")
    assert client.get_partition_list() == []
    assert (tmp_path / "link").is_symlink()


def test_blocks_are_split_over_files(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FILE_NBYTES", 1 << 20)
    monkeypatch.setattr(reading, "CHUNK_NBYTES", 300_000)
    monkeypatch.setattr(snapshots, "CHUNK_NBYTES", 300_000)
    for n in range(5):
        tq.kv_put(f"k{n}", "p", {"x": torch.full((150_000,), float(n)), "n": torch.tensor([n])})
    tq.save_checkpoint(tmp_path / "ck")
    assert len(os.listdir(tmp_path / "ck")) == 6
    tq.kv_clear([f"k{n}" for n in range(5)], "p")
    tq.load_checkpoint(tmp_path / "ck")
    for n in range(5):
        assert bool((cell(f"k{n}", "p", "x") == n).all())


def test_rows_are_stored_even_without_include_storage(
    client: tq.TransferQueueClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tq.kv_put("a", "p", {"x": torch.tensor([1])})
    with caplog.at_level(logging.WARNING, logger="transfer_queue"):
        tq.save_checkpoint(tmp_path / "ck", include_storage=False)
    assert "include_storage=False has no effect" in caplog.text
    tq.load_checkpoint(tmp_path / "ck")
    assert cell("a", "p", "x").tolist() == [1]


def test_wrong_calls_are_refused(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValue, match="not JSON"):
        tq.save_checkpoint(tmp_path / "ck", metadata={"x": {1, 2}})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.pt").touch()
    with pytest.raises(InvalidInput, match="something else"):
        tq.save_checkpoint(tmp_path / "mine")
    assert (tmp_path / "mine" / "model.pt").exists()
    with pytest.raises(FileNotFoundError, match="no such directory"):
        tq.load_checkpoint(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"metadata\.json"):
        tq.load_checkpoint(tmp_path / "mine")
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("listed", [b'{"name": "mine"}', b"", b"[1]", b'{"digest": "", "files": {}}'])
def test_a_folder_of_another_with_a_metadata_json_is_not_replaced(
    client: tq.TransferQueueClient, tmp_path: Path, listed: bytes
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "metadata.json").write_bytes(listed)
    (model / "model.safetensors").write_text("weights of days")
    with pytest.raises(InvalidInput, match=r"model\.safetensors.*move it away"):
        tq.save_checkpoint(model)
    assert (model / "model.safetensors").read_text() == "weights of days"
    assert (model / "metadata.json").read_bytes() == listed
    assert os.listdir(tmp_path) == ["model"]


def test_a_file_that_was_put_into_a_checkpoint_is_not_lost_with_it(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    tq.save_checkpoint(tmp_path / "ck", metadata={"n": 1})
    (tmp_path / "ck" / "model.pt").touch()
    with pytest.raises(InvalidInput, match=r"model\.pt"):
        tq.save_checkpoint(tmp_path / "ck", metadata={"n": 2})
    assert (tmp_path / "ck" / "model.pt").exists()
    (tmp_path / "ck" / "model.pt").unlink()
    tq.save_checkpoint(tmp_path / "ck", metadata={"n": 2})
    assert '"n": 2' in (tmp_path / "ck" / "metadata.json").read_text()


def test_a_backup_beside_a_checkpoint_stays(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    target, backup = tmp_path / "ck", tmp_path / "ck.old"
    tq.save_checkpoint(target, metadata={"n": 1})
    target.rename(backup)
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(target)
    for _ in range(2):
        tq.save_checkpoint(target, metadata={"n": 2})
        tq.load_checkpoint(target)
    assert '"n": 1' in (backup / "metadata.json").read_text()
    assert sorted(os.listdir(tmp_path)) == ["ck", "ck.old"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_lies_where_a_draft_would_is_not_taken_for_one(
    client: tq.TransferQueueClient, tmp_path: Path, kind: str
) -> None:
    tq.save_checkpoint(tmp_path / "ck", metadata={"n": 1})
    other, precious = tmp_path / "ck.tmp", tmp_path / "elsewhere" / "precious.txt"
    precious.parent.mkdir()
    precious.touch()
    if kind == "folder":
        precious.parent.rename(other)
        precious = other / "precious.txt"
    elif kind == "file":
        other.touch()
    else:
        other.symlink_to(precious.parent)
    with pytest.raises(InvalidInput, match=r"ck\.tmp.*move it away"):
        tq.save_checkpoint(tmp_path / "ck")
    assert (precious.exists(), os.path.lexists(other)) == (True, True)
    assert '"n": 1' in (tmp_path / "ck" / "metadata.json").read_text()


def test_a_url_that_pathlib_took_a_slash_from_is_no_directory(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (tq.save_checkpoint, tq.load_checkpoint, lambda place: tq.dump_data_by_key(place, [], "p")):
        for place in (Path("s3://bucket/runs") / "7", str(Path("s3://bucket/runs"))):
            with pytest.raises(InvalidInput, match="give URLs as strings"):
                call(place)
    assert os.listdir(tmp_path) == []


def test_without_a_service_it_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TQ_ADDRESS", "TQ_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    for call in (tq.save_checkpoint, tq.load_checkpoint):
        with pytest.raises(RuntimeError, match="not initialized") as caught:
            call(tmp_path / "ck")
        assert isinstance(caught.value, NotInitialized)


@pytest.fixture
def remote(service: Service, tmp_path: Path) -> Iterator[Session]:
    """A session over TCP, as from another host."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("secret of the test")
    client = service(server={"host": "127.0.0.1", "token_file": str(token)})
    links = psutil.Process(client.stats()["pid"]).net_connections("tcp")
    port = next(one.laddr.port for one in links if one.status == psutil.CONN_LISTEN)
    session = Session(Address(host="127.0.0.1", port=port, token="secret of the test"))
    assert not session.is_local
    yield session
    session.close()


def test_a_client_of_another_host_saves_and_loads(remote: Session, tmp_path: Path) -> None:
    large = torch.randn(3, 1 << 20)
    tq.kv_batch_put(["a", "b", "c"], "p", {"x": large, "y": ["1", "2", "3"]})
    tq.kv_put("d", "p", {"y": "4"})
    before = world(tq.get_client())
    checkpoint.save(remote, tmp_path / "ck")
    tq.get_client().clear_partition("p")
    checkpoint.load(remote, tmp_path / "ck")
    assert equal(world(tq.get_client()), before)
    assert tq.get_client().stats()["pinned_nbytes"] == {}


WRITER = """
import sys, threading
import torch
import transfer_queue as tq
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
n = 0
while not ended.is_set():
    n += 1
    key = f"k{n % 7}"
    tq.kv_put(key, "p", {"first": torch.tensor([n])})
    tq.kv_put(key, "p", {"second": torch.tensor([n])}, tag={"n": n})
    both = {"pair": torch.full((2, 40_000), float(n)), "small": torch.full((2, 1), n)}
    tq.kv_batch_put(["left", "right"], "p", both, tags=[{"n": n}, {"n": n}])
    tq.kv_put(f"t{n}", "q", {"x": torch.full((20_000,), float(n))})
    tq.kv_clear([f"t{n - 3}"], "q")
    if n == 20:
        print("busy", flush=True)
print(n)
"""


def check_instant() -> int:
    """What was saved is one moment of WRITER: nothing is missing that came before something that is there."""
    seen = {key: int(cell(key, "p", "first")) for key in tq.kv_list("p")["p"] if key[0] == "k"}
    now = max(seen.values())
    for key, n in seen.items():
        tag = tq.kv_list("p")["p"][key]["n"]
        assert tag == int(cell(key, "p", "second"))
        assert n > now - 7, "every earlier put is in"
        assert tag in ((n,) if n < now else (n, n - 7)), "the second put of a key follows its first"
    pair = tq.kv_batch_get(["left", "right"], "p", ["pair", "small"])
    both = pair["pair"][0, 0].item()
    assert bool((pair["pair"] == both).all())
    assert bool((pair["small"] == both).all()), "a put of two keys is in or out as a whole"
    assert [tq.kv_list("p")["p"][key]["n"] for key in ("left", "right")] == [both, both]
    assert both in (now, now - 1)
    rows = {int(key[1:]): cell(key, "q", "x") for key in tq.kv_list("q")["q"]}
    assert len(rows) in (3, 4)
    assert all(bool((row == n).all()) for n, row in rows.items())
    assert max(rows) in (both, both - 1)
    return now


def test_a_checkpoint_under_traffic_is_one_instant(
    client: tq.TransferQueueClient, child: Callable[[str], Child], tmp_path: Path
) -> None:
    writer = child(WRITER)
    assert writer.line() == "busy"
    for n in range(8):
        tq.save_checkpoint(tmp_path / f"ck{n}")
    writer.say()
    last = int(writer.finish())
    moments = []
    for n in range(8):
        tq.load_checkpoint(tmp_path / f"ck{n}")
        moments.append(check_instant())
    assert moments == sorted(moments)
    assert moments[0] < moments[-1] <= last
    until(lambda: client.stats()["pinned_nbytes"] == {}, "the release of all pins")
