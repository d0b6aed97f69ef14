"""NeMo-RL's replay buffer and its four samplers on groups at the service: who waits is answered, and nobody polls.

    buffer      TQReplayBuffer: slots are groups of a pool, under the names and lists of NeMo's own
    samplers    windowed, ready_first, weight_fifo, in_order, for `async_rl.sampler`
    payload     a rollout's record as rows, and the metadata of rows
    saved       what is wrong with a saved buffer, before anything of it is written
    patching    NeMo's buffer, replaced where NeMo makes it
    refit_transport  weights from the policy to generation workers, for `refit_transport`

A sampler is named in NeMo's settings; it works on this buffer only, so the buffer is put in the place of NeMo's first.
Every change of the trainer's version reaches the service with the next `select` or `evict`, or by `set_weight_version`.

What is other than there: a group that a process left unfinished ends with that process; groups and their metadata are
at the service, so any process may select them; `wait_for_groups`, and `patience_s` of a sampler, wait instead of asking
again; `in_order` gives a step as many groups as it has prompts, and no more.
"""

from transfer_queue.integrations.nemo_rl.buffer import TQReplayBuffer as TQReplayBuffer
from transfer_queue.integrations.nemo_rl.patching import install as install
from transfer_queue.integrations.nemo_rl.samplers import InOrderSampler as InOrderSampler
from transfer_queue.integrations.nemo_rl.samplers import ReadyFirstSampler as ReadyFirstSampler
from transfer_queue.integrations.nemo_rl.samplers import WeightFifoSampler as WeightFifoSampler
from transfer_queue.integrations.nemo_rl.samplers import WindowedSampler as WindowedSampler
