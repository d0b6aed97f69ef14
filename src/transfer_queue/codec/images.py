"""PIL images without pickle: their encoded file where they were opened from one, else their pixels.

An image that was opened and not changed travels as its file, which is smaller, and comes back opened: of the same
class, with all frames, decoded when it is used. Of any other image travel the pixels with mode, size, palette and info.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np

from transfer_queue.codec.exact import ints, listed, of_type, pairs
from transfer_queue.errors import ProtocolError, UnsupportedValue
from transfer_queue.memory.bytes import Bytes

FILE, PIXELS = "file", "pixels"
KEPT = (str, bytes, int, float, bool)
# Formats whose decoders are part of Pillow; others run programs (EPS) or load handlers of somebody else.
FORMATS = frozenset(
    ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP")
)


OPENERS = {"MPO": "JPEG"}  # Pillow opens several pictures in one JPEG as such, and gives them a name of their own


def is_image(value: Any) -> bool:
    """Whether it is a PIL image, or one that some plugin opened; where PIL was not imported nothing is. A class of the
    user's own is none: of it the pixels alone would come back."""
    pil = sys.modules.get("PIL.Image")
    if pil is None or not isinstance(value, pil.Image):
        return False
    files = sys.modules.get("PIL.ImageFile")
    opened_by_plugin = files is not None and isinstance(value, files.ImageFile)
    return opened_by_plugin or type(value).__module__.startswith("PIL.")


def taken_apart(image: Any) -> tuple[list[Any], Bytes]:
    """(description, bytes) of an image. The description holds plain values only. The image does not change."""
    encoded = _file_of(image)
    if encoded is not None:
        return [FILE, image.format, image.tell()], np.frombuffer(encoded, np.uint8)
    pixels = image.tobytes() if image.width and image.height else b""
    palette = None
    if image.palette is not None and image.mode in ("P", "PA"):
        palette = _palette_of(image)
    description = [PIXELS, image.mode, list(image.size), palette, _info(image.info)]
    return description, np.frombuffer(pixels, np.uint8)


def _palette_of(image: Any) -> list[Any]:
    """Raw mode and colours. A palette of RGBX says it is of RGB: the image alone has what lies beside the colours."""
    palette = image.palette
    if palette.mode == "RGB" and image.mode == "P" and image.width and image.height:
        colours = bytes(image.getpalette("RGBA") or ())
        if colours[3::4].count(255) != len(colours) // 4:
            return ["RGBX", colours]
    return [palette.rawmode or palette.mode, bytes(palette.palette)]


def _file_of(image: Any) -> bytes | None:
    """The file an image was opened from, where it still is that image."""
    source = getattr(image, "fp", None) or getattr(image, "_fp", None)
    if getattr(image, "format", None) not in FORMATS or source is None or getattr(source, "closed", True):
        return None
    try:
        encoded = _whole(source)
        again = opened(image.format, image.tell(), encoded)
    except (OSError, ValueError, AttributeError, EOFError, ProtocolError, UnsupportedValue):
        return None
    same = (type(again), again.mode, again.size, again.info) == (type(image), image.mode, image.size, image.info)
    return encoded if same and (_is_lazy(image) or _same_pixels(again, image)) else None


def _whole(source: Any) -> bytes:
    if isinstance(source, io.BytesIO):
        return source.getvalue()
    at = source.tell()
    try:
        source.seek(0)
        content: bytes = source.read()
        return content
    finally:
        source.seek(at)


def _is_lazy(image: Any) -> bool:
    """Whether the pixels were never decoded, so that nobody can have changed them."""
    return getattr(image, "_im", None) is None


def _same_pixels(again: Any, image: Any) -> bool:
    return bool(again.tobytes() == image.tobytes() and again.getpalette() == image.getpalette())


def _info(info: dict[Any, Any]) -> list[Any]:
    """What can be kept of what a file said beside its pixels: numbers, texts, bytes, and tuples of them."""
    kept = ((_kept(key), _kept(value)) for key, value in info.items())
    return [[key, value] for key, value in kept if key is not None and value is not None]


def _kept(value: Any) -> Any:
    if type(value) in KEPT:
        return value if _is_encoded(value) else None
    if type(value) is tuple:
        items = [_kept(item) for item in value]
        return None if any(item is None for item in items) else ["t", items]
    return float(value) if hasattr(value, "numerator") else None  # a rational of EXIF


def _is_encoded(value: Any) -> bool:
    """Whether msgpack has it: an int of 64 bits, a text without lone surrogates."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    return type(value) is not str or value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value)


def put_together(description: Any, data: Bytes) -> Any:
    """The image. Raises `ProtocolError` for what is no image, `UnsupportedValue` where Pillow is missing."""
    kind, *rest = listed(description)
    if of_type(kind, str) == FILE:
        name, frame = listed(rest, 2)
        return opened(of_type(name, str), of_type(frame, int), data.tobytes())
    mode, size, palette, info = listed(rest, 4)
    of_type(mode, str)
    width, height = ints(size, 2)
    found = {_unkept(key): _unkept(value) for key, value in pairs(info)}
    image_module = _pillow()
    if width and height:
        image = image_module.frombytes(mode, (width, height), data.tobytes())
    else:
        image = image_module.new(mode, (width, height))  # `frombytes` takes no image without pixels
    if palette is not None:
        kept_as, colours = listed(palette, 2)
        image.putpalette(of_type(colours, bytes), of_type(kept_as, str))
        if image.mode != mode:
            raise ProtocolError(f"a palette for an image of mode {mode}")
    image.info = found
    return image


def _unkept(value: Any) -> Any:
    if type(value) is list:
        return tuple(map(_unkept, listed(listed(value, 2)[1])))
    return of_type(value, *KEPT)


def opened(name: str, frame: int, encoded: bytes) -> Any:
    """An image of a file, at one of its frames; only its header is read."""
    if name not in FORMATS:
        raise ProtocolError(f"an image of format {name!r}")
    image_module = _pillow()
    try:
        image = image_module.open(io.BytesIO(encoded), formats=[OPENERS.get(name, name)])
        if frame:
            image.seek(frame)
    except (OSError, EOFError, SyntaxError, KeyError) as error:  # KeyError: this Pillow was built without the format
        raise UnsupportedValue(f"an image of format {name} cannot be opened here: {error}") from None
    except image_module.DecompressionBombError as error:
        text = f"an image of format {name} is larger than PIL.Image.MAX_IMAGE_PIXELS of this process allows: {error}"
        raise UnsupportedValue(text) from None
    return image


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UnsupportedValue("the sample holds an image: install pillow on this reader") from None
    return Image
