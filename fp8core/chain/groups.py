"""A grouped linear: the dense program, with one weight and one bias for each group of rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fp8core.backend_api import Operand
from fp8core.chain.call import Call
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Out,
    Params,
    Program,
    SavedList,
    Wrapper,
)
from fp8core.chain.request import QuantizeRequest, Travel
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.weights import Keeping, WeightWrapper


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
