"""vime (and slime) on this package: the bridge of its pull request 242, under the same names, methods and flags.

    arguments   the flags, and what is wrong with them
    bridge      TransferQueueBridge: driver, rollout manager and Megatron ranks call it
    fields      what the columns of vime's train data are
    schedule    rows and micro-batches of each rank, by the framework's function

The driver calls `initialize` before any actor starts, and `clear_partition` when all tasks have a rollout. The rollout
manager calls `connect` and `transfer_rollout_data`, Megatron's ranks `connect` and `get_data`.

What is other than there, and better: waiting is done in the service, so `get_data` blocks and nobody polls; arrays are
columns; `rollout_ids`, `rollout_mask_sums` and every other column of numbers that was written come back; the schedule
is made once and sent; ranks receive bytes, not pickles.
"""

from transfer_queue.integrations.vime.arguments import add_arguments as add_arguments
from transfer_queue.integrations.vime.arguments import validate_arguments as validate_arguments
from transfer_queue.integrations.vime.bridge import TransferQueueBridge as TransferQueueBridge
