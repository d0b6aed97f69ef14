"""Errors that nobody foresaw: a request fails and the server goes on; a call beside the work is only logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from transfer_queue.errors import InternalError, InvalidInput, attempt
from transfer_queue.wire import messages as m
from transfer_queue.wire.defects import answered


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def test_what_a_request_finds_is_its_answer() -> None:
    assert answered(3, "Get", lambda: m.Done(3)) == m.Done(3)


def test_a_typed_error_is_the_answer_and_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    assert answered(3, "Get", raising(InvalidInput("one key twice"))) == m.Failed(3, InvalidInput.code, "one key twice")
    assert not caplog.records


def test_a_defect_is_told_to_the_caller_and_the_log_has_where(caplog: pytest.LogCaptureFixture) -> None:
    found = answered(3, "Get", raising(ZeroDivisionError("secret")))
    assert isinstance(found, m.Failed)
    assert (found.rid, found.code, found.text) == (3, InternalError.code, "Get failed; see the server's log")
    assert "ZeroDivisionError: secret" in caplog.text


def test_a_call_beside_the_work_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    attempt("taking a note", raising(OSError("no disk")), logging.getLogger("transfer_queue"))
    assert "taking a note failed" in caplog.text
    assert "no disk" in caplog.text


def test_an_interrupt_is_nobodys_defect() -> None:
    with pytest.raises(KeyboardInterrupt):
        answered(3, "Get", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        attempt("taking a note", raising(KeyboardInterrupt()), logging.getLogger("transfer_queue"))
