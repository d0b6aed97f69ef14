"""The differences from TransferQueue 0.1.11 that are on purpose, each with its reason and as narrow as it can be said.

`docs/compatibility.md` states them. A rule speaks of one place in the outcomes of one call; a call differs as intended
where every place has a rule. After a rule that `diverges` the two services hold different things: the call is taken out
of the program, and the rest is played without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from frameworks.differential.comparing import Place
from frameworks.differential.drawing import Call


@dataclass(frozen=True)
class Step:
    """A call of a program, its outcomes, and the calls before it."""

    call: Call
    theirs: Any
    ours: Any
    before: list[Call]
    sampler: str

    @property
    def name(self) -> str:
        name: str = self.call["call"]
        return name

    def given(self, argument: str, default: Any = None) -> Any:
        return self.call["with"].get(argument, default)


Applies = Callable[[Step, Place], bool]


@dataclass(frozen=True)
class Intended:
    """Why a difference is on purpose, and where it is."""

    reason: str
    applies: Applies
    diverges: bool


RULES: list[Intended] = []
READS = ("get_data", "kv_batch_get", "kv_batch_get_by_meta")
PUTS = ("kv_put", "kv_batch_put", "put")
SCHEMA = ("dtypes", "shapes", "no tensors")  # what metadata says of a field
GETTERS = ("get_dtypes", "get_shapes")
HAVE_DTYPES = ("dense", "view", "ragged", "nested", "tensors", "numbers", "mixture", "array", "tensor")
LEAVES = "a refused call leaves nothing behind; there keys, rows or values"
GONE = ["StorageKeyNotFoundError", "KeyError", "LookupError"]


def intended(reason: str, *, diverges: bool = False) -> Callable[[Applies], Applies]:
    def register(applies: Applies) -> Applies:
        RULES.append(Intended(reason, applies, diverges))
        return applies

    return register


def rule_for(step: Step, place: Place) -> Intended | None:
    """The rule that a difference falls under."""
    return next((rule for rule in RULES if rule.applies(step, place)), None)


def raised(outcome: Any) -> list[str]:
    """The classes that catch the error of an outcome, nearest first; none where there is none."""
    return outcome.get("raises", []) if isinstance(outcome, dict) else []


def columns_put(step: Step) -> list[dict[str, Any]]:
    """What describes the columns and cells of a call."""
    return list(columns_of(step.call).values())


def columns_of(call: Call) -> dict[str, dict[str, Any]]:
    """What describes the columns, or cells, that a call puts, by field."""
    given = next((call["with"][name] for name in ("fields", "data", "tensor_dict") if name in call["with"]), {})
    if call["call"] not in (*PUTS, "add_fields") or not isinstance(given, dict):
        return {}
    columns: dict[str, dict[str, Any]] = given.get("fields", given)
    return columns


def tells_schema(step: Step, place: Place) -> bool:
    """Whether it is metadata that says what a field is."""
    return step.name in GETTERS or any(key in SCHEMA for key in place.path)


def field_at(step: Step, place: Place) -> str | None:
    """The field that a place in a batch, or in metadata, belongs to."""
    following = zip(place.path, place.path[1:], strict=False)
    asked: str | None = step.given("field_name") if step.name in GETTERS else None
    return next((str(name) for key, name in following if key in ("fields", *SCHEMA)), asked)


def given_to(step: Step, field: str | None, by: Sequence[str] = PUTS) -> list[dict[str, Any]]:
    """What describes the columns and cells that a field was given by this call or those before."""
    calls = [call for call in (*step.before, step.call) if call["call"] in (*by, "add_fields")]
    return [columns[field] for columns in map(columns_of, calls) if field is not None and field in columns]


def has_kind(step: Step, place: Place, kinds: Sequence[str], by: Sequence[str] = PUTS) -> bool:
    return any(column["kind"] in kinds for column in given_to(step, field_at(step, place), by))


def at(outcome: Any, path: Sequence[str | int]) -> Any:
    """What stands at a path in an outcome."""
    for key in path:
        outcome = outcome[key]
    return outcome


def apart(step: Step) -> str | None:
    """Why the two services hold different things after a call, whatever it returned; None where they do not."""
    if step.name not in PUTS:
        return None
    if raised(step.theirs) and raised(step.ours) and step.ours.get("left", [""]) != step.theirs.get("left"):
        return LEAVES
    for field, column in columns_of(step.call).items():
        dtypes = {one["dtype"] for one in given_to(step, field) if one["kind"] in HAVE_DTYPES}
        if column["kind"] in HAVE_DTYPES and len(dtypes) > 1:
            return "a put of another dtype is taken; there it returns as if it were, and is cast or lost"
    return None


# ---- puts ----


@intended(LEAVES)
def left_by_refused_calls(step: Step, place: Place) -> bool:
    return place.path[:1] == ("left",) and step.ours["left"] == []


@intended("a `NonTensorData` of one value gives it to every row; there the put fails", diverges=True)
def one_value_for_all_rows(step: Step, place: Place) -> bool:
    shared = any(column.get("kind") == "shared" for column in columns_put(step))
    return shared and step.name in PUTS and raised(step.theirs) == ["TypeError"]


@intended("rows whose numbers do not lie one after the other can be put; there some cannot", diverges=True)
def views(step: Step, place: Place) -> bool:
    viewed = any(column.get("kind") == "view" for column in columns_put(step))
    return viewed and step.name in PUTS and raised(step.theirs) == ["RuntimeError"] and not raised(step.ours)


@intended("a batch that does not fit its metadata is refused as such; there an IndexError for some kinds of columns")
def class_of_a_batch_that_does_not_fit(step: Step, place: Place) -> bool:
    fewer = step.name == "put" and step.given("data")["more"] < 0
    return fewer and raised(step.theirs)[:1] == ["IndexError"] and "RuntimeError" in raised(step.ours)


@intended("a number or an array given to `kv_put` is a tensor, as in a batch; there it is an object")
def numbers_by_key(step: Step, place: Place) -> bool:
    cells = [column for column in given_to(step, field_at(step, place), by=("kv_put",)) if "$" in column]
    return any(cell["kind"] in ("array", "number") for cell in cells)


@intended("the error of a `data_parser` comes as it is; there it is told in a RuntimeError")
def errors_of_parsers(step: Step, place: Place) -> bool:
    return step.given("data_parser", {}).get("how") == "fails" and place.ours == ["ValueError"]


# ---- what metadata says ----


@intended("metadata tells no row shapes of ragged fields")
def shapes_of_ragged_fields(step: Step, place: Place) -> bool:
    tells = "shapes" in place.path or step.name == "get_shapes"
    return tells and place.theirs is not None and place.ours is None


@intended("a column of tensors of one dtype is one in its metadata, too, however it was given; there objects")
def tensors_given_as_objects(step: Step, place: Place) -> bool:
    given_one_by_one = has_kind(step, place, ("tensors", "mixture", "held"))
    return tells_schema(step, place) and given_one_by_one and place.theirs in ("None", None, True)


@intended("metadata of a field of several dtypes, ranks or kinds names none; there the first")
def dtype_of_several(step: Step, place: Place) -> bool:
    given = [(column["dtype"], column["dims"], column["kind"]) for column in given_to(step, field_at(step, place))]
    several = len(set(given)) > 1 or [kind for _, _, kind in given].count("array") > 1
    return several and tells_schema(step, place) and place.ours in ("None", True, None)


@intended("an insert names dtype and shape that its fields have, or had, in the partition; there not always")
def schema_of_inserts(step: Step, place: Place) -> bool:
    inserted = any(call["with"].get("mode") == "insert" for call in (*step.before, step.call))
    return inserted and tells_schema(step, place) and place.theirs in ("None", None, False)


@intended("of a row that is put twice at once metadata tells the shape that was stored; there both")
def shapes_of_repeated_rows(step: Step, place: Place) -> bool:
    if "shapes" not in place.path:
        return False
    meta = at(step.ours, place.path[: place.path.index("shapes")])
    return isinstance(meta, dict) and len(set(meta["rows"])) < len(meta["rows"])


@intended("joined metadata tells the shape of each row; there sometimes the first for all")
def shapes_of_joined_rows(step: Step, place: Place) -> bool:
    joined = any(call["call"] == "concat" for call in (*step.before, step.call))
    return "shapes" in place.path and joined and None not in (place.theirs, place.ours)


@intended("metadata tells the one shape of a field also for rows without it; there not for nested fields")
def shapes_of_rows_without_data(step: Step, place: Place) -> bool:
    nested = has_kind(step, place, ("ragged", "nested"))
    return "shapes" in place.path and nested and place.theirs is None


@intended("shapes that came from the service are tuples; there lists")
def shapes_from_the_service(step: Step, place: Place) -> bool:
    return step.name == "get_shapes" and place.ours == {"tuple": place.theirs}


# ---- tags ----


@intended("a put at metadata sends the tags that were changed on it; there all, which may be old")
def old_tags(step: Step, place: Place) -> bool:
    of_tags = "tags" in place.path or step.name in ("kv_list", "get_all_custom_meta")
    puts = [number for number, call in enumerate(step.before) if "metadata" in call["with"] and call["call"] == "put"]
    earlier = step.before[: puts[-1]] if puts else []
    return of_tags and any({"tag", "tags", "custom_meta"} & call["with"].keys() for call in earlier)


# ---- what metadata names ----


@intended("metadata joins where dtypes are equal, and metadata tells other ones, see above", diverges=True)
def joins_by_dtype(step: Step, place: Place) -> bool:
    one_fails = (raised(step.theirs) == ["ValueError"]) != (raised(step.ours) == ["ValueError"])
    puts = [columns_of(call) for call in step.before]
    return step.name == "concat" and one_fails and any(tells_other_dtype(puts, field) for field in "abcd")


@intended("a put of another kind of column is whole; there fields can be lost, at once or when rows are cleared")
def fields_that_are_lost(step: Step, place: Place) -> bool:
    there, here = (names_of(outcome.get("returns")) for outcome in (step.theirs, step.ours))
    puts = [columns_of(call) for call in step.before]
    lost = there < here and step.given("mode") != "force_fetch"
    return lost and any(tells_other_dtype(puts, field) for field in "abcd")


def names_of(returned: Any) -> set[str]:
    """The fields of a batch, or of metadata, that a call returned."""
    if not isinstance(returned, dict):
        return set()
    return set(returned.get("fields") or returned.get("names") or ())


def tells_other_dtype(puts: Sequence[dict[str, dict[str, Any]]], field: str) -> bool:
    """Whether a field was given tensors one by one, or columns of several kinds or dtypes."""
    given = [columns[field] for columns in puts if field in columns]
    several = len({(column["kind"], column["dtype"]) for column in given}) > 1
    return several or any(column["kind"] in ("tensors", "mixture", "held", "objects", "array") for column in given)


@intended("`force_fetch` names fields that nobody has written, and the rows are not ready", diverges=True)
def fields_that_nobody_wrote(step: Step, place: Place) -> bool:
    if step.given("mode") != "force_fetch" or "returns" not in step.theirs or "returns" not in step.ours:
        return False
    there, here = step.theirs["returns"]["names"], step.ours["returns"]["names"]
    return set(there) < set(here) and here == sorted(step.given("data_fields"))


@intended("fields can be selected by metadata that names none, which means all; there that is refused")
def selection_from_all_fields(step: Step, place: Place) -> bool:
    meta = step.given("meta") or {}
    refused = "select_fields.*not found" in step.theirs.get("texts", [])
    of_all = step.name == "kv_batch_get_by_meta" and meta.get("fields", "") is None
    return of_all and refused and step.ours.get("texts") != step.theirs["texts"]


@intended("metadata of no rows names no fields; there it names those of the partition", diverges=True)
def fields_of_no_rows(step: Step, place: Place) -> bool:
    if step.name != "kv_retrieve_meta" or step.theirs.get("returns", {}).get("rows") != []:
        return False
    return place.path[:2] in {("returns", part) for part in ("names", "dtypes", "shapes", "no tensors")}


@intended("`reorder` takes no row twice, counted from the end or not; there the row doubles", diverges=True)
def one_row_twice(step: Step, place: Place) -> bool:
    how = (step.given("indexes") or {}).get("how")
    return step.name == "reorder" and how == "negative" and "ValueError" in raised(step.ours)


# ---- samplers ----


@intended("a fetch that no rows can satisfy is refused at once; there when there are rows enough", diverges=True)
def fetches_that_no_rows_satisfy(step: Step, place: Place) -> bool:
    """A batch size that splits groups, a rank that is none, or a sampler's parameter that is missing."""
    fetches = step.name == "get_meta" and step.given("mode", "fetch") == "fetch"
    return fetches and raised(step.ours)[:2] == ["ValueError", "RuntimeError"] and rows_of(step.theirs) == []


@intended("a `dp_rank` that is none is refused; there samplers take some", diverges=True)
def ranks_that_are_none(step: Step, place: Place) -> bool:
    rank = (step.given("sampling_config") or {}).get("dp_rank")
    return rank in (-1, 5) and raised(step.ours)[:2] == ["ValueError", "RuntimeError"] and not raised(step.theirs)


@intended("samplers use partition and task of the request; there those in `sampling_config`, or none", diverges=True)
def names_in_sampling_configs(step: Step, place: Place) -> bool:
    config = step.given("sampling_config") or {}
    remembers = step.sampler == "SeqlenBalancedSampler" or (step.sampler != "SequentialSampler" and bool(config))
    fetches = step.name == "get_meta" and step.given("mode", "fetch") == "fetch"
    return fetches and remembers and "partition_id" not in config


@intended("a remembered batch waits for the fields asked for; there it comes without them", diverges=True)
def remembered_batches(step: Step, place: Place) -> bool:
    asked = step.given("sampling_config") or {}
    if step.name != "get_meta" or asked.get("dp_rank") is None or not rows_of(step.theirs) or rows_of(step.ours) != []:
        return False
    fetches = [call["with"].get("sampling_config") for call in step.before if call["call"] == "get_meta"]
    return step.sampler != "SequentialSampler" and any(
        config and all(config.get(key) == asked.get(key) for key in ("dp_rank", "batch_index")) for config in fetches
    )


@intended("a remembered batch is forgotten with its rows; there it outlives them", diverges=True)
def batches_of_cleared_rows(step: Step, place: Place) -> bool:
    cleared = any("clear" in call["call"] for call in step.before)
    rank = (step.given("sampling_config") or {}).get("dp_rank")
    remembers = step.sampler != "SequentialSampler" and step.name == "get_meta" and rank is not None
    return cleared and remembers and bool(rows_of(step.theirs)) and rows_of(step.theirs) != rows_of(step.ours)


ALL_RANKS = "the rows of all ranks of a balanced batch are taken together; there ranks of two batches share rows"


@intended(ALL_RANKS, diverges=True)
def rows_of_all_ranks(step: Step, place: Place) -> bool:
    """So there are fewer left for another batch."""
    fetches = step.sampler == "SeqlenBalancedSampler" and step.name == "get_meta"
    return fetches and bool(rows_of(step.theirs)) and rows_of(step.ours) == []


@intended(ALL_RANKS)
def use_of_all_ranks(step: Step, place: Place) -> bool:
    return step.sampler == "SeqlenBalancedSampler" and step.name.endswith("consumption_status")


@intended("of divisions that are equally even a rank may get the other one", diverges=True)
def other_shares(step: Step, place: Place) -> bool:
    balanced = step.sampler == "SeqlenBalancedSampler" and step.name == "get_meta"
    there, here = rows_of(step.theirs), rows_of(step.ours)
    return balanced and there is not None and here is not None and len(there) == len(here) != 0


def rows_of(outcome: Any) -> list[int] | None:
    """The rows of the metadata that a call returned; None where it returned none."""
    returned = outcome.get("returns") if isinstance(outcome, dict) else None
    rows: list[int] | None = returned.get("rows") if isinstance(returned, dict) else None
    return rows


@intended("a fetch of no rows is empty; there some samplers fail")
def fetches_of_no_rows(step: Step, place: Place) -> bool:
    of_none = step.name == "get_meta" and step.given("batch_size") == 0
    return of_none and raised(step.theirs) == ["RuntimeError"] and not raised(step.ours)


@intended("an insert of no rows, or of no fields, is refused", diverges=True)
def inserts_of_nothing(step: Step, place: Place) -> bool:
    of_none = step.given("mode") == "insert" and (step.given("batch_size") == 0 or step.given("data_fields") == [])
    return of_none and raised(step.ours) == ["ValueError", "RuntimeError"]


@intended("a partition whose last key is cleared is freed; there it stays", diverges=True)
def freed_partitions(step: Step, place: Place) -> bool:
    if not any(call["call"] == "kv_clear" for call in step.before):
        return False
    if step.given("mode") == "force_fetch" or step.name == "kv_retrieve_keys":
        return raised(step.ours) == ["ValueError", "RuntimeError"]
    if step.name == "kv_list":
        without_rows = [partition for partition in place.theirs if partition[1] == {"items": []}]
        gone = [partition for partition in place.theirs if partition not in place.ours]
        kept = [partition for partition in place.theirs if partition in place.ours]
        return place.ours == kept and all(partition in without_rows for partition in gone)
    if step.name in ("get_consumption_status", "get_production_status"):
        return place.ours == {"tuple": [None, None]}
    return step.name == "get_partition_list" and set(place.ours) < set(place.theirs)


@intended("the status of inserted rows is told; there that fails when others have more fields", diverges=True)
def status_of_inserted_rows(step: Step, place: Place) -> bool:
    asked = step.name in ("get_production_status", "check_production_status")
    return asked and raised(step.theirs) == ["RuntimeError"] and not raised(step.ours)


@intended("a partition without rows has produced nothing; there everything")
def partitions_without_rows(step: Step, place: Place) -> bool:
    cleared = any("clear" in call["call"] for call in step.before)
    return step.name == "check_production_status" and cleared and (place.theirs, place.ours) == (True, False)


@intended("a key that is asked for twice is created once; there it gets two rows", diverges=True)
def keys_created_twice(step: Step, place: Place) -> bool:
    keys = step.given("keys")
    return step.name == "kv_retrieve_meta" and step.given("create", False) and len(set(keys)) < len(keys)


# ---- streams ----


@intended("rows of a stream count as used when the micro-batch after them is asked for; there when they are fetched")
def rows_of_streams(step: Step, place: Place) -> bool:
    task = step.given("task_name")
    streams = any(call["call"] == "stream" and call["with"]["task_name"] == task for call in step.before)
    if step.name == "check_consumption_status":
        return streams and (place.theirs, place.ours) == (True, False)
    if step.name != "get_consumption_status" or not streams:
        return False
    return all(here <= there for here, there in zip(json.loads(place.ours), json.loads(place.theirs), strict=True))


@intended("`step` ends the batch that was begun; there its rest comes before the new partition", diverges=True)
def rests_of_batches(step: Step, place: Place) -> bool:
    calls = [call for call in step.before if call["on"] == step.call["on"] and call["call"] == "go on with"]
    if step.name != "take" or not calls or not step.theirs.get("returns"):
        return False
    first = step.theirs["returns"][0]
    return isinstance(first, dict) and first["tuple"][1]["partitions"][0] != calls[-1]["with"]["partition_id"]["name"]


@intended("fields of a micro-batch have the order of the batch; there those of ragged rows come last")
def order_in_micro_batches(step: Step, place: Place) -> bool:
    return step.name.startswith("take") and "order" in place.path


@intended("data and metadata of a micro-batch are of the same rows; there not where batches do not divide")
def rows_of_micro_batches(step: Step, place: Place) -> bool:
    opened = next((call["with"] for call in step.before if call.get("keep") == step.call["on"]), None)
    if not step.name.startswith("take") or opened is None or place.path[2:4] != ("tuple", 1):
        return False
    return bool(opened["batch_size"] % opened["micro_batch_size"])


# ---- rows without data ----


@intended("rows that are not written are not ready; there the error depends on what other partitions hold")
def rows_that_are_not_written(step: Step, place: Place) -> bool:
    not_there = place.theirs in (GONE, ["RuntimeError"])
    return step.name == "get_data" and not_there and place.ours == ["ValueError", "RuntimeError"]


@intended("rows that were cleared are said to be; there the error depends on what other partitions hold")
def rows_that_were_cleared(step: Step, place: Place) -> bool:
    return step.name == "get_data" and place.theirs == ["RuntimeError"] and place.ours == GONE


@intended(
    "a write to a cleared row is refused; there it goes to nobody, or to a row that has its number", diverges=True
)
def writes_to_cleared_rows(step: Step, place: Place) -> bool:
    return step.name in ("put", "set_custom_meta") and not raised(step.theirs) and raised(step.ours) == GONE


@intended("rows that were inserted and not written can be cleared; there that fails", diverges=True)
def clearing_rows_that_are_not_written(step: Step, place: Place) -> bool:
    clears = step.name in ("clear_samples", "clear_partition", "kv_clear")
    return clears and raised(step.theirs) == ["RuntimeError"] and not raised(step.ours)
