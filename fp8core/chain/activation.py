"""Activations as links, gated or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import (
    ACTIVATIONS,
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    DequantizeDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core.chain.call import Call
from fp8core.chain.fusion import Fusion, bind_fusion
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
from fp8core.chain.request import ComputedProduct, Handover, QuantizeRequest, rows_request
from fp8core.chain.shape import BindContext, CallInputs, LinkShape
from fp8core.chain.simple import SimpleLink, SimpleShape
from fp8core.chain.unwrap import unwrap
from fp8core.errors import OperandError, RecipeError, did_you_mean
from fp8core.recipe.base import loads_earlier

_GATED = (*GATED, "situglu")


class GatedShape(LinkShape):
    """Base of the shapes of an activation called ``name``, gated or not; it computes in float32."""

    __slots__ = ()

    name: str

    @property
    def is_gated(self) -> bool:
        """Whether it takes twice as many columns as it gives."""
        return self.name in _GATED

    def columns(self, columns: int) -> int:
        """Return half of ``columns`` for a gated one."""
        return columns // 2 if self.is_gated else columns

    def input_columns(self, columns: int | None) -> int | None:
        """Return twice the ``columns`` for a gated one."""
        return 2 * columns if self.is_gated and columns is not None else columns

    def expected_columns(self, columns: int) -> str | None:
        """Refuse two halves of an odd number of columns."""
        return "an even number of" if self.is_gated and columns % 2 else None

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32, in which it computes."""
        return torch.float32

    def no_halves(self, x: torch.Tensor) -> OperandError:
        """Return the error about ``x``, whose odd number of columns has no two halves."""
        return OperandError(
            f"{self.name}: input {list(x.shape)} has no two halves; expected an even number of "
            f"columns."
        )


_PARAMS = {"clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}}


_RESULT = "activation"
# How an input is saved quantized: as by Transformer Engine's current scaling.
_CACHED = OperandSpec("e4m3", (0, 0), 448.0)


@loads_earlier
@dataclass(frozen=True, slots=True)
class ActivationShape(GatedShape):
    """Which activation, and its parameters in the order of :class:`ActivationDesc`; with
    ``caches_codes`` the input is saved quantized."""

    name: str
    params: tuple[float, ...] = ()
    caches_codes: bool = False
    # Rows of the gradient may come where a backend computes and casts it at once.
    reads_grad_rows = True

    def grad_input_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32, but ``dtype`` for a gated one, whose gradient is rounded."""
        return dtype if self.is_gated else torch.float32

    def bind(self, context: BindContext) -> ActivationLink:
        """Return the link."""
        output, gradient = context.output_consumer, context.grad_input_consumer
        out_dtype = context.dtype if output is None else output.dtype
        grad_dtype = context.dtype if gradient is None else gradient.dtype
        step, backward_step = self.name, f"{self.name} backward"
        desc = ActivationDesc(self.name, context.dtype, out_dtype, self.params)
        backward = ActivationBackwardDesc(self.name, context.dtype, grad_dtype, self.params)
        backward_fusion = bind_fusion(backward_step, backward, gradient, context)
        is_remade = _RESULT in context.plan.remade and not self.caches_codes
        reads_rows = backward_fusion is not None and bool(backward_fusion.chunked)
        codec: tuple[Callable[..., Any], ...] = ()
        if self.caches_codes:
            descs = (
                QuantizeDesc(context.dtype, _CACHED, None),
                DequantizeDesc(_CACHED, context.dtype),
            )
            codec = tuple(context.resolve("cached input", desc).run for desc in descs)
        return ActivationLink(
            self,
            context.resolve(step, desc).run,
            context.resolve(backward_step, backward).run,
            bind_fusion(step, desc, output, context, is_remade=is_remade),
            backward_fusion,
            rows_request(context.dtype) if reads_rows else None,
            codec,
        )


def activation_shape(
    name: str, params: dict[str, float] | None = None, *, caches_codes: bool = False
) -> ActivationShape:
    """Return the shape of an activation, whose name and parameters are checked.

    Raises:
        RecipeError: an unknown name or parameter; lists the known ones.
    """
    if name not in ACTIVATIONS:
        raise RecipeError(
            f"no activation is called {name!r}; activations: {', '.join(ACTIVATIONS)}."
            f"{did_you_mean(name, ACTIVATIONS)}"
        )
    defaults = _PARAMS.get(name, {})
    for name_of_param in params or {}:
        if name_of_param not in defaults:
            offered = ", ".join(defaults) or "none"
            raise RecipeError(f"{name} has no parameter {name_of_param!r}; parameters: {offered}.")
    values = {**defaults, **(params or {})}
    return ActivationShape(name, tuple(map(float, values.values())), caches_codes)


@dataclass(frozen=True, slots=True, eq=False)
class ActivationLink(Link):
    """``y [rows, n]`` from ``x [rows, n]``, or ``[rows, 2 n]`` for a gated one.

    ``grad_request`` is how it takes the gradient of y: None for a tensor. ``codec`` quantizes and
    dequantizes the input that is saved; without any the input is saved as it is.
    """

    shape: ActivationShape
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    fusion: Fusion | None
    backward_fusion: Fusion | None
    grad_request: QuantizeRequest | None
    codec: tuple[Callable[..., Any], ...] = ()

    @property
    def keeps_input(self) -> bool:  # type: ignore[override]  # follows from the codec
        """Whether the input itself is saved."""
        return not self.codec

    @property
    def result(self) -> str:  # type: ignore[override]  # likewise
        """The name of what is made again from the input, where that is saved."""
        return "" if self.codec else _RESULT

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> ActivationProgram:
        """Return the program, which is the same for any number of rows."""
        return ActivationProgram(self, needs_grad)


class ActivationProgram(TensorProgram[ActivationLink]):
    """Activates; saves the input."""

    __slots__ = ()

    @property
    def recordable(self) -> Recordable | None:
        """The references of a recording, none where the input is quantized besides."""
        return None if self._link.codec else Recordable()

    def remade(self, saved: Saved, call: Call, out: QuantizeRequest) -> Handover:
        """Activate again."""
        link, x = self._link, saved[0]
        handed = None if link.fusion is None else link.fusion.again(out, x)
        return out(link.run(x)) if handed is None else handed

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the request for rows that are computed when they are read, if it reads such."""
        return self._link.grad_request if self._needs_grad[0] else None

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y.

        Raises:
            OperandError: a gated activation of an odd number of columns.
        """
        link = self._link
        if link.shape.is_gated and x.shape[-1] % 2:
            raise link.shape.no_halves(x)
        y: Any
        if out is not None and link.fusion is not None and link.fusion.serves(out, x.shape[0]):
            y = link.fusion(out, x)[0]
        else:
            y = link.run(x)
            y = y if out is None else out(y)
        if not self._needs_grad[0]:
            return y, (), None
        if not link.codec:
            return y, (x,), None
        codes = link.codec[0](x).rowwise
        return y, (codes.data, codes.scale_inv), None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute grad_x from the saved input, or from the values of its codes."""
        if not self._needs_grad[0]:
            return (None,)
        link = self._link
        if link.codec:
            codes, scale_inv = saved
            assert codes is not None
            saved[:] = [link.codec[1](Operand(codes, scale_inv))]
        fusion = link.backward_fusion
        if out is not None and fusion is not None and fusion.serves(out, grad.shape[0]):
            return (_fused(fusion, out, grad, saved),)
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


Values: TypeAlias = "tuple[float, ...]"


def _capped(x: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``cap tanh(x / cap)`` and its slope."""
    tanh = torch.tanh(x / cap)
    return cap * tanh, 1 - tanh.square()


def _situglu(x: torch.Tensor, params: Values) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return _capped(a, params[0])[0] * torch.sigmoid(a) * _capped(b, params[1])[0]


def _situglu_gradient(dy: torch.Tensor, x: torch.Tensor, params: Values) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(a)
    (low, low_slope), (high, high_slope) = _capped(a, params[0]), _capped(b, params[1])
    grad_a = dy * high * (low_slope * sigmoid + low * sigmoid * (1 - sigmoid))
    return torch.cat((grad_a, dy * low * sigmoid * high_slope), dim=-1)


def _tanh_srelu(x: torch.Tensor, params: Values) -> torch.Tensor:
    return _capped(torch.relu(x), params[0])[0].square()


def _tanh_srelu_gradient(dy: torch.Tensor, x: torch.Tensor, params: Values) -> torch.Tensor:
    value, slope = _capped(torch.relu(x), params[0])
    return dy * 2 * value * slope  # 0 where x is negative, as the value is


# Activations by torch's operators in float32: the value ``f(x, params)``, and the gradient
# ``f(dy, x, params)``.
_IN_TORCH = {
    "situglu": (_situglu, _situglu_gradient),
    "tanh_srelu": (_tanh_srelu, _tanh_srelu_gradient),
}


@dataclass(frozen=True, slots=True)
class ScaledActivationShape(GatedShape, SimpleShape):
    """The activation ``name`` with ``params``; with ``has_scales`` the call brings one for each
    row."""

    name: str
    params: Values = ()
    has_scales: bool = True

    @property
    def num_params(self) -> int:
        """The scales."""
        return int(self.has_scales)

    def example(self, x: torch.Tensor) -> CallInputs:
        """Return the scales."""
        scales = x.new_empty(x.shape[:1]).requires_grad_()
        return CallInputs((scales,) if self.has_scales else ())

    def bind(self, context: BindContext) -> SimpleLink:
        """Return the link: ``y = value(x) * scale`` of each row, where ``value`` is not rounded.

        A backend's activation computes in float32 and rounds nothing.
        """
        consumer = context.output_consumer
        value, gradient = self._functions(context)

        def forward(x: torch.Tensor, params: Params, call: Call) -> tuple[torch.Tensor, Saved]:
            if self.is_gated and x.shape[-1] % 2:
                raise self.no_halves(x)
            y = value(x)
            if not params:
                return y, (x,)
            if params[0].numel() != x.shape[0]:
                raise OperandError(
                    f"{self.name}: scales {list(params[0].shape)} for {x.shape[0]} rows; expected "
                    f"one for each row, of the shape of the input without its last dimension."
                )
            scales = unwrap(params[0], f"{self.name}: the scales")
            return y * scales.reshape(-1, 1).to(y.dtype), (x, scales)

        def backward(
            grad: torch.Tensor, saved: Saved, call: Call, needs_grad: Sequence[bool]
        ) -> Backward:
            x, *rest = saved
            assert x is not None  # forward saved it
            scales = rest[0] if rest else None
            grad_x: torch.Tensor | None = None
            grad_scales: torch.Tensor | None = None
            if needs_grad[0]:
                grad_x = gradient(grad.to(x.dtype), x)
                if scales is not None:
                    grad_x = grad_x * scales.reshape(-1, 1).to(grad_x.dtype)
                grad_x = grad_x.to(x.dtype)
            if scales is None:
                return (grad_x,)
            if needs_grad[1]:
                y = value(x)
                grad_scales = (y * grad.to(y.dtype)).sum(-1).to(scales.dtype)
                grad_scales = grad_scales.reshape(scales.shape)
            return grad_x, grad_scales

        return SimpleLink(
            self,
            forward,
            backward,
            self.num_params,
            rounds_to=context.dtype if consumer is None else consumer.dtype,
        )

    def _functions(
        self, context: BindContext
    ) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        """Return ``value(x)`` and ``gradient(dy, x)``, which are not rounded."""
        wide = torch.float64 if context.dtype == torch.float64 else torch.float32
        if self.name in _IN_TORCH:
            value, gradient = _IN_TORCH[self.name]
            return (
                lambda x: value(x.to(wide), self.params),
                lambda dy, x: gradient(dy.to(wide), x.to(wide), self.params),
            )
        desc = ActivationDesc(self.name, context.dtype, wide, self.params)
        backward = ActivationBackwardDesc(self.name, context.dtype, wide, self.params)
        return (
            context.resolve(self.name, desc).run,
            context.resolve(f"{self.name} backward", backward).run,
        )
