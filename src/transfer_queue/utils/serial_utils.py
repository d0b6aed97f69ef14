"""Packed buffers under the path that they have in TransferQueue; see `transfer_queue.codec.packed`."""

from __future__ import annotations

from transfer_queue.codec.packed import (
    batch_decode_from,
    batch_encode_into,
    calc_packed_size,
    pack_into,
    unpack_from,
)

__all__ = ["batch_decode_from", "batch_encode_into", "calc_packed_size", "pack_into", "unpack_from"]
