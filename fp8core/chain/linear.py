"""The linear link: three GEMMs over three quantized tensors, dense or grouped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import GemmDesc, Operand
from fp8core.chain.main_grad import Accumulating, accumulate
from fp8core.chain.once import OnlyOnce
from fp8core.chain.padding import LayerPadding, PaddedCall
from fp8core.chain.plain import PlainLinear, grad_input_of
from fp8core.chain.protocol import Backward, Call, Forward, Handed, Saved, Want
from fp8core.dispatch.select import Choice
from fp8core.tensors.quantizer import Cast, Quantizer
from fp8core.tensors.scaling import DelayedState, update_after_backward
from fp8core.tensors.weights import WeightQuantizer

__all__ = ["LinearLink", "LinearShape", "turning"]


def turning(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return dgrad or wgrad ``run`` for a second operand, or one a group, that is still to be
    turned: ``[k, n]``."""

    def turned(a: Operand, b: Any, *groups: torch.Tensor) -> Any:
        if isinstance(b, Operand):
            return run(a, Operand(b.data.t()), *groups)
        return run(a, [Operand(own.data.t()) for own in b], *groups)

    return turned


_NOT_SAVED: Saved = (None, None, None)


class LinearShape(NamedTuple):
    """What a linear layer is, apart from its recipe; ``groups`` is 0 for a dense layer.

    ``accumulates``: weight gradients are added to ``weight.main_grad``. ``offsets_on_device``: the
    host never reads the sizes of the groups.
    """

    in_features: int
    out_features: int
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    groups: int = 0
    accumulates: bool = False
    offsets_on_device: bool = False

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return self.groups or 1

    @property
    def num_params(self) -> int:
        """The number of weights and biases."""
        return self.num_weights * (1 if self.bias_dtype is None else 2)


@dataclass(frozen=True, slots=True, eq=False)
class LinearLink:
    """``y[m, n] = x[m, k] @ w[n, k].T + bias[n]``, or the same for each group of rows.

    Parameters come as ``(weight, bias)``, or ``(*weights, *biases)`` for a grouped link, without
    biases where ``shape.bias_dtype`` is None. ``input_dtype`` and ``grad_dtype`` are what the
    neighbours hand over. ``index`` tells the linears of one chain apart. ``choices`` says, by GEMM
    and tensor, who computes. ``takes_parts``: whoever made the gradient of the output keeps it, so
    that its cast may take its time.
    """

    shape: LinearShape
    input: Quantizer
    weight: WeightQuantizer
    grad_output: Quantizer
    fprop: Callable[..., Any]
    dgrad: Callable[..., Any]
    wgrad: Callable[..., Any]
    padding: LayerPadding | None
    backward_state: DelayedState | None
    needs_rng: bool
    input_dtype: torch.dtype
    grad_dtype: torch.dtype
    index: int
    choices: dict[str, Choice]
    num_weights: int
    num_params: int
    takes_parts: bool = False
    only_once: OnlyOnce | None = None
    # What is the same in every call without padding, by whose gradients are needed: after None how
    # the link runs alone, after False what it wants of its input, after True of its gradient.
    _made: dict[Any, Any] = field(default_factory=dict)

    @property
    def grad_input_dtype(self) -> torch.dtype:
        """The dtype that dgrad is told to compute."""
        desc = self.choices["dgrad"].desc
        assert isinstance(desc, GemmDesc)
        return desc.out_dtype

    def alone(self, rows: int, needs: Sequence[bool], call: Call) -> PlainLinear | None:
        """Return the way without detours of a dense call that needs no padding."""
        if self.needs_rng or call.groups or self.shape.accumulates:
            return None
        if self.padding is not None and self.padding.for_call(rows, call):
            return None
        in_parts = self._parts_help(rows)
        key = (None, in_parts, *needs)
        return self._made.get(key) or self._plain_linear(key, needs, in_parts)

    def _plain_linear(
        self, key: tuple[bool | None, ...], needs: Sequence[bool], in_parts: bool
    ) -> PlainLinear:
        rowwise, columnwise = needs[0], needs[1]
        cast_input = self.input.cast_to(rowwise=True, columnwise=columnwise)
        casts = (cast_input, self._cast_grad(rowwise, columnwise, in_parts))
        gemms = (self.fprop, self.dgrad, self.wgrad)
        dtypes = (self.grad_input_dtype, self.shape.weight_dtype, self.shape.bias_dtype)
        made = PlainLinear(
            needs,
            casts,
            self.weight,
            gemms,
            pair=self.weight.beside(self.input),
            grad_dtypes=dtypes,
            grad_plan=self.grad_output.plan,
            backward_state=self.backward_state,
        )
        self._made[key] = made
        return made

    def _parts_help(self, rows: int) -> bool:
        """Say whether parts of a gradient lower the peak of memory; nothing that a graph captures
        takes parts, so no graph is guarded by its rows.

        While dgrad runs there are the rowwise codes and those of the weight, ``rows n + k n``
        bytes; while wgrad does, at least the ``2 k n`` bytes of grad_weight instead.
        """
        return self.takes_parts and rows > self.shape.in_features

    def _cast_grad(self, rowwise: bool, columnwise: bool, in_parts: bool) -> Cast | None:
        """Return the call that casts a gradient with nothing to pad, group or draw."""
        if in_parts and rowwise and columnwise:
            return self.grad_output.cast_in_parts()
        if rowwise or columnwise:
            return self.grad_output.cast_to(rowwise=rowwise, columnwise=columnwise)
        return None

    def wants(self, rows: int, needs: Sequence[bool], call: Call) -> Want:
        """Want the input quantized: rowwise for fprop, and columnwise if wgrad will run."""
        padded = None if self.padding is None else self.padding.for_call(rows, call)
        if padded is None and not call.groups:
            key = (False, *needs)
            return self._made.get(key) or self._plain(key, needs)
        columnwise = True in needs[1 : 1 + self.num_weights]
        what = (self.input, self.input_dtype)
        return Want(*what, columnwise=columnwise, call=call, padded=padded, rows=rows)

    def wants_grad(self, rows: int, needs: Sequence[bool], call: Call, context: object) -> Want:
        """Want grad_output quantized: rowwise for dgrad, columnwise for wgrad; summed for bias."""
        if self.backward_state is not None and True in needs[: 1 + self.num_weights]:
            update_after_backward(self.backward_state, call.backward_pass)  # the cast records
        if isinstance(context, Accumulating):
            context = context.padded
        padded = context if isinstance(context, PaddedCall) else None
        if padded is None and not call.groups and not self.needs_rng:
            in_parts = self._parts_help(rows)
            key = (True, in_parts, *needs)
            return self._made.get(key) or self._plain_grad(key, needs, in_parts)
        end = 1 + self.num_weights
        need_input, need_weight = needs[0], True in needs[1:end]
        has_sums = True in needs[end:]
        rng = None
        if self.needs_rng and call.rng is not None:
            rng = call.rng + torch.tensor((0, self.index << 32), device="cpu")
        return Want(
            self.grad_output,
            self.grad_dtype,
            rowwise=need_input,
            columnwise=need_weight,
            has_sums=has_sums,
            rng=rng,
            call=call,
            padded=padded,
            is_gradient=True,
            rows=rows,
        )

    def _plain(self, key: tuple[bool, ...], needs: Sequence[bool]) -> Want:
        """Return how a dense call without padding wants its input, the same object each time."""
        columnwise = True in needs[1 : 1 + self.num_weights]
        cast = self.input.cast_to(rowwise=True, columnwise=columnwise)
        want = Want(self.input, self.input_dtype, columnwise=columnwise, cast=cast)
        self._made[key] = want
        return want

    def _plain_grad(self, key: tuple[bool, ...], needs: Sequence[bool], in_parts: bool) -> Want:
        """Return how the backward of such a call wants the gradient, without a seed."""
        end = 1 + self.num_weights
        rowwise, columnwise, has_sums = needs[0], True in needs[1:end], True in needs[end:]
        cast = self._cast_grad(rowwise, columnwise, in_parts)
        what = (self.grad_output, self.grad_dtype, rowwise, columnwise, has_sums)
        want = Want(*what, is_gradient=True, cast=cast)
        self._made[key] = want
        return want

    def forward(
        self,
        x: Handed,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Compute y; save the columnwise input for wgrad and the columnwise weight for dgrad."""
        count, padded, groups = self.num_weights, x.padded, call.groups
        is_grouped = bool(self.shape.groups)
        source: Any = params[:count] if is_grouped else params[0]
        biases: Any = params[count:]
        weight = source
        if padded is not None:
            groups = padded.groups
            made, biases = padded.pad_weights(params[:count]), padded.pad_biases(biases)
            weight = made if is_grouped else made[0]
        w_row, w_column = self.weight(
            weight, columnwise=needs[0], keeping=call.keeping, source=source
        )
        bias = None if not biases else biases if is_grouped else biases[0]
        x_row, x_column = x.take()
        y: Any = self.fprop(x_row, w_row, *groups, bias=bias)  # [m, k] x [n, k] -> [m, n]
        x_row = w_row = None  # not needed while the next link quantizes y
        if padded is not None:
            y = padded.cut(y, x.rows, self.shape.out_features)
        saved: Saved = _NOT_SAVED if x_column is None else x_column
        if needs[0]:
            turned = itertools.chain(*w_column) if is_grouped else w_column
            saved = (*saved, *turned)
        kept = Accumulating(padded, tuple(params[:count])) if self.shape.accumulates else padded
        return Forward(y if out is None else out(y), saved, kept)

    def backward(
        self,
        grad: Handed,
        saved: list[torch.Tensor | None],
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Compute grad_input by dgrad, grad_weight by wgrad, each only if needed."""
        end = 1 + self.num_weights
        groups = call.groups if grad.padded is None else grad.padded.groups
        dy_row, dy_column = grad.take()
        grad_input: Any = None
        grad_weights: Sequence[torch.Tensor | None] = [None] * self.num_weights
        if needs[0]:
            weight: Any = self._saved_weight(saved)
            if groups:
                grad_input = self.dgrad(dy_row, weight, *groups)  # [m, n] x [k, n] -> [m, k]
            else:
                grad_input = grad_input_of(dy_row, weight, self.dgrad, self.grad_input_dtype)
            weight = None
            dy_row = None  # not needed while grad_weight is made
            del saved[3:]
            if grad.padded is not None:
                grad_input = grad.padded.cut(grad_input, grad.rows, self.shape.in_features)
            grad_input = grad_input if out is None else out(grad_input)
        if dy_column is not None:
            x_column = Operand(*saved[:3])  # type: ignore[arg-type]  # data is saved
            operands = (dy_column, x_column, *groups)  # [n, m] x [k, m] -> [n, k]
            if isinstance(context, Accumulating):
                is_grouped = bool(self.shape.groups)
                grad_weights = accumulate(
                    self.wgrad, operands, context.weights, needs[1:end], is_grouped
                )
            else:
                grad_weights = self._grad_weights(self.wgrad(*operands), needs[1:end])
        return Backward(grad_input, (*grad_weights, *self._grad_biases(grad.sums, needs[end:])))

    def _saved_weight(self, saved: Saved) -> Operand | list[Operand]:
        if not self.shape.groups:
            return Operand(*saved[3:])  # type: ignore[arg-type]  # data is saved
        return [Operand(*saved[i : i + 3]) for i in range(3, len(saved), 3)]  # type: ignore[arg-type]  # likewise

    def _grad_weights(self, made: Any, needed: Sequence[bool]) -> Sequence[torch.Tensor | None]:
        if not self.shape.groups:
            return (self._fit(made),)
        return [self._fit(grad) if need else None for grad, need in zip(made, needed, strict=True)]

    def _fit(self, grad: torch.Tensor) -> torch.Tensor:
        """Return a weight's gradient without padding and in the weight's dtype."""
        n, k, dtype = self.shape.out_features, self.shape.in_features, self.shape.weight_dtype
        if grad.shape != (n, k):  # asking costs a tenth of slicing to the same shape
            grad = grad[:n, :k]
        return grad if grad.dtype == dtype else grad.to(dtype)

    def _grad_biases(
        self, sums: Sequence[torch.Tensor], needed: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        if not needed:
            return ()
        if not sums:
            return [None] * len(needed)
        return [
            own.to(self.shape.bias_dtype) if need else None
            for own, need in zip(sums, needed, strict=True)
        ]
