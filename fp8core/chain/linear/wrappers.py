"""The programs around that of a linear, one for each thing that a layer or a call adds to it.

- Groups: the dense program, with one weight and one bias for each group of rows.
- Padding: sizes with zeros added, forward and back; zeros change no sum.
- ``main_grad``: weight gradients added by the GEMM that computes them to a float32 tensor that a
  framework gives each weight, zeroes before a step and reads after it. No gradient in the dtype of
  the weight is made, and microbatches add up in float32. The names are Megatron's.
- ``delay_wgrad_compute``: weight gradients put into the queue of the call instead of computed.
- No codes of the input from forward to backward: the program before makes them again from what it
  saved, or they are cast from the input, saved as it came (``save_original_input``). Where another
  module saves the same tensor anyway, as the norm or the router before several experts does, codes
  of the input would be held in vain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8core.chain.call import Call
from fp8core.chain.delayed_wgrad import DelayedCall, PendingWgrad
from fp8core.chain.padding import PaddedCall
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Out,
    Params,
    Program,
    Recordable,
    Saved,
    SavedList,
    Wrapper,
)
from fp8core.chain.request import Handover, QuantizeRequest, Travel
from fp8core.errors import OperandError
from fp8core.tensors.quantizer import Orientations, Slot, TensorQuantizer
from fp8core.tensors.saving import is_unquantized
from fp8core.torch_ops.capture import left_to_backward


class Grouped(Wrapper):
    """Around a program that takes ``(weights, biases)``: its parameters are in one flat sequence.

    ``needs_grad`` is for those; ``num_weights`` is how many groups there are, and ``rows`` how many
    rows all of them have. ``travels`` say how the operands of the input and of the gradient of the
    output come from several ranks, None where tensors do.
    """

    __slots__ = ("_bias_dtype", "_call", "_grad_arrives", "_needs_grad", "_num_weights", "_rows")

    def __init__(
        self,
        inner: Program,
        needs_grad: Sequence[bool],
        call: Call,
        *,
        rows: int,
        num_weights: int,
        bias_dtype: torch.dtype | None,
        travels: tuple[Travel | None, Travel | None] = (None, None),
    ) -> None:
        assert inner.input_request is not None
        arrives, self._grad_arrives = travels
        request = dataclasses.replace(
            inner.input_request, cast=None, call=call, rows=rows, shards=arrives
        )
        super().__init__(inner, request)
        self._needs_grad = needs_grad
        self._call = call
        self._rows = rows
        self._num_weights = num_weights
        self._bias_dtype = bias_dtype

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the inner request for groups, with the sums of those biases that are trained."""
        request = self._inner.request_grad(call)
        assert request is not None
        return dataclasses.replace(
            request,
            cast=None,
            call=self._call,
            rows=self._rows,
            has_sums=True in self._needs_grad[1 + self._num_weights :],
            shards=self._grad_arrives,
        )

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """Return False: a tensor that is stored quantized has no groups."""
        return False

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute each group by its weight and bias."""
        weights, biases = params[: self._num_weights], params[self._num_weights :]
        return super().forward(x, (weights, biases), call, out)

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Return the gradients of the input, of each weight and of each bias."""
        grad = self._grad(grad, call)
        sums = grad.sums
        grad_input, grads, *_ = self._inner.backward(grad, saved, context, call, out)
        end = 1 + self._num_weights
        needs_weights, needs_biases = self._needs_grad[1:end], self._needs_grad[end:]
        weights = grads if grads is not None else [None] * self._num_weights
        grad_weights = [
            grad if need else None for grad, need in zip(weights, needs_weights, strict=True)
        ]
        grad_biases = [
            total.to(self._bias_dtype) if need else None
            for total, need in zip(sums or needs_biases, needs_biases, strict=True)
        ]
        return (grad_input, *grad_weights, *grad_biases)


class Padded(Wrapper):
    """Around a linear program: pads its inputs as ``padded`` says, and cuts its results.

    ``num_weights`` is how many of the parameters are weights; the others are biases.
    """

    __slots__ = ("_num_weights", "_padded")

    def __init__(self, inner: Program, padded: PaddedCall, call: Call, *, num_weights: int) -> None:
        super().__init__(inner, _padding(inner.input_request, padded, call))
        self.saves_copies = True
        self._padded = padded
        self._num_weights = num_weights

    def request_grad(self, call: Call) -> QuantizeRequest:
        """Return the inner program's request, padded behind the sums."""
        return _padding(self._inner.request_grad(call), self._padded, call)

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """Return False: a tensor that is stored quantized is not padded."""
        return False

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Pad the biases; the weight's quantizer pads weights, the request the input."""
        padded, inner_params = self._padded, params
        if padded.layer.out_features:
            count = self._num_weights
            inner_params = (*params[:count], *map(padded.layer.pad_bias, params[count:]))
        inner_call = call._replace(groups=padded.groups, output=None)
        y, saved, context = super().forward(x, inner_params, inner_call)
        y = padded.cut(y, padded.layer.out_features)
        if call.output is not None:
            y = call.output.copy_(y)
        return y if out is None else out(y), saved, context

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Cut the gradients of the input and of the weights; those of biases are not padded."""
        padded, layer, count = self._padded, self._padded.layer, self._num_weights
        grad = self._grad(grad, call)
        inner_call = call._replace(groups=padded.groups, grad_input=None, grad_sum=None)
        grad_input, *grads = self._inner.backward(grad, saved, context, inner_call)
        if grad_input is not None:
            grad_input = padded.cut(grad_input, layer.in_features)
            if call.grad_input is not None:
                grad_input = call.grad_input.copy_(grad_input)
            if call.grad_sum is not None:
                grad_input = call.grad_sum + grad_input
            grad_input = grad_input if out is None else out(grad_input)
        if context is not None or not layer.is_of_features:  # or added elsewhere
            return (grad_input, *grads)
        cut = [None if grad is None else layer.cut_grad_weight(grad) for grad in grads[:count]]
        return (grad_input, *cut, *grads[count:])


def _padding(request: QuantizeRequest | None, padded: PaddedCall, call: Call) -> QuantizeRequest:
    """Return ``request`` of a linear program for tensors that are padded before their cast."""
    assert request is not None
    return dataclasses.replace(request, cast=None, call=call, padded=padded, rows=padded.unpadded)


class Diverting(Wrapper):
    """Around a linear program: the weights' gradients do not go to autograd.

    With ``accumulates``, ``wgrad(..., out=main_grad)`` adds them up. A missing ``main_grad`` is
    refused in backward, which may be called again once it is there: so nothing is freed early. With
    ``delays``, backward puts wgrad into the queue of the call, if it has one. ``needs_grad`` is the
    weights' alone; ``index`` tells the linears of one chain apart.
    """

    __slots__ = ("_accumulates", "_delays", "_index", "_is_grouped", "_needs_grad", "_wgrad")

    def __init__(
        self,
        inner: Program,
        wgrad: Callable[..., Any],
        needs_grad: Sequence[bool],
        *,
        accumulates: bool,
        delays: bool,
        index: int,
        is_grouped: bool,
    ) -> None:
        super().__init__(inner, inner.input_request)
        self.frees_early = self.frees_early and not accumulates
        self._accumulates, self._delays = accumulates, delays
        self._wgrad = wgrad
        self._needs_grad = needs_grad
        self._index = index
        self._is_grouped = is_grouped

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; backward is told what to do with the operands of wgrad."""
        delayed = call.delayed_wgrads if self._delays else None
        weights, wgrad = params[0] if self._is_grouped else params[:1], self._wgrad
        if delayed is not None:
            weights = [*map(delayed.source, weights)]
            params = (weights if self._is_grouped else weights[0], *params[1:])
        y, saved, context = super().forward(x, params, call, out)
        if self._accumulates:
            grouped = self._is_grouped
            context = wgrad = partial(_add_to_main_grads, wgrad, weights, self._needs_grad, grouped)
        if delayed is not None:
            context = partial(self._put, delayed, wgrad, weights)
        return y, saved, context

    def _put(
        self,
        delayed: DelayedCall,
        run: Callable[..., Any],
        weights: Sequence[torch.Tensor],
        *operands: Any,
    ) -> Any:
        pending = PendingWgrad(run, operands, weights, self._needs_grad, self._is_grouped)
        delayed.put(self._index, pending)
        return [None] * len(weights) if self._is_grouped else None


def _add_to_main_grads(
    wgrad: Callable[..., Any],
    weights: Sequence[torch.Tensor],
    needed: Sequence[bool],
    is_grouped: bool,
    *operands: Any,
) -> Any:
    """Add the gradients that ``wgrad(*operands, out=...)`` computes to each ``main_grad``.

    Returns the gradient for autograd, or a list of them if ``is_grouped``: None, or zeros for a
    weight that has the attribute ``grad_added_to_main_grad``, which is set: its framework has hooks
    that wait for a gradient. Where padding makes the product larger than the weight, or a weight is
    frozen, the sum takes a second pass.

    Raises:
        OperandError: a weight has no ``main_grad`` of float32 and of its shape on its device.
    """
    pairs = list(zip(weights, needed, strict=True))
    sums = [_main_grad(weight) if need else None for weight, need in pairs]
    dy, x, *_ = operands
    shape = dy.data.shape[0], x.data.shape[0]
    if all(sum_ is not None and sum_.shape == shape for sum_ in sums):
        wgrad(*operands, out=sums if is_grouped else sums[0])
    else:
        scratch = [torch.zeros(shape, dtype=torch.float32, device=w.device) for w in weights]
        wgrad(*operands, out=scratch if is_grouped else scratch[0])
        for sum_, grad in zip(sums, scratch, strict=True):
            if sum_ is not None:
                sum_ += grad[: sum_.shape[0], : sum_.shape[1]]
    grads = [_grad_for_autograd(weight) if need else None for weight, need in pairs]
    return grads if is_grouped else grads[0]


def _main_grad(weight: torch.Tensor) -> torch.Tensor:
    main_grad: Any = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, torch.Tensor):
        raise OperandError(
            f"fuse_wgrad_accumulation=True adds to weight.main_grad, but a weight "
            f"{list(weight.shape)} has main_grad={main_grad!r}. Set it before backward: "
            f"weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)."
        )
    expected = (weight.shape, torch.float32, weight.device)
    if (main_grad.shape, main_grad.dtype, main_grad.device) != expected:
        raise OperandError(
            f"fuse_wgrad_accumulation=True adds to weight.main_grad {list(main_grad.shape)} "
            f"{main_grad.dtype} on {main_grad.device}; expected {list(weight.shape)} "
            f"torch.float32 on {weight.device}."
        )
    return main_grad


def _grad_for_autograd(weight: Any) -> torch.Tensor | None:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


class InputAgain(Wrapper):
    """Around a linear program whose weight is trained: forward casts the input rowwise alone, and
    backward makes the columnwise operand.

    It is cast from the input, saved as it came; or, if it ``is_remade``, the program before makes
    the input again, see :meth:`remake`. ``again`` is the quantizer for that, which counts no NaN or
    inf, as forward's did, and takes the delayed scale of ``slot`` in forward.
    """

    __slots__ = ("_columnwise", "_rowwise", "_slot")

    def __init__(
        self, inner: Program, again: TensorQuantizer, slot: Slot | None, *, is_remade: bool
    ) -> None:
        request = inner.input_request
        assert request is not None
        cast = None
        if request.cast is not None:
            cast = request.quantizer.cast_to(rowwise=True, columnwise=False)
        self._rowwise = dataclasses.replace(request, columnwise=False, cast=cast)
        self._columnwise = dataclasses.replace(request, quantizer=again, rowwise=False, cast=None)
        self._slot = slot
        super().__init__(inner, self._rowwise if is_remade else None)

    @property
    def recordable(self) -> Recordable | None:
        """As the inner program."""
        return self._inner.recordable

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; save ``x``, if it came as a tensor, in the place of its columnwise operand."""
        is_tensor = not isinstance(x, Handover)
        handed = self._rowwise(x) if is_tensor else x
        scale = None if self._slot is None else self._slot.present_scale()
        again = x if is_tensor else None, scale, None
        operands = Orientations(handed.take().rowwise, again)
        return self._inner.forward(Handover(operands, handed.rows), params, call, out)

    def remake(self, saved: SavedList, source: Program, source_saved: Saved, call: Call) -> None:
        """Put the columnwise operand of the result of ``source``, which saved ``source_saved``, to
        ``saved``."""
        if saved[0] is None:
            with left_to_backward():
                handed = source.remade(source_saved, call, self._again(saved[1]))
            saved[:3] = handed.operands.columnwise

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Cast the input columnwise if it is saved, then run the inner program's backward."""
        grad, x = self._grad(grad, call), saved[0]
        assert x is not None  # saved in forward, or remade
        if is_unquantized(x):
            with left_to_backward():
                saved[:3] = self._again(saved[1])(x).operands.columnwise
        return self._inner.backward(grad, saved, context, call, out)

    def _again(self, scale: torch.Tensor | None) -> QuantizeRequest:
        request = self._columnwise
        if scale is None:
            return request
        quantizer = request.quantizer.scaled(scale)
        return dataclasses.replace(request, quantizer=quantizer, scale=scale)
