"""Drawing programs: sequences of calls of the public API of TransferQueue 0.1.11, as plain data.

`frameworks/executor/player.py` says how a call is written. What a program draws depends on what it drew before (which
keys, fields and metadata there may be), never on what came back, so both packages run the same one. Columns and
positions are described, not written out: the executor makes as many rows as the metadata has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

Call = dict[str, Any]

FIELDS = ("a", "b", "c", "d")
PARTITIONS = ("A", "A", "A", "B")
TASKS = ("t", "u")
TENSORS = ("dense", "dense", "dense", "view", "ragged", "ragged", "nested", "tensors", "numbers")
OTHERS = ("objects", "texts", "dicts", "nothing", "mixture", "mixture", "array", "array", "held", "shared")
DTYPES = (
    "float32", "float32", "float64", "float16", "bfloat16", "int64", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64",
)  # fmt: skip
POSITIONS = ("order", "order", "part", "part", "first", "repeats", "twice", "none", "out of range", "negative")
SAMPLERS: tuple[tuple[str, dict[str, int]], ...] = (
    ("SequentialSampler", {}), ("SequentialSampler", {}), ("RankAwareSampler", {}),
    ("GRPOGroupNSampler", {"n_samples_per_prompt": 2}),
)  # fmt: skip


Sampler = tuple[str, dict[str, int]]


@dataclass(frozen=True)
class Program:
    """The calls that a seed stands for, and the sampler of the service that they are made to."""

    seed: int
    topic: str
    sampler: Sampler
    calls: list[Call]


@dataclass
class Meta:
    """Metadata that an earlier call may have kept, with what is known of it."""

    name: str
    by_key: bool
    partition: str
    has_data: bool


class Drawing:
    """Columns of every kind, written, read, cleared, and their metadata. Other topics draw other steps."""

    samplers: ClassVar[tuple[Sampler, ...]] = SAMPLERS

    def __init__(self, rng: random.Random, sampler: str) -> None:
        self.rng = rng
        self.sampler = sampler
        self.calls: list[Call] = []
        self.metas: list[Meta] = []
        self.keys: dict[str, list[str]] = {"A": [], "B": []}
        self.fields = {field: self._kind() for field in FIELDS[: rng.choice((2, 3, 3, 4))]}
        self.written: dict[str, set[str]] = {"A": set(), "B": set()}

    def step(self) -> None:
        """One more call; the first ones put something."""
        if not self.metas:
            self._pick({self.put_by_key: 2, self.put_rows: 2, self.insert: 1})()
            return
        self._pick(
            {
                self.put_key: 3, self.put_by_key: 3, self.put_rows: 2, self.insert: 2, self.put_at: 4,
                self.get_by_key: 6, self.get_by_meta: 3, self.get_data: 7, self.fetch: 5, self.look: 4,
                self.status: 4, self.keys_and_rows: 2, self.tags: 2, self.clear: 2,
                self.part_of_rows: 5, self.part_of_keys: 3, self.join: 3, self.change: 3, self.wrong: 2,
            }
        )()  # fmt: skip

    # ---- what calls are made of ----

    def _pick(self, weights: dict[Callable[[], None], int]) -> Callable[[], None]:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _call(self, on: str, call: str, *, keep: Meta | None = None, watch: bool = False, **given: Any) -> None:
        made: Call = {"on": on, "call": call, "with": given}
        if watch:
            made["watch"] = True
        if keep is not None:
            made["keep"] = keep.name
            made["part"] = self.rng.randrange(3)
            self.metas.append(keep)
        if on in ("tq", "client") and self._chance(0.1):
            made["async"] = True
        self.calls.append(made)

    def _new(self, by_key: bool, partition: str, has_data: bool = True) -> Meta:
        return Meta(f"m{len(self.calls)}", by_key, partition, has_data)

    def _meta(self, by_key: bool | None = None, to_read: bool = False) -> Meta | None:
        """Metadata of before, the newest ones more often; `to_read` mostly such as may have data."""
        of_kind = [meta for meta in self.metas if by_key is None or meta.by_key == by_key]
        if to_read and self._chance(0.85):
            of_kind = [meta for meta in of_kind if meta.has_data] or of_kind
        return of_kind[-1 - min(int(self.rng.expovariate(0.7)), len(of_kind) - 1)] if of_kind else None

    def _partition(self, to_read: Mapping[str, Sized] | None = None) -> str:
        """A partition; mostly one that `to_read` has something of."""
        filled = [name for name in PARTITIONS if to_read and to_read[name]]
        return self.rng.choice(filled if filled and self._chance(0.92) else PARTITIONS)

    def _kind(self) -> dict[str, Any]:
        kind = self.rng.choice(TENSORS if self._chance(0.6) else OTHERS)
        return {"kind": kind, "dtype": self.rng.choice(DTYPES), "dims": self.rng.choice((0, 1, 1, 1, 2, 3))}

    def _seeded_kind(self, what: dict[str, Any]) -> dict[str, Any]:
        """The description with a seed; a kind that cannot have the dtype becomes one that can."""
        if (what["kind"] == "numbers" and what["dtype"] not in ("int64", "float32")) or (
            what["kind"] == "array" and what["dtype"] == "bfloat16"
        ):
            what["kind"] = "tensor" if "$" in what else "dense"
        return {**what, "seed": self.rng.randrange(1000)}

    def _column(self, field: str) -> dict[str, Any]:
        """A column like those that the field had, or sometimes of another kind, rank or dtype."""
        what = dict(self.fields[field])
        if self._chance(0.2):
            what["kind"] = self._kind()["kind"]
        if self._chance(0.15):
            what["dims"] = self.rng.randrange(4)
        if self._chance(0.06):
            what["dtype"] = self.rng.choice(DTYPES)
        return self._seeded_kind(what)

    def _cell(self, field: str) -> dict[str, Any]:
        what = self.fields[field]
        kind = "tensor" if what["kind"] in TENSORS else "value"
        if self._chance(0.15):
            kind = self.rng.choice(("tensor", "value", "array", "number"))
        return self._seeded_kind({**what, "$": "cell", "kind": kind})

    def _some_fields(self) -> list[str]:
        if self._chance(0.4):
            return list(self.fields)
        return sorted(self.rng.sample(sorted(self.fields), self.rng.randrange(1, len(self.fields) + 1)))

    def _columns(self, rows: int | str, partition: str | None = None, more: int = 0) -> dict[str, Any]:
        """A batch, which is written to `partition`."""
        names = self._some_fields()
        if partition is not None:
            self.written[partition] |= set(names)
        fields = {field: self._column(field) for field in names}
        return {"$": "columns", "rows": rows, "more": more, "fields": fields}

    def _asked(self, partition: str | None = None) -> list[str]:
        """Names of fields, mostly of those that `partition` has; sometimes one that nobody writes."""
        known = sorted(self.written.get(partition or "", ()))
        if known and self._chance(0.85):
            return sorted(self.rng.sample(known, min(len(known), self.rng.choice((1, 1, 2, 3)))))
        return self._some_fields() + (["unknown"] if self._chance(0.3) else [])

    def _new_keys(self, partition: str, count: int) -> list[str]:
        """Keys to put, one in five of them there already."""
        known, made = self.keys[partition], []
        for _ in range(count):
            old = [key for key in known if key not in made]
            made.append(self.rng.choice(old) if old and self._chance(0.2) else f"k{len(known) + len(made)}")
        known += [key for key in made if key not in known]
        return made

    def _old_keys(self, partition: str) -> list[str]:
        known = self.keys[partition] or ["k0"]
        if self._chance(0.3):
            return self.rng.sample(known, len(known))
        chosen = self.rng.choices(known, k=self.rng.randrange(1, len(known) + 2))
        return [*chosen, "gone"] if self._chance(0.08) else chosen

    def _in(self, partition: str) -> dict[str, Any]:
        return {"$": "partition", "name": partition}

    def _of(self, meta: Meta) -> dict[str, Any]:
        return {"$": "meta", "name": meta.name}

    def _seeded(self, kind: str, of: int | str, **rest: Any) -> dict[str, Any]:
        return {"$": kind, "of": of, "seed": self.rng.randrange(1000), **rest}

    # ---- writing ----

    def put_key(self) -> None:
        partition = self._partition()
        (key,) = self._new_keys(partition, 1)
        given: dict[str, Any] = {"key": key, "partition_id": self._in(partition)}
        if self._chance(0.85):
            whole = self._columns(1, partition)
            cells = {name: self._cell(name) for name in whole["fields"]}
            given["fields"] = whole if self._chance(0.25) else cells
        if self._chance(0.4) or "fields" not in given:
            given["tag"] = self.rng.choice(({}, {"n": 1}, {"s": "text", "deep": {"a": [1, None]}}))
        self._call("tq", "kv_put", keep=self._new(True, partition), **given)

    def put_by_key(self) -> None:
        partition, count = self._partition(), self.rng.randrange(1, 5)
        given: dict[str, Any] = {"keys": self._new_keys(partition, count), "partition_id": self._in(partition)}
        if self._chance(0.9):
            given["fields"] = self._columns(count, partition)
        if self._chance(0.4) or "fields" not in given:
            given["tags"] = self._seeded("tags", count)
        self._call("tq", "kv_batch_put", keep=self._new(True, partition), **given)

    def put_rows(self) -> None:
        partition = self._partition()
        data = self._columns(self.rng.randrange(1, 5), partition)
        self._call("client", "put", keep=self._new(False, partition), data=data, partition_id=self._in(partition))

    def insert(self) -> None:
        partition = self._partition()
        given = {"batch_size": self.rng.randrange(1, 5), "partition_id": self._in(partition), "mode": "insert"}
        new = self._new(False, partition, has_data=False)
        self._call("client", "get_meta", keep=new, data_fields=self._some_fields(), **given)

    def put_at(self) -> None:
        """Data at rows that are there: those inserted, or others, whose fields are written over or added to."""
        meta = self._meta(by_key=False)
        if meta is None:
            return self.insert()
        more = self.rng.choice((-1, 1)) if self._chance(0.05) else 0
        meta.has_data = True
        data = self._columns(meta.name, meta.partition, more)
        return self._call("client", "put", watch=more != 0, data=data, metadata=self._of(meta))

    # ---- reading ----

    def get_by_key(self) -> None:
        partition = self._partition(self.keys)
        given: dict[str, Any] = {"keys": self._old_keys(partition), "partition_id": self._in(partition)}
        if self._chance(0.4):
            given["select_fields"] = self._asked(partition) if self._chance(0.8) else self.rng.choice(FIELDS)
        self._call("tq", "kv_batch_get", **given)

    def get_by_meta(self) -> None:
        meta = self._meta(by_key=True, to_read=True)
        if meta is None:
            return self.get_by_key()
        given: dict[str, Any] = {"meta": self._of(meta)}
        if self._chance(0.2):
            keys, fields = sorted(set(self._old_keys(meta.partition))), self.rng.choice((None, self._some_fields()))
            partition = meta.partition if self._chance(0.9) else None
            given["meta"] = {"$": "keys of", "keys": keys, "fields": fields, "partition": partition}
        if self._chance(0.3):
            given["select_fields"] = self._asked(meta.partition)
        return self._call("tq", "kv_batch_get_by_meta", **given)

    def get_data(self) -> None:
        meta = self._meta(by_key=False, to_read=True)
        return self.fetch() if meta is None else self._call("client", "get_data", metadata=self._of(meta))

    def fetch(self) -> None:
        partition = self._partition(self.written)
        size = self.rng.choice((1, 1, 2, 2, 3, 4))
        if self.sampler == "GRPOGroupNSampler" and self._chance(0.9):
            size += size % 2
        given: dict[str, Any] = {"data_fields": self._asked(partition), "batch_size": size}
        given |= {"partition_id": self._in(partition), "task_name": self.rng.choice(TASKS)}
        if self._chance(0.25):
            given["mode"] = "force_fetch"
        if self.sampler == "RankAwareSampler":
            config = {"dp_rank": self.rng.randrange(2), "batch_index": self.rng.randrange(2)}
            given["sampling_config"] = {**config, "partition_id": self._in(partition), "task_name": given["task_name"]}
        self._call("client", "get_meta", keep=self._new(False, partition), **given)

    def look(self) -> None:
        partition = self._in(self._partition())
        given = self.rng.choice(({}, {"partition_id": partition}, {"partition_id": partition}))
        if self._chance(0.25):
            self._call("client", "get_partition_list")
        else:
            self._call(self.rng.choice(("tq", "client")), "kv_list", **given)

    def status(self) -> None:
        partition, task = self._in(self._partition() if self._chance(0.9) else "none"), self.rng.choice(TASKS)
        way = self.rng.randrange(5)
        if way < 2:
            name = ("get_production_status", "check_production_status")[way]
            self._call("client", name, data_fields=self._asked("A"), partition_id=partition)
        elif way < 4:
            name = ("get_consumption_status", "check_consumption_status")[way - 2]
            self._call("client", name, task_name=task, partition_id=partition)
        else:
            tasks = {"task_name": task} if self._chance(0.6) else {}
            self._call("client", "reset_consumption", partition_id=partition, **tasks)

    def keys_and_rows(self) -> None:
        partition, meta = self._partition(self.keys), self._meta(by_key=False)
        if meta is not None and self._chance(0.4):
            indexes = {"$": "indexes", "of": meta.name}
            return self._call("client", "kv_retrieve_keys", global_indexes=indexes, partition_id=self._in(partition))
        keys, create = self._old_keys(partition), {"create": True} if self._chance(0.15) else {}
        new = self._new(False, partition)
        return self._call("client", "kv_retrieve_meta", keep=new, keys=keys, partition_id=self._in(partition), **create)

    # ---- tags, clearing ----

    def tags(self) -> None:
        """Tags are changed on metadata, and stored by themselves or with the next put."""
        meta = self._meta(by_key=False)
        if meta is None:
            return self.look()
        if self._chance(0.3):
            self._call(meta.name, "clear_custom_meta")
        self._call(meta.name, "update_custom_meta", custom_meta=self._seeded("tags", meta.name))
        if self._chance(0.7):
            self._call("client", "set_custom_meta", metadata=self._of(meta))
        return None

    def clear(self) -> None:
        partition, meta = self._partition(), self._meta(by_key=False)
        if meta is not None and self._chance(0.5):
            return self._call("client", "clear_samples", metadata=self._of(meta))
        if self._chance(0.2):
            return self._call("client", "clear_partition", partition_id=self._in(partition))
        keys = self._old_keys(partition)
        given = keys if self._chance(0.8) else keys[0]
        return self._call("tq", "kv_clear", keys=given, partition_id=self._in(partition))

    # ---- metadata ----

    def part_of_rows(self) -> None:
        meta = self._meta(by_key=False)
        if meta is None:
            return self.fetch()
        new, rng = self._new(False, meta.partition, meta.has_data), self.rng
        ways: list[tuple[str, dict[str, Any]]] = [
            ("select_samples", {"sample_indices": self._seeded("positions", meta.name, how=rng.choice(POSITIONS))}),
            ("select_fields", {"field_names": self._asked(meta.partition)}),
            ("chunk", {"chunks": rng.choice((1, 2, 2, 3, 5, 0, -1))}),
            ("chunk_by_partition", {}),
            ("copy", {}),
        ]
        items: list[Any] = [
            0,
            1,
            -1,
            9,
            {"$": "slice", "bounds": rng.choice(([1, 3, None], [0, 0, None], [None, None, -1]))},
        ]
        name, given = rng.choice([*ways, *ways[:2], *ways[:2]])
        if self._chance(0.15):
            return self._call(meta.name, "item", keep=new, at=rng.choice(items))
        return self._call(meta.name, name, keep=new, **given)

    def part_of_keys(self) -> None:
        meta = self._meta(by_key=True)
        if meta is None:
            return self.put_by_key()
        new, rng = self._new(True, meta.partition), self.rng
        way = rng.randrange(3)
        if way == 0:
            return self._call(meta.name, "select_keys", keep=new, keys_to_select=self._old_keys(meta.partition))
        if way == 1:
            return self._call(meta.name, "chunk", keep=new, chunks=rng.choice((1, 2, 2, 3, 5, 0)))
        return self._call(meta.name, "reorder", indexes=self._seeded("positions", meta.name, how=rng.choice(POSITIONS)))

    def join(self) -> None:
        one = self._meta()
        if one is None:
            return self.put_rows()
        other = self._meta(one.by_key) or one
        new = self._new(one.by_key, one.partition, one.has_data)
        if not one.by_key and self._chance(0.4):
            if self._chance(0.5):  # the same rows, with other extra information
                other = new
                self._call(one.name, "copy", keep=other)
                for meta in (one, other):
                    self._call(meta.name, "set_extra_info", key="p", value=self.rng.randrange(3))
                new = self._new(False, one.partition, one.has_data)
            return self._call(one.name, "union", keep=new, other=self._of(other))
        kind = "KVBatchMeta" if one.by_key else "BatchMeta"
        return self._call(kind, "concat", keep=new, data=[self._of(one), self._of(other)])

    def change(self) -> None:
        """In place, or what does not change it."""
        meta = self._meta(by_key=False)
        if meta is None:
            return self.part_of_keys()
        ways: list[tuple[str, dict[str, Any]]] = [
            ("reorder", {"indices": self._seeded("positions", meta.name, how=self.rng.choice(POSITIONS))}),
            ("add_fields", {"tensor_dict": self._columns(meta.name)}),
            (
                "add_fields",
                {"tensor_dict": self._columns(meta.name, more=self.rng.randrange(2)), "set_all_ready": False},
            ),
            ("set_extra_info", {"key": self.rng.choice("pq"), "value": self.rng.choice((1, [1, 2], {"a": None}))}),
            ("update_extra_info", {"info_dict": {"p": 2, "r": "text"}}),
            ("remove_extra_info", {"key": self.rng.choice("pq")}),
            ("get_extra_info", {"key": "p", "default": 7}),
            ("has_extra_info", {"key": "p"}),
            ("get_all_extra_info", {}),
            ("clear_extra_info", {}),
            ("get_all_custom_meta", {}),
            ("get_dtypes", {"field_name": self.rng.choice(FIELDS)}),
            ("get_shapes", {"field_name": self.rng.choice(FIELDS)}),
            ("alter tags", {"tags": self._seeded("tags", meta.name)}),
            ("samples", {}),
            ("truth", {}),
        ]
        name, given = self.rng.choice([*ways, *ways[:4]])
        if self._chance(0.1):
            meta = self._meta() or meta
            return self._call(meta.name, "pickled", keep=self._new(meta.by_key, meta.partition, meta.has_data))
        return self._call(meta.name, name, **given)

    # ---- wrong arguments ----

    def wrong(self) -> None:
        partition = self._in(self._partition())
        rows, meta = self._columns(2), self._meta(by_key=False)
        keys = ["k0", "k1"]
        fetch = {"data_fields": ["a"], "partition_id": partition, "task_name": "t"}
        calls: list[tuple[str, str, dict[str, Any]]] = [
            ("tq", "kv_put", {"key": "k0", "partition_id": partition}),
            ("tq", "kv_put", {"key": "k0", "partition_id": partition, "fields": [1, 2]}),
            ("tq", "kv_put", {"key": "k0", "partition_id": partition, "fields": rows}),
            ("tq", "kv_batch_put", {"keys": keys, "partition_id": partition}),
            ("tq", "kv_batch_put", {"keys": {"$": "tuple", "items": keys}, "partition_id": partition, "fields": rows}),
            ("tq", "kv_batch_put", {"keys": ["k0", 1], "partition_id": partition, "fields": rows}),
            ("tq", "kv_batch_put", {"keys": ["k0"], "partition_id": partition, "fields": rows}),
            ("tq", "kv_batch_put", {"keys": ["k0", "k0"], "partition_id": partition, "fields": rows}),
            ("tq", "kv_batch_put", {"keys": keys, "partition_id": partition, "fields": rows, "tags": [{}]}),
            ("tq", "kv_batch_put", {"keys": [], "partition_id": partition, "tags": []}),
            ("tq", "kv_batch_get", {"keys": [], "partition_id": partition}),
            ("tq", "kv_batch_get", {"keys": {"$": "tuple", "items": keys}, "partition_id": partition}),
            ("tq", "kv_batch_get", {"keys": keys, "partition_id": self._in("none")}),
            ("tq", "kv_clear", {"keys": [], "partition_id": partition}),
            ("tq", "kv_clear", {"keys": keys, "partition_id": self._in("none")}),
            ("client", "put", {"data": rows}),
            ("client", "put", {"data": self._columns(0), "partition_id": partition}),
            ("client", "get_data", {"metadata": None}),
            ("client", "get_meta", {**fetch, "batch_size": 1, "mode": "unknown"}),
            ("client", "get_meta", {**fetch, "batch_size": 0}),
            ("client", "get_meta", {**fetch, "batch_size": 1, "task_name": None}),
            ("client", "get_meta", {**fetch, "batch_size": 1, "partition_id": self._in("none"), "mode": "force_fetch"}),
            ("client", "get_meta", {**fetch, "batch_size": 0, "mode": "insert"}),
            ("client", "get_meta", {**fetch, "batch_size": 1, "data_fields": [], "mode": "insert"}),
            ("client", "clear_partition", {"partition_id": self._in("none")}),
            ("client", "kv_retrieve_meta", {"keys": [], "partition_id": partition}),
            ("client", "kv_retrieve_keys", {"global_indexes": [0], "partition_id": self._in("none")}),
            ("BatchMeta", "concat", {"data": []}),
            ("KVBatchMeta", "concat", {"data": []}),
        ]
        if meta is not None:
            calls.append((meta.name, "update_custom_meta", {"custom_meta": self._seeded("tags", meta.name, more=1)}))
            calls.append((meta.name, "update_custom_meta", {"custom_meta": None}))
        on, name, given = self.rng.choice(calls)
        self._call(on, name, watch=on in ("tq", "client"), **given)
