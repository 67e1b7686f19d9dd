"""Attention and its projections as one chain, for recipes with ``fp8_mha``.

Each tensor that crosses from one layer to the next is quantized once: what the projection returns
goes to attention's casts, and is freed; attention's result goes to the cast of the next projection,
and attention's backward reads the codes that this projection holds, instead of a tensor of its own.
Backward hands over gradients likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.chain.attention.link import AttentionLink
from fp8core.chain.differentiable import arranged
from fp8core.chain.packed_attention import PackedAttentionLink
from fp8core.chain.protocol import Link
from fp8core.chain.series import Arranged
from fp8core.context.autocast import active
from fp8core.modules.attention import AttentionCall, DotProductAttention
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound, recipe_in
from fp8core.modules.calls.inputs import check_input
from fp8core.modules.layers.layernorm_linear import LayerNormLinear
from fp8core.modules.layers.layernorm_mlp import LayerNormMLP
from fp8core.modules.layers.linear import Linear
from fp8core.modules.run import run_joined
from fp8core.modules.sequences.head_split import HeadSizes
from fp8core.recipe import PerLayer
from fp8core.recipe.plan import LayerRole
from fp8core.torch_ops.private import has_hooks, is_compiled, is_traced, is_transform_active

__all__ = ["Joins", "attends_to_codes", "may_join"]

_JOINED = (DotProductAttention, LayerNormLinear, LayerNormMLP, Linear)

_Layers = Sequence[tuple[LowPrecisionModule, Bound]]


def attends_to_codes(layers: Sequence[torch.nn.Module]) -> bool:
    """Return whether the active recipe has ``layers``, of which one is attention, hand over codes.

    They do not where something has to see each layer's call: hooks, a monitor, torch's compiler
    or a transform, frozen weights, weight gradients that are left to a later call, or a class that
    is not one of the library. They then compute what ``fp8_dpa`` says.
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


class Joins:
    """The chain that the layers of one attention block ran as last. A copy of the block starts
    without one, as it refers to the layers' own states."""

    __slots__ = ("_bounds", "_links")

    def __init__(self) -> None:
        self._bounds: tuple[Bound, ...] = ()
        self._links: Arranged | None = None

    def __reduce__(self) -> tuple[type[Joins], tuple[()]]:
        return Joins, ()

    def attend(
        self,
        call: AttentionCall,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
        proj: Linear,
    ) -> torch.Tensor:
        """Return ``proj`` of attention to ``inputs``: queries, keys, values and a bias or None."""
        q, *given = inputs
        bound, brought = call.bind(q)
        last = bind(proj, q.device, q.dtype)
        params = [one for one in (*given, call.layer.softmax_offset) if one is not None]
        layers = [(call.layer, bound), (proj, last)]
        links = self._joined(layers, None, 0)
        params += proj.link_params()
        return run_joined(layers, links, q.flatten(-2), params, brought)

    def project_and_attend(
        self,
        first: Linear,
        x: torch.Tensor,
        call: AttentionCall,
        bias: torch.Tensor | None,
        proj: Linear,
        sizes: HeadSizes,
    ) -> torch.Tensor:
        """Return ``proj`` of attention to what ``first`` projects ``x`` to."""
        params = first.link_params()
        weight = next(param for param in params if param.dim() == 2)
        dtype = check_input(first, x, weight, first.in_features)
        x = x if x.dtype == dtype else x.to(dtype)
        # Only the layout and the sizes of queries are read to bind a call.
        leading = first.parallel.gathered(x.shape[:-1])
        like = x.new_empty(1).expand(*leading, sizes.num_heads, sizes.head_dim)
        bound, brought = call.bind(like)
        layers = [
            (first, bind(first, x.device, dtype)),
            (call.layer, bound),
            (proj, bind(proj, x.device, dtype)),
        ]
        links = self._joined(layers, sizes, 1)
        params += [one for one in (bias, call.layer.softmax_offset) if one is not None]
        params += proj.link_params()
        return run_joined(layers, links, x, params, brought)

    def _joined(self, layers: _Layers, packed: HeadSizes | None, at: int) -> Arranged:
        """Return the links of the layers, of which number ``at`` is attention: to the rows of the
        layer before it if ``packed`` says how these hold heads."""
        bounds = tuple(bound for _, bound in layers)
        is_same = len(bounds) == len(self._bounds) and all(
            one is other for one, other in zip(bounds, self._bounds, strict=True)
        )
        if not is_same or self._links is None:
            parts: list[tuple[Link, ...]] = [bound.links for bound in bounds]
            if packed is not None:
                (attention,) = parts[at]
                assert isinstance(attention, AttentionLink)
                parts[at] = (PackedAttentionLink(attention, packed.is_interleaved),)
            self._bounds, self._links = bounds, arranged(sum(parts, ()))
        return self._links
