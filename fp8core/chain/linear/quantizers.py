"""The quantizers of a linear's input, its weights and the gradient of its output, and how their
operands travel where several ranks have their rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from fp8core.backend_api import GemmDesc
from fp8core.chain.linear.spec import LinearSpec
from fp8core.chain.shape import BindContext
from fp8core.chain.shards import GemmPart, SentCast, Shards
from fp8core.collectives import Communicator
from fp8core.dispatch.table import Resolved
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.recipe.plan import HIGH_PRECISION, LinearPlan
from fp8core.tensors.delayed_state import LayerStates
from fp8core.tensors.quantized_tensor import object_quantizer
from fp8core.tensors.quantizer import HighPrecision, Slot, TensorQuantizer
from fp8core.tensors.quantizer_binding import MaximumOverShards, bind_columnwise, bind_quantizer
from fp8core.tensors.saving import RequantizedWeight
from fp8core.tensors.storage import storage_plan
from fp8core.tensors.weights import CachingWeightQuantizer, How, PerGroup


class Parts(NamedTuple):
    """Functions that compute some rows of fprop and of dgrad: see
    :class:`~fp8core.chain.linear.program.LinearOperations`."""

    fprop_part: GemmPart | None = None
    dgrad_part: GemmPart | None = None
    dgrad_rows: GemmPart | None = None


def bind_parts(gemms: dict[str, Resolved], context: BindContext, *, is_left: bool) -> Parts:
    """Return what computes some rows of a product, where ranks beside the link have parts of the
    rows, and where others are cast meanwhile. ``is_left``: the products are torch's to
    differentiate, and are whole; so are those that are watched."""
    if is_left or context.watch is not None:
        return Parts()
    neighbours = [side.shape for side in (context.before, context.after) if side is not None]
    has_movers = any(shape.movement is not None for shape in neighbours)
    reads_rows = context.before is not None and context.before.shape.reads_grad_rows
    fprop, dgrad = (_part_of(name, gemms[name], context) for name in ("fprop", "dgrad"))
    return Parts(
        fprop_part=fprop if has_movers else None,
        dgrad_part=dgrad if has_movers or reads_rows else None,
        dgrad_rows=dgrad,
    )


def _part_of(step: str, gemm: Resolved, context: BindContext) -> GemmPart | None:
    desc, backend = gemm.choice.desc, gemm.choice.backend
    if type(desc) is not GemmDesc:  # of groups there are no parts
        return None
    part = context.resolve_optional(step, dataclasses.replace(desc, part=True), backend)
    return None if part is None else part.run


def bind_shards(
    shape: LinearSpec, context: BindContext, tensor: str, gemm_part: GemmPart | None
) -> Shards | None:
    """Return how ``tensor`` travels quantized if ranks have some rows of it; None: it does not."""
    communicator = _ranks_of_codes(shape, context, tensor, "gathered")
    if communicator is None:
        return None
    is_input, plan = tensor == "input", context.gemm_plan
    is_decoded = is_input and plan.dequantizes and plan.input.columnwise is None
    transfers = context.transfers(communicator)
    return Shards(
        communicator,
        plan.tensors[tensor],
        tensor,
        is_input,
        is_decoded,
        transfers,
        in_parts=transfers is not None and gemm_part is not None,
    )


def _ranks_of_codes(
    shape: LinearSpec, context: BindContext, tensor: str, way: str
) -> Communicator | None:
    """Return the ranks between which codes of ``tensor`` may travel by ``way``; None: they may not.

    A bias is summed over all rows, and an input that is cast again is held as it came: both need
    the tensor in high precision. So does a quantizer object, of which nobody knows what its scales
    cover.
    """
    needs_values = shape.saves_input if tensor == "input" else shape.bias_dtype is not None
    if needs_values or tensor in dict(context.plan.makers):
        return None
    return context.moved_over(tensor, way)


def bind_sent(
    shape: LinearSpec,
    context: BindContext,
    tensor: str,
    dtype: torch.dtype,
) -> SentCast | None:
    """Return how ``tensor`` is cast before its rows leave; None: they travel as they are."""
    plan = context.gemm_plan
    communicator = _ranks_of_codes(shape, context, tensor, "exchanged")
    if communicator is None or plan.dequantizes:
        return None
    specs = plan.tensors[tensor]
    # Delayed scales of an expert are on its rank alone.
    if plan.nonfinite == "propagate" or None in specs or specs.is_delayed:
        return None
    quantizer = bind_quantizer(
        specs,
        dtype,
        context.binding,
        purpose=context.purpose(tensor),
        grouped=True,
        nonfinite=context.nonfinite,
        reduce_amax=amax_reduction(communicator, context),
    )
    return SentCast(communicator, specs, quantizer, tensor)


def amax_reduction(
    communicator: Communicator | None, context: BindContext
) -> MaximumOverShards | None:
    """Return what reduces the amaxes of a tensor whose rows are on several ranks."""
    if communicator is None:
        return None
    transfers = context.transfers(communicator)
    maximum = None if transfers is None else transfers.maximum

    def largest(amaxes: torch.Tensor) -> torch.Tensor:
        return communicator.max(amaxes, "amax", maximum, at_once=True).wait()

    return MaximumOverShards(largest)


def bind_quantizers(
    shape: LinearSpec,
    context: BindContext,
    states: LayerStates | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    is_unturned: bool,
    zeros: tuple[int, int] | None,
) -> tuple[
    TensorQuantizer, CachingWeightQuantizer | PerGroup, TensorQuantizer, TensorQuantizer | None
]:
    """Return the quantizers of input, weight and grad_output, and that of the input in backward, if
    it is cast there; ``dtypes`` are those of the input and of grad_output. ``zeros`` are the rows
    and columns of zeros that the weight's products need behind its ends, None for none."""
    plan, binding = context.plan, context.binding
    is_grouped = bool(shape.groups)
    count, propagates = context.nonfinite, plan.nonfinite == "propagate"
    reductions = {
        tensor: context.moved_over(tensor, "gathered") for tensor in ("input", "grad_output")
    }
    if propagates and any(reductions.values()):
        raise UnsupportedError(
            "nonfinite='propagate' marks the tensor that holds the NaN or inf, but of one whose "
            "rows are on several ranks each rank casts a part. nonfinite='saturate' works there."
        )
    requantized = None  # by which spec backward quantizes weights again
    if plan.requantize_weights and not binding.is_observing:
        requantized = plan.weight.columnwise
    unturned = HighPrecision(binding.activation_dtype, turns=False) if is_unturned else None
    dequantizes = plan.dequantizes and not binding.is_observing

    makers = {} if binding.is_observing else dict(plan.makers)
    if makers and is_grouped:
        raise UnsupportedError(
            f"a quantizer object for {', '.join(makers)} of groups is not offered: it would "
            f"quantize all groups as one tensor. Let the factory return its plan for such a layer."
        )

    def object_of(tensor: str) -> TensorQuantizer | None:
        maker = makers.get(tensor)
        if maker is None:
            return None
        role = f"{context.owner}: the {type(maker).__name__} of its {tensor}"
        return object_quantizer(maker, plan.tensors[tensor], role)

    def slot_of(tensor: str, group: int | None = None) -> Slot | None:
        if states is None or not plan.tensors[tensor].is_delayed:
            return None
        return states.slot(tensor) if group is None else states.slot_of_set(tensor, group)

    def weight(group: int) -> CachingWeightQuantizer:
        slot = slot_of("weight", group)
        quantizer = (
            unturned
            or object_of("weight")
            or bind_quantizer(
                plan.weight,
                shape.weight_dtype,
                binding,
                purpose=context.purpose("weight"),
                slot=slot,
                nonfinite=count,
                propagates=propagates,
                dequantizes=dequantizes,
            )
        )
        key = (
            *(plan.weight, plan.nonfinite, dequantizes),
            *(shape.weight_dtype, binding.device, quantizer.choices),
        )
        stored = HIGH_PRECISION.weight if binding.is_observing else storage_plan(plan.weight)
        index = context.first_gemm + group
        dtype = None if isinstance(quantizer, HighPrecision) else shape.weight_dtype
        is_decoded = dequantizes and plan.weight.rowwise is not None
        how = How(key, dtype, stored, context.owner, slot, is_decoded)
        if requantized is None:
            return CachingWeightQuantizer(quantizer, index, how, zeros)
        columnwise = bind_columnwise(
            requantized,
            shape.weight_dtype,
            binding,
            purpose=context.purpose("weight"),
            propagates=propagates,
        )
        return RequantizedWeight(quantizer, index, how, plan.weight, columnwise, zeros)

    def quantizer_of(
        tensor: str, dtype: torch.dtype, slot: Slot | None, nonfinite: torch.Tensor | None
    ) -> TensorQuantizer:
        return object_of(tensor) or bind_quantizer(
            plan.tensors[tensor],
            dtype,
            binding,
            purpose=context.purpose(tensor),
            grouped=is_grouped,
            offsets_on_device=shape.offsets_on_device,
            slot=slot,
            nonfinite=nonfinite,
            propagates=propagates,
            reduce_amax=amax_reduction(reductions[tensor], context),
            dequantizes=dequantizes and tensor == "input",
            is_gradient=tensor == "grad_output",
        )

    input_dtype, grad_dtype = dtypes
    x = unturned or quantizer_of("input", input_dtype, slot_of("input"), count)
    again = None
    if shape.saves_input and plan.input.columnwise is not None and not binding.is_observing:
        _check_saves_input(plan)
        again = quantizer_of("input", input_dtype, None, None)
    weights = PerGroup([weight(g) for g in range(shape.groups)]) if is_grouped else weight(0)
    # Calibration sees the forward pass alone, as in Transformer Engine.
    dy_slot = None if binding.is_observing else slot_of("grad_output")
    dy = quantizer_of("grad_output", grad_dtype, dy_slot, count)
    return x, weights, dy, again


def _check_saves_input(plan: LinearPlan) -> None:
    """Raise RecipeError if backward could not repeat the cast of the input."""
    if plan.input.is_delayed:
        raise RecipeError(
            "save_original_input=True with delayed scaling: backward would cast the input by the "
            "scale of the next step. Leave it out, or use a recipe whose scales follow from the "
            "tensor, such as Float8CurrentScaling."
        )
