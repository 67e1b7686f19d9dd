"""Norms with the cast of their result, in one pass over x or, where scales need amaxes, in two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import FusedDesc, NormDesc, OperandSpec, Quantized
from fp8core_backends.cuda.layout import adjacent_columns, scale_mode, slots_of
from fp8core_backends.cuda.norm import Norm, NormOperands, native_norm, norm_problem
from fp8core_backends.cuda.operations import first_problem
from fp8core_backends.cuda.quantize import Quantize
from fp8core_backends.cuda.stream import index_of, raw_stream

_MODES = ("tensor", "row", "vec128")
_HALVES = (torch.bfloat16, torch.float16)
_FLOAT32 = torch.float32
_VECTOR = 8  # elements that a kernel reads at once: 16 bytes


def fused_norm_problem(desc: FusedDesc, spec: OperandSpec) -> str | None:
    """Say why no kernel computes ``desc`` and casts by ``spec``, or None."""
    norm = desc.producer
    assert isinstance(norm, NormDesc)
    rounds = norm.out_dtype == norm.dtype
    reason = first_problem(
        (norm.dtype not in _HALVES, f"no fusion from {norm.dtype}"),
        (
            norm.out_dtype != desc.quantize.dtype,
            f"the cast takes {desc.quantize.dtype}, the norm gives {norm.out_dtype}",
        ),
        (
            not rounds and norm.out_dtype != _FLOAT32,
            f"no fusion from {norm.dtype} by way of {norm.out_dtype}",
        ),
        (
            scale_mode(spec) not in _MODES,
            f"no fusion with {spec.scale_format} scales of blocks of {spec.block}",
        ),
        (
            not rounds and not spec.delayed,
            "a fusion rounds before the cast unless the scale is delayed",
        ),
        (desc.quantize.sums, "no column sums of a norm"),
        (desc.quantize.chunked, "no chunks of a norm"),
    )
    return reason or norm_problem(norm)


class FusedNorm:
    """``(quantized y, mean or None, rstd)`` from ``x``, a weight and a bias; see FusedDesc."""

    __slots__ = (
        "_cast",
        "_dtype",
        "_index",
        "_most_columns",
        "_native_fused",
        "_norm",
        "_operands",
        "kernel",
    )

    def __init__(
        self,
        desc: FusedDesc,
        device: torch.device,
        native: Any,
        panel: tuple[int, int, int, int] | None = None,
    ) -> None:
        """Bind; ``panel``: the fields of the native library's PanelChoice, for measurements."""
        norm, spec = desc.producer, desc.quantize.rowwise or desc.quantize.columnwise
        assert isinstance(norm, NormDesc)
        assert spec is not None
        self._dtype = norm.dtype
        self._index = index_of(device)
        self._operands = NormOperands(norm.kind, self._index, native)
        self._norm = Norm(norm, device, native)
        self._cast = Quantize(desc.quantize, spec, device, native)
        self._native_fused = native.QuantizeNorm(
            native_norm(norm, norm.dtype, norm.out_dtype, self._index, native),
            self._cast.native_cast,
            *(() if panel is None else (native.PanelChoice(*panel),)),
        )
        self._most_columns: int = native.MOST_TWICE_PASSED
        is_single_pass = spec.format == "e4m3" and spec.delayed
        self.kernel = "fp8core::norm_panel" if is_single_pass else "fp8core::norm_first_pass"

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Quantized, torch.Tensor | None, torch.Tensor]:
        """Normalize ``x`` and quantize the result.

        Raises:
            OperandError: ``x`` has another dtype than was bound, a parameter does not fit it, or an
                RMSNorm is given a bias.
        """
        rows, cols = x.shape
        x, stride = adjacent_columns(x)
        address = x.data_ptr()
        parameters, _parameter_copies = self._operands.parameters(weight, bias, cols)
        is_whole = rows and 0 < cols <= self._most_columns and x.dtype == self._dtype
        is_of_vectors = not ((cols | stride) % _VECTOR or (address | parameters[0]) % 16)
        if not (is_whole and is_of_vectors) or parameters[2] % 16:
            y, mean, rstd = self._norm(x, weight, bias)
            quantized = self._cast(y, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)
            return quantized, mean, rstd
        slots = slots_of(scale, amax_out, nonfinite_out)
        quantized, results, _workspace = self._cast.results(rows, cols, slots)
        mean, rstd, statistics = self._operands.empty_statistics(rows)
        self._native_fused(
            (*parameters, *statistics, *(address, rows, cols, stride), *results),
            raw_stream(self._index),
        )
        return quantized, mean, rstd


def bind_fused_norm(
    desc: FusedDesc, device: torch.device, native: Any
) -> Callable[..., tuple[Any, ...]]:
    """Return the callable of ``desc``."""
    return FusedNorm(desc, device, native)
