"""A peer that asks and asks without reading its answers: the server's memory stays bounded, others are served."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import psutil
import torch
from hosts import TOKEN, Host

import transfer_queue as tq
from transfer_queue.client.connection import Connection
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address
from transfer_queue.wire.blocking import at_most
from transfer_queue.wire.framing import frame


def test_answers_nobody_reads_hold_little_memory_and_delay_nobody(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(60_000, dtype=torch.uint8)})
    server = psutil.Process(client.stats()["pid"])
    before = server.memory_info().rss
    greedy = Connection(client.session.address, b"greedy", 5.0)
    asked = b"".join(frame(m.encode(m.Get(rid, "p", ["a"], None, None, False))) for rid in range(4000))
    greedy._frames.socket.settimeout(0.5)
    with contextlib.suppress(TimeoutError):  # the server stops reading
        greedy._frames.socket.sendall(asked)
    assert tq.kv_batch_get("a", "p")["x"].shape[0] == 1
    assert server.memory_info().rss < before + (32 << 20)
    greedy._frames.socket.settimeout(None)
    for rid in range(100):  # once it reads, it is answered
        assert greedy._frames.receive(5.0, at_most(1 << 20))[0].rid == rid
    greedy.close()


def test_large_answers_to_other_hosts_come_whole_and_in_order_and_delay_nobody() -> None:
    host = Host()
    try:
        rows = torch.arange(8 << 20, dtype=torch.int64)
        host.kv_put(["a"], "p", {"x": rows.view(1, -1)})
        name, _, port = host.server.tcp.rpartition(":")
        far = Connection(Address(host=name, port=int(port), token=TOKEN), b"far", 20.0)
        located, _ = far.call(m.Get(1, "p", ["a"], None, None, False), None, 20.0)
        block = located.pieces[0].block
        taken, _ = far.call(m.Pin(2, np.array([block], np.int64).tobytes()), None, 20.0)
        nbytes = taken.pieces[0].nbytes
        reads = [m.Read(rid, block, 0, nbytes) for rid in range(3, 5)]
        lists = [m.ListPartitions(rid) for rid in range(5, 105)]
        far._frames.socket.sendall(b"".join(frame(m.encode(one)) for one in (*reads, *lists)))
        assert host.kv_get(["a"], "p")["x"].unbind()[0][-1] == rows[-1], "others are served meanwhile"
        for read in reads:
            _, data = far.answer(read, 20.0)
            assert np.frombuffer(data, np.int64)[-len(rows) :].tolist()[-3:] == rows[-3:].tolist()
            assert len(data) == nbytes
        answers = [reply.rid for reply in rest_of(far, len(lists))]
        assert answers == [one.rid for one in lists]
        far.close()
    finally:
        host.close()


def rest_of(connection: Connection, count: int) -> list[Any]:
    """The next replies of a connection on which several requests were sent."""
    return [connection._frames.receive(20.0, at_most(1 << 20))[0] for _ in range(count)]
