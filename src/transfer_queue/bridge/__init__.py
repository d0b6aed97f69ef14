"""From rollout to training without glue: the batches that frameworks make, as columns, and back.

    bridge      a step's batch to data-parallel ranks: put, fetch, write back, clear
     ├─ schema      what the columns of a rollout are, declared once
     ├─ conversion  lists of ints, floats, tensors, arrays, dicts and None to columns, and back
     ├─ schedule    which rows each rank trains on, and in which micro-batches
     └─ ranks       what one rank fetched, for all ranks of a model-parallel group

A step is a partition. Its rows lie in the order of the ranks in one block, so that each rank reads views. A marker
field for each rank, which only its rows have, tells them apart: a rank waits for its fields and its marker, and the
marker of its first row holds the schedule. So everything that a rank needs comes with one answer.

Who calls whom: the rollout's side calls `RolloutBridge.put`; every rank calls `fetch`, then `write_back` for what it
derived; whoever drives the step calls `clear`. Conversion is NumPy's, in the calling thread.
"""

from transfer_queue.bridge.bridge import Fetched as Fetched
from transfer_queue.bridge.bridge import RolloutBridge as RolloutBridge
from transfer_queue.bridge.schedule import Schedule as Schedule
from transfer_queue.bridge.schema import Inferred as Inferred
from transfer_queue.bridge.schema import Numbers as Numbers
from transfer_queue.bridge.schema import Objects as Objects
from transfer_queue.bridge.schema import Ragged as Ragged
from transfer_queue.bridge.schema import RolloutColumn as RolloutColumn
from transfer_queue.bridge.schema import RolloutSchema as RolloutSchema
