"""Steps of optimizers, one parameter after the other, in float32 throughout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fp8core.backend_api import AdamDesc

__all__ = ["adam"]

Tensors = Sequence[torch.Tensor]
Number = float | torch.Tensor


def adam(
    desc: AdamDesc,
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Number,
    bias_correction: bool = True,
    inv_scale: Number = 1.0,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Update all tensors but the gradients in place; see the backend API."""
    lr, inv_scale, step = _scalar(lr), _scalar(inv_scale), _scalar(step)
    count = step.double() if isinstance(step, torch.Tensor) else step
    divisors = [1.0 - beta**count if bias_correction else 1.0 for beta in (beta1, beta2)]
    # A scalar parameter would become float64 with divisors of float64.
    divisors = [
        divisor.float() if isinstance(divisor, torch.Tensor) else divisor for divisor in divisors
    ]
    sets = itertools.zip_longest(grads, params, exp_avgs, exp_avg_sqs, masters)
    for grad, param, exp_avg, exp_avg_sq, master in sets:
        value = _stepped_value(desc, param, master)
        g = grad.float() * inv_scale
        if not desc.decoupled:
            g = g + weight_decay * value
        m = beta1 * exp_avg.float() + (1 - beta1) * g
        v = beta2 * exp_avg_sq.float() + (1 - beta2) * g * g
        update = (m / divisors[0]) / ((v / divisors[1]).sqrt() + eps)
        if desc.decoupled:
            update = update + weight_decay * value
        _write(exp_avg, m, found_inf)
        _write(exp_avg_sq, v, found_inf)
        _write_value(desc, param, master, value - lr * update, found_inf)


def _scalar(number: Number) -> Number:
    """Return a tensor of one element without dimensions, which parameters without any need."""
    return number.reshape(()) if isinstance(number, torch.Tensor) else number


def _stepped_value(
    desc: AdamDesc, param: torch.Tensor, master: torch.Tensor | None
) -> torch.Tensor:
    """Return the value that is stepped, float32."""
    if master is None:
        return param.float()
    if desc.master == "float32":
        return master
    bits = (param.view(torch.int16).to(torch.int32) << 16) + master.to(torch.int32)
    return bits.view(torch.float32)


def _write_value(
    desc: AdamDesc,
    param: torch.Tensor,
    master: torch.Tensor | None,
    value: torch.Tensor,
    found_inf: torch.Tensor | None,
) -> None:
    """Write the value after the step to the parameter and to its master."""
    if master is None or desc.master == "float32":
        _write(param, value, found_inf)
        if master is not None:
            _write(master, value, found_inf)
        return
    value = value.masked_fill(value.isnan(), torch.nan)  # whose lower bits are 0
    bits = value.view(torch.int32)
    remainder = bits.to(torch.int16)  # the lower bits, as a signed number
    upper = ((bits - remainder.to(torch.int32)) >> 16).to(torch.int16)
    _write(param, upper.view(torch.bfloat16), found_inf)
    _write(master, remainder, found_inf)


def _write(to: torch.Tensor, value: torch.Tensor, found_inf: torch.Tensor | None) -> None:
    """Copy ``value`` unless ``found_inf`` says that nothing is to be updated."""
    if found_inf is not None:
        value = torch.where(found_inf.reshape(()) != 0, to, value.to(to.dtype))
    to.copy_(value)
