"""Rows in a storage engine: ours, the engine's own API, SimpleStorage, and TransferQueue 0.1.11 on the same engine.

    python -m bench.engines [--engine MooncakeStore|Yuanrong|RayStore] [--rounds 9] [--no-peer]

302 MB: 1024 rows of 9 float32 fields; 9 MB: the same with 256 numbers a row. One process for each system, all on this
host; each round makes every call of every system once, in turn. `ours` and `raw` use an engine of their own each, whose
memory another process has (the server, as TransferQueue's does). `far`: the client has no unit on its host, so bytes
travel as between hosts. `pool`: Mooncake's own pool with a master. `durable`: RayStore's rows outlive their writer.
`few`: the first quarter of the rows, of all fields.
Then TransferQueue's complex batch (63 MB), 32 dicts with images (235 MB), and 1000 rows of 9 KB put one by one, in ours
and TransferQueue. Medians, p95 and the ratio to `ours`. `make bench-engines` installs what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS, FIELDS = 1024, 9
WIDTHS = {"302 MB": 8192, "9 MB": 256}
SETTINGS: dict[str, dict[str, Any]] = {
    "MooncakeStore": {"master_server_address": "127.0.0.1:0", "global_segment_size": 3 << 30},
    "Yuanrong": {"worker_port": 0, "metastore_port": 0, "worker_args": "--shared_memory_size_mb 3072"},
    "RayStore": {},
    "SimpleStorage": {},
}
ENGINES = ("MooncakeStore", "Yuanrong", "RayStore")
CALLS = ("put", "get", "few")
ALONE = 1000
PROFILES = ("complex", "images", f"{ALONE} rows alone")  # of ours and of TransferQueue: an engine knows bytes only


class Agent:
    """A process that measures one system: a line of JSON for each call, and one for each answer."""

    def __init__(self, name: str, engine: str, python: str) -> None:
        self.name = name
        paths = [str(ROOT)] if name == "0.1.11" else [str(ROOT), str(ROOT / "src")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQ_ADDRESS": ""}
        environment["TQ_TOKEN"] = "a token of this run"
        environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
        self._place = tempfile.TemporaryDirectory()  # 0.1.11 lets its engine write into the current one
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it lasts as long as the process
        self._process = subprocess.Popen(
            [python, __file__, "--agent", name, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, env=environment, cwd=self._place.name,
        )  # fmt: skip
        self.call("start", "9 MB")

    def call(self, what: str, size: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([what, size]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        self._log.seek(0)
        raise RuntimeError(f"{self.name} ended: {self._log.read()[-2000:].decode(errors='replace')}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._place.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-peer", action="store_true", help="without TransferQueue 0.1.11")
    parser.add_argument("--agent", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent is not None:
        _serve(*args.agent)
        return
    for engine in args.engine or ENGINES:
        agents: list[Agent] = []
        if not args.no_peer:  # first: it ends every master of Mooncake that it finds on the host
            from bench.contenders import LOG
            from bench.environments import peer_python

            agents.append(Agent("0.1.11", engine, str(peer_python(None, LOG))))
        more = {"MooncakeStore": ["ours, far", "ours, pool"], "RayStore": ["ours, durable"]}
        names = ["ours", "raw", *more.get(engine, ())]
        agents += [Agent(name, engine, sys.executable) for name in names]
        agents += [Agent(name, "SimpleStorage", sys.executable) for name in ("SimpleStorage", "SimpleStorage, far")]
        for size in WIDTHS:
            _measure(engine, size, agents, args.rounds)
        for profile in PROFILES:
            _measure(engine, profile, [agent for agent in agents if agent.name in ("0.1.11", "ours")], args.rounds)
        for agent in agents:
            agent.close()


def _measure(engine: str, size: str, agents: list[Agent], rounds: int) -> None:
    found: dict[tuple[str, str], list[float]] = {(agent.name, call): [] for agent in agents for call in CALLS}
    for turn in range(rounds + 2):
        for agent in agents:
            for call in CALLS:
                seconds = agent.call(call, size)
                if turn > 1:  # the first touch memory that nobody had touched
                    found[agent.name, call].append(1e3 * seconds)
            if turn == 0:
                agent.call("verify", size)
            agent.call("clear", size)
    print(f"\n{engine}, {size}, {rounds} rounds: ms, median (p95), ratio to ours")
    for agent in agents:
        cells = []
        for call in CALLS:
            values = sorted(found[agent.name, call])
            median, high = statistics.median(values), values[min(len(values) - 1, int(0.95 * len(values)))]
            ratio = median / statistics.median(found["ours", call])
            cells.append(f"{call} {median:8.1f} ({high:7.1f}) {ratio:5.2f}")
        print(f"  {agent.name:14}  {'   '.join(cells)}", flush=True)


# ---- in the process of a system


def _serve(name: str, engine: str) -> None:
    calls: dict[str, Callable[[str], Any]] = {}
    for line in sys.stdin:
        what, size = json.loads(line)
        if what == "start":
            calls = {"raw": _raw, "0.1.11": _transfer_queue}.get(name, _transfer_queue)(engine, name)
            print("seconds 0", flush=True)
            continue
        began = time.perf_counter()
        calls[what](size)
        print(f"seconds {time.perf_counter() - began}", flush=True)
    calls["end"]("")


def _transfer_queue(engine: str, name: str) -> dict[str, Callable[[str], Any]]:
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq
    from bench import digest
    from bench.systems import column_sums

    settings = _prepared(engine, name)
    is_far = name.endswith(", far")
    more = {"server": {"host": "127.0.0.1"}} if is_far else {}
    tq.init({"backend": {"storage_backend": engine, engine: settings}, **more})
    client: Any = _far_client() if is_far else tq.get_client()
    values: dict[str, Any] = {
        size: TensorDict({f"f{n}": torch.rand(ROWS, width) for n in range(FIELDS)}, batch_size=[ROWS])
        for size, width in WIDTHS.items()
    } | _profiles()
    metas: dict[str, Any] = {}

    def put(size: str) -> None:
        if isinstance(values[size], list):
            for number, row in enumerate(values[size]):
                tq.kv_put(key=f"k{number}", partition_id=f"train {size}", fields=row)
        else:
            metas[size] = client.put(values[size], partition_id=f"train {size}")

    def get(size: str, share: int = 1) -> Any:
        count = len(values[size]) // share
        if isinstance(values[size], list):
            found = tq.kv_batch_get(keys=[f"k{number}" for number in range(count)], partition_id=f"train {size}")
        else:
            found = client.get_data(metas[size].select_samples(list(range(count))) if share > 1 else metas[size])
        assert all(len(found[name]) == count for name in found.keys())  # noqa: SIM118  a TensorDict's rows iterate
        return found

    def few(size: str) -> None:
        get(size, share=4)

    def verify(size: str) -> None:
        """What was put came back, all of it."""
        put_ = values[size]
        expected = {name: [row[name] for row in put_] for name in put_[0]} if isinstance(put_, list) else put_
        sums = [{name: column_sums(one[name]) for name in one.keys()} for one in (get(size), expected)]  # noqa: SIM118
        digest.check(*sums)

    def clear(size: str) -> None:
        if isinstance(values[size], list):
            tq.kv_clear(keys=[f"k{number}" for number in range(len(values[size]))], partition_id=f"train {size}")
        else:
            client.clear_partition(f"train {size}")

    return {"put": put, "get": get, "few": few, "verify": verify, "clear": clear, "end": lambda size: tq.close()}


def _prepared(engine: str, name: str) -> dict[str, Any]:
    """The settings of a system, and Ray in this process where it needs that."""
    if name == "0.1.11":
        import ray

        ray.init(address="local", num_cpus=16, include_dashboard=False)
        return _of_peer(engine)
    if engine == "RayStore":
        from bench.engines_raw import ray_here

        ray_here()
    return SETTINGS[engine] | {"ours, pool": {"pool": True}, "ours, durable": {"durable": True}}.get(name, {})


def _profiles() -> dict[str, Any]:
    """TensorDicts of TransferQueue's complex shape and of images in dicts, and rows of 9 KB."""
    import torch
    from tensordict import TensorDict

    from bench.payloads import complex_, images
    from bench.systems import torch_column

    batches = {"complex": (complex_(1024, 2048), 1024), "images": (images(32), 32)}
    found: dict[str, Any] = {
        name: TensorDict({field: torch_column(column) for field, column in columns.items()}, batch_size=[rows])
        for name, (columns, rows) in batches.items()
    }
    found[PROFILES[2]] = [{f"f{n}": torch.rand(256) for n in range(FIELDS)} for _ in range(ALONE)]
    return found


def _far_client() -> Any:
    """A client of the service in this process as one of a host without a unit would be."""
    import transfer_queue as tq
    from transfer_queue.client.client import TransferQueueClient
    from transfer_queue.client.session import Session
    from transfer_queue.wire.address import parse_address

    near: Any = tq.get_client()
    where = f"tcp:{near.stats()['tcp']}"
    return TransferQueueClient.of(Session(parse_address(where, near.session.config["token"])))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _of_peer(engine: str) -> dict[str, Any]:
    if engine == "Yuanrong":
        return {
            "worker_port": free_port(),
            "metastore_port": free_port(),
            "worker_args": "--shared_memory_size_mb 3072",
        }
    if engine == "RayStore":
        return {}
    return {"auto_init": True, "metadata_server": "P2PHANDSHAKE", "global_segment_size": 3 << 30,
            "master_server_address": f"127.0.0.1:{free_port()}"}  # fmt: skip


def _raw(engine: str, name: str) -> dict[str, Callable[[str], None]]:
    """The engine's own batch calls, with one object for each field, as its documentation has it. The memory that is
    written from and read into is there and, where the engine wants that, registered."""
    from bench.engines_raw import RAW

    return RAW[engine](SETTINGS[engine], {size: 4 * ROWS * width for size, width in WIDTHS.items()}, FIELDS)


if __name__ == "__main__":
    main()
