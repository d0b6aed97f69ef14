"""Values to look at, by processes that have none of their classes: nothing is rebuilt, opened or evaluated.

What `values` would give to a class, to a function of the user's, to pickle, to a config or to an image decoder comes
back as `Described`. Plain values, tensors and arrays are as they were put.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transfer_queue.codec import images
from transfer_queue.codec.arrays import IMAGE, BufferReader
from transfer_queue.codec.assemble import Decoding
from transfer_queue.codec.values import CLASS, CONFIG, PICKLE, REGISTERED, Lifting
from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Bytes


class Described(NamedTuple):
    """`what` it is; `content`: plain values that say more; `data`: the bytes of an image's file, or of its pixels."""

    what: str
    content: Any = None
    data: Bytes | None = None

    @property
    def file(self) -> Bytes | None:
        """The file of an image; None for its pixels and for anything else."""
        return self.data if self.data is not None and self.content[0] == images.FILE else None


class DescribingLifting(Lifting):
    """Decodes messages to values of which nothing had to be made by code of others."""

    def _lift(self, code: int, data: memoryview) -> Any:
        if code == PICKLE:
            return Described("pickle", len(data))
        if code not in (REGISTERED, CLASS, CONFIG):
            return super()._lift(code, data)
        content = self.unpack(data)
        try:
            if code == REGISTERED:
                name, plain = content
                return Described(str(name), plain)
            if code == CONFIG:
                return Described("config", content[1])
            _, name, fields = content
            return Described(str(name), fields)
        except (ValueError, TypeError, LookupError) as error:
            raise ProtocolError(f"a damaged value (extension {code}): {error}") from None


class DescribingReader(BufferReader):
    """Rebuilds arrays; an image is its description and its bytes."""

    def lift(self, code: int, content: Any) -> Any:
        if code != IMAGE:
            return super().lift(code, content)
        try:
            description, ref = content
            return Described("image", list(description), self._bytes(ref))
        except (ValueError, TypeError, LookupError) as error:
            raise ProtocolError(f"a damaged image in a value: {error}") from None


DESCRIPTIONS = Decoding(DescribingLifting, DescribingReader)
