"""Which data-parallel rank a stream is for."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed

from transfer_queue.errors import InvalidInput
from transfer_queue.sampler.base import whole_number


class Rank(NamedTuple):
    """`number` is None without data parallelism; `size` is 0 where nothing is dealt."""

    number: int | None
    size: int


def rank_of(dp_rank: int | None, dp_size: int | None) -> Rank:
    """The rank that was named, else that of this process in torch.distributed where it is initialised.

    A `dp_rank` alone names peers that share rows, as in 0.1.11: how many ranks there are is not guessed, since with
    tensor parallelism the world is larger. Raises `InvalidInput` for a rank out of range, or one that is not known.
    """
    dp_rank = None if dp_rank is None else whole_number(dp_rank, "dp_rank")
    dp_size = None if dp_size is None else whole_number(dp_size, "dp_size")
    if dp_rank is not None and dp_rank < 0:
        raise InvalidInput(f"dp_rank {dp_rank} must be greater than or equal to 0")
    if dp_size is not None and dp_size < 1:
        raise InvalidInput(f"dp_size {dp_size} must be at least 1")
    if dp_rank is not None:
        if dp_size is not None and dp_rank >= dp_size:
            raise InvalidInput(f"dp_rank {dp_rank} must be less than dp_size {dp_size}")
        return Rank(dp_rank, dp_size or 0)
    world = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world and dp_size in (None, torch.distributed.get_world_size()):
        return Rank(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if dp_size in (None, 1):
        return Rank(None if dp_size is None else 0, dp_size or 0)
    raise InvalidInput(f"dp_size {dp_size}: name dp_rank as well, torch.distributed does not say which rank this is")
