"""TRL's GRPOTrainer with rollouts from the queue: another process answers the prompts and scores the answers.

    pip install trl    # run with trl 1.16.0, transformers 5.23.0
    python trl_rollouts.py [--steps 3]

`rollout_func` writes the prompts that TRL wants answered as rows. The rollout process takes them one by one, and writes
tokens, log-probs and a score to the same rows. The function waits until all rows have these fields. Tokenizer and model
are made here, with random weights, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from multiprocessing import get_context
from typing import Any

import torch

import transfer_queue as tq

WORDS = ["<pad>", "<eos>", "<unk>", "say", *map(str, range(10))]
EOS, FIRST_DIGIT, MAX_LEN = 1, 4, 6
FIELDS = ["prompt_ids", "completion_ids", "logprobs", "score"]


def rollout() -> None:
    """Stands for an inference server: random digits, and the share of them that the prompt asked for as score. A real
    one samples from the newest weights, which reach it by `transfer_queue.weights`."""
    torch.set_num_threads(1)
    tq.init()
    client, generator = tq.get_client(), torch.Generator().manual_seed(0)
    while True:
        meta, data = client.take("prompts", ["prompt"], 1, "rollout", timeout_s=600)
        prompt_ids = torch.tensor([WORDS.index(word) for word in data["prompt"].tolist()[0].split()])
        digits = torch.randint(10, (MAX_LEN - 1,), generator=generator) + FIRST_DIGIT
        columns = {
            "prompt_ids": prompt_ids[None],
            "completion_ids": torch.cat([digits, torch.tensor([EOS])])[None],
            "logprobs": torch.full((1, MAX_LEN), 0.1).log(),
            "score": (digits == prompt_ids[-1]).float().mean()[None],
        }
        client.put(columns, metadata=meta)


def from_queue(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """TRL's `rollout_func`: one answer for each prompt of this process, in order. A prompt comes as many times as it
    wants answers."""
    client = tq.get_client()
    rows = client.put({"prompt": prompts}, partition_id="prompts")
    task = f"rank {trainer.accelerator.process_index}"
    found = client.get_meta(FIELDS, len(prompts), "prompts", task_name=task, timeout_s=600)
    assert found.global_indexes == rows.global_indexes
    data = client.get_data(found)
    client.clear_samples(rows)
    lists = {name: [row.tolist() for row in data[name].unbind()] for name in FIELDS[:-1]}
    return {**lists, "score": data["score"].tolist()}  # what TRL does not know goes to the reward functions


def score(completions: list[str], score: list[float], **_: Any) -> list[float]:
    return score


def new_model() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), eos_token_id=EOS, pad_token_id=0, **sizes)), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tq.init()
    process = get_context("spawn").Process(target=rollout, daemon=True)
    process.start()
    try:
        model, tokenizer = new_model()
        with tempfile.TemporaryDirectory() as out:
            config = GRPOConfig(
                output_dir=out, max_steps=steps, per_device_train_batch_size=8, num_generations=4, learning_rate=0.01,
                max_completion_length=MAX_LEN, use_cpu=True, bf16=False, logging_steps=1, save_strategy="no",
                report_to="none", disable_tqdm=True,
            )  # fmt: skip
            prompts = Dataset.from_list([{"prompt": f"say {digit}"} for digit in range(10)])
            trainer = GRPOTrainer(
                model, score, args=config, train_dataset=prompts, processing_class=tokenizer, rollout_func=from_queue
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        for log in trainer.state.log_history[:steps]:
            print(f"step {log['step']}: reward {log['reward']:.3f}, gradient {log['grad_norm']:.2f}")
        print(f"{trainer.state.global_step} steps, every answer came through the queue")
    finally:
        process.terminate()
        process.join()
        tq.close()


if __name__ == "__main__":
    main()
