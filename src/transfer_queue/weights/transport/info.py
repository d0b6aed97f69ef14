"""What a trainer tells its receivers, and how an update went at each: all of it is JSON."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from transfer_queue.errors import InvalidInput
from transfer_queue.names import nearest
from transfer_queue.structs import decodable
from transfer_queue.trace.activity import Activity
from transfer_queue.weights.transport.deadline import checked_s
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.weights.version.packing import BUCKET_NBYTES

INIT_TIMEOUT_S = 60.0
OLD_NAMES = {"epoch": "run_id"}  # of settings, taken still
Info = Mapping[str, Any]
MOST_VERSION = 1 << 62  # as manifests have it (`Count`)
S = TypeVar("S", bound=msgspec.Struct)
_one_at_a_time = threading.Lock()  # forms are anybody's: see `structs.decodable`


class InitInfo(msgspec.Struct, kw_only=True):
    """`run_id`: whose updates are taken from now on; it has `begun` then, by the trainer's clock. `replica`: what a
    fleet calls this server; its outcomes carry it. `report_to`: where outcomes are reported, with this token, by
    transports that have no way of their own."""

    run_id: str = ""
    begun: float = 0.0
    replica: str = ""
    timeout_s: float = INIT_TIMEOUT_S
    report_to: str = ""
    report_token: str = ""

    def __post_init__(self) -> None:
        checked_s(self.timeout_s, 0.0)


class UpdateInfo(msgspec.Struct, kw_only=True):
    """Which version, of which run (one that was not introduced last is refused), and how long the update may take.
    `key` names the manifest (`key_of`). `abort`: drop the update that was started, as another replica cannot take it.
    `newest`: whichever version is the newest, for a replica that comes late; nothing else is needed then."""

    version: int = 0
    run_id: str = ""
    key: str = ""
    timeout_s: float = 300.0
    abort: bool = False
    newest: bool = False

    def __post_init__(self) -> None:
        checked_s(self.timeout_s, 0.0)


class TrainerInfo(msgspec.Struct, kw_only=True):
    """`run_id`: a name for this life of the trainer (made up when empty). Receivers take updates of the run that was
    introduced to them last, and none of a run before. `anchor_every`: how many versions from one
    full one to the next; those between are differences, to a copy of the weights in host memory here.

    `silent`: how many workers record faults instead of raising them (vLLM's do); each has to report every step.
    Default: what the client's `silent_workers()` says, or none. `report_host`: where transports without a way of their
    own for reports listen for them. `caches`: whether servers forget, after a commit, what they cached with the weights
    before (vLLM's prefixes; running requests are computed anew then); with "keep" that is left to a pause."""

    run_id: str = ""
    bucket_nbytes: Annotated[int, msgspec.Meta(ge=1)] = BUCKET_NBYTES
    anchor_every: int = 1
    timeout_s: float = INIT_TIMEOUT_S
    silent: int | None = None
    report_host: str = "127.0.0.1"
    caches: Literal["clear", "keep"] = "clear"

    def __post_init__(self) -> None:
        checked_s(self.timeout_s, 0.0)


@decodable
class Outcome(msgspec.Struct, frozen=True):
    """How an update went at one replica. `code` and `text` describe the fault, "" when there was none.

    `key` names the version's manifest, `who` the engine (ranks of several servers have the same numbers). `silent`: its
    calls never raise, so only a report says that they were done.
    """

    rank: int
    replica: str = ""
    version: int | None = None
    run_id: str = ""
    installed: bool = False
    code: str = ""
    text: str = ""
    key: str = ""
    who: str = ""
    silent: bool = False


def parse(info: object, form: type[S]) -> S:
    """The info as `form`; `InvalidInput` for any other. Unknown keys are ignored: later releases add some."""
    if isinstance(info, Mapping) and "epoch" in info and "run_id" not in info:
        info = {**info, "run_id": info["epoch"]}
    try:
        with _one_at_a_time:
            return msgspec.convert(info, form)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{form.__name__}: {error}") from None


def settings_of(info: object, form: type[S]) -> S:
    """What a trainer's user gave, as `form`; `InvalidInput` also for a key that it does not have, which would be a
    setting that does nothing. Of a transport with one rank, that this is the only one may be said, as vLLM's
    programs do."""
    if isinstance(info, Mapping):
        known = {*form.__struct_encode_fields__, *OLD_NAMES}
        alone = {"rank": 0, "world": 1}
        for key in info:
            if key in known or (key in alone and info[key] == alone[key]):
                continue
            if key in alone:
                raise InvalidInput(f"{form.__name__}: {key!r} is {info[key]!r}, and this transport has one rank")
            meant = nearest(str(key), known)
            raise InvalidInput(f"{form.__name__} has no {key!r}; the nearest is {OLD_NAMES.get(meant, meant)!r}")
    return parse(info, form)


def checked_version(asked: Any) -> int:
    """The number of a version that somebody gave, as a number of Python's; `InvalidInput` for what is none."""
    try:
        found = operator.index(asked)
    except TypeError:
        raise InvalidInput(f"a version is a whole number, not of {type(asked).__name__}") from None
    if found > MOST_VERSION:
        raise InvalidInput("a version's number is at most 2 to the power of 62")
    return found


def key_of(manifest: Manifest) -> str:
    """Names the manifest: the content, its packing and what it is called."""
    return manifest.key


def describe(about: Activity, manifest: Manifest) -> None:
    """Say in a trace which version an update is about, and how many bytes it has."""
    about.version = f"{manifest.label} {manifest.version} of {manifest.epoch}".lstrip()
    about.nbytes = manifest.nbytes
