"""A linear in a chain, bound to quantizers and GEMMs of backends, and its computation, forward and
backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from fp8core.backend_api import GemmDesc, Operand
from fp8core.chain.call import Call
from fp8core.chain.linear.gemms import Decode, LinearSpec, in_chunks, in_dtype
from fp8core.chain.linear.wrappers import Diverting, Grouped, InputAgain, Padded
from fp8core.chain.padding import LayerPadding
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    OnlyOnce,
    Out,
    Params,
    Program,
    Recordable,
    Saved,
    SavedList,
)
from fp8core.chain.request import Handover, QuantizeRequest, is_stored_as
from fp8core.chain.shards import ArrivingRows, Exchanged, GemmPart, SentCast, Shards, here
from fp8core.chain.unwrap import as_readable
from fp8core.dispatch.select import Choice
from fp8core.errors import OperandError
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.quantizer import Cast, CastAndSum, Orientations, Slot, TensorQuantizer
from fp8core.tensors.saving import note_weight
from fp8core.tensors.scaling import update_after_backward
from fp8core.tensors.weights import WeightQuantizer
from fp8core.torch_ops.capture import left_to_backward
from fp8core.torch_ops.repeats import called_in_repeats


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinearLink(Link):
    """``y[m, n] = x[m, k] @ w[n, k].T + bias[n]``, or the same for each group of rows: three
    quantizers and three GEMMs, with what each of them is bound to.

    Parameters come as ``(weight, bias)``, or ``(*weights, *biases)`` for a grouped link, without
    biases where ``shape.bias_dtype`` is None. ``index`` tells the linears of one chain apart.

    ``input_dtype`` and ``grad_dtype`` are those of the tensors that the neighbours hand over.
    ``choices`` says, by GEMM and tensor, who computes. ``column_sums`` computes the gradient of the
    bias, if there is one. ``backward_state`` is that in which the cast of the gradient records.
    ``decode_input`` and ``decode_weight`` make the operand of wgrad and dgrad from that of fprop,
    None where forward makes both. ``input_again`` casts the input for wgrad where backward does
    that, by the scale that ``input_slot`` had in forward; ``remade`` names the results of links
    before that it is given there.

    ``input_shards`` and ``grad_shards`` say how the two tensors travel where each rank has some of
    their rows; ``input_sent`` and ``grad_sent`` how they are cast where their rows are exchanged.
    ``fprop_part`` and ``dgrad_part`` compute some rows of a product, None unless others may travel
    or be cast meanwhile; ``dgrad_rows`` those of a gradient that comes in chunks, None where dgrad
    itself does. ``wgrad`` adds zeros to operands whose rows are no multiple of ``wgrad_rows``.
    ``dgrad_sum`` adds dgrad to ``out``, rounded once; None where the sum is one of two tensors.
    ``takes_chunks``: the gradient of the output may be cast some rows at a time; ``casts_chunks``:
    it stays in memory during backward, so that the link's own cast had better do so. ``only_once``
    says why torch's operators may not replace the link, None if they may.
    """

    shape: LinearSpec
    index: int
    # field(): no default here, where Link has one.
    needs_rng: bool = field()
    num_params: int = field()
    num_weights: int = field()
    input: TensorQuantizer
    weight: WeightQuantizer
    grad_output: TensorQuantizer
    fprop: Callable[..., Any]
    dgrad: Callable[..., Any]
    wgrad: Callable[..., Any]
    column_sums: Callable[[torch.Tensor], torch.Tensor] | None
    backward_state: DelayedState | None
    input_dtype: torch.dtype
    grad_dtype: torch.dtype
    choices: dict[str, Choice] = field()
    padding: LayerPadding | None
    only_once: OnlyOnce | None = None
    decode_input: Decode | None = None
    decode_weight: Decode | None = None
    input_again: TensorQuantizer | None = None
    input_slot: Slot | None = None
    remade: Sequence[str] = ()
    input_shards: Shards | None = None
    grad_shards: Shards | None = None
    input_sent: SentCast | None = None
    grad_sent: SentCast | None = None
    fprop_part: GemmPart | None = None
    dgrad_part: GemmPart | None = None
    dgrad_rows: GemmPart | None = None
    dgrad_sum: Callable[..., Any] | None = None
    wgrad_rows: int = 1
    takes_chunks: bool = False
    casts_chunks: bool = False
    # A subclass that looks at operands, however they are saved, returns a program that shows them.
    observed: ClassVar[Callable[..., Program] | None] = None
    # Programs by chunks, by shards, by padding of wgrad, by noise, and by whose gradients are
    # needed.
    _programs: dict[tuple[bool, ...], Program] = field(default_factory=dict)

    @property
    def input_consumer(self) -> QuantizeRequest:
        """How it quantizes its input."""
        return QuantizeRequest(self.input, self.input_dtype)

    @property
    def grad_consumer(self) -> QuantizeRequest:
        """How it quantizes the gradient of its output, summed for the bias."""
        has_bias = self.shape.bias_dtype is not None
        return QuantizeRequest(self.grad_output, self.grad_dtype, has_sums=has_bias)

    def out_dtype(self, gemm: str) -> torch.dtype:
        """Return the dtype that fprop, dgrad or wgrad computes."""
        desc = self.choices[gemm].desc
        assert isinstance(desc, GemmDesc)
        return desc.out_dtype

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Program:
        """Return the program of a dense call, the same each time, wrapped as ``call`` needs it.

        A gradient is cast in chunks where that lowers the peak of memory: while dgrad runs there
        are the rowwise codes and those of the weight, ``rows n + k n`` bytes; while wgrad runs, at
        least the ``2 k n`` bytes of grad_weight instead. A captured graph never chunks, so that
        its rows guard nothing.
        """
        shape, count = self.shape, self.num_weights
        trained = needs_grad[1 : 1 + count]
        is_trained, padded = True in trained, None
        if self.padding is not None:
            needs = {"needs_input": needs_grad[0], "needs_weight": is_trained}
            padded = self.padding.for_call(rows, call, **needs)
        chunked = self.takes_chunks and not call.groups and rows > shape.in_features
        is_whole = padded is not None or bool(call.groups)
        shards, grad_shards = self.input_shards, self.grad_shards
        key = (
            chunked,
            not is_whole and shards is not None and shards.fits(rows),
            not is_whole and grad_shards is not None and grad_shards.fits(rows),
            # Of rows that a graph leaves free, backward finds out.
            self.wgrad_rows > 1
            and is_trained
            and (type(rows) is not int or rows % self.wgrad_rows != 0),
            self.needs_rng and call.rng is not None,
            *needs_grad,
        )
        program = self._programs.get(key) or self._new_program(key, needs_grad)
        if shape.accumulates or (shape.delays_wgrad and is_trained):
            program = Diverting(
                program,
                self.wgrad,
                trained,
                accumulates=shape.accumulates,
                delays=shape.delays_wgrad and is_trained,
                index=self.index,
                is_grouped=bool(shape.groups),
            )
        if shape.groups:
            program = Grouped(
                program,
                needs_grad,
                call,
                rows=rows,
                num_weights=count,
                bias_dtype=shape.bias_dtype,
                travels=(None, None) if padded is not None else self._exchanged(call),
            )
        if padded is not None:
            program = Padded(program, padded, call, num_weights=count)
        if self.observed is not None:
            program = self.observed(program, call)
        if self.input_again is not None and shape.saves_input and is_trained:
            program = InputAgain(program, self.input_again, self.input_slot, is_remade=False)
        return program

    def remaking(self, program: Program) -> Program | None:
        """Return ``program`` without the codes of its input, if wgrad reads them in low precision,
        and it does not save the input."""
        again, request = self.input_again, program.input_request
        if again is None or request is None or not request.columnwise:
            return None
        return InputAgain(program, again, self.input_slot, is_remade=True)

    def _exchanged(self, call: Call) -> tuple[Exchanged | None, Exchanged | None]:
        """Return how the operands of the input and of the gradient come from other ranks."""
        routes, row, column = call.routes, self.input_sent, self.grad_sent
        if routes is None:
            return None, None
        return (
            None if row is None else row.of_call(routes),
            None if column is None else column.of_call(routes),
        )

    def _new_program(self, key: tuple[bool, ...], needs_grad: Sequence[bool]) -> Program:
        chunked, is_input_sharded, is_grad_sharded, _, is_random, *_ = key
        shape = self.shape
        if shape.groups:
            # One program for all groups; the sums for biases come with the handover.
            needs_grad = (needs_grad[0], True in needs_grad[1 : 1 + self.num_weights])
        program: Program = LinearProgram(
            self,
            needs_grad,
            chunked=chunked,
            sharded=(is_input_sharded, is_grad_sharded),
            is_random=is_random,
        )
        return self._programs.setdefault(key, program)


def saving_input(link: Link) -> Link:
    """Return a dense linear as it saves its input as it comes, if backward makes inputs again."""
    if not isinstance(link, LinearLink) or link.input_again is None or link.shape.groups:
        return link
    shape = dataclasses.replace(link.shape, saves_input=True)
    return dataclasses.replace(link, shape=shape, _programs={})


_NO_OPERANDS = Orientations(None, None)

# Returns the operand of three tensors without the Python function of a NamedTuple.
_operand: Callable[[SavedList], Operand] = partial(tuple.__new__, Operand)


def _operands(flat: Sequence[Any]) -> list[Operand]:
    """Return the operands of groups, whose tensors are ``flat``, three for each."""
    return [Operand(*flat[at : at + 3]) for at in range(0, len(flat), 3)]


class LinearProgram(Program):
    """The computation of ``link`` for one answer to whose gradients are needed.

    ``needs_grad`` is the input's, the weight's and, if there is one, the bias's. With ``chunked``
    the gradient of the output may come cast some rows at a time; so does its own cast, if the link
    :attr:`LinearLink.casts_chunks`, unless the gradient of the input is computed later. ``sharded``
    says of the input and of the gradient of the output whether each rank casts its rows, which then
    travel as codes and scales. With ``is_random`` the gradient is cast with the seed and offset of
    the call, which the linears of one chain use for different noise.
    """

    __slots__ = (
        *("_arrives", "_backward_state", "_cast_input", "_casts", "_casts_of_later", "_dgrad"),
        *(
            "_dgrad_sum",
            "_grad_request",
            "_is_random",
            "_link",
            "_needs_bias",
            "_needs_input",
            "_needs_weight",
        ),
        *("_restore", "_wgrad", "input_request"),
    )

    def __init__(
        self,
        link: LinearLink,
        needs_grad: Sequence[bool],
        *,
        chunked: bool = False,
        sharded: tuple[bool, bool] = (False, False),
        is_random: bool = False,
    ) -> None:
        rowwise, columnwise, *bias = needs_grad
        self._link, self._is_random = link, is_random
        self._needs_input, self._needs_weight, self._needs_bias = rowwise, columnwise, True in bias
        self._restore = _restoring(link)
        self._dgrad, self._dgrad_sum = link.dgrad, link.dgrad_sum
        self._wgrad = in_dtype(link.wgrad, link.out_dtype("wgrad"), link.shape.weight_dtype)
        chunked = chunked and rowwise and columnwise
        if chunked:
            self._dgrad = in_chunks(link.dgrad, link.dgrad_rows, link.out_dtype("dgrad"))
            if link.dgrad_sum is not None:
                self._dgrad_sum = in_chunks(link.dgrad_sum, None, link.out_dtype("dgrad"))
        self._cast_input = link.input.cast_to(rowwise=True, columnwise=columnwise)
        self._arrives = link.input_shards if sharded[0] else None
        self.input_request = QuantizeRequest(
            link.input,
            link.input_dtype,
            columnwise=columnwise,
            cast=self._cast_input,
            shards=self._arrives,
        )
        needs = rowwise, columnwise, self._needs_bias
        self._casts = self._casts_of_later = _grad_casts(link, *needs, chunked=False)
        if chunked and link.casts_chunks:
            self._casts = _grad_casts(link, *needs, chunked=True)
        cast, cast_and_sum = self._casts
        self._backward_state = None if cast is None else link.backward_state
        self._grad_request = QuantizeRequest(
            link.grad_output,
            link.grad_dtype,
            rowwise,
            columnwise,
            has_sums=self._needs_bias,
            column_sums=link.column_sums,
            is_gradient=True,
            cast=cast,
            cast_and_sum=cast_and_sum,
            shards=link.grad_shards if sharded[1] else None,
            takes_chunks=chunked and not sharded[1],
        )

    @property
    def recordable(self) -> Recordable | None:
        """Return what the casts refer to, and the state in which that of the gradient records."""
        constants: list[torch.Tensor] = []
        for quantizer in (self._link.input, self._link.weight, self._link.grad_output):
            if quantizer.constants is None or self._is_random:
                return None
            constants += quantizer.constants
        states = () if self._backward_state is None else (self._backward_state,)
        return Recordable(tuple(constants), states)

    def request_grad(self, call: Call) -> QuantizeRequest:
        """Return the request for grad_output: rowwise for dgrad, columnwise for wgrad, its sums.

        The cast will record an amax, so the update of the scales after backward is ordered first.
        """
        if self._backward_state is not None:
            update_after_backward(self._backward_state, call.backward_pass)
        if not self._is_random:
            return self._grad_request
        assert call.rng is not None  # the call that the program was given for had one
        rng = call.rng + torch.tensor((0, self._link.index << 32), device="cpu")
        return dataclasses.replace(self._grad_request, cast=None, rng=rng)

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """Whether ``grad_output`` is stored quantized as its cast would store it."""
        request = self._grad_request
        ways = {"rowwise": request.rowwise, "columnwise": request.columnwise}
        return request.cast is not None and is_stored_as(grad_output, request.quantizer, **ways)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; save the input for wgrad and the weight for dgrad, each if it is needed."""
        link = self._link
        x_row, x_column = x.take() if isinstance(x, Handover) else self._cast_input(x)
        w_row, w_column = link.weight(params[0], columnwise=self._needs_input, keeping=call.keeping)
        bias = None if link.shape.bias_dtype is None else params[1]
        y: Any = None
        if link.fprop_part is not None:
            y = self._forward_in_parts(x_row, w_row, bias, call, out)
        if y is not None:
            out = None
        elif call.output is None:
            y = link.fprop(x_row, w_row, *call.groups, bias=bias)  # [m, k] x [n, k] -> [m, n]
        else:
            y = link.fprop(x_row, w_row, *call.groups, bias=bias, out=call.output)
        x_row = w_row = None  # freed before the next program quantizes y
        saved: Saved = x_column if self._needs_weight else ()
        if self._needs_input:
            note_weight(w_column)
            saved = (*saved, *(itertools.chain(*w_column) if link.shape.groups else w_column))
        return y if out is None else out(y), saved, None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute grad_input by dgrad, grad_weight by wgrad, each only if it is needed.

        ``context``, if given, is called instead of wgrad.
        """
        grad_input = grad_weight = dy_row = dy_column = None
        link = self._link
        if self._is_random and not isinstance(grad, Handover):
            grad = self.request_grad(call)(grad)
        if isinstance(grad, Handover):
            dy_row, dy_column = grad.take()
            sums = grad.sums
        else:
            sums = ()
            if self._backward_state is not None:
                update_after_backward(self._backward_state, call.backward_pass)
            has_parts = link.dgrad_part is not None
            is_later = has_parts and out is not None and out.is_computed_later
            cast, cast_and_sum = self._casts_of_later if is_later else self._casts
            if cast_and_sum is not None:
                (dy_row, dy_column), total = cast_and_sum(grad)
                sums = (total,)
            elif cast is not None:
                dy_row, dy_column = cast(grad)
        arriving = None
        if self._arrives is not None and self._needs_weight:
            # This rank's part of the input, from all ranks while dgrad runs.
            arriving = self._arrives.start_columnwise(_operand(saved[:3]))
        if self._needs_input:
            at = 3 if self._needs_weight else 0
            weight: Any = self._restore(saved[at:])
            if link.dgrad_part is not None:
                grad_input = self._backward_in_parts(dy_row, weight, call, out)
            if grad_input is not None:
                out = None
            elif call.grad_sum is not None:
                grad_input = self._added(dy_row, weight, call.grad_sum)
            elif call.grad_input is None:
                grad_input = self._dgrad(dy_row, weight, *call.groups)  # [m, n] x [k, n] -> [m, k]
            else:
                grad_input = self._dgrad(dy_row, weight, *call.groups, out=call.grad_input)
            del weight, saved[at:]  # freed before grad_weight is allocated
            dy_row = None
            if out is not None:
                grad_input = out(grad_input)
        if self._needs_weight:
            wgrad = self._wgrad if context is None else context
            if link.dgrad_part is not None:
                dy_column = here(dy_column)
            x_column = _operand(saved) if arriving is None else arriving.wait()
            if link.decode_input is not None:
                x_column = link.decode_input(x_column, *call.groups)
            grad_weight = wgrad(dy_column, x_column, *call.groups)  # [n, m] x [k, m] -> [n, k]
        bias_dtype = link.shape.bias_dtype
        if bias_dtype is None:
            return grad_input, grad_weight
        return grad_input, grad_weight, sums[0].to(bias_dtype) if self._needs_bias else None

    def _added(self, dy_row: Any, weight: Any, total: torch.Tensor) -> Any:
        """Return the sum of ``total`` and grad_input, in its memory if the product adds."""
        if self._dgrad_sum is not None:
            return self._dgrad_sum(dy_row, weight, out=total)
        return called_in_repeats(torch.add, total, self._dgrad(dy_row, weight))

    def _forward_in_parts(
        self, x_row: Any, w_row: Operand, bias: torch.Tensor | None, call: Call, out: Out
    ) -> Any:
        """Return what ``out`` makes of y, computed some rows at a time while others travel; None if
        y is to be computed as a whole."""
        part, dtype = self._link.fprop_part, self._link.out_dtype("fprop")
        assert part is not None
        if isinstance(x_row, ArrivingRows):
            y = x_row.product(part, w_row, dtype, bias=bias, out=call.output)
            return y if out is None else out(y)
        if bias is not None or call.output is not None or out is None or out.product is None:
            return None
        return out.product(part, x_row, w_row, dtype)

    def _backward_in_parts(self, dy_row: Any, weight: Operand, call: Call, out: Out) -> Any:
        """As :meth:`_forward_in_parts`, of grad_input, which its reader may compute later. Its sum
        over ranks travels beside wgrad, if there is one."""
        part, dtype = self._link.dgrad_part, self._link.out_dtype("dgrad")
        assert part is not None
        if isinstance(dy_row, ArrivingRows):
            grad_input = dy_row.product(part, weight, dtype, out=call.grad_input)
            return grad_input if out is None else out(grad_input)
        if call.grad_input is not None or out is None or out.product is None:
            return None
        if (self._needs_weight and not out.is_computed_later) or not isinstance(dy_row, Operand):
            return None
        return out.product(part, dy_row, weight, dtype)


def _restoring(link: LinearLink) -> Callable[[SavedList], Any]:
    """Return what makes the operands of dgrad of the tensors of weights that were saved: codes, or
    weights, which are quantized again."""
    restore: Callable[[SavedList], Any] = _operands if link.shape.groups else _operand
    decode, requantizes = link.decode_weight, link.weight.requantizes
    if decode is None and not requantizes:
        return restore

    def restored(saved: SavedList) -> Any:
        if requantizes:
            for at in range(0, len(saved), 3):
                weight = saved[at]
                if weight is not None and weight.dtype is not torch.uint8:
                    saved[at] = _readable(link, weight)
            with left_to_backward():
                saved = link.weight.requantize(saved)
        weights = restore(saved)
        if decode is None:
            return weights
        return [*map(decode, weights)] if link.shape.groups else decode(weights)

    return restored


def _readable(link: LinearLink, weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight``, whose data may have been replaced without a write, as a kernel reads
    it."""
    shape, device = link.shape, link.choices["weight"].device
    sizes, dtype = (shape.out_features, shape.in_features), shape.weight_dtype
    is_same = weight.shape == sizes and weight.dtype is dtype
    is_plain = type(weight) is torch.nn.Parameter and weight.device == device
    if is_same and is_plain and not weight.is_neg() and weight.data_ptr():
        return weight
    owner = "" if link.only_once is None else link.only_once.owner
    if not is_same:
        raise OperandError(
            f"{owner}: in backward the weight is {list(weight.shape)} {weight.dtype}, forward had "
            f"{list(sizes)} {dtype}. Convert or shard it after backward."
        )
    if weight.is_meta:  # as all tensors are, of links that are bound for another device
        return weight
    return as_readable(weight, device, f"{owner}: in backward the weight")


def _grad_casts(
    link: LinearLink, rowwise: bool, columnwise: bool, needs_bias: bool, *, chunked: bool
) -> tuple[Cast | None, CastAndSum | None]:
    """Return the cast of the gradient in these orientations, which are both if it is ``chunked``,
    None if it has no operand; and that with the gradient of the bias in one call, None if that is
    not needed."""
    quantizer, sums = link.grad_output, link.column_sums if needs_bias else None
    if not (rowwise or columnwise):
        return None, None if sums is None else partial(_only_sum, sums)
    ways = {"rowwise": rowwise, "columnwise": columnwise, "chunked": chunked}
    both = None if sums is None else quantizer.cast_and_sum(sums, **ways)
    return quantizer.cast_to(**ways), both


def _only_sum(
    column_sums: Callable[[torch.Tensor], torch.Tensor], grad: torch.Tensor
) -> tuple[Orientations, torch.Tensor]:
    return _NO_OPERANDS, column_sums(grad)
