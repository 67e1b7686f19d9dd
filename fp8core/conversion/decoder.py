"""Decoder layers of transformers as two chains: norm and projections to queries, keys and values;
output projection, sum, norm and gated feed-forward block, added to that sum.

Llama, Qwen2, Qwen3, Mistral, Gemma and whoever else composes a layer so: the class is compared with
:func:`plain` on a few numbers, never known by its name. Another block, as Mixtral's experts, runs
by itself behind the sum. Between the two chains the library rotates queries and keys, and
transformers' own ``sdpa`` attends, or by one query a sequence a kernel. With another attention, and
where somebody has to see a module inside, the layer computes as its class says.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from fp8core.chain.activation import activation_shape
from fp8core.chain.residual import AddShape
from fp8core.conversion.layers import (
    RECORD,
    Conversion,
    Converted,
    Record,
    derived,
    in_step,
    stand_in,
)
from fp8core.conversion.single_query import Operands, attended
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.modules.composition import is_seen
from fp8core.modules.sequences.rotary import apply_rotary_pos_emb
from fp8core.modules.splice import Part, Splice
from fp8core.torch_ops.private import is_capturing

_SPLICES = "_fp8core_splices"
_FIRST_NORM, _SECOND_NORM = "input_layernorm", "post_attention_layernorm"
_CHILDREN = {_FIRST_NORM, _SECOND_NORM, "self_attn", "mlp"}
_PROJECTIONS, _HEAD_NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")
_CACHES = ("cache", "past_key_values", "past_key_value")

Turn: TypeAlias = "tuple[torch.Tensor, str, torch.Tensor | None]"
"""What :func:`apply_rotary_pos_emb` takes behind a tensor."""


def _inside(module: torch.nn.Module) -> set[str]:
    """Return the names of the modules in ``module``, without those that are None."""
    return {name for name, _ in module.named_children()}


def looks_like_decoder(module: torch.nn.Module) -> bool:
    """Return whether the modules inside ``module`` are named as those of such a decoder layer."""
    if _inside(module) != _CHILDREN:
        return False
    attention: Any = module._modules["self_attn"]
    return _inside(attention) >= {*_PROJECTIONS, "o_proj"}


def _obstacle(module: Any) -> str:
    """Return why a layer that :func:`looks_like_decoder` stays apart; empty if it does not."""
    attention = module.self_attn
    layers = {name: getattr(attention, name) for name in (*_PROJECTIONS, "o_proj")}
    reason = _unlike(layers | {_FIRST_NORM: module.input_layernorm}, {"self_attn": attention})
    if reason:
        return reason
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    for name in ("head_dim", "scaling", "attention_dropout"):
        if not isinstance(getattr(attention, name, None), int | float):
            return f"its attention has no {name}"
    return ""


def _obstacle_of_mlp(mlp: Any, norm: object = None) -> str:
    """Return why a feed-forward block behind ``norm``, or alone, is no chain; empty if it is."""
    if not _looks_like_mlp(mlp):
        return f"it is a {type(mlp).__name__}"
    layers = {name: getattr(mlp, name) for name in _MLP}
    if norm is not None:
        layers[_SECOND_NORM] = norm
    reason = _unlike(layers, {"mlp": mlp, "act_fn": mlp.act_fn})
    if reason or _activation_of(mlp) is not None:
        return reason
    return f"its activation is {type(mlp.act_fn).__name__}"


def _looks_like_mlp(module: torch.nn.Module) -> bool:
    return _inside(module) == {*_MLP, "act_fn"}


def _unlike(layers: Mapping[str, Any], blocks: Mapping[str, Any]) -> str:
    """Return which of ``layers`` is not converted, or has to be seen, as may one of ``blocks``."""
    for name, layer in layers.items():
        if not isinstance(layer, Converted) or layer.link_names() is None:
            return f"its {name} is not converted"
    seen = [name for name, child in {**blocks, **layers}.items() if is_seen(child)]
    return f"its {seen[0]} has a hook, or a forward of its own" if seen else ""


def _activation_of(mlp: Any) -> str | None:
    """Return the name here of the gated activation of ``mlp``, None if there is none."""
    x = torch.linspace(-4, 4, 33, device="cpu")
    y = attempt(lambda: mlp.act_fn(x))
    if isinstance(y, Failure) or not isinstance(y, torch.Tensor):
        return None
    values = {
        "swiglu": functional.silu(x),
        "geglu": functional.gelu(x, approximate="tanh"),
        "reglu": functional.relu(x),
    }
    names = [name for name, value in values.items() if torch.allclose(y, value, 1e-6, 1e-7)]
    return names[0] if names else None


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the heads of ``x [b, s, heads, d]`` rotated as transformers' Llama does, rounded after
    each operation; ``cos`` and ``sin`` are ``[1 or b, s, d]``."""
    first, second = x.chunk(2, -1)
    turned_half = torch.cat((-second, first), -1)
    return x * cos.unsqueeze(2) + turned_half * sin.unsqueeze(2)


def plain(module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return what a decoder layer computes that may be two chains, by its modules."""
    attention = module.self_attn
    normalized = module.input_layernorm(x)
    q, k, v = (
        getattr(attention, name)(normalized).unflatten(-1, (-1, attention.head_dim))
        for name in _PROJECTIONS
    )
    if getattr(attention, "q_norm", None) is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    attended = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=True
    )
    x = x + attention.o_proj(attended.transpose(1, 2).flatten(-2))
    y: torch.Tensor = x + _fed_forward(module.mlp, module.post_attention_layernorm(x))
    return y


def _fed_forward(mlp: Any, x: torch.Tensor) -> Any:
    if isinstance(mlp, torch.nn.Linear):  # stands for another block
        return mlp(x)
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))


def _computes_plainly(module: Any) -> bool:
    """Return whether a decoder layer computes as :func:`plain`, in training too, or a feed-forward
    block so: on five tokens of small sizes, with layers of torch inside.

    Each is asked: a number on the layer, or its place in the model, may choose what a class does.
    """
    options: tuple[bool, ...] = ()
    if looks_like_decoder(module):
        has_norms = getattr(module.self_attn, "q_norm", None) is not None
        options = has_norms, not _obstacle_of_mlp(module.mlp, module.post_attention_layernorm)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(0)  # torch's own function would seed devices too
        return attempt(lambda: _is_plain(module, *options)) is True


def _is_plain(module: Any, *options: Any) -> bool:
    x = torch.randn(2, 5, 8)
    if options:
        small = _small_decoder(module, *options)
        angles = torch.randn(1, 5, 2).repeat(1, 1, 2)
        pair = angles.cos(), angles.sin()
        keywords = {"attention_mask": None, "position_embeddings": pair}
        y, expected = type(module).forward(small, x, **keywords), plain(small, x, *pair)
    else:
        small = _small_mlp(module)
        y, expected = type(module).forward(small, x), _fed_forward(small, x)
    return y.shape == expected.shape and torch.allclose(y, expected, 1e-4, 1e-5)


def _small_decoder(module: Any, has_norms: bool, is_gated: bool) -> Any:
    """Return an object of the class of ``module``, and of those of its blocks, with 2 query heads
    of 4 columns that share keys and values, on the CPU."""
    linear, norm = torch.nn.Linear, torch.nn.RMSNorm
    sizes = {"q_proj": (8, 8), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (8, 8)}
    inside: dict[str, Any] = {name: linear(*size) for name, size in sizes.items()}
    inside |= {name: norm(4, 1e-6) for name in _HEAD_NORMS if has_norms}
    attention = stand_in(module.self_attn, _modules=inside, training=True)
    vars(attention).update(head_dim=4, num_key_value_groups=2, attention_dropout=0.0)
    if hasattr(attention, "config"):
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = "sdpa"
    mlp = _small_mlp(module.mlp) if is_gated else linear(8, 8)
    norms = {name: norm(8, 1e-6) for name in (_FIRST_NORM, _SECOND_NORM)}
    children = {**norms, "self_attn": attention, "mlp": mlp}
    return stand_in(module, _modules=children, training=True)


def _small_mlp(mlp: Any) -> Any:
    columns = {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}
    inside = {name: torch.nn.Linear(*size) for name, size in columns.items()}
    return stand_in(mlp, _modules={**inside, "act_fn": mlp.act_fn}, training=True)


class ConvertedBlock(torch.nn.Module):
    """Base of the converted modules that run as chains where nothing has to be seen."""

    keeps_name = True  # by which frameworks find what to wrap

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute as the module's class does."""
        return in_step(self, self._compute, *arguments, **keywords)

    def _compute(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._in_chains(*arguments, keywords) if len(arguments) == 1 else None
        return super().forward(*arguments, **keywords) if output is None else output

    def _in_chains(self, x: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
        """Return the output, None for a call that the class has to compute."""
        raise NotImplementedError


class ConvertedMLP(ConvertedBlock):
    """Base of a converted gated feed-forward block, which is one chain."""

    def _in_chains(self, x: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
        chain: Splice = vars(self)[_SPLICES]
        return None if keywords else chain.run(x)


class ConvertedDecoder(ConvertedBlock):
    """Base of a converted decoder layer, which is two chains."""

    def _in_chains(self, x: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
        if type(x) is not torch.Tensor or x.dim() != 3:
            return None
        caches = [keywords[name] for name in _CACHES if keywords.get(name) is not None]
        cache = caches[0] if caches else None
        pair, attend = keywords.get("position_embeddings"), _sdpa_of(self)
        # Where transformers hands positions on, another cache takes them.
        is_plain = "cache_position" not in keywords or type(cache).__name__ == "DynamicCache"
        is_plain |= cache is None
        module: Any = self
        attention = module.self_attn
        if pair is None or attend is None or not is_plain:
            return None
        if pair[0].dim() != 3 or pair[0].shape[-1] != attention.head_dim:
            return None  # some elements of a head are rotated, or by other positions
        before, behind = vars(self)[_SPLICES]
        rows = before.run(x)
        if rows is None:
            return None
        by_head = _heads(attention, rows, pair, vars(self)[RECORD].conversion)
        q, k, v = (each.transpose(1, 2) for each in by_head)
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        rest = {name: value for name, value in keywords.items() if name not in _OF_ATTENTION}
        operands = Operands(q, k, v, keywords.get("attention_mask"))
        heads = attended(attention, operands, rest, attend)
        if heads is None:
            dropout = attention.attention_dropout if attention.training else 0.0
            more = {"dropout": dropout, "scaling": attention.scaling, **rest}
            heads = attend(attention, *operands, **more)[0]
        columns = heads.flatten(-2)
        output: torch.Tensor | None = behind.run(columns, x)
        if output is None:
            output = x + attention.o_proj(columns)
        elif isinstance(behind.parts[-1], list):
            return output
        y: torch.Tensor = output + module.mlp(module.post_attention_layernorm(output))
        return y


_OF_ATTENTION = (*_CACHES, "attention_mask", "position_embeddings")


def _sdpa_of(module: Any) -> Any:
    """Return transformers' attention by torch if ``module`` attends by it, else None."""
    config = getattr(module.self_attn, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    return functions["sdpa"]


def _heads(
    attention: Any, rows: Any, pair: tuple[Any, Any], conversion: Conversion
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values ``[b, s, heads, d]`` of the projections ``rows``, the first
    two normalized, if the layer does that, and rotated."""
    counts = [getattr(attention, name).out_features // attention.head_dim for name in _PROJECTIONS]
    # A view: Dynamo cannot trace unflatten under torch's default device.
    by_head = rows.view(*rows.shape[:-1], sum(counts), attention.head_dim)
    q, k, v = by_head.split(counts, -2)
    if torch.is_grad_enabled():
        v = v.contiguous()  # which would hold the others for backward
    has_norms = getattr(attention, "q_norm", None) is not None
    if has_norms:
        q, k = attention.q_norm(q), attention.k_norm(k)
    turn = _turn_of(pair, conversion, attention)
    if turn is None:
        return turned(q, *pair), turned(k, *pair), v
    if has_norms or torch.is_grad_enabled():
        # Each by itself: backward puts the three gradients together once.
        return apply_rotary_pos_emb(q, *turn), apply_rotary_pos_emb(k, *turn), v
    both = apply_rotary_pos_emb(by_head[..., : -counts[-1], :], *turn)
    q, k = torch.split_with_sizes(both, counts[:-1], -2)
    return q, k, v


def _turn_of(
    pair: tuple[torch.Tensor, torch.Tensor], conversion: Conversion, attention: Any
) -> Turn | None:
    """Return what :func:`apply_rotary_pos_emb` takes behind a tensor, by cosines and sines ``[1 or
    b, s, d]``, which the layers of a model get in one forward; None where the two are scaled."""
    cos, sin = pair
    if not conversion.rotates or cos.requires_grad:
        return None
    # A graph keeps nothing from one layer to the next, whose graph may be another: a replay of that
    # would rotate by what the last replay of the first one left.
    if torch.compiler.is_compiling() or is_capturing():
        with torch.no_grad():
            return _turn_by(cos, sin)
    # Writes to the two show in a version, but for those of a replay and of inference mode: a layer
    # that asks again is in the next forward.
    versions = [None if x.is_inference() else x._version for x in pair]
    layer = id(attention)
    sources, earlier, layers, turn = conversion.turn or ((), [], set(), None)
    is_same = all(source() is x for source, x in zip(sources, pair, strict=False))
    if turn is None or versions != earlier or not is_same or layer in layers:
        with torch.inference_mode(False), torch.no_grad():  # a later call may be one of training
            turn, layers = _turn_by(cos, sin), set()
        conversion.turn = [*map(weakref.ref, pair)], versions, layers, turn
    layers.add(layer)
    return turn


def _turn_by(cos: torch.Tensor, sin: torch.Tensor) -> Turn:
    """Return the angles of all sequences, one behind the other, and where several begin."""
    batch, length, _ = cos.shape
    angles = torch.atan2(sin.float(), cos.float()).flatten(0, 1)[:, None, None]
    if batch == 1:
        return angles, "bshd", None
    return angles, "bshd", torch.arange(batch, dtype=torch.int32, device=cos.device) * length


def fuse(model: torch.nn.Module, conversion: Conversion) -> tuple[dict[str, str], dict[str, str]]:
    """Have the decoder layers of ``model``, whose layers are converted, run as two chains, and
    gated feed-forward blocks as one. Return by path what of each does not, empty if all of it does,
    and of the others why they stay apart."""
    conversion.rotates = _rotates(model)
    fused, apart = {}, {}
    inside: set[torch.nn.Module] = set()
    for path, module in model.named_modules():
        is_decoder = looks_like_decoder(module)
        if not (is_decoder or _looks_like_mlp(module)):
            continue
        reason = _obstacle(module) if is_decoder else _obstacle_of_mlp(module)
        if not reason and not _computes_plainly(module):
            reason = "its class computes otherwise"
        if reason:
            apart[path] = reason
        elif is_decoder:
            fused[path] = _adopt(module, conversion)
            inside |= {module.mlp} if not fused[path] else set()
        else:
            splice = Splice(_parts_of(module), (module, module.act_fn))
            _swap(module, ConvertedMLP, splice, conversion)
            if module not in inside:
                fused[path] = ""
    return fused, apart


def _rotates(model: torch.nn.Module) -> bool:
    """Return whether the cosines and sines of ``model`` are known to be those of angles: where its
    rotary embedding is within it, and multiplies them by 1 for every kind of layers."""
    scalings = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("attention_scaling")
    ]
    return bool(scalings) and all(isinstance(s, int | float) and s == 1 for s in scalings)


def _adopt(module: Any, conversion: Conversion) -> str:
    """Have a decoder layer run as two chains; return why its feed-forward block is in none of them,
    empty if it is."""
    attention, mlp, norm = module.self_attn, module.mlp, module.post_attention_layernorm
    projections = tuple([getattr(attention, name) for name in _PROJECTIONS])
    before: list[Part] = [module.input_layernorm, projections]
    behind: list[Part] = [attention.o_proj, AddShape()]
    inside: tuple[torch.nn.Module, ...] = (module, attention)
    blocks = inside
    reason = _obstacle_of_mlp(mlp, norm)
    if not reason:
        behind.append([norm, *_parts_of(mlp)])
        blocks = (*inside, mlp, mlp.act_fn)
    _swap(module, ConvertedDecoder, (Splice(before, inside), Splice(behind, blocks)), conversion)
    return f"but its feed-forward block, as {reason}" if reason else ""


def _parts_of(mlp: Any) -> list[Part]:
    activation = activation_shape(_activation_of(mlp) or "")
    return [(mlp.gate_proj, mlp.up_proj), activation, mlp.down_proj]


def _swap(module: Any, base: type[ConvertedBlock], splices: object, conversion: Conversion) -> None:
    attributes, original = vars(module), type(module)
    attributes[_SPLICES] = splices
    attributes[RECORD] = Record(conversion, original, (_SPLICES,), {})
    module.__class__ = derived(base, original)
