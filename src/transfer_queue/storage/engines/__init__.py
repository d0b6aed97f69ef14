"""Storage engines: other programs that keep the bytes of large blocks. The service keeps the books of them.

    engine     what every engine does, and how one is opened by its name
    deadline   calls of an engine that end in time, with an error that names it
    sealed     how a block lies in an engine: its bytes, then the digests that every reader compares
    probe      whether an engine works on this host, for `tq doctor`
    started    programs that a server starts for its engine
    files      a directory, or whatever else fsspec opens
    mooncake   Mooncake's store
     └─ offload  the directory of what its memory has no room for
    yuanrong   openYuanrong's datasystem
    ray_store  Ray's object store
     └─ ray_objects  what of it imports ray: in clients, and in a process that the server starts

A writer asks its server for a block, fills the room that the engine gives it under the block's name, and commits. A
reader is told that the block lies in the engine, and reads the ranges that its rows need. The controller's server
deletes what no row refers to any more, and asks the engine when a reader finds nothing (`server.engine_blocks`).
"""

from transfer_queue.storage.engines.engine import BlocksMissing as BlocksMissing
from transfer_queue.storage.engines.engine import ReadSpan as ReadSpan
from transfer_queue.storage.engines.engine import Room as Room
from transfer_queue.storage.engines.engine import StorageEngine as StorageEngine
from transfer_queue.storage.engines.engine import engine_class as engine_class
