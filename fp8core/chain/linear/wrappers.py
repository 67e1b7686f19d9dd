"""The programs around that of a linear, one for each thing that a layer or a call adds to it.

- Groups: the dense program, with one weight and one bias for each group of rows.
- Padding: sizes with zeros added, forward and back; zeros change no sum.
- ``main_grad``: weight gradients added by the GEMM that computes them to a float32 tensor that a
  framework gives each weight, zeroes before a step and reads after it. No gradient in the dtype of
  the weight is made, and microbatches add up in float32. The names are Megatron's.
- ``delay_wgrad_compute``: weight gradients put into the queue of the call instead of computed.
- ``requantize_weights``: backward quantizes weights again instead of holding their codes.
- ``save_original_input``: the input saved as it came, and cast again in backward. Where another
  module saves the same tensor anyway, as the norm or the router before several experts does, codes
  of the input would be held in vain.
- Stochastic rounding of a gradient, with noise that a repeated forward repeats.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8core.backend_api import Operand
from fp8core.chain.call import Call
from fp8core.chain.delayed_wgrad import DelayedCall, PendingWgrad
from fp8core.chain.padding import PaddedCall
from fp8core.chain.protocol import Backward, Forward, Out, Params, Program, SavedList, Wrapper
from fp8core.chain.request import Handover, QuantizeRequest, Travel
from fp8core.chain.unwrap import as_readable
from fp8core.errors import OperandError
from fp8core.tensors.quantizer import Orientations, TensorQuantizer
from fp8core.tensors.saving import is_unquantized
from fp8core.tensors.weights import Keeping, WeightQuantizer, WeightWrapper


class FlatWeights(WeightWrapper):
    """The weights' quantizers, with the columnwise operands as one flat tuple, as they are saved.

    ``(data, scale_inv, global_scale_inv, data, ...)``; :func:`operands_of` is the inverse.
    """

    __slots__ = ()

    def __call__(
        self,
        weight: Any,
        /,
        *,
        columnwise: bool,
        keeping: Keeping | None = None,
    ) -> Orientations:
        """Quantize ``weight``, one ``[n, k]`` a group."""
        rowwise, columns = self._inner(weight, columnwise=columnwise, keeping=keeping)
        return Orientations(rowwise, tuple(itertools.chain(*columns)) if columnwise else None)


def operands_of(flat: Sequence[Any]) -> list[Operand]:
    """Return the operands whose tensors are ``flat``, three for each."""
    return [Operand(*flat[at : at + 3]) for at in range(0, len(flat), 3)]


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
        inner_call = call._replace(groups=padded.groups, grad_input=None)
        grad_input, *grads = self._inner.backward(grad, saved, context, inner_call)
        if grad_input is not None:
            grad_input = padded.cut(grad_input, layer.in_features)
            if call.grad_input is not None:
                grad_input = call.grad_input.copy_(grad_input)
            grad_input = grad_input if out is None else out(grad_input)
        if context is not None or not layer.is_of_features:  # or added elsewhere
            return (grad_input, *grads)
        cut = [None if grad is None else layer.cut_grad_weight(grad) for grad in grads[:count]]
        return (grad_input, *cut, *grads[count:])


def _padding(request: QuantizeRequest | None, padded: PaddedCall, call: Call) -> QuantizeRequest:
    """Return ``request`` of a linear program for tensors that are padded before their cast."""
    assert request is not None
    return dataclasses.replace(request, cast=None, call=call, padded=padded, rows=padded.unpadded)


class Accumulating(Wrapper):
    """Around a linear program: ``wgrad(..., out=main_grad)`` adds up the weights' gradients.

    ``needs_grad`` is the weights' alone. A missing ``main_grad`` is refused in backward, which may
    be called again once it is there: so nothing is freed early.
    """

    __slots__ = ("_needs_grad", "_wgrad")

    def __init__(
        self, inner: Program, wgrad: Callable[..., Any], needs_grad: Sequence[bool]
    ) -> None:
        super().__init__(inner, inner.input_request)
        self.frees_early = False
        self._wgrad = wgrad
        self._needs_grad = needs_grad

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; backward is told the weights, or the sequence of them if there are groups."""
        y, saved, _ = super().forward(x, params, call, out)
        return y, saved, partial(_add_to_main_grads, self._wgrad, params[0], self._needs_grad)


def _add_to_main_grads(
    wgrad: Callable[..., Any],
    weights: Any,
    needs_grad: Sequence[bool],
    dy: Any,
    x: Any,
    *groups: torch.Tensor,
) -> Any:
    """Run ``wgrad`` into ``main_grad``; return the gradients for autograd, one for each group."""
    if groups:
        return accumulate(wgrad, (dy, x, *groups), weights, needs_grad, is_grouped=True)
    return accumulate(wgrad, (dy, x), (weights,), needs_grad, is_grouped=False)[0]


def accumulate(
    wgrad: Callable[..., Any],
    operands: tuple[Any, ...],
    weights: Sequence[torch.Tensor],
    needed: Sequence[bool],
    *,
    is_grouped: bool,
) -> list[torch.Tensor | None]:
    """Add the gradients that ``wgrad(*operands, out=...)`` computes to each ``main_grad``.

    Returns the gradients for autograd: None, or zeros for a weight that has the attribute
    ``grad_added_to_main_grad``, which is set: its framework has hooks that wait for a gradient.
    Where padding makes the product larger than the weight, or a weight is frozen, the sum takes a
    second pass.

    Raises:
        OperandError: a weight has no ``main_grad`` of float32 and of its shape on its device.
    """
    pairs = list(zip(weights, needed, strict=True))
    sums = [_main_grad(weight) if need else None for weight, need in pairs]
    dy, x = operands[:2]
    if all(sum_ is not None and _fits(sum_, dy, x) for sum_ in sums):
        wgrad(*operands, out=sums if is_grouped else sums[0])
    else:
        shape = dy.data.shape[0], x.data.shape[0]
        scratch = [torch.zeros(shape, dtype=torch.float32, device=w.device) for w in weights]
        wgrad(*operands, out=scratch if is_grouped else scratch[0])
        for sum_, grad in zip(sums, scratch, strict=True):
            if sum_ is not None:
                sum_ += grad[: sum_.shape[0], : sum_.shape[1]]
    return [_grad_for_autograd(weight) if need else None for weight, need in pairs]


def _fits(main_grad: torch.Tensor, dy: Any, x: Any) -> bool:
    return main_grad.shape == (dy.data.shape[0], x.data.shape[0])


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


class Delaying(Wrapper):
    """Around a linear program: backward puts wgrad into the queue of the call, and returns None.

    ``wgrad`` computes the gradients where the program inside has no other way. ``index`` tells the
    linears of one chain apart; ``needs_grad`` is the weights' alone. Without a queue, as where only
    shapes are asked for, backward computes the gradients itself.
    """

    __slots__ = ("_index", "_is_grouped", "_needs_grad", "_wgrad")

    def __init__(
        self,
        inner: Program,
        wgrad: Callable[..., Any],
        needs_grad: Sequence[bool],
        *,
        index: int,
        is_grouped: bool,
    ) -> None:
        super().__init__(inner, inner.input_request)
        self._wgrad = wgrad
        self._needs_grad = needs_grad
        self._index = index
        self._is_grouped = is_grouped

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; backward is told where to put wgrad."""
        delayed = call.delayed_wgrads
        if delayed is None:
            return super().forward(x, params, call, out)
        weights = [*map(delayed.source, params[0] if self._is_grouped else params[:1])]
        inner_params = (weights if self._is_grouped else weights[0], *params[1:])
        y, saved, context = super().forward(x, inner_params, call, out)
        run: Any = context or self._wgrad
        return y, saved, partial(self._put, delayed, run, weights)

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


class Requantizing(Wrapper):
    """Around a linear program: quantizes the weights that it saved, right before dgrad.

    ``weight`` is the program's quantizer of weights, each of which has ``shape`` and ``dtype`` and
    is on ``device``; their tensors are the last ones that it saves, after ``num_before`` others.
    ``owner`` names the layer in messages.
    """

    __slots__ = ("_device", "_dtype", "_num_before", "_owner", "_shape", "_weight")

    def __init__(
        self,
        inner: Program,
        weight: WeightQuantizer,
        num_before: int,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        owner: str,
    ) -> None:
        super().__init__(inner, inner.input_request)
        self._weight = weight
        self._num_before = num_before
        self._shape = torch.Size(shape)
        self._dtype = dtype
        self._device = device
        self._owner = owner

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Run the inner program's backward on operands; it frees them after dgrad.

        Raises:
            OperandError: a weight is not what it was in forward, or its memory is freed.
        """
        grad, at = self._grad(grad, call), self._num_before
        for index in range(at, len(saved), 3):
            first = saved[index]
            if first is not None and is_unquantized(first):
                saved[index] = self._readable(first)
        saved[at:] = self._weight.requantize(saved[at:])
        return self._inner.backward(grad, saved, context, call, out)

    def _readable(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight``, whose data may have been replaced without a write, as a kernel reads
        it; raise if it does not fit or cannot be read."""
        if (weight.shape, weight.dtype) != (self._shape, self._dtype):
            raise OperandError(
                f"{self._owner}: in backward the weight is {list(weight.shape)} {weight.dtype}, "
                f"forward had {list(self._shape)} {self._dtype}. Convert or shard it after "
                f"backward."
            )
        return as_readable(weight, self._device, f"{self._owner}: in backward the weight")


class SavingInput(Wrapper):
    """Around a linear program whose weight is trained: forward casts the input rowwise and saves
    the tensor, backward casts it columnwise.

    ``again`` is the quantizer for that, which counts no NaN or inf, as forward's did. The program
    takes its input as a tensor, so no operation before it is fused with the cast.
    """

    __slots__ = ("_columnwise", "_rowwise")

    def __init__(self, inner: Program, again: TensorQuantizer) -> None:
        super().__init__(inner, None)
        request = inner.input_request
        assert request is not None
        self._rowwise = dataclasses.replace(request, columnwise=False, cast=None)
        self._columnwise = dataclasses.replace(request, quantizer=again, rowwise=False, cast=None)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; save ``x`` in the place of its columnwise operand."""
        cast = self._rowwise(x)
        operands = Orientations(cast.operands.rowwise, (x, None, None))
        return self._inner.forward(Handover(operands, cast.rows), params, call, out)

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Cast the input columnwise, then run the inner program's backward."""
        grad = self._grad(grad, call)
        x = saved[0]
        assert x is not None  # forward saved it
        saved[:3] = self._columnwise(x).operands.columnwise
        return self._inner.backward(grad, saved, context, call, out)


class Stochastic(Wrapper):
    """Around a linear program: its gradient is cast with the call's seed and offset.

    ``rng`` int64 ``[2]`` is the call's; ``index`` tells the linears of one chain apart, which draw
    different noise.
    """

    __slots__ = ("_index", "_rng")

    def __init__(self, inner: Program, rng: torch.Tensor, index: int) -> None:
        super().__init__(inner, inner.input_request)
        self._rng = rng
        self._index = index

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the inner program's request with a seed and an offset."""
        request = self._inner.request_grad(call)
        assert request is not None
        rng = self._rng + torch.tensor((0, self._index << 32), device="cpu")
        return dataclasses.replace(request, cast=None, rng=rng)
