"""How bytes of arenas travel to other hosts where that is not over the service's own connections.

    transport   what every transport does, and how one is opened by its name
    guarded     calls of one that end in time, with an error that names it
    mooncake    Mooncake's Transfer Engine: TCP, or RDMA
    probe       whether one works on this host, for `tq doctor`

Only reads are one-sided. Who lends memory keeps it in place until its readers are done: a unit by their pins, which
they ask for once more after they have read; a writer until the unit has its bytes. Nobody writes into memory of
another process: a client that was stopped for a while could write into a block that is another's by then.
"""

from transfer_queue.storage.transports.guarded import GuardedTransport as GuardedTransport
from transfer_queue.storage.transports.transport import NotReached as NotReached
from transfer_queue.storage.transports.transport import RemoteSpan as RemoteSpan
from transfer_queue.storage.transports.transport import Transport as Transport
from transfer_queue.storage.transports.transport import transport_class as transport_class
