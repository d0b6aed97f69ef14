"""Rows with images: PIL images within chat messages, their pixels as tensors, and both as a trainer wants them.

    python multimodal.py [--rows 8]

A rollout process writes messages that hold an image, the pixels that a processor made of it, and a response. The
trainer gets one plain tensor of pixels, padded responses with their mask, and the messages as they were.
"""

from __future__ import annotations

import argparse
import io
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

import transfer_queue as tq

PARTITION, SIZE = "train_0", 16


def pixels(image: Image.Image) -> Tensor:
    """(3, SIZE, SIZE) in [0, 1], as an image processor gives."""
    data = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return data.view(SIZE, SIZE, 3).permute(2, 0, 1).float() / 255


def photo(number: int) -> Image.Image:
    """A file of one colour, opened: it travels as its bytes, and is decoded when it is used."""
    file = io.BytesIO()
    Image.new("RGB", (SIZE, SIZE), (number * 20 % 256, 100, 200)).save(file, "PNG")
    return Image.open(file)


@contextmanager
def watched(*processes: BaseProcess) -> Iterator[None]:
    """Processes that run beside the block; it ends when they have. One that fails ends it whatever the block waits
    for: nobody would send that any more. No process is left."""
    failed: list[str] = []
    left, main_thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
        while running:
            for sentinel in connection.wait(list(running)):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode and not left.is_set():
                    failed.append(f"{process.name} ended with exit code {process.exitcode}")
                    signal.pthread_kill(main_thread, signal.SIGINT)  # as Ctrl-C does
                    return

    for process in processes:
        process.start()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        watcher.join()
    except KeyboardInterrupt:
        raise SystemExit(failed[0] if failed else 130) from None
    finally:
        left.set()
        for process in processes:
            process.kill()


def rollout(rows: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this process
    tq.init()
    client = tq.get_client()
    for number in range(rows):
        image = photo(number)
        content = [{"type": "image", "image": image}, {"type": "text", "text": "How red is it?"}]
        row = {
            "messages": [[{"role": "user", "content": content}]],  # a list is a column: here of one row
            "pixel_values": pixels(image)[None],
            "response": [torch.arange(number % 4 + 1)],  # rows differ in length
            "target": torch.tensor([number * 20 % 256 / 255]),
        }
        client.put(row, partition_id=PARTITION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1))
    fields = ["messages", "pixel_values", "response", "target"]
    pad = {"response": tq.Padding(value=-1, side="left", multiple=4, mask=True)}
    process = get_context("spawn").Process(target=rollout, args=(rows,), name="rollout", daemon=True)
    tq.init()
    try:
        tq.get_client().set_partition(PARTITION, size=rows)  # so that the stream knows its end
        with (
            watched(process),
            tq.stream(PARTITION, fields, task="actor", batch_size=4, dense=True, pad=pad) as stream,
        ):
            for batch in stream:
                error = model(batch["pixel_values"]).squeeze(1) - batch["target"]  # Conv2d takes no nested tensor
                first = batch["messages"].tolist()[0][0]["content"][0]["image"]
                shapes = [list(batch[name].shape) for name in ("pixel_values", "response", "response_mask")]
                print(*shapes, type(first).__name__, first.size, first.getpixel((0, 0)), f"{error.square().mean():.3f}")
    finally:
        tq.close()


if __name__ == "__main__":
    main()
