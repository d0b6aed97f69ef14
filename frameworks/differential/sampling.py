"""Programs of tasks that fetch, under each sampler and with every `sampling_config`."""

from __future__ import annotations

from typing import Any, ClassVar

from frameworks.differential.drawing import Drawing, Meta, Sampler


class OfSamplers(Drawing):
    """Rows with lengths as tags, complete or not, that two tasks of several ranks use up."""

    samplers: ClassVar[tuple[Sampler, ...]] = (
        ("SequentialSampler", {}), ("RankAwareSampler", {}),
        ("GRPOGroupNSampler", {"n_samples_per_prompt": 2}), ("GRPOGroupNSampler", {"n_samples_per_prompt": 3}),
        ("SeqlenBalancedSampler", {"n_samples_per_prompt": 1, "dp_size": 2}),
        ("SeqlenBalancedSampler", {"n_samples_per_prompt": 2, "dp_size": 2}), ("LongestFirst", {"least": 2}),
    )  # fmt: skip

    def step(self) -> None:
        if not self.metas:
            self.put_with_lengths()
            return
        self._pick(
            {
                self.put_with_lengths: 6, self.insert: 1, self.put_at: 3, self.fetch: 16, self.get_data: 3,
                self.status: 7, self.tags: 1, self.clear: 2, self.fetch_again: 4,
            }
        )()  # fmt: skip

    def _kind(self) -> dict[str, Any]:
        return {"kind": self.rng.choice(("dense", "dense", "texts")), "dtype": "int64", "dims": 1}

    def _column(self, field: str) -> dict[str, Any]:
        return self._seeded_kind(dict(self.fields[field]))

    def put_with_lengths(self) -> None:
        """By key, with the number of tokens of each row as tag, or without."""
        partition, count = self._partition(), self.rng.choice((2, 3, 4, 6, 8))
        keys = self._new_keys(partition, count)
        given: dict[str, Any] = {"keys": keys, "partition_id": self._in(partition)}
        given["fields"] = self._columns(count, partition)
        if self._chance(0.7):
            given["tags"] = [{"total_lengths": self.rng.randrange(1, 9)} for _ in keys]
        self._call("tq", "kv_batch_put", keep=self._new(True, partition), **given)

    def _config(self, partition: str, task: str) -> dict[str, Any] | None:
        """Mostly what a rank says; sometimes less, or what is wrong."""
        if self._chance(0.1):
            return None
        config: dict[str, Any] = {
            "dp_rank": self.rng.choice((0, 0, 0, 1, 1, 1, 2)),
            "batch_index": self.rng.randrange(3),
        }
        config |= {"partition_id": self._in(partition), "task_name": task}
        if self._chance(0.1):
            config["dp_rank"] = self.rng.choice((-1, 5, None))
        for name in ("dp_rank", "batch_index", "partition_id"):
            if self._chance(0.06):
                del config[name]
        return config

    def fetch(self) -> None:
        partition, task = self._partition(self.written), self.rng.choice(("t", "t", "u"))
        size = self.rng.choice((1, 2, 2, 3, 4, 4, 6))
        given: dict[str, Any] = {"data_fields": self._asked(partition), "batch_size": size}
        given |= {"partition_id": self._in(partition), "task_name": task}
        config = self._config(partition, task)
        if config is not None:
            given["sampling_config"] = config
        self._fetch(partition, given)

    def fetch_again(self) -> None:
        """The same as before, by the same rank or another one."""
        fetches = [call for call in self.calls if call["call"] == "get_meta" and "sampling_config" in call["with"]]
        if not fetches:
            return self.fetch()
        given = dict(self.rng.choice(fetches)["with"])
        if self._chance(0.5):
            given["sampling_config"] = {**given["sampling_config"], "dp_rank": self.rng.randrange(2)}
        return self._fetch(given["partition_id"]["name"], given)

    def _fetch(self, partition: str, given: dict[str, Any]) -> None:
        meta: Meta = self._new(False, partition)
        self._call("client", "get_meta", keep=meta, **given)
