"""The shape of a linear, which binds it: to GEMMs, and to the quantizers of its input, its weights
and the gradient of its output, which travel between ranks where several have their rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from fp8core.backend_api import ColumnSumsDesc, GemmDesc, QuantizeDesc
from fp8core.chain.linear.gemms import (
    LinearSpec,
    bind_decode,
    bind_fprop,
    of_padded_groups,
    resolve_gemm,
    taking_any_rows,
    turning,
)
from fp8core.chain.linear.program import LinearLink
from fp8core.chain.linear.user_product import of_storages
from fp8core.chain.padding import LayerPadding, layer_padding
from fp8core.chain.protocol import Link, OnlyOnce, in_low_precision, over_ranks
from fp8core.chain.shape import BindContext
from fp8core.chain.shards import GemmPart, SentCast, Shards
from fp8core.collectives import Communicator
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import Resolved
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import HIGH_PRECISION
from fp8core.tensors.delayed_state import DelayedState, LayerStates
from fp8core.tensors.quantized_tensor import object_quantizer
from fp8core.tensors.quantizer import HighPrecision, Slot, TensorQuantizer, completed
from fp8core.tensors.quantizer_binding import (
    MaximumOverShards,
    bind_by_amax,
    bind_columnwise,
    bind_quantizer,
    casts_padded,
)
from fp8core.tensors.saving import RequantizedWeight
from fp8core.tensors.storage import storage_plan
from fp8core.tensors.weights import CachingWeightQuantizer, How, PerGroup, WeightQuantizer


class LinearShape(LinearSpec):
    """The shape of a linear layer, which binds itself to operations of backends."""

    __slots__ = ()

    def bind(self, context: BindContext) -> Link:
        """Return the link, or what a watch makes of it."""
        link, plan = _bind(self, context), context.gemm_plan
        return link if context.watch is None else context.watch(link, plan, context.binding)


def _bind(shape: LinearSpec, context: BindContext) -> LinearLink:
    plan, dtype = context.gemm_plan, context.dtype
    gemms = {name: _gemm(name, shape, context) for name in ("fprop", "dgrad", "wgrad")}
    only_once = _only_once(shape, context)
    dgrad = gemms["dgrad"].run
    wgrad, wgrad_rows = taking_any_rows(gemms["wgrad"])
    if only_once is None:
        dgrad, wgrad = turning(dgrad), turning(wgrad)
        # The chain converts weights outside of its node, whose gradients then have this dtype.
        shape = dataclasses.replace(shape, weight_dtype=dtype)
    tensors = _Tensors.of(shape, context, is_unturned=only_once is None)
    tensors = tensors.with_zeros(gemms["wgrad"].alignment.k if wgrad_rows == 1 else 1)
    wgrad = of_padded_groups(wgrad, tensors.padded)
    padding = _padding(shape, gemms, context.owner, any_rows=max(wgrad_rows, tensors.padded) > 1)
    x, input_again = tensors.input(), tensors.input_again()
    weight = tensors.weights(None if padding is None else padding.of_weight)
    dy = tensors.grad_output()
    sums = None
    if shape.bias_dtype is not None:
        sums = context.resolve("bias gradient", ColumnSumsDesc(tensors.grad_dtype)).run
    is_whole = only_once is None or bool(plan.stored_by_users)
    fprop_part, dgrad_part, dgrad_rows = _bind_parts(gemms, context, is_whole=is_whole)
    return LinearLink(
        shape=shape,
        index=context.first_gemm,
        needs_rng=any(spec is not None and spec.stochastic for spec in plan.grad_output),
        num_params=shape.num_params,
        num_weights=shape.num_weights,
        input=x,
        weight=weight,
        grad_output=dy,
        fprop=bind_fprop(gemms["fprop"], shape, context),
        dgrad=dgrad,
        wgrad=wgrad,
        column_sums=sums,
        backward_state=tensors.backward_state,
        input_dtype=tensors.input_dtype,
        grad_dtype=tensors.grad_dtype,
        choices=_choices(gemms, input=x, weight=weight, grad_output=dy),
        padding=padding,
        only_once=only_once,
        decode_input=bind_decode("input", context, shape),
        decode_weight=bind_decode("weight", context),
        input_again=input_again,
        input_slot=None if input_again is None else tensors.input_slot,
        remade=context.plan.remade,
        input_shards=tensors.shards("input", fprop_part),
        grad_shards=tensors.shards("grad_output", dgrad_part),
        input_sent=tensors.sent("input", tensors.input_dtype),
        grad_sent=tensors.sent("grad_output", tensors.grad_dtype),
        fprop_part=fprop_part,
        dgrad_part=dgrad_part,
        dgrad_rows=dgrad_rows,
        wgrad_rows=wgrad_rows,
        takes_chunks=dy.casts_chunks,
        # Autograd keeps the last one's gradient until backward returns.
        casts_chunks=context.after is None,
    )


def _gemm(name: str, shape: LinearSpec, context: BindContext) -> Resolved:
    """Return fprop, dgrad or wgrad."""
    plan = context.gemm_plan
    desc = shape.gemm_desc(name, plan, context.dtype)
    if not plan.stored_by_users:
        return resolve_gemm(name, desc, context)
    if context.watch is not None:
        raise UnsupportedError(_NO_WATCH)
    product = resolve_gemm(f"{name} of dequantized storages, unless by qgemm", desc, context)
    return of_storages(name, product, context.dtype, context.owner)


_NO_WATCH = (
    "fp8core.monitor measures the codes of fp8core's formats, and the recipe quantizes to storages "
    "of the user's own. Leave the monitor off, or choose another recipe."
)


def _choices(
    gemms: dict[str, Resolved], **quantizers: TensorQuantizer | WeightQuantizer
) -> dict[str, Choice]:
    """Return who computes, by product, and by tensor that is cast."""
    casts = {name: each.choices[-1] for name, each in quantizers.items() if each.choices}
    return {name: resolved.choice for name, resolved in gemms.items()} | casts


def _padding(
    shape: LinearSpec, gemms: dict[str, Resolved], owner: str, *, any_rows: bool
) -> LayerPadding | None:
    alignments = {name: resolved.alignment for name, resolved in gemms.items()}
    if any_rows:  # wgrad's operands get zeros where they are cast, or by wgrad itself
        alignments["wgrad"] = alignments["wgrad"]._replace(k=1)
    on_device = shape.offsets_on_device
    return layer_padding([*alignments.values()], shape.features, owner, offsets_on_device=on_device)


def _only_once(shape: LinearSpec, context: BindContext) -> OnlyOnce | None:
    """Return why torch's operators may not replace a linear, None if they may."""
    owner = context.owner
    if context.is_parallel:
        return over_ranks(owner)
    if context.binding.is_observing:
        return in_low_precision(owner)._replace(state="while it calibrates")
    if shape.accumulates:
        remedy = "Make the layer with fuse_wgrad_accumulation=False."
        return OnlyOnce(owner, "with fuse_wgrad_accumulation=True", remedy)
    if shape.delays_wgrad:
        remedy = "Make the layer with delay_wgrad_compute=False."
        return OnlyOnce(owner, "with delay_wgrad_compute=True", remedy)
    return None if context.plan.is_high_precision else in_low_precision(owner)


def _bind_parts(
    gemms: dict[str, Resolved], context: BindContext, *, is_whole: bool
) -> tuple[GemmPart | None, GemmPart | None, GemmPart | None]:
    """Return what computes some rows of a product: of fprop and of dgrad, where ranks beside the
    link have parts of the rows, and of dgrad, where others are cast meanwhile. ``is_whole``: the
    products are torch's to differentiate, or the user's; those that are watched are whole too."""
    if is_whole or context.watch is not None:
        return None, None, None
    neighbours = [side.shape for side in (context.before, context.after) if side is not None]
    has_movers = any(shape.movement is not None for shape in neighbours)
    reads_rows = context.before is not None and context.before.shape.reads_grad_rows
    fprop, dgrad = (_part_of(name, gemms[name], context) for name in ("fprop", "dgrad"))
    return fprop if has_movers else None, dgrad if has_movers or reads_rows else None, dgrad


def _part_of(step: str, gemm: Resolved, context: BindContext) -> GemmPart | None:
    desc, backend = gemm.choice.desc, gemm.choice.backend
    if type(desc) is not GemmDesc:  # of groups there are no parts
        return None
    part = context.resolve_optional(step, dataclasses.replace(desc, part=True), backend)
    return None if part is None else part.run


class _Tensors(NamedTuple):
    """The tensors of a linear about to be bound: how each is cast, and how its rows travel where
    several ranks have some of them.

    Attributes:
        states: the delayed states of its weights and of the tensors beside them, None without.
        unturned: the quantizer of input and weight where the products are torch's to differentiate,
            which transposes second operands itself.
        makers: the quantizer objects of the user's, by tensor.
        padded: input and gradient have zeros up to a multiple of as many rows, for wgrad; 0: none.
    """

    shape: LinearSpec
    context: BindContext
    states: LayerStates | None
    unturned: HighPrecision | None
    makers: dict[str, object]
    padded: int = 0

    @classmethod
    def of(cls, shape: LinearSpec, context: BindContext, *, is_unturned: bool) -> _Tensors:
        """Return the tensors of ``shape``.

        Raises:
            UnsupportedError: the plan asks for what groups, or tensors of several ranks, do not
                have.
        """
        plan, binding, states = context.plan, context.binding, context.states
        is_moved = any(context.moved_over(name, "gathered") for name in ("input", "grad_output"))
        if plan.nonfinite == "propagate" and is_moved:
            raise UnsupportedError(
                "nonfinite='propagate' marks the tensor that holds the NaN or inf, but of one "
                "whose rows are on several ranks each rank casts a part. nonfinite='saturate' "
                "works there."
            )
        makers = {} if binding.is_observing else dict(plan.makers)
        # The weights of groups are cast one by one.
        at_once = [name for name in makers if name != "weight" or name in plan.stored_by_users]
        if at_once and shape.groups:
            raise UnsupportedError(
                f"a quantizer object for {', '.join(at_once)} of groups is not offered: it would "
                f"quantize all groups as one tensor. Let the factory return its plan for such a "
                f"layer."
            )
        if states is not None:
            states = dataclasses.replace(states, first=context.first_gemm, count=shape.num_weights)
        unturned = HighPrecision(binding.activation_dtype, turns=False) if is_unturned else None
        return cls(shape, context, states, unturned, makers)

    def with_zeros(self, step: int) -> _Tensors:
        """Return the tensors padded to a multiple of ``step`` rows, if the casts of input and
        gradient add the zeros.

        Rows of several ranks would have zeros in between, and a graph has no operator of it.
        """
        context, shape = self.context, self.shape
        if step == 1 or shape.offsets_on_device or self.makers:
            return self
        if self.unturned is not None or context.binding.is_observing:
            return self
        is_offered = all(
            None not in context.gemm_plan.tensors[tensor]
            and not any(context.moved_over(tensor, way) for way in ("gathered", "exchanged"))
            and casts_padded(
                QuantizeDesc(dtype, *context.gemm_plan.tensors[tensor], bool(shape.groups)),
                step,
                context.binding,
                context.purpose(tensor),
            )
            for tensor, dtype in (("input", self.input_dtype), ("grad_output", self.grad_dtype))
        )
        return self._replace(padded=step) if is_offered else self

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype in which the link before hands over the input."""
        return self.context.input_dtype(self.context.gemm_plan.input)

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which the next link hands back the gradient."""
        return self.context.grad_dtype(self.context.gemm_plan.grad_output)

    @property
    def backward_state(self) -> DelayedState | None:
        """The state in which the cast of the gradient records."""
        is_delayed = self.context.gemm_plan.grad_output.is_delayed
        return self.states.backward if self.states is not None and is_delayed else None

    def input(self) -> TensorQuantizer:
        """Return the quantizer of the input."""
        slot, count = self._slot("input"), self.context.nonfinite
        return self.unturned or self._quantizer("input", self.input_dtype, slot, count)

    def input_again(self) -> TensorQuantizer | None:
        """Return the quantizer of the input in backward, which counts no NaN or inf and has no
        delayed scale; None unless it is cast there."""
        plan, is_observing = self.context.plan, self.context.binding.is_observing
        is_cast = self.shape.saves_input or any(name != "weight" for name in plan.remade)
        if not is_cast or plan.input.columnwise is None or is_observing:
            return None
        return self._quantizer("input", self.input_dtype)

    @property
    def input_slot(self) -> Slot | None:
        """Where the input has its delayed scale, if its columnwise operand has one."""
        column = self.context.plan.input.columnwise
        return self._slot("input") if column is not None and column.delayed else None

    def grad_output(self) -> TensorQuantizer:
        """Return the quantizer of the gradient of the output."""
        # Calibration sees the forward pass alone, as in Transformer Engine.
        slot = None if self.context.binding.is_observing else self._slot("grad_output")
        return self._quantizer("grad_output", self.grad_dtype, slot, self.context.nonfinite)

    def weights(self, zeros: tuple[int, int] | None) -> WeightQuantizer:
        """Return the quantizer of the weight, or of one weight a group; ``zeros`` are the rows and
        columns of zeros that its products need behind its ends, None for none."""
        if not self.shape.groups:
            return self._weight(0, zeros)
        return PerGroup([self._weight(group, zeros) for group in range(self.shape.groups)])

    def shards(self, tensor: str, gemm_part: GemmPart | None) -> Shards | None:
        """Return how ``tensor`` travels quantized if ranks have some rows of it; None: it does
        not."""
        communicator = self._ranks_of_codes(tensor, "gathered")
        if communicator is None:
            return None
        is_input, plan = tensor == "input", self.context.gemm_plan
        is_decoded = is_input and plan.dequantizes and plan.input.columnwise is None
        transfers = self.context.transfers(communicator)
        return Shards(
            communicator,
            plan.tensors[tensor],
            tensor,
            is_input,
            is_decoded,
            transfers,
            in_parts=transfers is not None and gemm_part is not None,
        )

    def sent(self, tensor: str, dtype: torch.dtype) -> SentCast | None:
        """Return how ``tensor`` is cast before its rows leave; None: they travel as they are."""
        context, plan = self.context, self.context.gemm_plan
        communicator = self._ranks_of_codes(tensor, "exchanged")
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
            reduce_amax=_amax_reduction(communicator, context),
        )
        return SentCast(communicator, specs, quantizer, tensor)

    def _ranks_of_codes(self, tensor: str, way: str) -> Communicator | None:
        """Return the ranks between which codes of ``tensor`` may travel by ``way``; None: they may
        not.

        A bias is summed over all rows, and an input that is cast again is held as it came: both
        need the tensor in high precision. So does a quantizer object, of which nobody knows what
        its scales cover.
        """
        shape = self.shape
        needs_values = shape.saves_input if tensor == "input" else shape.bias_dtype is not None
        if needs_values or tensor in dict(self.context.plan.makers):
            return None
        return self.context.moved_over(tensor, way)

    def _slot(self, tensor: str, group: int | None = None) -> Slot | None:
        """Return where ``tensor``, or the weight of a group, has its delayed scale and amax."""
        if self.states is None or not self.context.plan.tensors[tensor].is_delayed:
            return None
        return self.states.slot(tensor, group)

    @property
    def _dequantizes(self) -> bool:
        """Whether backward decodes what forward cast."""
        return self.context.plan.dequantizes and not self.context.binding.is_observing

    def _quantizer(
        self,
        tensor: str,
        dtype: torch.dtype,
        slot: Slot | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> TensorQuantizer:
        context, shape, plan = self.context, self.shape, self.context.plan
        maker = self.makers.get(tensor)
        if maker is not None:
            role = f"{context.owner}: the {type(maker).__name__} of its {tensor}"
            # Of the input one orientation is held until backward.
            is_split = tensor == "input"
            planned = plan.tensors[tensor]
            low = object_quantizer(maker, planned, role, is_split=is_split)
            high = HighPrecision(context.binding.activation_dtype)
            return completed(low, high, planned, dequantizes=self._dequantizes)
        is_weight = tensor == "weight"  # each is cast alone, and whole
        ranks = None if is_weight else context.moved_over(tensor, "gathered")
        return bind_quantizer(
            plan.tensors[tensor],
            dtype,
            context.binding,
            purpose=context.purpose(tensor),
            grouped=bool(shape.groups) and not is_weight,
            offsets_on_device=shape.offsets_on_device and not is_weight,
            slot=slot,
            nonfinite=nonfinite,
            propagates=plan.nonfinite == "propagate",
            reduce_amax=_amax_reduction(ranks, context),
            dequantizes=self._dequantizes and tensor != "grad_output",
            is_gradient=tensor == "grad_output",
            padded=0 if is_weight else self.padded,
        )

    def _weight(self, group: int, zeros: tuple[int, int] | None) -> CachingWeightQuantizer:
        context, dtype = self.context, self.shape.weight_dtype
        plan, binding, slot = context.plan, context.binding, self._slot("weight", group)
        quantizer = self.unturned or self._quantizer("weight", dtype, slot, context.nonfinite)
        is_object = "weight" in self.makers
        key = (
            *(plan.weight, plan.nonfinite, self._dequantizes),
            *(dtype, binding.device, quantizer.choices),
            quantizer.casts if is_object else None,  # which are the object's, by identity
        )
        stored = HIGH_PRECISION.weight if binding.is_observing else storage_plan(plan.weight)
        is_decoded = self._dequantizes and plan.weight.rowwise is not None
        cast_dtype = None if isinstance(quantizer, HighPrecision) else dtype
        how = How(key, cast_dtype, stored, context.owner, slot, is_decoded, is_object)
        index, again = context.first_gemm + group, plan.weight.columnwise
        if "weight" not in plan.remade or binding.is_observing or again is None:
            return CachingWeightQuantizer(quantizer, index, how, zeros)
        propagates, purpose = plan.nonfinite == "propagate", context.purpose("weight")
        columnwise = bind_columnwise(again, dtype, binding, purpose=purpose, propagates=propagates)
        by_amax = None
        if not propagates:
            by_amax = bind_by_amax(
                plan.weight,
                dtype,
                binding,
                backend=quantizer.choices[-1].backend,
                purpose=purpose,
                nonfinite=context.nonfinite,
            )
        return RequantizedWeight(
            quantizer, index, how, plan.weight, columnwise, zeros, by_amax=by_amax
        )


def _amax_reduction(
    communicator: Communicator | None, context: BindContext
) -> MaximumOverShards | None:
    """Return what reduces the amaxes of a tensor whose rows are on several ranks."""
    if communicator is None:
        return None
    transfers = context.transfers(communicator)
    maximum = None if transfers is None else transfers.maximum

    def largest(amaxes: torch.Tensor) -> torch.Tensor:
        return communicator.max(amaxes, "amax", maximum, in_place=True, at_once=True).wait()

    return MaximumOverShards(largest)
