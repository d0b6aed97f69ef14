"""One thread that asks a service while somebody looks, for all of them. It goes on when the service is gone."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable, TransferQueueError
from transfer_queue.page import fragments, shown
from transfer_queue.page.maps import MAX_RUNS, MapSeen, cost_of, is_due, state_of
from transfer_queue.page.printable import ident, printable
from transfer_queue.page.rates import RateWindow
from transfer_queue.wire.messages.overview import PartitionOverview, ServiceOverview

INTERVAL_S = 0.5
LOOKS = 240  # that the curves of a partition remember: two minutes
IDLE_S = 5.0  # so long the page stays attached when nobody looks any more


class Curves(NamedTuple):
    """Of the latest looks: cells written per second, and rows consumed."""

    written: tuple[float, ...]
    used: tuple[float, ...]


class PartitionsSeen(NamedTuple):
    """What a look knows of the partitions, by hash: all of them; the newest map and the curves of each that somebody
    looks at."""

    partitions: Mapping[str, PartitionOverview]
    maps: Mapping[str, MapSeen]
    curves: Mapping[str, Curves]
    rates: RateWindow


NO_CURVES = Curves((), ())
NOTHING_SEEN = PartitionsSeen({}, {}, {}, RateWindow())


def chosen_of(partitions: Mapping[str, PartitionOverview], partition_id: str) -> str:
    """The hash of what is shown to who asked for that one: the first where it is not there, "" where there is none."""
    return partition_id if partition_id in partitions else next(iter(partitions), "")


class Look:
    """What was seen of the service at one moment, and, where it did not answer, why. Its HTML is made once for all
    viewers, in the thread that serves them; the maps were encoded by whoever asked for them."""

    def __init__(self, number: int, overview: ServiceOverview | None, trouble: str, seen: PartitionsSeen) -> None:
        self.number = number
        self.overview = overview
        self.trouble = trouble
        self._seen = seen
        self._fragments: dict[str, dict[str, bytes]] = {}  # by partition
        self._service = {} if overview is None else shown.service(overview, seen.rates, os.getpid())

    @property
    def partitions(self) -> Mapping[str, PartitionOverview]:
        """By hash."""
        return self._seen.partitions

    def fragments(self, partition_id: str) -> dict[str, bytes]:
        """The parts of the page, by name, for whoever looks at the partition. Of a service that is not there only the
        state: the other parts stay as they are."""
        if self.overview is None:
            return fragments.state("bad", "no service", f"The service is not there: {self.trouble}")
        chosen = chosen_of(self.partitions, partition_id)
        if chosen not in self._fragments:
            self._fragments[chosen] = self._rendered(chosen)
        return self._fragments[chosen]

    def encoded_map(self, partition_id: str) -> bytes:
        """The newest map as JSON; null where there is none."""
        seen = self._seen.maps.get(chosen_of(self.partitions, partition_id))
        return b"null" if seen is None else seen.encoded

    def _rendered(self, chosen: str) -> dict[str, bytes]:
        found, map_seen = self.partitions.get(chosen), self._seen.maps.get(chosen)
        partition = None if found is None else shown.partition(found, self._seen.rates)
        names = ([], []) if map_seen is None else (map_seen.fields, map_seen.tasks)
        lanes, curves = shown.lanes(*names, partition), self._seen.curves.get(chosen, NO_CURVES)
        of_partition = fragments.of_partition(self._service, partition, lanes, curves.written, curves.used)
        return {**fragments.state("live", "live"), **self._of_service, **of_partition}

    @functools.cached_property
    def _of_service(self) -> dict[str, bytes]:
        return fragments.of_service(self._service)


NOTHING = Look(0, None, "", NOTHING_SEEN)


class ServiceWatch:
    """Looks every half second while there are viewers; `latest` is the last look. Methods are for any thread.

    `attach` makes a client, or raises; it is called again whenever the service is gone. `told` is called in this
    thread after each look. A service that stands still keeps the thread waiting: see `silent_s`.
    """

    def __init__(self, attach: Callable[[], TransferQueueClient], told: Callable[[], None]) -> None:
        self.latest = NOTHING
        self._maps: dict[str, MapSeen] = {}  # of the thread's own; a look has those of its time
        self._curves: dict[str, Curves] = {}  # likewise
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
            look = self._looked()
            self._asked_at = None
            self.latest = look
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

    def _looked(self) -> Look:
        number, partitions = self.latest.number + 1, dict[str, PartitionOverview]()
        try:
            client = self.client()
            overview = client.overview(shown.MAX_LISTED)
            self._rates.add(time.monotonic(), shown.counts_of(overview))
            partitions = {ident(one.name): one for one in overview.partitions}
            chosen = {chosen_of(partitions, one) for one in list(self._viewers)} - {""}
            wanted = {one: partitions[one] for one in chosen}
            self._remember(wanted)
            self._map(client, wanted)
        except TransferQueueError as error:
            if isinstance(error, ServiceUnavailable):
                self._detach()
            if not isinstance(error, DeadlineExceeded):
                self._forget()
            return Look(number, None, printable(str(error), 400), NOTHING_SEEN)
        return Look(number, overview, "", PartitionsSeen(partitions, self._maps, self._curves, self._rates))

    def _map(self, client: TransferQueueClient, partitions: Mapping[str, PartitionOverview]) -> None:
        """Of the partitions that somebody looks at, each as often as its cost allows."""
        maps = {one: seen for one, seen in self._maps.items() if one in partitions}
        for one, partition in partitions.items():
            began = time.monotonic()
            if not is_due(maps.get(one), partition, began):
                continue
            made = client.partition_map(partition.name, MAX_RUNS)
            now = time.monotonic()
            if made is None:
                maps.pop(one, None)
            else:
                values, cost_s = shown.map_of(made), cost_of(now - began, maps.get(one))
                encoded = msgspec.json.encode({"id": one, **values})
                maps[one] = MapSeen(encoded, cost_s, now, state_of(partition), values["fields"], values["tasks"])
        self._maps = maps

    def _remember(self, partitions: Mapping[str, PartitionOverview]) -> None:
        """The rates of those that somebody looks at."""
        curves = {}
        for one, partition in partitions.items():
            before, now = self._curves.get(one, NO_CURVES), shown.rates_of(partition, self._rates)
            curves[one] = Curves((*before.written[1 - LOOKS :], now[0]), (*before.used[1 - LOOKS :], now[1]))
        self._curves = curves

    def _forget(self) -> None:
        self._maps, self._curves = {}, {}
        self._rates.forget()

    def _detach(self) -> None:
        with self._attaching:
            client, self._client = self._client, None
        if client is not None:
            client.close()
