"""Prompts with images, from verl's data set through its message builder, trainer and agent loop worker into the queue.

Read back by another process of a Ray of two processors. Not verl's here: the model's processor, which turns images into
numbers after they were read (it needs a model's files); a chat template that says `<image>` takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from PIL import Image
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainer

import transfer_queue as tq
from frameworks.setting import write_image_data
from frameworks.test_verl_on_ray import ASYNC, dumped, fitted

ON_RAY = True
NewTrainer = Callable[..., PPOTrainer]
KINDS = ["files", "paths", "decoded"]
SESSIONS = 3


def facts(part: dict[str, Any], opened: bool) -> list[Any]:
    """What there is to know about a part of a message, as plain values; of its file's class only if `opened`."""
    known = [type(part).__name__, {name: value for name, value in part.items() if name != "image"}]
    image = part.get("image")
    if not isinstance(image, Image.Image):
        return [*known, image]
    pixels = image.tobytes()
    kind = [type(image).__name__, image.format] if opened else []
    return [*known, *kind, image.mode, image.size, image.getpalette(), image.info, pixels]


def described(prompts: list[Any], opened: bool = True) -> list[Any]:
    """The facts of every part of every message of every prompt."""
    return [
        [[message["role"], [facts(part, opened) for part in message["content"]]] for message in messages]
        for messages in prompts
    ]


@ray.remote(num_cpus=0)
class Reader:
    """A process that made none of the images."""

    def __init__(self) -> None:
        tq.init()

    def prompts(self, keys: list[str], opened: bool = True) -> list[Any]:
        """What stands in the rows of `keys`, read as verl's trainer reads it for a reward model."""
        td = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["raw_prompt"])
        return described(list(td["raw_prompt"]), opened)

    def one_by_one(self, keys: list[str]) -> list[Any]:
        """The same over metadata, a row at a time, as verl's bridge hands batches to workers."""
        client = tq.get_client()
        metas = [client.kv_retrieve_meta(keys=[key], partition_id="train") for key in keys]
        columns = [client.get_data(meta.select_fields(["raw_prompt"]))["raw_prompt"] for meta in metas]
        return described([messages for column in columns for messages in column])


@pytest.fixture
def reader(service: Any) -> Any:
    handle = Reader.remote()
    yield handle
    ray.kill(handle)


@pytest.fixture
def with_images(new_trainer: NewTrainer, tmp_path: Path) -> Callable[..., PPOTrainer]:
    """An asynchronous trainer (it keeps its prompts in the queue) over a data set of images."""

    def build(kind: str, *overrides: str) -> PPOTrainer:
        write_image_data(tmp_path, kind)
        data = f"{tmp_path}/{kind}.parquet"
        files = (f"data.train_files={data}", f"data.val_files={data}", "data.filter_overlong_prompts=False")
        cache = f"+data.cache_dir={tmp_path}/cache"
        sessions = f"actor_rollout_ref.rollout.n={SESSIONS}"
        return new_trainer(*ASYNC, *files, cache, sessions, *overrides, processor=object())

    return build


def expected(trainer: PPOTrainer, opened: bool = True) -> list[Any]:
    """The facts of all prompts of the data set, from images of their own: looking at pixels decodes an image."""
    return described([row["raw_prompt"] for row in trainer.train_dataset], opened)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_images_come_back_in_another_process(kind: str, with_images: Any, reader: Any) -> None:
    trainer = with_images(kind)
    trainer.agent_loop_manager.generate_sequences = lambda batch: None
    batch, sent = trainer._next_train_batch(4), expected(trainer)
    assert trainer._submit_batch_to_rollout(batch) == 4
    uids = list(batch["uid"])
    assert ray.get(reader.prompts.remote(uids)) == sent
    assert ray.get(reader.one_by_one.remote(uids[::-1])) == sent[::-1]
    classes = {part[2] for (message,) in sent for part in message[1] if part[1]["type"] == "image"}
    assert classes == {"files": {"JpegImageFile", "PngImageFile"}, "decoded": {"Image"}}.get(kind, classes)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rollout_of_a_prompt_carries_its_images(kind: str, with_images: Any, reader: Any) -> None:
    trainer = with_images(kind)
    batch = trainer._next_train_batch(4)
    sent = dict(zip(batch["uid"], expected(trainer), strict=True))
    trainer._submit_batch_to_rollout(batch)
    tags = tq.kv_list("train")["train"]
    assert {tag["status"] for key, tag in tags.items() if key in sent} == {"finished"}
    rows = [key for key in tags if key not in sent]
    assert len(rows) == 4 * SESSIONS
    assert ray.get(reader.prompts.remote(rows)) == [sent[key.split("_")[0]] for key in rows]


def test_prompts_with_images_are_issued_again(with_images: Any, reader: Any) -> None:
    trainer = with_images("files")
    rollout = trainer.agent_loop_manager.generate_sequences
    trainer.agent_loop_manager.generate_sequences = lambda batch: None
    batch = trainer._next_train_batch(4)
    sent = dict(zip(batch["uid"], expected(trainer), strict=True))
    trainer._submit_batch_to_rollout(batch)
    trainer.agent_loop_manager.generate_sequences = rollout
    assert trainer._reissue_inflight_prompts() == 4
    rows = [key for key in tq.kv_list("train")["train"] if key not in sent]
    assert len(rows) == 4 * SESSIONS
    assert ray.get(reader.prompts.remote(rows)) == [sent[key.split("_")[0]] for key in rows]


def test_images_on_their_way_through_ray(
    with_images: Any, on_ray: Callable[[PPOTrainer], AgentLoopManagerTQ], reader: Any
) -> None:
    """The agent loop worker is a process of its own here: Ray's pickle decodes images, which makes them pixels."""
    trainer = with_images("files")
    trainer.agent_loop_manager = on_ray(trainer)
    batch = trainer._next_train_batch(4)
    sent = dict(zip(batch["uid"], expected(trainer, opened=False), strict=True))
    trainer._submit_batch_to_rollout(batch)
    rows = trainer.replay_buffer.sample(global_steps=0, partition_id="train", batch_size=4)[0].keys
    assert len(rows) == 4 * SESSIONS
    assert ray.get(reader.prompts.remote(rows, opened=False)) == [sent[key.split("_")[0]] for key in rows]


def test_training_with_images(
    with_images: Any,
    on_ray: Callable[[PPOTrainer], AgentLoopManagerTQ],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = with_images("files", "trainer.test_freq=-1", "trainer.val_before_train=False")
    metrics = fitted(trainer, on_ray, tmp_path / "log", monkeypatch)
    assert sorted(metrics) == [1, 2]
    rows = dumped(tmp_path / "rollout", 2)
    assert len(rows) == 4 * SESSIONS
    assert {row["input"].count("<image>") for row in rows} == {1, 2}
