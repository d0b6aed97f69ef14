"""Values and bytes in buffers of the caller's: exact inverses, or an error that names what is wrong."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from blocks import same
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tensordict import TensorDict

from transfer_queue.codec import packed
from transfer_queue.codec.packed import batch_decode_from, batch_encode_into, calc_packed_size, pack_into, unpack_from
from transfer_queue.errors import InvalidInput, ProtocolError, TransferQueueError, UnsupportedValue

LARGE = 3 << 20  # more than one thread copies


def separate(sizes: list[int]) -> list[bytearray]:
    return [bytearray(b"\xaa" * size) for size in sizes]


def slices(sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.full((sum(sizes),), 0xAA, dtype=torch.uint8).split(sizes))


def through(values: Sequence[Any], **how: Any) -> list[Any]:
    return batch_decode_from(batch_encode_into(values, separate)[0], **how)


def nested(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.randn(shape).to(dtype) for shape in shapes], dtype=dtype)


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(length, 2) for length in lengths], layout=torch.jagged)


VALUES: dict[str, Any] = {
    "None": None,
    "numbers": [1, -(1 << 70), 2.5, True, 1j],
    "texts": ["", "ä", "\ud800", b"\x00" * 3],
    "dict": {"a": {"b": (1, 2)}, ("c", 3): {4, 5}},
    "4-D": torch.randn(2, 3, 4, 5),
    "6-D": torch.randn(1, 2, 1, 2, 1, 2).bfloat16(),
    "0-D": torch.tensor(7),
    "empty": torch.empty(0, 3, dtype=torch.int16),
    "transposed": torch.randn(5, 3).T,
    "expanded": torch.randn(1, 3).expand(4, 3),
    "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "strided nested": nested((3,), (5,)),
    "strided nested, two dimensions": nested((2, 3), (4, 1), (0, 2)),
    "strided nested, bfloat16": nested((3,), (5,), dtype=torch.bfloat16),
    "strided nested, transposed": nested((2, 3), (4, 1)).transpose(1, 2),
    "strided nested of scalars": nested((), ()),
    "strided nested of nothing": nested(dtype=torch.float64),
    "jagged": jagged(3, 0, 5),
    "jagged, second dimension": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(2, 5)], layout=torch.jagged),
    "array": np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2],
    "object array": np.array([None, "x", [1]], dtype=object),
    "structured": np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "TensorDict": TensorDict({"x": torch.randn(2, 3), "y": {"z": torch.arange(4).view(2, 2)}}, batch_size=[2]),
    "shared": [torch.ones(3)] * 2,
}
PIXELS = np.random.default_rng(0).integers(0, 255, (512, 512, 3), dtype=np.uint8)


# bytes


@given(st.lists(st.binary(max_size=200), max_size=12))
def test_items_come_back_in_their_order(items: list[bytes]) -> None:
    buffer = bytearray(b"\xaa" * (calc_packed_size(items) + 7))
    used = pack_into(buffer, items)
    assert used == calc_packed_size(items)
    assert used % 64 == 0
    assert buffer[used:] == b"\xaa" * 7
    assert [bytes(item) for item in unpack_from(buffer)] == items


def test_items_that_lie_in_strides_are_packed_row_by_row() -> None:
    table = np.arange(24, dtype=np.int16).reshape(4, 6)
    items = [table[:, ::2], memoryview(table)[::3], torch.from_numpy(table).T, np.array("2024-01-01", "M8[D]")]
    buffer = bytearray(calc_packed_size(items))
    pack_into(buffer, items)
    found = unpack_from(buffer)
    assert [bytes(one) for one in found[:3]] == [table[:, ::2].tobytes(), table[::3].tobytes(), table.T.tobytes()]
    assert np.frombuffer(found[3], "M8[D]")[0] == items[3]


def large_pages(nbytes: int) -> mmap.mmap:
    """Memory in which 4 GiB take a second: a page that is only read is no memory of its own, and others are large."""
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(mmap.MADV_HUGEPAGE)
    return made


def test_items_beyond_4_gib() -> None:
    """Offsets are of 64 bits. The pages of the item are never written, and those of the buffer given back at once."""
    with large_pages((4 << 30) + 8) as large:
        large[-8:] = b"the end."
        items = [large, b"behind"]
        with large_pages(calc_packed_size(items)) as buffer:
            pack_into(buffer, items, num_workers=2)
            first, second = unpack_from(buffer)
            assert (first.nbytes, bytes(first[-8:]), bytes(second)) == (len(large), b"the end.", b"behind")
            del first, second


def test_unpacked_items_are_views_or_copies() -> None:
    buffer = bytearray(calc_packed_size([b"abc"]))
    pack_into(buffer, [b"abc"])
    (view,), (copied,) = unpack_from(buffer), unpack_from(buffer, copy=True)
    view[0] = ord("x")
    assert (bytes(unpack_from(buffer)[0]), bytes(copied)) == (b"xbc", b"abc")
    assert unpack_from(bytes(buffer))[0].readonly
    with pytest.raises(BufferError):
        buffer.clear()  # the view holds it


# values


@pytest.mark.parametrize("copy", [None, False, True], ids=["default", "views", "copies"])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name: str, copy: bool | None) -> None:
    (found,) = through([VALUES[name]], copy=copy)
    assert same(found, VALUES[name])


def test_many_values_in_slices_of_one_buffer() -> None:
    values = [*VALUES.values(), torch.randn(LARGE)]
    buffers, sizes = batch_encode_into(values, slices, num_workers=3)
    assert all(size % 64 == 0 and len(buffer) == size for size, buffer in zip(sizes, buffers, strict=True))
    for workers in (1, 3):
        assert same(batch_decode_from(buffers, copy=True, num_workers=workers), values)


def test_no_values() -> None:
    assert batch_encode_into([], separate) == ([], [])
    assert batch_decode_from([]) == []


@pytest.mark.parametrize("kind", [bytes, memoryview, lambda one: np.frombuffer(one, np.uint8), mmap.mmap])
def test_kinds_of_buffers(kind: Any) -> None:
    value = {"x": torch.randn(4), "y": "text"}
    if kind is mmap.mmap:
        (buffer,), _ = batch_encode_into([value], lambda sizes: [mmap.mmap(-1, *sizes)])
    else:
        buffer = kind(batch_encode_into([value], separate)[0][0])
    (found,) = batch_decode_from([buffer])
    assert same(found, value)
    found["x"].fill_(0)  # also what came from a read-only buffer is the caller's


def test_a_buffer_in_parts() -> None:
    value = {"x": torch.randn(100), "y": "text"}

    def parts(sizes: list[int]) -> list[list[bytearray]]:
        return [[bytearray(100), bytearray(0), bytearray(sizes[0] - 101), bytearray(50)]]

    buffers, _ = batch_encode_into([value], parts)
    assert same(batch_decode_from(buffers), [value])
    assert buffers[0][3][1:] == bytes(49)
    with pytest.raises(InvalidInput, match="buffer 0: it is a list"):
        batch_decode_from(buffers, copy=False)


def test_equal_values_are_equal_bytes() -> None:
    def lying(fill: int, workers: int) -> list[bytes]:
        buffers, _ = batch_encode_into(
            [*VALUES.values(), torch.ones(LARGE)], lambda sizes: [bytearray([fill]) * size for size in sizes],
            num_workers=workers,
        )  # fmt: skip
        return [bytes(buffer) for buffer in buffers]

    assert lying(0xAA, 1) == lying(0xBB, 4)


# whose memory it is


def test_views_show_what_is_written_later_and_keep_the_buffer() -> None:
    (buffer,), _ = batch_encode_into([torch.zeros(8)], lambda sizes: [np.zeros(sizes[0], np.uint8)])
    gone = weakref.ref(buffer)
    (view,), (copied,) = batch_decode_from([buffer], copy=False), batch_decode_from([buffer], copy=True)
    view.fill_(1)
    assert same(batch_decode_from([buffer], copy=True), [torch.ones(8)])
    assert same(copied, torch.zeros(8))
    del buffer
    assert gone() is not None
    del view
    assert gone() is None


def test_copies_outlive_their_buffer() -> None:
    values = [torch.randn(LARGE), {"jagged": jagged(LARGE // 8, 3)}]
    buffers, _ = batch_encode_into(values, separate)
    found = batch_decode_from(buffers, copy=True, num_workers=2)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    assert same(found, values)


@pytest.mark.parametrize("copy", [False, True], ids=["views", "copies"])
def test_images_are_always_copies(copy: bool) -> None:
    buffers, _ = batch_encode_into([Image.fromarray(PIXELS)], separate)
    (found,) = batch_decode_from(buffers, copy=copy)
    buffers[0][:] = bytes(len(buffers[0]))
    assert np.array_equal(np.asarray(found), PIXELS)


def test_views_of_a_read_only_buffer_are_refused() -> None:
    (buffer,), _ = batch_encode_into([torch.zeros(8)], separate)
    with pytest.raises(InvalidInput, match="buffer 0: it is read-only"):
        batch_decode_from([bytes(buffer)], copy=False)


def test_many_threads_at_once() -> None:
    def work(seed: int) -> bool:
        values = [{"x": torch.full((1 << 18,), float(seed + n)), "n": n} for n in range(8)]
        return all(same(through(values, copy=True, num_workers=2), values) for _ in range(4))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_in_a_forked_child_of_a_process_that_decodes() -> None:
    buffers, _ = batch_encode_into([torch.ones(LARGE)], separate)
    with packed._pool._lock:  # as it may be held by another thread at this moment
        pid = os.fork()
        if not pid:
            found = batch_decode_from(buffers, copy=True)[0].numpy()  # torch's own threads do not survive a fork
            os._exit(0 if bool((found == 1).all()) else 1)
    assert os.waitpid(pid, 0)[1] == 0


# what is refused


@pytest.mark.parametrize(
    ("buffers", "match"),
    [
        (lambda sizes: [], "0 buffers for 2 values"),
        (lambda sizes: [bytearray(sizes[0]), bytearray(sizes[1] - 1)], "buffer 1: it has 127 bytes, 128 are needed"),
        (lambda sizes: [bytearray(sizes[0]), bytes(sizes[1])], "buffer 1: it is read-only"),
        (lambda sizes: [np.zeros(2 * sizes[0], np.uint8)[::2], bytearray(sizes[1])], "buffer 0: .* without gaps"),
        (lambda sizes: [torch.zeros(64, 8).T, bytearray(sizes[1])], "buffer 0: .* without gaps"),
        (lambda sizes: [memoryview(bytearray(512))[::2], bytearray(sizes[1])], "buffer 0: .* without gaps"),
        (lambda sizes: [7, bytearray(sizes[1])], "buffer 0: int is no buffer"),
        (lambda sizes: [bytearray(1 << 10)] * 2, "overlap"),
        (lambda sizes: [torch.zeros(1024, device="meta"), bytearray(sizes[1])], "buffer 0: .* memory of the processor"),
    ],
)
def test_buffers_that_cannot_take_the_values(buffers: Any, match: str) -> None:
    given: list[Any] = []

    def alloc(sizes: list[int]) -> Any:
        given.extend(buffers(sizes))
        return given

    with pytest.raises(InvalidInput, match=match):
        batch_encode_into([b"a", b"b"], alloc)
    assert not any(any(one) for one in given if isinstance(one, bytearray)), "nothing was written"


def test_items_that_lie_in_the_target_are_refused() -> None:
    buffer = bytearray(4096)
    pack_into(buffer, [b"a" * 100, b"b" * 100, b"c" * 100])
    views, before = unpack_from(buffer), bytes(buffer)
    with pytest.raises(InvalidInput, match="item 1 lies in a buffer that is to be written"):
        pack_into(buffer, [b"x", views[1]])
    with pytest.raises(InvalidInput, match="item 0 lies in"):
        pack_into(buffer, [np.frombuffer(buffer, np.uint8)[-1:]] + [bytes(1000)] * 3)
    assert bytes(buffer) == before
    pack_into(memoryview(buffer)[2048:], views)  # beside each other
    assert [bytes(one) for one in unpack_from(memoryview(buffer)[2048:])] == [b"a" * 100, b"b" * 100, b"c" * 100]


@pytest.mark.parametrize("kind", [torch.arange, np.arange])
def test_values_that_lie_in_a_target_are_refused(kind: Any) -> None:
    (buffer,), _ = batch_encode_into([kind(50)], lambda sizes: [bytearray(8192)])
    (x,), before = batch_decode_from([buffer]), bytes(buffer)
    for value in (x, x[::2], x[5:6], x[::-1] if kind is np.arange else x[3:]):
        with pytest.raises(InvalidInput, match="value 1 lies in a buffer that is to be written"):
            batch_encode_into([b"x", {"pad": torch.zeros(4), "x": value}], lambda _: [bytearray(4096), buffer])
    assert bytes(buffer) == before
    parts = [memoryview(buffer)[:64], memoryview(buffer)[64:]]  # a list is written when all is copied
    batch_encode_into([{"pad": kind(9), "x": x}], lambda _: [parts])
    assert batch_decode_from([buffer])[0]["x"].tolist() == list(range(50))


@pytest.mark.parametrize(
    "item",
    [
        np.array([object()]),
        np.zeros(2, [("a", "O")]),
        torch.eye(3).to_sparse(),
        nested((2,), (3,)),
        jagged(2, 3),
        object(),
    ],
    ids=["objects", "structured", "sparse", "nested", "jagged", "no buffer"],
)
def test_an_item_without_bytes_is_named(item: Any) -> None:
    with pytest.raises(InvalidInput, match="item 1: "):
        pack_into(bytearray(4096), [b"x", item])


def test_items_are_the_values_that_a_lazy_tensor_stands_for() -> None:
    buffer = bytearray(4096)
    number = torch.tensor([1 + 2j]).conj()
    pack_into(buffer, [number, number.imag])
    conjugate, negative = unpack_from(buffer)
    assert np.frombuffer(conjugate, np.complex64).tolist() == [1 - 2j]
    assert np.frombuffer(negative, np.float32).tolist() == [-2.0]


def test_a_target_that_is_too_small_stays_as_it_was() -> None:
    target = bytearray(b"\xaa" * 100)
    with pytest.raises(InvalidInput, match="it has 100 bytes, 192 are needed"):
        pack_into(target, [b"abc", b"d"])
    assert target == b"\xaa" * 100


def test_a_value_that_cannot_be_stored_is_named_before_anything_is_allocated() -> None:
    def never(sizes: list[int]) -> Any:
        raise AssertionError(sizes)

    with pytest.raises(UnsupportedValue, match=r"^value 1: .*lock"):
        batch_encode_into([1, {"x": threading.Lock()}], never)


class Odd:
    """Of a type that nobody registered."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


def test_pickle_on_both_sides_only() -> None:
    with pytest.raises(UnsupportedValue, match=r"^value 0: "):
        batch_encode_into([Odd()], separate)
    buffers, _ = batch_encode_into([Odd()], separate, allow_pickle=True)
    with pytest.raises(UnsupportedValue, match=r"^buffer 0: "):
        batch_decode_from(buffers)
    assert batch_decode_from(buffers, allow_pickle=True) == [Odd()]


@pytest.mark.parametrize("workers", [0, -1])
def test_workers(workers: int) -> None:
    with pytest.raises(InvalidInput, match="num_workers"):
        batch_encode_into([1], separate, num_workers=workers)


# damage


def test_no_cut_is_taken_for_a_whole() -> None:
    (buffer,), (size,) = batch_encode_into([{"x": torch.randn(20), "y": "text"}], separate)
    for end in range(size):
        with pytest.raises(ProtocolError, match=r"^buffer 0: "):
            batch_decode_from([buffer[:end]])
        with pytest.raises(ProtocolError):
            unpack_from(buffer[:end])


def test_every_changed_bit_outside_of_the_items_is_noticed() -> None:
    (buffer,), _ = batch_encode_into([{"x": torch.randn(20), "y": "text"}], separate)
    start = packed._parsed(np.frombuffer(buffer, np.uint8))[0].starts[0]
    gaps = 0
    for bit in range(8 * start):
        damaged = bytearray(buffer)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            batch_decode_from([damaged])
        except ProtocolError:
            continue
        assert buffer[bit // 8] == 0, "only between the parts"
        gaps += 1
    assert gaps < 8 * 128


@given(st.data())
def test_damage_in_a_value_is_an_error_or_another_value_of_that_size(data: st.DataObject) -> None:
    value = data.draw(st.sampled_from(list(VALUES.values())))
    (buffer,), (size,) = batch_encode_into([value], separate)
    for _ in range(data.draw(st.integers(1, 8))):
        buffer[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    try:
        (found,) = batch_decode_from([buffer], copy=True)
    except (ProtocolError, UnsupportedValue):
        return
    if isinstance(found, torch.Tensor) and isinstance(value, torch.Tensor) and not value.is_nested:
        assert found.nbytes <= size


@pytest.mark.parametrize("data", [b"", b"TQpacked", bytes(500), os.urandom(500)])
def test_what_was_not_packed_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_from(data)
    with pytest.raises(ProtocolError, match=r"^buffer 0: "):
        batch_decode_from([data])


@pytest.mark.parametrize(
    "description",
    [
        b"abc",
        packed.NUMBER.pack(1),
        packed.NUMBER.pack(1 << 60) + b"x",
        struct.pack("<QQ", 1, 1) + b"x",
        bytes(8),
        bytes(8) + b"\xc1",
    ],
    ids=["short", "without its references", "references without end", "another part", "no message", "no msgpack"],
)
def test_descriptions_that_somebody_made_up(description: bytes) -> None:
    """Whoever can write a buffer can write a digest that fits."""
    form = packed._Form([3], len(description))
    buffer = bytearray(form.nbytes)
    form.write(np.frombuffer(buffer, np.uint8), description)
    with pytest.raises(ProtocolError, match=r"^buffer 0: "):
        batch_decode_from([buffer])


def test_items_are_no_value_and_a_value_is_not_taken_for_a_whole_batch() -> None:
    buffer = bytearray(calc_packed_size([b"abc"]))
    pack_into(buffer, [b"abc"])
    with pytest.raises(ProtocolError, match="items of pack_into"):
        batch_decode_from([buffer])
    buffers, _ = batch_encode_into([1, 2], separate)
    with pytest.raises(TransferQueueError, match=r"^buffer 1: "):
        batch_decode_from([buffers[0], buffers[1][:-1]])
