"""A linear layer as a part of a chain, bound to quantizers and GEMMs of backends."""

from __future__ import annotations

import dataclasses

from fp8core.backend_api import ColumnSumsDesc
from fp8core.chain.dequantized import bind_decode
from fp8core.chain.linear.gemms import bind_fprop, taking_any_rows, turning
from fp8core.chain.linear.link import LinearLink
from fp8core.chain.linear.quantizers import bind_quantizers
from fp8core.chain.linear.spec import LinearSpec
from fp8core.chain.linear.transfers import bind_parts, bind_sent, bind_shards
from fp8core.chain.once import linear_only_once
from fp8core.chain.padding import layer_padding
from fp8core.chain.protocol import Link
from fp8core.chain.shape import BindContext


class LinearShape(LinearSpec):
    """What a linear layer computes; it binds itself to operations of backends."""

    __slots__ = ()

    def bind(self, context: BindContext) -> Link:
        """Return the link, or what a watch makes of it."""
        link, plan = _bind(self, context), context.gemm_plan
        return link if context.watch is None else context.watch(link, plan, context.binding)


def _bind(shape: LinearShape, context: BindContext) -> LinearLink:
    plan, dtype = context.gemm_plan, context.dtype
    gemms = {
        name: context.resolve(name, shape.gemm_desc(name, plan, dtype))
        for name in ("fprop", "dgrad", "wgrad")
    }
    only_once = linear_only_once(
        context.plan,
        context.binding,
        context.owner,
        accumulates=shape.accumulates,
        delays_wgrad=shape.delays_wgrad,
        is_parallel=context.is_parallel,
    )
    dgrad = gemms["dgrad"].run
    wgrad, wgrad_rows = taking_any_rows(gemms["wgrad"])
    if only_once is None:
        dgrad, wgrad = turning(dgrad), turning(wgrad)
        # The chain converts weights outside of its node, whose gradients then have this dtype.
        shape = dataclasses.replace(shape, weight_dtype=dtype)
    input_dtype, grad_dtype = context.input_dtype(plan.input), context.grad_dtype(plan.grad_output)
    states = context.states
    if states is not None:
        states = dataclasses.replace(states, first=context.first_gemm, count=shape.num_weights)
    alignments = {name: resolved.alignment for name, resolved in gemms.items()}
    if wgrad_rows > 1:
        alignments["wgrad"] = alignments["wgrad"]._replace(k=1)
    padding = layer_padding(
        [*alignments.values()],
        shape.features,
        context.owner,
        offsets_on_device=shape.offsets_on_device,
    )
    pad_weight = padding.pad_weight if padding is not None and padding.is_of_features else None
    quantizers = bind_quantizers(
        shape,
        context,
        states,
        (input_dtype, grad_dtype),
        is_unturned=only_once is None,
        pad_weight=pad_weight,
    )
    x, weight, dy, input_again = quantizers
    sums = None
    if shape.bias_dtype is not None:
        sums = context.resolve("bias gradient", ColumnSumsDesc(grad_dtype)).run
    choices = {name: resolved.choice for name, resolved in gemms.items()}
    for name, quantizer in (("input", x), ("weight", weight), ("grad_output", dy)):
        if quantizer.choices:
            choices[name] = quantizer.choices[-1]
    specs = plan.grad_output
    is_grouped = bool(shape.groups)
    parts = bind_parts(gemms, context, is_left=only_once is None)
    return LinearLink(
        shape=shape,
        input=x,
        weight=weight,
        grad_output=dy,
        fprop=bind_fprop(gemms["fprop"], shape, context),
        dgrad=dgrad,
        wgrad=wgrad,
        wgrad_rows=wgrad_rows,
        column_sums=sums,
        padding=padding,
        backward_state=states.backward if states is not None and specs.is_delayed else None,
        needs_rng=any(spec is not None and spec.stochastic for spec in specs),
        input_dtype=input_dtype,
        grad_dtype=grad_dtype,
        index=context.first_gemm,
        choices=choices,
        num_weights=shape.num_weights,
        num_params=shape.num_params,
        takes_chunks=dy.casts_chunks,
        # Autograd keeps the last one's gradient until backward returns.
        casts_chunks=context.after is None,
        decode_input=bind_decode(
            "input", context, is_grouped=is_grouped, offsets_on_device=shape.offsets_on_device
        ),
        decode_weight=bind_decode("weight", context),
        input_again=input_again,
        input_shards=bind_shards(shape, context, "input", parts.fprop_part),
        grad_shards=bind_shards(shape, context, "grad_output", parts.dgrad_part),
        input_sent=bind_sent(shape, context, "input", input_dtype),
        grad_sent=bind_sent(shape, context, "grad_output", grad_dtype),
        fprop_part=parts.fprop_part,
        dgrad_part=parts.dgrad_part,
        dgrad_rows=parts.dgrad_rows,
        only_once=only_once,
    )
