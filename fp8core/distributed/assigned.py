"""``load_state_dict(assign=True)`` of a model whose weights FSDP2 gathers quantized.

With ``assign=True`` torch puts the tensors of the state_dict in the place of the parameters. A
plain one in the place of a shard would be gathered in high precision, into memory that FSDP2 keeps
for codes. So each becomes a shard that is gathered quantized, over the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fp8core.distributed.gathered_weight import GatheredWeight
from fp8core.errors import OperandError
from fp8core.tensors.sharded_weight import ShardedWeight, local_part

__all__ = ["wrap_assigned"]


def wrap_assigned(
    module: torch.nn.Module, weights: Mapping[tuple[torch.nn.Module, str], GatheredWeight]
) -> None:
    """Have ``module`` wrap what is assigned to those of ``weights``, by module and name, that are
    in it or below it: all of them, or, where one does not fit, none."""

    def hook(
        module: torch.nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *others: object,
    ) -> None:
        if not local_metadata.get("assign_to_params_buffers", False):
            return
        wrapped = {}
        for path, inner in module.named_modules():
            for name in inner._parameters:
                weight, key = weights.get((inner, name)), prefix + f"{path}.{name}".lstrip(".")
                if weight is not None and isinstance(state_dict.get(key), torch.Tensor):
                    wrapped[key] = _wrapped(key, state_dict[key], weight)
        state_dict.update(wrapped)  # torch's copy of the user's

    module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]  # torch's


def _wrapped(key: str, value: torch.Tensor, weight: GatheredWeight) -> torch.Tensor:
    """Return ``value`` as a shard that is gathered as ``weight`` is.

    Raises:
        OperandError: it is no shard of the size, dtype and mesh of the weight's.
    """
    held = weight.held
    local, expected = local_part(value.detach()), local_part(held.detach())
    if isinstance(value, DTensor) != isinstance(held, DTensor):
        problem = f"a {type(value).__name__}; the parameter is a {type(held).__name__}"
    elif local.dtype != expected.dtype or local.shape != expected.shape:
        problem = (
            f"a shard {local.dtype} {list(local.shape)}; the parameter's is {expected.dtype} "
            f"{list(expected.shape)}"
        )
    elif isinstance(value, DTensor) and isinstance(held, DTensor) and not _lies_as(value, held):
        problem = f"on {value.device_mesh} as {value.placements}; the parameter lies on "
        problem += f"{held.device_mesh} as {held.placements}"
    else:
        plain = local.value if isinstance(local, ShardedWeight) else local
        return torch.nn.Parameter(weight.placed(plain, value), held.requires_grad)
    raise OperandError(
        f"load_state_dict(assign=True): {key} is {problem}. Only a tensor with the size, dtype and "
        f"placement of the parameter can take the place of a weight that gather_quantized has "
        f"prepared. Leave out assign=True, which copies and converts; for whole tensors take "
        f"torch.distributed.checkpoint.state_dict.set_model_state_dict."
    )


def _lies_as(value: DTensor, held: DTensor) -> bool:
    return value.device_mesh == held.device_mesh and value.placements == held.placements
