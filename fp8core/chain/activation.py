"""Activations as links, gated or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.backend_api import ACTIVATIONS, ActivationBackwardDesc, ActivationDesc
from fp8core.chain.call import Call
from fp8core.chain.fusion import Fusion, bind_fusion
from fp8core.chain.gating import GatedShape
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    Out,
    Params,
    Recordable,
    Saved,
    SavedList,
    TensorProgram,
)
from fp8core.chain.request import QuantizeRequest
from fp8core.chain.rows import ComputedProduct, rows_request
from fp8core.chain.shape import BindContext
from fp8core.errors import RecipeError, did_you_mean

_PARAMS = {"clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}}


@dataclass(frozen=True, slots=True)
class ActivationShape(GatedShape):
    """Which activation, and its parameters in the order of :class:`ActivationDesc`."""

    name: str
    params: tuple[float, ...] = ()

    def grad_input_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32, but ``dtype`` for a gated one, whose gradient is rounded."""
        return dtype if self.is_gated else torch.float32

    @property
    def reads_grad_rows(self) -> bool:
        """Its gradient is computed and cast in one operation, if the backend has one."""
        return True

    def bind(self, context: BindContext) -> ActivationLink:
        """Return the link."""
        output, gradient = context.output_consumer, context.grad_input_consumer
        out_dtype = context.dtype if output is None else output.dtype
        grad_dtype = context.dtype if gradient is None else gradient.dtype
        step, backward_step = self.name, f"{self.name} backward"
        desc = ActivationDesc(self.name, context.dtype, out_dtype, self.params)
        backward = ActivationBackwardDesc(self.name, context.dtype, grad_dtype, self.params)
        backward_fusion = bind_fusion(backward_step, backward, gradient, context)
        reads_rows = backward_fusion is not None and backward_fusion.gives_chunks
        return ActivationLink(
            self,
            context.resolve(step, desc).run,
            context.resolve(backward_step, backward).run,
            bind_fusion(step, desc, output, context),
            backward_fusion,
            rows_request(context.dtype) if reads_rows else None,
        )


def activation_shape(name: str, params: dict[str, float] | None = None) -> ActivationShape:
    """Check an activation's name and parameters.

    Raises:
        RecipeError: an unknown name or parameter; lists the known ones.
    """
    if name not in ACTIVATIONS:
        raise RecipeError(
            f"no activation is called {name!r}; activations: {', '.join(ACTIVATIONS)}."
            f"{did_you_mean(name, ACTIVATIONS)}"
        )
    defaults = _PARAMS.get(name, {})
    for given in params or {}:
        if given not in defaults:
            known = ", ".join(defaults) or "none"
            raise RecipeError(f"{name} has no parameter {given!r}; parameters: {known}.")
    values = {**defaults, **(params or {})}
    return ActivationShape(name, tuple(float(value) for value in values.values()))


@dataclass(frozen=True, slots=True, eq=False)
class ActivationLink(Link):
    """``y [rows, n]`` from ``x [rows, n]``, or ``[rows, 2 n]`` for a gated one.

    ``grad_request`` is how it takes the gradient of y: None for a tensor.
    """

    shape: ActivationShape
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    fusion: Fusion | None
    backward_fusion: Fusion | None
    grad_request: QuantizeRequest | None

    def in_torch(self, bind: Callable[[Any], Any]) -> ActivationLink:
        """Return the activation by torch's operators."""
        link: ActivationLink = bind(self.shape)
        return link

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> ActivationProgram:
        """Return the program, which is the same for any number of rows."""
        return ActivationProgram(self, needs_grad)


class ActivationProgram(TensorProgram[ActivationLink]):
    """Activates; saves the input."""

    __slots__ = ()

    recordable = Recordable()

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the request for rows that are computed when they are read, if it reads such."""
        return self._link.grad_request if self._needs_grad[0] else None

    def origins(self, saved: Saved) -> Sequence[torch.Tensor | None]:
        """Return the input."""
        return saved

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y.

        Raises:
            OperandError: a gated activation of an odd number of columns.
        """
        link = self._link
        if link.shape.is_gated and x.shape[-1] % 2:
            raise link.shape.no_halves(x)
        y: Any
        if out is not None and link.fusion is not None and out.is_plain:
            y = link.fusion(out, x)[0]
        else:
            y = link.run(x)
            y = y if out is None else out(y)
        return y, (x,) if self._needs_grad[0] else (), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute grad_x from the saved input."""
        if not self._needs_grad[0]:
            return (None,)
        link = self._link
        if out is not None and link.backward_fusion is not None and out.is_plain:
            return (_fused(link.backward_fusion, out, grad, saved),)
        if isinstance(grad, ComputedProduct):
            grad = grad.whole()
        grad_x = link.run_backward(grad, saved[0])
        saved.clear()  # freed before the gradient is cast, if the graph is not retained
        return (grad_x if out is None else out(grad_x),)


def _fused(fusion: Fusion, out: QuantizeRequest, grad: Any, saved: SavedList) -> Any:
    """Return the gradient of the saved input, as ``out`` requests it."""
    handed = fusion.in_chunks(out, grad, saved[0])
    if handed is None:
        if isinstance(grad, ComputedProduct):
            grad = grad.whole()
        handed = fusion(out, grad, saved[0])
    saved.clear()  # chunks hold the input until they are read
    return handed[0]
