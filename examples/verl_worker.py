"""A method of a verl worker over the queue: verl's own bridge, rows as its agent loops write them, images included.

    pip install verl==0.9.1    # without the extra verl-core, see the recipe
    python verl_worker.py

verl puts `tqbridge` around every method of a worker. The driver calls the method with metadata; the bridge reads the
rows, runs the method on a TensorDict, and writes what it returns to the same rows.
"""

from __future__ import annotations

import asyncio

import torch
from PIL import Image
from tensordict import NonTensorStack, TensorDict
from verl.utils.transferqueue_utils import tqbridge

import transfer_queue as tq

PROMPTS, SESSIONS, PARTITION = 2, 2, "train"


def messages(number: int) -> list[dict[str, object]]:
    image = {"type": "image", "image": Image.new("RGB", (8, 8), (40 * number, 100, 200))}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What colour is it?"}]}]


async def agent_loop(prompt: int) -> None:
    """What verl's AgentLoopWorkerTQ does for one prompt: every session is a row as soon as it has finished."""
    await tq.async_kv_put(key=f"u{prompt}", partition_id=PARTITION, tag={"status": "running"})
    for session in range(SESSIONS):
        size = prompt + session + 1
        ids = torch.nested.as_nested_tensor([torch.arange(size)], layout=torch.jagged)
        fields = {"responses": ids, "raw_prompt": NonTensorStack(messages(prompt))}
        await tq.async_kv_batch_put(
            keys=[f"u{prompt}_{session}_0"],
            partition_id=PARTITION,
            fields=TensorDict(fields, batch_size=1),
            tags=[{"status": "success", "seq_len": size}],
        )
    await tq.async_kv_put(key=f"u{prompt}", partition_id=PARTITION, tag={"status": "finished"})


@tqbridge()
def old_log_probs(data: TensorDict) -> TensorDict:
    """A method of a worker: it knows nothing of the queue."""
    responses = data["responses"]
    values = -responses.values().float()
    return TensorDict(
        {"old_log_probs": torch.nested.nested_tensor_from_jagged(values, responses.offsets())}, batch_size=len(data)
    )


async def agent_loops() -> None:
    await asyncio.gather(*(agent_loop(prompt) for prompt in range(PROMPTS)))


def main() -> None:
    torch.set_num_threads(1)
    tq.init()
    try:
        keys = [f"u{prompt}" for prompt in range(PROMPTS)]
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, tags=[{"is_prompt": True, "status": "pending"}] * PROMPTS)
        asyncio.run(agent_loops())
        tags = tq.kv_list(PARTITION)[PARTITION]  # as verl's replay buffer looks for finished rows
        print({key: tags[key] for key in keys})
        rows = sorted(key for key, tag in tags.items() if not tag.get("is_prompt"))
        batch = tq.KVBatchMeta(
            keys=rows, tags=[tags[key] for key in rows], partition_id=PARTITION, fields=["responses"]
        )
        batch = old_log_probs(batch)
        print(
            batch.fields, [row.tolist() for row in tq.kv_batch_get(rows, PARTITION, "old_log_probs")["old_log_probs"]]
        )
        image = tq.kv_batch_get(rows[-1], PARTITION, "raw_prompt")["raw_prompt"][0][0]["content"][0]["image"]
        print(type(image).__name__, image.size, image.getpixel((0, 0)))
        tq.kv_clear(keys=[*keys, *rows], partition_id=PARTITION)
    finally:
        tq.close()


if __name__ == "__main__":
    main()
