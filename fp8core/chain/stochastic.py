"""Stochastic rounding of a gradient, with noise that a repeated forward repeats."""

from __future__ import annotations

import dataclasses

import torch

from fp8core.chain.call import Call
from fp8core.chain.protocol import Program, Wrapper
from fp8core.chain.request import QuantizeRequest


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
