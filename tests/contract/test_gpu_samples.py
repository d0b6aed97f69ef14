"""Rows from and to a GPU, through a real service (skipped without a GPU)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.codec.packed import batch_decode_from, batch_encode_into
from transfer_queue.memory import pinned
from transfer_queue.memory.copy import Mover
from transfer_queue.memory.downloads import downloaded
from transfer_queue.memory.pinned import STEP_NBYTES
from transfer_queue.memory.tensors import byte_view
from transfer_queue.memory.uploads import Upload, upload

pytestmark = pytest.mark.usefixtures("shared", "gpu")
NUM = 64
KEYS = [str(number) for number in range(NUM)]
LARGE = 1 << 18  # floats of a row: 64 MB in all, which threads upload and other threads put
LONG = 200_000_000  # cycles: a tenth of a second
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.float64]


def put(partition: str, **fields: Any) -> None:
    tq.kv_batch_put(keys=KEYS, partition_id=partition, fields=TensorDict(fields, batch_size=NUM))


def get(partition: str, **more: Any) -> TensorDict:
    return tq.kv_batch_get(keys=KEYS, partition_id=partition, **more)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert one.dtype == other.dtype
    return torch.equal(one.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 1 << 16])
def test_dense_rows_go_to_the_gpu_and_come_from_there(dtype: torch.dtype, width: int, gpu: torch.device) -> None:
    rows = torch.randint(0, 2, (NUM, width)).to(dtype)
    put("dense", host=rows, there=rows.to(gpu))
    assert same(get("dense", dense=True)["there"], rows)
    found = get("dense", device="cuda", dense=True)
    assert found.device == gpu
    assert list(found.keys()) == ["host", "there"]
    for tensor in found.values():
        assert tensor.device == gpu
        assert same(tensor, rows)
    tq.kv_clear(KEYS, "dense")


def test_rows_of_different_length(gpu: torch.device) -> None:
    rows = [torch.randn(1 + 1000 * number, 3) for number in range(NUM)]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    put("jagged", x=jagged.to(gpu), small=torch.nested.as_nested_tensor([r[:2, 0] for r in rows], layout=torch.jagged))
    found = get("jagged", device=gpu)
    assert found["x"].device == found["small"].device == found["x"].offsets().device == gpu
    assert all(same(*pair) for pair in zip(found["x"].unbind(), rows, strict=True))
    assert same(found["x"].to_padded_tensor(0.0), jagged.to_padded_tensor(0.0))
    assert same(get("jagged", device=gpu, pad=7)["x"], jagged.to_padded_tensor(7.0))
    tq.kv_clear(KEYS, "jagged")


def test_what_is_no_tensor_comes_along(gpu: torch.device) -> None:
    put("mixed", x=torch.ones(NUM, LARGE, device=gpu), text=[f"row {key}" for key in KEYS])
    found = get("mixed", device="cuda", dense=True)
    assert list(found["text"]) == [f"row {key}" for key in KEYS]
    assert found["x"].sum() == NUM * LARGE
    tq.kv_clear(KEYS, "mixed")


def test_what_was_read_stays_when_rows_are_written_again(gpu: torch.device) -> None:
    put("again", x=torch.ones(NUM, LARGE))
    found = get("again", device=gpu, dense=True)["x"]
    for _ in range(3):
        tq.kv_clear(KEYS, "again")
        put("again", x=torch.zeros(NUM, LARGE))
    assert (found == 1).all()
    tq.kv_clear(KEYS, "again")


def test_rows_are_read_in_inference_mode(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    """As rollout workers run; its tensors cannot be written by threads that are not in it."""
    monkeypatch.setattr(pinned, "_idle", defaultdict(list))  # buffers are made within it
    put("inference", x=torch.ones(NUM, LARGE))
    with torch.inference_mode():
        assert (get("inference", device=gpu, dense=True)["x"] == 1).all()
        assert (_get_async(partition="inference", device=gpu, dense=True)["x"] == 1).all()
    assert sum(step.sum() for step in downloaded(torch.ones(1 << 20, dtype=torch.uint8, device=gpu))) == 1 << 20
    tq.kv_clear(KEYS, "inference")


def test_without_memory_to_pin_rows_come_all_the_same(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    def refuse(device: torch.device) -> pinned.PinnedBuffers:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pinned, "PinnedBuffers", refuse)
    monkeypatch.setattr(pinned, "_idle", defaultdict(list))
    put("unpinned", x=torch.ones(NUM, LARGE))
    found = get("unpinned", device=gpu, dense=True)["x"]
    assert (found == 1).all()
    assert b"".join(step.tobytes() for step in downloaded(byte_view(found))) == found.cpu().numpy().tobytes()
    tq.kv_clear(KEYS, "unpinned")


def test_preallocated_tensors_on_the_gpu_are_filled(gpu: torch.device, shared: tq.TransferQueueClient) -> None:
    rows = torch.randn(NUM, 5)
    meta = shared.put(TensorDict({"x": rows}, batch_size=NUM), partition_id="out")
    place = torch.zeros(NUM, 5, device=gpu)
    shared.get_data(meta, out={"x": place})
    assert same(place, rows)
    shared.clear_partition("out")


def _put_async(fields: TensorDict) -> None:
    asyncio.run(tq.async_kv_batch_put(keys=KEYS, partition_id="stream", fields=fields))


def _put(fields: TensorDict) -> None:
    tq.kv_batch_put(keys=KEYS, partition_id="stream", fields=fields)


@pytest.mark.parametrize("write", [_put, _put_async])
def test_a_put_waits_for_the_stream_of_its_caller(write: Callable[[TensorDict], None], gpu: torch.device) -> None:
    """A copy in another thread would be in the default stream, which does not wait for others."""
    rows = torch.zeros(NUM, LARGE, device=gpu)
    torch.cuda.synchronize()
    for turn in range(1, 4):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG)
            rows.fill_(turn)
            write(TensorDict({"x": rows}, batch_size=NUM))
        assert (get("stream", dense=True)["x"] == turn).all()
    tq.kv_clear(KEYS, "stream")


def _get_async(partition: str = "order", **more: Any) -> TensorDict:
    return asyncio.run(tq.async_kv_batch_get(keys=KEYS, partition_id=partition, **more))


def _get(**more: Any) -> TensorDict:
    return get("order", **more)


@pytest.mark.parametrize("read", [_get, _get_async])
def test_a_get_does_not_overtake_the_stream_of_its_caller(read: Callable[..., TensorDict], gpu: torch.device) -> None:
    """What torch gives out again in a stream may still be used by kernels that wait there."""
    put("order", x=torch.ones(NUM, LARGE))
    with torch.cuda.stream(torch.cuda.Stream()):
        old = torch.zeros(NUM, LARGE, device=gpu)
        torch.cuda._sleep(LONG)
        old.fill_(2)
        del old  # torch will give its memory to the next tensor of this stream, which has to wait
        found = read(device="cuda", dense=True)["x"]
        assert (found == 1).all()
    tq.kv_clear(KEYS, "order")


@pytest.mark.parametrize("width", [1, LARGE // 8])
def test_fields_of_equal_lengths_combine_on_the_gpu(width: int, gpu: torch.device) -> None:
    rows = [torch.ones(number % 5 + 1, width) for number in range(NUM)]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    put("together", x=jagged, y=jagged * 2)
    found = get("together", device=gpu)
    assert (found["x"] + found["y"]).values().eq(3).all()
    assert same(found["x"][3], rows[3])
    tq.kv_clear(KEYS, "together")


@settings(
    max_examples=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.lists(st.sampled_from([0, 1, 7, 4096, STEP_NBYTES - 1, STEP_NBYTES, 2 * STEP_NBYTES + 3]), max_size=12))
def test_uploads_and_downloads_of_any_sizes(sizes: list[int]) -> None:
    mover = Mover()
    sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
    places = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for nbytes in sizes]
    upload([Upload(*pair) for pair in zip(places, sources, strict=True)], mover)
    mover.close()
    assert all(same(*pair) for pair in zip(places, sources, strict=True))
    for place, source in zip(places, sources, strict=True):
        steps = [step.copy() for step in downloaded(place)]
        assert b"".join(step.tobytes() for step in steps) == source.numpy().tobytes()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_pins_its_batches(num_workers: int, shared: tq.TransferQueueClient, gpu: torch.device) -> None:
    name = f"pinned{num_workers}"
    rows = [torch.arange(1.0 + number) for number in range(8)]
    fields = {"ragged": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "wide": torch.randn(8, 1000)}
    shared.put(TensorDict({**fields, "text": list("abcdefgh")}, batch_size=8), partition_id=name)
    names = ["ragged", "text", "wide"]
    stream = tq.StreamingDataset(None, 4, 2, names, name, "t", 0, should_check_consumption_status=True)
    found = [data for data, _ in tq.StreamingDataLoader(stream, num_workers=num_workers, pin_memory=True)]
    assert all(data["wide"].is_pinned() for data in found)
    there = [data.to(gpu, non_blocking=True) for data in found]
    assert all(same(*pair) for pair in zip([row for d in there for row in d["ragged"].unbind()], rows, strict=True))
    assert [text for data in there for text in data["text"]] == list("abcdefgh")
    shared.clear_partition(name)


def test_values_of_the_gpu_are_packed_into_pinned_buffers(gpu: torch.device) -> None:
    rows = [torch.randn(1000 + number, 3, device=gpu) for number in range(4)]

    def allocate(sizes: list[int]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]

    buffers = batch_encode_into([{"x": one, "n": number} for number, one in enumerate(rows)], allocate)[0]
    found = batch_decode_from(buffers)
    assert [one["n"] for one in found] == [0, 1, 2, 3]
    assert all(same(one["x"], row) for one, row in zip(found, rows, strict=True))
