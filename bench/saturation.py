"""A server that has more to do than it can: puts of one row, as fast as it takes them.

    python -m bench.saturation [--seconds 3] [--rounds 3]

One process drives all connections, with requests that are encoded beforehand, so that it needs a fraction of what a
client needs. `echo` is the floor: a server on the same event loop that decodes nothing, does nothing and answers each
frame with the bytes of an answer. `2 servers` is what sharding the partitions of a host would give.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from transfer_queue.codec.layout import Column, Layout, encode_layout
from transfer_queue.launch import local
from transfer_queue.schema import DENSE, FieldSchema
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address
from transfer_queue.wire.framing import PREFIX, FrameReader, frame

CASES = [(1, 1), (16, 1), (64, 1), (16, 8), (64, 8)]  # connections, requests under way on each
WARM_S = 0.5
PAYLOAD = bytes(64)
SHAPE = (16,)


class Rate(NamedTuple):
    """Puts a second; processor time of all servers and of the driver for one put, in microseconds."""

    puts: float
    servers_us: float
    driver_us: float


class Line:
    """One connection: it has `depth` requests under way."""

    def __init__(self, path: str, number: int, greets: bool) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self._number = number
        self._rid = 0
        self._rest = b""
        if greets:
            steps = handshake.greeting(parse_address(f"unix:{path}"), m.PROTOCOL_VERSION, os.urandom(16))
            handshake.carry_out(steps, self._exchange)
        self.socket.setblocking(False)
        layout = encode_layout(Layout(1, 64, [Column("x", DENSE, "float32", 4, SHAPE, -1, [(0, 64)], [])]))
        self._rest_of_put = ([FieldSchema("x", DENSE, "float32", SHAPE)], 0, layout, None, 0.0)

    def _exchange(self, message: m.Message) -> m.Message:
        self.socket.sendall(frame(m.encode(message)))
        data = self.socket.recv(1 << 16)
        nbytes, _ = PREFIX.unpack_from(data)
        answer: m.Message = m.decode_server(data[PREFIX.size : PREFIX.size + nbytes])
        return answer

    def send(self, count: int) -> None:
        parts = []
        for _ in range(count):
            self._rid += 1
            key = f"k{self._number}-{self._rid}"
            parts += [frame(m.encode(m.Commit(self._rid, "p", 1, [key], None, *self._rest_of_put)), 64), PAYLOAD]
        self.socket.sendall(b"".join(parts))

    def answers(self) -> int:
        """How many answers have come."""
        data, at, count = self._rest + self.socket.recv(1 << 18), 0, 0
        while len(data) - at >= PREFIX.size:
            header, payload = PREFIX.unpack_from(data, at)
            if len(data) - at < PREFIX.size + header + payload:
                break
            at += PREFIX.size + header + payload
            count += 1
        self._rest = data[at:]
        return count


def drive(
    paths: Sequence[str], pids: Sequence[int], connections: int, depth: int, seconds: float, greets: bool
) -> Rate:
    lines = [Line(paths[number % len(paths)], number, greets) for number in range(connections)]
    found = selectors.DefaultSelector()
    for line in lines:
        found.register(line.socket, selectors.EVENT_READ, line)
        line.send(depth)
    done, began, marks = 0, time.perf_counter(), (0.0, 0, 0.0, 0.0)
    while (now := time.perf_counter()) - began < WARM_S + seconds:
        if not marks[0] and now - began > WARM_S:
            marks = now, done, processor_s(pids), time.process_time()
        for key, _ in found.select(1):
            count = key.data.answers()
            done += count
            key.data.send(count)
    number, own = done - marks[1], time.process_time() - marks[3]
    rate = Rate(number / (now - marks[0]), 1e6 * (processor_s(pids) - marks[2]) / number, 1e6 * own / number)
    found.close()
    for line in lines:
        line.socket.close()
    return rate


def processor_s(pids: Sequence[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


class Echo(asyncio.BufferedProtocol):
    """Answers every frame with as many bytes as the answer to a put has, and looks at none."""

    def __init__(self) -> None:
        self._reader: FrameReader[int] = FrameReader(len, lambda _, nbytes: memoryview(bytearray(nbytes)))
        self._answer = frame(bytes(30))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._transport.write(self._answer * sum(1 for _ in self._reader.advance(nbytes)))


def serve_echo(path: str) -> None:
    import uvloop

    async def serve() -> None:
        await asyncio.get_running_loop().create_unix_server(Echo, path)
        print("up", flush=True)
        await asyncio.Event().wait()

    uvloop.run(serve())


def by_echo(connections: int, depth: int, seconds: float) -> Rate:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "echo")
        command = [sys.executable, "-c", f"from bench.saturation import serve_echo; serve_echo({path!r})"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                process.stdout.readline()
                return drive([path], [process.pid], connections, depth, seconds, False)
            finally:
                process.kill()


def by_servers(count: int, connections: int, depth: int, seconds: float) -> Rate:
    settings = {"sampler": {"class": "SequentialSampler"}, "budget_nbytes": 1 << 28}
    servers = [local.start(ServerConfig(owner_pid=os.getpid(), run_dir="", **settings)) for _ in range(count)]  # type: ignore[arg-type]
    try:
        paths = [server.address.removeprefix("unix:") for server in servers]
        return drive(paths, [server.pid for server in servers], connections, depth, seconds, True)
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for connections, depth in CASES:
        found: dict[str, list[Rate]] = {"echo": [], "1 server": [], "2 servers": []}
        for _ in range(options.rounds):
            found["echo"].append(by_echo(connections, depth, options.seconds))
            for count, name in ((1, "1 server"), (2, "2 servers")):
                if connections >= count:
                    found[name].append(by_servers(count, connections, depth, options.seconds))
        for name, rates in found.items():
            if rates:
                puts, servers_us, driver_us = (statistics.median(one) for one in zip(*rates, strict=True))
                print(
                    f"{connections:3} connections, {depth} under way on each, {name:9}: {puts:7,.0f} puts/s,"
                    f" server {servers_us:5.1f} us, driver {driver_us:5.1f} us",
                    flush=True,
                )


if __name__ == "__main__":
    main()
