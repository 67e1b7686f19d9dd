"""Training over several ranks: FSDP2, tensor-parallel styles, experts, checkpoints, failures.

Loaded when it is first named, ``fp8core.distributed``, as it loads torch's DTensor.
"""

from __future__ import annotations

from fp8core.distributed.expert_parallel import Experts, TokenExchange
from fp8core.distributed.failures import watch_ranks
from fp8core.distributed.fsdp import gather_quantized
from fp8core.distributed.sharded_state import ShardLayout, shard_layout, sharded_state_dict
from fp8core.distributed.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from fp8core.training.context_parallel import (
    gather_from_cp_ranks,
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    pad_thd_sequences_for_cp,
    thd_get_partitioned_indices,
)

__all__ = [
    "ColwiseParallel",
    "Experts",
    "PrepareModuleInput",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardLayout",
    "TokenExchange",
    "gather_from_cp_ranks",
    "gather_quantized",
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "pad_thd_sequences_for_cp",
    "shard_layout",
    "sharded_state_dict",
    "thd_get_partitioned_indices",
    "watch_ranks",
]
