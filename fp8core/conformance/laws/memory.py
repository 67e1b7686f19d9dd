"""Memory of the caller: law 5 for every tensor that layers pass to a backend, and law 4 for
products that are written into a tensor of any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from fp8core import recipe
from fp8core.backend_api import Backend, GemmDesc, GroupedGemmDesc, OpDesc
from fp8core.chain.unwrap import PLAIN
from fp8core.conformance import inputs
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require
from fp8core.conformance.laws.gemm import each_within, parts_of, product_within
from fp8core.conformance.operands import Groups, gemm_operands, grouped_operands
from fp8core.conformance.subject import Subject
from fp8core.context.autocast import autocast
from fp8core.dispatch import plugins, policy, table
from fp8core.errors import UnsupportedError
from fp8core.modules.layers.linear import Linear
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.private import lazily_negated, lazy_zeros, pytree

FILL = 77.0


class Out(NamedTuple):
    """A tensor to write into: part of ``buffer``, whose other entries are FILL."""

    view: torch.Tensor
    buffer: torch.Tensor

    def require_rest_untouched(self, name: str) -> None:
        """Require FILL in every entry of the buffer that is not part of the view."""
        rest = self.buffer.clone()
        shown = rest.as_strided(self.view.size(), self.view.stride(), self.view.storage_offset())
        shown.fill_(FILL)
        require(bool((rest == FILL).all()), f"{name}: wrote beside out")


def _columns(x: torch.Tensor) -> torch.Tensor:
    return x[:, 3:-5]


LAYOUTS: dict[str, tuple[Callable[[int, int], tuple[int, int]], Callable[..., torch.Tensor]]] = {
    "columns of a wider tensor": (lambda m, n: (m, n + 8), _columns),
    "transposed": (lambda m, n: (n, m), lambda x: x.t()),
    "every other row": (lambda m, n: (2 * m, n), lambda x: x[::2]),
    "every other column": (lambda m, n: (m, 2 * n), lambda x: x[:, ::2]),
}
"""The buffer's shape for a result ``[m, n]``, and the part of it that is the result."""


def _outs(subject: Subject, desc: GemmDesc, shape: tuple[int, int]) -> Iterator[tuple[str, Out]]:
    for name, (size, view) in LAYOUTS.items():
        buffer = torch.full(size(*shape), FILL, dtype=desc.out_dtype, device=subject.device)
        result = view(buffer)
        if desc.accumulate:
            result.copy_(inputs.moderate(*shape, desc.out_dtype, 3) * 10)
        else:
            result.fill_(math.nan)
        yield f"out is {name}", Out(result, buffer)


@law(4, "gemm")
def gemm_writes_into_out_of_any_strides(subject: Subject, desc: GemmDesc) -> Iterator[float]:
    """An out that is part of a tensor, or transposed, gets the result; entries beside it stay."""
    for size in ((5, 7, 160), (32, 32, 64)):
        a, b = gemm_operands(subject, desc, *size)
        for name, out in _outs(subject, desc, (len(a.data), len(b.data))):
            before = out.view.clone() if desc.accumulate else None
            result = subject.run(desc, a, b, out=out.view)
            require(result is out.view, f"{name}: returned another tensor than out")
            yield product_within(subject, desc, name, out.view, (a, b), before)
            out.require_rest_untouched(name)


@law(4, "gemm")
def gemm_adds_the_bias_into_out(subject: Subject, desc: GemmDesc) -> Iterator[float]:
    """The bias is added also with out, and also with accumulate."""
    a, b = gemm_operands(subject, desc, 5, 7, 160)
    m, n = len(a.data), len(b.data)
    for dtype in dict.fromkeys((desc.out_dtype, torch.float32)):
        bias = subject.here(inputs.moderate(1, n, dtype, 2)[0].abs() * 10 + 1)
        term = bias.cpu().double()
        out = torch.full((m, n), math.nan, dtype=desc.out_dtype, device=subject.device)
        if desc.accumulate:
            out = subject.here(inputs.moderate(m, n, desc.out_dtype, 3).abs() * 10)
            term = term + out.cpu().double()
        subject.run(desc, a, b, bias=bias, out=out)
        name = f"out with bias {dtype}"
        yield product_within(subject, desc, name, out, (a, b), term)


def _grouped_outs(
    subject: Subject, desc: GroupedGemmDesc, groups: Groups
) -> Iterator[tuple[str, list[Out]]]:
    count = len(groups.sizes) if desc.contract_groups else 1
    several = [list(_outs(subject, desc, (groups.m, groups.n))) for _ in range(count)]
    for named in zip(*several, strict=True):
        yield named[0][0], [out for _, out in named]


@law(4, "grouped_gemm")
def grouped_gemm_writes_into_out_of_any_strides(
    subject: Subject, desc: GroupedGemmDesc
) -> Iterator[float]:
    """An out that is part of a tensor, or transposed, gets the results; entries beside it stay."""
    groups = grouped_operands(subject, desc, (0, 35, 1), (6, 10, 64))
    for name, outs in _grouped_outs(subject, desc, groups):
        views = [out.view for out in outs]
        before = [view.clone() for view in views]
        target = views if desc.contract_groups else views[0]
        subject.run(desc, *groups.arguments, out=target)
        whole = before if desc.contract_groups else before[0]
        terms = parts_of(desc, groups, whole) if desc.accumulate else None
        yield from each_within(subject, desc, groups, target, terms)
        for out in outs:
            out.require_rest_untouched(name)


@law(4, "grouped_gemm", applies=lambda desc: not desc.contract_groups)
def grouped_gemm_adds_the_biases_into_out(
    subject: Subject, desc: GroupedGemmDesc
) -> Iterator[float]:
    """Each group's bias is added also with out, and also with accumulate."""
    groups = grouped_operands(subject, desc)
    biases = inputs.moderate(len(groups.sizes), groups.n, desc.out_dtype, 2).abs() * 10 + 1
    terms = [
        bias.double().expand(size, -1) for bias, size in zip(biases, groups.sizes, strict=True)
    ]
    shape = (groups.m, groups.n)
    out = torch.full(shape, math.nan, dtype=desc.out_dtype, device=subject.device)
    if desc.accumulate:
        out = subject.here(inputs.moderate(*shape, desc.out_dtype, 3).abs() * 10)
        parts = parts_of(desc, groups, out.cpu().double())
        terms = [term + part for term, part in zip(terms, parts, strict=True)]
    subject.run(desc, *groups.arguments, bias=list(subject.here(biases)), out=out)
    yield from each_within(subject, desc, groups, out, terms)


SIZE = 64


@law(5)
def no_operand_without_memory_reaches_it(subject: Subject) -> None:
    """Every tensor that a layer hands the backend is a plain one with an address, or is empty.

    Under each recipe that the device runs, layers get a QuantizedTensor as input and as gradient,
    then a lazily negated tensor and zeros without memory. The law passes for a backend that is not
    installed, as layers cannot choose it.
    """
    if subject.name not in plugins.load().backends:
        return
    faults: list[str] = []
    bind = type(subject.backend).bind

    def spied(self: Backend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        return _looking(bind(self, desc, device), desc, faults)

    table.forget()
    try:
        with patch.object(type(subject.backend), "bind", spied), policy.use_backend(subject.name):
            for name in recipe.names():
                try:
                    _run_layer(name, subject.device)
                except Exception:
                    if not faults:
                        raise
    finally:
        table.forget()
    require(not faults, "; ".join(dict.fromkeys(faults)))


def _run_layer(name: str, device: torch.device) -> None:
    """Run a layer forward and backward on QuantizedTensors and on torch's lazy tensors.

    Returns early where the recipe does not run on the device.
    """
    chosen = recipe.by_name(name)
    layer = Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device=device)
    current = recipe.Float8CurrentScaling()
    plan = plan_of(LinearPlan, current, LayerRole("linear"), torch.bfloat16)
    values = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    try:
        stored = QuantizedTensor.quantize(values, plan.input)
        with autocast(recipe=chosen):
            y = layer(stored)
    except UnsupportedError:  # not every recipe runs on every device
        return
    y.backward(QuantizedTensor.quantize(values, plan.grad_output))
    zeros = lazy_zeros(values.shape, dtype=values.dtype, device=device)
    for x in (lazily_negated(values), zeros):
        with autocast(recipe=chosen):
            y = layer(x)
        y.backward(x)


def _looking(run: Callable[..., Any], desc: OpDesc, faults: list[str]) -> Callable[..., Any]:
    """Return ``run``, wrapped so that operands without readable memory are added to ``faults``."""

    def look(*arguments: Any, **keywords: Any) -> Any:
        for leaf in pytree.tree_leaves((arguments, keywords)):
            if isinstance(leaf, torch.Tensor):
                if type(leaf) not in PLAIN or _is_hollow(leaf):
                    faults.append(f"{desc} was given a {type(leaf).__name__} without memory")
                elif leaf.is_neg():
                    faults.append(f"{desc} was given a tensor whose memory is to be negated")
        return run(*arguments, **keywords)

    return look


def _is_hollow(x: torch.Tensor) -> bool:
    return bool(x.numel()) and not x.is_meta and not x.data_ptr()
