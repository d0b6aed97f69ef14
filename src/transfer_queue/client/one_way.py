"""What a session tells servers that answer nothing to it: what was said, which a server that is killed may not have
read, and what is still to be said."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from transfer_queue.client.effects import Call
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable
from transfer_queue.wire import messages as m

REMEMBERED = 256  # of each kind, for each server
Owed: TypeAlias = "tuple[m.Message, str]"  # and the server; "" is the session's own
# Calls that are to have had no effect, and the class of the error that ended them: the error would keep their frames.
GivenUp: TypeAlias = "tuple[list[Call], type[BaseException]]"


class OneWay:
    """For many threads, any of which may be interrupted (KeyboardInterrupt) anywhere: nothing that is owed is lost.

    To say it twice does no harm. One thing would: a forked child has several pins of one block under no request, so
    that a release which is said twice may end two of them. Those are not said again.

    A server that stood still reads connections in any order, so that a cancellation over one may come after what is
    asked over another one later, and before it the call that was cancelled. So that of a call without an answer stays
    owed, and each call says it first, until one that did was answered. There are `REMEMBERED` of these at most: each
    call would say more and more.
    """

    def __init__(self) -> None:
        self.confirmed: deque[int] = deque(maxlen=REMEMBERED)  # answers that were received
        self.missed: set[str] = set()  # servers that something could not be said to
        self.owed: deque[Owed] = deque()
        self.given_up: deque[GivenUp] = deque()  # appended to in one step, which no second interrupt can come before
        self._said: dict[str, deque[m.Message]] = {}
        self._unanswered: deque[int] = deque(maxlen=REMEMBERED)  # numbers of calls that ran out of time
        self._paying, self._settling = threading.RLock(), threading.RLock()  # the first is held while messages are sent

    def said(self, message: m.Message, to: str) -> None:
        if isinstance(message, (m.Discard, m.Cancel)) or (isinstance(message, m.Unpin) and message.rid > 0):
            self._said.setdefault(to, deque(maxlen=REMEMBERED)).append(message)

    def again(self, to: str) -> None:
        """Owe a server whose connections were lost what it was told."""
        said = list(self._said.get(to, ()))  # in one step: other threads append to it
        owed = {id(message) for message, _ in list(self.owed)}
        self.owed.extend([(message, to) for message in said if id(message) not in owed])
        if self.confirmed and not to:
            self.owed.append((m.Received(list(self.confirmed)), to))

    def heard_from(self, to: str, told: Sequence[Owed]) -> None:
        """A server has answered, over a connection by which it was `told` this first (`pay_one`). Where it could not be
        told something, it can be now."""
        for one in told:
            if self._is_kept(one):
                self._forget(one)
        if to in self.missed:
            self.missed.discard(to)
            self.again(to)

    def owe(self, message: m.Message, to: str) -> None:
        """It could not be said: it is with the next call, to another host's server once that has answered something."""
        if to:
            self.missed.add(to)
        elif not (isinstance(message, m.Cancel) and (message, to) in self.owed):
            self.owed.append((message, to))

    def called_off(self, rid: int, to: str, *, unanswered: bool) -> None:
        """An event loop's connection has told the server that a call is off; others have not."""
        if unanswered and not to:
            self.owe_cancel(rid, to, unanswered=True)
        else:
            self.said(m.Cancel(rid), to)

    def owe_cancel(self, rid: int, to: str, *, unanswered: bool) -> None:
        cancel = m.Cancel(rid)
        self.said(cancel, to)
        if unanswered:
            self._unanswered.append(rid)
        self.owed.append((cancel, to))

    def pay(self, say: Callable[[m.Message, str], None]) -> None:
        """Say what is owed; `say` owes again what it cannot. What an interrupt keeps from being said stays owed."""
        with self._paying:
            self.settle()
            for one in list(self.owed):
                if one in self.owed:  # else another thread has said it
                    say(*one)
                    self._paid(one)

    def pay_one(self, to: str, say: Callable[[m.Message], None]) -> list[Owed]:
        """As `pay`, what this server is owed, which is returned."""
        self.settle()
        found = [one for one in list(self.owed) if one[1] == to]
        for one in found:
            say(one[0])
            self._paid(one)
        return found

    def _paid(self, one: Owed) -> None:
        if not self._is_kept(one):
            self._forget(one)

    def _is_kept(self, one: Owed) -> bool:
        """Whether it is owed until a call that came after it was answered. Not to other hosts: a server that is gone
        would be tried again and again."""
        return isinstance(one[0], m.Cancel) and not one[1] and one[0].rid in self._unanswered

    def _forget(self, one: Owed) -> None:
        with contextlib.suppress(ValueError):  # another thread has said it too
            self.owed.remove(one)

    def settle(self) -> None:
        """Owe the cancellation of calls that were given up; not to another host's server that just did not answer."""
        with self._settling:
            while self.given_up:
                calls, ended_by = given = self.given_up[0]
                unanswered = issubclass(ended_by, (ServiceUnavailable, DeadlineExceeded))
                for call in calls:
                    if unanswered and call.to:
                        self.said(m.Cancel(call.request.rid), call.to)
                    else:
                        self.owe_cancel(call.request.rid, call.to, unanswered=unanswered)
                if self.given_up and self.given_up[0] is given:
                    self.given_up.popleft()
