"""PIL images: exact pixels, mode, size, palette and info; the file itself where one was opened and not changed."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from blocks import block_of, get, put, through
from PIL import Image, ImageFile

import transfer_queue as tq
from transfer_queue.codec.plan import plan_batch
from transfer_queue.errors import TransferQueueError, UnsupportedValue

MODES = [
    "1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX", "RGBa", "La", "I;16",
    "I;16L", "I;16B", "I;16N",
]  # fmt: skip
FILES = ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "TGA", "ICO"]
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))


def encoded(kind: str, image: Image.Image = PHOTO, **more: Any) -> bytes:
    out = io.BytesIO()
    (image.convert("P") if kind == "GIF" else image).save(out, kind, **more)
    return out.getvalue()


def assert_same(got: Image.Image, want: Image.Image) -> None:
    assert (got.mode, got.size, got.getpalette()) == (want.mode, want.size, want.getpalette())
    assert got.tobytes() == want.tobytes()
    assert got.info == want.info


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_comes_back(mode: str) -> None:
    rng = np.random.default_rng(1)
    image = Image.frombytes(mode, (5, 3), rng.integers(0, 255, len(Image.new(mode, (5, 3)).tobytes()), "u1").tobytes())
    if mode in ("P", "PA"):
        image.putpalette(rng.integers(0, 255, 30).tolist())
    image.info.update(dpi=(72, 72.5), comment=b"c")
    assert_same(through(image), image)


def test_a_palette_with_alpha_and_an_image_without_pixels() -> None:
    image = Image.frombytes("P", (2, 2), bytes([0, 1, 2, 0]))
    image.putpalette([1, 2, 3, 4] * 3, "RGBA")
    assert_same(through(image), image)
    assert through(image).convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    assert through(Image.new("RGB", (0, 5))).size == (0, 5)


def test_a_palette_with_bytes_beside_its_colours() -> None:
    image = Image.frombytes("P", (2, 1), bytes([0, 3]))
    image.putpalette(range(1, 33), "RGBX")
    got = through(image)
    assert_same(got, image)
    assert got.palette.mode == image.palette.mode == "RGB"
    assert got.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_of_info_comes_back_what_can_be_kept() -> None:
    image = Image.new("L", (1, 1))
    image.info = {1: 2, (3, "a"): (4, (5.5, b"b")), "many": 1 << 64, "text": "\ud800", ("\ud800",): 1, "n": -(1 << 63)}
    assert through(image).info == {1: 2, (3, "a"): (4, (5.5, b"b")), "n": -(1 << 63)}


def test_a_photo_of_several_pictures_travels_as_its_file() -> None:
    data = encoded("MPO", save_all=True, append_images=[PHOTO.rotate(90)])
    image = Image.open(io.BytesIO(data))
    assert image.format == "MPO"
    got = through(image)
    assert (type(got), got.format, got.n_frames) == (type(image), "MPO", 2)
    assert_same(got, image)


def test_an_image_whose_format_this_pillow_cannot_open_travels_as_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.open(io.BytesIO(encoded("BMP")))
    monkeypatch.delitem(Image.OPEN, "BMP")
    assert through(image).tobytes() == image.tobytes()


def test_an_image_that_a_plugin_opened_travels_as_pixels() -> None:
    class Plugin(ImageFile.ImageFile):
        def _open(self) -> None:
            self._mode, self._size = "L", (2, 1)

        def load(self) -> Any:
            self.im = Image.new("L", (2, 1), 7).im
            return super(ImageFile.ImageFile, self).load()

    got = through(Plugin(io.BytesIO(b"x")))
    assert (type(got), got.mode, got.tobytes()) == (Image.Image, "L", b"\x07\x07")


@pytest.mark.parametrize("kind", FILES)
def test_an_opened_image_travels_as_its_file(kind: str) -> None:
    data = encoded(kind)
    block = put({"x": [Image.open(io.BytesIO(data))]}, 1)
    assert data in block.data.tobytes()
    got = get(block, "x").tolist()[0]
    assert type(got) is type(Image.open(io.BytesIO(data)))
    assert_same(got, Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("kind", FILES)
def test_an_image_changed_after_it_was_opened_travels_as_it_is_now(kind: str) -> None:
    image = Image.open(io.BytesIO(encoded(kind)))
    image.putpixel((0, 0), 7)
    got = through(image)
    assert (got.mode, got.tobytes(), got.getpalette()) == (image.mode, image.tobytes(), image.getpalette())


def test_an_image_opened_from_a_path_stays_as_it_was(tmp_path: Any) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encoded("PNG"))
    with Image.open(path) as image:
        got = through(image)
        path.unlink()
        assert_same(got, image)


def test_all_frames_come_back_at_the_one_in_use() -> None:
    frames = [PHOTO.rotate(angle).convert("P") for angle in (90, 180)]
    image = Image.open(io.BytesIO(encoded("GIF", save_all=True, append_images=frames)))
    image.seek(2)
    got = through(image)
    assert (got.n_frames, got.tell()) == (3, 2)
    assert np.array_equal(np.asarray(got), np.asarray(image))
    assert through(image).n_frames == 3, "also once its pixels were looked at"


def test_one_image_in_many_rows_is_stored_once() -> None:
    rows = [{"image": PHOTO, "n": n} for n in range(8)]
    plan = plan_batch({"x": rows}, 8)
    assert plan.nbytes < 2 * len(PHOTO.tobytes())
    assert [row["image"] == PHOTO for row in get(block_of(plan), "x").tolist()] == [True] * 8


def test_a_format_whose_decoder_runs_programs_travels_as_pixels() -> None:
    image = Image.open(io.BytesIO(encoded("PNG")))
    image.format = "EPS"
    assert type(through(image)) is Image.Image


def test_a_forged_format_is_refused_by_the_reader() -> None:
    block = put({"x": [Image.open(io.BytesIO(encoded("PNG")))]}, 1)
    forged = block.data.tobytes().replace(b"\xa3PNG", b"\xa3EPS")
    block.data[:] = np.frombuffer(forged, np.uint8)
    with pytest.raises(TransferQueueError, match="EPS"):
        get(block, "x")


def test_a_damaged_file_is_an_error_of_this_package() -> None:
    data = encoded("PNG")
    block = put({"x": [Image.open(io.BytesIO(data))]}, 1)
    block.data[:] = np.frombuffer(block.data.tobytes().replace(data[:16], bytes(16)), np.uint8)
    with pytest.raises(UnsupportedValue, match="PNG"):
        get(block, "x")


def test_an_image_above_the_limit_of_its_reader_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    block = put({"x": [Image.open(io.BytesIO(encoded("PNG")))]}, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UnsupportedValue, match="MAX_IMAGE_PIXELS"):
        get(block, "x")


@pytest.fixture
def part(shared: tq.TransferQueueClient) -> Iterator[str]:
    yield "images"
    shared.clear_partition("images")


def test_messages_with_images_come_back(part: str) -> None:
    """As verl's `raw_prompt` and ROLL's `multi_modal_data` have them."""
    photo = Image.open(io.BytesIO(encoded("JPEG")))
    prompt = [{"role": "user", "content": [{"type": "image", "image": photo}, {"type": "text", "text": "what?"}]}]
    tq.kv_batch_put(["a", "b"], part, {"raw_prompt": [prompt, prompt], "image": [PHOTO, photo]})
    td = tq.kv_batch_get(["a", "b"], part)
    assert_same(td["raw_prompt"][1][0]["content"][0]["image"], photo)
    assert_same(next(iter(td["image"])), PHOTO)
