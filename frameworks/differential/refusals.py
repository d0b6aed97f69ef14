"""Programs of puts that are refused, and of what is there afterwards."""

from __future__ import annotations

from typing import Any

from frameworks.differential.drawing import Drawing

PARSERS = ("fails", "leaves one out", "adds one", "shortens", "returns as it was", "reverses")
WRONG_COLUMNS = ("locks", "locks", "shared")  # what no package can store, and what one of them cannot


class OfRefusals(Drawing):
    """Every second step is a put that cannot be right."""

    def step(self) -> None:
        if not self.metas or self._chance(0.25):
            self._pick({self.put_by_key: 2, self.put_rows: 2, self.insert: 1, self.put_key: 1})()
            return
        self._pick(
            {
                self.refused_batch: 5, self.refused_key: 4, self.refused_rows: 4, self.parsed: 3, self.refused_tags: 2,
                self.get_by_key: 3, self.get_data: 3, self.look: 2, self.status: 3, self.fetch: 2, self.put_at: 2,
                self.clear: 1, self.wrong: 2,
            }
        )()  # fmt: skip

    def _wrong_columns(self, rows: int | str, partition: str | None = None, more: int = 0) -> dict[str, Any]:
        """A batch in which one column, the last or not, cannot be stored."""
        batch = self._columns(rows, partition, more)
        field = self.rng.choice(sorted(batch["fields"]))
        batch["fields"][field]["kind"] = self.rng.choice(WRONG_COLUMNS)
        return batch

    def refused_batch(self) -> None:
        """Of keys of which some are there, some not."""
        partition, count = self._partition(), self.rng.randrange(1, 4)
        keys: list[Any] = [*self._old_keys(partition)[:1], *(f"new{at}" for at in range(count))]
        given: dict[str, Any] = {"keys": keys, "partition_id": self._in(partition)}
        way = self.rng.randrange(7)
        if way == 0:
            given |= {"fields": self._columns(len(keys)), "keys": [*keys[:-1], keys[0]]}
        elif way == 1:
            given["fields"] = self._columns(len(keys), more=self.rng.choice((-1, 1)))
        elif way == 2:
            given |= {"fields": self._columns(len(keys)), "tags": self._seeded("tags", len(keys), more=1)}
        elif way == 3:
            given["tags"] = self._seeded("tags", len(keys), more=-1)
        elif way == 4:
            given |= {"fields": self._columns(len(keys)), "keys": [*keys[:-1], None]}
        elif way == 5:
            given |= {"fields": self._columns(len(keys)), "tags": self._seeded("locked tags", len(keys))}
        else:
            given["fields"] = self._wrong_columns(len(keys))
        self._call("tq", "kv_batch_put", watch=True, **given)

    def refused_key(self) -> None:
        partition = self._partition()
        key = self.rng.choice([*self.keys[partition], "new"])
        given: dict[str, Any] = {"key": key, "partition_id": self._in(partition)}
        way = self.rng.randrange(5)
        cells = {name: self._cell(name) for name in self._some_fields()}
        if way == 0:
            cells[self.rng.choice(sorted(cells))]["kind"] = "nested"
            given["fields"] = cells
        elif way == 1:
            cells[self.rng.choice(sorted(cells))]["kind"] = "lock"
            given |= {"fields": cells, "tag": {"n": 3}}
        elif way == 2:
            given |= {"fields": self._columns(2), "tag": {"n": 3}}
        elif way == 3:
            given["fields"] = self.rng.choice(([1], "text", 7))
        else:
            given |= {"fields": cells, "tag": {"$": "lock"}}
        self._call("tq", "kv_put", watch=True, **given)

    def refused_rows(self) -> None:
        """At rows that are there, or as new ones."""
        meta = self._meta(by_key=False)
        if meta is None or self._chance(0.3):
            partition = self._partition()
            data = self._wrong_columns(self.rng.randrange(1, 4))
            self._call("client", "put", watch=True, data=data, partition_id=self._in(partition))
        elif self._chance(0.5):
            data = self._columns(meta.name, more=self.rng.choice((-1, 1)))
            self._call("client", "put", watch=True, data=data, metadata=self._of(meta))
        else:
            data = self._wrong_columns(meta.name)
            self._call("client", "put", watch=True, data=data, metadata=self._of(meta))

    def refused_tags(self) -> None:
        """Tags of the wrong number, or that cannot be stored."""
        meta = self._meta(by_key=False)
        if meta is None:
            return self.refused_key()
        if self._chance(0.5):
            tags = self._seeded("tags", meta.name, more=self.rng.choice((-1, 1)))
            return self._call(meta.name, "update_custom_meta", custom_meta=tags)
        copy = self._new(False, meta.partition, meta.has_data)
        self._call(meta.name, "copy", keep=copy)
        self._call(copy.name, "alter tags", tags=self._seeded("locked tags", copy.name))
        self._call("client", "set_custom_meta", watch=True, metadata=self._of(copy))
        self.metas.remove(copy)
        return None

    def parsed(self) -> None:
        """By a `data_parser`, which may be wrong."""
        how, partition = {"$": "parser", "how": self.rng.choice(PARSERS)}, self._partition()
        meta = self._meta(by_key=False)
        if meta is not None and self._chance(0.4):
            data = self._columns(meta.name)
            return self._call("client", "put", watch=True, data=data, metadata=self._of(meta), data_parser=how)
        keys = [*self._old_keys(partition)[:1], "parsed"]
        given = {"keys": keys, "partition_id": self._in(partition), "fields": self._columns(len(keys))}
        return self._call("tq", "kv_batch_put", watch=True, data_parser=how, **given)
