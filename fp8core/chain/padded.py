"""A linear whose sizes are padded with zeros, forward and back; zeros change no sum."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fp8core.chain.call import Call
from fp8core.chain.padding import PaddedCall
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Out,
    Params,
    Program,
    SavedList,
    Wrapper,
)
from fp8core.chain.request import QuantizeRequest


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
        padded, given = self._padded, params
        if padded.layer.out_features:
            count = self._num_weights
            given = (*params[:count], *map(padded.layer.pad_bias, params[count:]))
        inner_call = call._replace(groups=padded.groups, output=None)
        y, saved, context = super().forward(x, given, inner_call)
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
        cut = [None if one is None else layer.cut_grad_weight(one) for one in grads[:count]]
        return (grad_input, *cut, *grads[count:])


def _padding(request: QuantizeRequest | None, padded: PaddedCall, call: Call) -> QuantizeRequest:
    """Return ``request`` of a linear program for tensors that are padded before their cast."""
    assert request is not None
    return dataclasses.replace(request, cast=None, call=call, padded=padded, rows=padded.unpadded)
