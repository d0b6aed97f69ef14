"""What draws and compares the programs of the differential suite. The suite itself needs TransferQueue and Ray."""

from __future__ import annotations

import json

from frameworks.differential.comparing import Place, places
from frameworks.differential.drawing import OTHERS, TENSORS, draw

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


def test_a_seed_gives_one_program_of_plain_data() -> None:
    for seed in range(50):
        program = draw(seed)
        assert program == draw(seed)
        assert json.loads(json.dumps(program.calls)) == program.calls
        assert len(program.calls) >= 5


def test_the_programs_call_all_of_the_public_surface() -> None:
    called: dict[str, set[str]] = {on: set() for on in CALLED}
    modes, kinds = set(), set()
    for call in (call for seed in range(400) for call in draw(seed).calls):
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
