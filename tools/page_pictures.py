"""docs/img/page_{light,dark,phone}.png: the page of a service while a job of the size of a demonstration runs.

python tools/page_pictures.py [FOLDER]
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

import transfer_queue as tq
from tools import browser
from transfer_queue.errors import TransferQueueError
from transfer_queue.metadata import BatchMeta

FOLDER = Path(__file__).parent.parent / "docs" / "img"
STEP, ROWS, GROUP = "train@step_42", 512, 8
SHOTS = (("page_light", 1280, 900, False), ("page_dark", 1280, 900, True), ("page_phone", 390, 844, False))


def _image(number: int) -> Image.Image:
    drawn = Image.new("RGB", (160, 120), (28, 40, 66))
    pen = ImageDraw.Draw(drawn)
    for at in range(6):
        pen.rectangle((10 + 25 * at, 110 - 14 * ((number + at) % 7), 30 + 25 * at, 110), fill=(90 + 25 * at, 140, 230))
    found = io.BytesIO()
    drawn.save(found, "PNG")
    return Image.open(found)


def _fill(client: tq.TransferQueueClient, rng: np.random.Generator) -> None:
    """Prompts of all rows, answers of most, rewards of fewer; two tasks have taken their part."""
    client.set_partition(STEP, size=ROWS, metadata={"step": 42})
    client.set_weight_version(41, "run-7f3a")
    keys = [f"prompt-{number // GROUP}/{number % GROUP}" for number in range(ROWS)]
    rows = {"prompt": [f"Question {number // GROUP}: 17 + {number} = ?" for number in range(ROWS)]}
    rows["image"] = [_image(number // GROUP) for number in range(ROWS)]
    tags = [{"weight_version": 41 - number % 2, "prompt": number // GROUP} for number in range(ROWS)]
    tq.kv_batch_put(keys, STEP, rows, tags=tags)
    done = [number for number in range(ROWS) if number < 330 or (number < 450 and rng.random() < 0.6)]
    client.take(STEP, ["prompt"], 480, "rollout")
    for start in range(0, len(done), 32):
        part = done[start : start + 32]
        answer = {"tokens": [torch.arange(40 + number % 60) for number in part], "logprobs": torch.rand(len(part), 8)}
        tq.kv_batch_put([keys[number] for number in part], STEP, answer)
    judged = [number for number in done if number < 260 or (number < 330 and rng.random() < 0.5)]
    for start in range(0, len(judged), 32):
        part = judged[start : start + 32]
        tq.kv_batch_put([keys[number] for number in part], STEP, {"reward": torch.rand(len(part))})
    client.checkpoint(0, ["actor"])
    for size in (64, 64):
        meta, _ = client.take(STEP, ["tokens", "reward"], size, "actor", lease_s=600)
        client.ack(meta)
    meta, _ = client.take(STEP, ["tokens", "reward"], 32, "actor", lease_s=600)
    client.nack(meta[:1], reason="loss was not finite")
    client.take(STEP, ["tokens"], 192, "reference", lease_s=90)


def _groups(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("groups", tq.GroupPolicy.windowed(1))
    for number in range(12):
        pool.open(f"prompt-{number}", 4, source=("math", "code")[number % 2])
    for attempt in pool.claim(max_slots=20):
        pool.finish(attempt, {"tokens": torch.arange(4)[None]}, reward=0.5, tokens=4)
    pool.ack(pool.select(min_groups=2))


@contextlib.contextmanager
def _waiters(client: tq.TransferQueueClient) -> Iterator[None]:
    """Two requests that wait, and a job that goes on slowly."""
    over = threading.Event()

    def wait(fields: list[str], size: int, task: str) -> None:
        with contextlib.suppress(TransferQueueError):
            client.get_meta(fields, size, STEP, task_name=task, timeout_s=60)

    def go_on() -> None:
        rewards = client.get_meta(["tokens"], ROWS, STEP, mode="force_fetch")
        unjudged = [row for row in rewards.global_indexes if client.inspect_row(STEP, row=row).missing]
        while not over.wait(0.2) and unjudged:
            meta, _ = client.take(STEP, ["prompt"], 2, "filter", lease_s=30)
            client.ack(meta)
            meta = BatchMeta([unjudged.pop(0)], [STEP], {"tokens": {}}, [1])
            values = {"tokens": torch.arange(50)[None], "logprobs": torch.rand(1, 8), "reward": torch.rand(1)}
            client.put(values, metadata=meta)

    threads = [
        threading.Thread(target=wait, args=(["tokens", "reward"], 256, "actor"), daemon=True),
        threading.Thread(target=wait, args=(["prompt", "values"], 64, "critic"), daemon=True),
        threading.Thread(target=go_on),
    ]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        over.set()
        threads[-1].join()


def main(folder: Path) -> None:
    path = browser.found()
    if path is None:
        raise SystemExit("no chromium is installed here")
    tq.init()
    client = tq.get_client()
    _fill(client, np.random.default_rng(7))
    _groups(client)
    command = [sys.executable, "-c", "from transfer_queue.cli import main; main()", "page", "--address", tq.address()]
    with _waiters(client), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        url = page.stdout.readline().strip()
        try:
            with browser.browser(path) as tab:
                for name, width, height, dark in SHOTS:
                    tab.open(url, width, height, dark)
                    time.sleep(6)  # so that there are rates to show
                    _save(folder / f"{name}.png", tab.picture())
                tab.open(url, 1280, 900)
                time.sleep(2)
                tab.evaluate("openRow(3)")
                time.sleep(1)
                _save(folder / "page_row.png", tab.picture())
                for remark in tab.remarks:
                    print(remark)
        finally:
            page.terminate()
    tq.close()


def _save(path: Path, picture: bytes) -> None:
    """As few bytes as 128 colours need."""
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
