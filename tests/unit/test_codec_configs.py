"""Configs of OmegaConf through the codec: what comes back, what is refused, and that reading one runs nothing."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from blocks import put_row, through
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import DictConfig, IntegerNode, ListConfig, OmegaConf

from transfer_queue.codec import values
from transfer_queue.codec.values import Lifting
from transfer_queue.errors import UnsupportedValue


def test_a_config_comes_back_with_its_interpolations_and_flags() -> None:
    config = OmegaConf.create({"a": 1, "b": "${a}", "c": [1, "${b}"], "d": "???"}, flags={"readonly": True})
    got = through([config])[0]
    assert type(got) is DictConfig
    assert (got, got.b, OmegaConf.is_missing(got, "d"), OmegaConf.is_readonly(got)) == (config, 1, True, True)
    assert through([config.c])[0] == [1, 1], "a part has no parent to look things up in"
    assert type(through([OmegaConf.create([1, {"k": 2}])])[0]) is ListConfig


@given(st.text("\\\\${}a: ", max_size=8))
def test_texts_of_a_part_of_a_config_are_resolved_once(text: str) -> None:
    config = OmegaConf.create({"part": {"b": "${text}", "l": ["${text}"]}, "text": None})
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    config.text = escaped
    assume(config.text == text)
    got = through([config.part])[0]
    assert (got.b, got.l[0]) == (text, text)
    assert through([config])[0].part.b == text


@dataclasses.dataclass
class Settings:
    n: int = 3


def parts_with_flags() -> DictConfig:
    config = OmegaConf.create({"a": {"b": 1}})
    OmegaConf.set_readonly(config.a, True)
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (OmegaConf.structured(Settings), "Settings"),
        (OmegaConf.create({"deep": [OmegaConf.structured(Settings)]}), "Settings"),
        (DictConfig({}, key_type=int), "int"),
        (OmegaConf.create({"n": IntegerNode(3)}), "IntegerNode"),
        (parts_with_flags(), "readonly.*'a'"),
    ],
    ids=["structured", "deep", "keys", "node", "flags"],
)
def test_a_config_that_would_lose_types_or_flags_is_refused(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedValue, match=f"{named}.*(put|set) "):
        put_row({"x": config})


@pytest.fixture
def called() -> Iterator[list[str]]:
    """What a resolver `run` of this process was called with."""
    found: list[str] = []

    def run(text: str) -> str:
        found.append(text)
        return text.upper()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the name of this function changes with its releases
        OmegaConf.register_new_resolver("run", run)
    yield found
    OmegaConf.clear_resolver("run")


def test_what_a_resolver_gave_its_writer_travels(called: list[str]) -> None:
    config = OmegaConf.create({"a": "x", "b": "${run:${a}}", "c": ["${run:y}", "${a}"]})
    got = through([config])[0]
    called.clear()
    assert (got.b, got.c[0], got.c[1]) == ("X", "Y", "x")
    got.a = "z"
    assert got.c[1] == "z", "an interpolation that calls nothing stays one"
    assert called == []


def test_only_calls_are_resolved_for_whoever_reads() -> None:
    """An interpolation whose text has a colon elsewhere stays one, and so does one that leads nowhere yet."""
    config = OmegaConf.create({"host": "h", "port": 1, "url": "http://${host}:${port}", "later": "${missing}"})
    got = through([config])[0]
    got.host = "other"
    assert got.url == "http://other:1"
    assert OmegaConf.to_container(got, resolve=False) == {**OmegaConf.to_container(config), "host": "other"}


def test_a_variable_of_the_environment_is_looked_up_by_whoever_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    got = through([OmegaConf.create({"a": "${oc.env:TOKEN_OF_MINE}", "b": "${oc.env:NOT_THERE,none}"})])[0]
    monkeypatch.setenv("TOKEN_OF_MINE", "another")
    assert (got.a, got.b) == ("another", "none")


def test_a_config_whose_call_fails_is_refused(called: list[str]) -> None:
    with pytest.raises(UnsupportedValue, match="cannot be stored"):
        put_row({"x": OmegaConf.create({"a": "${run:${missing}}"})})
    assert called == []


def test_a_long_text_is_looked_at_once() -> None:
    text = "${" * 50_000 + " :"
    message = msgspec.msgpack.Ext(values.CONFIG, msgspec.msgpack.encode([False, {"a": text}, None]))
    assert Lifting().unpack(msgspec.msgpack.encode(message)).a == text


@pytest.mark.parametrize(
    "text", ["${run:x}", "a ${run:x} b", "${oc.env:${run:x}}", "${oc.decode:x}", "${a}${run:${a}}", "${${a}:x}"]
)
def test_a_text_of_a_message_calls_no_resolver(text: str, called: list[str]) -> None:
    for is_list, content in ((False, {"a": "run", "b": text, "c": [{"d": text}]}), (True, ["run", text])):
        message = msgspec.msgpack.Ext(values.CONFIG, msgspec.msgpack.encode([is_list, content, None]))
        config = Lifting().unpack(msgspec.msgpack.encode(message))
        found = [config[1]] if is_list else [config.b, config.c[0].d]
        assert found == [text] * len(found)
    assert called == []


@pytest.mark.parametrize("value", [None, {"k": "a"}, ["b", 1], 2.5], ids=repr)
def test_a_call_may_give_anything_that_a_config_holds(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_part = isinstance(value, (dict, list))
        OmegaConf.register_new_resolver("give", lambda _: OmegaConf.create(value) if is_part else value)
    try:
        got = through([OmegaConf.create({"a": "${give:x}", "c": ["${give:x}"]})])[0]
    finally:
        OmegaConf.clear_resolver("give")
    assert (got.a, got.c[0]) == (value, value)
