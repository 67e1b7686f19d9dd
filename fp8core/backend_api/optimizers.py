"""Steps of optimizers, for all parameters at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fp8core.backend_api.descriptor_text import dtype_text, text

MASTER_KINDS: tuple[str, ...] = ("none", "float32", "remainder")
"""Where the values that are stepped lie: in the parameter; in a float32 tensor beside it; in the
parameter, bfloat16, and the 16 bits that it lacks."""


@dataclass(frozen=True, slots=True)
class AdamDesc:
    """``adam(grads, params, exp_avgs, exp_avg_sqs, masters, *, lr, beta1, beta2, eps, weight_decay,
    step, bias_correction=True, inv_scale=1.0, found_inf=None) -> None``: a step of Adam.

    Lists of as many tensors, those of one parameter of one shape, of any strides; all are updated
    in place but ``grads``. ``masters`` is empty where there are none. ``step`` is the number of
    this step, from 1 on; gradients are multiplied by ``inv_scale`` first. ``lr``, ``step`` and
    ``inv_scale`` are numbers, or tensors of one element on the device, float32, and int32 for
    ``step``. ``found_inf``, float32 or int32 ``[1]`` on the device or None: if it is not 0, nothing
    is updated. In float32, p the value stepped::

        g = grad * inv_scale   (+ weight_decay * p without ``decoupled``)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        update = (m / (1 - beta1**step)) / (sqrt(v / (1 - beta2**step)) + eps)
        p = p - lr * (update   (+ weight_decay * p with ``decoupled``))

    without the two divisions by ``1 - beta**step`` if ``bias_correction`` is False. ``m``, ``v``
    and ``p`` are rounded once to their dtypes, the parameter from the new ``p``.

    Attributes:
        dtype: of the parameters.
        grad_dtype: of the gradients.
        state_dtype: of both averages, float32 or bfloat16.
        master: ``"float32"``: ``masters`` are float32, hold p, and the parameter is p rounded.
            ``"remainder"``: parameters are bfloat16, ``masters`` int16; the bits of p are
            ``(bits(param) << 16) + remainder``: the parameter is p rounded to nearest, halves away
            from zero, the remainder the lower 16 bits, as a signed number. ``"none"``: the
            parameter is p, and there are no masters.
        decoupled: weight decay as AdamW has it.
    """

    op: ClassVar[str] = "adam"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    grad_dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    master: str = "none"
    decoupled: bool = True

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype), dtype_text(self.grad_dtype))
