"""Layers of a larger layer as one chain: the segments that nothing has to see by themselves.

A Transformer layer is two branches, each added to its input: projection, attention and output
projection, then the feed-forward block. Where nothing cuts them they are one chain: one autograd
node takes the place of a node for each layer, view and sum, and a backend that records runs repeats
the whole step in one call each way. The links are those that the layers run one after the other, so
results are the same to the bit.

Under a recipe with ``fp8_mha`` attention is one chain with its projections by itself: each tensor
that crosses from one layer to the next is quantized once. What the projection returns goes to
attention's casts, and is freed; attention's result goes to the cast of the next projection, and
attention's backward reads the codes that this projection holds, instead of a tensor of its own.
Backward hands over gradients likewise.

What cuts: hooks, a monitor, torch's compiler or a transform, a class or a forward that is not the
library's, frozen weights, weight gradients that a later call computes. A Transformer layer is cut
besides by what a layer returns besides its output, by dropout, and by ranks that share its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as concatenated
from typing import Any, NamedTuple

import torch

from fp8core.chain import run as chain
from fp8core.chain.alone import is_transformed
from fp8core.chain.attention.link import AttentionLink
from fp8core.chain.call import DENSE
from fp8core.chain.node import is_under_torch_autocast
from fp8core.chain.packed_attention import PackedAttentionLink
from fp8core.chain.protocol import Link
from fp8core.chain.residual import ResidualLink
from fp8core.chain.series import Chain
from fp8core.chain.unwrap import PLAIN
from fp8core.context.autocast import Active, active
from fp8core.dispatch import policy
from fp8core.dispatch.policy import Policy
from fp8core.modules.attention import DotProductAttention
from fp8core.modules.attention_call import AttentionCall
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound, recipe_in
from fp8core.modules.calls.inputs import check_input
from fp8core.modules.layers.layernorm_linear import LayerNormLinear
from fp8core.modules.layers.layernorm_mlp import LayerNormMLP
from fp8core.modules.layers.linear import Linear
from fp8core.modules.memo import Memo, memo_of, replay, sources_of
from fp8core.modules.run import run_joined
from fp8core.modules.sequences.head_split import HeadSizes
from fp8core.recipe import PerLayer
from fp8core.recipe.plan import LayerRole
from fp8core.torch_ops.private import has_hooks, is_compiled, is_traced, is_transform_active

_MOST_CHAINS = 64
_JOINED = (DotProductAttention, LayerNormLinear, LayerNormMLP, Linear)
_DENSE_LAYOUTS = ("bshd", "sbhd")


def may_join(layer: torch.nn.Module) -> bool:
    """Return whether ``layer`` may run as a part of a chain with others: nothing has to see its own
    call, and it is one of the library's."""
    if type(layer) not in _JOINED or "forward" in layer.__dict__:
        return False
    assert isinstance(layer, LowPrecisionModule)
    bindings = layer._bindings
    return (
        not has_hooks(layer)
        and not is_compiled(layer)
        and bindings.watch is None
        and bindings.weights.scope is None
        and layer.wgrad_queue is None
    )


def attends_to_codes(layers: Sequence[torch.nn.Module]) -> bool:
    """Return whether the active recipe has ``layers``, of which one is attention, hand over codes.

    If something cuts them, they compute what ``fp8_dpa`` says.
    """
    if torch.compiler.is_compiling():
        return False
    for layer in layers:
        if isinstance(layer, DotProductAttention):
            chosen = active(layer.outside_autocast).quantize
            if isinstance(chosen, PerLayer):
                chosen = recipe_in(chosen, LayerRole(layer.kind, layer.name))
            is_apart = layer.return_max_logit or layer.drops_all or layer.context_group.size > 1
            if not getattr(chosen, "fp8_mha", False) or is_apart:
                return False
    return not is_traced() and not is_transform_active() and all(map(may_join, layers))


class Segment(NamedTuple):
    """A layer, bound, as a part of a chain; ``heads`` says how the rows that attention gets from
    the segment before it hold heads, None if it gets its queries."""

    layer: LowPrecisionModule
    bound: Bound
    heads: HeadSizes | None = None

    def links(self, tokens: tuple[int, ...]) -> tuple[Link, ...]:
        """Return its links; ``tokens`` as of :class:`PackedAttentionLink`."""
        if self.heads is None:
            return self.bound.links
        (attention,) = self.bound.links
        assert isinstance(attention, AttentionLink)
        return (PackedAttentionLink(attention, self.heads.is_interleaved, tokens),)


class EncoderParts(NamedTuple):
    """The layers of a Transformer layer in the order in which they run, and how the heads lie in
    what the first of them returns; ``block`` has the first three, and ``name`` is that of the
    Transformer layer."""

    first: LayerNormLinear
    attention: DotProductAttention
    proj: Linear
    mlp: LayerNormMLP
    heads: HeadSizes
    block: torch.nn.Module
    name: str | None

    @property
    def layers(self) -> tuple[LowPrecisionModule, ...]:
        """The four layers."""
        return self[:4]

    @property
    def label(self) -> str:
        """The Transformer layer in messages."""
        label = f"TransformerLayer({self.first.in_features}, {self.mlp.ffn_hidden_size})"
        return label if self.name is None else f"{self.name!r} ({label})"

    def is_cut(self) -> bool:
        """Whether a layer's own call has to be seen, or takes or returns more than one tensor."""
        first, attention, proj, mlp, *_ = self
        outside = first.outside_autocast
        return (
            attention.qkv_format not in _DENSE_LAYOUTS
            or attention.return_max_logit
            or attention.context_group.size > 1
            or attention.softmax_offset is not None
            or bool(attention.attention_dropout and attention.training)
            or first.return_layernorm_output
            or mlp.return_layernorm_output
            or (first.return_bias or proj.return_bias or mlp.return_bias or mlp.checkpoint)
            or not first.parallel.size == proj.parallel.size == mlp.parallel.size == 1
            or attention.outside_autocast is not outside
            or proj.outside_autocast is not outside
            or mlp.outside_autocast is not outside
            or not all(map(may_join, self.layers))
        )

    def params(self) -> list[torch.Tensor]:
        """Return the chain's parameters, in order."""
        first, _, proj, mlp, *_ = self
        return [*first.link_params(), *proj.link_params(), *mlp.link_params()]

    def takes(self, x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
        """Whether ``x`` is a plain tensor that each layer takes as it is."""
        weights = [param for param in params if param.dim() == 2]
        return (
            type(x) in PLAIN
            and x.dim() == 3
            and x.numel() > 0
            and x.shape[-1] == self.first.in_features
            and all(x.dtype == weight.dtype and x.device == weight.device for weight in weights)
            and not is_under_torch_autocast(x)
        )


class Composition:
    """The chains that the segments of one larger layer have run as, and the memo of the last call.
    A copy of the layer starts without any, as they refer to the states of the layers inside."""

    __slots__ = ("_chains", "_refused", "memo")

    def __init__(self) -> None:
        self.memo: Memo | None = None
        # By the parts of their segments, which the key has by their addresses.
        self._chains: dict[tuple[object, ...], tuple[Chain, Sequence[Segment]]] = {}
        self._refused: tuple[Active, Policy] | None = None  # that no chain was made for

    def __reduce__(self) -> tuple[type[Composition], tuple[()]]:
        return Composition, ()

    def links(
        self,
        branches: Sequence[Sequence[Segment]],
        tokens: tuple[int, ...] = (),
        owner: str | None = None,
    ) -> Chain:
        """Return the links of all ``branches`` as one chain; with an ``owner``, which messages
        name, each branch is added to its input."""
        segments = [*concatenated.from_iterable(branches)]
        key = (*map(id, concatenated.from_iterable(segments)), tokens, owner)
        entry = self._chains.get(key)
        if entry is not None:
            return entry[0]
        links: tuple[Link, ...] = ()
        for branch in branches:
            inner = tuple(link for segment in branch for link in segment.links(tokens))
            links += inner if owner is None else (ResidualLink(inner, owner),)
        recorder = None if owner is None else _recorder_of(segments)
        if len(self._chains) >= _MOST_CHAINS:  # sizes without end
            self._chains.pop(next(iter(self._chains)), None)
        self._chains[key] = Chain(links, recorder), segments
        return self._chains[key][0]

    def attend(
        self, call: AttentionCall, proj: Linear, rows: tuple[Linear, torch.Tensor, HeadSizes] | None
    ) -> torch.Tensor:
        """Return ``proj`` of attention to the queries, keys and values of ``call``; with ``rows``,
        a layer, its input and how the rows that it returns hold heads, to those. Of the queries
        the layout and the sizes alone are then read."""
        q, k, v, bias = call.inputs
        if rows is None:
            x, params = q.flatten(-2), [k, v]
            bound, of_call = call.bind(q)
            segments = [Segment(call.layer, bound)]
        else:
            first, x, heads = rows
            params = first.link_params()
            weight = next(param for param in params if param.dim() == 2)
            dtype = check_input(first, x, weight, first.in_features)
            x = x if x.dtype == dtype else x.to(dtype)
            bound, of_call = call.bind(q)
            segments = [
                Segment(first, bind(first, x.device, dtype)),
                Segment(call.layer, bound, heads),
            ]
        segments.append(Segment(proj, bind(proj, q.device, q.dtype)))
        params += [param for param in (bias, call.layer.softmax_offset) if param is not None]
        params += proj.link_params()
        layers = [(segment.layer, segment.bound) for segment in segments]
        return run_joined(layers, self.links((segments,)), x, params, of_call)

    def encode(
        self, layer: torch.nn.Module, parts: EncoderParts, x: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the output of ``layer``, a Transformer layer of ``parts``, for ``x``; None where
        its layers have to run one by one."""
        request, backends = active(parts.first.outside_autocast), policy.current()
        is_refused = self._refused is not None and self._refused == (request, backends)
        if request.observe is not None or is_refused or parts.is_cut():
            return None
        params = parts.params()
        if self.memo is not None and self.memo.sources is None:
            output = replay(layer, self.memo, x, params)
            if output is not None:
                return output
        if is_traced() or is_transformed() or not parts.takes(x, params):
            return None
        shapes = parts.attention.link_shapes()
        segments = [
            Segment(part, bind(part, x.device, x.dtype, shapes=shapes), parts.heads)
            if part is parts.attention
            else Segment(part, bind(part, x.device, x.dtype))
            for part in parts.layers
        ]
        if not _is_one_chain(segments):
            self._refused = request, backends
            return None
        links = self.links((segments[:3], segments[3:]), tuple(x.shape[:2]), parts.label)
        output = run_joined([segment[:2] for segment in segments], links, x, params, DENSE)
        prepared = chain.prepared(links, x, params)
        if prepared is not None:
            memo = memo_of(
                (layer, parts.block, *parts.layers),
                parts.first.outside_autocast,
                prepared,
                len(params),
                [segment.bound.states for segment in segments],
                sources=sources_of((parts.first, parts.proj, parts.mlp)),
                shape=x.shape,
            )
            self.memo = self.memo if memo is None else memo
        return output


TransformerChain = Joins = Composition
"""Names of it in models that an earlier version pickled."""


def _is_one_chain(segments: Sequence[Segment]) -> bool:
    """Whether attention runs in high precision, each layer is one chain, and none takes a seed."""
    attention, linears = segments[1].bound, [segments[at].bound for at in (0, 2, 3)]
    (link,) = attention.links
    return (
        type(link) is AttentionLink
        and attention.plan.is_high_precision
        and link.takes_rows_alone
        and not any(segment.bound.needs_rng for segment in segments)
        and all(len(bound.parts) == 1 for bound in linears)
    )


def _recorder_of(segments: Sequence[Segment]) -> Any:
    """Return what records calls of the linears, None unless it is the same for all.

    Attention is a function to it, whoever computes that.
    """
    parts = [segment.bound.parts[0] for segment in segments if segment.heads is None]
    recorders = [part.recorder if isinstance(part, Chain) else None for part in parts]
    return recorders[0] if all(each is recorders[0] for each in recorders) else None
