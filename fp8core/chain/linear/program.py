"""The operations that a linear is bound to, and its computation, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import GemmDesc, Operand
from fp8core.chain.call import Call
from fp8core.chain.linear.gemms import Decode, in_chunks, in_dtype
from fp8core.chain.linear.spec import LinearSpec
from fp8core.chain.linear.wrappers import operands_of
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Out,
    Params,
    Program,
    Recordable,
    Saved,
    SavedList,
)
from fp8core.chain.request import Handover, QuantizeRequest, is_stored_as
from fp8core.chain.shards import ArrivingRows, GemmPart, Shards, here
from fp8core.dispatch.select import Choice
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Cast, CastAndSum, Orientations, TensorQuantizer
from fp8core.tensors.saving import note_weight
from fp8core.tensors.scaling import update_after_backward
from fp8core.tensors.weights import WeightQuantizer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinearOperations:
    """Three quantizers and three GEMMs, with what each of them is bound to.

    ``input_dtype`` and ``grad_dtype`` are those of the tensors that the neighbours hand over.
    ``choices`` says, by GEMM and tensor, who computes. ``column_sums`` computes the gradient of the
    bias, if there is one. ``backward_state`` is that in which the cast of the gradient records.
    ``decode_input`` and ``decode_weight`` make the operand of wgrad and dgrad from that of fprop,
    None where forward makes both. ``input_shards`` and ``grad_shards`` say how the two tensors
    travel where each rank has some of their rows. ``fprop_part`` and ``dgrad_part`` compute some
    rows of a product, None unless others may travel or be cast meanwhile; ``dgrad_rows`` those of a
    gradient that comes in chunks, None where dgrad itself does. ``wgrad`` adds zeros to operands
    whose rows are no multiple of ``wgrad_rows``.
    """

    shape: LinearSpec
    input: TensorQuantizer
    weight: WeightQuantizer
    grad_output: TensorQuantizer
    fprop: Callable[..., Any]
    dgrad: Callable[..., Any]
    wgrad: Callable[..., Any]
    column_sums: Callable[[torch.Tensor], torch.Tensor] | None
    backward_state: DelayedState | None
    input_dtype: torch.dtype
    grad_dtype: torch.dtype
    choices: dict[str, Choice]
    decode_input: Decode | None = None
    decode_weight: Decode | None = None
    input_shards: Shards | None = None
    grad_shards: Shards | None = None
    fprop_part: GemmPart | None = None
    dgrad_part: GemmPart | None = None
    dgrad_rows: GemmPart | None = None
    wgrad_rows: int = 1

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype that fprop computes."""
        return _out_dtype(self.choices["fprop"])

    @property
    def grad_input_dtype(self) -> torch.dtype:
        """The dtype that dgrad computes."""
        return _out_dtype(self.choices["dgrad"])

    @property
    def grad_weight_dtype(self) -> torch.dtype:
        """The dtype that wgrad computes."""
        return _out_dtype(self.choices["wgrad"])


def _out_dtype(choice: Choice) -> torch.dtype:
    assert isinstance(choice.desc, GemmDesc)
    return choice.desc.out_dtype


_NO_OPERANDS = Orientations(None, None)

# Returns the operand of three tensors without the Python function of a NamedTuple.
_operand: Callable[[SavedList], Operand] = partial(tuple.__new__, Operand)


class LinearProgram(Program):
    """``y[m, n] = x[m, k] @ w[n, k].T + bias[n]`` for one answer to whose gradients are needed.

    ``needs_grad`` is the input's, the weight's and, if there is one, the bias's. With ``chunked``
    the gradient of the output may come cast some rows at a time; with ``casts_chunks`` its own cast
    does that, unless the gradient of the input is computed later. ``sharded`` says of the input and
    of the gradient of the output whether each rank casts its rows, which then travel as codes and
    scales. With ``pads_wgrad`` wgrad adds zeros to its operands.
    """

    __slots__ = (
        *("_backward_state", "_bias_dtype", "_cast_input"),
        *("_casts", "_casts_of_later"),
        *("_dgrad", "_fprop"),
        *("_grad_request", "_has_bias", "_needs_bias", "_needs_input", "_needs_weight", "_pair"),
        *("_decode_input", "_restore", "_weight", "_weight_dtype", "_wgrad"),
        *("_arrives", "_quantizers", "input_request"),
        *("_dgrad_part", "_fprop_part", "_grad_input_dtype", "_output_dtype"),
    )

    def __init__(
        self,
        operations: LinearOperations,
        needs_grad: Sequence[bool],
        weight: WeightQuantizer,
        *,
        chunked: bool = False,
        casts_chunks: bool = False,
        sharded: tuple[bool, bool] = (False, False),
        pads_wgrad: bool = False,
    ) -> None:
        rowwise, columnwise, *bias = needs_grad
        shape = operations.shape
        self._needs_input, self._needs_weight, self._needs_bias = rowwise, columnwise, True in bias
        self._has_bias = shape.bias_dtype is not None
        self._bias_dtype = shape.bias_dtype
        self._weight = weight
        self._weight_dtype = shape.weight_dtype
        restore: Callable[[SavedList], Any] = operands_of if shape.groups else _operand
        self._restore = (
            restore if operations.decode_weight is None else _decoding(restore, operations)
        )
        self._decode_input = operations.decode_input
        self._cast_input = operations.input.cast_to(rowwise=True, columnwise=columnwise)
        self._pair = weight.pair(operations.input) if rowwise and columnwise else None
        self._fprop, self._dgrad = operations.fprop, operations.dgrad
        self._fprop_part, self._dgrad_part = operations.fprop_part, operations.dgrad_part
        self._output_dtype, self._grad_input_dtype = (
            operations.output_dtype,
            operations.grad_input_dtype,
        )
        self._wgrad = in_dtype(operations.wgrad, operations.grad_weight_dtype, shape.weight_dtype)
        chunked = chunked and rowwise and columnwise
        if chunked:
            self._dgrad = in_chunks(
                operations.dgrad, operations.dgrad_rows, operations.grad_input_dtype
            )
        needs = rowwise, columnwise, self._needs_bias
        self._casts_of_later = _casts_of(operations, *needs, chunked=False)
        self._casts = self._casts_of_later
        if chunked and casts_chunks:
            self._casts = _casts_of(operations, *needs, chunked=True)
        self._backward_state = None if self._casts.cast is None else operations.backward_state
        self._quantizers = (operations.input, weight, operations.grad_output)
        self._arrives = operations.input_shards if sharded[0] else None
        self.input_request = QuantizeRequest(
            operations.input,
            operations.input_dtype,
            columnwise=columnwise,
            cast=self._cast_input,
            shards=self._arrives,
        )
        self._grad_request = QuantizeRequest(
            operations.grad_output,
            operations.grad_dtype,
            rowwise,
            columnwise,
            has_sums=self._needs_bias,
            column_sums=operations.column_sums,
            is_gradient=True,
            cast=self._casts.cast,
            cast_and_sum=self._casts.cast_and_sum,
            shards=operations.grad_shards if sharded[1] else None,
            takes_chunks=chunked and not sharded[1],
        )

    @property
    def recordable(self) -> Recordable | None:
        """Return what the casts refer to, and the state in which that of the gradient records."""
        constants: list[torch.Tensor] = []
        for quantizer in self._quantizers:
            if quantizer.constants is None:
                return None
            constants += quantizer.constants
        states = () if self._backward_state is None else (self._backward_state,)
        return Recordable(tuple(constants), states)

    def request_grad(self, call: Call) -> QuantizeRequest:
        """Return the request for grad_output: rowwise for dgrad, columnwise for wgrad, its sums.

        The cast will record an amax, so the update of the scales after backward is ordered first.
        """
        if self._backward_state is not None:
            update_after_backward(self._backward_state, call.backward_pass)
        return self._grad_request

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """Whether ``grad_output`` is stored quantized as its cast would store it."""
        request = self._grad_request
        ways = {"rowwise": request.rowwise, "columnwise": request.columnwise}
        return self._casts.cast is not None and is_stored_as(
            grad_output, request.quantizer.plan, **ways
        )

    def origins(self, saved: Saved) -> Sequence[torch.Tensor | None]:
        """Return the input if it is saved, then the weights if they are."""
        if not self._needs_weight:
            return (None, *saved[::3])
        return saved[::3]

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; save the input for wgrad and the weight for dgrad, each if it is needed."""
        weight, keeping = params[0], call.keeping
        pair = self._pair
        if pair is not None and (
            keeping is not None
            or isinstance(weight, QuantizedTensor)
            or weight.dtype is not self._weight_dtype
        ):
            pair = None  # the weight's quantizer knows kept and stored ones, and refuses a dtype
        if pair is not None and not isinstance(x, Handover):
            (x_row, x_column), (w_row, w_column) = pair(x, weight)
        else:
            x_row, x_column = x.take() if isinstance(x, Handover) else self._cast_input(x)
            w_row, w_column = self._weight(weight, columnwise=self._needs_input, keeping=keeping)
        bias = params[1] if self._has_bias else None
        y: Any = None
        if self._fprop_part is not None:
            y = self._forward_in_parts(x_row, w_row, bias, call, out)
        if y is not None:
            out = None
        elif call.output is None:
            y = self._fprop(x_row, w_row, *call.groups, bias=bias)  # [m, k] x [n, k] -> [m, n]
        else:
            y = self._fprop(x_row, w_row, *call.groups, bias=bias, out=call.output)
        x_row = w_row = None  # freed before the next program quantizes y
        saved: Saved = x_column if self._needs_weight else ()
        if self._needs_input:
            note_weight(w_column)
            saved = (*saved, *w_column)
        return y if out is None else out(y), saved, None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute grad_input by dgrad, grad_weight by wgrad, each only if it is needed.

        ``context``, if given, is called instead of wgrad.
        """
        grad_input = grad_weight = dy_row = dy_column = None
        if isinstance(grad, Handover):
            dy_row, dy_column = grad.take()
            sums = grad.sums
        else:
            sums = ()
            if self._backward_state is not None:
                update_after_backward(self._backward_state, call.backward_pass)
            has_parts = self._dgrad_part is not None
            is_later = has_parts and out is not None and out.is_computed_later
            cast, cast_and_sum = self._casts_of_later if is_later else self._casts
            if cast_and_sum is not None:
                (dy_row, dy_column), total = cast_and_sum(grad)
                sums = (total,)
            elif cast is not None:
                dy_row, dy_column = cast(grad)
        arriving = None
        if self._arrives is not None and self._needs_weight:
            # This rank's part of the input, from all ranks while dgrad runs.
            arriving = self._arrives.start_columnwise(_operand(saved[:3]))
        if self._needs_input:
            at = 3 if self._needs_weight else 0
            weight: Any = self._restore(saved[at:])
            if self._dgrad_part is not None:
                grad_input = self._backward_in_parts(dy_row, weight, call, out)
            if grad_input is not None:
                out = None
            elif call.grad_input is None:
                grad_input = self._dgrad(dy_row, weight, *call.groups)  # [m, n] x [k, n] -> [m, k]
            else:
                grad_input = self._dgrad(dy_row, weight, *call.groups, out=call.grad_input)
            del weight, saved[at:]  # freed before grad_weight is allocated
            dy_row = None
            if out is not None:
                grad_input = out(grad_input)
        if self._needs_weight:
            wgrad = self._wgrad if context is None else context
            if self._dgrad_part is not None:
                dy_column = here(dy_column)
            x_column = _operand(saved) if arriving is None else arriving.wait()
            if self._decode_input is not None:
                x_column = self._decode_input(x_column, *call.groups)
            grad_weight = wgrad(dy_column, x_column, *call.groups)  # [n, m] x [k, m] -> [n, k]
        if not self._has_bias:
            return grad_input, grad_weight
        return grad_input, grad_weight, sums[0].to(self._bias_dtype) if self._needs_bias else None

    def _forward_in_parts(
        self, x_row: Any, w_row: Operand, bias: torch.Tensor | None, call: Call, out: Out
    ) -> Any:
        """Return what ``out`` makes of y, computed some rows at a time while others travel; None if
        y is to be computed as a whole."""
        part, dtype = self._fprop_part, self._output_dtype
        assert part is not None
        if isinstance(x_row, ArrivingRows):
            y = x_row.product(part, w_row, dtype, bias=bias, out=call.output)
            return y if out is None else out(y)
        if bias is not None or call.output is not None or out is None or out.product is None:
            return None
        return out.product(part, x_row, w_row, dtype)

    def _backward_in_parts(self, dy_row: Any, weight: Operand, call: Call, out: Out) -> Any:
        """As :meth:`_forward_in_parts`, of grad_input, which its reader may compute later. Its sum
        over ranks travels beside wgrad, if there is one."""
        part, dtype = self._dgrad_part, self._grad_input_dtype
        assert part is not None
        if isinstance(dy_row, ArrivingRows):
            grad_input = dy_row.product(part, weight, dtype, out=call.grad_input)
            return grad_input if out is None else out(grad_input)
        if call.grad_input is not None or out is None or out.product is None:
            return None
        if (self._needs_weight and not out.is_computed_later) or not isinstance(dy_row, Operand):
            return None
        return out.product(part, dy_row, weight, dtype)


def _decoding(
    restore: Callable[[SavedList], Any], operations: LinearOperations
) -> Callable[[SavedList], Any]:
    """Return ``restore`` for weights that were saved as operands of fprop."""
    decode = operations.decode_weight
    assert decode is not None

    def restored(saved: SavedList) -> Any:
        weights = restore(saved)
        return [*map(decode, weights)] if operations.shape.groups else decode(weights)

    return restored


class _Casts(NamedTuple):
    """The cast of the gradient, None if no operand of it is needed; and that with the gradient of
    the bias in one call, None if that is not needed."""

    cast: Cast | None
    cast_and_sum: CastAndSum | None


def _casts_of(
    operations: LinearOperations,
    rowwise: bool,
    columnwise: bool,
    needs_bias: bool,
    *,
    chunked: bool,
) -> _Casts:
    """Return the casts in these orientations, which are both if they are ``chunked``."""
    quantizer, sums = operations.grad_output, operations.column_sums
    if not (rowwise or columnwise):
        if not needs_bias:
            return _Casts(None, None)
        assert sums is not None  # there is a bias
        only_sums = sums
        return _Casts(None, lambda grad: (_NO_OPERANDS, only_sums(grad)))
    if chunked:
        cast = quantizer.cast_chunked()
    else:
        cast = quantizer.cast_to(rowwise=rowwise, columnwise=columnwise)
    if not needs_bias:
        return _Casts(cast, None)
    assert sums is not None
    if chunked:
        return _Casts(cast, quantizer.cast_chunked_and_sum(sums))
    return _Casts(cast, quantizer.cast_and_sum(sums, rowwise=rowwise, columnwise=columnwise))
