"""A peer that asks and asks without reading its answers: the server's memory stays bounded, others are served."""

from __future__ import annotations

import contextlib

import psutil
import torch

import transfer_queue as tq
from transfer_queue.client.connection import Connection
from transfer_queue.wire import messages as m
from transfer_queue.wire.framing import frame


def test_answers_nobody_reads_hold_little_memory_and_delay_nobody(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(60_000, dtype=torch.uint8)})
    server = psutil.Process(client.stats()["pid"])
    before = server.memory_info().rss
    greedy = Connection(client.session.address, b"greedy", 5.0)
    asked = b"".join(frame(m.encode(m.Get(rid, "p", ["a"], None, None, False))) for rid in range(4000))
    greedy._socket.settimeout(0.5)
    with contextlib.suppress(TimeoutError):  # the server stops reading
        greedy._socket.sendall(asked)
    assert tq.kv_batch_get("a", "p")["x"].shape[0] == 1
    assert server.memory_info().rss < before + (32 << 20)
    greedy._socket.settimeout(5.0)
    answered = 0
    while answered < 100:  # once it reads, it is answered
        nbytes = greedy._socket.recv_into(greedy._reader.buffer())
        assert nbytes
        answered += len(list(greedy._reader.advance(nbytes)))
    greedy.close()
