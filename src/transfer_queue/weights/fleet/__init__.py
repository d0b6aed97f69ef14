"""A trainer's replicas: which of them serve the newest version, and how the others come to it.

fleet           takes the trainer engine's calls for all replicas: a two-phase commit; joins, leaves, status
 ├─ rounds      one version on its way: who prepared it, and who missed it
 └─ replica     one server: what it serves, one call to it at a time, none without a deadline
     └─ monitor  its thread: heartbeats while it is ready, catching up while it is fenced
reporter        a thread that tells a queue how the replicas are, for people who look
A replica is ready while it serves the newest version that was decided. From the moment of a decision that it missed, or
once it is not heard of, it is fenced: routers leave it out, its generation is paused, and it is brought to the newest
version by the same calls.
"""

from transfer_queue.weights.fleet.fleet import Fleet, RoundReport
from transfer_queue.weights.fleet.replica import Member, ReplicaStatus

__all__ = ["Fleet", "Member", "ReplicaStatus", "RoundReport"]
