"""What receivers want of the tensors that a trainer is going to send.

A trainer says what there is to come (`Specs`). A receiver that needs parts of it rehearses, and reports them when it is
introduced; the trainer cuts along them and puts together what the same receivers take. Who has reported nothing, or
comes later, fetches the buckets that have something of what it needs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
from xxhash import xxh3_128_hexdigest

from transfer_queue.codec.dtypes import dtype_name
from transfer_queue.errors import InvalidInput, ProtocolError
from transfer_queue.structs import decodable
from transfer_queue.weights.version.boxes import MAX_TAKERS, Box, lies_in, whole
from transfer_queue.weights.version.pieces import by_name
from transfer_queue.weights.version.plans import Wants
from transfer_queue.weights.version.sources import TensorMeta

MAX_NBYTES = 256 << 20  # of a report, or of what there is
MAX_RECEIVERS = 4096
log = logging.getLogger("transfer_queue.weights")


@decodable
class Specs(msgspec.Struct, frozen=True):
    """Names, dtypes and shapes of the tensors to come, and their further names."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str] = {}

    @staticmethod
    def of(metas: list[TensorMeta], aliases: Mapping[str, str]) -> Specs:
        return Specs({name: (dtype_name(dtype), shape) for name, dtype, shape in metas}, dict(aliases))

    def named(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """By every name."""
        return {**self.tensors, **{alias: self.tensors[name] for alias, name in self.aliases.items()}}


@decodable
class WantsReport(msgspec.Struct, frozen=True):
    """Of one receiver (`Outcome.who`, `Outcome.rank`). `specs`: which ones it has rehearsed."""

    who: str
    rank: int
    specs: str
    wants: dict[str, tuple[Box, ...]]


class WantTables:
    """The tables that receivers have reported. Thread-safe."""

    def __init__(self, specs: Specs) -> None:
        self._specs = specs
        self.body = msgspec.json.encode(specs)
        self.key = xxh3_128_hexdigest(self.body) if specs.tensors else ""
        self._lock = threading.Lock()
        self._digests: dict[tuple[str, int], str] = {}  # of who reported what; the newest is the last
        self._wants: dict[str, Wants] = {}  # by digest: most receivers of a kind want the same

    def note(self, body: bytes | memoryview) -> None:
        """Take a report, in place of an earlier one of the same receiver. `ProtocolError`, `InvalidInput`."""
        try:
            found = msgspec.json.decode(body, type=WantsReport)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not a report of wants: {error}") from None
        if found.specs != self.key:
            return  # of other tensors than there are by now
        named = self._specs.named()
        for name, boxes in found.wants.items():
            for box in boxes:
                _check(name, box, named)
        wants = by_name(found.wants, self._specs.aliases)
        digest = xxh3_128_hexdigest(msgspec.json.encode(sorted(wants.items())))
        with self._lock:
            self._digests.pop((found.who, found.rank), None)
            self._digests[found.who, found.rank] = digest
            while len(self._digests) > MAX_RECEIVERS:
                del self._digests[next(iter(self._digests))]
            known, num_before = {**self._wants, digest: wants}, len(self._wants)
            self._wants = {one: known[one] for one in sorted(set(self._digests.values()))}
            if num_before <= MAX_TAKERS < len(self._wants):
                log.warning("receivers want more than %s different parts: some fetch those of others too", MAX_TAKERS)

    def tables(self) -> dict[str, Wants]:
        """Those that differ, by their digests, in an order that does not depend on who reported first. Beyond
        `MAX_TAKERS`, those of ranks next to each other are one: they are the likest."""
        with self._lock:
            found, by_rank = self._wants, sorted((rank, digest) for (_, rank), digest in self._digests.items())
        if len(found) <= MAX_TAKERS:
            return found
        digests = list(dict.fromkeys(digest for _, digest in by_rank))
        ends = [len(digests) * at // MAX_TAKERS for at in range(MAX_TAKERS + 1)]
        return dict(_joined([digests[begin:end] for begin, end in pairwise(ends)], found))


def _joined(groups: Iterable[Sequence[str]], wants: Mapping[str, Wants]) -> Iterator[tuple[str, Wants]]:
    """One table for each group of digests."""
    for group in groups:
        boxes: dict[str, dict[Box, None]] = {}
        for digest in group:
            for name, wanted in wants[digest].items():
                boxes.setdefault(name, {}).update(dict.fromkeys(wanted))
        yield ",".join(group), {name: tuple(found) for name, found in boxes.items()}


def _check(name: str, box: Box, named: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    shape = named[name][1] if name in named else None
    if shape is None or not len(box.start) == len(box.lengths) == len(shape):
        raise InvalidInput(
            f"a receiver wants {box} of {name!r}, which is {list(shape) if shape is not None else 'not'}"
        )
    if min(box.lengths, default=1) < 1 or not lies_in(box, whole(shape)):
        raise InvalidInput(f"a receiver wants {box} of {name!r}, which is {list(shape)}")
