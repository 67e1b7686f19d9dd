"""From values to objects: shapes, a plan, a device and a state become the links of a chain."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    Alignment,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OperandSpec,
)
from fp8core.dispatch import table
from fp8core.dispatch.table import Resolved
from fp8core.links.activation import ActivationLink, ActivationShape
from fp8core.links.fusion import bind_fusion
from fp8core.links.linear import LinearLink, LinearShape
from fp8core.links.norm import NormLink, NormShape
from fp8core.links.padding import LayerPadding
from fp8core.links.pointwise import (
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
from fp8core.links.protocol import Link
from fp8core.links.states import LinearStates
from fp8core.plan import HIGH_PRECISION, GemmPlan, LinearPlan, TensorPlan
from fp8core.quantizer import Binding, Quantizer, Slot, bind_quantizer
from fp8core.weights import KeptWeight, PerGroup, WeightStore

__all__ = ["SHAPES", "LinkShape", "Site", "bind_chain"]

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


class Site(NamedTuple):
    """Where a chain is bound: its plan, what its quantizers share, and what its layer keeps.

    Without ``weights`` every call quantizes them anew.
    """

    plan: LinearPlan
    binding: Binding
    owner: str
    weights: WeightStore | None
    states: LinearStates | None = None


def bind_chain(shapes: Sequence[LinkShape], site: Site) -> tuple[Link, ...]:
    """Bind the links of ``shapes``, each knowing what its neighbours hand it.

    Raises:
        UnsupportedError: no backend runs one of the operations on the device; GEMMs are asked
            first, so that the message is about them.
    """
    linears: dict[int, LinearLink] = {}
    gemms = 0
    for at, shape in enumerate(shapes):
        if isinstance(shape, LinearShape):
            states = site.states
            if states is not None:
                states = dataclasses.replace(states, first=gemms, count=shape.num_weights)
            linears[at] = _bind_linear(
                shape,
                site._replace(states=states),
                index=gemms,
                input_dtype=_handover(shapes[at - 1] if at else None, site, is_backward=False),
                grad_dtype=_handover(
                    shapes[at + 1] if at + 1 < len(shapes) else None, site, is_backward=True
                ),
            )
            gemms += shape.num_weights
    links: list[Link] = []
    for at, shape in enumerate(shapes):
        bind = _BINDERS.get(type(shape))
        neighbours = linears.get(at - 1), linears.get(at + 1)
        links.append(linears[at] if bind is None else bind(shape, site, neighbours, at))
    return tuple(links)


def _handover(producer: LinkShape | None, site: Site, *, is_backward: bool) -> torch.dtype:
    """Return the dtype in which ``producer`` hands its result to a linear.

    Source: docs/numerics.md, "Where values are rounded before the cast".
    """
    dtype = site.binding.activation_dtype
    tensor = site.plan.grad_output if is_backward else site.plan.input
    is_rounded = all(spec is None or spec.cast_first for spec in tensor)
    if is_rounded or producer is None or site.binding.is_observing:
        return dtype
    if isinstance(producer, ActivationShape):
        return dtype if is_backward and producer.is_gated else torch.float32
    return torch.float32 if isinstance(producer, NormShape) and not is_backward else dtype


def _bind_linear(
    shape: LinearShape,
    site: Site,
    *,
    index: int,
    input_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> LinearLink:
    gemm_plan = HIGH_PRECISION if site.binding.is_observing else site.plan
    gemms = {
        name: _bind_gemm(getattr(gemm_plan, name), shape, site.binding, is_wgrad=name == "wgrad")
        for name in ("fprop", "dgrad", "wgrad")
    }
    x, weight, dy = _bind_quantizers(shape, site, index, input_dtype, grad_dtype)
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
        fprop=gemms["fprop"].run,
        dgrad=gemms["dgrad"].run,
        wgrad=gemms["wgrad"].run,
        padding=_padding([gemms[name].alignment for name in gemms], shape, site.owner),
        backward_state=states.backward if states is not None and _is_delayed(specs) else None,
        needs_rng=any(spec is not None and spec.stochastic for spec in specs),
        input_dtype=input_dtype,
        grad_dtype=grad_dtype,
        index=index,
        choices=choices,
        num_weights=shape.num_weights,
        num_params=shape.num_params,
    )


def _bind_gemm(plan: GemmPlan, shape: LinearShape, binding: Binding, *, is_wgrad: bool) -> Resolved:
    # In high precision the result is rounded to the activation dtype first, as torch.autocast does.
    is_low = plan.a is not None or plan.b is not None
    out_dtype = shape.weight_dtype if is_wgrad and is_low else binding.activation_dtype
    fields = (plan.a, plan.b, out_dtype, False, plan.fast_accumulation)
    if shape.groups:
        desc: GemmDesc = GroupedGemmDesc(*fields, contract_groups=is_wgrad)
    else:
        desc = GemmDesc(*fields)
    return table.resolve(desc, binding.device)


def _bind_quantizers(
    shape: LinearShape, site: Site, index: int, input_dtype: torch.dtype, grad_dtype: torch.dtype
) -> tuple[Quantizer, KeptWeight | PerGroup, Quantizer]:
    plan, binding, states = site.plan, site.binding, site.states
    is_grouped = bool(shape.groups)

    def slot_of(specs: TensorPlan, find: Callable[[LinearStates], Slot]) -> Slot | None:
        return find(states) if states is not None and _is_delayed(specs) else None

    def weight(group: int) -> KeptWeight:
        slot = slot_of(plan.weight, lambda states: states.weight(group))
        quantizer = bind_quantizer(plan.weight, shape.weight_dtype, binding, slot=slot)
        scale = None if slot is None else slot.scale
        return KeptWeight(quantizer, site.weights, index + group, scale)

    x_slot = slot_of(plan.input, LinearStates.input)
    x = bind_quantizer(plan.input, input_dtype, binding, grouped=is_grouped, slot=x_slot)
    # Calibration sees the forward pass alone, as in Transformer Engine.
    dy_slot = None if binding.is_observing else slot_of(plan.grad_output, LinearStates.grad_output)
    dy = bind_quantizer(plan.grad_output, grad_dtype, binding, grouped=is_grouped, slot=dy_slot)
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
    return LayerPadding(
        owner, tokens, -shape.in_features % in_features, -shape.out_features % out_features
    )


Neighbours: TypeAlias = "tuple[LinearLink | None, LinearLink | None]"


def _bind_norm(shape: NormShape, site: Site, neighbours: Neighbours, at: int) -> NormLink:
    dtype, device = site.binding.activation_dtype, site.binding.device
    consumer = neighbours[1]
    out_dtype = dtype if consumer is None else consumer.input_dtype
    desc = NormDesc(shape.kind, dtype, out_dtype, shape.eps, shape.zero_centered)
    return NormLink(
        shape,
        table.resolve(desc, device).run,
        table.resolve(NormBackwardDesc(desc), device).run,
        None if consumer is None else bind_fusion(desc, consumer.input, device),
        shape.num_params,
    )


def _bind_activation(
    shape: ActivationShape, site: Site, neighbours: Neighbours, at: int
) -> ActivationLink:
    dtype, device = site.binding.activation_dtype, site.binding.device
    before, after = neighbours
    out_dtype = dtype if after is None else after.input_dtype
    grad_dtype = dtype if before is None else before.grad_dtype
    desc = ActivationDesc(shape.name, dtype, out_dtype, shape.params)
    backward = ActivationBackwardDesc(shape.name, dtype, grad_dtype, shape.params)
    return ActivationLink(
        shape,
        table.resolve(desc, device).run,
        table.resolve(backward, device).run,
        None if after is None else bind_fusion(desc, after.input, device),
        None if before is None else bind_fusion(backward, before.grad_output, device),
    )


def _bind_quantize(
    shape: QuantizeShape, site: Site, neighbours: Neighbours, at: int
) -> QuantizeLink:
    binding = site.binding

    def rounding(spec: OperandSpec | None) -> Callable[[torch.Tensor], torch.Tensor]:
        if spec is None or binding.is_observing:
            return lambda x: x
        plan = TensorPlan(dataclasses.replace(spec, delayed=False), None)
        quantize = bind_quantizer(plan, binding.activation_dtype, binding)
        desc = DequantizeDesc(spec, binding.activation_dtype)
        dequantize = table.resolve(desc, binding.device).run
        return lambda x: dequantize(quantize(x, columnwise=False).rowwise)

    return QuantizeLink(
        shape, rounding(site.plan.input.rowwise), rounding(site.plan.grad_output.rowwise)
    )


_BINDERS: dict[type, Callable[[Any, Site, Neighbours, int], Link]] = {
    NormShape: _bind_norm,
    ActivationShape: _bind_activation,
    QuantizeShape: _bind_quantize,
    BiasShape: lambda shape, site, neighbours, at: BiasLink(shape),
    DropoutShape: lambda shape, site, neighbours, at: DropoutLink(shape, at),
    OutputShape: lambda shape, site, neighbours, at: OutputLink(),
    AddShape: lambda shape, site, neighbours, at: AddLink(shape),
}
