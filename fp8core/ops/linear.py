"""The linear op: three GEMMs over three quantized tensors, dense or grouped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Operand
from fp8core.dispatch.select import Choice
from fp8core.ops.padding import LayerPadding, PaddedCall
from fp8core.ops.protocol import Backward, Call, Forward, Saved
from fp8core.quantizer import PerGroup, Quantizer
from fp8core.scaling import DelayedState, update_after_backward

__all__ = ["LinearOp", "LinearShape"]

_NOT_SAVED: Saved = (None, None, None)


class LinearShape(NamedTuple):
    """What a linear layer is, apart from its recipe; ``groups`` is 0 for a dense layer."""

    in_features: int
    out_features: int
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    groups: int = 0

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return self.groups or 1

    @property
    def num_params(self) -> int:
        """The number of weights and biases."""
        return self.num_weights * (1 if self.bias_dtype is None else 2)


@dataclass(frozen=True, slots=True, eq=False)
class LinearOp:
    """``y[m, n] = x[m, k] @ w[n, k].T + bias[n]``, or the same for each group of rows.

    Parameters come as ``(weight, bias)``, or ``(*weights, *biases)`` for a grouped op, without
    biases where ``shape.bias_dtype`` is None. ``choices`` says, by GEMM and tensor, who computes.
    """

    shape: LinearShape
    input: Quantizer
    weight: Quantizer | PerGroup
    grad_output: Quantizer
    fprop: Callable[..., Any]
    dgrad: Callable[..., Any]
    wgrad: Callable[..., Any]
    padding: LayerPadding | None
    backward_state: DelayedState | None
    is_stochastic: bool
    choices: dict[str, Choice]
    num_weights: int
    num_params: int

    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Quantizer | None = None,
    ) -> Forward:
        """Compute y; save the columnwise input for wgrad and the columnwise weight for dgrad."""
        count = self.num_weights
        weights, biases, groups = params[:count], params[count:], call.groups
        rows = x.shape[0]
        padded = None if self.padding is None else self.padding.for_call(rows, call)
        if padded is not None:
            groups = padded.groups
            x = padded.pad_input(x)
            weights, biases = padded.pad_weights(weights), padded.pad_biases(biases)
        need_input, need_weight = needs[0], True in needs[1 : 1 + count]
        x_row, x_column = self.input(x, groups, columnwise=need_weight)
        is_grouped = bool(self.shape.groups)
        weight: Any = weights if is_grouped else weights[0]
        w_row, w_column = self.weight(weight, columnwise=need_input)
        bias: Any = (biases if is_grouped else biases[0]) if biases else None
        y: Any = self.fprop(x_row, w_row, *groups, bias=bias)  # [m, k] x [n, k] -> [m, n]
        if padded is not None:
            y = padded.cut(y, rows, self.shape.out_features)
        saved = [*(x_column if need_weight else _NOT_SAVED)]
        if need_input:
            for operand in w_column if is_grouped else (w_column,):
                saved.extend(operand)
        result: Any = y if out is None else out(y)
        return Forward(result, saved, padded)

    def backward(
        self,
        grad_output: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
    ) -> Backward:
        """Compute grad_input by dgrad, grad_weight by wgrad, each only if needed."""
        count = self.num_weights
        need_input, needed_weights = needs[0], needs[1 : 1 + count]
        need_weight = True in needed_weights
        grad_biases = self._grad_biases(grad_output, call, needs[1 + count :])
        if not (need_input or need_weight):
            return Backward(None, (*[None] * count, *grad_biases))
        padded = context if isinstance(context, PaddedCall) else None
        rows, groups, dy = grad_output.shape[0], call.groups, grad_output
        if padded is not None:
            groups, dy = padded.groups, padded.pad_grad_output(dy)
        rng = call.rng if self.is_stochastic else None
        dy_row, dy_column = self.grad_output(
            dy, groups, rowwise=need_input, columnwise=need_weight, rng=rng
        )
        if self.backward_state is not None:
            update_after_backward(self.backward_state)
        grad_input: Any = None
        grad_weights: Sequence[torch.Tensor | None] = [None] * count
        if need_input:
            grad_input = self.dgrad(dy_row, self._saved_weight(saved), *groups)
        if need_weight:
            made = self.wgrad(dy_column, Operand(*saved[:3]), *groups)  # type: ignore[arg-type]  # data is saved
            grad_weights = self._grad_weights(made, needed_weights)
        if padded is not None and grad_input is not None:
            grad_input = padded.cut(grad_input, rows, self.shape.in_features)
        return Backward(grad_input, (*grad_weights, *grad_biases))

    def _saved_weight(self, saved: Saved) -> Operand | list[Operand]:
        operands = [Operand(*saved[i : i + 3]) for i in range(3, len(saved), 3)]  # type: ignore[arg-type]  # data is saved
        return operands if self.shape.groups else operands[0]

    def _grad_weights(self, made: Any, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        n, k = self.shape.out_features, self.shape.in_features
        grads = made if self.shape.groups else (made,)
        return [
            grad[:n, :k].to(self.shape.weight_dtype) if need else None
            for grad, need in zip(grads, needed, strict=True)
        ]

    def _grad_biases(
        self, grad_output: torch.Tensor, call: Call, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Sum the unquantized gradient over the rows, in float32."""
        dtype = self.shape.bias_dtype
        if dtype is None or True not in needs:
            return [None] * len(needs)
        wide = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
        parts = torch.split(grad_output, list(call.splits)) if self.shape.groups else (grad_output,)
        return [
            part.sum(0, dtype=wide).to(dtype) if needed else None
            for part, needed in zip(parts, needs, strict=True)
        ]
