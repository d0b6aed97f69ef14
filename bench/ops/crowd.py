"""What one of many processes does at the same moment as the others."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from typing import Any

import numpy as np

from bench.clients import Client, new_client
from bench.ops.calls import row_fields
from bench.session import Session, spec_name

ROWS_A_TURN = 4
TURN = 2 * ROWS_A_TURN + 2
CHECK_EVERY = 16
"""Turns in which the values are looked at: that takes torch as long as the whole get."""
MAX_SAMPLES = 2000


def open_clients(session: Session, num: int) -> dict[str, Any]:
    """Have `num` clients, keeping those there are."""
    clients = session.scratch.setdefault("clients", [])
    while len(clients) < num:
        clients.append(new_client(session))
    return {}


def close_clients(session: Session) -> dict[str, Any]:
    """End all of them."""
    for client in session.scratch.pop("clients", []):
        client.close()
    return {}


def wait_until(begin_ns: int) -> None:
    """Sleep until a moment of the monotonic clock, which all processes share."""
    time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)


def mixed(session: Session, partition: str, num: int, begin_ns: int, seconds: float) -> dict[str, Any]:
    """`num` threads, each with its client and a partition of its own, put, get, list and clear rows for some seconds.

    A turn is 4 puts, 4 gets, a listing and a clear. `ops` are those that succeeded, `failures` those that raised or
    returned something else, `first_failure` is one of them; `each_s` is a sample of what they took, and `cpu_s` the
    processor time of this process.
    """
    totals: list[dict[str, Any]] = []

    def work(number: int) -> None:
        totals.append(turns(session.scratch["clients"][number], f"{partition}-{os.getpid()}-{number}", end_ns))

    end_ns = begin_ns + int(seconds * 1e9)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(num)]
    gc.collect()
    wait_until(begin_ns)
    spent = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.process_time() - spent
    taken = sorted(s for one in totals for s in one["each_s"])
    return {
        "ops": sum(one["ops"] for one in totals),
        "failures": sum(one["failures"] for one in totals),
        "first_failure": next((one["first_failure"] for one in totals if one["first_failure"]), ""),
        "cpu_s": spent,
        "each_s": taken[:: len(taken) // MAX_SAMPLES + 1],
        "end_ns": max((one["end_ns"] for one in totals), default=end_ns),
    }


def turns(client: Client, partition: str, end_ns: int) -> dict[str, Any]:
    """Turns of one client until it is late enough; its rows are cleared."""
    found: dict[str, Any] = {"ops": 0, "failures": 0, "first_failure": "", "each_s": [], "end_ns": 0}
    fields = [row_fields(i) for i in range(ROWS_A_TURN)]
    keys = [f"row-{i}" for i in range(ROWS_A_TURN)]
    for number in itertools.count():
        operation = number % TURN
        start = time.monotonic_ns()
        if start >= end_ns and operation == 0:
            break
        try:
            perform(client, partition, operation, keys, fields, check=number // TURN % CHECK_EVERY == 0)
            found["ops"] += 1
        except Exception as error:  # noqa: BLE001 - what a system under test raises is a failure of it
            found["failures"] += 1
            found["first_failure"] = found["first_failure"] or f"{type(error).__name__}: {error}"[:200]
        found["each_s"].append((time.monotonic_ns() - start) / 1e9)
    found["end_ns"] = time.monotonic_ns()
    return found


def perform(
    client: Client, partition: str, operation: int, keys: list[str], fields: list[dict[str, Any]], check: bool
) -> None:
    """The operation of this number in a turn. Raises AssertionError for a wrong answer."""
    row = operation % ROWS_A_TURN
    if operation < ROWS_A_TURN:
        client.put(keys[row], partition, fields[row])
    elif operation < 2 * ROWS_A_TURN:
        found = client.get(keys[row], partition)
        assert len(found) == 1, "no row"
        assert not check or int(found["tokens"][0][-1]) == int(fields[row]["tokens"][-1]), "another row"
    elif operation == 2 * ROWS_A_TURN:
        assert sorted(client.names(partition)) == keys, "other keys"
    else:
        client.clear(keys, partition)


def share(
    session: Session,
    spec: dict[str, Any],
    partition: str,
    begin_ns: int,
    part: int,
    parts: int,
    times: int,
) -> dict[str, Any]:
    """Get one of `parts` equal shares of a batch with a copy, so many times; monotonic nanoseconds at begin and end.

    The first and the last row of every field are checked.
    """
    rows = spec["rows"]
    positions = range(part * rows // parts, (part + 1) * rows // parts)
    keys = session.keys(rows, positions)
    gc.collect()
    wait_until(begin_ns)
    start = time.monotonic_ns()
    result: Any = None
    for _ in range(times):
        result = None  # its memory is used again
        result = session.system.get(partition, keys, list(positions), True)
    end = time.monotonic_ns()
    batch = session.payloads[spec_name(spec)]
    for name in batch.keys():  # noqa: SIM118 - a TensorDict's rows iterate
        for got, position in ((0, positions[0]), (-1, positions[-1])):
            assert bool((result[name][got] == batch[name][position]).all()), f"{name} of row {position} differs"
    return {"begin_ns": start, "end_ns": end}


def rejoin(session: Session, threads: int = 0) -> dict[str, Any]:
    """Leave the system and join it again, so that nothing is mapped (ours only); `threads` of copies, where not 0.

    How many these are is a setting of the service, so it is replaced in the session.
    """
    address = os.environ["TQ_ADDRESS"]
    session.tq.close()
    os.environ["TQ_ADDRESS"] = address
    session.tq.init()
    if threads:
        own = session.tq.get_client().session
        own.mover.close()
        own.mover = type(own.mover)(threads)
    return {}


def memcpy(session: Session, nbytes: int, threads: int) -> dict[str, Any]:
    """Seconds of copying so many bytes of warm memory with so many threads, the best of 3."""
    key = f"memcpy-{nbytes}"
    if key not in session.scratch:
        session.scratch[key] = (np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8))
    source, target = session.scratch[key]
    return {"s": min(copied(source, target, threads) for _ in range(3))}


def copied(source: Any, target: Any, threads: int) -> float:
    def part(number: int) -> None:
        rows = slice(number * len(source) // threads, (number + 1) * len(source) // threads)
        np.copyto(target[rows], source[rows])

    workers = [threading.Thread(target=part, args=(number,)) for number in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start
