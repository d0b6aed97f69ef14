"""A stream out of a bundle instead of a service."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

from transfer_queue.arguments import flag
from transfer_queue.bundles import Bundle
from transfer_queue.client.dense import Pad
from transfer_queue.dataloader.chunking import chunk_batch_fn
from transfer_queue.dataloader.streams import Form
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import positive


def replay(
    directory: str | os.PathLike[str],
    *,
    micro_batch_size: int | None = None,
    dense: bool = False,
    pad: Pad | None = None,
    rows: bool = False,
    allow_pickle: bool = False,
) -> BundleStream:
    """What a task took for a step, out of a directory that `save_step` or `tq replay --save` wrote: an iterable of
    TensorDicts, in the order in which the task had them, bit for bit what it had.

    It needs no service, no Ray and no GPU. `micro_batch_size` (default: whole batches), `dense`, `pad` and `rows` as
    in `stream`; `allow_pickle`: unpickle values that were saved with pickle, which can run any code. Raises
    `CheckpointMissing` (a FileNotFoundError), `CheckpointCorrupt` and `CheckpointUnsupported` (ValueErrors), here or
    when the loop comes to a file that is damaged.
    """
    size = None if micro_batch_size is None else positive(micro_batch_size, "micro_batch_size")
    return BundleStream(Bundle(directory), size, Form(dense, pad, rows), flag(allow_pickle, "allow_pickle"))


class BundleStream:
    """See `replay`. Every loop begins with the first batch. `meta` names the rows of the batch in hand; `bundle` knows
    step, task and settings."""

    def __init__(self, bundle: Bundle, micro_batch_size: int | None, form: Form, allow_pickle: bool) -> None:
        self.bundle = bundle
        self.meta = BatchMeta.empty()
        self._micro_batch_size = micro_batch_size
        self._form = form
        self._allow_pickle = allow_pickle

    def __iter__(self) -> Generator[Any, None, None]:
        for number in range(len(self.bundle)):
            data, meta = self.bundle.batch(number, self._allow_pickle)
            size = min(self._micro_batch_size or len(meta), len(meta))
            for part, self.meta in chunk_batch_fn(data, meta, size):
                yield self._form.of(part)

    def __repr__(self) -> str:
        bundle = self.bundle
        return f"<BundleStream of step {bundle.step} of task {bundle.task!r}, {len(bundle)} batches>"
