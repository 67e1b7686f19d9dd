"""A dense linear with nothing to pad, group, add up or draw: its steps without any detour.

The same as :class:`fp8core.chain.linear.LinearLink` does for such a call, bit for bit, with a
twelfth less Python in a small layer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import Operand, Parts
from fp8core.chain.call import Call
from fp8core.chain.stored import is_stored_as, take_operands
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Cast
from fp8core.tensors.scaling import DelayedState, update_after_backward
from fp8core.tensors.weights import WeightPair, WeightQuantizer
from fp8core.torch_ops import operators

__all__ = ["PlainLinear", "grad_input_of"]


class PlainLinear:
    """``y[m, n] = x[m, k] @ w[n, k].T + bias[n]`` for one answer to whose gradients are needed.

    ``cast_grad`` is None where the bias alone needs one, ``pair`` where input and weight are cast
    apart. ``grad_dtypes`` are those of grad_input, where dgrad is told, and of the parameters'
    gradients. ``grad_plan`` is how a gradient that comes quantized has to be stored to be taken.
    """

    frees_early = True

    __slots__ = (
        "_backward_state",
        "_cast_grad",
        "_cast_input",
        "_dgrad",
        "_fprop",
        "_grad_dtypes",
        "_grad_plan",
        "_has_bias",
        "_needs_bias",
        "_needs_input",
        "_needs_weight",
        "_pair",
        "_weight",
        "_wgrad",
    )

    def __init__(
        self,
        needs: Sequence[bool],
        casts: tuple[Cast, Cast | None],
        weight: WeightQuantizer,
        gemms: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]],
        *,
        pair: WeightPair | None,
        grad_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
        grad_plan: TensorPlan | None,
        backward_state: DelayedState | None,
    ) -> None:
        self._needs_input, self._needs_weight, *bias = needs
        self._has_bias = bool(bias)
        self._needs_bias = True in bias
        self._cast_input, self._cast_grad = casts
        self._weight = weight
        self._pair = pair if self._needs_input and self._needs_weight else None
        self._fprop, self._dgrad, self._wgrad = gemms
        self._grad_dtypes = grad_dtypes
        self._grad_plan = grad_plan
        self._backward_state = backward_state

    def forward(
        self, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        """Return y and what backward needs: the columnwise input, then the columnwise weight."""
        weight, keeping = params[0], call.keeping
        if self._pair is None:
            x_row, x_column = self._cast_input(x)
            w_row, w_column = self._weight(
                weight, columnwise=self._needs_input, keeping=keeping, source=weight
            )
        else:
            (x_row, x_column), (w_row, w_column) = self._pair(x, weight, keeping)
        y: torch.Tensor = self._fprop(x_row, w_row, bias=params[1] if self._has_bias else None)
        if not self._needs_input:
            return y, x_column if self._needs_weight else ()
        return y, (*x_column, *w_column) if self._needs_weight else w_column

    def takes(self, grad_output: torch.Tensor, call: Call) -> bool:
        """Whether ``grad_output`` is stored quantized as its cast would make it."""
        return self._cast_grad is not None and is_stored_as(grad_output, self._grad_plan)

    def backward(
        self, grad_output: torch.Tensor, saved: list[torch.Tensor | None], call: Call
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the parameters; empties ``saved``."""
        input_dtype, weight_dtype, bias_dtype = self._grad_dtypes
        grad_bias = grad_input = grad_weight = None
        stored = None
        if isinstance(grad_output, QuantizedTensor):
            stored = take_operands(grad_output, self._needs_input, self._needs_weight)
            grad_output = grad_output.dequantize()
        if self._needs_bias:
            grad_bias = operators.column_sums(grad_output).to(bias_dtype)
        if self._cast_grad is not None:
            if self._backward_state is not None:
                update_after_backward(self._backward_state, call.backward_pass)
            dy_row, dy_column = stored or self._cast_grad(grad_output)
            if self._needs_input:
                at = 3 if self._needs_weight else 0
                w_column: Any = saved[at:]
                grad_input = grad_input_of(dy_row, Operand(*w_column), self._dgrad, input_dtype)
                del dy_row, w_column, saved[at:]  # not needed while grad_weight is made
            if self._needs_weight:
                grad_weight = self._wgrad(dy_column, Operand(*saved))  # type: ignore[arg-type]  # data is saved
                if grad_weight.dtype != weight_dtype:
                    grad_weight = grad_weight.to(weight_dtype)
        if self._has_bias:
            return grad_input, grad_weight, grad_bias
        return grad_input, grad_weight


def grad_input_of(
    dy: Operand | Parts, weight: Operand, dgrad: Callable[..., Any], dtype: torch.dtype
) -> torch.Tensor:
    """Return ``[m, n] x [k, n] -> [m, k]``; into a tensor of ``dtype`` if ``dy`` is in parts."""
    made: torch.Tensor
    if isinstance(dy, Operand):
        made = dgrad(dy, weight)
        return made
    made = weight.data.new_empty((dy.rows, weight.data.shape[0]), dtype=dtype)
    for start, end, part in dy:
        dgrad(part, weight, out=made[start:end])
    return made
