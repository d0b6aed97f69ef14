"""An asynchronous run with heavy-tailed responses against the synchronous one, and against TransferQueue 0.1.11.

    python -m bench.lengths [--peers 0.1.11] [--rounds 3] [--only 300]

`sync`, `async` and, in the first round only, `first` are the modes of `examples/async_lengths.py`, whose settings and
whose policy all have; `--only` names the microseconds that a token takes, one table for each. `0.1.11` makes the run
of `async` with that package's keys and tags: the trainer puts a key for each answer, the groups of a version `lead`
versions ahead; engines list the keys every 10 ms, take those of their own and put their answers; the trainer lists the
answers every 10 ms until all of its version are there. Keys are dealt to engines by their number: there is nothing to
claim them with. Each run has processes of its own; systems take turns in each round. Seconds are from when all engines
are up; medians, and the lowest and highest of the rounds. `to 90 %`: when the policy gave so many right answers.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

from bench.contenders import Contender, arguments, contenders, in_turn
from bench.environments import ROOT
from bench.read_systems import NUM_CPUS

sys.path.append(str(ROOT / "examples"))
import async_lengths as example

LIMIT_S = 600
POLL_S = 0.01


def measure(system: str, case: str) -> None:
    """Prints what the table has of a run; `case` is the microseconds of a token."""
    import torch

    import transfer_queue as tq

    torch.set_num_threads(1)
    settings: dict[str, Any] = example.SETTINGS | {"token_us": float(case)}
    if system == "0.1.11":
        found = polled(**settings)
    else:
        tq.init()
        found = example.run(system, **settings)
    lengths, asked = found.pop("lengths"), found.pop("asked")
    found |= {
        "to_all": example.distance(lengths, asked), "to_distribution": example.distance(lengths),
        "mean": statistics.mean(lengths), "mean_of_all": statistics.mean(asked),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    tq.close()


# the run on keys and tags


def join(address: str | None) -> None:
    """A Ray cluster, new or at that address, and TransferQueue in it."""
    import ray

    import transfer_queue as tq

    more: dict[str, Any] = {"num_cpus": NUM_CPUS, "include_dashboard": False} if address is None else {}
    ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **more)
    tq.init()


def looked_up(partition: str) -> Iterator[dict[str, dict[str, Any]]]:
    """Keys and tags of a partition, again and again."""
    import transfer_queue as tq

    while True:
        yield tq.kv_list(partition).get(partition, {})
        time.sleep(POLL_S)


def engine(rank: int, engines: int, slots: int, token_s: float, count: int, address: str, ready: Any) -> None:
    """Answers those of `count` keys that have its rank."""
    import torch

    import transfer_queue as tq

    torch.set_num_threads(1)
    join(address)
    policy, left = example.Policy(), set(range(rank, count, engines))
    running: list[tuple[float, int, dict[str, Any], dict[str, Any]]] = []
    ready.wait()
    for prompts in looked_up("prompts"):
        here = sorted(number for number in map(int, prompts) if number in left and prompts[str(number)])
        for number in here[: slots - len(running)]:
            asked = prompts[str(number)]
            if policy.version < asked["version"]:
                example.load(policy, tq.kv_batch_get(keys="policy", partition_id="weights"))
            row, reward = example.answer(policy, number, asked["length"])
            tag = {"reward": reward, "oldest_version": policy.version}
            heapq.heappush(running, (time.monotonic() + token_s * asked["length"], number, row, tag))
            left.discard(number)
        ended = []
        while running and running[0][0] <= time.monotonic():
            ended.append(heapq.heappop(running))
        if ended:
            put_answers(ended)
        if not left and not running:
            return


def put_answers(ended: list[Any]) -> None:
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq

    fields = {
        name: torch.nested.as_nested_tensor([row[name] for _, _, row, _ in ended], layout=torch.jagged)
        for name in example.FIELDS
    }
    keys, tags = [str(number) for _, number, _, _ in ended], [tag for *_, tag in ended]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, len(ended)), tags=tags)


class Keys:
    """What the trainer calls a pool, on keys and tags: the groups of a version, once all of their answers are there."""

    def __init__(self, steps: int, groups: int, lead: int) -> None:
        self._steps, self._groups, self._lead = steps, groups, lead
        self.asked: list[int] = []
        self._opened, self.consumed, self.version = 0, 0, 0

    def advance(self, version: int) -> None:
        """Put the keys of the versions that may be begun now."""
        import transfer_queue as tq

        self.version = version
        while self._opened < min(self._steps, version + self._lead + 1):
            first = self._opened * self._groups
            lengths = [length for group in range(first, first + self._groups) for length in example.draw(group)]
            keys = [str(first * example.SIBLINGS + number) for number in range(len(lengths))]
            tags = [{"length": length, "version": version} for length in lengths]
            tq.kv_batch_put(keys=keys, partition_id="prompts", tags=tags)
            self.asked += lengths
            self._opened += 1

    def select(self, groups: int) -> Any:
        """Waits until all answers of this version have their tags, which come after their values."""
        import transfer_queue as tq

        if self.version == self._steps:
            return SimpleNamespace(groups=[])
        count = groups * example.SIBLINGS
        keys = [str(self.version * count + number) for number in range(count)]
        for tags in looked_up("train"):
            if all(tags.get(key) for key in keys):
                break
        members = [SimpleNamespace(**tags[key]) for key in keys]
        parts = [members[first : first + example.SIBLINGS] for first in range(0, count, example.SIBLINGS)]
        made = [SimpleNamespace(members=part, rewards=[one.reward for one in part]) for part in parts]
        return SimpleNamespace(groups=made, metadata=tq.get_client().kv_retrieve_meta(keys, "train"), keys=keys)

    def ack(self, batch: Any, clear: bool) -> None:
        import transfer_queue as tq

        self.consumed += len(batch.groups)
        for partition in ("train", "prompts") if clear else ():
            tq.kv_clear(batch.keys, partition)


def polled(
    steps: int, groups: int, engines: int, slots: int, lead: int, token_us: float, rate: float, goal: float
) -> dict[str, Any]:
    """As `run` of the example."""
    import ray
    import torch

    torch.manual_seed(0)
    join(None)
    keys, policy = Keys(steps, groups, lead), example.Policy()
    example.publish(policy, 0)
    context = get_context("spawn")
    ready = context.Barrier(engines + 1)
    count, address = steps * groups * example.SIBLINGS, ray.get_runtime_context().gcs_address
    processes = [
        context.Process(target=engine, args=(rank, engines, slots, token_us / 1e6, count, address, ready), daemon=True)
        for rank in range(engines)
    ]
    for process in processes:
        process.start()
    ready.wait(LIMIT_S)
    keys.advance(0)
    found: dict[str, Any] = example.train(keys, policy, groups, rate, goal)
    for process in processes:
        process.join()
    return found | {"asked": keys.asked, "groups": [steps * groups, keys.consumed, steps * groups - keys.consumed]}


# the table


def main() -> None:
    options = arguments(__doc__, [f"{example.SETTINGS['token_us']:.0f}"], 3)
    systems = {name: Contender(name, tree=ROOT) for name in ("sync", "async", "first")}
    systems |= contenders(options.peers, print)
    for case in options.only.split(","):
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for name, measured in in_turn(systems, "bench.lengths", case, LIMIT_S, options.rounds, once=("first",)):
            found[name] += [measured] if measured is not None else []
            print(f"load {os.getloadavg()[0]:.1f} after {name}", file=sys.stderr, flush=True)
        print(f"{case} us a token: {example.SETTINGS}")
        for name, rounds in found.items():
            print(line(name, rounds, found["sync"]) if rounds else f"{name:7} not done within {LIMIT_S} s", flush=True)


def line(name: str, rounds: list[dict[str, Any]], sync: list[dict[str, Any]]) -> str:
    def spread(key: str) -> str:
        values = [one[key] for one in rounds]
        ratio = statistics.median(one[key] for one in sync) / statistics.median(values) if sync else math.nan
        return f"{statistics.median(values):6.1f} s ({min(values):.1f} to {max(values):.1f}), x {ratio:.2f}"

    last = rounds[-1]
    step = last["reached_step"]
    groups, age = "/".join(map(str, last["groups"])), f"{last['age']:.1f} ({last['oldest']})"
    waited = statistics.median(one["waited_s"] for one in rounds)
    return (
        f"{name:7} to 90 %{spread('reached_s')} (step {step})   {last['steps']} steps{spread('seconds')}\n"
        f"        trainer waited {waited:.1f} s   right at the end {last['accuracy']:.1%}   versions old {age}   "
        f"groups opened/consumed/evicted {groups}\n"
        f"        mean length {last['mean']:.1f} of {last['mean_of_all']:.1f}   KS {last['to_all']:.4f} to all, "
        f"{last['to_distribution']:.4f} to the distribution"
    )


if __name__ == "__main__":
    main()
