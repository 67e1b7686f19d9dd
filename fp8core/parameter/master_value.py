"""What a master starts as, and whether a parameter is still its master, rounded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core.parameter.shared_grad import Stepping, share_grad
from fp8core.reporting import log_once
from fp8core.tensors.quantized_tensor import QuantizedTensor

__all__ = ["fits", "forget_initial_values", "is_rounded", "make_master"]


def make_master(parameter: torch.nn.Parameter, name: str, stepping: Stepping) -> torch.Tensor:
    """Return the float32 tensor to step for ``parameter``: itself, if it is no coarser.

    Raises:
        OperandError: the parameter is on the meta device.
    """
    own: torch.Tensor = parameter
    is_quantized = isinstance(own, QuantizedTensor)
    if not is_quantized and own.dtype not in (torch.bfloat16, torch.float16):
        return own
    if own.is_meta:
        raise OperandError(
            f"MasterWeights of a model with {name!r} on the meta device: make it after to_empty() "
            f"and the initialization, or loading, of the values."
        )
    value = _initial_value(own) if isinstance(own, QuantizedTensor) else own.detach().float()
    return share_grad(value.requires_grad_(), own, name, stepping)


@torch.no_grad()
def _initial_value(parameter: QuantizedTensor) -> torch.Tensor:
    """Return the value that was kept, unless the parameter was written since: then its own."""
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
    """Free the values that quantized parameters kept, once all masters are made."""
    for parameter in parameters:
        if isinstance(parameter, QuantizedTensor):
            parameter.clear_high_precision_init_val()


def fits(master: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether both have the same shape and are on the same device."""
    return (parameter.shape, parameter.device) == (master.shape, master.device)


# Scales that are no powers of two may move by this much when what was stored is quantized again.
_SCALE_MOVES = 8 * 2.0**-24


@torch.no_grad()
def is_rounded(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether ``parameter`` is what writing ``value`` to it gives; waits for the device."""
    stored = parameter.detach()
    again = stored.clone()
    again.copy_(value)
    expected, found = _local(again.float()), _local(stored.float())
    if torch.allclose(expected, found, _SCALE_MOVES, 0.0, equal_nan=True):
        return True
    # Codes that came with another scale than their amax gives are not stable under quantization.
    return isinstance(stored, QuantizedTensor) and torch.equal(found, value.float())


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
