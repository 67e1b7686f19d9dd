"""A linear as a shape, the GEMMs that it computes, and the forms in which it calls them.

With ``backward_override="dequantized"`` forward saves the rowwise operands of the input and of the
weight. Backward decodes each right before the GEMM that reads it, and turns it: dgrad and wgrad
contract another dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import (
    Chunks,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandSpec,
    padded_offsets,
    split_groups,
)
from fp8core.chain.request import empty_rows
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.chain.shards import GemmPart
from fp8core.dispatch.table import Resolved
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import GemmPlan, LinearPlan
from fp8core.tensors.storage import pad_operand, takes_partial_blocks


@dataclass(frozen=True, slots=True)
class LinearSpec(LinkShape):
    """The computation of a linear layer, apart from its recipe; ``groups`` is 0 for a dense layer.

    ``accumulates``: weight gradients are added to ``weight.main_grad``. ``offsets_on_device``: the
    host never reads the sizes of the groups. ``delays_wgrad``: backward leaves them to the layer's
    queue. ``saves_input``: backward casts the input again instead of holding its codes.
    """

    in_features: int
    out_features: int
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    groups: int = 0
    accumulates: bool = False
    offsets_on_device: bool = False
    delays_wgrad: bool = False
    saves_input: bool = False
    # Input and gradient, unless the recipe leaves them alone.
    quantizes = True

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return self.groups or 1

    @property
    def num_params(self) -> int:
        """The number of weights and biases."""
        return self.num_weights * (1 if self.bias_dtype is None else 2)

    @property
    def features(self) -> tuple[int, int]:
        """The columns that its matrix product takes and returns."""
        return self.in_features, self.out_features

    def with_offsets_on_device(self) -> LinearSpec:
        """Return the shape for calls whose group sizes the host never reads."""
        return dataclasses.replace(self, offsets_on_device=True)

    def gemm_desc(self, name: str, plan: LinearPlan, dtype: torch.dtype) -> GemmDesc:
        """Return what ``name``, fprop, dgrad or wgrad, computes for activations of ``dtype``."""
        gemm: GemmPlan = getattr(plan, name)
        # In high precision the result is rounded to the activation dtype first, as torch.autocast
        # does.
        is_low = gemm.a is not None or gemm.b is not None
        out_dtype = self.weight_dtype if name == "wgrad" and is_low else dtype
        accumulates = name == "wgrad" and self.accumulates
        if accumulates:
            out_dtype = torch.float32
        fields = (gemm.a, gemm.b, out_dtype, accumulates, gemm.fast_accumulation)
        if not self.groups:
            return GemmDesc(*fields)
        return GroupedGemmDesc(*fields, name == "wgrad", self.offsets_on_device)


def resolve_gemm(name: str, desc: GemmDesc, context: BindContext) -> Resolved:
    """Return fprop, dgrad or wgrad; if fprop takes the weight alone in low precision, and no
    backend multiplies it by an input in high precision, a product of the decoded weight.

    Raises:
        UnsupportedError: no backend runs either.
    """
    if name != "fprop" or desc.a is not None or desc.b is None:
        return context.resolve(name, desc)
    try:
        return context.resolve(name, desc)
    except UnsupportedError:
        decode = context.resolve("weight dequantized", DequantizeDesc(desc.b, context.dtype)).run
        product = context.resolve(name, dataclasses.replace(desc, b=None))

    def run(a: Operand, b: Any, *groups: torch.Tensor, **keywords: Any) -> Any:
        is_dense = isinstance(b, Operand)
        decoded = Operand(decode(b)) if is_dense else [Operand(decode(each)) for each in b]
        return product.run(a, decoded, *groups, **keywords)

    # As it was planned: in low precision, and no product of parts.
    choice = dataclasses.replace(product.choice, desc=desc, because="decodes the weight first")
    return dataclasses.replace(product, run=run, recorder=None, choice=choice)


def bind_fprop(resolved: Resolved, shape: LinearSpec, context: BindContext) -> Callable[..., Any]:
    """Return fprop; in high precision the bias has the activation dtype, as in torch.autocast."""
    run, dtype, plan = resolved.run, context.dtype, context.gemm_plan.fprop
    if shape.bias_dtype in (None, dtype) or plan.a is not None or plan.b is not None:
        return run

    def fprop(a: Operand, b: Any, *groups: torch.Tensor, bias: Any, **keywords: Any) -> Any:
        cast = [group_bias.to(dtype) for group_bias in bias] if shape.groups else bias.to(dtype)
        return run(a, b, *groups, bias=cast, **keywords)

    return fprop


def taking_any_rows(resolved: Resolved) -> tuple[Callable[..., Any], int]:
    """Return wgrad, and the number of which dense operands may have any multiple of rows, its k,
    because it adds zeros to their codes; 1 where it adds none.

    So a tensor is cast as it came, and its codes alone are copied, a byte an element. Formats
    without partial blocks have no codes of other rows, and groups none that lie apart.
    """
    run, desc, multiple = resolved.run, resolved.choice.desc, resolved.alignment.k
    assert isinstance(desc, GemmDesc)
    a, b = desc.a, desc.b
    is_dense = not isinstance(desc, GroupedGemmDesc)
    if multiple == 1 or not (is_dense and takes_partial_blocks(a) and takes_partial_blocks(b)):
        return run, 1
    assert a is not None
    assert b is not None

    def wgrad(dy: Operand, x: Operand, **keywords: Any) -> Any:
        rows = -dy.data.shape[1] % multiple
        if not rows:
            return run(dy, x, **keywords)
        return run(pad_operand(dy, a, 0, rows), pad_operand(x, b, 0, rows), **keywords)

    return wgrad, multiple


def of_padded_groups(wgrad: Callable[..., Any], step: int) -> Callable[..., Any]:
    """Return ``wgrad`` for operands with zeros up to a multiple of ``step`` rows, which groups have
    other offsets by; 0: no zeros."""
    if not step:
        return wgrad

    def run(dy: Operand, x: Operand, *groups: torch.Tensor, **keywords: Any) -> Any:
        return wgrad(dy, x, *[padded_offsets(offsets, step) for offsets in groups], **keywords)

    return run


def turning(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return dgrad or wgrad ``run`` for a second operand that is still to be transposed.

    It comes as ``[k, n]``, one or one per group.
    """

    def turned(a: Operand, b: Any, *groups: torch.Tensor, **keywords: Any) -> Any:
        if isinstance(b, Operand):
            return run(a, Operand(b.data.t()), *groups, **keywords)
        return run(a, [Operand(weight.data.t()) for weight in b], *groups, **keywords)

    return turned


def in_dtype(
    wgrad: Callable[..., Any], computed: torch.dtype, dtype: torch.dtype
) -> Callable[..., Any]:
    """Return ``wgrad``, which computes in ``computed``, with its results in ``dtype``."""
    if computed == dtype:
        return wgrad

    def run(dy: Operand, x: Operand, *groups: torch.Tensor) -> Any:
        grads = wgrad(dy, x, *groups)
        return [grad.to(dtype) for grad in grads] if groups else grads.to(dtype)

    return run


def in_chunks(
    dgrad: Callable[..., Any], gemm_part: GemmPart | None, dtype: torch.dtype
) -> Callable[..., Any]:
    """Return ``dgrad`` for a gradient that may come in chunks of rows, into one tensor: ``out``, if
    that is given.

    ``gemm_part`` gives the rows the bits of the whole product; without it, each is a product.
    """

    def run(
        dy: Operand | Chunks, weight: Operand, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        grad_input: torch.Tensor
        if isinstance(dy, Operand):
            grad_input = dgrad(dy, weight) if out is None else dgrad(dy, weight, out=out)
            return grad_input
        grad_input = empty_rows(weight.data, dy.rows, dtype) if out is None else out
        for start, end, chunk in dy:
            if gemm_part is None:
                dgrad(chunk, weight, out=grad_input[start:end])
            else:
                gemm_part(dy.rows, chunk, weight, out=grad_input[start:end])
        return grad_input

    return run


Decode: TypeAlias = "Callable[..., Operand]"
"""``f(operand [rows, k], *groups) -> operand [k, rows]`` in high precision."""


def bind_decode(
    tensor: str, context: BindContext, shape: LinearSpec | None = None
) -> Decode | None:
    """Return what decodes the operand of ``tensor``, input or weight; None if backward takes what
    forward made for it. ``shape`` says which groups of rows the input has.

    Raises:
        UnsupportedError: its groups have scales that cannot be told apart on the host.
    """
    plan = context.gemm_plan
    spec, columnwise = plan.tensors[tensor]
    if not plan.dequantizes or spec is None or columnwise is not None:
        return None
    run = context.resolve(f"{tensor} dequantized", DequantizeDesc(spec, context.dtype)).run
    # Scales of single rows are decoded for all groups at once.
    if shape is None or not shape.groups or (spec.block[0] == 1 and spec.scale_format != "e4m3"):
        return lambda operand, *groups: Operand(run(operand).t())
    if shape.offsets_on_device:
        raise UnsupportedError(
            f"{context.owner}: backward_override='dequantized' with scales of {spec} needs "
            f"m_splits on the CPU, where each group is decoded with its own scale. Give a list, or "
            f"choose backward_override='high_precision'."
        )
    return _by_group(spec, run)


def _by_group(spec: OperandSpec, run: Callable[..., Any]) -> Decode:
    def decode(operand: Operand, offsets: torch.Tensor) -> Operand:
        parts = split_groups(spec, operand, offsets.tolist(), 0)
        return Operand(torch.cat([run(part) for part in parts]).t())

    return decode
