"""The linear link: three GEMMs over three quantized tensors, dense or grouped.

Backward needs the input along the rows and the weight along its output features, so forward
quantizes each of them both ways and saves the second:

====== ============================ ============================ =====================
GEMM   a                            b                            result
====== ============================ ============================ =====================
fprop  input ``[m, k]``             weight ``[n, k]``            output ``[m, n]``
dgrad  grad_output ``[m, n]``       weight, turned ``[k, n]``    grad_input ``[m, k]``
wgrad  grad_output, turned ``[n, m]`` input, turned ``[k, m]``   grad_weight ``[n, k]``
====== ============================ ============================ =====================

:class:`LinearProgram` is all of it. What a call adds wraps it: :mod:`fp8core.chain.groups`,
:mod:`fp8core.chain.padded`, :mod:`fp8core.chain.main_grad`, :mod:`fp8core.chain.stochastic`; and
:mod:`fp8core.chain.requantized`, if the recipe has backward quantize weights again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fp8core.backend_api import Chunks, ColumnSumsDesc, GemmDesc, GroupedGemmDesc, Operand
from fp8core.chain.call import Call
from fp8core.chain.delayed_wgrad import Delaying
from fp8core.chain.dequantized import Decode, bind_decode
from fp8core.chain.exchange import Exchanged, SentCast
from fp8core.chain.groups import FlatWeights, Grouped, operands_of
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.main_grad import Accumulating
from fp8core.chain.once import OnlyOnce, linear_only_once
from fp8core.chain.original_input import SavingInput
from fp8core.chain.padded import Padded, PaddedWeights
from fp8core.chain.padding import LayerPadding, layer_padding
from fp8core.chain.protocol import (
    Backward,
    Consumer,
    Forward,
    Held,
    Link,
    Out,
    Params,
    Program,
    Saved,
    SavedList,
)
from fp8core.chain.requantized import Requantizing
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.chain.shards import ArrivingRows, GemmPart, Shards, here
from fp8core.chain.stochastic import Stochastic
from fp8core.chain.stored import is_stored_as
from fp8core.communicator import Communicator
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import Resolved
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.recipe.plan import HIGH_PRECISION, GemmPlan, LinearPlan
from fp8core.tensors.by_object import ObjectQuantizer
from fp8core.tensors.offloading import note_weight
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import (
    Cast,
    CastAndSum,
    HighPrecision,
    MaximumOverShards,
    Orientations,
    Quantizer,
    Slot,
    Unturned,
    bind_columnwise,
    bind_quantizer,
)
from fp8core.tensors.requantized import RequantizedWeight
from fp8core.tensors.scaling import DelayedState, update_after_backward
from fp8core.tensors.states import LayerStates
from fp8core.tensors.storage import storage_plan
from fp8core.tensors.weights import How, KeptWeight, PerGroup, WeightQuantizer

__all__ = ["LinearLink", "LinearProgram", "LinearShape", "turning"]


_NO_OPERANDS = Orientations(None, None)

# Returns the operand of three tensors without the Python function of a NamedTuple.
_operand: Callable[[SavedList], Operand] = partial(tuple.__new__, Operand)


def turning(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return dgrad or wgrad ``run`` for a second operand that is still to be transposed.

    It comes as ``[k, n]``, one or one per group.
    """

    def turned(a: Operand, b: Any, *groups: torch.Tensor, **keywords: Any) -> Any:
        if isinstance(b, Operand):
            return run(a, Operand(b.data.t()), *groups, **keywords)
        return run(a, [Operand(one.data.t()) for one in b], *groups, **keywords)

    return turned


@dataclass(frozen=True, slots=True)
class LinearShape(LinkShape):
    """What a linear layer is, apart from its recipe; ``groups`` is 0 for a dense layer.

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

    @property
    def quantizes(self) -> bool:
        """It quantizes its input and its gradient, unless the recipe leaves both as they are."""
        return True

    def columns(self, columns: int) -> int:
        """Return the output features."""
        return self.out_features

    def input_columns(self, columns: int | None) -> int:
        """Return the input features."""
        return self.in_features

    def expected_columns(self, columns: int) -> str | None:
        """Return the input features unless they are ``columns``."""
        return None if columns == self.in_features else str(self.in_features)

    def with_offsets_on_device(self) -> LinearShape:
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

    def bind(self, context: BindContext) -> Link:
        """Return the link, or what a watch makes of it."""
        link, plan = _bind(self, context), context.gemm_plan
        return link if context.watch is None else context.watch(link, plan, context.binding)


class LinearProgram:
    """``y[m, n] = x[m, k] @ w[n, k].T + bias[n]`` for one answer to whose gradients are needed.

    ``needs_grad`` is the input's, the weight's and, if there is one, the bias's. With ``chunked``
    the gradient is cast some rows at a time. ``sharded`` says of the input and of the gradient of
    the output whether each rank casts its rows, which then travel as codes and scales.
    """

    __slots__ = (
        *("_backward_state", "_bias_dtype", "_cast_and_sum", "_cast_grad", "_cast_input"),
        *("_dgrad", "_fprop"),
        *("_grad_request", "_has_bias", "_needs_bias", "_needs_input", "_needs_weight", "_pair"),
        *("_decode_input", "_restore", "_weight", "_weight_dtype", "_wgrad"),
        *("_arrives", "_quantizers", "input_request"),
        *("_dgrad_part", "_fprop_part", "_grad_input_dtype", "_output_dtype"),
    )

    frees_early = True

    def __init__(
        self,
        link: LinearLink,
        needs_grad: Sequence[bool],
        weight: WeightQuantizer,
        *,
        chunked: bool = False,
        sharded: tuple[bool, bool] = (False, False),
    ) -> None:
        rowwise, columnwise, *bias = needs_grad
        shape = link.shape
        self._needs_input, self._needs_weight, self._needs_bias = rowwise, columnwise, True in bias
        self._has_bias = shape.bias_dtype is not None
        self._bias_dtype = shape.bias_dtype
        self._weight = weight
        self._weight_dtype = shape.weight_dtype
        restore: Callable[[SavedList], Any] = operands_of if shape.groups else _operand
        self._restore = restore if link.decode_weight is None else _decoding(restore, link)
        self._decode_input = link.decode_input
        self._cast_input = link.input.cast_to(rowwise=True, columnwise=columnwise)
        self._pair = weight.pair(link.input) if rowwise and columnwise else None
        self._fprop, self._dgrad = link.fprop, link.dgrad
        self._fprop_part, self._dgrad_part = link.fprop_part, link.dgrad_part
        self._output_dtype, self._grad_input_dtype = link.output_dtype, link.grad_input_dtype
        self._wgrad = _to_dtype(link.wgrad, link.grad_weight_dtype, shape.weight_dtype)
        if chunked and rowwise and columnwise:
            self._dgrad = _chunked(link.dgrad, link.grad_input_dtype)
        self._cast_grad = _cast_grad(link, rowwise, columnwise, chunked)
        self._backward_state = None if self._cast_grad is None else link.backward_state
        self._cast_and_sum: CastAndSum | None = None
        if self._needs_bias:
            self._cast_and_sum = _cast_and_sum(link, rowwise, columnwise, chunked)
        self._quantizers = (link.input, weight, link.grad_output)
        self._arrives = link.input_shards if sharded[0] else None
        self.input_request = QuantizeRequest(
            link.input,
            link.input_dtype,
            columnwise=columnwise,
            cast=self._cast_input,
            shards=self._arrives,
        )
        self._grad_request = QuantizeRequest(
            link.grad_output,
            link.grad_dtype,
            rowwise,
            columnwise,
            has_sums=self._needs_bias,
            column_sums=link.column_sums,
            is_gradient=True,
            cast=self._cast_grad,
            cast_and_sum=self._cast_and_sum,
            shards=link.grad_shards if sharded[1] else None,
        )

    @property
    def held(self) -> Held | None:
        """What its casts refer to, and the state in which the cast of the gradient records."""
        constants: list[torch.Tensor] = []
        for quantizer in self._quantizers:
            if quantizer.constants is None:
                return None
            constants += quantizer.constants
        states = () if self._backward_state is None else (self._backward_state,)
        return Held(tuple(constants), states)

    def request_grad(self, call: Call) -> QuantizeRequest:
        """Return the request for grad_output: rowwise for dgrad, columnwise for wgrad, its sums.

        The cast will record an amax, so the update of the scales after backward is ordered first.
        """
        if self._backward_state is not None:
            update_after_backward(self._backward_state, call.backward_pass)
        return self._grad_request

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """Whether ``grad_output`` is stored quantized as its cast would store it."""
        request = self._grad_request
        ways = {"rowwise": request.rowwise, "columnwise": request.columnwise}
        return self._cast_grad is not None and is_stored_as(
            grad_output, request.quantizer.plan, **ways
        )

    def num_rows(self, rows: int) -> int:
        """Return ``rows``."""
        return rows

    def origins(self, saved: Saved) -> Sequence[torch.Tensor | None]:
        """Return the input if it is saved, then the weights if they are."""
        if not self._needs_weight:
            return (None, *saved[::3])
        return saved[::3]

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; save the input for wgrad and the weight for dgrad, each if it is needed."""
        weight, keeping = params[0], call.keeping
        pair = self._pair
        if pair is not None and (
            keeping is not None
            or isinstance(weight, QuantizedTensor)
            or weight.dtype is not self._weight_dtype
        ):
            pair = None  # the weight's quantizer knows kept and stored ones, and refuses a dtype
        if pair is not None and not isinstance(x, Handover):
            (x_row, x_column), (w_row, w_column) = pair(x, weight)
        else:
            x_row, x_column = x.take() if isinstance(x, Handover) else self._cast_input(x)
            w_row, w_column = self._weight(weight, columnwise=self._needs_input, keeping=keeping)
        bias = params[1] if self._has_bias else None
        y: Any = None
        if self._fprop_part is not None:
            y = self._forward_in_parts(x_row, w_row, bias, call, out)
        if y is not None:
            out = None
        elif call.output is None:
            y = self._fprop(x_row, w_row, *call.groups, bias=bias)  # [m, k] x [n, k] -> [m, n]
        else:
            y = self._fprop(x_row, w_row, *call.groups, bias=bias, out=call.output)
        x_row = w_row = None  # freed before the next program quantizes y
        saved: Saved = x_column if self._needs_weight else ()
        if self._needs_input:
            note_weight(w_column)
            saved = (*saved, *w_column)
        return y if out is None else out(y), saved, None

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute grad_input by dgrad, grad_weight by wgrad, each only if it is needed.

        ``context``, if given, is called instead of wgrad.
        """
        grad_input = grad_weight = dy_row = dy_column = None
        if isinstance(grad, Handover):
            dy_row, dy_column = grad.take()
            sums = grad.sums
        else:
            sums = ()
            if self._backward_state is not None:
                update_after_backward(self._backward_state, call.backward_pass)
            if self._cast_and_sum is not None:
                (dy_row, dy_column), total = self._cast_and_sum(grad)
                sums = (total,)
            elif self._cast_grad is not None:
                dy_row, dy_column = self._cast_grad(grad)
        arriving = None
        if self._arrives is not None and self._needs_weight:
            # This rank's part of the input, from all ranks while dgrad runs.
            arriving = self._arrives.start_columnwise(_operand(saved[:3]))
        if self._needs_input:
            at = 3 if self._needs_weight else 0
            weight: Any = self._restore(saved[at:])
            if self._dgrad_part is not None:
                grad_input = self._backward_in_parts(dy_row, weight, call, out)
            if grad_input is not None:
                out = None
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
            if self._dgrad_part is not None:
                dy_column = here(dy_column)
            x_column = _operand(saved) if arriving is None else arriving.wait()
            if self._decode_input is not None:
                x_column = self._decode_input(x_column, *call.groups)
            grad_weight = wgrad(dy_column, x_column, *call.groups)  # [n, m] x [k, m] -> [n, k]
        if not self._has_bias:
            return grad_input, grad_weight
        return grad_input, grad_weight, sums[0].to(self._bias_dtype) if self._needs_bias else None

    def _forward_in_parts(
        self, x_row: Any, w_row: Operand, bias: torch.Tensor | None, call: Call, out: Out
    ) -> Any:
        """Return what ``out`` makes of y, computed some rows at a time while others travel; None if
        y is to be computed as a whole."""
        part, dtype = self._fprop_part, self._output_dtype
        assert part is not None
        if isinstance(x_row, ArrivingRows):
            y = x_row.product(part, w_row, dtype, bias=bias, out=call.output)
            return y if out is None else out(y)
        if bias is not None or call.output is not None or out is None or out.product is None:
            return None
        return out.product(part, x_row, w_row, dtype)

    def _backward_in_parts(self, dy_row: Any, weight: Operand, call: Call, out: Out) -> Any:
        """As :meth:`_forward_in_parts`, of grad_input. Its sum over ranks travels beside wgrad, if
        there is one."""
        part, dtype = self._dgrad_part, self._grad_input_dtype
        assert part is not None
        if isinstance(dy_row, ArrivingRows):
            grad_input = dy_row.product(part, weight, dtype, out=call.grad_input)
            return grad_input if out is None else out(grad_input)
        is_left = call.grad_input is None and not self._needs_weight
        if not is_left or out is None or out.product is None or not isinstance(dy_row, Operand):
            return None
        return out.product(part, dy_row, weight, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LinearLink(LinkDefaults):
    """``y[m, n] = x[m, k] @ w[n, k].T + bias[n]``, or the same for each group of rows.

    Parameters come as ``(weight, bias)``, or ``(*weights, *biases)`` for a grouped link, without
    biases where ``shape.bias_dtype`` is None. ``input_dtype`` and ``grad_dtype`` are those of the
    tensors that the neighbours hand over. ``index`` tells the linears of one chain apart.
    ``choices`` says, by GEMM and tensor, who computes. ``column_sums`` computes the gradient of the
    bias, if there is one. ``takes_chunks``: the gradient of the output stays in memory during
    backward, so that it may be cast some rows at a time. ``decode_input`` and ``decode_weight``
    make the operand of wgrad and dgrad from that of fprop, None where forward makes both.
    ``input_again`` casts the input for wgrad where backward does that. ``input_shards`` and
    ``grad_shards`` say how the two travel where each rank has some of their rows; ``input_sent``
    and ``grad_sent`` how they are cast where their rows are exchanged. ``fprop_part`` and
    ``dgrad_part`` compute some rows of a product, None unless others may travel meanwhile.
    """

    shape: LinearShape
    input: Quantizer
    weight: WeightQuantizer
    grad_output: Quantizer
    fprop: Callable[..., Any]
    dgrad: Callable[..., Any]
    wgrad: Callable[..., Any]
    column_sums: Callable[[torch.Tensor], torch.Tensor] | None
    padding: LayerPadding | None
    backward_state: DelayedState | None
    # field(): no default here, where LinkDefaults has one.
    needs_rng: bool = field()
    input_dtype: torch.dtype
    grad_dtype: torch.dtype
    index: int
    choices: dict[str, Choice] = field()
    num_weights: int
    num_params: int = field()
    takes_chunks: bool = False
    decode_input: Decode | None = None
    decode_weight: Decode | None = None
    input_again: Quantizer | None = None
    input_shards: Shards | None = None
    grad_shards: Shards | None = None
    input_sent: SentCast | None = None
    grad_sent: SentCast | None = None
    fprop_part: GemmPart | None = None
    dgrad_part: GemmPart | None = None
    only_once: OnlyOnce | None = None
    # Programs by padding, by chunks, and by whose gradients are needed.
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

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype that fprop computes."""
        return _out_dtype(self.choices["fprop"])

    @property
    def grad_input_dtype(self) -> torch.dtype:
        """The dtype that dgrad computes."""
        return _out_dtype(self.choices["dgrad"])

    @property
    def grad_weight_dtype(self) -> torch.dtype:
        """The dtype that wgrad computes."""
        return _out_dtype(self.choices["wgrad"])

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Program:
        """Return the program of a dense call, the same each time, wrapped as ``call`` needs it.

        A gradient is cast in chunks where that lowers the peak of memory: while dgrad runs there
        are the rowwise codes and those of the weight, ``rows n + k n`` bytes; while wgrad runs, at
        least the ``2 k n`` bytes of grad_weight instead. A captured graph never chunks, so that
        its rows guard nothing.
        """
        padded = None if self.padding is None else self.padding.for_call(rows, call)
        chunked = self.takes_chunks and not call.groups and rows > self.shape.in_features
        is_sharded = padded is None and not call.groups
        sharded = tuple(
            is_sharded and shards is not None and shards.fits(rows)
            for shards in (self.input_shards, self.grad_shards)
        )
        key = (padded is not None, chunked, *sharded, *needs_grad)
        program = self._programs.get(key) or self._new_program(key, needs_grad)
        count = self.num_weights
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
        is_padded, chunked, is_input_sharded, is_grad_sharded, *_ = key
        weight = self.weight
        if is_padded and self.padding is not None:
            weight = PaddedWeights(weight, self.padding)
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
            sharded=(is_input_sharded, is_grad_sharded),
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


def _decoding(restore: Callable[[SavedList], Any], link: LinearLink) -> Callable[[SavedList], Any]:
    """Return ``restore`` for weights that were saved as operands of fprop."""
    decode = link.decode_weight
    assert decode is not None

    def restored(saved: SavedList) -> Any:
        weights = restore(saved)
        return [decode(one) for one in weights] if link.shape.groups else decode(weights)

    return restored


def _out_dtype(choice: Choice) -> torch.dtype:
    assert isinstance(choice.desc, GemmDesc)
    return choice.desc.out_dtype


def _to_dtype(
    wgrad: Callable[..., Any], computed: torch.dtype, dtype: torch.dtype
) -> Callable[..., Any]:
    """Return ``wgrad``, which computes in ``computed``, with its results in ``dtype``."""
    if computed == dtype:
        return wgrad

    def run(dy: Operand, x: Operand, *groups: torch.Tensor) -> Any:
        grads = wgrad(dy, x, *groups)
        return [grad.to(dtype) for grad in grads] if groups else grads.to(dtype)

    return run


def _cast_grad(link: LinearLink, rowwise: bool, columnwise: bool, chunked: bool) -> Cast | None:
    """Return the cast of the gradient in these orientations, None for neither."""
    if not (rowwise or columnwise):
        return None
    if chunked and rowwise and columnwise:
        return link.grad_output.cast_chunked()
    return link.grad_output.cast_to(rowwise=rowwise, columnwise=columnwise)


def _cast_and_sum(link: LinearLink, rowwise: bool, columnwise: bool, chunked: bool) -> CastAndSum:
    """Return that cast and the gradient of the bias in one call."""
    sums = link.column_sums
    assert sums is not None  # there is a bias
    if not (rowwise or columnwise):
        return lambda grad: (_NO_OPERANDS, sums(grad))
    if chunked and rowwise and columnwise:
        return link.grad_output.cast_chunked_and_sum(sums)
    return link.grad_output.cast_and_sum(sums, rowwise=rowwise, columnwise=columnwise)


def _chunked(dgrad: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return ``dgrad`` for a gradient that may come in chunks of rows, into one tensor."""

    def run(dy: Operand | Chunks, weight: Operand) -> torch.Tensor:
        grad_input: torch.Tensor
        if isinstance(dy, Operand):
            grad_input = dgrad(dy, weight)
            return grad_input
        grad_input = weight.data.new_empty((dy.rows, weight.data.shape[0]), dtype=dtype)
        for start, end, chunk in dy:
            dgrad(chunk, weight, out=grad_input[start:end])
        return grad_input

    return run


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
    dgrad, wgrad = gemms["dgrad"].run, gemms["wgrad"].run
    if only_once is None:
        dgrad, wgrad = turning(dgrad), turning(wgrad)
        # The chain converts weights outside of its node, whose gradients then have this dtype.
        shape = dataclasses.replace(shape, weight_dtype=dtype)
    input_dtype, grad_dtype = context.input_dtype(plan.input), context.grad_dtype(plan.grad_output)
    states = context.states
    if states is not None:
        states = dataclasses.replace(states, first=context.first_gemm, count=shape.num_weights)
    quantizers = _bind_quantizers(
        shape, context, states, (input_dtype, grad_dtype), is_unturned=only_once is None
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
    parts = _parts(gemms, context, is_left=only_once is None)
    return LinearLink(
        shape=shape,
        input=x,
        weight=weight,
        grad_output=dy,
        fprop=_fprop(gemms["fprop"], shape, context),
        dgrad=dgrad,
        wgrad=wgrad,
        column_sums=sums,
        padding=layer_padding(
            [gemms[name].alignment for name in gemms],
            shape.features,
            context.owner,
            offsets_on_device=shape.offsets_on_device,
        ),
        backward_state=states.backward if states is not None and specs.is_delayed else None,
        needs_rng=any(spec is not None and spec.stochastic for spec in specs),
        input_dtype=input_dtype,
        grad_dtype=grad_dtype,
        index=context.first_gemm,
        choices=choices,
        num_weights=shape.num_weights,
        num_params=shape.num_params,
        # Autograd keeps the last one's gradient until backward returns.
        takes_chunks=context.after is None and dy.casts_chunks,
        decode_input=bind_decode(
            "input", context, is_grouped=is_grouped, offsets_on_device=shape.offsets_on_device
        ),
        decode_weight=bind_decode("weight", context),
        input_again=input_again,
        input_shards=_shards(shape, context, "input", parts["fprop"]),
        grad_shards=_shards(shape, context, "grad_output", parts["dgrad"]),
        input_sent=_sent(shape, context, "input", input_dtype),
        grad_sent=_sent(shape, context, "grad_output", grad_dtype),
        fprop_part=parts["fprop"],
        dgrad_part=parts["dgrad"],
        only_once=only_once,
    )


def _parts(
    gemms: dict[str, Resolved], context: BindContext, *, is_left: bool
) -> dict[str, GemmPart | None]:
    """Return what computes some rows of fprop and of dgrad, where ranks beside the link have parts
    of the rows; ``is_left``: the products are torch's to differentiate, and are whole."""
    neighbours = [one.shape for one in (context.before, context.after) if one is not None]
    has_movers = not is_left and any(one.moved_over is not None for one in neighbours)
    return {
        name: gemms[name].offers.gemm_part if has_movers else None for name in ("fprop", "dgrad")
    }


def _shards(
    shape: LinearShape, context: BindContext, tensor: str, gemm_part: GemmPart | None
) -> Shards | None:
    """Return how ``tensor`` travels quantized if each rank has some of its rows; None: it does not.

    A bias is summed over all rows, and an input that is cast again is held as it came: both need
    the whole tensor. So does a quantizer object, of which nobody knows what its scales cover.
    """
    is_input = tensor == "input"
    communicator = context.input_shards if is_input else context.grad_shards
    needs_whole = shape.saves_input if is_input else shape.bias_dtype is not None
    if communicator is None or needs_whole or tensor in dict(context.plan.makers):
        return None
    plan = context.gemm_plan
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


def _sent(
    shape: LinearShape,
    context: BindContext,
    tensor: str,
    dtype: torch.dtype,
) -> SentCast | None:
    """Return how ``tensor`` is cast before its rows are exchanged; None: they travel as they are.

    As in :func:`_shards`, a bias and an input that is cast again need rows in high precision.
    """
    is_input, plan = tensor == "input", context.gemm_plan
    communicator = context.input_exchange if is_input else context.grad_exchange
    needs_rows = shape.saves_input if is_input else shape.bias_dtype is not None
    if communicator is None or needs_rows or tensor in dict(plan.makers) or plan.dequantizes:
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
        reduce_amax=_maximum(communicator),
    )
    return SentCast(communicator, specs, quantizer, tensor)


def _fprop(resolved: Resolved, shape: LinearShape, context: BindContext) -> Callable[..., Any]:
    """Return fprop; in high precision the bias has the activation dtype, as in torch.autocast."""
    run, dtype, plan = resolved.run, context.dtype, context.gemm_plan.fprop
    if shape.bias_dtype in (None, dtype) or plan.a is not None or plan.b is not None:
        return run

    def fprop(a: Operand, b: Any, *groups: torch.Tensor, bias: Any, **keywords: Any) -> Any:
        cast = [one.to(dtype) for one in bias] if shape.groups else bias.to(dtype)
        return run(a, b, *groups, bias=cast, **keywords)

    return fprop


def _bind_quantizers(
    shape: LinearShape,
    context: BindContext,
    states: LayerStates | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    is_unturned: bool,
) -> tuple[Quantizer, KeptWeight | PerGroup, Quantizer, Quantizer | None]:
    """Return the quantizers of input, weight and grad_output, and that of the input in backward, if
    it is cast there; ``dtypes`` are those of the input and of grad_output."""
    plan, binding = context.plan, context.binding
    is_grouped = bool(shape.groups)
    count, propagates = context.nonfinite, plan.nonfinite == "propagate"
    reductions = {"input": context.input_shards, "grad_output": context.grad_shards}
    if propagates and any(reductions.values()):
        raise UnsupportedError(
            "nonfinite='propagate' marks the tensor that holds the NaN or inf, but of one whose "
            "rows are on several ranks each rank casts a part. nonfinite='saturate' works there."
        )
    requantized = None  # by which spec backward quantizes weights again
    if plan.requantize_weights and not binding.is_observing:
        requantized = plan.weight.columnwise
    unturned = Unturned(binding.activation_dtype) if is_unturned else None
    dequantizes = plan.dequantizes and not binding.is_observing

    makers = {} if binding.is_observing else dict(plan.makers)
    if makers and is_grouped:
        raise UnsupportedError(
            f"a quantizer object for {', '.join(makers)} of groups is not offered: it would "
            f"quantize all groups as one tensor. Let the factory return its plan for such a layer."
        )

    def made_by(tensor: str) -> Quantizer | None:
        maker = makers.get(tensor)
        if maker is None:
            return None
        role = f"{context.owner}: the {type(maker).__name__} of its {tensor}"
        return ObjectQuantizer(maker, plan.tensors[tensor], role)

    def slot_of(tensor: str, group: int | None = None) -> Slot | None:
        if states is None or not plan.tensors[tensor].is_delayed:
            return None
        return states.slot(tensor) if group is None else states.slot_of_set(tensor, group)

    def weight(group: int) -> KeptWeight:
        slot = slot_of("weight", group)
        quantizer = (
            unturned
            or made_by("weight")
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
            return KeptWeight(quantizer, index, how)
        columnwise = bind_columnwise(
            requantized,
            shape.weight_dtype,
            binding,
            purpose=context.purpose("weight"),
            propagates=propagates,
        )
        return RequantizedWeight(quantizer, index, how, plan.weight, columnwise)

    def quantizer_of(
        tensor: str, dtype: torch.dtype, slot: Slot | None, nonfinite: torch.Tensor | None
    ) -> Quantizer:
        return made_by(tensor) or bind_quantizer(
            plan.tensors[tensor],
            dtype,
            binding,
            purpose=context.purpose(tensor),
            grouped=is_grouped,
            offsets_on_device=shape.offsets_on_device,
            slot=slot,
            nonfinite=nonfinite,
            propagates=propagates,
            reduce_amax=_maximum(reductions[tensor]),
            dequantizes=dequantizes and tensor == "input",
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


def _maximum(communicator: Communicator | None) -> MaximumOverShards | None:
    """Return what reduces the amaxes of a tensor whose rows are on several ranks."""
    if communicator is None:
        return None
    return MaximumOverShards(lambda amaxes: communicator.max(amaxes, "amax").wait())


def _check_saves_input(plan: LinearPlan) -> None:
    """Raise RecipeError if backward could not repeat the cast of the input."""
    if plan.input.is_delayed:
        raise RecipeError(
            "save_original_input=True with delayed scaling: backward would cast the input by the "
            "scale of the next step. Leave it out, or use a recipe whose scales follow from the "
            "tensor, such as Float8CurrentScaling."
        )
