"""Links without a GEMM or a norm: bias, dropout, residual add, quantize-and-back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8core.chain.once import OnlyOnce
from fp8core.chain.protocol import Backward, Call, Forward, Saved, Unadded, Want
from fp8core.chain.unwrap import unwrap
from fp8core.errors import OperandError
from fp8core.torch_ops import fused, operators

__all__ = [
    "AddLink",
    "AddShape",
    "BiasLink",
    "BiasShape",
    "DropoutLink",
    "DropoutShape",
    "OutputLink",
    "OutputShape",
    "QuantizeLink",
    "QuantizeShape",
]


class BiasShape(NamedTuple):
    """A bias ``[size]``."""

    size: int
    dtype: torch.dtype
    num_params: int = 1


class DropoutShape(NamedTuple):
    """Dropout with probability ``p``."""

    p: float
    num_params: int = 0


class AddShape(NamedTuple):
    """Adds a second tensor, which comes as its parameter."""

    num_params: int = 1


class QuantizeShape(NamedTuple):
    """Rounds to the recipe's input format and back, forward, backward or both."""

    forward: bool = True
    backward: bool = False
    num_params: int = 0


class OutputShape(NamedTuple):
    """The value leaves the chain here, in the activation dtype, and comes back in."""

    num_params: int = 0


class _Plain:
    """Takes tensors and gradients as they are."""

    __slots__ = ()

    @property
    def only_once(self) -> OnlyOnce | None:
        """Torch's operators compute it anyway."""
        return None

    def alone(self, rows: int, needs: Sequence[bool], call: Call) -> None:
        """There is no shorter way."""

    def wants(self, rows: int, needs: Sequence[bool], call: Call) -> None:
        """Take the tensor as it is."""

    def wants_grad(self, rows: int, needs: Sequence[bool], call: Call, context: object) -> None:
        """Take the gradient as it is."""


def _hand(y: torch.Tensor, out: Want | None) -> Any:
    return y if out is None else out(y)


@dataclass(frozen=True, slots=True, eq=False)
class OutputLink(_Plain):
    """Passes everything on; where a layer returns the value, it runs the two sides apart."""

    num_params: int = 0
    needs_rng: bool = False

    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Pass the value on."""
        return Forward(_hand(x, out), ())

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Pass the gradient on."""
        return Backward(_hand(grad, out) if needs[0] else None, ())


@dataclass(frozen=True, slots=True, eq=False)
class BiasLink(_Plain):
    """``y = x + bias``."""

    shape: BiasShape
    num_params: int = 1
    needs_rng: bool = False

    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Add the bias."""
        return Forward(_hand((x + params[0]).to(x.dtype), out), ())

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Pass the gradient on; sum it in float32 for the bias."""
        grad_bias = operators.column_sums(grad).to(self.shape.dtype) if needs[1] else None
        return Backward(_hand(grad, out) if needs[0] else None, (grad_bias,))


@dataclass(frozen=True, slots=True, eq=False)
class DropoutLink(_Plain):
    """Zeroes elements with probability ``p``, scales the rest by ``1 / (1 - p)``.

    The mask is made anew in backward from the call's seed and offset; nothing is saved.
    """

    shape: DropoutShape
    index: int
    needs_rng: bool
    num_params: int = 0

    def _drop(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        if not self.needs_rng:
            return x
        if call.rng is None:  # under a transform, where torch decides what an example draws
            return torch.nn.functional.dropout(x, self.shape.p)
        return fused.drop(x, call.rng, self.index, self.shape.p)

    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Drop."""
        return Forward(_hand(self._drop(x, call), out), ())

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Drop the same elements of the gradient."""
        return Backward(_hand(self._drop(grad, call), out) if needs[0] else None, ())


@dataclass(frozen=True, slots=True, eq=False)
class AddLink(_Plain):
    """``y = x + residual``, rounded once to the dtype of ``x``; left to the next link if it can."""

    shape: AddShape
    is_left_to_next: bool = False
    num_params: int = 1
    needs_rng: bool = False

    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Add."""
        shape = params[0].shape
        if params[0].numel() != x.numel() or shape[-1:] != x.shape[-1:]:
            raise OperandError(
                f"residual add: the extra input is {list(shape)}; expected {list(x.shape)} with "
                f"the leading dimensions of the chain's input."
            )
        residual = unwrap(params[0], "residual add: the extra input").reshape(x.shape)
        if self.is_left_to_next and residual.dtype == x.dtype:
            return Forward(Unadded(x, residual), (), shape)
        return Forward(_hand((x + residual).to(x.dtype), out), (), shape)

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Both inputs get the gradient."""
        residual = grad.reshape(context) if needs[1] else None  # type: ignore[call-overload]  # a shape
        return Backward(_hand(grad, out) if needs[0] else None, (residual,))


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeLink(_Plain):
    """Rounds values to a low-precision format and back, as the next layer would see them."""

    shape: QuantizeShape
    round_forward: Callable[[torch.Tensor], torch.Tensor]
    round_backward: Callable[[torch.Tensor], torch.Tensor]
    rounding_for: OnlyOnce | None
    num_params: int = 0
    needs_rng: bool = False

    @property
    def only_once(self) -> OnlyOnce | None:
        """What it rounds has no derivative but the one that backward takes."""
        return self.rounding_for

    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Round the value, if asked for."""
        return Forward(_hand(self.round_forward(x) if self.shape.forward else x, out), ())

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Pass the gradient straight through, rounded if asked for."""
        if not needs[0]:
            return Backward(None, ())
        return Backward(_hand(self.round_backward(grad) if self.shape.backward else grad, out), ())
