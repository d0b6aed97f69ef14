"""What a commit may say."""

from __future__ import annotations

from transfer_queue.controller.block_index import BlockIndex
from transfer_queue.errors import InvalidInput
from transfer_queue.wire import messages as m

NO_BLOCK = -1


def check_commit(message: m.Commit, block_index: BlockIndex) -> None:
    """`InvalidInput` for parts that do not fit together, and for a block that is published already."""
    if message.count < 1 or (message.tags is not None and len(message.tags) != message.count):
        raise InvalidInput(f"{message.count} rows with {len(message.tags or ())} tags")
    if len({f.name for f in message.fields}) != len(message.fields):
        raise InvalidInput("a field occurs twice")
    if not all(0 <= position < len(message.tags or ()) for position in message.replaced):
        raise InvalidInput("replaced tags that are not there")
    if message.block < NO_BLOCK or (not message.fields and message.block != NO_BLOCK):
        raise InvalidInput(f"block {message.block} with {len(message.fields)} fields")
    if message.block in block_index.entries:
        raise InvalidInput(f"block {message.block} is published already")
