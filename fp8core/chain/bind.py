"""From values to objects: shapes, a plan, a device and a state become the links of a chain."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    Alignment,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    Operand,
    OperandSpec,
)
from fp8core.chain.activation import ActivationLink, ActivationShape
from fp8core.chain.fusion import Fusion, bind_fusion
from fp8core.chain.linear import LinearLink, LinearShape, turning
from fp8core.chain.norm import NormLink, NormShape
from fp8core.chain.once import in_low_precision, linear_only_once
from fp8core.chain.padding import LayerPadding
from fp8core.chain.pointwise import (
    AddLink,
    AddShape,
    BiasLink,
    BiasShape,
    DropoutLink,
    DropoutShape,
    OutputLink,
    OutputShape,
    QuantizeLink,
    QuantizeShape,
)
from fp8core.chain.protocol import Link
from fp8core.dispatch import table
from fp8core.dispatch.table import Resolved
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import HIGH_PRECISION, GemmPlan, LinearPlan, TensorPlan
from fp8core.tensors.quantizer import Binding, Quantizer, Slot, Unturned, bind_quantizer
from fp8core.tensors.states import LayerStates
from fp8core.tensors.storage import storage_plan
from fp8core.tensors.weights import How, KeptWeight, PerGroup

__all__ = ["SHAPES", "LinkShape", "Site", "Watch", "bind_chain", "gemm_desc", "handover"]

LinkShape: TypeAlias = (
    LinearShape
    | NormShape
    | ActivationShape
    | BiasShape
    | DropoutShape
    | AddShape
    | QuantizeShape
    | OutputShape
)

SHAPES: dict[str, Callable[..., LinkShape]] = {
    shape.__name__: shape for shape in typing.get_args(LinkShape)
}
"""Every kind of link by the name of its shape."""


Watch: TypeAlias = Callable[[LinearLink, LinearPlan, Binding], LinearLink]
"""``f(link, plan of its GEMMs, binding) -> link`` that computes the same and looks at it."""


class Site(NamedTuple):
    """Where a chain is bound: its plan, and what its quantizers share.

    With ``watch`` every linear link is what it returns in the place of the link that was bound. To
    ``nonfinite``, int64 ``[1]``, every cast adds the number of its NaN and inf; None in a graph,
    whose casts have a count of their own.
    """

    plan: LinearPlan
    binding: Binding
    owner: str
    states: LayerStates | None = None
    watch: Watch | None = None
    nonfinite: torch.Tensor | None = None

    @property
    def gemm_plan(self) -> LinearPlan:
        """How the GEMMs compute: while amaxes are only observed, in high precision."""
        return HIGH_PRECISION if self.binding.is_observing else self.plan


class Neighbours(NamedTuple):
    """The linears on either side of a link, if they are linears, and whether an add is before."""

    before: LinearLink | None
    after: LinearLink | None
    is_after_add: bool = False


def bind_chain(shapes: Sequence[LinkShape], site: Site) -> tuple[Link, ...]:
    """Bind the links of ``shapes``, each knowing what its neighbours hand it.

    Raises:
        UnsupportedError: no backend runs one of the operations on the device; GEMMs are asked
            first, so that the message is about them.
    """
    linears: dict[int, LinearLink] = {}
    gemms, dtype, gemm_plan = 0, site.binding.activation_dtype, site.gemm_plan
    for at, shape in enumerate(shapes):
        if isinstance(shape, LinearShape):
            states = site.states
            if states is not None:
                states = dataclasses.replace(states, first=gemms, count=shape.num_weights)
            link = _bind_linear(
                shape,
                site._replace(states=states),
                index=gemms,
                input_dtype=handover(shapes, at, gemm_plan, dtype, step=-1),
                grad_dtype=handover(shapes, at, gemm_plan, dtype, step=1),
                is_last=at == len(shapes) - 1,
            )
            watch = site.watch
            linears[at] = link if watch is None else watch(link, gemm_plan, site.binding)
            gemms += shape.num_weights
    links: list[Link] = []
    for at, shape in enumerate(shapes):
        bind = _BINDERS.get(type(shape))
        is_after_add = at > 0 and isinstance(links[at - 1], AddLink)
        neighbours = Neighbours(linears.get(at - 1), linears.get(at + 1), is_after_add)
        made = linears[at] if bind is None else bind(shape, site, neighbours, at)
        if isinstance(made, NormLink) and made.run_added is not None:
            links[at - 1] = AddLink(AddShape(), is_left_to_next=True)
        links.append(made)
    return tuple(links)


def handover(
    shapes: Sequence[LinkShape], at: int, plan: LinearPlan, dtype: torch.dtype, *, step: int
) -> torch.dtype:
    """Return the dtype in which the linear at ``at`` gets its input (``step`` -1) or its gradient
    (``step`` 1) from its neighbour, at activations of ``dtype``.

    Source: docs/numerics.md, "Where values are rounded before the cast".
    """
    tensor = plan.input if step < 0 else plan.grad_output
    is_rounded = all(spec is None or spec.cast_first for spec in tensor)
    if is_rounded or not 0 <= at + step < len(shapes):
        return dtype
    producer = shapes[at + step]
    if isinstance(producer, ActivationShape):
        return dtype if step > 0 and producer.is_gated else torch.float32
    return torch.float32 if isinstance(producer, NormShape) and step < 0 else dtype


def _bind_linear(
    shape: LinearShape,
    site: Site,
    *,
    index: int,
    input_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    is_last: bool,
) -> LinearLink:
    dtype, gemm_plan = site.binding.activation_dtype, site.gemm_plan
    gemms = {
        name: table.resolve(gemm_desc(name, gemm_plan, shape, dtype), site.binding.device)
        for name in ("fprop", "dgrad", "wgrad")
    }
    only_once = linear_only_once(shape.accumulates, site.plan, site.binding, site.owner)
    dgrad, wgrad = gemms["dgrad"].run, gemms["wgrad"].run
    if only_once is None:
        dgrad, wgrad = turning(dgrad), turning(wgrad)
        # The chain converts weights outside of its node, whose gradients then have this dtype.
        shape = shape._replace(weight_dtype=dtype)
    x, weight, dy = _bind_quantizers(
        shape, site, index, input_dtype, grad_dtype, is_unturned=only_once is None
    )
    choices = {name: resolved.choice for name, resolved in gemms.items()}
    for name, quantizer in (("input", x), ("weight", weight), ("grad_output", dy)):
        if quantizer.choices:
            choices[name] = quantizer.choices[-1]
    states, specs = site.states, gemm_plan.grad_output
    return LinearLink(
        shape=shape,
        input=x,
        weight=weight,
        grad_output=dy,
        fprop=_fprop(gemms["fprop"], shape, site.binding, gemm_plan.fprop),
        dgrad=dgrad,
        wgrad=wgrad,
        padding=_padding([gemms[name].alignment for name in gemms], shape, site.owner),
        backward_state=states.backward if states is not None and _is_delayed(specs) else None,
        needs_rng=any(spec is not None and spec.stochastic for spec in specs),
        input_dtype=input_dtype,
        grad_dtype=grad_dtype,
        index=index,
        choices=choices,
        num_weights=shape.num_weights,
        num_params=shape.num_params,
        # Autograd keeps the last one's gradient until backward returns.
        takes_chunks=is_last and dy.casts_chunks,
        only_once=only_once,
    )


def gemm_desc(name: str, plan: LinearPlan, shape: LinearShape, dtype: torch.dtype) -> GemmDesc:
    """Return what ``name``, one of fprop, dgrad, wgrad, asks for at activations of ``dtype``."""
    gemm: GemmPlan = getattr(plan, name)
    # In high precision the result is rounded to the activation dtype first, as torch.autocast does.
    is_low = gemm.a is not None or gemm.b is not None
    out_dtype = shape.weight_dtype if name == "wgrad" and is_low else dtype
    accumulates = name == "wgrad" and shape.accumulates
    if accumulates:
        out_dtype = torch.float32
    fields = (gemm.a, gemm.b, out_dtype, accumulates, gemm.fast_accumulation)
    if not shape.groups:
        return GemmDesc(*fields)
    return GroupedGemmDesc(*fields, name == "wgrad", shape.offsets_on_device)


def _fprop(
    resolved: Resolved, shape: LinearShape, binding: Binding, plan: GemmPlan
) -> Callable[..., Any]:
    """Return fprop; in high precision the bias has the activation dtype, as in torch.autocast."""
    run, dtype = resolved.run, binding.activation_dtype
    if shape.bias_dtype in (None, dtype) or plan.a is not None or plan.b is not None:
        return run

    def fprop(a: Operand, b: Any, *groups: torch.Tensor, bias: Any) -> Any:
        cast = [one.to(dtype) for one in bias] if shape.groups else bias.to(dtype)
        return run(a, b, *groups, bias=cast)

    return fprop


def _bind_quantizers(
    shape: LinearShape,
    site: Site,
    index: int,
    input_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    *,
    is_unturned: bool,
) -> tuple[Quantizer, KeptWeight | PerGroup, Quantizer]:
    plan, binding, states = site.plan, site.binding, site.states
    is_grouped = bool(shape.groups)
    count, propagates = site.nonfinite, plan.nonfinite == "propagate"
    unturned = Unturned(binding.activation_dtype) if is_unturned else None

    def slot_of(tensor: str, group: int | None = None) -> Slot | None:
        if states is None or not _is_delayed(plan.tensors[tensor]):
            return None
        return states.slot(tensor) if group is None else states.slot_of_set(tensor, group)

    def weight(group: int) -> KeptWeight:
        slot = slot_of("weight", group)
        own = (plan.weight, shape.weight_dtype, binding)
        quantizer = unturned or bind_quantizer(
            *own, slot=slot, nonfinite=count, propagates=propagates
        )
        key = (plan.weight, plan.nonfinite, shape.weight_dtype, binding.device, quantizer.choices)
        stored = HIGH_PRECISION.weight if binding.is_observing else storage_plan(plan.weight)
        return KeptWeight(quantizer, index + group, How(key, stored, site.owner, slot))

    bind = functools.partial(
        bind_quantizer,
        binding=binding,
        grouped=is_grouped,
        offsets_on_device=shape.offsets_on_device,
        nonfinite=count,
        propagates=propagates,
    )
    x = unturned or bind(plan.input, input_dtype, slot=slot_of("input"))
    # Calibration sees the forward pass alone, as in Transformer Engine.
    dy_slot = None if binding.is_observing else slot_of("grad_output")
    dy = bind(plan.grad_output, grad_dtype, slot=dy_slot)
    weights = PerGroup([weight(g) for g in range(shape.groups)]) if is_grouped else weight(0)
    return x, weights, dy


def _is_delayed(specs: Sequence[OperandSpec | None]) -> bool:
    return any(spec is not None and spec.delayed for spec in specs)


def _padding(
    alignments: Sequence[Alignment], shape: LinearShape, owner: str
) -> LayerPadding | None:
    fprop, dgrad, wgrad = alignments
    # fprop is [tokens, out, in] as m, n, k; dgrad [tokens, in, out]; wgrad [out, in, tokens]
    tokens = math.lcm(fprop.m, dgrad.m, wgrad.k)
    out_features = math.lcm(fprop.n, dgrad.k, wgrad.m)
    in_features = math.lcm(fprop.k, dgrad.n, wgrad.n)
    if tokens == out_features == in_features == 1:
        return None
    if tokens > 1 and shape.offsets_on_device:
        raise UnsupportedError(
            f"the rows of each group have to be a multiple of {tokens}, and sizes that only the "
            f"device knows cannot be padded. Give m_splits as a list of integers."
        )
    return LayerPadding(
        owner, tokens, -shape.in_features % in_features, -shape.out_features % out_features
    )


def _bind_norm(shape: NormShape, site: Site, neighbours: Neighbours, at: int) -> NormLink:
    dtype, device = site.binding.activation_dtype, site.binding.device
    before, after, is_after_add = neighbours
    out_dtype = dtype if after is None else after.input_dtype
    desc = NormDesc(shape.kind, dtype, out_dtype, shape.eps, shape.zero_centered)
    backward = NormBackwardDesc(desc)
    norm = table.resolve(desc, device)
    fusion = None if after is None else bind_fusion(desc, after.input, device)
    added = None
    if is_after_add and fusion is None:  # one of the two; quantizing writes less
        added = table.resolve_optional(AddNormDesc(desc), device, norm.choice.backend)
    return NormLink(
        shape,
        norm.run,
        table.resolve(backward, device).run,
        fusion,
        _bind_backward_fusion(backward, before, device),
        None if added is None else added.run,
        shape.num_params,
    )


def _bind_activation(
    shape: ActivationShape, site: Site, neighbours: Neighbours, at: int
) -> ActivationLink:
    dtype, device = site.binding.activation_dtype, site.binding.device
    before, after, _ = neighbours
    out_dtype = dtype if after is None else after.input_dtype
    grad_dtype = dtype if before is None else before.grad_dtype
    desc = ActivationDesc(shape.name, dtype, out_dtype, shape.params)
    backward = ActivationBackwardDesc(shape.name, dtype, grad_dtype, shape.params)
    return ActivationLink(
        shape,
        table.resolve(desc, device).run,
        table.resolve(backward, device).run,
        None if after is None else bind_fusion(desc, after.input, device),
        _bind_backward_fusion(backward, before, device),
    )


def _bind_backward_fusion(
    producer: NormBackwardDesc | ActivationBackwardDesc,
    before: LinearLink | None,
    device: torch.device,
) -> Fusion | None:
    """Return the fusion that makes the gradient of the linear ``before``."""
    if before is None:
        return None
    has_sums = before.shape.bias_dtype is not None
    return bind_fusion(producer, before.grad_output, device, has_sums=has_sums)


def _bind_quantize(
    shape: QuantizeShape, site: Site, neighbours: Neighbours, at: int
) -> QuantizeLink:
    binding = site.binding

    def rounding(spec: OperandSpec | None) -> Callable[[torch.Tensor], torch.Tensor]:
        if spec is None or binding.is_observing:
            return lambda x: x
        plain = dataclasses.replace(spec, delayed=False, stochastic=False)
        plan = TensorPlan(plain, None)
        dtype, propagates = binding.activation_dtype, site.plan.nonfinite == "propagate"
        quantize = bind_quantizer(
            plan, dtype, binding, nonfinite=site.nonfinite, propagates=propagates
        )
        desc = DequantizeDesc(plain, binding.activation_dtype)
        dequantize = table.resolve(desc, binding.device).run
        return lambda x: dequantize(quantize(x, columnwise=False).rowwise)

    specs = site.plan.input.rowwise, site.plan.grad_output.rowwise
    is_high = specs == (None, None) or binding.is_observing
    only_once = None if is_high else in_low_precision(site.owner)
    return QuantizeLink(shape, rounding(specs[0]), rounding(specs[1]), only_once)


_BINDERS: dict[type, Callable[[Any, Site, Neighbours, int], Link]] = {
    NormShape: _bind_norm,
    ActivationShape: _bind_activation,
    QuantizeShape: _bind_quantize,
    BiasShape: lambda shape, site, neighbours, at: BiasLink(shape),
    DropoutShape: lambda shape, site, neighbours, at: DropoutLink(shape, at, needs_rng=shape.p > 0),
    OutputShape: lambda shape, site, neighbours, at: OutputLink(),
    AddShape: lambda shape, site, neighbours, at: AddLink(shape),
}
