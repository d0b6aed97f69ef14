"""Pickle is every process's own choice: neither the service nor another process makes it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
from transfer_queue.errors import ConfigError, UnsupportedValue

Service = Callable[..., tq.TransferQueueClient]
WRITER = """
import os, transfer_queue as tq
class Gadget:
    def __reduce__(self):
        return os.mkdir, ({marker!r},)
tq.init({conf!r})
tq.kv_put("a", "p", {{"x": Gadget()}})
print("written", flush=True)
input()
tq.close()
"""
READER = """
import transfer_queue as tq
from transfer_queue.errors import UnsupportedValue
if {conf!r} is not None:
    tq.init({conf!r})
try:
    tq.kv_batch_get("a", "p")
    print("read")
except UnsupportedValue:
    print("refused")
tq.close()
"""
YES, NO = {"client": {"allow_pickle": True}}, {"client": {"allow_pickle": False}}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ALLOW_PICKLE", raising=False)
    monkeypatch.delenv("TQ_ADDRESS", raising=False)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: Callable[[str], Any]) -> Path:
    """A service started by a process that pickles, with a row whose unpickling makes this directory."""
    marker, run_dir = tmp_path / "marker", str(tmp_path / "run")
    writer = child(WRITER.format(marker=str(marker), conf={**YES, "run_dir": run_dir}))
    assert writer.line() == "written"
    monkeypatch.setenv("TQ_ADDRESS", run_dir)
    return marker


@pytest.mark.parametrize("conf", [None, {"client": {}}, NO])
def test_a_reader_that_did_not_choose_pickle_unpickles_nothing(
    conf: Any, marker: Path, child: Callable[[str], Any]
) -> None:
    assert child(READER.format(conf=conf)).finish() == "refused"
    assert not marker.exists()


def test_an_explicit_no_holds_against_the_variable(
    marker: Path, child: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_ALLOW_PICKLE", "1")
    assert child(READER.format(conf=NO)).finish() == "refused"
    assert not marker.exists()


def test_a_reader_that_chose_pickle_unpickles(marker: Path, child: Callable[[str], Any]) -> None:
    assert child(READER.format(conf=YES)).finish() == "read"
    assert marker.exists()


def test_the_variable_chooses_where_the_setting_does_not(
    marker: Path, child: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_ALLOW_PICKLE", "1")
    assert child(READER.format(conf=None)).finish() == "read"
    assert marker.exists()


def test_child_processes_inherit_the_choice_until_close(service: Service, child: Callable[[str], Any]) -> None:
    service(**YES)
    tq.kv_put("a", "p", {"x": Plain()})
    assert child(READER.format(conf=None)).finish() == "read"
    tq.close()
    assert "TQ_ALLOW_PICKLE" not in os.environ


def test_an_explicit_no_is_inherited_and_what_stood_there_comes_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_ALLOW_PICKLE", "1")
    service(**NO)
    assert os.environ["TQ_ALLOW_PICKLE"] == "0"
    tq.close()
    assert os.environ["TQ_ALLOW_PICKLE"] == "1"


def test_a_later_init_of_this_process_may_choose(service: Service) -> None:
    service()
    with pytest.raises(UnsupportedValue):
        tq.kv_put("a", "p", {"x": Plain()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of the service differs
        tq.init(YES)
    tq.kv_put("a", "p", {"x": Plain()})
    tq.init(NO)
    with pytest.raises(UnsupportedValue):
        tq.kv_batch_get("a", "p")


def test_the_service_tells_nobody_whether_its_starter_pickles(service: Service) -> None:
    told = service(**YES).session.config
    assert "allow_pickle" not in told
    assert "client.allow_pickle" not in told["settings"]


def test_a_wrong_value_is_refused_by_the_process_that_attaches(service: Service) -> None:
    service()
    with pytest.raises(ConfigError, match=r"client\.allow_pickle"):
        tq.init({"client": {"allow_pickle": "yes"}})


class Plain:
    """Something only pickle holds, which any process can load."""

    def __reduce__(self) -> Any:
        return dict, ()
