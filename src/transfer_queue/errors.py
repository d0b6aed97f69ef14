"""Every error this package raises, as one tree split by whose fault it is.

    TransferQueueError
    ├── CallerError                    the call is wrong: change the call
    │   ├── InvalidInput               (ValueError)      sizes, names, duplicates
    │   │   ├── UnknownMode            (RuntimeError)    get_meta's mode, or what the mode needs
    │   │   ├── InvalidSampling        (RuntimeError)    batch_size or sampling_config is not what the sampler takes
    │   │   │   └── MissingParameter   (TypeError)       sampling_config lacks what the sampler needs
    │   │   ├── NotDivisible           (AssertionError)  items that do not make so many parts
    │   │   ├── BatchMismatch          (RuntimeError)    a batch does not fit its metadata or its parser's result
    │   │   └── SchemaViolation                          a rollout batch is not what its schema says
    │   ├── UnsupportedValue           (TypeError)       a value the codec cannot carry exactly
    │   ├── SchemaConflict             (ValueError)      dtype, rank or kind differs from the field's
    │   ├── UnknownRows                (ValueError)      no such partition, keys or rows
    │   ├── NotReady                   (ValueError)      the rows exist, the fields are not written yet
    │   ├── StorageKeyNotFoundError    (KeyError)        the rows were cleared
    │   ├── NotInitialized             (AssertionError)  no service was started or found
    │   ├── CheckpointMissing          (FileNotFoundError) no checkpoint there, or a file of it is missing
    │   ├── CheckpointCorrupt          (ValueError)      a file of a checkpoint is not what was saved
    │   ├── CheckpointUnsupported      (ValueError)      a checkpoint of another format, or pickled
    │   ├── JournalCorrupt             (ValueError)      a journal is damaged, or a file of it is missing
    │   ├── JournalUnsupported         (ValueError)      a journal of another format
    │   ├── JournalInUse               (RuntimeError)    another server keeps this journal
    │   ├── BadManifest                (ValueError)      a version of weights is described wrongly or unreadably
    │   ├── UnknownTensor              (KeyError)        the model, or the base of a delta, has no such tensor
    │   ├── ShapeMismatch              (ValueError)      a tensor's dtype, shape or tying is not the model's
    │   ├── Incomplete                 (ValueError)      buckets of an update, or tensors of the model, are missing
    │   ├── StaleVersion               (ValueError)      not newer than the installed version
    │   ├── StaleBase                  (ValueError)      a delta on other weights than those installed
    │   ├── WrongEpoch                 (ValueError)      from a trainer that was replaced, or one that must begin anew
    │   ├── NotOpen                    (RuntimeError)    no update is open, or it has not come this far
    │   ├── UpdateInProgress           (RuntimeError)    another update is open
    │   ├── LockNotAllowed             (RuntimeError)    a lock inside another one, or a blocking one on an event loop
    │   ├── NotSupported               (RuntimeError)    this server, or its version, cannot do that
    │   └── ConfigError                (ValueError)      a setting has a bad value
    ├── ServiceError                   the other side failed: try again later or elsewhere
    │   ├── DeadlineExceeded           (TimeoutError)    no answer, or no rows, in time
    │   ├── StoreFull                  (RuntimeError)    no room was freed before the deadline
    │   ├── SamplerFailed              (RuntimeError)    the sampler raised; see the server's log
    │   ├── DataLost                   (RuntimeError)    the host that held the rows is gone for good
    │   ├── LeaseExpired               (RuntimeError)    the rows are no longer held: others may have them
    │   ├── CellsChanged               (RuntimeError)    somebody else wrote what an update was computed from
    │   ├── LockLostError              (RuntimeError)    the keys are no longer locked: others may have them
    │   ├── GroupEnded                 (RuntimeError)    the group was used or given up: nothing more is wanted of it
    │   ├── StaleAttempt               (RuntimeError)    another attempt at the slot took its place
    │   ├── GroupsShort                (RuntimeError)    too few groups are left for a version of the weights
    │   ├── ServiceUnavailable         (ConnectionError) the server is gone or cannot be reached
    │   │   ├── ServiceRestarted       (ConnectionError) another service, or server, is there now: what was held is lost
    │   │   └── TooManyConnections     (ConnectionError) the server takes no more connections now
    │   ├── DigestMismatch             (ValueError)      bytes of weights were damaged on their way
    │   ├── VersionGone                (RuntimeError)    that version of the weights is not there, or no more
    │   ├── CommitFailed               (RuntimeError)    new weights could not be made live
    │   ├── GenerationPaused           (RuntimeError)    no new requests are taken until generation is resumed
    │   ├── Aborted                    (RuntimeError)    ended by a call of somebody else before it was done
    │   ├── AccessDenied               (PermissionError) wrong user, or missing or wrong token
    │   └── ProtocolError              (RuntimeError)    bytes that are not this protocol
    └── InternalError                  (RuntimeError)    a defect of ours: please report it

`StorageKeyNotFoundError` is also reachable as `RowCleared`. Errors cross the wire by `code`;
`error_from_code` gives back the same class. Where TransferQueue 0.1.11 raised RuntimeError for
a condition named here, the class here derives from RuntimeError as well.
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
MAX_CAUSES = 16  # of one error: they may go in a circle


class TransferQueueError(Exception):
    """Base of all errors raised on purpose by this package."""

    code: str = "error"

    def __str__(self) -> str:  # KeyError would print a repr of its argument
        return Exception.__str__(self)


class CallerError(TransferQueueError):
    """The call itself is wrong; repeating it unchanged fails again."""


class InvalidInput(CallerError, ValueError):
    """Sizes, names, modes or keys do not fit together."""

    code = "invalid_input"


class UnknownMode(InvalidInput, RuntimeError):
    """`get_meta` was called with a mode other than insert, fetch or force_fetch, or without what the mode needs."""

    code = "unknown_mode"


class InvalidSampling(InvalidInput, RuntimeError):
    """The sampler cannot do what `batch_size` and `sampling_config` ask for, whatever rows there are."""

    code = "invalid_sampling"


class MissingParameter(InvalidSampling, TypeError):
    """`sampling_config` does not have a parameter that the sampler cannot do without."""

    code = "missing_parameter"


class NotDivisible(InvalidInput, AssertionError):
    """There are too few items for the parts, or their number is no multiple of that of parts of equal size."""

    code = "not_divisible"


class BatchMismatch(InvalidInput, RuntimeError):
    """A batch has not as many rows as its metadata, or `data_parser` changed its fields or number of rows."""

    code = "batch_mismatch"


class SchemaViolation(InvalidInput):
    """A rollout batch is not what its schema says: `row` and `field` are where (None: of all rows, of all fields)."""

    code = "schema_violation"

    def __init__(self, text: str = "", row: int | None = None, field: str | None = None) -> None:
        super().__init__(text)
        self.row = row
        self.field = field


class UnsupportedValue(CallerError, TypeError, RuntimeError):
    """A value cannot be stored so that the same type and value come back."""

    code = "unsupported_value"


class SchemaConflict(CallerError, ValueError):
    """A field was written before with another dtype, rank or kind in the same partition."""

    code = "schema_conflict"


class UnknownRows(CallerError, ValueError, RuntimeError):
    """The partition, keys or rows do not exist."""

    code = "unknown_rows"


class NotReady(CallerError, ValueError, RuntimeError):
    """The rows exist but a requested field has not been written on all of them."""

    code = "not_ready"


class StorageKeyNotFoundError(CallerError, KeyError):
    """The rows were cleared: their cells can never be read again."""

    code = "row_cleared"


RowCleared = StorageKeyNotFoundError


class NotInitialized(CallerError, AssertionError, RuntimeError):
    """This process is not attached and no running service was found."""

    code = "not_initialized"


class CheckpointMissing(CallerError, FileNotFoundError):
    """There is no checkpoint in the directory, or one of its files is gone."""

    code = "checkpoint_missing"


class CheckpointCorrupt(CallerError, ValueError):
    """A file of a checkpoint is damaged, cut short, or not one that was saved. Nothing was loaded."""

    code = "checkpoint_corrupt"


class CheckpointUnsupported(CallerError, ValueError):
    """A checkpoint of a format that this version does not read; pickled ones are never loaded."""

    code = "checkpoint_unsupported"


class JournalCorrupt(CallerError, ValueError):
    """A file of a journal is damaged in its middle, missing, or does not fit the others. The journal is as it was."""

    code = "journal_corrupt"


class JournalUnsupported(CallerError, ValueError):
    """A journal of a format that this version does not read."""

    code = "journal_unsupported"


class JournalInUse(CallerError, RuntimeError):
    """Another server, or its standby, keeps this journal."""

    code = "journal_in_use"


class BadManifest(CallerError, ValueError):
    """A manifest does not describe a version of weights: malformed, inconsistent, or of a format not known here."""

    code = "bad_manifest"


class UnknownTensor(CallerError, KeyError):
    """An update names a tensor that the model, or the base of the delta, does not have. Nothing changed."""

    code = "unknown_tensor"


class ShapeMismatch(CallerError, ValueError):
    """A tensor of an update has another dtype or shape than the model's, or differs where the model ties. Nothing
    changed."""

    code = "shape_mismatch"


class Incomplete(CallerError, ValueError):
    """Buckets of the update are not staged yet, or the version lacks tensors that the model has. Nothing changed."""

    code = "incomplete"


class StaleVersion(CallerError, ValueError):
    """The version is not above the installed one of its epoch. Nothing changed."""

    code = "stale_version"


class StaleBase(CallerError, ValueError):
    """The delta is one on other weights than those installed: send the versions between, or a full one."""

    code = "stale_base"


class WrongEpoch(CallerError, ValueError):
    """The epoch was superseded by another, or it begins with a delta on weights that are not installed."""

    code = "wrong_epoch"


class NotOpen(CallerError, RuntimeError):
    """There is no open update, or it has not reached the step that this call needs."""

    code = "not_open"


class UpdateInProgress(CallerError, RuntimeError):
    """Another update is open, or is being committed: it ends by commit, abort or its deadline."""

    code = "update_in_progress"


class NotSupported(CallerError, NotImplementedError):
    """The server was not made, not configured, or is too old for this call. Nothing changed."""

    code = "not_supported"


class LockNotAllowed(CallerError, RuntimeError):
    """A lock cannot be taken here: inside another one, or with the blocking form where an event loop runs."""

    code = "lock_not_allowed"


class ConfigError(CallerError, ValueError):
    """A configuration value is of the wrong type or out of range."""

    code = "config"


class ServiceError(TransferQueueError):
    """The call was fine; the other side could not do it."""


class DeadlineExceeded(ServiceError, TimeoutError, RuntimeError):
    """The deadline passed first. Nothing changed when the server says so; without its answer that is unknown."""

    code = "deadline"


class StoreFull(ServiceError, RuntimeError):
    """The byte or row budget was exhausted until the deadline; or the file system to write to is full."""

    code = "store_full"


class SamplerFailed(ServiceError, RuntimeError):
    """The sampler raised, or chose rows that are not there; the server's log has the traceback."""

    code = "sampler_failed"


class DataLost(ServiceError, RuntimeError):
    """Cells of these rows are gone with the storage that held them: a host, or an engine. Writing them again makes the
    rows whole."""

    code = "data_lost"


class LeaseExpired(ServiceError, RuntimeError):
    """The lease ended before it was acknowledged: it ran out, was given back, or its holder or the service went."""

    code = "lease_expired"


class CellsChanged(ServiceError, RuntimeError):
    """Cells were written, or their rows cleared, since they were read: what was computed from them was not stored. Or a
    step cannot be saved, since its rows do not hold any more what the task took."""

    code = "cells_changed"


class LockLostError(ServiceError, RuntimeError):
    """A lock ended before its holder gave it back: it was not renewed in time, or the service or its session went."""

    code = "lock_lost"


class GroupEnded(ServiceError, RuntimeError):
    """The group was consumed or evicted before. What was produced for it is not stored."""

    code = "group_ended"


class StaleAttempt(ServiceError, RuntimeError):
    """The attempt was given up and another one was started at its slot. What it produced is not stored."""

    code = "stale_attempt"


class GroupsShort(ServiceError, RuntimeError):
    """So many groups of a version were given up that fewer are left than the policy's floor."""

    code = "groups_short"


class ServiceUnavailable(ServiceError, ConnectionError, RuntimeError):
    """The server went away or cannot be reached."""

    code = "unavailable"


class ServiceRestarted(ServiceUnavailable):
    """The service that this process was attached to ended, and another answers in its place. Raised once for each call
    that was in flight; the next call works on the new service. Rows, leases and keys of the old one are lost."""

    code = "restarted"


class TooManyConnections(ServiceUnavailable):
    """The server has as many connections as it may: others have to leave first."""

    code = "too_many_connections"


class DigestMismatch(ServiceError, ValueError):
    """Bytes are not those that were described. They were dropped and may be sent again."""

    code = "digest_mismatch"


class VersionGone(ServiceError, RuntimeError):
    """Who was asked does not have that version of the weights, or no longer: ask for the newest, or elsewhere."""

    code = "version_gone"


class CommitFailed(ServiceError, RuntimeError):
    """New weights could not be made live. The old ones are live still, unless the receiver says that it is dirty:
    then it serves nothing until a version is committed."""

    code = "commit_failed"


class GenerationPaused(ServiceError, RuntimeError):
    """Generation is paused and takes no new requests: try again after it was resumed."""

    code = "paused"


class Aborted(ServiceError, RuntimeError):
    """Somebody else's call ended this one before it was done: a request was aborted, a pause overtaken by a resume."""

    code = "aborted"


class AccessDenied(ServiceError, PermissionError):
    """The server refused this peer."""

    code = "access_denied"


class ProtocolError(ServiceError, RuntimeError):
    """Received bytes that this protocol does not allow."""

    code = "protocol"


class InternalError(TransferQueueError, RuntimeError):
    """A defect inside the server; its log has the traceback."""

    code = "internal"


def _tree(root: type[TransferQueueError]) -> list[type[TransferQueueError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {cls.code: cls for cls in _tree(TransferQueueError) if "code" in vars(cls)}


def error_from_code(code: str, message: str) -> TransferQueueError:
    """The error a server reported as (`code`, `message`); an unknown code gives `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message)


def kept(error: E) -> E:
    """The same error without a traceback, for whoever keeps it. A traceback has the frames that the error went through,
    and they what they work on, such as a version of weights: that would stay as long as the error, or, where one of
    them is who keeps it, until a collection."""
    try:
        return copy.copy(error)
    except TypeError:  # it takes other arguments than it has
        return error.with_traceback(None)


def emptied(error: E) -> E:
    """The error itself: it and what it came from still say which lines they went through, but what the calls that have
    ended there worked on is let go of. For errors that leave whoever holds much memory: see `kept`."""
    found: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if found is not None:
            traceback.clear_frames(found.__traceback__)
            found = found.__cause__ or found.__context__
    return error


def attempt(what: str, call: Callable[[], object], log: logging.Logger) -> None:
    """Make a call that must not end its caller's work, whatever is raised in it: that is logged."""
    try:
        call()
    except Exception:
        log.exception("%s failed", what)
