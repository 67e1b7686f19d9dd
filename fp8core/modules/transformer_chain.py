"""A Transformer layer as one chain: two residual blocks, attention's and the feed-forward one.

One autograd node takes the place of a node for each layer, view and sum, and a backend that
records runs repeats the whole step in one call each way. The links are those that the layers run
one after the other, so results are the same to the bit; what needs to see each layer's own call
leaves them alone: hooks, a monitor, torch's compiler or a transform, frozen weights, weight
gradients that a later call computes, a tensor that a layer returns besides its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.chain import run as chain
from fp8core.chain.alone import is_transformed
from fp8core.chain.arranged import Arranged
from fp8core.chain.attention.link import AttentionLink
from fp8core.chain.call import DENSE
from fp8core.chain.differentiable import arranged, only_once
from fp8core.chain.packed_attention import PackedAttentionLink
from fp8core.chain.protocol import Link
from fp8core.chain.residual import ResidualLink
from fp8core.chain.unwrap import PLAIN
from fp8core.context import recompute
from fp8core.context.autocast import Active, active
from fp8core.context.scopes import touch
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
from fp8core.modules.run import is_ordinary_call, is_remembered, run_joined
from fp8core.modules.sequences.head_split import HeadSizes
from fp8core.tensors.delayed_state import DelayedState
from fp8core.torch_ops.likeness import Likeness
from fp8core.torch_ops.private import is_traced

__all__ = ["TransformerChain", "TransformerParts"]

_MOST_CHAINS = 64
_DENSE_LAYOUTS = ("bshd", "sbhd")


class TransformerParts(NamedTuple):
    """The layers of a Transformer layer in the order in which they run, and how the heads lie in
    what the first of them returns; ``name`` is that of the Transformer layer."""

    first: LayerNormLinear
    attention: DotProductAttention
    proj: Linear
    mlp: LayerNormMLP
    sizes: HeadSizes
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


class _Repeat(NamedTuple):
    """The last call, and how it ran: for calls alike of the same layers, bound as they were."""

    layers: Sequence[LowPrecisionModule]
    lasts: Sequence[Any]
    settings: tuple[object, ...]
    is_like: Likeness
    address: Callable[[torch.Tensor], int]
    run: Callable[..., torch.Tensor | None]
    num_params: int
    asked: tuple[Active, Policy]
    has_grad: bool
    states: Sequence[tuple[DelayedState, DelayedState]]


class TransformerChain:
    """The chains that one Transformer layer has run. A copy of the layer starts without any, as
    they refer to the layers' own states."""

    __slots__ = ("_known", "_refused", "_repeat")

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Known] = {}
        self._repeat: _Repeat | None = None
        self._refused: tuple[Active, Policy] | None = None  # that no chain was made for

    def __reduce__(self) -> tuple[type[TransformerChain], tuple[()]]:
        return TransformerChain, ()

    def run(self, parts: TransformerParts, x: torch.Tensor) -> torch.Tensor | None:
        """Return the layer's output for ``x``; None where its layers have to run one by one."""
        asked = active(parts.first.outside_autocast)
        is_refused = self._refused is not None and self._refused == (asked, policy.current())
        if asked.quantize is None or is_refused or not parts.may_join():
            return None
        settings, params = _settings(parts, x), parts.params()
        repeat = self._repeat
        if (
            repeat is not None
            and repeat.settings == settings
            and is_remembered(repeat.layers, repeat.lasts, parts.layers)
            and is_ordinary_call(asked, repeat.asked, repeat.has_grad)
            and len(params) == repeat.num_params
            and repeat.is_like(x, *params)
            and x.data_ptr()
            and all(map(repeat.address, params))
        ):
            for forward, backward in repeat.states:
                touch(forward, backward, asked.group)
            return repeat.run(x, *params)
        return self._run_anew(parts, x, params, settings)

    def _run_anew(
        self,
        parts: TransformerParts,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        settings: tuple[object, ...],
    ) -> torch.Tensor | None:
        asked, backends = active(parts.first.outside_autocast), policy.current()
        if is_traced() or is_transformed() or not _takes(parts, x):
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
        layers = list(zip(parts.layers, bounds, strict=True))
        output = run_joined(layers, links, x, params, DENSE)
        self._remember(parts, bounds, links, x, params, settings)
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

    def _remember(
        self,
        parts: TransformerParts,
        bounds: Sequence[Bound],
        links: Arranged,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        settings: tuple[object, ...],
    ) -> None:
        """Keep what the call that has just run does, unless it repeats another."""
        if recompute.current() is not None or recompute.is_in_backward():
            return
        prepared = chain.prepared(links, x, params)
        if prepared is None:
            return
        has_grad = torch.is_grad_enabled()
        self._repeat = _Repeat(
            parts.layers,
            [layer._bindings.last for layer in parts.layers],
            settings,
            *prepared,
            len(params),
            (active(parts.first.outside_autocast), policy.current()),
            has_grad,
            [
                (bound.states.forward, bound.states.backward)
                for bound in bounds
                if bound.states is not None and has_grad
            ],
        )


def _settings(parts: TransformerParts, x: torch.Tensor) -> tuple[object, ...]:
    """Return what a call depends on besides the layers' bindings: sizes, options, modes."""
    first, attention, proj, mlp, sizes, _ = parts
    modes = first.training, attention.training, proj.training, mlp.training
    return tuple(x.shape), sizes, modes, attention.options


def _takes(parts: TransformerParts, x: torch.Tensor) -> bool:
    """Whether ``x`` is a plain tensor that each layer takes as it is."""
    weights = [one for one in parts.params() if one.dim() == 2]
    return (
        type(x) in PLAIN
        and x.dim() == 3
        and x.numel() > 0
        and x.shape[-1] == parts.first.in_features
        and all(x.dtype == one.dtype and x.device == one.device for one in weights)
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
