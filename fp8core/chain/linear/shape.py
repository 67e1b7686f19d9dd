"""A linear layer as a part of a chain: bound to quantizers and GEMMs of backends, it gives each
call its program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fp8core.backend_api import ColumnSumsDesc
from fp8core.chain.call import Call
from fp8core.chain.linear.gemms import bind_decode, bind_fprop, taking_any_rows, turning
from fp8core.chain.linear.program import LinearOperations, LinearProgram
from fp8core.chain.linear.quantizers import bind_parts, bind_quantizers, bind_sent, bind_shards
from fp8core.chain.linear.spec import LinearSpec
from fp8core.chain.linear.wrappers import (
    Accumulating,
    Delaying,
    FlatWeights,
    Grouped,
    Padded,
    Requantizing,
    SavingInput,
    Stochastic,
)
from fp8core.chain.padding import LayerPadding, layer_padding
from fp8core.chain.protocol import Consumer, Link, OnlyOnce, Program, in_low_precision, over_ranks
from fp8core.chain.shape import BindContext
from fp8core.chain.shards import Exchanged, SentCast
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import TensorQuantizer
from fp8core.tensors.weights import WeightQuantizer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinearLink(LinearOperations, Link):
    """``y[m, n] = x[m, k] @ w[n, k].T + bias[n]``, or the same for each group of rows.

    Parameters come as ``(weight, bias)``, or ``(*weights, *biases)`` for a grouped link, without
    biases where ``shape.bias_dtype`` is None. ``index`` tells the linears of one chain apart.
    ``takes_chunks``: the gradient of the output may be cast some rows at a time; ``casts_chunks``:
    it stays in memory during backward, so that the link's own cast had better do so.
    ``input_again`` casts the input for wgrad where backward does that. ``input_sent`` and
    ``grad_sent`` say how input and gradient are cast where their rows are exchanged. ``only_once``
    says why torch's operators may not replace the link, None if they may.
    """

    padding: LayerPadding | None
    # field(): no default here, where Link has one.
    needs_rng: bool = field()
    index: int
    num_weights: int
    num_params: int = field()
    takes_chunks: bool = False
    casts_chunks: bool = False
    input_again: TensorQuantizer | None = None
    input_sent: SentCast | None = None
    grad_sent: SentCast | None = None
    only_once: OnlyOnce | None = None
    # A subclass that looks at operands, however they are saved, returns a program that shows them.
    observed: ClassVar[Callable[..., Program] | None] = None
    # Programs by chunks, by shards, by padding of wgrad, and by whose gradients are needed.
    _programs: dict[tuple[bool, ...], Program] = field(default_factory=dict)

    @property
    def input_consumer(self) -> Consumer:
        """How it quantizes its input."""
        return Consumer(self.input, self.input_dtype)

    @property
    def grad_consumer(self) -> Consumer:
        """How it quantizes the gradient of its output, summed for the bias."""
        has_bias = self.shape.bias_dtype is not None
        return Consumer(self.grad_output, self.grad_dtype, has_bias)

    def in_torch(self, bind: Callable[[Any], Any]) -> LinearLink:
        """Return the linear by torch's operators."""
        link: LinearLink = bind(self.shape)
        return link

    def converted(
        self, params: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Return the parameters, the weights as plain tensors of ``dtype``."""
        plain = list(params)
        for at, weight in enumerate(params[: self.num_weights]):
            value = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            plain[at] = value.to(dtype)
        return plain

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Program:
        """Return the program of a dense call, the same each time, wrapped as ``call`` needs it.

        A gradient is cast in chunks where that lowers the peak of memory: while dgrad runs there
        are the rowwise codes and those of the weight, ``rows n + k n`` bytes; while wgrad runs, at
        least the ``2 k n`` bytes of grad_weight instead. A captured graph never chunks, so that
        its rows guard nothing.
        """
        count = self.num_weights
        padded = None
        if self.padding is not None:
            needs = {
                "needs_input": needs_grad[0],
                "needs_weight": True in needs_grad[1 : 1 + count],
            }
            padded = self.padding.for_call(rows, call, **needs)
        chunked = self.takes_chunks and not call.groups and rows > self.shape.in_features
        is_sharded = padded is None and not call.groups
        sharded = tuple(
            is_sharded and shards is not None and shards.fits(rows)
            for shards in (self.input_shards, self.grad_shards)
        )
        # Of rows that a graph leaves free, backward finds out.
        pads_wgrad = (
            self.wgrad_rows > 1
            and True in needs_grad[1 : 1 + count]
            and (type(rows) is not int or rows % self.wgrad_rows != 0)
        )
        key = (chunked, *sharded, pads_wgrad, *needs_grad)
        program = self._programs.get(key) or self._new_program(key, needs_grad)
        if self.shape.accumulates:
            program = Accumulating(program, self.wgrad, needs_grad[1 : 1 + count])
        if self.shape.delays_wgrad and True in needs_grad[1 : 1 + count]:
            program = Delaying(
                program,
                self.wgrad,
                needs_grad[1 : 1 + count],
                index=self.index,
                is_grouped=bool(self.shape.groups),
            )
        if self.shape.groups:
            bias_dtype = self.shape.bias_dtype
            program = Grouped(
                program,
                needs_grad,
                call,
                rows=rows,
                num_weights=count,
                bias_dtype=bias_dtype,
                travels=(None, None) if padded is not None else self._exchanged(call),
            )
        if padded is not None:
            program = Padded(program, padded, call, num_weights=count)
        if self.observed is not None:
            program = self.observed(program, call)
        if self.input_again is not None and True in needs_grad[1 : 1 + count]:
            program = SavingInput(program, self.input_again)
        if self.needs_rng and call.rng is not None:
            program = Stochastic(program, call.rng, self.index)
        return program

    def _exchanged(self, call: Call) -> tuple[Exchanged | None, Exchanged | None]:
        """Return how the operands of the input and of the gradient come from other ranks."""
        routes, casts = call.routes, (self.input_sent, self.grad_sent)
        if routes is None:
            return None, None
        row, column = (None if cast is None else cast.of_call(routes) for cast in casts)
        return row, column

    def _new_program(self, key: tuple[bool, ...], needs_grad: Sequence[bool]) -> Program:
        chunked, is_input_sharded, is_grad_sharded, pads_wgrad, *_ = key
        weight: WeightQuantizer = self.weight
        if self.shape.groups:
            weight = FlatWeights(weight)
            end = 1 + self.num_weights
            # One program for all groups; the sums for biases come with the handover.
            needs_grad = (needs_grad[0], True in needs_grad[1:end])
        program: Program = LinearProgram(
            self,
            needs_grad,
            weight,
            chunked=chunked,
            casts_chunks=chunked and self.casts_chunks,
            sharded=(is_input_sharded, is_grad_sharded),
            pads_wgrad=pads_wgrad,
        )
        if weight.requantizes and needs_grad[0]:
            assert self.only_once is not None  # in low precision
            program = Requantizing(
                program,
                weight,
                3 if needs_grad[1] else 0,
                shape=(self.shape.out_features, self.shape.in_features),
                dtype=self.shape.weight_dtype,
                device=self.choices["weight"].device,
                owner=self.only_once.owner,
            )
        return self._programs.setdefault(key, program)


class LinearShape(LinearSpec):
    """The shape of a linear layer, which binds itself to operations of backends."""

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
    only_once = _only_once(shape, context)
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
    quantizers = bind_quantizers(
        shape,
        context,
        states,
        (input_dtype, grad_dtype),
        is_unturned=only_once is None,
        zeros=None if padding is None else padding.of_weight,
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
