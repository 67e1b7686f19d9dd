"""Arguments for any descriptor, on the device under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from fp8core.backend_api import (
    GATED,
    GROUP_STEP,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    AmaxDesc,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
    ScaleUpdateDesc,
)
from fp8core.testing import inputs
from fp8core.testing.subject import Subject, on_cpu, storage_step

__all__ = [
    "Call",
    "arguments",
    "group_offsets",
    "offsets_for",
    "operand",
    "quantize_keywords",
    "quantize_size",
    "step_of",
]


class Call(NamedTuple):
    """The arguments of one call; ``written`` names the ones that it may write, by position or name.

    ``call.run(subject)`` makes the call.
    """

    desc: OpDesc
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    written: frozenset[str | int] = frozenset()

    def run(self, subject: Subject) -> Any:
        """Have the backend make the call."""
        return subject.run(self.desc, *self.arguments, **self.keywords)

    def protected(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments that must stay as they are."""
        kept = [value for at, value in enumerate(self.arguments) if at not in self.written]
        return kept, {k: value for k, value in self.keywords.items() if k not in self.written}

    def again(self) -> Call:
        """Return the same call with arguments of its own."""
        arguments, keywords = pytree.tree_map_only(
            torch.Tensor, lambda x: x.clone(), (self.arguments, self.keywords)
        )
        return self._replace(arguments=arguments, keywords=keywords)


def up(size: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is not below ``size``."""
    return -(-size // step) * step


def quantize_size(subject: Subject, desc: QuantizeDesc, rows: int, cols: int) -> tuple[int, int]:
    """Return the sizes next above that operands of ``desc`` can be stored in."""
    row_step = storage_step(subject, desc.columnwise)
    return up(rows, row_step), up(cols, storage_step(subject, desc.rowwise))


def quantize_keywords(
    subject: Subject, desc: QuantizeDesc, groups: int = 1, seed: int = 11
) -> dict[str, Any]:
    """Return what the specs of ``desc`` ask for besides x: scale and amax_out, or rng."""
    specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    if any(spec.delayed for spec in specs):
        scale = torch.arange(1, groups + 1) * 0.37
        return {
            "scale": subject.here(scale),
            "amax_out": torch.full((groups,), 0.5, device=subject.device),
        }
    if any(spec.stochastic for spec in specs):
        return {"rng": torch.tensor([seed, 3])}
    return {}


def group_offsets(sizes: Sequence[int]) -> torch.Tensor:
    """Return the offsets ``[groups + 1]`` of groups of these sizes, on the CPU."""
    return torch.tensor([0, *sizes], device="cpu").cumsum(0)


def offsets_for(
    subject: Subject, desc: QuantizeDesc | GroupedGemmDesc, sizes: Sequence[int]
) -> torch.Tensor:
    """Return the offsets of groups of these sizes where ``desc`` wants them."""
    made = group_offsets(sizes)
    if not desc.offsets_on_device:
        return made
    there: torch.Tensor = subject.here(made)
    return there


def step_of(desc: QuantizeDesc | GroupedGemmDesc) -> int:
    """Return the step of :func:`split_groups` for operands of ``desc``."""
    return GROUP_STEP if desc.offsets_on_device else 1


def operand(
    subject: Subject, spec: OperandSpec | None, x: torch.Tensor, *, columnwise: bool = False
) -> Operand:
    """Quantize ``x`` (of the device under test) in one orientation; its view if ``spec`` is None.

    The backend quantizes if it can, else the judge does, and the operand is copied.
    """
    if spec is None:
        return Operand(x.t() if columnwise else x)
    desc = QuantizeDesc(x.dtype, None if columnwise else spec, spec if columnwise else None)
    run = subject.quantizer(desc)
    made: Quantized = run(desc, x, **quantize_keywords(subject, desc))
    found = made.columnwise if columnwise else made.rowwise
    assert found is not None
    return found


def _quantize(subject: Subject, desc: QuantizeDesc) -> Call:
    offsets: tuple[torch.Tensor, ...] = ()
    if desc.grouped:
        step = storage_step(subject, desc.columnwise)
        sizes = [0, up(33, step), up(1, step), 0, up(9, step)]
        x = inputs.matrix("holes", *quantize_size(subject, desc, sum(sizes), 70), desc.dtype)
        offsets = (offsets_for(subject, desc, sizes),)
    else:
        sizes = [0]
        x = inputs.matrix("holes", *quantize_size(subject, desc, 33, 70), desc.dtype)
    keywords = quantize_keywords(subject, desc, len(sizes))
    return Call(desc, (subject.here(x), *offsets), keywords, frozenset({"amax_out"}))


def _dequantize(subject: Subject, desc: DequantizeDesc) -> Call:
    step = storage_step(subject, desc.operand)
    x = subject.here(inputs.matrix("holes", up(17, step), up(70, step), torch.float32))
    return Call(desc, (operand(subject, desc.operand, x),), {})


def _gemm(subject: Subject, desc: GemmDesc) -> Call:
    align = subject.alignment(desc)
    m, n, k = up(5, align.m), up(7, align.n), up(160, align.k)
    a, b = gemm_operands(subject, desc, m, n, k)
    keywords: dict[str, Any] = {"bias": subject.here(inputs.moderate(1, n, desc.out_dtype, 2)[0])}
    if desc.accumulate:
        keywords["out"] = subject.here(inputs.moderate(m, n, desc.out_dtype, 3))
    return Call(desc, (a, b), keywords, frozenset({"out"}))


def gemm_operands(
    subject: Subject, desc: GemmDesc, m: int, n: int, k: int, *, columnwise: bool = False
) -> tuple[Operand, Operand]:
    """Return operands ``a [m, k]`` and ``b [n, k]``, or, ``columnwise``, those of transposes."""
    dtype = torch.float32 if desc.low_precision else desc.out_dtype
    made = []
    for spec, rows, seed in ((desc.a, m, 20), (desc.b, n, 40)):
        x = subject.here(inputs.moderate(rows, k, dtype, seed))
        own = x.t().contiguous() if columnwise else x
        made.append(operand(subject, spec, own, columnwise=columnwise))
    return made[0], made[1]


class Groups(NamedTuple):
    """A grouped GEMM's arguments and what they were made of."""

    arguments: tuple[Any, ...]
    sizes: list[int]
    m: int
    n: int


def grouped_operands(
    subject: Subject, desc: GroupedGemmDesc, rows: Sequence[int] = (0, 150, 1, 0, 35)
) -> Groups:
    """Return operands of groups of ``rows`` each, or the next aligned number above.

    By default one is empty, one is a step long, and one is longer than a block.
    """
    align = subject.alignment(desc)
    step = align.k if desc.contract_groups else align.m
    sizes = [up(size, step) for size in rows]
    total = sum(sizes)
    offsets = offsets_for(subject, desc, sizes)
    m, n = up(6, align.m), up(10, align.n)
    dtype = torch.float32 if desc.low_precision else desc.out_dtype
    make = partial(_grouped_operand, on_device=desc.offsets_on_device)
    if desc.contract_groups:
        a, b = (
            make(subject, spec, inputs.moderate(total, cols, dtype, seed), offsets, 1)
            for spec, cols, seed in ((desc.a, m, 20), (desc.b, n, 40))
        )
        return Groups((a, b, offsets), sizes, m, n)
    k = up(160, align.k)
    tokens = inputs.moderate(total, k, dtype, 20)
    a = make(subject, desc.a, tokens, offsets, 0)
    weights = [
        operand(subject, desc.b, subject.here(inputs.moderate(n, k, dtype, 40 + group)))
        for group in range(len(sizes))
    ]
    return Groups((a, weights, offsets), sizes, total, n)


def _grouped_operand(
    subject: Subject,
    spec: OperandSpec | None,
    x: torch.Tensor,
    offsets: torch.Tensor,
    dim: int,
    *,
    on_device: bool,
) -> Operand:
    """Quantize ``x``, grouped along its rows: rowwise for ``dim`` 0, columnwise for 1."""
    x = subject.here(x)
    if spec is None:
        return Operand(x.t() if dim else x)
    rowwise, columnwise = (None, spec) if dim else (spec, None)
    desc = QuantizeDesc(x.dtype, rowwise, columnwise, grouped=True, offsets_on_device=on_device)
    keywords = quantize_keywords(subject, desc, len(offsets) - 1)
    made: Quantized = subject.quantizer(desc)(desc, x, offsets, **keywords)
    found = made[dim]
    assert found is not None
    return found


def _grouped_gemm(subject: Subject, desc: GroupedGemmDesc) -> Call:
    made = grouped_operands(subject, desc)
    keywords: dict[str, Any] = {}
    if not desc.contract_groups:
        biases = inputs.moderate(len(made.sizes), made.n, desc.out_dtype, 2)
        keywords["bias"] = list(subject.here(biases))
    if desc.accumulate:
        out = inputs.moderate(made.m, made.n, desc.out_dtype, 3)
        count = len(made.sizes)
        keywords["out"] = (
            [subject.here(out) for _ in range(count)] if desc.contract_groups else subject.here(out)
        )
    return Call(desc, made.arguments, keywords, frozenset({"out"}))


def _scale_update(subject: Subject, desc: ScaleUpdateDesc) -> Call:
    sizes = ((4, 3), (1, 2), (4, 1))
    histories = [inputs.matrix("decades", *size, torch.float32).abs() for size in sizes]
    histories[0] = torch.tensor([[0.0, torch.inf, 2.0], *[[3.0, 0.5, 8.0]] * 3])
    scales = [torch.arange(1, size[1] + 1) * 0.5 for size in sizes]
    targets = [torch.full((size[1],), 448.0) for size in sizes]
    made = subject.here((histories, scales, targets))
    return Call(desc, tuple(made), {}, frozenset({0, 1}))


def _norm(subject: Subject, desc: NormDesc) -> Call:
    x = inputs.moderate(9, 70, desc.dtype, 1)
    own = [inputs.moderate(1, 70, desc.dtype, seed)[0] / 4 for seed in (2, 3)]
    return Call(desc, tuple(subject.here((x, *own[: 2 if desc.kind == "layernorm" else 1]))), {})


def _norm_backward(subject: Subject, desc: NormBackwardDesc) -> Call:
    x, weight, *_ = _norm(subject, desc.norm).arguments
    values = on_cpu(x).double()  # some devices have no float64
    mean = values.mean(-1) if desc.norm.kind == "layernorm" else None
    centered = values if mean is None else values - mean[:, None]
    rstd = torch.rsqrt(centered.square().mean(-1) + desc.norm.eps).float()
    grad = inputs.moderate(9, 70, desc.norm.dtype, 4)
    saved = (None if mean is None else mean.float(), rstd)
    return Call(desc, (subject.here(grad), x, weight, *subject.here(saved)), {})


def _activation(subject: Subject, desc: ActivationDesc) -> Call:
    cols = 140 if desc.name in GATED else 70
    return Call(desc, (subject.here(inputs.moderate(9, cols, desc.dtype, 1)),), {})


def _activation_backward(subject: Subject, desc: ActivationBackwardDesc) -> Call:
    cols = 140 if desc.name in GATED else 70
    x = inputs.moderate(9, cols, desc.dtype, 1)
    return Call(desc, tuple(subject.here((inputs.moderate(9, 70, desc.dtype, 4), x))), {})


def _amax(subject: Subject, desc: AmaxDesc) -> Call:
    return Call(desc, (subject.here(inputs.matrix("decades", 9, 70, desc.dtype)),), {})


def _fused(subject: Subject, desc: FusedDesc) -> Call:
    """Return the producer's arguments, its rows and columns as the cast can store them."""
    call = arguments(subject, desc.producer)
    step = storage_step(subject, desc.quantize.rowwise, desc.quantize.columnwise)

    def fit(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        rows, cols = up(9, step), 140 if x.shape[-1] == 140 else 70
        if x.ndim == 1:
            return _tiled(x, up(70, step)) if x.shape[0] == 70 else _tiled(x, rows)
        cols = 2 * up(70, step) if cols == 140 else up(70, step)
        return torch.stack([_tiled(row, cols) for row in x])[
            torch.arange(rows, device=x.device) % len(x)
        ]

    own = tuple(fit(x) for x in call.arguments)
    keywords = quantize_keywords(subject, desc.quantize)
    return Call(desc, own, keywords, frozenset({"amax_out"}))


def _tiled(x: torch.Tensor, size: int) -> torch.Tensor:
    return x[torch.arange(size, device=x.device) % len(x)]


def _add_norm(subject: Subject, desc: AddNormDesc) -> Call:
    x, *own = _norm(subject, desc.norm).arguments
    residual = subject.here(inputs.moderate(9, 70, desc.norm.dtype, 7))
    return Call(desc, (x, residual, *own), {})


_MAKERS: dict[type, Callable[[Subject, Any], Call]] = {
    QuantizeDesc: _quantize,
    DequantizeDesc: _dequantize,
    GemmDesc: _gemm,
    GroupedGemmDesc: _grouped_gemm,
    AmaxDesc: _amax,
    ScaleUpdateDesc: _scale_update,
    NormDesc: _norm,
    NormBackwardDesc: _norm_backward,
    ActivationDesc: _activation,
    ActivationBackwardDesc: _activation_backward,
    FusedDesc: _fused,
    AddNormDesc: _add_norm,
}


def arguments(subject: Subject, desc: OpDesc) -> Call:
    """Return an ordinary call of ``desc``: odd sizes, zeros and -0 among the values."""
    return _MAKERS[type(desc)](subject, desc)
