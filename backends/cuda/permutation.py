"""Routes of tokens to the rows of experts, and rows sent along them: one launch for all rows."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import (
    ROUTE_KINDS,
    CombineBackwardDesc,
    CombineDesc,
    DispatchDesc,
    OperandError,
    RouteDesc,
    UnsupportedError,
)
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.stream import index_of, raw_stream

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _route_problem(desc: RouteDesc) -> str | None:
    """Say why there is no kernel for ``desc``, or None."""
    if desc.kind not in ROUTE_KINDS:
        return f"no route from {desc.kind!r}"
    return None if desc.dtype in _INTEGERS else f"no route of {desc.dtype}"


@runs(RouteDesc, refuses=_route_problem)
class Route:
    """The callable of a RouteDesc: a large mask is read twice; experts are sorted by torch."""

    __slots__ = ("_desc", "_empty", "_index", "_native", "kernel")

    def __init__(self, desc: RouteDesc, device: torch.device, native: Any) -> None:
        self._desc = desc
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._native = native
        self.kernel = "fp8core::number_rows" if desc.kind == "mask" else "fp8core::invert_rows"

    def __call__(self, routing: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``index`` and ``sources``; see the backend API.

        Raises:
            OperandError: ``routing`` of another dtype than was bound, or not ``[t, k]``.
            UnsupportedError: a token has more slots than the kernel takes.
        """
        if routing.dtype != self._desc.dtype or routing.dim() != 2:
            raise OperandError(
                f"route: {routing.dtype} {list(routing.shape)}; bound for {self._desc.dtype}, two "
                f"dimensions."
            )
        tokens, slots = routing.shape
        _check_slots(self._native, slots)
        index = self._empty((tokens, slots), (max(slots, 1), 1), torch.int32)
        sources = self._empty((rows,), (1,), torch.int32)
        if self._desc.kind == "mask" and tokens and slots:
            routing = routing.contiguous()
            size = self._native.route_workspace_ints(tokens, slots)
            workspace = self._empty((size,), (1,), torch.int32)  # held until it is enqueued
            inputs = (routing.data_ptr(), routing.element_size(), tokens, slots, rows)
            addresses = (index.data_ptr(), sources.data_ptr(), workspace.data_ptr())
            stream = raw_stream(self._index)
            self._native.route_by_mask((*inputs, *addresses), self._index, stream)
            return index, sources
        if self._desc.kind == "experts":
            routing = _places(routing)
        if routing.dtype not in (torch.int32, torch.int64):
            routing = routing.int()
        routing = routing.contiguous()
        is_long = routing.dtype == torch.int64
        arguments = (routing.data_ptr(), is_long, routing.numel(), rows)
        results = (index.data_ptr(), sources.data_ptr())
        self._native.route_by_rows((*arguments, *results), self._index, raw_stream(self._index))
        return index, sources


def _places(routing: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[t, k]``, expert by expert; negative for an expert that is negative."""
    experts = routing.flatten()
    if experts.dtype in (torch.bool, torch.uint8):
        experts = experts.int()
    order = experts.sort(stable=True).indices
    counted = torch.arange(len(order), device=order.device) - (experts < 0).sum()
    return torch.empty_like(order).scatter_(0, order, counted).reshape(routing.shape)


def _rows_problem(desc: DispatchDesc | CombineDesc | CombineBackwardDesc) -> str | None:
    return None if desc.dtype in DTYPES else f"no rows of {desc.dtype}"


class _Rows:
    """Base of the callables: the dtype of the rows, and memory for results."""

    __slots__ = ("_dtype", "_empty", "_index", "_native", "_native_rows", "kernel")

    def __init__(
        self,
        desc: DispatchDesc | CombineDesc | CombineBackwardDesc,
        device: torch.device,
        native: Any,
    ) -> None:
        self._dtype = desc.dtype
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._native = native
        self._native_rows = native.Rows(self._type_of(desc.dtype), self._index)

    def _type_of(self, dtype: torch.dtype) -> Any:
        return self._native.InputType.__members__[DTYPES[dtype]]

    def _check(self, op: str, x: torch.Tensor, index: torch.Tensor) -> None:
        if x.dtype != self._dtype or x.dim() != 2:
            raise OperandError(
                f"{op} of {x.dtype} {list(x.shape)}; bound for {self._dtype}, two dimensions."
            )
        _check_integers(f"{op}: index", index, x, 2)
        _check_slots(self._native, index.shape[1])

    def _result(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return self._empty((rows, cols), (max(cols, 1), 1), dtype)

    def _weights(
        self, op: str, weights: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Return weights as the kernel reads them, and their type."""
        _check_floats(f"{op}: weights", weights, index, tuple(index.shape))
        if weights.dtype not in DTYPES:
            weights = weights.float()
        weights = weights.contiguous()
        return weights, self._type_of(weights.dtype)


@runs(DispatchDesc, refuses=_rows_problem)
class DispatchRows(_Rows):
    """The callable of a DispatchDesc: each row of ``x`` is read once."""

    __slots__ = ("_skips",)

    def __init__(self, desc: DispatchDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        self._skips = desc.skips_improbable
        self.kernel = "fp8core::send_rows"

    def __call__(
        self,
        x: torch.Tensor,
        index: torch.Tensor,
        sources: torch.Tensor,
        *,
        probs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``y`` and the probabilities of its rows; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, shape or device than the kernel reads.
        """
        self._check("dispatch_rows", x, index)
        _check_integers("dispatch_rows: sources", sources, x, 1)
        _check_tokens("dispatch_rows", x, index)
        tokens, cols = x.shape
        x, stride = adjacent_columns(x)
        index, sources = index.contiguous(), sources.contiguous()
        rows = sources.shape[0]
        y = self._result(rows, cols, self._dtype)
        inputs = (x.data_ptr(), tokens, cols, stride, index.data_ptr(), sources.data_ptr())
        arguments = (*inputs, index.shape[1], rows, y.data_ptr())
        if probs is None:
            self._native_rows.dispatch(arguments, raw_stream(self._index))
            return y, None
        _check_floats("dispatch_rows: probs", probs, index, tuple(index.shape))
        probs = probs.contiguous()  # held until the kernel is enqueued
        permuted = self._empty((rows,), (1,), probs.dtype)
        more = (probs.data_ptr(), permuted.data_ptr(), probs.element_size(), self._skips)
        self._native_rows.dispatch((*arguments, *more), raw_stream(self._index))
        return y, permuted


@runs(CombineDesc, refuses=_rows_problem)
class CombineRows(_Rows):
    """The callable of a CombineDesc: each row of ``x`` is read once, two of a token at a time."""

    __slots__ = ()

    def __init__(self, desc: CombineDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        self.kernel = "fp8core::add_rows"

    def __call__(
        self,
        x: torch.Tensor,
        index: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        row_values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``y`` and the values of each token's rows; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, shape or device than the kernel reads.
        """
        self._check("combine_rows", x, index)
        rows, cols = x.shape
        x, stride = adjacent_columns(x)
        index = index.contiguous()
        tokens, slots = index.shape
        y = self._result(tokens, cols, self._dtype)
        arguments: tuple[Any, ...] = (x.data_ptr(), rows, cols, stride, index.data_ptr())
        arguments = (*arguments, tokens, slots, y.data_ptr())
        kind = self._type_of(torch.float32)
        if weights is not None:
            weights, kind = self._weights("combine_rows", weights, index)
        if weights is not None or row_values is not None:
            arguments = (*arguments, 0 if weights is None else weights.data_ptr(), kind)
        values = None
        if row_values is not None:
            _check_floats("combine_rows: row_values", row_values, index, (rows,))
            row_values = row_values.contiguous()
            values = self._result(tokens, slots, row_values.dtype)
            more = (row_values.data_ptr(), values.data_ptr(), row_values.element_size())
            arguments = (*arguments, *more)
        self._native_rows.combine(arguments, raw_stream(self._index))
        return y, values


@runs(CombineBackwardDesc, refuses=_rows_problem)
class CombineRowsBackward(_Rows):
    """The callable of a CombineBackwardDesc: both gradients in one launch."""

    __slots__ = ()

    def __init__(self, desc: CombineBackwardDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        self.kernel = "fp8core::add_rows_backward"

    def __call__(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        index: torch.Tensor,
        sources: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of ``x`` and of the weights; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, shape or device than the kernel reads.
        """
        op = "combine_rows_backward"
        self._check(op, x, index)
        self._check(op, grad, index)
        _check_integers(f"{op}: sources", sources, x, 1)
        _check_tokens(op, grad, index)
        if sources.shape[0] != x.shape[0] or grad.shape[1] != x.shape[1]:
            raise OperandError(
                f"{op}: x {list(x.shape)}, grad {list(grad.shape)} and sources "
                f"{list(sources.shape)}; expected a source for each row, and as many columns."
            )
        dtype = weights.dtype
        weights, kind = self._weights(op, weights, index)
        (rows, cols), (tokens, slots) = x.shape, index.shape
        grad, grad_stride = adjacent_columns(grad)
        x, stride = adjacent_columns(x)
        index, sources = index.contiguous(), sources.contiguous()
        grad_x = self._result(rows, cols, self._dtype)
        grad_weights = self._result(tokens, slots, torch.float32)
        inputs = (grad.data_ptr(), tokens, cols, grad_stride, x.data_ptr(), rows, cols, stride)
        route = (index.data_ptr(), sources.data_ptr(), slots, weights.data_ptr(), kind)
        results = (grad_x.data_ptr(), grad_weights.data_ptr())
        self._native_rows.combine_backward((*inputs, *route, *results), raw_stream(self._index))
        return grad_x, grad_weights.to(dtype)


def _check_slots(native: Any, slots: int) -> None:
    if slots > native.MOST_SLOTS:
        raise UnsupportedError(
            f"a route with {slots} experts, or rows, of a token: the kernels take "
            f"{native.MOST_SLOTS}. Choose fp8core.use_backend(route='reference', "
            f"dispatch_rows='reference', combine_rows='reference', "
            f"combine_rows_backward='reference')."
        )


def _check_tokens(op: str, x: torch.Tensor, index: torch.Tensor) -> None:
    if x.shape[0] != index.shape[0]:
        raise OperandError(f"{op}: {x.shape[0]} tokens, and an index of {index.shape[0]}.")


def _check_integers(name: str, x: torch.Tensor, beside: torch.Tensor, dims: int) -> None:
    if x.dtype != torch.int32 or x.dim() != dims or x.device != beside.device:
        raise OperandError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; expected torch.int32, "
            f"{dims} dimensions, on {beside.device}."
        )


def _check_floats(name: str, x: torch.Tensor, beside: torch.Tensor, shape: tuple[int, ...]) -> None:
    if x.dtype not in _FLOATS or tuple(x.shape) != shape or x.device != beside.device:
        raise OperandError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; expected floats of 16, 32 or 64 "
            f"bits, {list(shape)}, on {beside.device}."
        )
