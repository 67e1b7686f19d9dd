"""A small test of each operation of a backend, which shows a faulty installation.

It is no proof: the conformance kit tests the laws of the backend API. The judge is the reference
backend on the CPU, in float64 for operations that take it. The reference backend on the CPU cannot
judge its own casts, so they are tested by quantizing a second time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8core import formats, recipe
from fp8core.backend_api import (
    GROUP_STEP,
    TRANSFORMS,
    ActivationBackwardDesc,
    ActivationDesc,
    AmaxDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    BackendSpec,
    ColumnSumsDesc,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
    RotaryDesc,
    ScaleUpdateDesc,
    amax_extent,
    split_amax,
    split_groups,
)
from fp8core.commands.arguments import NO_RECIPE
from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.doctor import cases, fused
from fp8core.doctor.cases import Bench
from fp8core.doctor.compare import EQUAL, UNEQUAL, Error, equals, operands_equal, share
from fp8core.doctor.matrix import DTYPE, needs_of
from fp8core.inspect.descriptors import Need
from fp8core.testing.training_calls import TRAINING_DESCS, training_call
from fp8core.torch_ops.private import pytree

__all__ = ["Check", "check"]

JUDGE = "reference"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of the test of one operation.

    Attributes:
        op: the operation's name.
        cases: the number of descriptors that were run.
        worst: the largest error as a share of its bound; 0 is equal bit for bit, above 1 fails;
            None if no share is defined: a NaN, another shape, or no result.
        judged_by: the expected values that the results were compared with, and the bound.
        failure: why the test failed; None if it passed.
    """

    op: str
    cases: int
    worst: float | None
    judged_by: str
    failure: str | None = None


def check(spec: BackendSpec, op: str, device: torch.device) -> Check | None:
    """Test ``op`` of the backend of ``spec`` on ``device``, None if it supports no use of it."""
    registry = plugins.load()
    needs = [need for need in _needs(op) if registry.unsupported(spec, need.desc, device) is None]
    if not needs:
        return None
    if JUDGE not in registry.backends:
        return Check(op, 0, None, "", f"the judge, backend {JUDGE!r}, is not installed")
    bench = Bench(registry.instance(spec), registry.instance(registry.backends[JUDGE]), device)
    worst, num_run = Error(0.0, ""), 0
    for need in needs:
        errors = attempt(functools.partial(_errors, op, bench, need))
        if isinstance(errors, Failure):
            reason = f"{need.step} {need.desc}: {errors}".strip()
            return Check(op, num_run, None, worst.judged_by, reason)
        num_run += bool(errors)
        largest = max(errors, key=lambda error: error.share, default=worst)
        worst = max(largest, worst, key=lambda error: error.share)
        if largest.share > 1:
            reason = f"{need.step} {need.desc}: {_amount(largest.share)}".strip()
            amount = largest.share if math.isfinite(largest.share) else None
            return Check(op, num_run, amount, largest.judged_by, reason)
    return Check(op, num_run, worst.share, worst.judged_by)


def _errors(op: str, bench: Bench, need: Need) -> list[Error]:
    return list(_RUNS[op](bench, need))


def _amount(error: float) -> str:
    return f"{error:.3g} of the bound" if math.isfinite(error) else "not equal, or NaN"


def _needs(op: str) -> list[Need]:
    """Return the uses of ``op`` in all recipes, each once, without recipes that fail: the matrix
    names those."""
    answers = [
        attempt(functools.partial(needs_of, op, name)) for name in (NO_RECIPE, *recipe.names())
    ]
    lists = [needs for needs in answers if not isinstance(needs, Failure)]
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


# --- GEMMs ---

_SIDES = {  # GEMM: tensor and orientation of a, then of b
    "fprop": (("input", False), ("weight", False)),
    "dgrad": (("grad_output", False), ("weight", True)),
    "wgrad": (("grad_output", True), ("input", True)),
}


def _gemm(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare with the float64 product of the dequantized operands."""
    desc, sides = need.desc, _SIDES[need.step]
    assert isinstance(desc, GemmDesc)
    a, b = (
        bench.operand(spec, cases.tensor(name, DTYPE), columnwise=columnwise, grouped=False)
        for spec, (name, columnwise) in zip((desc.a, desc.b), sides, strict=True)
    )
    if a is not None and b is not None:
        product = bench.bind(desc)(a, b)
        yield _product_error(bench, desc, product, a, b)


def _product_error(
    bench: Bench, desc: GemmDesc, product: torch.Tensor, a: Operand, b: Operand
) -> Error:
    left, right = bench.values(desc.a, a), bench.values(desc.b, b)
    expected = left @ right.t()  # [m, k] x [n, k] -> [m, n]
    k = left.shape[1]
    # Tensor cores may keep 14 bits of each sum of 32 products of 8-bit elements.
    # Source: DeepSeek-V3 technical report, sec. 3.3.2.
    c, name = (k / 32 * 2**-13, "k/32 2^-13") if desc.low_precision else (k * 2**-24, "k 2^-24")
    rounding = torch.finfo(desc.out_dtype).eps * expected.abs()
    bound = c * (left.abs() @ right.abs().t()) + rounding
    judged_by = f"float64 product; bound {name} |a||b| + 1 ulp"
    return Error(share(product, expected, bound), judged_by)


def _grouped_gemm(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare each group with the float64 product of operands that are quantized alone."""
    desc, sides = need.desc, _SIDES[need.step]
    assert isinstance(desc, GroupedGemmDesc)
    whole, alone = [], []
    for spec, (name, columnwise) in zip((desc.a, desc.b), sides, strict=True):
        x = cases.tensor(name, DTYPE)
        parts = [x] * 2 if name == "weight" else [x[:128], x[128:]]
        operand = functools.partial(bench.operand, spec, columnwise=columnwise)
        operands = [operand(part, grouped=False) for part in parts]
        joined = operands if name == "weight" else operand(x, grouped=True)
        if joined is None or None in operands:
            return
        whole.append(joined)
        alone.append(operands)
    offsets = torch.tensor(cases.OFFSETS, device="cpu")
    products = bench.bind(desc)(*whole, offsets)
    if not desc.contract_groups:
        products = [products[:128], products[128:]]
    for product, a, b in zip(products, *alone, strict=True):
        assert a is not None
        assert b is not None
        yield _product_error(bench, desc, product, a, b)


# --- casts ---


def _quantize(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare codes and scales with the judge's; those of the judge by quantizing again."""
    desc = need.desc
    assert isinstance(desc, QuantizeDesc)
    name = need.step.partition(" ")[0]
    x = cases.tensor(name, desc.dtype)
    if bench.is_judge:
        yield from _requantized(bench, desc, x)
        return
    specs = (desc.rowwise, desc.columnwise)
    tested, expected = bench.quantized(desc, x), bench.expected(desc, x)
    for turned, (spec, ours, theirs) in enumerate(zip(specs, tested, expected, strict=True)):
        if spec is None:
            continue
        if ours is None or theirs is None:
            yield Error(UNEQUAL, "reference, which has both orientations")
        elif operands_equal(ours, theirs):
            yield Error(EQUAL, "reference, bit for bit")
        else:
            pairs = [(ours, theirs)]
            if desc.grouped:  # whose scales lie side by side
                step = GROUP_STEP if desc.offsets_on_device else 1
                split = functools.partial(split_groups, bounds=cases.OFFSETS, dim=turned, step=step)
                pairs = list(zip(split(spec, ours), split(spec, theirs), strict=True))
            for pair in pairs:
                yield _within_a_step(bench, spec, *pair)


def _within_a_step(bench: Bench, spec: OperandSpec, ours: Operand, theirs: Operand) -> Error:
    values = bench.values(spec, theirs)
    step = _step(spec) * _amax(spec, values)
    error = share(bench.values(spec, ours), values, step.expand_as(values))
    return Error(error, "reference; NOT bit for bit, bound one step of the format")


def _requantized(bench: Bench, desc: QuantizeDesc, x: torch.Tensor) -> Iterator[Error]:
    """Compare dequantized values with themselves, quantized again: no code changes."""
    if desc.grouped:
        return
    judged_by = "its values quantized again; bound 2 ulp of float32, for the scale"
    for turned, spec in enumerate((desc.rowwise, desc.columnwise)):
        if spec is None or spec.stochastic or spec.transform or spec.scale_format == "e4m3":
            continue
        rows = x.t() if turned else x
        wide = QuantizeDesc(torch.float32, spec, None)
        first = bench.quantized(wide, rows.float()).rowwise
        assert first is not None
        values = bench.values(spec, first)
        again = bench.quantized(wide, values.float()).rowwise
        assert again is not None
        bound = 2 * torch.finfo(torch.float32).eps * values.abs()
        yield Error(share(bench.values(spec, again), values, bound), judged_by)


def _step(spec: OperandSpec) -> float:
    """Return the widest gap between neighbours of the format up to the target, as a share of it.

    Twice that for scales that are powers of two, as rounding may halve them.
    """
    values = sorted(v for v in formats.by_name(spec.format).values if 0 <= v <= spec.target)
    gap = max(high - low for low, high in itertools.pairwise(values) if high > low)
    is_coarse = spec.power_of_two or spec.scale_format == "e8m0"
    return gap / spec.target * (2 if is_coarse else 1)


def _amax(spec: OperandSpec, values: torch.Tensor) -> torch.Tensor:
    """Return the amax that steps are measured by: the row's, or the tensor's for taller blocks."""
    magnitude = values.abs()
    return magnitude.amax(1, keepdim=True) if spec.block[0] == 1 else magnitude.amax().reshape(1, 1)


def _dequantize(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare ``dequantize(quantize(x))`` with ``x``: within one step of the format."""
    desc = need.desc
    assert isinstance(desc, DequantizeDesc)
    spec = desc.operand
    if spec.transform is not None:
        return
    x = cases.tensor(need.step, DTYPE)
    operand = bench.operand(spec, x, columnwise=False, grouped=False)
    if operand is not None:
        dequantized = bench.bind(desc)(operand)
        expected = x.double()
        bound = (_step(spec) * _amax(spec, expected)).expand_as(expected)
        yield Error(share(dequantized, expected, bound), "x; bound one step of the format at amax")


# --- norms, activations, sums, amax, scale updates ---


def _float64(desc: Any) -> Any:
    """Return ``desc`` with every dtype float64, for the judge."""
    if isinstance(desc, NormBackwardDesc):
        return NormBackwardDesc(_float64(desc.norm))
    return replace(desc, dtype=torch.float64, out_dtype=torch.float64)


def _in_float64(
    bench: Bench, desc: Any, arguments: Sequence[torch.Tensor | None]
) -> Iterator[Error]:
    moved = [None if x is None else x.to(bench.device) for x in arguments]
    wide = [None if x is None else x.double() for x in arguments]
    results = bench.bind(desc)(*moved)
    expected = bench.judge.bind(_float64(desc), cases.CPU)(*wide)
    if isinstance(results, torch.Tensor):
        results, expected = [results], [expected]
    for result, wanted in zip(results, expected, strict=True):
        if result is None or wanted is None:
            yield Error(EQUAL if result is wanted else UNEQUAL, "float64")
            continue
        bound = torch.finfo(result.dtype).eps * wanted.abs() + 2**-18 * wanted.abs().amax()
        yield Error(share(result, wanted, bound), "float64; bound 1 ulp + 2^-18 amax")


def _norm(bench: Bench, need: Need) -> Iterator[Error]:
    desc = need.desc
    assert isinstance(desc, NormDesc | NormBackwardDesc)
    yield from _in_float64(bench, desc, cases.norm_arguments(desc, bench.judge))


def _activation(bench: Bench, need: Need) -> Iterator[Error]:
    desc = need.desc
    assert isinstance(desc, ActivationDesc | ActivationBackwardDesc)
    yield from _in_float64(bench, desc, cases.pointwise_arguments(desc))


def _rotary(bench: Bench, need: Need) -> Iterator[Error]:
    desc = need.desc
    assert isinstance(desc, RotaryDesc)
    keywords = cases.rotary_positions(desc)
    moved = {name: one.to(bench.device) for name, one in keywords.items()}
    x, freqs = cases.rotary_arguments(desc)
    y = bench.bind(desc)(x.to(bench.device), freqs.to(bench.device), **moved)
    wide = replace(desc, dtype=torch.float64)
    wanted = bench.judge.bind(wide, cases.CPU)(x.double(), freqs, **keywords)
    bound = torch.finfo(desc.dtype).eps * wanted.abs() + 2**-19 * x.abs().amax()
    yield Error(share(y, wanted, bound), "float64; bound 1 ulp + 2^-19 amax")


def _attention(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare the result, or the gradients, with the judge's in float64."""
    forward = need.desc.attention if isinstance(need.desc, AttentionBackwardDesc) else need.desc
    assert isinstance(forward, AttentionDesc)
    *given, grad = cases.attention_arguments(forward)
    moved, wide = [x.to(bench.device) for x in given], [x.double() for x in given]
    judge = replace(forward, dtype=torch.float64)
    expected = out, stats, _ = bench.judge.bind(judge, cases.CPU)(*wide)
    if isinstance(need.desc, AttentionBackwardDesc):
        saved = [one.to(bench.device) for one in (out.to(forward.dtype), stats.float())]
        results = bench.bind(need.desc)(grad.to(bench.device), *moved, *saved)
        backward = bench.judge.bind(AttentionBackwardDesc(judge), cases.CPU)
        expected = backward(grad.double(), *wide, out, stats)
    else:
        results = bench.bind(forward)(*moved)
    for result, wanted in zip(results, expected, strict=True):
        if wanted is not None:
            bound = 16 * torch.finfo(forward.dtype).eps * wanted.abs().amax().expand_as(wanted)
            yield Error(share(result, wanted, bound), "float64; bound 16 ulp of the amax")


def _column_sums(bench: Bench, need: Need) -> Iterator[Error]:
    desc = need.desc
    assert isinstance(desc, ColumnSumsDesc)
    x = cases.tensor("grad_output", desc.dtype)
    sums = bench.bind(desc)(x.to(bench.device))
    wide = x.double()
    bound = (len(x) + 4) * 2**-24 * wide.abs().sum(0)
    yield Error(share(sums, wide.sum(0), bound), "float64; bound (rows + 4) 2^-24 sum |x|")


def _amax_op(bench: Bench, need: Need) -> Iterator[Error]:
    desc = need.desc
    assert isinstance(desc, AmaxDesc)
    cast = desc.quantize
    x = cases.tensor(need.step, cast.dtype)
    amaxes = split_amax(cast, bench.bind(desc)(x.to(bench.device)).cpu(), *x.shape)
    for turned, spec in enumerate((cast.rowwise, cast.columnwise)):
        amax = amaxes[turned]
        if spec is None or amax is None:
            continue
        values = x if spec.transform is None else TRANSFORMS[spec.transform](x, 1 - turned)
        magnitude = values.t().abs() if turned else values.abs()
        largest = magnitude.amax(1) if amax_extent(spec) == "row" else magnitude.amax().reshape(1)
        is_equal = torch.equal(amax, largest.float())
        yield Error(EQUAL if is_equal else UNEQUAL, "the largest magnitudes, bit for bit")


def _scale_update(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare three slots with an example worked out by hand.

    Their histories hold a new amax that is the largest, an older one that is larger, and none.
    """
    desc = need.desc
    assert isinstance(desc, ScaleUpdateDesc)
    history = torch.tensor([[4.0, 4.0, 0.0], [1.0, 2.0, 3.0], [2.0, 8.0, 5.0]])
    scale, target = torch.ones(3), torch.full((3,), 448.0)
    moved = [state.to(bench.device) for state in (history, scale, target)]
    bench.bind(desc)(*([state] for state in moved))
    second = 56.0 if desc.algorithm == "max" else 112.0  # 448 / 8, or 448 / 4
    expected = [
        [[0.0, 0.0, 0.0], [2.0, 8.0, 3.0], [4.0, 4.0, 5.0]],
        [112.0, second, 1.0],  # 448 / 4; the third keeps its scale
    ]
    updated = [moved[0].cpu().tolist(), moved[1].cpu().tolist()]
    yield Error(EQUAL if updated == expected else UNEQUAL, "an example worked out by hand")


def _training(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare the results, and the tensors that the operation writes, with the judge's."""
    call = training_call(need.desc, 0, (cases.TOKENS, cases.IN_FEATURES))
    given, named = bench.to_device(call.arguments), bench.to_device(call.keywords)
    expected = bench.judge.bind(need.desc, cases.CPU)(*call.arguments, **call.keywords)
    results = bench.bind(need.desc)(*given, **named)
    written = [at for at in call.written if isinstance(at, int)]
    ours = _tensors((results, [given[at] for at in written]))
    theirs = _tensors((expected, [call.arguments[at] for at in written]))
    for one, wanted in zip(ours, theirs, strict=True):
        if wanted.is_floating_point():
            wide = wanted.double()
            step = torch.finfo(wanted.dtype).eps
            bound = (step * wide.abs() + 2**-18 * wide.abs().amax()) if wide.numel() else wide
            yield Error(share(one, wide, bound), "the reference; bound 1 ulp + 2^-18 amax")
        else:
            is_equal = equals(one, wanted)
            yield Error(EQUAL if is_equal else UNEQUAL, "the reference, bit for bit")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_RUNS: dict[str, Callable[[Bench, Need], Iterator[Error]]] = {
    "activation": _activation,
    "activation_backward": _activation,
    "activation_backward_quantize": fused.quantizing,
    "activation_quantize": fused.quantizing,
    "add_norm": fused.add_norm,
    "amax": _amax_op,
    "attention": _attention,
    "attention_backward": _attention,
    "column_sums": _column_sums,
    "dequantize": _dequantize,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "norm": _norm,
    "norm_backward": _norm,
    "norm_backward_quantize": fused.quantizing,
    "norm_quantize": fused.quantizing,
    "quantize": _quantize,
    "rotary": _rotary,
    "scale_update": _scale_update,
    **dict.fromkeys((desc.op for desc in TRAINING_DESCS), _training),
}
