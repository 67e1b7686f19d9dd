"""LayerNorm and RMSNorm by the native kernels: alone, of a sum with a residual, and backward."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fp8core.backend_api import AddNormDesc, NormBackwardDesc, NormDesc
from fp8core.errors import OperandError
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.stream import index_of, raw_stream

_FLOAT32 = torch.float32


def norm_problem(desc: NormDesc) -> str | None:
    """Say why the kernels cannot compute ``desc``, or None."""
    if desc.kind not in ("layernorm", "rmsnorm"):
        return f"no kernels for a norm of kind {desc.kind!r}"
    if desc.dtype not in DTYPES or desc.out_dtype not in DTYPES:
        return f"no norm from {desc.dtype} to {desc.out_dtype}"
    return None


class NormOperands:
    """Brings parameters and statistics into the layout that the kernels read and write."""

    __slots__ = ("_empty", "_has_mean", "_types")

    def __init__(self, kind: str, index: int, native: Any) -> None:
        names = native.InputType.__members__
        self._types = {dtype: names[name] for dtype, name in DTYPES.items()}
        self._has_mean = kind == "layernorm"
        self._empty = allocator(index)

    def parameter(self, name: str, of: torch.Tensor, cols: int) -> tuple[torch.Tensor, Any]:
        """Return a parameter ``[cols]``, contiguous, and the native library's name of its type."""
        if of.shape != (cols,):
            raise OperandError(f"norm of rows of {cols}: the {name} is {list(of.shape)}.")
        kind = self._types.get(of.dtype)
        if kind is None:
            return of.float().contiguous(), self._types[_FLOAT32]
        return of if of.is_contiguous() else of.contiguous(), kind

    def parameters(
        self, weight: torch.Tensor, bias: torch.Tensor | None, cols: int
    ) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]]:
        """Return addresses and types of weight and bias, and the tensors that they belong to, which
        the caller holds until the kernel is enqueued."""
        weight, weight_type = self.parameter("weight", weight, cols)
        if bias is None:
            return (weight.data_ptr(), weight_type, 0, weight_type), (weight,)
        if not self._has_mean:
            raise OperandError("rmsnorm: a bias was given; a layernorm has one, this has none.")
        bias, bias_type = self.parameter("bias", bias, cols)
        return (weight.data_ptr(), weight_type, bias.data_ptr(), bias_type), (weight, bias)

    def empty_statistics(
        self, rows: int
    ) -> tuple[torch.Tensor | None, torch.Tensor, tuple[int, int]]:
        """Allocate the mean of a LayerNorm, and rstd; return both and their addresses."""
        rstd = self._empty((rows,), (1,), _FLOAT32)
        if not self._has_mean:
            return None, rstd, (0, rstd.data_ptr())
        mean = self._empty((rows,), (1,), _FLOAT32)
        return mean, rstd, (mean.data_ptr(), rstd.data_ptr())

    def statistic(self, name: str, of: torch.Tensor | None, rows: int) -> torch.Tensor:
        """Return a statistic ``[rows]``, contiguous in float32."""
        if of is None or of.shape != (rows,):
            shape = None if of is None else list(of.shape)
            raise OperandError(f"norm_backward of {rows} rows: the {name} is {shape}.")
        return of.float().contiguous()  # which return a tensor that is so already as it is


@runs(NormDesc, refuses=norm_problem, is_recorded=True)
class Norm:
    """The callable of a NormDesc: one call of the native library."""

    __slots__ = ("_dtype", "_empty", "_index", "_native_norm", "_operands", "_out_dtype", "kernel")

    def __init__(self, desc: NormDesc, device: torch.device, native: Any) -> None:
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._dtype, self._out_dtype = desc.dtype, desc.out_dtype
        self._operands = NormOperands(desc.kind, self._index, native)
        self._native_norm = native_norm(desc, desc.dtype, desc.out_dtype, self._index, native)
        self.kernel = "fp8core::norm_rows"

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return ``(y, mean or None, rstd)``; see the backend API.

        Raises:
            OperandError: ``x`` has another dtype than was bound, a parameter does not fit it, or an
                RMSNorm is given a bias.
        """
        return self._run(*adjacent_columns(x), weight, bias)

    def _run(
        self,
        x: torch.Tensor,
        stride: int,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *residual: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Normalize ``x``; its sum with a residual, given by the addresses of both and a stride."""
        if x.dtype != self._dtype:
            raise OperandError(f"norm: x is {x.dtype}, this one was bound for {self._dtype}.")
        rows, cols = x.shape
        parameters, _parameter_copies = self._operands.parameters(weight, bias, cols)
        y = self._empty((rows, cols), (cols, 1), self._out_dtype)
        mean, rstd, statistics = self._operands.empty_statistics(rows)
        addresses = (
            *(x.data_ptr(), rows, cols, stride),
            *parameters,
            y.data_ptr(),
            *statistics,
            *residual,
        )
        self._native_norm(addresses, raw_stream(self._index))
        if not cols:  # the mean of nothing
            for statistic in (rstd,) if mean is None else (mean, rstd):
                statistic.fill_(torch.nan)
        return y, mean, rstd


@runs(AddNormDesc, refuses=lambda desc: norm_problem(desc.norm), is_recorded=True)
class AddNorm(Norm):
    """The callable of an AddNormDesc: one call of the native library."""

    __slots__ = ()

    def __init__(self, desc: AddNormDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc.norm, device, native)

    def __call__(  # type: ignore[override]  # it takes one tensor more
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return ``(sum, y, mean or None, rstd)``; see the backend API."""
        _check_same("add_norm", ("x", x), ("the residual", residual))
        x, stride = adjacent_columns(x)
        residual, residual_stride = adjacent_columns(residual)
        total = self._empty(tuple(x.shape), (x.shape[1], 1), self._dtype)
        added = (residual.data_ptr(), residual_stride, total.data_ptr())
        return (total, *self._run(x, stride, weight, bias, *added))


@runs(NormBackwardDesc, refuses=lambda desc: norm_problem(desc.norm), is_recorded=True)
class NormBackward:
    """The callable of a NormBackwardDesc: one call of the native library.

    ``dtype`` is that of x and of the gradient, None for the norm's; others become float32.
    """

    __slots__ = (
        "_desc",
        "_device",
        "_dtype",
        "_empty",
        "_has_mean",
        "_index",
        "_library",
        "_native_backward",
        "_num_partials",
        "_operands",
        "kernel",
    )

    def __init__(
        self,
        desc: NormBackwardDesc,
        device: torch.device,
        native: Any,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._desc, self._device, self._library = desc, device, native
        self._dtype = desc.norm.dtype if dtype is None else dtype
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._has_mean = desc.norm.kind == "layernorm"
        self._operands = NormOperands(desc.norm.kind, self._index, native)
        norm = native_norm(desc.norm, self._dtype, desc.norm.dtype, self._index, native)
        self._native_backward = norm.backward
        self._num_partials = functools.lru_cache(maxsize=256)(norm.backward_partials)
        self.kernel = "fp8core::norm_backward_rows"

    def __call__(
        self,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return ``(grad_x, grad_weight, grad_bias or None)``; see the backend API.

        ``added`` is added to ``grad_x``, after it is rounded, and the sum is rounded again.
        """
        if grad_output.dtype != self._dtype or x.dtype != self._dtype:
            in_float32 = NormBackward(self._desc, self._device, self._library, _FLOAT32)
            wide = (grad_output.float(), x.float())
            return in_float32(*wide, weight, mean, rstd, added)
        (rows, cols), empty = grad_output.shape, self._empty
        _check_same("norm_backward", ("x", x), ("the gradient", grad_output))
        grad_output, stride = adjacent_columns(grad_output)
        x, x_stride = adjacent_columns(x)
        weight, weight_type = self._operands.parameter("weight", weight, cols)
        rstd = self._operands.statistic("rstd", rstd, rows)
        grad_x = empty((rows, cols), (cols, 1), self._desc.norm.dtype)
        grad_weight = empty((cols,), (1,), _FLOAT32)
        grad_bias, mean_address, grad_bias_address, parameters = None, 0, 0, 1
        if self._has_mean:
            mean = self._operands.statistic("mean", mean, rows)
            grad_bias = empty((cols,), (1,), _FLOAT32)
            mean_address, grad_bias_address = mean.data_ptr(), grad_bias.data_ptr()
            parameters = 2
        if not (rows and cols):
            grad_weight.zero_()
            if grad_bias is not None:
                grad_bias.zero_()
            return grad_x, grad_weight, grad_bias
        size = self._num_partials(rows, cols) * parameters * cols
        workspace = empty((size,), (1,), _FLOAT32)
        addresses: tuple[Any, ...] = (
            grad_output.data_ptr(),
            rows,
            cols,
            stride,
            x.data_ptr(),
            x_stride,
            weight.data_ptr(),
            weight_type,
            mean_address,
            rstd.data_ptr(),
            grad_x.data_ptr(),
            grad_weight.data_ptr(),
            grad_bias_address,
            workspace.data_ptr(),
        )
        if added is not None:
            _check_same("norm_backward", ("the gradient", grad_x), ("the residual's", added))
            added, added_stride = adjacent_columns(added)
            addresses = (*addresses, added.data_ptr(), added_stride)
        self._native_backward(addresses, raw_stream(self._index))
        return grad_x, grad_weight, grad_bias


def _check_same(op: str, first: tuple[str, torch.Tensor], second: tuple[str, torch.Tensor]) -> None:
    """Raise OperandError unless both tensors, each behind its name, have one shape and dtype."""
    (name, x), (second_name, y) = first, second
    if x.shape != y.shape or x.dtype != y.dtype:
        raise OperandError(
            f"{op}: {name} is {x.dtype} {list(x.shape)}, {second_name} {y.dtype} {list(y.shape)}; "
            f"they have one shape and dtype."
        )


def native_norm(
    desc: NormDesc, dtype: torch.dtype, out_dtype: torch.dtype, index: int, native: Any
) -> Any:
    """Return the native norm that reads ``dtype`` and writes ``out_dtype``."""
    types = native.InputType.__members__
    return native.Norm(
        native.NormKind.__members__[desc.kind],
        desc.zero_centered,
        desc.eps,
        types[DTYPES[dtype]],
        types[DTYPES[out_dtype]],
        index,
    )
