"""A small picture of an image: one decoder's worth of trust for what anybody stored, and an encoder of our own."""

from __future__ import annotations

import struct
import sys
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SIDE = 256  # pixels, at most
MAX_PIXELS = 50_000_000  # of an image that is decoded
LEAST_SIDE = 8
Pixels = NDArray[np.uint8]  # (height, width) or (height, width, 3 or 4)


def is_picture(value: Any) -> bool:
    """Whether there is a picture of it: a PIL image, or a uint8 tensor of one image's shape."""
    pil = sys.modules.get("PIL.Image")
    if pil is not None and issubclass(type(value), pil.Image):
        return bool(0 < value.width * value.height <= MAX_PIXELS)
    return type(value) is torch.Tensor and value.dtype == torch.uint8 and _channels_at(tuple(value.shape)) is not None


def picture(value: Any) -> bytes | None:
    """A PNG of at most 256 by 256 pixels; None where it cannot be decoded. `value` is one that `is_picture`."""
    try:
        return _png(_of_tensor(value) if type(value) is torch.Tensor else _of_image(value))
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError):  # Pillow's, for damaged files
        return None


def _of_image(image: Any) -> Pixels:
    copied = image.copy()  # decodes; the first frame only
    copied.thumbnail((SIDE, SIDE))
    return np.asarray(copied.convert("RGB"), np.uint8)


def _channels_at(shape: tuple[int, ...]) -> int | None:
    """Which dimension has the channels; 2 also for gray images. None: these are no images."""
    if len(shape) == 2 and min(shape) >= LEAST_SIDE:
        return 2
    if len(shape) == 3 and shape[2] in (1, 3, 4) and min(shape[:2]) >= LEAST_SIDE:
        return 2
    return 0 if len(shape) == 3 and shape[0] in (1, 3, 4) and min(shape[1:]) >= LEAST_SIDE else None


def _of_tensor(value: torch.Tensor) -> Pixels:
    array = value.detach().cpu().numpy()
    if _channels_at(array.shape) == 0:
        array = np.moveaxis(array, 0, 2)
    step = max(1, -(-max(array.shape[:2]) // SIDE))
    small = array[::step, ::step]
    return small[:, :, 0] if small.ndim == 3 and small.shape[2] == 1 else small


def _png(pixels: Pixels) -> bytes:
    colour = 0 if pixels.ndim == 2 else {3: 2, 4: 6}[pixels.shape[2]]
    height, width = pixels.shape[:2]
    lines = np.ascontiguousarray(pixels).reshape(height, -1)
    data = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1).tobytes()  # no line is filtered
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(data, 6)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
