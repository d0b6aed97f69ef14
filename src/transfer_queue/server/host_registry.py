"""The register of this user's servers on this host: one small file each, in a directory that is this user's alone.

A server enters itself when it listens and leaves at its end. Whoever reads the register drops the entries of servers
that were killed, and whoever starts one of a job removes what else they left (`sweep`). The directory is `tq-UID`, of
mode 0700; one that is not surely ours is neither read nor written.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from transfer_queue.errors import AccessDenied
from transfer_queue.memory.memfd import is_of_this_host
from transfer_queue.server import home, processes
from transfer_queue.server.processes import ProcessIdentity
from transfer_queue.structs import decodable

SUFFIX = ".server"
MAX_BASE = 60  # a unix socket's path may have 107 bytes
ATTEMPTS = 5


@decodable
class ServerEntry(msgspec.Struct, kw_only=True, frozen=True):
    """A running server. `address`: unix:PATH. `owner`: whose end ends it (None: it stands alone, or ends when nobody
    has used it for a while). `since`: when it began to listen, in ticks. `tcp`: HOST:PORT, or "". `join`: of which
    service it is one more unit (""; it is the service itself). `job`: for whom it was started. `token`, `unit_token`:
    those of a job on several hosts, for processes of the job on this one."""

    server: ProcessIdentity
    address: str
    owner: ProcessIdentity | None = None
    since: int = 0
    tcp: str = ""
    join: str = ""
    job: str = ""
    token: str = ""
    unit_token: str = ""

    @property
    def command(self) -> str:
        """The command line of its owner, else its own, as one line."""
        return " ".join(" ".join(processes.command_of((self.owner or self.server).pid)).split())

    @property
    def age_s(self) -> float:
        return max(0.0, (processes.now() - self.since) / processes.TICKS)


def base() -> str:
    """Where directories of sockets are made: the runtime directory that somebody chose for this user, else /tmp. Not
    the one that comes with a login where /tmp will do: it goes with the last logout, while services go on."""
    chosen = os.environ.get("XDG_RUNTIME_DIR", "")
    for found in ("/tmp", chosen) if os.path.normpath(chosen) == _of_login() else (chosen, "/tmp"):
        if found and len(found) <= MAX_BASE and os.access(found, os.W_OK):
            return found
    return tempfile.gettempdir()


def _of_login() -> str:
    return f"/run/user/{os.geteuid()}"


def _own(directory: str) -> str:
    return os.path.join(directory, f"tq-{os.geteuid()}")


def places() -> list[str]:
    """Where servers of this user may have entered themselves: not all of them have the same runtime directory."""
    return list(dict.fromkeys((base(), _of_login(), "/tmp")))


def private_path() -> str:
    """Where `private_dir` is, or would be."""
    return _own(base())


def private_dir() -> str:
    """The directory of this user's registered servers and jobs, made if need be.

    Raises `AccessDenied` where it is, or could be, another user's.
    """
    path = private_path()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    why = _untrusted(path)
    if why:
        raise AccessDenied(f"{why}; set XDG_RUNTIME_DIR or TQ_RUN_DIR to a directory of your own")
    return path


def is_private() -> bool:
    """Whether the directory is there, and surely ours."""
    try:
        return not _untrusted(private_path())
    except OSError:
        return False


def _untrusted(path: str) -> str:
    """Why what lies in a directory may not be ours; "" when it surely is. Raises OSError. No link is followed."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a directory"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to another user (uid {found.st_uid})"
    mode = stat.S_IMODE(found.st_mode)
    return f"{path} is open to other users (mode {mode:o}): chmod 700 {path}" if mode & 0o077 else ""


def enter(entry: ServerEntry) -> str:
    """Write an entry; its path, for `leave`. Raises OSError, `AccessDenied` is one."""
    name = f"{processes.view()}-{entry.server.pid}-{entry.server.start}"
    for attempt in range(ATTEMPTS):
        path = os.path.join(private_dir(), name)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # somebody who left took the empty directory along
            if attempt == ATTEMPTS - 1:
                raise
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(entry))
        os.rename(path, path + SUFFIX)  # whole, or not at all
        return path + SUFFIX
    raise AssertionError("unreachable")


def leave(path: str) -> None:
    """Remove an entry, and the directory when nothing else is in it; nothing for "". Does not raise."""
    if not path:
        return
    with contextlib.suppress(OSError):
        os.unlink(path)
    tidy(os.path.dirname(path))


def tidy(directory: str) -> None:
    """Remove a directory in which nothing is left."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def sweep(directory: str) -> None:
    """Remove what killed servers and starters left in a private directory: entries of earlier lives of this host, run
    directories of jobs, locks. What somebody holds stays. So does everything on a file system that other hosts may
    have too: their entries look like earlier ones, and their locks need not be seen here. Raises OSError."""
    if not is_of_this_host(directory):
        return
    boot = processes.view().partition("-")[0]
    for path in sorted(Path(directory).iterdir()):
        if path.suffix == ".lock" or path.is_dir():
            home.vacate(str(path))
        elif path.suffix == SUFFIX and not path.name.startswith(boot):
            _drop_past(path)


def _drop_past(path: Path) -> None:
    """Remove an entry of another life of this host, unless somebody holds the directory it names."""
    entry = _read(path)
    run_dir = "" if entry is None else os.path.dirname(entry.address.removeprefix("unix:"))
    with home.taken(run_dir) as free:
        if run_dir and (free or not os.path.lexists(run_dir)):
            path.unlink(missing_ok=True)


def running() -> list[ServerEntry]:
    """The servers of this user that run on this host, the oldest first."""
    found = {entry.server: entry for entry in _entries()}
    return sorted(found.values(), key=lambda entry: entry.since)


def _entries() -> Iterator[ServerEntry]:
    view = processes.view()
    for place in places():
        directory = Path(_own(place))
        try:
            if _untrusted(str(directory)):
                continue
            paths = sorted(
                directory.glob(f"{view}-*{SUFFIX}")
            )  # those of other containers and lives are not ours to judge
        except OSError:
            continue
        for path in paths:
            entry = _read(path)
            if entry is not None and entry.server.lives():
                yield entry
            elif entry is not None:
                leave(str(path))


def _read(path: Path) -> ServerEntry | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerEntry)
    except (OSError, msgspec.DecodeError):  # it has just left, or is another release's
        return None
