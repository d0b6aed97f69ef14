"""What requests carry and how refusals look."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote

import msgspec

from transfer_queue.errors import (
    Aborted,
    AccessDenied,
    CallerError,
    CommitFailed,
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    Incomplete,
    InternalError,
    InvalidInput,
    NotInitialized,
    NotOpen,
    NotSupported,
    ProtocolError,
    ServiceError,
    StaleBase,
    StaleVersion,
    TransferQueueError,
    UnknownMode,
    UpdateInProgress,
    WrongEpoch,
)
from transfer_queue.structs import decodable

STATUS: list[tuple[type[TransferQueueError], int]] = [
    (NotInitialized, 409),
    (NotOpen, 409),
    (UpdateInProgress, 409),
    (NotSupported, 409),
    (StaleVersion, 409),
    (StaleBase, 409),
    (WrongEpoch, 409),
    (Incomplete, 409),
    (Aborted, 409),
    (CallerError, 400),
    (DigestMismatch, 422),
    (AccessDenied, 401),
    (DeadlineExceeded, 504),
    (CommitFailed, 500),
    (ProtocolError, 502),
    (ServiceError, 503),
    (TransferQueueError, 500),
]
TRUE = {"true", "1", "yes", "on", "t", "y"}
FALSE = {"false", "0", "no", "off", "f", "n"}
MAX_SECONDS = 1e6
RUN_HEADER = "x-tqw-run"
B = TypeVar("B")


@decodable
class InitBody(msgspec.Struct):
    init_info: dict[str, Any]


@decodable
class UpdateBody(msgspec.Struct):
    update_info: dict[str, Any] | list[dict[str, Any]]


@decodable
class FinishBody(msgspec.Struct):
    weight_version: str | None = None


@decodable
class VersionBody(msgspec.Struct):
    new_version: str


@decodable
class CheckBody(msgspec.Struct):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


@decodable
class AbortBody(msgspec.Struct):
    request_ids: list[str] | None = None


class Refusal(Exception):
    """An answer other than 200. `param` says which part of the request is to blame, such as "body.init_info"."""

    def __init__(self, error: TransferQueueError, param: str | None = None, status: int | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.param = param
        self.status = status if status is not None else status_of(error)

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self.error),
                "type": HTTPStatus(self.status).phrase,
                "param": self.param,
                "code": self.status,
                "reason": self.error.code,
            }
        }


def status_of(error: TransferQueueError) -> int:
    return next(status for kind, status in STATUS if isinstance(error, kind))


def parse(data: bytes, kind: type[B]) -> B:
    """The body. `Refusal` (400) for anything but JSON of this shape."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(InvalidInput(str(error)), _param(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(InvalidInput(f"the body is not JSON: {error}"), "body") from None


def check_token(token: str) -> None:
    """`ConfigError` for what no header can carry unchanged."""
    if not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ConfigError("a token has printable ASCII characters, and no spaces at its ends")


def flag(text: str | None, default: bool, name: str) -> bool:
    """A boolean of the query."""
    if text is None:
        return default
    if text.lower() not in TRUE | FALSE:
        raise Refusal(InvalidInput(f"{name} is {text!r}, not true or false"), f"query.{name}")
    return text.lower() in TRUE


def seconds(text: str | None, name: str) -> float | None:
    """A time of the query, if it is there."""
    try:
        found = None if text is None else float(text)
    except ValueError:
        found = 0.0
    if found is not None and not 0 < found < MAX_SECONDS:
        raise Refusal(InvalidInput(f"{name} is {text!r}, not a number of seconds"), f"query.{name}")
    return found


def run_of(headers: Mapping[str, str]) -> str:
    """The run of the trainer that makes this call; "" for clients that do not say."""
    return unquote(headers.get(RUN_HEADER, ""))


def run_header(run_id: str) -> dict[str, str]:
    """What tells a server of ours whose call it is: vLLM's calls have no place for it."""
    return {RUN_HEADER: quote(run_id)} if run_id else {}


def refusal_of(error: BaseException) -> Refusal:
    """How an error is told to the peer. What is not ours shows its type only."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, TransferQueueError):
        return Refusal(error, "query.mode" if isinstance(error, UnknownMode) else None)
    return Refusal(InternalError(f"{type(error).__name__}: the server's log has the traceback"))


def _param(message: str) -> str:
    missing = re.search(r"required field `(\w+)`", message)
    wrong = re.search(r"at `\$\.(\w+)", message)
    found = missing or wrong
    return f"body.{found[1]}" if found else "body"
