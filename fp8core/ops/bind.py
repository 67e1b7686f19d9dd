"""From values to objects: a plan, a device and a state become a bound :class:`LinearOp`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.backend_api import Alignment, GemmDesc, GroupedGemmDesc, Operand
from fp8core.dispatch import table
from fp8core.dispatch.table import Resolved
from fp8core.ops.linear import LinearOp, LinearShape
from fp8core.ops.padding import LayerPadding
from fp8core.plan import HIGH_PRECISION, GemmPlan, LinearPlan
from fp8core.quantizer import Binding, PerGroup, Quantizer, Slot, bind_quantizer
from fp8core.scaling import DelayedState

__all__ = ["LinearStates", "bind_linear"]

FORWARD_SLOTS = 3
"""Slots of one GEMM in a forward state, as in Transformer Engine: input, weight, output."""

BACKWARD_SLOTS = 2
"""Slots of one GEMM in a backward state: grad_output, grad_input."""


@dataclass(frozen=True, slots=True)
class LinearStates:
    """The delayed states of a linear layer; ``is_recording``: amaxes are taken down."""

    forward: DelayedState
    backward: DelayedState
    is_recording: bool = True

    def input(self) -> Slot:
        """Return the slots of the input: one, or one a group."""
        return self._slot(self.forward, slice(0, None, FORWARD_SLOTS))

    def weight(self, group: int) -> Slot:
        """Return the slot of a weight."""
        first = group * FORWARD_SLOTS + 1
        return self._slot(self.forward, slice(first, first + 1))

    def grad_output(self) -> Slot:
        """Return the slots of grad_output: one, or one a group."""
        return self._slot(self.backward, slice(0, None, BACKWARD_SLOTS))

    def _slot(self, state: DelayedState, where: slice) -> Slot:
        return Slot(state.scale[where], state.amax_history[0, where] if self.is_recording else None)


def bind_linear(
    shape: LinearShape,
    plan: LinearPlan,
    binding: Binding,
    *,
    owner: str,
    states: LinearStates | None = None,
) -> LinearOp:
    """Bind the three GEMMs and the three quantizers of a linear layer.

    Raises:
        UnsupportedError: no backend runs one of them on the device; the GEMMs are asked first, so
            that the message is about them.
    """
    gemm_plan = HIGH_PRECISION if binding.is_observing else plan
    gemms = {
        name: _bind_gemm(getattr(gemm_plan, name), shape, binding, contracts_rows=name == "wgrad")
        for name in ("fprop", "dgrad", "wgrad")
    }
    quantizers = _bind_quantizers(shape, plan, binding, states)
    input_, weight, grad_output = quantizers
    choices = {name: resolved.choice for name, resolved in gemms.items()}
    for name, quantizer in zip(("input", "weight", "grad_output"), quantizers, strict=True):
        if quantizer.choices:
            choices[name] = quantizer.choices[-1]
    specs = (plan.dgrad.a, plan.wgrad.a)
    uses_backward_state = states is not None and any(spec and spec.delayed for spec in specs)
    return LinearOp(
        shape=shape,
        input=input_,
        weight=weight,
        grad_output=grad_output,
        fprop=_fprop(gemms["fprop"], shape, binding, gemm_plan.fprop),
        dgrad=gemms["dgrad"].run,
        wgrad=gemms["wgrad"].run,
        padding=_padding([gemms[name].alignment for name in gemms], shape, owner),
        backward_state=states.backward if states is not None and uses_backward_state else None,
        is_stochastic=any(spec is not None and spec.stochastic for spec in specs),
        choices=choices,
        num_weights=shape.num_weights,
        num_params=shape.num_params,
    )


def _bind_gemm(
    plan: GemmPlan, shape: LinearShape, binding: Binding, *, contracts_rows: bool
) -> Resolved:
    # In high precision the result is rounded to the activation dtype first, as torch.autocast does.
    is_low = plan.a is not None or plan.b is not None
    out_dtype = shape.weight_dtype if contracts_rows and is_low else binding.activation_dtype
    fields = (plan.a, plan.b, out_dtype, False, plan.fast_accumulation)
    if shape.groups:
        desc: GemmDesc = GroupedGemmDesc(*fields, contract_groups=contracts_rows)
    else:
        desc = GemmDesc(*fields)
    return table.resolve(desc, binding.device)


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
    shape: LinearShape, plan: LinearPlan, binding: Binding, states: LinearStates | None
) -> tuple[Quantizer, Quantizer | PerGroup, Quantizer]:
    groups, dtype = shape.groups, binding.activation_dtype

    def weight(group: int) -> Quantizer:
        slot = states.weight(group) if states and _is_delayed(plan.weight) else None
        return bind_quantizer(plan.weight, shape.weight_dtype, binding, slot=slot)

    x = bind_quantizer(
        plan.input,
        dtype,
        binding,
        grouped=bool(groups),
        slot=states.input() if states and _is_delayed(plan.input) else None,
    )
    # Calibration sees the forward pass alone, as in Transformer Engine.
    observes_gradients = states and _is_delayed(plan.grad_output) and not binding.is_observing
    dy = bind_quantizer(
        plan.grad_output,
        dtype,
        binding,
        grouped=bool(groups),
        slot=states.grad_output() if states and observes_gradients else None,
    )
    return x, PerGroup([weight(g) for g in range(groups)]) if groups else weight(0), dy


def _is_delayed(specs: Sequence[object]) -> bool:
    return any(getattr(spec, "delayed", False) for spec in specs)


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
