"""Activations and their derivatives by the native kernels: one launch, at the speed of memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fp8core.backend_api import GATED, ActivationBackwardDesc, ActivationDesc, OperandError
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.stream import index_of, raw_stream


class _Function(NamedTuple):
    """The native name of ``f``, and the ``beta`` of ``x sigmoid(beta x)``."""

    name: str
    beta: float = 0.0


_GELU, _SIGMOID = _Function("gelu"), _Function("sigmoid")
_ERF_GELU = _Function("erf_gelu")
_RELU, _SQUARED_RELU = _Function("relu"), _Function("squared_relu")
_SILU, _QUICK_GELU = _Function("swish", 1.0), _Function("swish", 1.702)

_FUNCTIONS = {
    "erfgelu": _ERF_GELU,
    "gelu": _GELU,
    "geglu": _GELU,
    "glu": _SIGMOID,
    "qgelu": _QUICK_GELU,
    "qgeglu": _QUICK_GELU,
    "relu": _RELU,
    "reglu": _RELU,
    "srelu": _SQUARED_RELU,
    "sreglu": _SQUARED_RELU,
    "silu": _SILU,
    "swiglu": _SILU,
}
_CLAMPED = {"clamped_swiglu": "clamped_swish"}
"""Activations with params ``(limit, alpha, offset)``: alpha is the function's beta."""


def activation_problem(desc: ActivationDesc | ActivationBackwardDesc) -> str | None:
    """Say why there is no kernel for ``desc``, or None."""
    if desc.name not in _FUNCTIONS and desc.name not in _CLAMPED:
        return f"no activation {desc.name!r}"
    count = 3 if desc.name in _CLAMPED else 0
    if len(desc.params) != count:
        return f"{desc.name} takes {count} parameters"
    unsupported = next(
        (dtype for dtype in (desc.dtype, desc.out_dtype) if dtype not in DTYPES), None
    )
    return None if unsupported is None else f"no activations from or to {unsupported}"


def native_activation(
    desc: ActivationDesc | ActivationBackwardDesc, index: int, native: Any
) -> Any:
    """Return the native activation of ``desc``: called with its arguments and a stream."""
    if desc.name in _CLAMPED:
        limit, alpha, offset = desc.params
        function = _Function(_CLAMPED[desc.name], alpha)
    else:
        limit, offset, function = 0.0, 0.0, _FUNCTIONS[desc.name]
    types = native.InputType.__members__
    return native.Activation(
        native.ActivationFunction.__members__[function.name],
        desc.name in GATED,
        isinstance(desc, ActivationBackwardDesc),
        function.beta,
        limit,
        offset,
        types[DTYPES[desc.dtype]],
        types[DTYPES[desc.out_dtype]],
        index,
    )


class _Activation:
    """Base of forward and backward: the native activation, and memory for results."""

    __slots__ = ("_dtypes", "_empty", "_index", "_native_activation", "_num_parts", "kernel")

    def __init__(
        self, desc: ActivationDesc | ActivationBackwardDesc, device: torch.device, native: Any
    ) -> None:
        self.kernel = "fp8core::activation_vectors"
        self._index = index_of(device)
        self._native_activation = native_activation(desc, self._index, native)
        self._empty = allocator(self._index)
        self._dtypes = (desc.dtype, desc.out_dtype)
        self._num_parts = 2 if desc.name in GATED else 1


@runs(ActivationDesc, refuses=activation_problem, is_recorded=True)
class Activation(_Activation):
    """``y [rows, n]`` from ``x [rows, n]``, or ``[rows, 2 n]`` for a gated one."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Activate ``x``.

        Raises:
            OperandError: ``x`` has another dtype than was bound.
        """
        rows, cols = x.shape
        dtype, out_dtype = self._dtypes
        if x.dtype != dtype:
            raise OperandError(f"activation of {x.dtype}; bound for {dtype}.")
        n = cols // self._num_parts
        y = self._empty((rows, n), (n or 1, 1), out_dtype)
        x, stride = adjacent_columns(x)
        self._native_activation(
            (x.data_ptr(), rows, cols, stride, 0, 0, y.data_ptr()), raw_stream(self._index)
        )
        return y


@runs(ActivationBackwardDesc, refuses=activation_problem, is_recorded=True)
class ActivationBackward(_Activation):
    """``grad_x`` of the shape of ``x`` from ``grad_output [rows, n]``."""

    __slots__ = ()

    def __call__(self, grad_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Differentiate at ``x``.

        Raises:
            OperandError: ``grad_output`` or ``x`` has another dtype than was bound, or their
                shapes are not those of one activation.
        """
        rows, cols = x.shape
        dtype, out_dtype = self._dtypes
        if not x.dtype == grad_output.dtype == dtype:
            raise OperandError(
                f"activation_backward of {grad_output.dtype} and {x.dtype}; bound for {dtype}."
            )
        parts = self._num_parts
        if cols % parts or grad_output.shape != (rows, cols // parts):
            raise OperandError(
                f"activation_backward: x is {list(x.shape)}, the gradient "
                f"{list(grad_output.shape)}; expected {parts} columns of x for each of its columns."
            )
        grad_x = self._empty((rows, cols), (cols or 1, 1), out_dtype)
        x, stride = adjacent_columns(x)
        grad_output, grad_stride = adjacent_columns(grad_output)
        self._native_activation(
            (
                x.data_ptr(),
                rows,
                cols,
                stride,
                grad_output.data_ptr(),
                grad_stride,
                grad_x.data_ptr(),
            ),
            raw_stream(self._index),
        )
        return grad_x
