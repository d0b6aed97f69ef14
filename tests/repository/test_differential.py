"""What draws and compares the programs of the differential suite. The suite itself needs TransferQueue and Ray."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frameworks.differential import random_programs
from frameworks.differential.comparing import Place, places
from frameworks.differential.drawing import OTHERS, TENSORS, Program
from frameworks.differential.intended import LEAVES
from frameworks.differential.topics import TOPICS, draw

# The client's methods and functions of TransferQueue 0.1.11 that the programs call, by what they are called on.
CALLED = {
    "tq": "kv_put kv_batch_put kv_batch_get kv_batch_get_by_meta kv_list kv_clear",
    "client": "get_meta put get_data set_custom_meta clear_samples clear_partition get_consumption_status "
    "get_production_status check_consumption_status check_production_status reset_consumption get_partition_list "
    "kv_retrieve_meta kv_retrieve_keys kv_list",
    "BatchMeta": "concat",
    "KVBatchMeta": "concat",
    "metadata": "select_samples select_fields chunk chunk_by_partition copy union reorder add_fields select_keys "
    "set_extra_info update_extra_info remove_extra_info get_extra_info has_extra_info get_all_extra_info "
    "clear_extra_info get_all_custom_meta update_custom_meta clear_custom_meta get_dtypes get_shapes",
}


@pytest.mark.parametrize("topic", [*TOPICS, None])
def test_a_seed_gives_one_program_of_plain_data(topic: str | None) -> None:
    for seed in range(50):
        program = draw(seed, topic)
        assert program == draw(seed, topic)
        assert json.loads(json.dumps(program.calls)) == program.calls
        assert len(program.calls) >= 4


def test_the_programs_call_all_of_the_public_surface() -> None:
    called: dict[str, set[str]] = {on: set() for on in CALLED}
    modes, kinds = set(), set()
    for call in (call for seed in range(400) for call in draw(seed, "columns").calls):
        called[call["on"] if call["on"] in CALLED else "metadata"].add(call["call"])
        modes.add(call["with"].get("mode", "fetch"))
        columns = call["with"].get("data")
        kinds |= {column["kind"] for column in columns["fields"].values()} if isinstance(columns, dict) else set()
    for on, names in CALLED.items():
        assert set(names.split()) <= called[on]
    assert modes >= {"fetch", "insert", "force_fetch"}
    assert kinds == {*TENSORS, *OTHERS}


def test_outcomes_differ_in_their_innermost_places() -> None:
    theirs = {"returns": {"rows": [1, 2], "names": ["x"]}}
    assert not list(places(theirs, {"returns": {"rows": [1, 2], "names": ["x"]}}))
    ours = {"returns": {"rows": [1, 3], "names": ["x", "y"]}}
    assert list(places(theirs, ours)) == [
        Place(("returns", "rows", 1), 2, 3),
        Place(("returns", "names"), ["x"], ["x", "y"]),
    ]


def test_an_error_has_to_be_caught_by_whoever_catches_theirs() -> None:
    theirs = {"raises": ["ValueError"], "texts": ["do not match"]}
    assert not list(places(theirs, {"raises": ["RuntimeError", "ValueError"], "texts": ["do not match", "more"]}))
    assert [place.path for place in places(theirs, {"raises": ["TypeError"], "texts": []})] == [("raises",), ("texts",)]
    assert list(places(theirs, {"returns": 1})) == [Place((), theirs, {"returns": 1})]


class Recorded:
    """An interpreter whose answers are known, one for each program that it is asked to play."""

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = list(answers)

    def ask(self, program: Program, calls: list[Any]) -> None:
        assert len(calls) == len(self._answers[0])

    def answer(self) -> list[Any]:
        return self._answers.pop(0)


REFUSED = {"raises": ["ValueError"], "texts": [], "left": ["keys"]}
PUT = {"on": "tq", "call": "kv_put", "with": {}, "watch": True}
LOOK = {"on": "tq", "call": "kv_list", "with": {}}


def judged(theirs: Recorded, ours: Recorded) -> random_programs.Verdict:
    program = Program(0, "refusals", ("SequentialSampler", {}), [PUT, LOOK])
    return random_programs.judged(program, program.calls, theirs, ours)  # type: ignore[arg-type]


def test_what_a_refused_call_leaves_behind_there_is_intended_and_here_never() -> None:
    nothing = {**REFUSED, "left": []}
    played = judged(
        Recorded([REFUSED, {"returns": 1}], [{"returns": 0}]), Recorded([nothing, {"returns": 0}], [{"returns": 0}])
    )
    assert not played.unexpected
    assert played.intended[LEAVES] >= 1
    left = judged(Recorded([REFUSED, {"returns": 1}]), Recorded([REFUSED, {"returns": 1}]))
    assert [place.path for place in left.unexpected] == [(random_programs.LEFT_HERE,)]


def test_after_a_refused_call_all_goes_as_without_it() -> None:
    nothing = {**REFUSED, "left": []}
    ours = Recorded([nothing, {"returns": 5}], [{"returns": 0}])  # the refused call was seen, after all
    verdict = judged(Recorded([REFUSED, {"returns": 1}], [{"returns": 0}]), ours)
    assert [place.path[0] for place in verdict.unexpected] == [random_programs.WITH_REFUSED]


def test_calls_that_are_begun_together_are_compared_one_by_one() -> None:
    together = {"on": "client", "call": "together", "with": {"calls": [LOOK, PUT]}}
    outcome = {"returns": [{"returns": 1}, {"raises": ["ValueError"], "texts": []}]}
    steps = random_programs.steps_of(together, outcome, outcome, [], "SequentialSampler")
    assert [(step.name, step.theirs) for step in steps] == list(
        zip(["kv_list", "kv_put"], outcome["returns"], strict=True)
    )
