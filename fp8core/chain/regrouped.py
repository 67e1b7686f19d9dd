"""Links that only scale rows or columns, or change their order, by torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.chain.call import Call
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.protocol import Backward, Forward, Out, Params, Saved, SavedList, TensorProgram
from fp8core.chain.request import QuantizeRequest
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.errors import OperandError

__all__ = ["DeinterleaveShape", "L2NormShape", "ScaleShape"]

# Below and above, squares of a row may underflow, or overflow, in float32. The scale takes elements
# from 2^-149 to 2^-50 to 2^-53 to 2^46, or those below 2^128 to less than 2^48.
_FEW, _ENLARGED = 2.0**-100, 2.0**96
_MANY, _REDUCED = 2.0**126, 2.0**-80


def _hand(y: torch.Tensor, out: QuantizeRequest | None) -> Any:
    return y if out is None else out(y)


@dataclass(frozen=True, slots=True)
class ScaleShape(LinkShape):
    """Multiplies by the constant ``scale``."""

    scale: float

    def bind(self, context: BindContext) -> ScaleLink:
        """Return the link."""
        return ScaleLink(self)


@dataclass(frozen=True, slots=True, eq=False)
class ScaleLink(LinkDefaults):
    """``y = scale x``, rounded once to the dtype of ``x``."""

    shape: ScaleShape

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> ScaleProgram:
        """Return the program, which is the same for any number of rows."""
        return ScaleProgram(self, needs_grad)


class ScaleProgram(TensorProgram[ScaleLink]):
    """Scales the value, and the gradient."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Return ``scale x``."""
        return _hand(x * self._link.shape.scale, out), (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Return ``scale grad``."""
        return (_hand(grad * self._link.shape.scale, out) if self._needs_grad[0] else None,)


@dataclass(frozen=True, slots=True)
class DeinterleaveShape(LinkShape):
    """Puts the two halves of a gated activation together, which come in blocks of ``size``.

    ``[a1 b1 a2 b2]`` of blocks becomes ``[a1 a2 b1 b2]``.
    """

    size: int

    def expected_columns(self, columns: int) -> str | None:
        """Return None for whole pairs of blocks."""
        return f"a multiple of {2 * self.size}" if columns % (2 * self.size) else None

    def bind(self, context: BindContext) -> DeinterleaveLink:
        """Return the link."""
        return DeinterleaveLink(self)


@dataclass(frozen=True, slots=True, eq=False)
class DeinterleaveLink(LinkDefaults):
    """Changes the order of the columns."""

    shape: DeinterleaveShape

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> DeinterleaveProgram:
        """Return the program, which is the same for any number of rows."""
        return DeinterleaveProgram(self, needs_grad)


class DeinterleaveProgram(TensorProgram[DeinterleaveLink]):
    """Moves blocks of columns, and those of the gradient back."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Return the columns of the first half, then those of the second.

        Raises:
            OperandError: the columns are no pairs of blocks.
        """
        rows, columns = x.shape
        size = self._link.shape.size
        if columns % (2 * size):
            raise OperandError(
                f"glu_interleave_size={size}: input {list(x.shape)}; expected a multiple of "
                f"{2 * size} columns."
            )
        blocks = x.reshape(rows, columns // (2 * size), 2, size)
        return _hand(blocks.transpose(1, 2).reshape(rows, columns), out), (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Return the gradient with its blocks where those of the input were."""
        if not self._needs_grad[0]:
            return (None,)
        rows, columns = grad.shape
        size = self._link.shape.size
        blocks = grad.reshape(rows, 2, columns // (2 * size), size)
        return (_hand(blocks.transpose(1, 2).reshape(rows, columns), out),)


@dataclass(frozen=True, slots=True)
class L2NormShape(LinkShape):
    """Scales each row to a length of 1; ``eps`` is added to the square of its length."""

    eps: float

    def bind(self, context: BindContext) -> L2NormLink:
        """Return the link."""
        return L2NormLink(self)


@dataclass(frozen=True, slots=True, eq=False)
class L2NormLink(LinkDefaults):
    """``y = x / sqrt(sum(x^2) + eps)`` in float32, rounded once."""

    shape: L2NormShape

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> L2NormProgram:
        """Return the program, which is the same for any number of rows."""
        return L2NormProgram(self, needs_grad)


class L2NormProgram(TensorProgram[L2NormLink]):
    """Normalizes; saves the input."""

    __slots__ = ()

    def origins(self, saved: Saved) -> Sequence[torch.Tensor | None]:
        """Return the input."""
        return saved

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Normalize each row."""
        values, inverse, _ = self._scaled(x)
        y = (values * inverse).to(x.dtype)
        return _hand(y, out), (x,) if self._needs_grad[0] else (), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Return ``r (dy - y sum(y dy))``, where ``r`` is 1 over the length and ``y = r x``."""
        if not self._needs_grad[0]:
            return (None,)
        x = saved[0]
        assert x is not None  # forward saved it
        values, inverse, scale = self._scaled(x)
        dy = grad.to(values.dtype)
        y = values * inverse
        grad_x = inverse * (dy - y * (y * dy).sum(-1, keepdim=True)) * scale
        return (_hand(grad_x.to(x.dtype), out),)

    def _scaled(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``x`` in float32, or float64 as it is, times a scale, 1 over the length of each
        row of that, and the scale ``[rows, 1]``.

        It is a power of two, and 1 unless float32 lacks squares of the length.
        """
        values, eps = x if x.dtype == torch.float64 else x.to(torch.float32), self._link.shape.eps
        squares = values.square().sum(-1, keepdim=True) + eps
        scale = torch.where(squares < _FEW, _ENLARGED, torch.ones_like(squares))
        scale = torch.where(squares > _MANY, _REDUCED, scale)
        values = values * scale
        squares = values.square().sum(-1, keepdim=True) + eps * scale * scale
        return values, squares.rsqrt(), scale
