"""The door's two messages: a visitor sends `NUMBER`, the server answers `SIZE` with the arena's descriptor."""

from __future__ import annotations

import struct

NUMBER = struct.Struct("<I")
SIZE = struct.Struct("<Q")
