"""One thread that asks a service while somebody looks, for all of them. It goes on when the service is gone."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable, TransferQueueError
from transfer_queue.page import shown
from transfer_queue.page.maps import MAX_RUNS, MapSeen, cost_of, is_due, state_of
from transfer_queue.page.printable import ident, printable
from transfer_queue.page.rates import RateWindow
from transfer_queue.wire.messages.overview import PartitionOverview, ServiceOverview

INTERVAL_S = 0.5
IDLE_S = 5.0  # so long the page stays attached when nobody looks any more


class Look:
    """What was seen of the service at one moment, and, where it did not answer, why. Encoded once for all viewers, in
    the thread that serves them; the maps were encoded by whoever asked for them."""

    def __init__(
        self,
        number: int,
        overview: ServiceOverview | None,
        trouble: str,
        rates: RateWindow,
        maps: Mapping[str, MapSeen] = MappingProxyType({}),
    ) -> None:
        self.number = number
        self.maps = maps  # by hash, the newest of each partition that somebody looks at
        self.overview = overview
        self.trouble = trouble
        self.partitions = {} if overview is None else {ident(one.name): one for one in overview.partitions}
        self._encoded: dict[str, bytes] = {}
        self._service = {} if overview is None else shown.service(overview, rates, os.getpid())
        self._rates = rates

    def encoded(self, partition_id: str) -> bytes:
        """As JSON, with what belongs to the partition; without it where there is none of that hash."""
        found = self._encoded.get(partition_id)
        if found is None:
            of_it = self.partitions.get(partition_id)
            values: dict[str, Any] = {"trouble": self.trouble, **self._service}
            values["shown"] = None if of_it is None else shown.partition(of_it, self._rates)
            found = self._encoded[partition_id] = msgspec.json.encode(values)
        return found

    def encoded_map(self, partition_id: str) -> tuple[int, bytes]:
        """(number of its look, JSON) of the newest map; (0, b"") where there is none."""
        seen = self.maps.get(partition_id)
        return (0, b"") if seen is None else (seen.number, seen.encoded)


NOTHING = Look(0, None, "", RateWindow())


class ServiceWatch:
    """Looks every half second while there are viewers; `latest` is the last look. Methods are for any thread.

    `attach` makes a client, or raises; it is called again whenever the service is gone. `told` is called in this
    thread after each look. A service that stands still keeps the thread waiting: see `silent_s`.
    """

    def __init__(self, attach: Callable[[], TransferQueueClient], told: Callable[[], None]) -> None:
        self.latest = NOTHING
        self._maps: dict[str, MapSeen] = {}  # of the thread's own; a look has those of its time
        self._attach = attach
        self._told = told
        self._viewers: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._attaching = threading.Lock()
        self._client: TransferQueueClient | None = None
        self._rates = RateWindow()
        self._asked_at: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tq-page-watch", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """For how long the service has owed an answer."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    @contextlib.contextmanager
    def viewer(self, partition_id: str) -> Iterator[None]:
        """Somebody looks, at this partition (by hash) above all."""
        with self._changed:
            if not self._viewers[partition_id]:
                self._changed.notify()  # others of this partition have it already
            self._viewers[partition_id] += 1
        try:
            yield
        finally:
            with self._changed:
                self._viewers -= Counter([partition_id])  # keeps no zeros

    @property
    def num_viewers(self) -> int:
        return self._viewers.total()

    def client(self) -> TransferQueueClient:
        """Attached now, unless it is already. Raises what `attach` does."""
        with self._attaching:
            if self._client is None:
                self._client = self._attach()
            return self._client

    def name_of(self, partition_id: str, client: TransferQueueClient) -> str | None:
        """The partition of that hash, None where there is none. Asks the service where nobody looks."""
        found = self.latest.partitions.get(partition_id)
        if found is not None:
            return found.name
        return next((name for name in client.get_partition_list() if ident(name) == partition_id), None)

    def close(self) -> None:
        """End, and detach. Waits a moment for a call that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(1.0)
        self._detach()

    def _run(self) -> None:
        while self._await_viewers():
            began = time.monotonic()
            self._asked_at = began
            overview, trouble = self._looked()
            self._asked_at = None
            self.latest = Look(self.latest.number + 1, overview, trouble, self._rates, self._maps)
            self._told()
            with self._changed:
                if not self._closed:
                    self._changed.wait(max(0.0, INTERVAL_S - (time.monotonic() - began)))

    def _await_viewers(self) -> bool:
        """False at the end."""
        with self._changed:
            while not self._viewers and not self._closed:
                if not self._changed.wait(IDLE_S):
                    self._detach()
                self.latest = NOTHING
                self._forget()
            return not self._closed

    def _looked(self) -> tuple[ServiceOverview | None, str]:
        try:
            client = self.client()
            overview = client.overview(shown.MAX_LISTED)
            self._rates.add(time.monotonic(), shown.counts_of(overview))
            self._map(client, overview)
        except TransferQueueError as error:
            if isinstance(error, ServiceUnavailable):
                self._detach()
            if not isinstance(error, DeadlineExceeded):
                self._forget()
            return None, printable(str(error), 400)
        return overview, ""

    def _map(self, client: TransferQueueClient, overview: ServiceOverview) -> None:
        """Of the partitions that somebody looks at, each as often as its cost allows."""
        wanted = {one: found for one in list(self._viewers) if (found := _named(overview, one)) is not None}
        maps = {one: seen for one, seen in self._maps.items() if one in wanted}
        for one, partition in wanted.items():
            began = time.monotonic()
            if not is_due(maps.get(one), partition, began):
                continue
            made = client.partition_map(partition.name, MAX_RUNS)
            now = time.monotonic()
            if made is None:
                maps.pop(one, None)
            else:
                encoded, cost_s = (
                    msgspec.json.encode({"id": one, **shown.map_of(made)}),
                    cost_of(now - began, maps.get(one)),
                )
                maps[one] = MapSeen(encoded, cost_s, now, state_of(partition), self.latest.number + 1)
        self._maps = maps

    def _forget(self) -> None:
        self._maps = {}
        self._rates.forget()

    def _detach(self) -> None:
        with self._attaching:
            client, self._client = self._client, None
        if client is not None:
            client.close()


def _named(overview: ServiceOverview, partition_id: str) -> PartitionOverview | None:
    return next((one for one in overview.partitions if ident(one.name) == partition_id), None)
