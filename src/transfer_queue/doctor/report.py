"""What came of a trial, and what to do about each trouble."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from transfer_queue.doctor import messages as d
from transfer_queue.errors import (
    AccessDenied,
    ConfigError,
    DataLost,
    RowCleared,
    StoreFull,
    TransferQueueError,
    error_from_code,
)
from transfer_queue.wire import messages as m


class Trouble(msgspec.Struct, frozen=True):
    """`where` in the trial, the `code` of the error and what it says, and what is to be done."""

    where: str
    code: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text.rstrip('.')}. {self.remedy[:1].upper()}{self.remedy[1:]}"


class HostReport(msgspec.Struct):
    """A host: what it has, where its server listens, and how long it took. None or "": it did not come so far."""

    host: str
    name: str = ""
    python: str = ""
    libraries: dict[str, str] = {}
    rdma_devices: list[str] = []
    free_nbytes: int | None = None
    address: str = ""
    endpoint: str = ""
    opened_s: float | None = None
    written_s: float | None = None


class ReadReport(msgspec.Struct):
    """What one host read of the rows of another. `seconds` is None where it did not, and `trouble` says why."""

    writer: str
    reader: str
    nbytes: int = 0
    seconds: float | None = None
    trouble: str = ""


class TrialReport(msgspec.Struct):
    """`works`: every host read what every other had written. `remarks` are no troubles."""

    backend: str
    works: bool
    hosts: list[HostReport]
    reads: list[ReadReport]
    troubles: list[Trouble]
    remarks: list[str]

    def error(self) -> TransferQueueError:
        """All troubles as one error: of the first one's class, which the others follow from more often than not."""
        first = self.troubles[0]
        lines = [f"{self.backend} does not work between these hosts", *map(str, self.troubles)]
        return error_from_code(first.code, "\n  ".join(lines))


SIMPLE = "SimpleStorage"
BY_CODE = {
    AccessDenied.code: "give {here} the same TQ_TOKEN, TQ_TOKEN_FILE or --token-file as this host",
    ConfigError.code: "change what is named there, in the --config of {here}",
    StoreFull.code: "free memory or disk where {backend} keeps the rows of {here}",
    DataLost.code: "let {here} and {writer} reach one and the same place where {backend} keeps rows",
    RowCleared.code: "let {here} and {writer} reach one and the same place where {backend} keeps rows",
}


def remedy(order: m.Message, code: str, backend: str, here: str, there: str, has_answered: bool) -> str:
    """What is to be done where `order` failed on the host `here`, which had to reach `there`. `has_answered`: that it
    failed is what the host itself says."""
    if code in BY_CODE:
        return BY_CODE[code].format(here=here, writer=there.partition(" at ")[0], backend=backend)
    match order:
        case d.BeginTrial() if has_answered:
            return f"mend that on {here}, then try again"
        case d.BeginTrial():
            return f"start `tq doctor --backend {backend} --serve {here}` there, and let its port through"
        case d.JoinTrial():
            return f"let {here} reach {there}; server.host and server.port of this host's --config choose it"
        case d.ReadTrial() if backend == SIMPLE:
            return f"let {here} reach {there}; server.port of that host's --config chooses its port"
        case d.ReadTrial():
            return f"let {here} reach {there}, and what {backend} needs there: docs/backends.md"
    return f"see what {backend} needs on {here}: docs/backends.md"


def differences(facts: Iterable[tuple[str, d.HostFacts]]) -> Sequence[str]:
    """What differs between hosts, and what makes the trial say less than it seems to."""
    found, known = [], list(facts)
    versions: dict[str, dict[str, list[str]]] = {}
    machines: dict[str, list[str]] = {}
    for label, one in known:
        machines.setdefault(one.machine, []).append(label)
        for name, version in [("Python", one.python), *one.libraries.items()]:
            versions.setdefault(name, {}).setdefault(version, []).append(label)
    for name, by_version in versions.items():
        if len(by_version) > 1:
            text = ", ".join(f"{version} on {' and '.join(labels)}" for version, labels in by_version.items())
            found.append(f"{name} differs: {text}")
    for labels in machines.values():
        if len(labels) > 1:
            found.append(f"{' and '.join(labels)} are one host: between them nothing crossed a network")
    return found
