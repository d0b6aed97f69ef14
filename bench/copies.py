"""What 16 copies of one image cost: bytes stored, and how long the put takes.

    python -m bench.copies [--rounds 15] [--mb 8]

Each way in turn in each round, in one process beside its server (in .venv-engines with Ray as a peer): one image; 16
times the same object; 16 clones in dicts; 16 rows of a dense tensor; 16 puts of a clone each. "plain" is a put that
does not ask for sharing, "dedupe" one that does. Ray: an object for each copy, as a program without a queue puts them,
and one object for a list of all. Every way is read back and compared. Each round begins with an empty store whose
memory was used before.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import transfer_queue as tq

COPIES = 16


def puts(image: torch.Tensor, dedupe: bool) -> dict[str, Callable[[], Any]]:
    """The ways, by name; each returns what `read` takes."""
    client = tq.get_client()
    clones = [image.clone() for _ in range(COPIES)]
    stacked = torch.stack(clones)

    def put(column: Any) -> Any:
        return client.put({"image": column}, partition_id="p", dedupe=dedupe)

    def separately() -> Any:
        metas = [put([{"pixel_values": clone}]) for clone in clones]
        return type(metas[0]).concat(metas)

    return {
        "one image": lambda: put([{"pixel_values": image}]),
        "one object": lambda: put([{"pixel_values": image}] * COPIES),
        "clones": lambda: put([{"pixel_values": clone} for clone in clones]),
        "dense rows": lambda: put(stacked),
        "16 puts": separately,
    }


def measured(way: Callable[[], Any], image: torch.Tensor) -> tuple[float, int, float]:
    """Milliseconds of the put, bytes that it stored, milliseconds of a get of all rows with a look at each image."""
    client = tq.get_client()
    gc.collect()
    while client.stats()["arena_nbytes_used"] or client.stats()["pinned_nbytes"]:
        time.sleep(0.001)  # what the round before held is given back
    began = time.perf_counter()
    meta = way()
    put_ms = 1e3 * (time.perf_counter() - began)
    stored = client.stats()["arena_nbytes_used"]
    began = time.perf_counter()
    found = client.get_data(meta)["image"]
    rows = list(found) if isinstance(found, torch.Tensor) else [one["pixel_values"] for one in found.tolist()]
    total = sum(float(row[0, 0]) for row in rows)
    get_ms = 1e3 * (time.perf_counter() - began)
    assert abs(total - len(rows) * float(image[0, 0])) < 1e-3 * len(rows)
    assert all(torch.equal(row.reshape(image.shape), image) for row in rows)
    del found, rows
    client.clear_partition("p")
    return put_ms, stored, get_ms


def ray_ways(image: torch.Tensor) -> dict[str, Callable[[], float]]:
    """Milliseconds of the puts, with Ray."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=1 << 31, log_to_driver=False)
    clones = [image.clone().numpy() for _ in range(COPIES)]

    def timed(put: Callable[[], Any]) -> float:
        began = time.perf_counter()
        held = put()
        took = 1e3 * (time.perf_counter() - began)
        del held
        return took

    return {
        "ray, an object each": lambda: timed(lambda: [ray.put(clone) for clone in clones]),
        "ray, one list": lambda: timed(lambda: ray.put(clones)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mb", type=float, default=8.0)
    args = parser.parse_args()
    image = torch.randn(int(args.mb * 1e6 / 1176 / 4), 1176)
    tq.init()
    ways = {(name, dedupe): way for dedupe in (False, True) for name, way in puts(image, dedupe).items()}
    peers = ray_ways(image) if importlib.util.find_spec("ray") else {}
    found: dict[Any, list[Any]] = {key: [] for key in [*ways, *peers]}
    for number in range(args.rounds + 3):
        for key, way in ways.items():
            result = measured(way, image)
            if number >= 3:
                found[key].append(result)
        for name, peer in peers.items():
            took = peer()
            if number >= 3:
                found[name].append((took, 0, 0.0))
    one = statistics.median(put for put, _, _ in found["one image", False])
    print(f"an image of {image.nbytes / 1e6:.1f} MB; medians of {args.rounds} rounds; x: of the plain put of one image")
    for key, results in found.items():
        put_ms, stored, get_ms = (statistics.median(column) for column in zip(*results, strict=True))
        label = f"{'dedupe' if key[1] else 'plain':7} {key[0]}" if isinstance(key, tuple) else key
        p95 = sorted(put for put, _, _ in results)[int(0.95 * (len(results) - 1))]
        print(
            f"{label:24} put {put_ms:7.2f} ms (p95 {p95:7.2f})  {put_ms / one:5.2f} x"
            f"   stored {stored / image.nbytes:6.2f} images   get {get_ms:6.2f} ms"
        )
    tq.close()


if __name__ == "__main__":
    main()
