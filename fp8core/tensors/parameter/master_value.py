"""The value that a master starts with, and the test that a parameter is its master, rounded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fp8core.errors import OperandError
from fp8core.reporting import log_once
from fp8core.tensors.parameter.shared_grad import Stepping, share_grad
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import local_part

__all__ = ["fits", "forget_initial_values", "is_rounded", "make_master"]


def make_master(parameter: torch.nn.Parameter, name: str, stepping: Stepping) -> torch.Tensor:
    """Return the float32 tensor to step for ``parameter``: itself if it has that precision.

    Raises:
        OperandError: the parameter is on the meta device.
    """
    stored: torch.Tensor = parameter
    is_quantized = isinstance(stored, QuantizedTensor)
    if not is_quantized and stored.dtype not in (torch.bfloat16, torch.float16):
        return stored
    if stored.is_meta:
        raise OperandError(
            f"MasterWeights of a model with {name!r} on the meta device: make it after to_empty() "
            f"and the initialization, or loading, of the values."
        )
    if isinstance(stored, QuantizedTensor):
        value = _initial_value(stored)
    else:
        value = stored.detach().float()
    return share_grad(value.requires_grad_(), stored, name, stepping)


@torch.no_grad()
def _initial_value(parameter: QuantizedTensor) -> torch.Tensor:
    """Return the initial value that was kept, or, if the parameter was written since, its value."""
    kept = parameter.get_high_precision_init_val()
    if kept is not None:
        kept = kept.to(parameter.device)
        if is_rounded(kept, parameter):
            return kept.to(torch.float32, copy=True)
        log_once(
            "MasterWeights: a quantized parameter was written after its initial value was kept, as "
            "a checkpoint does it; such masters start as the parameters' values."
        )
    return parameter.dequantize(torch.float32)


def forget_initial_values(parameters: Iterable[torch.Tensor]) -> None:
    """Free the initial values that quantized parameters kept, once all masters have theirs."""
    for parameter in parameters:
        if isinstance(parameter, QuantizedTensor):
            parameter.clear_high_precision_init_val()


def fits(master: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether both have the same shape and are on the same device."""
    return (parameter.shape, parameter.device) == (master.shape, master.device)


# By how much scales that are no powers of two may change when stored values are quantized again.
_SCALE_MOVES = 8 * 2.0**-24


@torch.no_grad()
def is_rounded(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether writing ``value`` to ``parameter`` changes nothing; waits for the device."""
    stored = parameter.detach()
    again = stored.clone()
    again.copy_(value)
    expected, present = local_part(again.float()), local_part(stored.float())
    if torch.allclose(expected, present, _SCALE_MOVES, 0.0, equal_nan=True):
        return True
    # Codes whose scale does not follow from their amax change when they are quantized again.
    return isinstance(stored, QuantizedTensor) and torch.equal(present, value.float())
