"""Framing: the same messages whatever the chunks, and nothing but ProtocolError for garbage."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from transfer_queue.errors import InvalidInput, ProtocolError
from transfer_queue.schema import FieldSchema
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.framing import CHUNK_NBYTES, PREFIX, FrameReader, frame

FUZZ = settings(max_examples=300, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))  # fmt: skip
CAP = 1 << 16
SAMPLES: list[Any] = [
    m.Hello(1, b"session", b"n" * 16),
    m.Commit(1, "p", 2, ["a", "b"], None, [FieldSchema("f", "dense", "float32", (2,))], 0, b"layout", [{}, {}], 1.0),
    m.Fetch(2, "p", ["f"], 8, "task", {"dp_rank": 0}, 30.0, True),
    m.Get(3, "p", None, b"\0" * 16, None, True),
    m.Unpin(7, [1, 2, 3]),
    m.Stop(2**62),
]


def reader(cap: int = CAP) -> FrameReader[Any]:
    return FrameReader(m.decode_client, lambda _, nbytes: memoryview(bytearray(nbytes)), cap)


def feed(framer: FrameReader[Any], stream: bytes, sizes: list[int]) -> list[tuple[Any, bytes]]:
    """Everything that comes out when the stream arrives in chunks of (at most) these sizes, repeated."""
    found, at, turn = [], 0, 0
    while at < len(stream):
        buffer = framer.buffer()
        assert len(buffer)
        count = min(len(buffer), sizes[turn % len(sizes)], len(stream) - at)
        buffer[:count] = stream[at : at + count]
        found += [(message, bytes(payload)) for message, payload in framer.advance(count)]
        at, turn = at + count, turn + 1
    return found


def stream_of(parts: list[tuple[Any, bytes]]) -> bytes:
    return b"".join(frame(m.encode(message), len(payload)) + payload for message, payload in parts)


parts_lists = st.lists(st.tuples(st.sampled_from(SAMPLES), st.binary(max_size=40) | st.just(b"x" * 3000)), max_size=8)


@FUZZ
@given(parts_lists, st.lists(st.integers(1, 5000), min_size=1, max_size=6))
@example([(SAMPLES[1], b"x" * 3000)] * 3, [1])
def test_any_chunking_gives_the_same_messages_and_payloads(parts: list[tuple[Any, bytes]], sizes: list[int]) -> None:
    assert feed(reader(), stream_of(parts), sizes) == parts


def test_small_frames_arrive_many_at_a_time() -> None:
    framer = reader()
    stream = stream_of([(SAMPLES[4], b"")] * 100)
    framer.buffer()[: len(stream)] = stream
    assert len(list(framer.advance(len(stream)))) == 100


@pytest.mark.parametrize("size", [CHUNK_NBYTES - 1, CHUNK_NBYTES, 3 * CHUNK_NBYTES])
def test_headers_larger_than_the_chunk_arrive_and_leave_no_memory(size: int) -> None:
    big = m.Commit(1, "p", 1, None, None, [], -1, b"x" * size, None, 0.0)
    framer = reader(4 * CHUNK_NBYTES)
    parts = [(SAMPLES[0], b""), (big, b"payload"), (SAMPLES[4], b"")]
    assert feed(framer, stream_of(parts), [7000]) == parts
    assert len(framer.buffer()) == CHUNK_NBYTES


def test_a_payload_is_received_straight_into_its_destination() -> None:
    memory = memoryview(bytearray(1000))
    framer: FrameReader[Any] = FrameReader(m.decode_client, lambda message, nbytes: memory[:nbytes])
    head = frame(m.encode(SAMPLES[4]), 1000)
    framer.buffer()[: len(head)] = head
    assert list(framer.advance(len(head))) == []
    target = framer.buffer()
    target[:] = b"y" * 1000
    assert bytes(memory) == b"y" * 1000
    ((message, payload),) = framer.advance(1000)
    assert message == SAMPLES[4]
    assert payload == memory


def test_a_header_above_the_cap_is_refused_before_it_arrives() -> None:
    assert len(feed(reader(100), stream_of([(SAMPLES[4], b"")]), [9999])) == 1
    with pytest.raises(ProtocolError, match="101"):
        feed(reader(100), PREFIX.pack(101, 0), [9999])


@pytest.mark.parametrize("nbytes", [2**48, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_payload_nobody_could_hold_is_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError):
        feed(reader(), frame(m.encode(SAMPLES[4]), nbytes), [9999])


def test_a_destination_refuses_a_payload_with_its_own_error() -> None:
    def refuse(message: Any, nbytes: int) -> memoryview:
        raise InvalidInput(f"no {nbytes} bytes")

    with pytest.raises(InvalidInput, match="no 5 bytes"):
        feed(FrameReader(m.decode_client, refuse), frame(m.encode(SAMPLES[4]), 5), [9999])


def test_a_destination_of_another_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="5 bytes"):
        feed(FrameReader(m.decode_client, lambda *_: memoryview(bytearray(4))), frame(m.encode(SAMPLES[4]), 5), [9999])


MANY = PREFIX.pack(9, 0) + b"\xdd\xff\xff\xff\xff" + b"\0" * 4  # an array of 2^32 - 1 entries
GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"r" * 64, b"\0" * 64, b"\xff" * 64, b"\x80\x04\x95" + b"p" * 64,
    PREFIX.pack(1, 0) + b"\xc1", PREFIX.pack(5, 0) + b"\x91" * 5, PREFIX.pack(6, 0) + b"\x92\xa3\xff\xff\xff\0",
    PREFIX.pack(60_000, 0) + b"\x91" * 60_000, MANY, PREFIX.pack(0, 9),
]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda g: repr(bytes(g[:12])))
def test_garbage_is_refused_or_waits_for_more(garbage: bytes) -> None:
    for sizes in ([1], [9999]):
        try:
            assert feed(reader(), garbage, sizes) == []
        except ProtocolError:
            continue


@FUZZ
@given(st.data())
def test_changed_frames_raise_nothing_but_protocol_errors(data: st.DataObject) -> None:
    stream = bytearray(stream_of([(data.draw(st.sampled_from(SAMPLES)), b"payload")] * 2))
    for _ in range(data.draw(st.integers(1, 5))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    check_garbage(bytes(stream), data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=3)))


@FUZZ
@given(st.binary(max_size=200), st.lists(st.integers(1, 64), min_size=1, max_size=3))
def test_any_bytes_raise_nothing_but_protocol_errors(stream: bytes, sizes: list[int]) -> None:
    check_garbage(stream, sizes)


@FUZZ
@given(st.binary(max_size=200))
def test_any_header_raises_nothing_but_protocol_errors(header: bytes) -> None:
    check_garbage(frame(header), [9999])


def check_garbage(stream: bytes, sizes: list[int]) -> None:
    def small(message: Any, nbytes: int) -> memoryview:
        if nbytes > 1 << 16:
            raise ProtocolError("too much")
        return memoryview(bytearray(nbytes))

    for framer in (FrameReader(m.decode_client, small, CAP), FrameReader(m.decode_server, small, CAP)):
        try:
            feed(framer, stream, sizes)
        except ProtocolError:
            continue


# ---- messages ----


def message_types(base: type = m.Message) -> list[type]:
    """Those of the service; other servers have messages of their own."""
    below = [leaf for child in base.__subclasses__() for leaf in message_types(child)]
    mine = base not in (m.Message, m.Request, m.Reply) and base.__module__.startswith("transfer_queue.wire")
    return below + ([base] if mine else [])


def test_every_message_is_in_exactly_one_union() -> None:
    for cls in message_types():
        sides = [cls in side.__args__ for side in (m.ClientMessage, m.ServerMessage)]
        assert sides.count(True) == 1, cls


def test_the_name_of_a_message_is_its_tag_and_no_two_share_one() -> None:
    tags = [cls.__struct_config__.tag for cls in message_types()]
    assert sorted(tags) == sorted({cls.__name__ for cls in message_types()})


def test_a_message_of_the_other_side_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decode_client(m.encode(m.Done(1)))
    with pytest.raises(msgspec.ValidationError):
        m.decode_server(m.encode(m.Stop(1)))


# ---- hello ----


def test_a_proof_cannot_be_reflected_or_replayed() -> None:
    one, two = handshake.nonce(), handshake.nonce()
    assert one != two
    proofs = {
        handshake.server_mac("token", one, two),
        handshake.client_mac("token", one, two),
        handshake.client_mac("token", two, one),
        handshake.client_mac("", one, two),
        handshake.client_mac("other", one, two),
    }
    assert len(proofs) == 5
    assert handshake.client_mac("token", one, two) == handshake.client_mac("token", one, two)
