"""Laws 1, 3 and 6: a cast counts the NaN and inf that it quantizes away. Law 4 beyond the range of
a result's dtype: infinity, which a loss scaler looks for."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    Operand,
    QuantizeDesc,
)
from fp8core.chain.alone import in_torch
from fp8core.conformance import inputs
from fp8core.conformance.calls import ORDINARY, arguments, calls_of, exact
from fp8core.conformance.checks import FUSED, law
from fp8core.conformance.compare import Broken, require, same_tensors, within
from fp8core.conformance.judged import LARGE, MANY_GROUPS, group_sizes, has_both
from fp8core.conformance.laws.fused import SIZES
from fp8core.conformance.laws.gemm import operands_by_group, parts_of
from fp8core.conformance.laws.quantize import joined
from fp8core.conformance.operands import (
    aligned,
    grouped_operands,
    offsets_for,
    operand,
    quantize_keywords,
    quantize_size,
    source_dtype,
    up,
)
from fp8core.conformance.subject import CPU, Subject, on_cpu, storage_step

F16 = torch.float16
BEYOND = 1.05
"""A sum beyond this multiple of the largest value is infinity, in whatever order it is added."""


def _overflows(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Require infinity of the sign of ``expected`` (float64) where that is beyond the dtype's
    range, and a finite value where it is well within."""
    got, largest = on_cpu(result).double(), torch.finfo(result.dtype).max
    beyond = expected.abs() > BEYOND * largest
    inside = (expected.abs() < largest / BEYOND) & (expected != 0)
    require(bool(beyond.any()), f"{name}: nothing is beyond {largest:.6g}, the kit is wrong")
    wrong = beyond & (got != expected.sign() * math.inf)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        text = f"{name}: {got[at].item():.6g} at {list(at)}, expected {expected[at].item():.6g}"
        raise Broken(f"{text}, which is infinity in {result.dtype}")
    require(bool(got[inside].isfinite().all()), f"{name}: not finite within the range")


def _large(desc: GemmDesc, rows: int, k: int, seed: int) -> torch.Tensor:
    """Return rows of one sign each, so large that the product of any two values overflows."""
    magnitude = 1000.0 if desc.out_dtype == F16 else 2.0**70
    dtype = source_dtype(desc)
    x = (1 + inputs.moderate(rows, k, torch.float32, seed).abs() / 8) * magnitude
    x[1::2] *= -1
    return x.to(dtype)


def _keeps_magnitudes(desc: GemmDesc) -> bool:
    """Whether neither a caller's scale nor a transform changes the operands' magnitudes."""
    specs = (desc.a, desc.b)
    return not any(spec is not None and (spec.delayed or spec.transform) for spec in specs)


@law(4, "gemm", applies=_keeps_magnitudes)
def gemm_overflows_to_infinity(subject: Subject, desc: GemmDesc) -> None:
    """A product beyond the range of its dtype is infinity, not the largest value."""
    m, n, k = aligned(subject, desc, 5, 7, 160)
    a, b = (
        operand(subject, spec, subject.here(_large(desc, rows, k, seed)))
        for spec, rows, seed in ((desc.a, m, 20), (desc.b, n, 40))
    )
    keywords = {}
    if desc.accumulate:
        keywords["out"] = torch.zeros(m, n, dtype=desc.out_dtype, device=subject.device)
    product = subject.run(desc, a, b, **keywords)
    expected = subject.values(desc.a, a) @ subject.values(desc.b, b).t()  # [m, k] x [n, k]
    _overflows(f"m n k {(m, n, k)}", product, expected)


def _is_low_and_apart(desc: GroupedGemmDesc) -> bool:
    return desc.a is not None and desc.b is not None and not desc.accumulate


@law(4, "grouped_gemm", applies=lambda desc: _is_low_and_apart(desc) and _keeps_magnitudes(desc))
def grouped_gemm_overflows_to_infinity(subject: Subject, desc: GroupedGemmDesc) -> None:
    """A group's product beyond the range of its dtype is infinity, not the largest value."""
    groups = grouped_operands(subject, desc, (0, 64, 32), (6, 10, 64))
    raised = _raised(groups.arguments[:2], 2.0**24)
    products = subject.run(desc, *raised, groups.arguments[2])
    parts = parts_of(desc, groups, products)
    operands = operands_by_group(desc, (*raised, groups.arguments[2]))
    for at, (first, second) in enumerate(operands):
        x, y = subject.values(desc.a, first), subject.values(desc.b, second)
        expected = x @ y.t()
        expected[expected.abs() < (x.abs() @ y.abs().t()) / 64] = 0.0  # cancelled: not judged
        if bool((expected.abs() > BEYOND * torch.finfo(desc.out_dtype).max).any()):
            _overflows(f"group {at}", parts[at], expected)


def _raised(
    operands: Sequence[Operand | Sequence[Operand]], factor: float
) -> list[Operand | list[Operand]]:
    """Return the operands with their float32 scales multiplied by ``factor``."""

    def raised(part: Operand) -> Operand:
        assert part.scale_inv is not None
        if part.global_scale_inv is not None:
            return part._replace(global_scale_inv=part.global_scale_inv * factor)
        if part.scale_inv.dtype == torch.float32:
            return part._replace(scale_inv=part.scale_inv * factor)
        return part

    return [
        raised(entry) if isinstance(entry, Operand) else [raised(part) for part in entry]
        for entry in operands
    ]


@law(4, "dequantize", applies=lambda desc: desc.dtype == F16)
def dequantize_overflows_to_infinity(subject: Subject, desc: DequantizeDesc) -> None:
    """A value beyond float16 is infinity, not the largest value."""
    rows, cols = quantize_size(subject, QuantizeDesc(F16, desc.operand, desc.operand), 33, 70)
    x = inputs.moderate(rows, cols, torch.float32, 1) * 1e5
    quantized = operand(subject, desc.operand, subject.here(x))
    expected = subject.values(desc.operand, quantized)
    if not desc.operand.delayed:
        _overflows("x", subject.run(desc, quantized), expected)


@law(4, "dequantize")
def dequantize_knows_every_code(subject: Subject, desc: DequantizeDesc) -> float:
    """Each code has its value, NaN and infinity included if the format has them."""
    spec = desc.operand
    quantize = QuantizeDesc(torch.float32, spec, None)
    rows, cols = quantize_size(subject, quantize, 32, 512)
    keywords = quantize_keywords(subject, quantize)
    x = inputs.moderate(rows, cols, torch.float32, 1)
    quantized = subject.here(subject.judged(quantize, x, **keywords).rowwise)
    codes = torch.arange(quantized.data.numel(), device=subject.device) % 256
    quantized.data.copy_(codes.reshape(quantized.data.shape))
    expected = subject.values(spec, quantized).to(desc.dtype).double()
    limit = torch.finfo(desc.dtype)
    bound = limit.eps * expected.abs().nan_to_num(0.0, 0.0, 0.0) + limit.tiny
    return within("x", subject.run(desc, quantized), expected, bound)


@law(4, "norm", applies=lambda desc: desc.out_dtype == desc.dtype)
def norm_overflows_to_infinity(subject: Subject, desc: NormDesc) -> None:
    """A normalized value whose product with its weight is beyond the range is infinity."""
    x, weight, *bias = arguments(subject, desc).arguments
    weight = torch.full_like(weight, 0.9 * torch.finfo(desc.dtype).max)
    y, *_ = subject.run(desc, x, weight, *bias)
    _overflows("y", y, exact(subject, desc, x, weight, *bias)[0][0])


@law(4, "norm_backward", applies=lambda desc: desc.norm.dtype == F16)
def norm_backward_overflows_to_infinity(subject: Subject, desc: NormBackwardDesc) -> None:
    """A gradient beyond float16 is infinity, so that a loss scaler sees that it is too large."""
    grad, x, weight, mean, rstd = arguments(subject, desc).arguments
    operands = (grad * 6000, x, weight * 6000, mean, rstd)
    _overflows("grad_x", subject.run(desc, *operands)[0], exact(subject, desc, *operands)[0][0])


@functools.cache
def _grows(name: str, params: tuple[float, ...]) -> bool:
    """Whether an activation takes a float32 far within the range beyond it."""
    run = in_torch(ActivationDesc, (name, torch.float32, torch.float32, params), CPU)
    return not bool(run(torch.full((1, 2), 2.0**80)).isfinite().all())


def _is_unbounded(desc: ActivationDesc) -> bool:
    """Whether a result can be beyond the range of an input within it."""
    return desc.out_dtype == desc.dtype and _grows(desc.name, desc.params)


@law(4, "activation", applies=_is_unbounded)
def activation_overflows_to_infinity(subject: Subject, desc: ActivationDesc) -> None:
    """A square or a gated product beyond the range is infinity."""
    (x,) = arguments(subject, desc, ORDINARY).arguments
    largest = math.sqrt(torch.finfo(desc.dtype).max)
    x = (x.double() * largest).to(desc.dtype)
    _overflows("y", subject.run(desc, x), exact(subject, desc, x)[0])


@law(4, "activation_backward", applies=lambda desc: desc.dtype == desc.out_dtype == F16)
def activation_backward_overflows_to_infinity(
    subject: Subject, desc: ActivationBackwardDesc
) -> None:
    """A gradient beyond float16 is infinity, so that a loss scaler sees that it is too large."""
    grad, x = arguments(subject, desc).arguments
    grad = torch.where(grad == 0, 1.0, grad.sign()) * torch.finfo(F16).max
    x = (x.abs() + 2).to(F16)
    expected, _ = exact(subject, desc, grad, x)
    if bool((expected.abs() > BEYOND * torch.finfo(F16).max).any()):
        _overflows("grad_x", subject.run(desc, grad, x), expected)


SHAPES = ((5, 7), (130, 200), (260, 1030), (0, 5), (5, 0))
BEFORE = 2**40 + 7
"""The count before the call, to which the call adds; more than 32 bits hold."""


def _count(subject: Subject) -> torch.Tensor:
    count: torch.Tensor = subject.here(torch.tensor([BEFORE]))
    return count


def _is_counted(subject: Subject, desc: OpDesc) -> bool:
    """Whether the backend counts; if it does not, the front end counts beside its cast."""
    return subject.variant(desc, counted=True) is not None


def _require_count(name: str, count: torch.Tensor, x: torch.Tensor) -> None:
    """Require ``count`` to have grown by the NaN and inf of ``x``, which is on the CPU."""
    counted, expected = int(on_cpu(count)) - BEFORE, int((~x.isfinite()).sum())
    require(counted == expected, f"{name}: counted {counted} NaN and inf, there are {expected}")


def _with(x: torch.Tensor, value: float, *positions: tuple[int, int]) -> torch.Tensor:
    for position in positions:
        x[position] = value
    return x


def _dense_inputs(subject: Subject, desc: QuantizeDesc) -> list[tuple[str, torch.Tensor]]:
    """Return matrices with many NaN and inf, with a single one at either end, and with none; those
    with many first, of each size."""
    named = []
    for shape in subject.sizes("quantize", *SHAPES):
        size = quantize_size(subject, desc, *shape)
        named.append((f"nonfinite {list(size)}", inputs.matrix("nonfinite", *size, desc.dtype)))
    size = quantize_size(subject, desc, *SHAPES[1])
    plain = inputs.matrix("huge", *size, desc.dtype)
    named.append(("the largest finite values", plain))
    values = {
        (0, 0): math.inf,
        (-1, -1): -math.inf,
        (size[0] // 2, -1): math.nan,
        (-1, 0): -math.nan,
    }
    for position, value in values.items():
        named.append((f"{value} at {position}", _with(plain.clone(), value, position)))
    return named


@law(1, "quantize", applies=lambda desc: not desc.grouped)
def quantize_counts_nan_and_inf(subject: Subject, desc: QuantizeDesc) -> None:
    """nonfinite_out grows by the NaN and inf of x, each counted once; operands are unchanged."""
    if not _is_counted(subject, desc):
        return
    every = _dense_inputs(subject, desc)
    many = every[: len(subject.sizes("quantize", *SHAPES))]
    halves = desc.halves() if has_both(desc) else ()
    for cast, named in ((desc, every), *((half, many) for half in halves)):
        for name, x in named:
            count = _count(subject)
            counted, plain = (
                subject.run(variant, subject.here(x), **quantize_keywords(subject, cast), **counts)
                for variant, counts in (
                    (replace(cast, counted=True), {"nonfinite_out": count}),
                    (cast, {}),
                )
            )
            _require_count(name, count, x)
            same_tensors(name, counted, plain)


@law(1, "quantize", applies=lambda desc: desc.grouped)
def quantize_counts_nan_and_inf_of_groups(subject: Subject, desc: QuantizeDesc) -> None:
    """nonfinite_out grows by the NaN and inf of all groups, without the rows behind the last."""
    if not _is_counted(subject, desc):
        return
    step = storage_step(subject, desc.columnwise)
    few, many = group_sizes(subject, desc), [up(size, step) for size in MANY_GROUPS]
    behind = 2 * step if desc.offsets_on_device else 0
    halves = desc.halves() if has_both(desc) else ()
    for cast, sizes in ((desc, few), (desc, many), *((half, few) for half in halves)):
        rows, cols = quantize_size(subject, desc, sum(sizes) + behind, 70)
        x = inputs.matrix("nonfinite", rows, cols, desc.dtype).clone()
        if behind:
            x[-1] = math.nan
        count, keywords = _count(subject), quantize_keywords(subject, cast, len(sizes))
        groups = offsets_for(subject, desc, sizes)
        counted = replace(cast, counted=True)
        subject.run(counted, subject.here(x), groups, **keywords, nonfinite_out=count)
        _require_count(f"groups of {list(sizes)}", count, x[: sum(sizes)])


@law(3, "quantize", applies=lambda desc: not desc.grouped)
def quantize_variants_count_the_whole(subject: Subject, desc: QuantizeDesc) -> None:
    """With column sums, and after the last chunk, each NaN and inf of x is counted once."""
    for sums, chunked in ((True, False), (False, True), (True, True)):
        run = subject.variant(desc, sums=sums, chunked=chunked, counted=True)
        if run is None:
            continue
        for shape in subject.sizes("quantize", (5, 7), SHAPES[2]):
            x = inputs.matrix("nonfinite", *quantize_size(subject, desc, *shape), desc.dtype)
            count, keywords = _count(subject), quantize_keywords(subject, desc)
            result = run(subject.here(x), **keywords, nonfinite_out=count)
            rowwise, _ = result[0] if sums else result
            joined(desc.rowwise, rowwise, len(x))  # reads every chunk
            _require_count(f"{list(x.shape)}, {sums=}, {chunked=}", count, x)


@law(6, *FUSED)
def fused_counts_nan_and_inf_of_its_result(subject: Subject, desc: FusedDesc) -> None:
    """nonfinite_out grows by the NaN and inf of the producer's result, which the cast reads."""
    if not _is_counted(subject, desc):
        return
    desc = replace(desc, quantize=replace(desc.quantize, counted=True))
    in_chunks = subject.variant(desc, chunked=True)
    sizes = SIZES if in_chunks is None else (*SIZES, LARGE)
    for call, value in itertools.product(calls_of(subject, desc, *sizes), (math.inf, math.nan)):
        if call.arguments[0].numel():
            _with(call.arguments[0], value, (0, 0), (-1, -1))
        produced = subject.run(desc.producer, *call.again().arguments)
        first = on_cpu(produced[0] if isinstance(produced, tuple) else produced)
        for run in filter(None, (subject.bound(desc), in_chunks)):
            count, again = _count(subject), call.again()
            quantized, *_ = run(*again.arguments, **again.keywords, nonfinite_out=count)
            joined(desc.quantize.rowwise, quantized.rowwise, len(first))  # reads every chunk
            _require_count(f"{value}", count, first)
