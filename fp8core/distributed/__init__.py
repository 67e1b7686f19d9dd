"""What a training over several ranks needs besides its layers."""

from __future__ import annotations

from fp8core.distributed.context_parallel import (
    gather_from_cp_ranks,
    get_batch_on_this_cp_rank,
    pad_thd_sequences_for_cp,
    thd_get_partitioned_indices,
)

__all__ = [
    "gather_from_cp_ranks",
    "get_batch_on_this_cp_rank",
    "pad_thd_sequences_for_cp",
    "thd_get_partitioned_indices",
]
