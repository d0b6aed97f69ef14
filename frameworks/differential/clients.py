"""Programs whose calls are made by several clients: this process's, another object in it, and another process."""

from __future__ import annotations

from typing import Any

from frameworks.differential.drawing import Call, Drawing, Meta


class OfClients(Drawing):
    """What one client puts the others read, ask after and clear; some calls are begun together."""

    def step(self) -> None:
        if self.metas and self._chance(0.15):
            self._pick({self.read_together: 2, self.put_together: 1})()
        else:
            super().step()

    def _call(self, on: str, call: str, *, keep: Meta | None = None, watch: bool = False, **given: Any) -> None:
        super()._call(on, call, keep=keep, watch=watch, **given)
        by = self.rng.choice((None, "object", "process", "process"))
        if by is not None and on in {"process": ("tq", "client"), "object": ("client",)}[by]:
            self.calls[-1]["by"] = by

    def _last(self, draw: Any) -> Call:
        """The call that a step draws, taken out of the program."""
        kept = len(self.metas)
        draw()
        del self.metas[kept:]
        return self.calls.pop()

    def read_together(self) -> None:
        """Calls that change nothing."""
        partition = self._in(self._partition(self.written))
        asked = {"data_fields": self._asked("A"), "partition_id": partition}
        some: list[Call] = [
            {"call": "get_production_status", "with": asked},
            {"call": "check_production_status", "with": asked},
            {"call": "check_consumption_status", "with": {"task_name": "t", "partition_id": partition}},
            {"call": "get_consumption_status", "with": {"task_name": "u", "partition_id": partition}},
            {"call": "kv_list", "with": {"partition_id": partition}},
            {"call": "get_partition_list", "with": {}},
        ]
        for _ in range(2):
            read = self._last(self.get_data)
            some += [{"call": read["call"], "with": read["with"]}] if read["call"] == "get_data" else []
        chosen = self.rng.sample(some, self.rng.randrange(2, 5))
        self.calls.append({"on": "client", "call": "together", "with": {"calls": chosen}})

    def put_together(self) -> None:
        """Of keys in two partitions."""
        puts = []
        for partition in ("A", "B"):
            count = self.rng.randrange(1, 4)
            given = {"keys": self._new_keys(partition, count), "partition_id": self._in(partition)}
            puts.append({"call": "kv_batch_put", "with": {**given, "fields": self._columns(count, partition)}})
        self.calls.append({"on": "tq", "call": "together", "with": {"calls": puts}})
