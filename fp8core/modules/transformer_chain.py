"""A Transformer layer as one chain: two residual blocks, attention's and the feed-forward one.

One autograd node takes the place of a node for each layer, view and sum, and a backend that
records runs repeats the whole step in one call each way. The links are those that the layers run
one after the other, so results are the same to the bit; what needs to see each layer's own call
leaves them alone: hooks, a monitor, torch's compiler or a transform, frozen weights, weight
gradients that a later call computes, a tensor that a layer returns besides its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8core.chain import run as chain
from fp8core.chain.alone import is_transformed
from fp8core.chain.attention.link import AttentionLink
from fp8core.chain.call import DENSE
from fp8core.chain.differentiable import arranged, only_once
from fp8core.chain.packed_attention import PackedAttentionLink
from fp8core.chain.protocol import Link
from fp8core.chain.residual import ResidualLink
from fp8core.chain.series import Arranged
from fp8core.chain.unwrap import PLAIN
from fp8core.context.autocast import Active, active
from fp8core.dispatch import policy
from fp8core.dispatch.policy import Policy
from fp8core.modules.attention import DotProductAttention
from fp8core.modules.attention_boundary import may_join
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound
from fp8core.modules.layers.layernorm_linear import LayerNormLinear
from fp8core.modules.layers.layernorm_mlp import LayerNormMLP
from fp8core.modules.layers.linear import Linear
from fp8core.modules.memo import Memo, memo_of, replay, sources_of
from fp8core.modules.run import run_joined
from fp8core.modules.sequences.head_split import HeadSizes
from fp8core.torch_ops.private import is_traced

_MOST_CHAINS = 64
_DENSE_LAYOUTS = ("bshd", "sbhd")


class TransformerParts(NamedTuple):
    """The layers of a Transformer layer in the order in which they run, and how the heads lie in
    what the first of them returns; ``block`` has the first three, and ``name`` is that of the
    Transformer layer."""

    first: LayerNormLinear
    attention: DotProductAttention
    proj: Linear
    mlp: LayerNormMLP
    sizes: HeadSizes
    block: torch.nn.Module
    name: str | None

    @property
    def layers(self) -> tuple[LowPrecisionModule, ...]:
        """The four layers."""
        return self[:4]

    @property
    def label(self) -> str:
        """What messages call the Transformer layer."""
        label = f"TransformerLayer({self.first.in_features}, {self.mlp.ffn_hidden_size})"
        return label if self.name is None else f"{self.name!r} ({label})"

    def may_join(self) -> bool:
        """Whether nothing has to see a layer's own call, and each takes and returns one tensor."""
        first, attention, proj, mlp, *_ = self
        outside = first.outside_autocast
        return (
            attention.qkv_format in _DENSE_LAYOUTS
            and not attention.return_max_logit
            and attention.context_group.size == 1
            and attention.softmax_offset is None
            and not (attention.attention_dropout and attention.training)
            and not (first.return_layernorm_output or mlp.return_layernorm_output)
            and not (first.return_bias or proj.return_bias or mlp.return_bias or mlp.checkpoint)
            and first.parallel.size == proj.parallel.size == mlp.parallel.size == 1
            and attention.outside_autocast is outside
            and proj.outside_autocast is outside
            and mlp.outside_autocast is outside
            and may_join(first)
            and may_join(attention)
            and may_join(proj)
            and may_join(mlp)
        )

    def params(self) -> list[torch.Tensor]:
        """Return the chain's parameters, in order."""
        first, _, proj, mlp, *_ = self
        return [*first.link_params(), *proj.link_params(), *mlp.link_params()]


class _Known(NamedTuple):
    """A chain, and what the layers were bound to that gave its links."""

    bounds: Sequence[Bound]
    links: Arranged


class TransformerChain:
    """The chains that one Transformer layer has run. A copy of the layer starts without any, as
    they refer to the layers' own states."""

    __slots__ = ("_known", "_refused", "memo")

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Known] = {}
        self.memo: Memo | None = None
        self._refused: tuple[Active, Policy] | None = None  # that no chain was made for

    def __reduce__(self) -> tuple[type[TransformerChain], tuple[()]]:
        return TransformerChain, ()

    def run(
        self, layer: torch.nn.Module, parts: TransformerParts, x: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the output of ``layer``, which is made of ``parts``, for ``x``; None where its
        layers have to run one by one."""
        asked, backends = active(parts.first.outside_autocast), policy.current()
        is_refused = self._refused is not None and self._refused == (asked, backends)
        if asked.quantize is None or is_refused or not parts.may_join():
            return None
        params = parts.params()
        if self.memo is not None and self.memo.sources is None:
            output = replay(layer, self.memo, x, params)
            if output is not None:
                return output
        if is_traced() or is_transformed() or not _takes(parts, x, params):
            return None
        shapes = parts.attention.link_shapes()
        bounds = [
            bind(one, x.device, x.dtype, shapes=shapes if one is parts.attention else None)
            for one in parts.layers
        ]
        if not _is_one_chain(bounds):
            self._refused = asked, backends
            return None
        links = self._links(parts, bounds, tuple(x.shape[:2]))
        output = run_joined(list(zip(parts.layers, bounds, strict=True)), links, x, params, DENSE)
        prepared = chain.prepared(links, x, params)
        if prepared is not None:
            memo = memo_of(
                (layer, parts.block, *parts.layers),
                parts.first.outside_autocast,
                prepared,
                len(params),
                [bound.states for bound in bounds],
                sources=sources_of((parts.first, parts.proj, parts.mlp)),
                shape=x.shape,
            )
            self.memo = self.memo if memo is None else memo
        return output

    def _links(
        self, parts: TransformerParts, bounds: Sequence[Bound], tokens: tuple[int, ...]
    ) -> Arranged:
        sizes = parts.sizes
        key = (*map(id, bounds), sizes, tokens)
        known = self._known.get(key)
        if known is None:
            first, (attention,), proj, mlp = (bound.links for bound in bounds)
            assert isinstance(attention, AttentionLink)
            packed = PackedAttentionLink(attention, sizes.is_interleaved, tokens)
            owner = parts.label
            blocks: list[Link] = [
                ResidualLink((*first, packed, *proj), owner),
                ResidualLink(mlp, owner),
            ]
            if len(self._known) >= _MOST_CHAINS:  # sizes without end
                self._known.pop(next(iter(self._known)), None)
            known = _Known(bounds, arranged(tuple(blocks), _recorder_of(bounds)))
            self._known[key] = known
        return known.links


def _takes(parts: TransformerParts, x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
    """Whether ``x`` is a plain tensor that each layer takes as it is."""
    weights = [param for param in params if param.dim() == 2]
    return (
        type(x) in PLAIN
        and x.dim() == 3
        and x.numel() > 0
        and x.shape[-1] == parts.first.in_features
        and all(x.dtype == weight.dtype and x.device == weight.device for weight in weights)
        and not chain.is_under_torch_autocast(x)
    )


def _is_one_chain(bounds: Sequence[Bound]) -> bool:
    """Whether the linears run in low precision, attention does not, and none takes a seed."""
    attention, linears = bounds[1], (bounds[0], *bounds[2:])
    (link,) = attention.links
    return (
        type(link) is AttentionLink
        and attention.plan.is_high_precision
        and link.takes_rows_alone
        and not any(bound.needs_rng for bound in bounds)
        and all(len(bound.parts) == 1 and only_once(bound.links) for bound in linears)
    )


def _recorder_of(bounds: Sequence[Bound]) -> Any:
    """Return what records calls of the linears, None unless it is the same for all.

    Attention is a function to it, whoever computes that.
    """
    parts = [bound.parts[0] for bound in (bounds[0], *bounds[2:])]
    recorders = [part.recorder if isinstance(part, Arranged) else None for part in parts]
    return recorders[0] if all(one is recorders[0] for one in recorders) else None
