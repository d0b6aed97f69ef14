"""Calling a sampler: the one place that does, for it may be anybody's code.

A standby that takes over does once more what happened. A sampler of others may answer another thing then: it draws at
random, or looks at a clock. So what it answered is kept with what happened, and is the answer the second time, too.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import msgspec
import numpy as np

from transfer_queue.errors import InvalidInput, SamplerFailed, TransferQueueError, error_from_code
from transfer_queue.sampler.base import BaseSampler, Dealt

log = logging.getLogger("transfer_queue.controller")

P = ParamSpec("P")
T = TypeVar("T")
OURS = "transfer_queue."  # modules whose samplers answer the same question in the same state alike
MAX_STATE_NBYTES = 256 << 10  # to save more after every event would take longer than the event
LOOK_AGAIN = 1000


class Error(msgspec.Struct, array_like=True):
    code: str
    text: str


class Answer(msgspec.Struct, array_like=True):
    """What a method of a sampler returned, as plain data, or raised."""

    method: str
    value: Any
    error: Error | None = None


class Heard(NamedTuple):
    """Encoded answers, in order, and what the sampler remembered after the last one (None: that is not known)."""

    answers: list[bytes]
    state: bytes | None


class SamplerCalls:
    """`num_calls` may have changed what the sampler remembers."""

    def __init__(self, sampler: BaseSampler) -> None:
        self.sampler = sampler
        self.num_calls = 0
        self.is_foreign = not type(sampler).__module__.startswith(OURS)
        self._keeps = False
        self._heard: list[bytes] = []
        self._num_heard = self._num_unsaved = 0
        self._repeated: deque[bytes] | None = None
        self._state: bytes | None = None

    def tell(self, news: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it for what has happened already, whatever it makes of it; what it raises is logged."""
        with contextlib.suppress(TransferQueueError):
            self._logged(news, *args, **kwargs)

    def ask(self, question: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Its answer. Whatever it raises becomes a `TransferQueueError` of the one who asked."""
        if not self._keeps:
            return self._logged(question, *args, **kwargs)
        if self._repeated is not None:
            return cast(T, self._again(question, *args, **kwargs))
        try:
            answer = self._logged(_answered, question, *args, **kwargs)
        except TransferQueueError as error:
            self._heard.append(_encode(Answer(_name(question), None, Error(error.code, str(error)))))
            raise
        self._heard.append(answer)
        return cast(T, _decode(answer).value)  # lists of plain numbers, as the second time

    def understood(self, answer: Any, read: Callable[[Any], T]) -> T:
        """What `read` makes of an answer. Raises `SamplerFailed` where it makes nothing of it."""
        try:
            return read(answer)
        except (TypeError, ValueError, OverflowError) as error:
            raise SamplerFailed(f"{type(self.sampler).__name__} answered {answer!r:.80}: {error}") from error

    def needs(self, batch_size: int) -> int | None:
        """How many of the first ready rows it has to see; None for all of them."""
        answer = self.ask(self.sampler.needs, batch_size)
        return None if answer is None else self.understood(answer, operator.index)

    def deal(self, *args: Any, **config: Any) -> Dealt:
        """The rows of each rank, and those that are used up."""
        return self.understood(self.ask(self.sampler.deal, *args, **config), _as_dealt)

    def _logged(self, question: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.num_calls += 1
        try:
            return self._call(question, *args, **kwargs)
        except TransferQueueError as error:
            if not isinstance(error, InvalidInput):
                log.exception("%s failed", type(self.sampler).__name__)
            raise

    def _call(self, question: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What it returns. Anybody's exceptions become `SamplerFailed`."""
        try:
            return question(*args, **kwargs)
        except TransferQueueError:
            raise
        except Exception as error:
            raise SamplerFailed(f"{type(self.sampler).__name__} failed: {type(error).__name__}: {error}") from error

    # what is kept for a standby

    def keep(self) -> bool:
        """From now on keep what it answers, for `heard`. Whether that is needed."""
        self._keeps = self.is_foreign
        return self._keeps

    def heard(self) -> Heard | None:
        """What it answered since the last time; None: nobody called it."""
        if self.num_calls == self._num_heard:
            return None
        answers, self._heard, self._num_heard = self._heard, [], self.num_calls
        return Heard(answers, self._remembered())

    def _remembered(self) -> bytes | None:
        """None where it cannot be said, or is too much, which is looked at again after a while: it remembers then what
        it is asked a second time."""
        if self._num_unsaved:
            self._num_unsaved -= 1
            return None
        with contextlib.suppress(TransferQueueError):
            state = self._call(lambda: _encode(self.sampler.save_checkpoint()))
            if len(state) <= MAX_STATE_NBYTES:
                return state
        self._num_unsaved = LOOK_AGAIN
        return None

    def begin_again(self) -> None:
        """What happened is carried out once more: from now on it answers what `repeat` says."""
        self._repeated, self._heard, self._num_unsaved = deque(), [], 0

    def repeat(self, heard: Heard) -> None:
        """Its next answers."""
        assert self._repeated is not None
        self._repeated.extend(heard.answers)
        self._state = heard.state

    def _again(self, question: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The answer that it gave before. It is asked nevertheless, for what it comes to remember."""
        assert self._repeated is not None
        if not self._repeated:
            raise KeyError(f"an answer of {type(self.sampler).__name__}.{_name(question)}")
        answer = _decode(self._repeated.popleft())
        if answer.method != _name(question):
            raise KeyError(f"{type(self.sampler).__name__}.{_name(question)}: {answer.method} was asked before")
        with contextlib.suppress(TransferQueueError):
            self._call(question, *args, **kwargs)
        if answer.error is not None:
            raise error_from_code(answer.error.code, answer.error.text)
        return answer.value

    def end_again(self) -> None:
        """All of it has happened once more. The sampler remembers what it did then, where that is known and not what it
        does now. Raises KeyError when an answer is left."""
        if self._repeated:
            raise KeyError(f"{len(self._repeated)} answers of {type(self.sampler).__name__} that nobody asked for")
        if self._state is not None and self._state != self._remembered():
            self.tell(self.sampler.load_checkpoint, msgspec.msgpack.decode(self._state))
        self._repeated = self._state = None


def _as_dealt(answer: Any) -> Dealt:
    shares, used = answer
    return [np.array(share, np.int64).tolist() for share in shares], np.array(used, np.int64).tolist()


def _name(question: Callable[..., Any]) -> str:
    return getattr(question, "__name__", "")


def refused_rest(error: InvalidInput, rows: int, partition: str) -> InvalidInput:
    """What to say where a sampler refuses the last `rows` of a partition, a number that nobody asked for; 0: it was
    asked for."""
    if not rows:
        return error
    return InvalidInput(
        f"{rows} rows are left of partition {partition!r}, of which the sampler makes no batch ({error}): declare a "
        f"number of rows that it takes whole, or clear the rest"
    )


def _answered(question: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bytes:
    return _encode(Answer(_name(question), question(*args, **kwargs)))


def _plain(value: Any) -> Any:
    """Arrays, their numbers, and whatever else has items."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"an answer is numbers and lists of them, got a {type(value).__qualname__}")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder(Answer).decode
