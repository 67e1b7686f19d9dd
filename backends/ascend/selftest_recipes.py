"""The products, casts and attention of layers under each recipe, asked of a device.

Each runs through the functions of the backend, and is compared with float64 on the CPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    AttentionBackwardDesc,
    AttentionDesc,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core_backends.ascend.attention import attention, attention_backward
from fp8core_backends.ascend.gemm import gemm
from fp8core_backends.ascend.grouped import grouped_gemm
from fp8core_backends.ascend.operators import casts
from fp8core_backends.ascend.quantize import quantize
from fp8core_backends.ascend.selftest_question import Question, worst_row_snr

BF16 = torch.bfloat16
ROWS, IN, OUT = 256, 320, 192
ENDS = (0, 64, 64, ROWS)
FLOOR = 22.0
"""dB, of products of operands of 8 bits, per row; 24.6 and more on the software device."""


class _Specs(NamedTuple):
    """How a recipe casts inputs and weights, gradients, and the input for the weight gradient."""

    forward: OperandSpec
    backward: OperandSpec
    weight: OperandSpec
    wgrad_input: OperandSpec


def _plain(format: str, block: tuple[int, int], target: float, scale: str = "float32") -> _Specs:
    gradient = OperandSpec("hif8", block, 224.0) if format == "hif8" else None
    spec = OperandSpec(format, block, target, scale)
    return _Specs(spec, gradient or spec, spec, spec)


_ROWS = OperandSpec("e4m3", (1, 128), 448.0)
_SQUARE = OperandSpec("e4m3", (128, 128), 448.0)
RECIPES = {
    "current": _plain("e4m3", (0, 0), 448.0)._replace(
        backward=OperandSpec("e5m2", (0, 0), 57344.0)
    ),
    "rowwise": _plain("e4m3", (1, 0), 448.0),
    "block": _Specs(_ROWS, _ROWS, _SQUARE, _SQUARE),
    "mxfp8": _plain("e4m3", (1, 32), 448.0, "e8m0"),
    "hif8": _plain("hif8", (0, 0), 15.0),
}


def questions() -> Iterator[Question]:
    """Yield the questions, in the order in which they should be asked."""
    for name, specs in RECIPES.items():
        yield Question(
            f"{name} products",
            f"forward and both gradients are within {FLOOR:g} dB of exact ones, by row",
            functools.partial(_products, specs),
        )
        yield Question(
            f"{name} groups",
            "products of groups, one of them empty, are those of each alone",
            functools.partial(_groups, specs),
        )
    for name in ("mxfp8", "hif8"):
        yield Question(
            f"{name} addition",
            "a product added to float32 is the sum of both",
            functools.partial(_addition, RECIPES[name]),
        )
    yield Question(
        "MX with inf or NaN", "the exponent is 255 for a block with inf or NaN alone", _nonfinite
    )
    for name, options in _ATTENTIONS.items():
        yield Question(
            f"attention, {name}",
            "output, statistics and gradients are within 2^-6 of exact ones",
            functools.partial(_attention, options),
        )


def _values(*sizes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(sizes, generator=generator, device="cpu").to(BF16)


def _cast(spec: OperandSpec, x: torch.Tensor, *, columnwise: bool) -> Operand:
    desc = QuantizeDesc(x.dtype, None if columnwise else spec, spec if columnwise else None)
    both = quantize(desc, x)
    operand = both.columnwise if columnwise else both.rowwise
    assert operand is not None
    return operand


class _Tensors(NamedTuple):
    """Input ``[rows, in]``, weight ``[out, in]`` and gradient ``[rows, out]``."""

    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor

    def to(self, device: torch.device) -> _Tensors:
        """Return copies on a device."""
        return _Tensors(*(tensor.to(device) for tensor in self))


def _tensors() -> _Tensors:
    return _Tensors(_values(ROWS, IN, seed=0), _values(OUT, IN, seed=1), _values(ROWS, OUT, seed=2))


def _products(specs: _Specs, device: torch.device) -> tuple[object, object]:
    tensors = _tensors()
    x, weight, grad = tensors.to(device)
    forward = (_cast(specs.forward, x, columnwise=False), specs.forward)
    backward = (_cast(specs.backward, grad, columnwise=False), specs.backward)
    results = [
        _gemm(*forward, _cast(specs.weight, weight, columnwise=False), specs.weight),
        _gemm(*backward, _cast(specs.weight, weight, columnwise=True), specs.weight),
        _gemm(
            _cast(specs.backward, grad, columnwise=True),
            specs.backward,
            _cast(specs.wgrad_input, x, columnwise=True),
            specs.wgrad_input,
        ),
    ]
    x, weight, grad = (tensor.double() for tensor in tensors)
    exact = (x @ weight.t(), grad @ weight, grad.t() @ x)
    worst = min(
        worst_row_snr(result, reference) for result, reference in zip(results, exact, strict=True)
    )
    return True, worst >= FLOOR or f"{worst:.1f} dB"


def _gemm(a: Operand, a_spec: OperandSpec, b: Operand, b_spec: OperandSpec) -> torch.Tensor:
    return gemm(GemmDesc(a_spec, b_spec, torch.float32), a, b)


def _groups(specs: _Specs, device: torch.device) -> tuple[object, object]:
    tensors = _tensors().to(device)
    offsets = torch.tensor(ENDS, device="cpu")
    parts = list(itertools.pairwise(ENDS))
    weights = [_cast(specs.weight, tensors.weight * (at + 1), columnwise=False) for at in range(3)]
    rows = quantize(QuantizeDesc(BF16, specs.forward, None, grouped=True), tensors.x, offsets)
    assert rows.rowwise is not None
    desc = GroupedGemmDesc(specs.forward, specs.weight, torch.float32)
    stacked = grouped_gemm(desc, rows.rowwise, weights, offsets)
    assert isinstance(stacked, torch.Tensor)
    results = [stacked]
    alone = [
        _gemm(
            _cast(specs.forward, tensors.x[start:end], columnwise=False),
            specs.forward,
            weight,
            specs.weight,
        )
        for (start, end), weight in zip(parts, weights, strict=True)
    ]
    expected = [torch.cat(alone)]
    grads = quantize(QuantizeDesc(BF16, None, specs.backward, grouped=True), tensors.grad, offsets)
    inputs = quantize(QuantizeDesc(BF16, None, specs.wgrad_input, grouped=True), tensors.x, offsets)
    assert grads.columnwise is not None
    assert inputs.columnwise is not None
    terms = GroupedGemmDesc(specs.backward, specs.wgrad_input, torch.float32, contract_groups=True)
    results += grouped_gemm(terms, grads.columnwise, inputs.columnwise, offsets)
    expected += [
        _gemm(
            _cast(specs.backward, tensors.grad[start:end], columnwise=True),
            specs.backward,
            _cast(specs.wgrad_input, tensors.x[start:end], columnwise=True),
            specs.wgrad_input,
        )
        for start, end in parts
    ]
    pairs = zip(results, expected, strict=True)
    return True, all(_close(result, reference) for result, reference in pairs)


def _close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(result.cpu(), expected.cpu(), rtol=1e-4, atol=1e-3)


def _addition(specs: _Specs, device: torch.device) -> tuple[object, object]:
    tensors = _tensors().to(device)
    a = _cast(specs.backward, tensors.grad, columnwise=True)
    b = _cast(specs.wgrad_input, tensors.x, columnwise=True)
    product = _gemm(a, specs.backward, b, specs.wgrad_input)
    total = torch.full_like(product, 3.0)
    desc = GemmDesc(specs.backward, specs.wgrad_input, torch.float32, accumulate=True)
    gemm(desc, a, b, out=total)
    return True, _close(total, product + 3)


def _nonfinite(device: torch.device) -> tuple[object, object]:
    x = torch.ones(3, 64, dtype=BF16, device="cpu")
    x[1, 5], x[2, 40] = math.inf, math.nan
    exponents = casts.mx_quant(x.to(device), "e4m3", -1)[1].cpu()
    return [[119, 119], [255, 119], [119, 255]], exponents[:, 0].tolist()


_ATTENTIONS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"window": (-1, 0)},
    "causal from the lower right": {"window": (-1, 0), "bottom_right": True},
    "window": {"window": (7, 0), "bottom_right": True},
    "packed": {"layout": "thd", "padding": True, "window": (-1, 0)},
}


def _attention(options: dict[str, Any], device: torch.device) -> tuple[object, object]:
    heads, size, lengths = 2, 64, ((16, 24), (24, 24))
    layout = str(options.get("layout", "bshd"))
    desc = AttentionDesc(BF16, **{**_plain_attention(heads, size), **options})
    side = [[pair[at] for pair in lengths] for at in (0, 1)]
    sizes: list[tuple[int, ...]]
    if layout == "thd":
        sizes = [(sum(of_all), heads, size) for of_all in side]
    else:  # as long as the longest
        side = [[max(of_all)] * len(lengths) for of_all in side]
        sizes = [(len(lengths), of_all[0], heads, size) for of_all in side]
    q, k, v = (_values(*sizes[at], seed=seed) for at, seed in ((0, 3), (1, 4), (1, 5)))
    grad = _values(*sizes[0], seed=6)
    ends = [torch.tensor([0, *itertools.accumulate(of_all)], device="cpu") for of_all in side]
    keywords: dict[str, Any] = {}
    if desc.padding:
        names = ("cu_seqlens_q", "cu_seqlens_kv")
        keywords = {
            name: offsets.int().to(device) for name, offsets in zip(names, ends, strict=True)
        }
    inputs = [x.to(device) for x in (q, k, v)]
    out, stats, _ = attention(desc, *inputs, **keywords)
    q_there, k_there, v_there = inputs
    backward = AttentionBackwardDesc(desc)
    grads = attention_backward(
        backward, grad.to(device), q_there, k_there, v_there, out, stats, **keywords
    )
    results = [x.cpu().double() for x in (out, *grads[:3])]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    parts = [
        _by_sequence(x, offsets)
        for x, offsets in zip(leaves, (ends[0], ends[1], ends[1]), strict=True)
    ]
    exact = torch.cat([_exact(desc, *sequence) for sequence in zip(*parts, strict=True)]).reshape(
        q.shape
    )
    expected = [exact.detach(), *torch.autograd.grad(exact, leaves, grad.double())]
    bound = 2.0**-6
    is_near = all(
        torch.allclose(result, reference, rtol=bound, atol=bound)
        for result, reference in zip(results, expected, strict=True)
    )
    return True, is_near


def _plain_attention(heads: int, size: int) -> dict[str, Any]:
    return {
        "layout": "bshd",
        "heads": heads,
        "groups": heads,
        "head_dim": size,
        "head_dim_v": size,
        "scale": size**-0.5,
    }


def _by_sequence(x: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
    """Return ``[s, heads, d]`` of each sequence."""
    rows = x.flatten(0, 1) if x.dim() == 4 else x
    return [rows[start:end] for start, end in itertools.pairwise(ends.tolist())]


def _exact(desc: AttentionDesc, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of one sequence in float64."""
    logits = desc.scale * torch.einsum("qhd,khd->hqk", q, k)
    distance = (
        torch.arange(len(k), device="cpu")[None] - torch.arange(len(q), device="cpu")[:, None]
    )
    if desc.bottom_right:
        distance = distance - (len(k) - len(q))
    left, right = desc.window
    excluded = ((distance > right) if right >= 0 else distance > len(k)) | (
        (distance < -left) if left >= 0 else distance < -len(q) - len(k)
    )
    weights = torch.softmax(logits.masked_fill(excluded, -torch.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, v)
