"""A model directory, a data set and a configuration for verl, all made here: nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import verl
from datasets import Dataset, Sequence
from datasets import Image as ImageFeature
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = [
    "<pad>", "<eos>", "<unk>", "<user>", "<assistant>", *map(str, range(10)), "+", "=", "what", "is", "?", "<image>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else ' <image> ' }}{% endfor %}{% endif %}"
    "{{ ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
SUMS = [(1, 2), (3, 4), (5, 1), (2, 2)]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(len(solution_str.split())), "acc": float(ground_truth in solution_str.split())}
"""


def write_model(folder: Path) -> None:
    """A tokenizer of words and the configuration of a model without weights."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)
    fast.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        architectures=["LlamaForCausalLM"], eos_token_id=1, pad_token_id=0,
    ).save_pretrained(folder)  # fmt: skip


def write_data(folder: Path) -> None:
    """Four prompts, and the function that scores answers to them."""
    rows: list[dict[str, Any]] = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"what is {a} + {b} ?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": number},
        }
        for number, (a, b) in enumerate(SUMS)
    ]
    pd.DataFrame(rows).to_parquet(folder / "sums.parquet")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def write_images(folder: Path) -> list[Path]:
    """A photo, a palette with a transparent colour, grey values and their alpha, as the files a data set has."""
    rng = np.random.default_rng(0)
    photo = Image.fromarray(rng.integers(0, 255, (30, 41, 3), dtype=np.uint8))
    photo.save(folder / "photo.jpg", quality=80, dpi=(72, 72))
    palette = photo.quantize(7)
    palette.save(folder / "palette.png", transparency=3)
    Image.fromarray(rng.integers(0, 255, (9, 5), dtype=np.uint8)).save(folder / "grey.png")
    photo.convert("RGBA").resize((64, 2)).save(folder / "alpha.png")
    return [folder / name for name in ("photo.jpg", "palette.png", "grey.png", "alpha.png")]


def write_image_data(folder: Path, kind: str) -> None:
    """Prompts with one and two images each: kept as `files` (bytes), as `paths`, or `decoded` by the data set."""
    files = write_images(folder)
    stored = {"files": lambda file: {"bytes": file.read_bytes()}, "paths": str, "decoded": str}[kind]
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": "<image>what is" + " <image> ?" * (number % 2)}],
            "images": [stored(file) for file in (files[number], files[-1])[: 1 + number % 2]],
            "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    table = Dataset.from_list(rows)
    if kind == "decoded":
        table = table.cast_column("images", Sequence(ImageFeature()))
    table.to_parquet(folder / f"{kind}.parquet")


def new_config(model: Path, out: Path, *overrides: str) -> DictConfig:
    """verl's own configuration of PPO, with every path in `out` and sizes for a machine of two processors."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    chosen = [
        f"actor_rollout_ref.model.path={model}", f"data.train_files={model}/sums.parquet",
        f"data.val_files={model}/sums.parquet", "data.train_batch_size=4", "data.val_batch_size=4",
        "data.max_prompt_length=32", "data.max_response_length=8", "data.dataloader_num_workers=0",
        "data.return_raw_chat=True", "data.shuffle=False",
        f"{rollout}.name=vllm", f"{rollout}.n=2", f"{rollout}.agent.num_workers=1",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=2", f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        "critic.ppo_mini_batch_size=4", "critic.ppo_micro_batch_size_per_gpu=2",
        "algorithm.adv_estimator=grpo", "reward.num_workers=1",
        f"reward.custom_reward_function.path={model}/reward.py", "reward.custom_reward_function.name=compute_score",
        "trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.logger=[file]", "trainer.total_training_steps=2",
        "trainer.save_freq=-1", "trainer.test_freq=2", "trainer.resume_mode=disable",
        f"trainer.rollout_data_dir={out}/rollout", f"trainer.validation_data_dir={out}/validation",
        f"trainer.default_local_dir={out}/checkpoints", f"skip.rollout_tq.dump_dir={out}/skip",
    ]  # fmt: skip
    folder = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with initialize_config_dir(folder, version_base=None):
        config = compose("ppo_trainer", overrides=[*chosen, *overrides])
    OmegaConf.resolve(config)
    return config
