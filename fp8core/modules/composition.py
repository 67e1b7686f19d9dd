"""Layers of a larger layer as one chain: the segments that nothing has to see by themselves.

A Transformer layer is branches, each added to its input: projection, attention and output
projection, then the feed-forward block. Neighbours that nothing cuts from each other are one chain:
one autograd node takes the place of a node for each layer, view and sum, and a backend that records
runs repeats it in one call each way. The links are those that the layers run one after the other,
so results are the same to the bit. A memo of each chain replays it.

Under a recipe with ``fp8_mha`` attention and its projections are such a chain, whatever a call
brings: each tensor that crosses from one layer to the next is quantized once. What the projection
returns goes to attention's casts, and is freed; attention's result goes to the cast of the next
projection, and attention's backward reads the codes that this projection holds, instead of a tensor
of its own. Backward hands over gradients likewise.

What cuts: hooks, a monitor, torch's compiler or a transform, a class or a forward that is not the
library's, frozen weights, weight gradients that a later call computes, a value that a layer returns
besides its output. Unless codes are handed over, also a seed, a tensor-parallel group, and a tensor
that attention takes besides queries, keys and values, but for the angles of a rotation, which are a
parameter of its link in low precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain as concatenated
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from fp8core.chain import run as chain
from fp8core.chain.alone import is_transformed
from fp8core.chain.attention.link import AttentionLink
from fp8core.chain.call import DENSE, Call
from fp8core.chain.node import is_under_torch_autocast
from fp8core.chain.packed_attention import HeadSizes, PackedAttentionLink
from fp8core.chain.protocol import Link
from fp8core.chain.residual import ResidualLink
from fp8core.chain.series import Chain, only_once
from fp8core.chain.simple import RotaryLink
from fp8core.chain.unwrap import PLAIN
from fp8core.context.autocast import Active, active
from fp8core.dispatch import policy
from fp8core.modules.attention import DotProductAttention
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound, recipe_in
from fp8core.modules.calls.inputs import check_input, check_kind
from fp8core.modules.layers.layernorm_linear import LayerNormLinear
from fp8core.modules.layers.layernorm_mlp import LayerNormMLP
from fp8core.modules.layers.linear import Linear
from fp8core.modules.layers.parallel import ParallelModule, set_group
from fp8core.modules.memo import Memo, Sources, memo_of, replay, sources_of
from fp8core.modules.run import run_joined
from fp8core.modules.sequences.attention_arguments import PLAIN_OPTIONS, AttentionOptions
from fp8core.modules.sequences.rotary import rotary_link
from fp8core.recipe import PerLayer
from fp8core.recipe.plan import LayerRole
from fp8core.torch_ops.private import has_hooks, is_compiled, is_traced

ROTATED = "rotated"
"""Stands, with their sizes, for the angles in the arguments of a call that brings them."""

LayerT = TypeVar("LayerT", bound=torch.nn.Module)

_MOST_CHAINS = 64
_JOINED: Mapping[type[torch.nn.Module], tuple[str, ...]] = {
    DotProductAttention: ("return_max_logit", "drops_all", "runs_apart"),
    LayerNormLinear: ("return_layernorm_output", "return_bias"),
    LayerNormMLP: ("return_layernorm_output", "return_bias", "checkpoint"),
    Linear: (),
}
"""The layers that may be a part of a chain with others, unless one of these attributes is true."""


def kind_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of ``module``, or that from which it is derived without computing other
    than it does, as its ``joined_as`` says."""
    kind: type[torch.nn.Module] = vars(type(module)).get("joined_as", type(module))
    return kind


def is_seen(module: torch.nn.Module) -> bool:
    """Return whether more than the library's forward sees a call of ``module``."""
    return has_hooks(module) or "forward" in module.__dict__ or is_compiled(module)


def hands_over_codes(attention: DotProductAttention) -> bool:
    """Return whether the active recipe has the neighbours of ``attention`` hand over codes.

    Where something cuts it from them, it computes what ``fp8_dpa`` says.
    """
    chosen = active(attention.outside_autocast).quantize
    if isinstance(chosen, PerLayer):
        chosen = recipe_in(chosen, LayerRole(attention.kind, attention.name))
    return bool(getattr(chosen, "fp8_mha", False))


class Segment(NamedTuple):
    """A layer as a part of a larger one.

    Attributes:
        layer: the layer; the bias that a Linear returns is for its owner to return.
        block: the module that runs it otherwise.
        hands_over: whether codes cross to its neighbours.
        options: of a call of attention.
        heads: how the rows that attention gets hold heads, None if it gets queries, keys and
            values.
        angles: by which attention's queries and keys are rotated first, in pairs as ``block`` says.
        bound, params, call, rows: of a layer that is bound for a call: its links, their parameters,
            what attention to codes brings, and the queries if it does not get the rows of a layer.
        rotation: the one by the angles, of a layer that is bound.
    """

    layer: ParallelModule
    block: torch.nn.Module
    hands_over: bool = False
    options: AttentionOptions | None = None
    heads: HeadSizes | None = None
    angles: torch.Tensor | None = None
    bound: Bound | None = None
    params: Sequence[torch.Tensor] = ()
    call: Call = DENSE
    rows: torch.Tensor | None = None
    rotation: RotaryLink | None = None

    def is_cut(self, outside: Active | None, *, is_plain: bool) -> bool:
        """Whether the layer's own call has to be seen. ``outside`` is the recipe of its neighbours
        outside any autocast; ``is_plain``: their owner's arguments say the same in each call."""
        layer, options = self.layer, self.options
        returned = _JOINED.get(kind_of(layer))
        if returned is None or layer.outside_autocast is not outside or is_seen(layer):
            return True
        if isinstance(layer, DotProductAttention) and options is not None:
            is_shared = layer.context_group.size > 1 or options.checkpoint_core_attention
            is_dense = self.heads is not None and is_plain
            if is_shared or not (self.hands_over or is_dense):
                return True
        bindings = layer._bindings
        return (
            bindings.watch is not None
            or bindings.weights.scope is not None
            or layer.wgrad_queue is not None
            or any([getattr(layer, name) for name in returned])
        )

    def bind(self, value: Any, leading: Sequence[int], dtype: torch.dtype) -> Segment | None:
        """Return the segment bound for activations of ``dtype``, None if it has to run by itself.

        ``value`` is what the chain gets, and ``leading`` are the dimensions of the layer's rows.
        """
        layer, heads, params = self.layer, self.heads, self.params
        if self.options is None:
            bound = bind(layer, rows_of(value).device, dtype)
            is_dense = not bound.needs_rng and layer.parallel.size == 1
            return self._replace(bound=bound) if is_dense or self.hands_over else None
        assert isinstance(layer, DotProductAttention)
        if heads is not None:
            if isinstance(value, tuple):  # what ran apart before it has split the heads
                return None
            rows = value.new_empty(1, dtype=dtype)
            rows = rows.expand(*leading, heads.query_size + 2 * heads.key_size)
            value = heads.split(rows, leading)
        attend = layer.prepared(value, self.options)
        if not (self.hands_over or attend.shape.takes_rows_alone):
            return None  # before a seed is drawn
        q, k, v, bias = attend.inputs
        bound, call = attend.bind(q)
        if not self.hands_over:
            rotation = None if self.angles is None else self._rotation(q, self.angles)
            is_missing = self.angles is not None and rotation is None
            if is_missing or not bound.plan.is_high_precision:
                return None
            return self._replace(bound=bound, rotation=rotation)
        params = [*([] if bias is None else [bias]), *params]
        if heads is not None:
            return self._replace(bound=bound, params=params, call=call)
        return self._replace(bound=bound, params=[k, v, *params], call=call, rows=q.flatten(-2))

    def _rotation(self, q: torch.Tensor, angles: torch.Tensor) -> RotaryLink | None:
        block: Any = self.block
        return rotary_link(block.qkv_format, block.rotary_pos_interleaved, q, angles)

    def links(self, tokens: tuple[int, ...]) -> tuple[Link, ...]:
        """Return the links that are bound; those of attention for rows whose first dimensions are
        ``tokens``."""
        assert self.bound is not None
        if self.heads is None:
            return self.bound.links
        (attention,) = self.bound.links
        assert isinstance(attention, AttentionLink)
        sizes = () if self.hands_over else tokens
        return (PackedAttentionLink(attention, self.heads, sizes, self.rotation),)


def told_apart(angles: Any) -> tuple[torch.Tensor | None, object]:
    """Return the tensor of angles that rotates queries and keys, None unless it is one for both,
    and what stands for ``angles`` among plain arguments."""
    if isinstance(angles, tuple | list) and len(angles) == 2 and angles[0] is angles[1]:
        angles = angles[0]
    return (angles, (ROTATED, *angles.shape)) if type(angles) in PLAIN else (None, angles)


def rows_of(value: Any) -> Any:
    """Return the tensor whose rows a chain gets; of queries, keys and values the queries."""
    return value[0] if isinstance(value, tuple) else value


class LayerCall(NamedTuple):
    """A call of a layer of layers.

    Attributes:
        owner: the layer that is called.
        items: its segments; those of an item run together or not at all, and an item without any
            by itself.
        alone: returns the value after the item of a number, from the value before it.
        arguments: those of the call besides its input, by which memos are compared.
        angles: the tensor among these, in whose place they say :data:`ROTATED`; None without one.
        label: if not None, each item is a branch that is added to its input, and this names the
            layer in messages.
    """

    owner: ComposedLayer
    items: Sequence[Sequence[Segment]]
    alone: Callable[[int, Any], Any]
    arguments: tuple[object, ...]
    angles: torch.Tensor | None = None
    label: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether its arguments say the same in each call in which they are equal."""
        return PLAIN_OPTIONS.issuperset(map(type, self.arguments))

    @property
    def first(self) -> ParallelModule:
        """The layer of its first segment."""
        return next(filter(None, self.items))[0].layer

    @property
    def like(self) -> tuple[object, ...]:
        """The active recipes and backends, and whether its layers train."""
        first = self.first
        return active(first.outside_autocast), policy.current(), first.training

    def end(self, start: int, refused: Mapping[int, object]) -> int:
        """Return the number of the item behind the chain that begins with item ``start``, and
        ``start`` if none does. ``refused`` are calls that had to run an item by itself."""
        items, outside, is_plain = self.items, self.first.outside_autocast, self.is_plain
        like, end = self.like, start
        while end < len(items) and items[end]:
            first = items[end][0]
            is_apart = first.options is not None and first.heads is None and end > start
            if is_apart or refused.get(end) in (like, (*like, self.arguments)):
                break
            if any([each.is_cut(outside, is_plain=is_plain) for each in items[end]]):
                break
            end += 1
        return start if end - start == 1 else end


class Composition:
    """The chains that the segments of one larger layer have run as, and memos of their last calls.
    A copy of the layer starts without any, as they refer to the states of the layers inside.

    ``memo`` is that of a call that was one chain from its input to its output.
    """

    __slots__ = ("_alone", "_chains", "_memos", "_refused", "memo")

    def __init__(self) -> None:
        self.memo: Memo | None = None
        # By the number of the first item, and of the one behind the last.
        self._memos: dict[tuple[int, int], Memo] = {}
        # By what is bound, which the key has by addresses.
        self._chains: dict[tuple[object, ...], tuple[Chain, Sequence[Bound | None]]] = {}
        # By the number of an item: the last call that had to run it alone, as binding it said.
        self._refused: dict[int, tuple[object, ...]] = {}
        # The last call in which that left no chain, with its arguments if they decided.
        self._alone: tuple[object, ...] | None = None

    def __reduce__(self) -> tuple[type[Composition], tuple[()]]:
        return Composition, ()

    def may_join(self, layer: torch.nn.Module, arguments: tuple[object, ...]) -> bool:
        """Return whether neighbours of which one is ``layer`` may be one chain in a call now, which
        their owner gets with ``arguments``."""
        if torch.compiler.is_compiling():
            return False
        request = active(getattr(layer, "outside_autocast", None))
        like = request, policy.current(), layer.training
        if request.observe is not None or self._alone in (like, (*like, arguments)):
            return False
        return not is_traced() and not is_transformed()

    def run(self, call: LayerCall, value: Any) -> Any:
        """Return ``value`` after all items of ``call``: neighbours that nothing cuts from one
        another as one chain, the rest alone."""
        at = 0
        while at < len(call.items):
            end, output = call.end(at, self._refused) if call.items[at] else at, None
            if end > at:
                output, end = self._joined(call, at, end, value)
            value, at = (call.alone(at, value), at + 1) if output is None else (output, end)
        return value

    def _joined(
        self, call: LayerCall, start: int, end: int, value: Any
    ) -> tuple[torch.Tensor | None, int]:
        """Return ``value`` after the items from ``start`` to ``end``, or the first of them, as one
        chain, and the number of the next item; None instead of a value if they cannot be one."""
        memo, items, params = self._memos.get((start, end)), call.items[start:end], None
        if memo is None or memo.sources is None:  # once in a call, as they may be computed
            items, params = _with_params(items)
        if memo is not None and (memo is not self.memo or params is not None):
            rows = rows_of(value)
            output = replay(call.owner, memo, rows, params, call.arguments, call.angles)
            if output is not None:
                return output, end
        if params is None:
            items, params = _with_params(items)
        x = rows_of(value)
        check_kind(type(call.owner).__name__, "hidden_states", x)
        dtype = _dtype_of(items[0][0].layer, x, params)
        branches = [] if dtype is None else self._bound(call, start, items, value, dtype)
        if dtype is None or len(branches) < 2:
            return None, start
        segments = [*concatenated.from_iterable(branches)]
        rows = x if segments[0].rows is None else segments[0].rows
        rows = rows if rows.dtype == dtype else rows.to(dtype)
        brought = next((each.call for each in segments if each.call is not DENSE), DENSE)
        links = self._chain(branches, tuple(rows.shape[:2]), call.label)
        params = [*concatenated.from_iterable([each.params for each in segments])]
        layers = [(each.layer, each.bound) for each in segments if each.bound is not None]
        output = run_joined(layers, links, rows, params, brought)
        end = start + len(branches)
        is_whole = brought.rng is None and not any([x is not None for x in brought.tensors])
        if rows is value and is_whole and call.is_plain:
            memo = _memo_of(call, segments, chain.prepared(links, rows, params, brought), x.shape)
            if memo is not None:
                self._memos[start, end] = memo
                if len(branches) == len(call.items) and not call.owner.return_bias:
                    self.memo = memo
        return output, end

    def _bound(
        self,
        call: LayerCall,
        start: int,
        items: Sequence[Sequence[Segment]],
        value: Any,
        dtype: torch.dtype,
    ) -> list[list[Segment]]:
        """Return the ``items`` bound, without the first that has to run by itself and those behind
        it; ``start`` is the number of the first item."""
        branches: list[list[Segment]] = []
        leading: Sequence[int] = rows_of(value).shape[:-1]
        for at, item in enumerate(items, start):
            branch: list[Segment] = []
            for segment in item:
                bound = segment.bind(value, leading, dtype)
                if bound is None:
                    self._refuse(call, at, segment)
                    return branches
                branch.append(bound)
                leading = segment.layer.parallel.gathered(leading)
            branches.append(branch)
        if call.angles is not None:
            for at, branch in enumerate(branches):
                rotating = [each for each in branch if each.rotation is not None]
                if rotating and not any(map(_is_low, concatenated.from_iterable(branches))):
                    # The chain would hold the rows before they are rotated, too.
                    self._refuse(call, start + at, rotating[0])
                    return branches[:at]
        return branches

    def _refuse(self, call: LayerCall, at: int, segment: Segment) -> None:
        """Note that ``segment`` has item ``at`` run alone, whatever the arguments if a linear."""
        like = call.like
        entry = like if segment.options is None else (*like, call.arguments)
        self._refused[at] = entry
        left = [self._refused.get(at) not in (like, entry) for at in range(len(call.items))]
        if all(call.items) and not any([all(pair) for pair in pairwise(left)]):
            self._alone = entry

    def _chain(
        self, branches: Sequence[Sequence[Segment]], tokens: tuple[int, ...], label: str | None
    ) -> Chain:
        """Return the links of all ``branches`` as one chain, see :class:`LayerCall`."""
        segments = [*concatenated.from_iterable(branches)]
        if all([each.heads is None or each.hands_over for each in segments]):
            tokens = ()
        bound = [(id(each.bound), id(each.rotation), each.heads) for each in segments]
        key: tuple[object, ...] = (*bound, *map(len, branches))
        key = (*key, tokens, label)
        entry = self._chains.get(key)
        if entry is not None:
            return entry[0]
        links: tuple[Link, ...] = ()
        for branch in branches:
            inner = tuple([link for segment in branch for link in segment.links(tokens)])
            links += inner if label is None else (ResidualLink(inner, label),)
        if len(self._chains) >= _MOST_CHAINS:  # sizes without end
            self._chains.pop(next(iter(self._chains)), None)
        entry = Chain(links, _recorder_of(segments)), [each.bound for each in segments]
        self._chains[key] = entry
        return entry[0]


def _with_params(
    items: Sequence[Sequence[Segment]],
) -> tuple[list[list[Segment]], list[torch.Tensor]]:
    """Return the segments of ``items`` with the parameters of their layers, and all of these."""
    complete = [
        [each._replace(params=[*each.layer.link_params(), *_brought(each)]) for each in item]
        for item in items
    ]
    return complete, [param for item in complete for each in item for param in each.params]


def _dtype_of(layer: ParallelModule, x: Any, params: Sequence[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype in which a chain that begins with ``layer`` computes from ``x``; None unless
    it is a plain tensor, and each weight among ``params`` fits.

    Raises:
        OperandError: as ``layer`` for an input that it refuses.
    """
    if type(x) not in PLAIN or not x.numel():
        return None
    weights = [param for param in params if param.dim() == 2]
    is_autocast = is_under_torch_autocast(x)
    if isinstance(layer, DotProductAttention):
        dtype = torch.get_autocast_dtype(x.device.type) if is_autocast else x.dtype
    else:
        dtype = check_input(layer, x, weights[0], weights[0].shape[-1])
    fits = [each.device == x.device and (is_autocast or each.dtype == dtype) for each in weights]
    return dtype if all(fits) else None


def _memo_of(
    call: LayerCall,
    segments: Sequence[Segment],
    prepared: chain.Prepared | None,
    shape: torch.Size,
) -> Memo | None:
    """Return the memo of the call that has just run as ``prepared``, if it may be replayed."""
    if prepared is None:
        return None
    layers = [segment.layer for segment in segments]
    blocks = {each.block: None for each in segments if each.block is not call.owner}
    return memo_of(
        (call.owner, *[block for block in blocks if block not in layers], *layers),
        call.first.outside_autocast,
        prepared,
        sum([len(segment.params) for segment in segments]),
        [None if each.bound is None else each.bound.states for each in segments],
        arguments=call.arguments,
        sources=_sources_of(segments),
        shape=shape,
    )


def _is_low(segment: Segment) -> bool:
    return segment.bound is not None and only_once(segment.bound.links) is not None


def _brought(segment: Segment) -> Sequence[torch.Tensor]:
    return () if segment.angles is None else (segment.angles,)


def _sources_of(segments: Sequence[Segment]) -> Sources | None:
    """Return where the parameters of ``segments`` lie, None if one is computed."""
    sources: list[Any] = []
    for each in segments:
        of_layer = sources_of((each.layer,))
        if of_layer is None:
            return None
        sources += [*of_layer, *[(None, ()) for _ in _brought(each)]]
    return sources


def _recorder_of(segments: Sequence[Segment]) -> Any:
    """Return what records calls of the linears, None unless it is the same for all.

    Attention is a function to it, whoever computes that.
    """
    links = [each.bound.parts[0] for each in segments if each.bound and each.options is None]
    recorders = [each.recorder if isinstance(each, Chain) else None for each in links]
    return recorders[0] if all(each is recorders[0] for each in recorders) else None


class ComposedLayer(torch.nn.Module):
    """Base of the layers of layers, which run as a :class:`Composition`."""

    name: str | None = None
    return_bias = False

    def __init__(self) -> None:
        super().__init__()
        self._chain = Composition()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        vars(self).setdefault("_chain", Composition())  # an earlier version had another name

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Give the layers inside, made with ``tp_size``, their group."""
        set_group(self, tp_group)

    def set_context_parallel_group(
        self,
        cp_group: object | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object | None = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Share the tokens of all following calls over the ranks of a group, see
        :meth:`fp8core.DotProductAttention.set_context_parallel_group`; rotary embeddings take the
        angles of whole sequences."""
        for module in self.modules():
            if isinstance(module, DotProductAttention):
                module.set_context_parallel_group(
                    cp_group, cp_global_ranks, cp_stream, cp_comm_type
                )

    def inner(self, kind: type[LayerT]) -> type[LayerT]:
        """Return the class of the layers inside that are of ``kind``: that, or one derived from it,
        with its constructor's arguments."""
        return kind

    def _name_of(self, child: str) -> str | None:
        return None if self.name is None else f"{self.name}.{child}"

    def _run(
        self,
        hidden_states: torch.Tensor,
        arguments: tuple[object, ...],
        angles: torch.Tensor | None,
    ) -> Any:
        """Return the output for ``hidden_states`` and the further ``arguments`` of ``forward``, in
        its order; ``angles`` are what :func:`told_apart` returned of those by which it rotates."""
        memo = self._chain.memo
        if memo is not None and not torch.compiler.is_dynamo_compiling():
            output = replay(self, memo, hidden_states, None, arguments, angles)
            if output is not None:
                return output
        return self._compose(hidden_states, arguments, angles)

    def _compose(
        self,
        hidden_states: torch.Tensor,
        arguments: tuple[object, ...],
        angles: torch.Tensor | None,
    ) -> Any:
        """Return the output of a call that is not like the last one."""
        raise NotImplementedError


TransformerChain = Joins = Composition
"""Names of it in models that an earlier version pickled."""
