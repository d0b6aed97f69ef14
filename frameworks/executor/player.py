"""Plays a program: a list of calls, each plain data, whose outcomes are plain data, too.

A call is `{"on": what, "call": name, "with": {argument: value}}`. `on` is "tq", "client", "BatchMeta" or "KVBatchMeta",
or the name under which an earlier call kept its result: `"keep": "m3"`, of a list `"part"` of it. `"async": true` calls
the asynchronous twin, `"by"` names another client that makes the call. Of a call with `"watch": true` that is refused
the outcome says what it left behind. A value is itself, or, where it is `{"$": kind, ...}`, made by `MAKERS`.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from columns import cell, column
from holding import changed, held
from other_clients import OtherClients
from outcomes import Names, error, plain
from parsers import parser
from streams import STREAM_CALLS, Stream, stream
from tensordict import TensorDict

import transfer_queue as tq

METAS = (tq.BatchMeta, tq.KVBatchMeta)
SPARE_ROWS = 64  # more than a program has
Call = dict[str, Any]


class Missing(Exception):
    """A call needs the result of an earlier one that did not give one."""


class Player:
    """One program and what its calls kept."""

    def __init__(self, number: int, config: Any, others: OtherClients) -> None:
        self.names = Names(f"program{number}-")
        self.kept: dict[str, Any] = {}
        self.config = config
        self.others = others

    def play(self, calls: list[Call]) -> list[Any]:
        """The outcome of each call; afterwards the partitions are as before."""
        outcomes = [self._outcome(call) for call in calls]
        for kept in self.kept.values():
            if isinstance(kept, Stream):
                kept.close()
        client = tq.get_client()
        for partition in client.get_partition_list():
            if partition.startswith(self.names.prefix):
                with suppress(RuntimeError):  # TransferQueue cannot clear some; no other program has their names
                    client.clear_partition(partition)
        use_up_free_indexes()
        return outcomes

    def _outcome(self, call: Call) -> Any:
        """What a call returned or raised, and what has become of the metadata that it was given."""
        try:
            given = {name: self._made(value) for name, value in call["with"].items()}
            receiver = self._receiver(call["on"])
        except Missing as missing:
            return {"not called": str(missing)}
        before = held(self.names) if call.get("watch") else None
        try:
            returned = self._called(receiver, call, given)
            outcome = {"returns": self._shown(call["call"], returned)}
            if call["call"] in ("kv_put", "kv_batch_put"):
                self._number_rows(returned)
        except Exception as raised:  # noqa: BLE001  what is raised is what is compared
            returned, outcome = None, error(raised)
            if before is not None:
                outcome["left"] = changed(before, held(self.names))
        metas = [one for one in (receiver, *given.values()) if isinstance(one, METAS)]
        if metas:
            outcome["afterwards"] = [plain(meta, self.names) for meta in metas]
        if call["call"].startswith(("clear_", "kv_clear")):
            use_up_free_indexes()
        self._keep(call, returned)
        return outcome

    def _number_rows(self, put: tq.KVBatchMeta) -> None:
        """Rows that were put by key get their names now: later it shows when the packages hand out different ones."""
        meta = tq.get_client().kv_retrieve_meta(keys=put.keys, partition_id=put.partition_id)
        self.names.rows(list(meta.global_indexes))

    def _called(self, receiver: Any, call: Call, given: dict[str, Any]) -> Any:
        if call["call"] == "together":
            return self._together(receiver, given["calls"])
        if call["call"] == "stream":
            return stream(self.config, **given)
        if call["call"] in FUNCTIONS:
            return FUNCTIONS[call["call"]](receiver, **given)
        name = f"async_{call['call']}" if call.get("async") else call["call"]
        if call.get("by") == "process":
            returned = self.others.in_process(call["on"], name, given)
        else:
            made = getattr(self.others.object() if call.get("by") == "object" else receiver, name)(**given)
            returned = asyncio.run(made) if call.get("async") else made
        if given.get("mode") == "force_fetch":  # in the order of a Python set there
            returned.reorder(sorted(range(len(returned)), key=returned.global_indexes.__getitem__))
        return returned

    def _together(self, receiver: Any, calls: list[dict[str, Any]]) -> list[Any]:
        """What each of some calls gives that are begun at once."""

        async def begun() -> list[Any]:
            twins = [getattr(receiver, f"async_{call['call']}")(**call["with"]) for call in calls]
            return await asyncio.gather(*twins, return_exceptions=True)

        returned = asyncio.run(begun())
        return [
            error(one) if isinstance(one, Exception) else {"returns": self._shown(call["call"], one)}
            for call, one in zip(calls, returned, strict=True)
        ]

    def _receiver(self, name: str) -> Any:
        if name in ("tq", "BatchMeta", "KVBatchMeta"):
            return tq if name == "tq" else getattr(tq, name)
        return tq.get_client() if name == "client" else self._kept(name)

    def _kept(self, name: str) -> Any:
        if name not in self.kept:
            raise Missing(name)
        return self.kept[name]

    def _keep(self, call: Call, returned: Any) -> None:
        if isinstance(returned, list) and returned:
            returned = returned[call.get("part", 0) % len(returned)]
        if "keep" in call and isinstance(returned, (*METAS, Stream)):
            self.kept[call["keep"]] = returned

    def _made(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._made(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$" in value:
            return MAKERS[value["$"]](self, value)
        return {name: self._made(item) for name, item in value.items()}

    def _shown(self, name: str, returned: Any) -> Any:
        """The result of a call, with rows and partitions of this program only, by their names here."""
        if name == "kv_list":
            shown = {self.names.shown(one): keys for one, keys in returned.items() if one.startswith(self.names.prefix)}
            return plain(shown, self.names)
        if name == "together":
            return returned
        if name == "get_partition_list":
            return [self.names.shown(one) for one in returned if one.startswith(self.names.prefix)]
        if name in ("get_consumption_status", "get_production_status") and returned[0] is not None:
            indexes, status = returned
            return [self.names.rows(indexes.tolist()), str(indexes.dtype), plain(status, self.names)]
        return plain(returned, self.names)


def use_up_free_indexes() -> None:
    """TransferQueue gives the indexes of cleared rows to new ones, in any order, which decides the order of fetches.

    Here nobody gets one a second time, so that rows have the same order in both.
    """
    tq.get_client().get_meta(data_fields=["x"], batch_size=SPARE_ROWS, partition_id="spare", mode="insert")


# ---- values ----

MAKERS: dict[str, Callable[[Player, dict[str, Any]], Any]] = {
    "partition": lambda player, value: player.names.partition(value["name"]),
    "meta": lambda player, value: player._kept(value["name"]),
    "cell": lambda player, value: cell(value),
    "tuple": lambda player, value: tuple(player._made(value["items"])),
    "slice": lambda player, value: slice(*value["bounds"]),
    "columns": lambda player, value: _columns(player, value),
    "positions": lambda player, value: _positions(player, value),
    "indexes": lambda player, value: list(player._kept(value["of"]).global_indexes),
    "tags": lambda player, value: _tags(player, value),
    "locked tags": lambda player, value: [*_tags(player, {**value, "more": -1}), {"lock": threading.Lock()}],
    "lock": lambda player, value: {"n": 1, "lock": threading.Lock()},
    "keys of": lambda player, value: _meta_of_keys(player, value),
    "parser": lambda player, value: parser(value["how"]),
}


def _count(player: Player, rows: int | str) -> int:
    return rows if isinstance(rows, int) else len(player._kept(rows))


def _columns(player: Player, value: dict[str, Any]) -> TensorDict:
    """A batch of as many rows as `rows` says, or as the metadata named there has, and `more`."""
    count = max(0, _count(player, value["rows"]) + value.get("more", 0))
    return TensorDict({name: column(what, count) for name, what in value["fields"].items()}, batch_size=count)


def _positions(player: Player, value: dict[str, Any]) -> list[int]:
    """Positions among the rows of a kept meta: in another order, a part, repeated, or wrong in one of several ways."""
    count, rng = _count(player, value["of"]), random.Random(value["seed"])
    order = rng.sample(range(count), count)
    ways = {
        "order": order,
        "part": order[: rng.randrange(count + 1)],
        "first": list(range(rng.randrange(count + 1))),
        "repeats": [*order, *order[:1]],
        "twice": order[:1] * count,
        "out of range": [*order[:-1], count],
        "negative": [*order[:-1], -1],
        "none": [],
    }
    return ways[value["how"]]


def _tags(player: Player, value: dict[str, Any]) -> list[dict[str, Any]]:
    count = max(0, _count(player, value["of"]) + value.get("more", 0))
    rng = random.Random(value["seed"])
    choices: list[dict[str, Any]] = [
        {},
        {"n": 1},
        {"n": 2, "s": "text"},
        {"deep": {"a": [1, None, 2.5]}},
        {"s": "other"},
    ]
    return [dict(rng.choice(choices)) for _ in range(count)]


def _meta_of_keys(player: Player, value: dict[str, Any]) -> tq.KVBatchMeta:
    """Metadata as a program makes it itself."""
    partition = value["partition"] and player.names.partition(value["partition"])
    given = {"keys": value["keys"], "tags": [{} for _ in value["keys"]], "fields": value["fields"]}
    return tq.KVBatchMeta(**given, partition_id=partition)


# ---- what is no method ----


def _alter_tags(meta: Any, tags: list[dict[str, Any]]) -> None:
    for row, tag in zip(meta.custom_meta, tags, strict=False):
        row.update(tag)


def _compare_samples(meta: Any) -> Any:
    """Whether the views of rows say what the metadata says."""
    views = [(int(row.global_index), row.partition_id) for row in meta.samples]
    return views == list(zip(meta.global_indexes, meta.partition_ids, strict=True))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "item": lambda meta, at: meta[at],
    "pickled": lambda meta: pickle.loads(pickle.dumps(meta)),
    "alter tags": _alter_tags,
    "samples": _compare_samples,
    "truth": lambda meta: [bool(meta), len(meta), meta.size],
    **STREAM_CALLS,
}
