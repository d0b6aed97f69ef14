"""A step's rollout batch to four data-parallel ranks: from the driver's Python lists to tensors on every rank.

    python -m bench.bridge [--rounds 15] [--profiles T1,R3,VL,VL4]

In .venv-engines with Ray as a peer; the ways in turn, another one first in each round, four rank processes of one
thread each. The time is from before the driver tells anybody to when the last rank has looked at all of its values: no
rank waits for data before that. All ranks add the same numbers up.

bridge  `RolloutBridge.put`, and `fetch` on each rank, which is told to at the beginning.
vime    the adapter for vime, with Megatron's process groups (where megatron-core is installed).
ray     as slime and vime do without a queue: `ray.put` of each rank's part of the dict, `ray.get` on each rank, which
        makes tensors of the lists. Images are put as arrays: Ray maps those, and copies tensors.
ray+np  the same, with all lists made arrays by the driver, within the time.

T1  256 rows of lists, 5.8 MB.   R3  64 rows with routed experts (tokens, 48, 8) int32, 237 MB.
VL  64 rows with an image each, 302 MB.   VL4  the same with 16 images, of which 4 rows have each.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing as mp
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

import transfer_queue as tq
from transfer_queue.bridge import Numbers, Objects, Ragged, RolloutBridge, RolloutSchema, Schedule

RANKS = 4
KINDS = {
    "tokens": (np.int64, torch.int64), "loss_masks": (np.int32, torch.int32),
    "rollout_log_probs": (np.float32, torch.float32),
}  # fmt: skip
EXPERTS, IMAGES = "rollout_routed_experts", "multimodal_train_inputs"
SCHEMA = RolloutSchema({
    "tokens": Ragged(dtype="int64", stored="int32"), "loss_masks": Ragged(dtype="int32", stored="uint8"),
    "rollout_log_probs": Ragged(dtype="float32"), "response_lengths": Numbers(dtype="int64"), "rewards": Numbers(),
    "rollout_ids": Numbers(dtype="int64"), "rollout_mask_sums": Numbers(dtype="int64"),
    "total_lengths": Numbers(dtype="int64"), "raw_reward": Numbers(), "truncated": Numbers(dtype="int64"),
    "sample_indices": Numbers(dtype="int64"),
    "rollout_routed_experts": Ragged(dtype="int32", shape=(48, 8), optional=True),
    "multimodal_train_inputs": Objects(optional=True),
})  # fmt: skip
PROFILES = {
    "T1": {"rows": 256, "prompt": 200, "response": 2048},
    "R3": {"rows": 64, "prompt": 300, "response": 4096, "experts": True},
    "VL": {"rows": 64, "prompt": 1200, "response": 1024, "copies": 1},
    "VL4": {"rows": 64, "prompt": 1200, "response": 1024, "copies": 4},
}


def rollout(rows: int, prompt: int, response: int, experts: bool = False, copies: int = 0) -> dict[str, Any]:
    """A batch as vime's rollout makes it: columns of lists."""
    rng = np.random.RandomState(0)
    lengths = [int(min(response, max(64, rng.lognormal(np.log(response * 0.45), 0.6)))) for _ in range(rows)]
    total = [prompt + length for length in lengths]
    batch: dict[str, Any] = {
        "tokens": [rng.randint(0, 150_000, length).tolist() for length in total],
        "loss_masks": [[1] * length for length in lengths],
        "rollout_log_probs": [rng.randn(length).astype(np.float32).tolist() for length in lengths],
        "response_lengths": lengths, "rewards": [float(n % 2) for n in range(rows)], "rollout_ids": list(range(rows)),
        "rollout_mask_sums": list(lengths), "total_lengths": total, "raw_reward": [float(n % 2) for n in range(rows)],
        "truncated": [0] * rows, "sample_indices": list(range(rows)),
    }  # fmt: skip
    if experts:
        batch[EXPERTS] = [rng.randint(0, 128, (length - 1, 48, 8)).astype(np.int32) for length in total]
    if copies:
        images = [
            {"pixel_values": torch.randn(1000, 1176), "image_grid_thw": torch.tensor([[1, 25, 40]])}
            for _ in range(rows // copies)
        ]
        batch[IMAGES] = [images[row // copies] for row in range(rows)]
    return batch


def total_of(columns: dict[str, Any]) -> float:
    """Every value looked at."""
    found = 0.0
    for name in (*KINDS, EXPERTS):
        for row in columns.get(name) or ():
            found += float(row.sum())
    for one in columns.get(IMAGES) or ():
        found += sum(float(value.sum()) for value in one.values())
    return found


def looked_at(columns: dict[str, Any]) -> tuple[float, float]:
    """When all values had been looked at, and their sum."""
    total = total_of(columns)
    return time.monotonic(), total


def rank(number: int, connection: Any) -> None:
    torch.set_num_threads(1)
    tq.init()
    bridge = RolloutBridge(tq.get_client(), SCHEMA)
    for partition in iter(connection.recv, None):
        fetched = bridge.fetch(partition, "actor", number, RANKS)
        connection.send(looked_at(fetched.columns))
        del fetched
    tq.close()


def vime_rank(number: int, connection: Any) -> None:
    """A Megatron rank of four data-parallel ones, as vime's adapter sees it."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from transfer_queue.integrations.vime import TransferQueueBridge

    torch.set_num_threads(1)
    args, store = connection.recv()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    parallel_state.initialize_model_parallel()
    bridge = TransferQueueBridge.connect(args)
    connection.send("connected")
    for rollout_id in iter(connection.recv, None):
        columns, _ = bridge.get_data(rollout_id, task_name="actor_train")
        connection.send(looked_at(columns))
        del columns
    bridge.close()
    dist.destroy_process_group()


@contextmanager
def vime_way() -> Iterator[Callable[[dict[str, Any]], tuple[float, float]]]:
    """The adapter's driver and rollout manager in this process."""
    from transfer_queue.integrations.vime import TransferQueueBridge

    args = argparse.Namespace(
        enable_vime_transfer_queue=True, max_staleness=0, num_data_storage_units=1, rollout_batch_size=256,
        n_samples_per_prompt=1, actor_num_nodes=1, actor_num_gpus_per_node=RANKS, use_rollout_logprobs=True,
        tq_config={},
    )  # fmt: skip
    bridge = TransferQueueBridge.connect(args)
    context = mp.get_context("spawn")
    pipes, processes, numbers = [], [], iter(range(1 << 30))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(RANKS):
            mine, its = context.Pipe()
            process = context.Process(target=vime_rank, args=(number, its), daemon=True)
            process.start()
            mine.send((args, f"{folder}/store"))
            pipes.append(mine)
            processes.append(process)
        assert [pipe.recv() for pipe in pipes] == ["connected"] * RANKS

        def way(batch: dict[str, Any]) -> tuple[float, float]:
            rollout_id, count = next(numbers), len(batch["tokens"])
            began = time.monotonic()
            for pipe in pipes:
                pipe.send(rollout_id)
            bridge.transfer_rollout_data(rollout_id, batch, schedule=Schedule.even(count, RANKS))
            ends, sums = zip(*[pipe.recv() for pipe in pipes], strict=True)
            bridge.clear_partition(rollout_id)
            return max(ends) - began, sum(sums)

        yield way
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()


@contextmanager
def bridge_way() -> Iterator[Callable[[dict[str, Any]], tuple[float, float]]]:
    tq.init()
    bridge = RolloutBridge(tq.get_client(), SCHEMA)
    context = mp.get_context("spawn")
    pipes, processes, numbers = [], [], iter(range(1 << 30))
    for number in range(RANKS):
        mine, its = context.Pipe()
        process = context.Process(target=rank, args=(number, its), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)

    def way(batch: dict[str, Any]) -> tuple[float, float]:
        partition = f"step_{next(numbers)}"
        began = time.monotonic()
        for pipe in pipes:
            pipe.send(partition)
        bridge.put(partition, batch, dp_size=RANKS)
        ends, sums = zip(*[pipe.recv() for pipe in pipes], strict=True)
        bridge.clear(partition)
        return max(ends) - began, sum(sums)

    yield way
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    tq.close()


def as_arrays(part: dict[str, Any], lists: bool) -> dict[str, Any]:
    """A part of a batch whose images are arrays, which Ray maps; with `lists` those of numbers, too. What several rows
    share stays one object, which is pickled once."""
    made = {id(one): {name: value.numpy() for name, value in one.items()} for one in part.get(IMAGES, ())}
    found = {**part, IMAGES: [made[id(one)] for one in part[IMAGES]]} if IMAGES in part else dict(part)
    if lists:
        found |= {name: [np.array(row, dtype) for row in part[name]] for name, (dtype, _) in KINDS.items()}
    return found


def as_tensors(columns: dict[str, Any]) -> dict[str, Any]:
    """What a rank makes of what Ray gave it; arrays stay where they are."""
    found = dict(columns)
    for name, (_, dtype) in KINDS.items():
        found[name] = [torch.as_tensor(row, dtype=dtype) for row in columns[name]]
    if EXPERTS in columns:
        found[EXPERTS] = [torch.as_tensor(row) for row in columns[EXPERTS]]
    if IMAGES in columns:
        found[IMAGES] = [{name: torch.as_tensor(value) for name, value in one.items()} for one in columns[IMAGES]]
    return found


@contextmanager
def ray_ways() -> Iterator[dict[str, Callable[[dict[str, Any]], tuple[float, float]]]]:
    import ray

    ray.init(address="local", num_cpus=RANKS, include_dashboard=False, object_store_memory=3 << 30, log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Rank:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

        def consume(self, box: list[Any]) -> tuple[float, float]:
            return looked_at(as_tensors(ray.get(box[0])))

    ranks = [Rank.remote() for _ in range(RANKS)]

    def way(batch: dict[str, Any], lists: bool) -> tuple[float, float]:
        count = len(batch["tokens"])
        began = time.monotonic()
        asked = []
        for number, one in enumerate(ranks):
            part = slice(count * number // RANKS, count * (number + 1) // RANKS)
            box = ray.put(as_arrays({name: column[part] for name, column in batch.items()}, lists))
            asked.append(one.consume.remote([box]))
        ends, sums = zip(*ray.get(asked), strict=True)
        return max(ends) - began, sum(sums)

    yield {"ray": partial(way, lists=False), "ray+np": partial(way, lists=True)}
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profiles", default=",".join(PROFILES))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with bridge_way() as ours, ExitStack() as stack:
        ways: dict[str, Callable[..., tuple[float, float]]] = {"bridge": ours}
        if importlib.util.find_spec("megatron"):
            ways["vime"] = stack.enter_context(vime_way())
        if importlib.util.find_spec("ray"):
            ways |= stack.enter_context(ray_ways())
        _compare(ways, args)


def _compare(ways: dict[str, Callable[..., tuple[float, float]]], args: argparse.Namespace) -> None:
    for profile in args.profiles.split(","):
        batch = rollout(**PROFILES[profile])
        times: dict[str, list[float]] = {name: [] for name in ways}
        expected = None
        for number in range(args.rounds + 2):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                took, total = ways[name](batch)
                expected = total if expected is None else expected
                assert abs(total - expected) <= 1e-4 * abs(expected), (name, total, expected)
                if number >= 2:
                    times[name].append(1e3 * took)
        for name, found in times.items():
            p95 = sorted(found)[int(0.95 * (len(found) - 1))]
            print(f"{profile:4} {name:7} median {statistics.median(found):7.1f} ms   p95 {p95:7.1f} ms", flush=True)


if __name__ == "__main__":
    main()
