"""Groups of siblings: all answers to one prompt, from the permission to start them to the step that trains on them.

    policy       GroupPolicy: which groups a trainer gets at a version of the weights, and how many may be started
    group        one group: its slots, the attempts at each, what came of them
    counters     what became of the groups of each data source
    pool         all groups of one partition: tickets, attempts, sealing, judging, what is lent
    work         which open groups may have idle slots
    choice       which groups may be handed out now, in which order
    shortfall    versions that get fewer groups than they were to have
    priorities   sealed groups by priority, or drawn by their weights
    rate         how often groups may be selected for each that is made
    steps        what a trainer used up for each of its steps, and going back to one
    again        what a trainer that went back is handed once more
    consistency  whether a pool agrees with itself
    state        a pool as it is saved, and the numbers that pools which are gone have used

Nothing here waits, reads a clock or knows a message, a table or a session: `controller.groups` has those. A pool's
methods are complete when they return; rows that nobody needs any more collect in `PoolCore.discarded`.

A producer takes tickets, opens groups with them and starts attempts at their slots. What it produced is the result of
an attempt. A group whose slots all have an end is sealed, or given up. A consumer gets whole sealed groups on a lease.
Every new version of the weights judges the groups that nobody has.
"""

from transfer_queue.groups.group import Result as Result
from transfer_queue.groups.group import SiblingGroup as SiblingGroup
from transfer_queue.groups.policy import GroupPolicy as GroupPolicy
from transfer_queue.groups.pool import PoolCore as PoolCore
from transfer_queue.groups.state import PoolState as PoolState
from transfer_queue.groups.state import UsedNumbers as UsedNumbers
