"""A page of a service as its own process, and a visitor of it that has no browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

from fragments import Element, parsed
from paths import SOURCES
from zygote import CHILDREN

from transfer_queue.page.printable import ident

COMMAND = ["-c", "from transfer_queue.cli import main; main()", "page"]
Answer = tuple[int, dict[str, str], bytes]


class Stream:
    """Events of one viewer."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._answer = answer
        self._parts: dict[str, Element] = {}
        self.changed: frozenset[str] = frozenset()  # the ids of what came with the last look

    def next(self, name: str) -> Any:
        """The next event of this name: `map`, or `look`, which is the page after one. Blocks for as long as the
        connection lets it."""
        while True:
            event, data = self._event()
            if event in ("", "pulse"):
                parts = [one for one in parsed(data).children if isinstance(one, Element)]
                self._parts.update({one.attributes["id"]: one for one in parts})
                self.changed = frozenset(one.attributes["id"] for one in parts)
                if name == "look":
                    page = Element("", {})
                    page.children.extend(self._parts.values())
                    return page
            elif event == name:
                return json.loads(data)

    def _event(self) -> tuple[str, str]:
        """(name, data) of the next one."""
        name, data = "", list[str]()
        while True:
            line = self._answer.readline().decode()
            if not line:
                raise EOFError("the page has ended")
            if line == "\n" and (name or data):
                return name, "\n".join(data)
            if line.startswith("event: "):
                name = line[7:-1]
            elif line.startswith("data: "):
                data.append(line[6:-1])

    def until(self, name: str, condition: Any) -> Any:
        """The first event of that name for which `condition` holds."""
        while True:
            found = self.next(name)
            if condition(found):
                return found

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


class RunningPage:
    def __init__(self, url: str, process: Any) -> None:
        self.url = url
        self.process = process
        self.host = urlsplit(url).netloc

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, timeout=30)

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        """One request on a connection of its own."""
        connection = self.connect()
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def row(self, partition: str, **named: Any) -> tuple[int, Element]:
        """(status, what is shown of the row)."""
        status, _, body = self.ask("/row?" + urlencode({"partition": ident(partition), **named}))
        return status, parsed(body.decode())

    @contextlib.contextmanager
    def look(self, partition: str = "", **headers: str) -> Iterator[Stream]:
        """A viewer of the partition, for as long as the block lasts."""
        connection = self.connect()
        connection.request("GET", f"/events?partition={ident(partition) if partition else ''}", headers=headers)
        stream = Stream(connection, connection.getresponse())
        try:
            yield stream
        finally:
            stream.close()


@contextlib.contextmanager
def page_of(address: str, *arguments: str) -> Iterator[RunningPage]:
    """`tq page` of that service, ended by SIGTERM."""
    environment = {**os.environ, "PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": "1"}
    process = CHILDREN.start([*COMMAND, "--address", address, *arguments], environment)
    try:
        said = process.stdout.readline().decode().strip()
        url = json.loads(said)["url"] if "--json" in arguments else said
        assert url.startswith("http://"), f"the page did not start: {url!r}"
        yield RunningPage(url, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        process.stdin.close()
        process.stdout.close()


@contextlib.contextmanager
def served(run_dir: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """(process, announced addresses) of `tq serve`; its standard error is a pipe. Killed where the block leaves it."""
    command = [sys.executable, "-c", "from transfer_queue.cli import main; main()", "serve", "--run-dir", run_dir]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TQ_")}
    environment["PYTHONPATH"] = SOURCES
    with subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
