"""How Transformer layers are composed: where their modules lie, by family, and what they compute.

A row of a table says paths and no more. Whether an object computes what :func:`plain` or
:func:`fed_forward` say is tried on a few numbers, in training too: a number on a layer, or its
place in the model, may choose what a class does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from fp8core.conversion.layers import stand_in
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.torch_ops.private import without_modes

HEAD_NORMS = ("q_norm", "k_norm")
_P = 0.25  # of every dropout, where two layers are compared


class FeedForward(NamedTuple):
    """The paths of a feed-forward block: of its first linears, the gate in front, its activation,
    its second linear, and of dropouts behind the second and behind the activation."""

    first: tuple[str, ...]
    activation: str
    second: str
    dropout: str = ""
    inner_dropout: str = ""

    @property
    def linears(self) -> tuple[str, ...]:
        """The paths of the linears."""
        return (*self.first, self.second)

    @property
    def rest(self) -> tuple[str, ...]:
        """The paths of the activation and of dropouts."""
        return (*filter(None, (self.activation, self.dropout, self.inner_dropout)),)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all modules."""
        return (*self.linears, *self.rest)


class Layer(NamedTuple):
    """The paths of a layer: attention, added to its input, and a feed-forward block, added to that.

    Attributes:
        mlp: the feed-forward block; empty where its parts lie in the layer, as ``feed`` says.
        second_norm: behind the first sum, whose result only the block takes unless there is a
            ``last_norm`` behind the second sum.
        attention: projects and attends; a layer without is the block alone.
        norm: in front of attention.
        projections: in ``attention``; one gives queries, keys and values in a row.
        output: the projection of what was attended to.
        dropouts: behind ``output`` and the block, outside of ``mlp``.
        numbers: the attributes of ``attention`` that say the columns of a head, the scale of scores
            and the probability of dropout, or its module.
        rotates: whether it rotates queries and keys by the cosines and sines that it is given.
    """

    mlp: str
    second_norm: str
    attention: str = ""
    norm: str = ""
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = ""
    dropouts: tuple[str, str] = ("", "")
    numbers: tuple[str, str, str] = ("head_dim", "scaling", "attention_dropout")
    rotates: bool = False
    feed: FeedForward | None = None
    last_norm: str = ""

    @property
    def linears(self) -> tuple[str, ...]:
        """The paths of the projections around attention."""
        projections = [f"{self.attention}.{name}" for name in self.projections]
        return (*projections, self.output) if self.attention else ()

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of the norms."""
        return (*filter(None, (self.norm, self.second_norm, self.last_norm)),)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all modules."""
        feed = self.mlp if self.feed is None else ""
        inside = (*self.linears, *self.norms, *self.dropouts, feed)
        return (*filter(None, inside), *(() if self.feed is None else self.feed.paths))


LAYERS = (
    Layer(  # Llama, and most that came behind
        *("mlp", "post_attention_layernorm", "self_attn", "input_layernorm"),
        output="self_attn.o_proj",
        rotates=True,
    ),
    Layer(  # GPT-2
        *("mlp", "ln_2", "attn", "ln_1", ("c_attn",), "attn.c_proj"),
        dropouts=("attn.resid_dropout", ""),
        numbers=("head_dim", "scaling", "attn_dropout"),
    ),
    Layer(  # ViT
        *("mlp", "layernorm_after", "attention", "layernorm_before"),
        output="attention.o_proj",
        dropouts=("dropout", "dropout"),
    ),
    Layer(  # CLIP, SigLIP
        *("mlp", "layer_norm2", "self_attn", "layer_norm1"),
        output="self_attn.out_proj",
        numbers=("head_dim", "scale", "dropout"),
    ),
    Layer(  # BERT, RoBERTa: sums are normalized
        *("", "attention.output.LayerNorm", "attention.self", ""),
        *(("query", "key", "value"), "attention.output.dense"),
        dropouts=("attention.output.dropout", ""),
        numbers=("attention_head_size", "scaling", "dropout"),
        feed=FeedForward(
            *(("intermediate.dense",), "intermediate.intermediate_act_fn", "output.dense"),
            dropout="output.dropout",
        ),
        last_norm="output.LayerNorm",
    ),
    Layer("DenseReluDense", "layer_norm", dropouts=("", "dropout")),  # T5, without its attention
)
FEED_FORWARDS = (
    FeedForward(("gate_proj", "up_proj"), "act_fn", "down_proj"),
    FeedForward(("c_fc",), "act", "c_proj", dropout="dropout"),
    FeedForward(("fc1",), "activation_fn", "fc2"),
    FeedForward(("wi",), "act", "wo", inner_dropout="dropout"),
    FeedForward(("wi_0", "wi_1"), "act", "wo", inner_dropout="dropout"),
)
Structure: TypeAlias = Layer | FeedForward


def at(module: Any, path: str) -> Any:
    """Return the module at ``path`` in ``module``; an empty one is ``module``."""
    return attrgetter(path)(module) if path else module


def inside(module: torch.nn.Module) -> set[str]:
    """Return the names of the modules in ``module``, without those that are None."""
    return {name for name, _ in module.named_children()}


def containers(paths: Iterable[str]) -> list[str]:
    """Return the paths of the modules that hold those at ``paths``, each once."""
    words = [path.split(".") for path in paths]
    return [*dict.fromkeys(".".join(each[:end]) for each in words for end in range(1, len(each)))]


def structure_of(module: torch.nn.Module) -> Structure | None:
    """Return the row whose modules ``module`` has, by their names."""
    children = inside(module)
    for feed in FEED_FORWARDS:
        if children == {*feed.paths}:
            return feed
    for layer in LAYERS:
        starts = {path.split(".")[0] for path in layer.paths}
        if children >= starts and all(_has_module(module, path) for path in layer.paths):
            return layer
    return None


def _has_module(module: torch.nn.Module, path: str) -> bool:
    return isinstance(attempt(lambda: at(module, path)), torch.nn.Module)


def feed_of(module: torch.nn.Module, layer: Layer) -> FeedForward | None:
    """Return where the parts of the feed-forward block of ``module`` lie in that block; None of an
    unknown one."""
    if layer.feed is not None:
        return layer.feed
    feed = structure_of(at(module, layer.mlp))
    return feed if isinstance(feed, FeedForward) else None


@without_modes()  # of FakeTensorMode too, in which nothing can be compared
def activation_of(act: Any, *, is_gated: bool) -> str | None:
    """Return the name here of the activation that ``act`` computes, None if there is none."""
    x = torch.linspace(-4, 4, 33, device="cpu", dtype=torch.float64)
    x = torch.cat((x, 15e3 * x))  # as some have a limit
    with torch.no_grad():
        y = attempt(lambda: act(x))
    if isinstance(y, Failure) or not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    values = {
        ("silu", "swiglu"): functional.silu(x),
        ("gelu", "geglu"): functional.gelu(x, approximate="tanh"),
        ("erfgelu", ""): functional.gelu(x),
        ("relu", "reglu"): functional.relu(x),
        ("qgelu", "qgeglu"): x * torch.sigmoid(1.702 * x),
    }
    names = [n for n, value in values.items() if torch.allclose(y.double(), value, 1e-6, 1e-7)]
    return (names[0][is_gated] or None) if names else None


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the heads of ``x [b, s, heads, d]`` rotated as transformers' Llama does, rounded after
    each operation; ``cos`` and ``sin`` are ``[1 or b, s, d]``."""
    first, second = x.chunk(2, -1)
    turned_half = torch.cat((-second, first), -1)
    return x * cos.unsqueeze(2) + turned_half * sin.unsqueeze(2)


def plain(module: Any, layer: Layer, x: torch.Tensor, pair: Any = None) -> torch.Tensor:
    """Return what ``module`` computes if it may run as chains, by its modules; ``pair`` are cosines
    and sines."""
    y = x
    if layer.attention:
        attention = at(module, layer.attention)
        normalized = at(module, layer.norm)(x) if layer.norm else x
        columns, scaling, dropout = (getattr(attention, name) for name in layer.numbers)
        rows = [getattr(attention, name)(normalized) for name in layer.projections]
        if len(rows) == 1:
            rows = [*rows[0].chunk(3, -1)]
        q, k, v = (each.unflatten(-1, (-1, columns)) for each in rows)
        if getattr(attention, HEAD_NORMS[0], None) is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        if pair is not None:
            q, k = turned(q, *pair), turned(k, *pair)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attended = functional.scaled_dot_product_attention(
            *(q, k, v, None, getattr(dropout, "p", dropout)),
            is_causal=getattr(attention, "is_causal", True),
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        y = at(module, layer.output)(attended.transpose(1, 2).flatten(-2))
        y = x + dropped(module, layer.dropouts[0], y)
    normalized = at(module, layer.second_norm)(y)
    fed = block_output(module, layer, normalized)
    return summed(module, layer, fed, normalized if layer.last_norm else y)


def block_output(module: Any, layer: Layer, x: torch.Tensor) -> Any:
    """Return what the feed-forward block of a layer computes, by its modules."""
    return at(module, layer.mlp)(x) if layer.feed is None else fed_forward(module, layer.feed, x)


def summed(module: Any, layer: Layer, fed: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the output of a layer, whose block computes ``fed``, which is added to ``total``."""
    total = total + dropped(module, layer.dropouts[1], fed)
    return at(module, layer.last_norm)(total) if layer.last_norm else total


def fed_forward(module: Any, feed: FeedForward, x: torch.Tensor) -> Any:
    """Return what a feed-forward block computes, by its modules."""
    y, *factors = (at(module, path)(x) for path in feed.first)
    y = at(module, feed.activation)(y)
    for factor in factors:
        y = y * factor
    y = at(module, feed.second)(dropped(module, feed.inner_dropout, y))
    return dropped(module, feed.dropout, y)


def dropped(module: Any, path: str, x: torch.Tensor) -> torch.Tensor:
    """Return what the dropout at ``path`` makes of ``x``: ``x`` where there is none."""
    y: torch.Tensor = at(module, path)(x) if path else x
    return y


@without_modes()
def computes_plainly(module: Any, structure: Structure) -> bool:
    """Return whether ``module`` computes as its ``structure`` says: on five tokens of small sizes,
    in training, with layers of torch and dropout inside."""
    has_math = torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_math_sdp(True)  # on CPUs too: sdpa_kernel may leave them no kernel
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            return attempt(lambda: _is_plain(module, structure)) is True
    finally:
        torch.backends.cuda.enable_math_sdp(has_math)


def _is_plain(module: Any, structure: Structure) -> bool:
    seed = torch.default_generator.manual_seed  # torch's own function would seed devices too
    seed(0)
    x = torch.randn(2, 5, 8) * torch.tensor([1.0, 1e3])[:, None, None]  # as some clamp
    keywords: dict[str, Any] = {}
    pair: Any = None
    small: Any
    if isinstance(structure, FeedForward):
        small = _with_parts(module, _small_feed(module, structure))
    else:
        small = _small_layer(module, structure)
        if structure.rotates:
            angles = torch.randn(1, 5, 2).repeat(1, 1, 2)
            pair = keywords["position_embeddings"] = angles.cos(), angles.sin()
        if structure.attention:
            keywords["attention_mask"] = None
    seed(1)
    y = type(module).forward(small, x, **keywords)
    seed(1)
    if isinstance(structure, FeedForward):
        expected = fed_forward(small, structure, x)
    else:
        expected = plain(small, structure, x, pair)
    return y.shape == expected.shape and torch.allclose(y, expected, 1e-4, 1e-5)


def _small_layer(module: Any, layer: Layer) -> Any:
    """Return an object of the class of ``module``, and of those of its blocks, with 2 query heads
    of 4 columns, which share keys and values where heads may, on the CPU."""
    parts: dict[str, Any] = {path: torch.nn.RMSNorm(8, 1e-6) for path in layer.norms}
    parts |= {path: torch.nn.Dropout(_P) for path in layer.dropouts if path}
    feed = feed_of(module, layer)
    if feed is None:
        parts[layer.mlp] = torch.nn.Linear(8, 8)
    else:
        prefix = f"{layer.mlp}." if layer.mlp else ""
        fed = _small_feed(at(module, layer.mlp), feed)
        parts |= {prefix + path: part for path, part in fed.items()}
    if not layer.attention:
        return _with_parts(module, parts)
    attention = at(module, layer.attention)
    shared = 4 if hasattr(attention, "num_key_value_groups") else 8
    widths = (24,) if len(layer.projections) == 1 else (8, shared, shared)
    for name, width in zip(layer.projections, widths, strict=True):
        parts[f"{layer.attention}.{name}"] = torch.nn.Linear(8, width)
    parts[layer.output] = torch.nn.Linear(8, 8)
    norms = [name for name in HEAD_NORMS if getattr(attention, name, None) is not None]
    parts |= {f"{layer.attention}.{name}": torch.nn.RMSNorm(4, 1e-6) for name in norms}
    small = _with_parts(module, parts)
    attention = at(small, layer.attention)
    columns, _, dropout = layer.numbers
    sizes: dict[str, float] = {columns: 4, "num_key_value_groups": 2, "split_size": 8}
    if dropout in attention._modules:
        attention._modules[dropout] = torch.nn.Dropout(_P)
    else:
        sizes[dropout] = _P
    vars(attention).update(sizes)
    if hasattr(attention, "config"):
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = "sdpa"
    return small


def _small_feed(module: Any, feed: FeedForward) -> dict[str, Any]:
    """Return the parts of a feed-forward block of 8 and 12 columns, with the own activation."""
    parts: dict[str, Any] = {path: torch.nn.Linear(8, 12) for path in feed.first}
    parts |= {feed.second: torch.nn.Linear(12, 8), feed.activation: at(module, feed.activation)}
    dropouts = feed.dropout, feed.inner_dropout
    return parts | {path: torch.nn.Dropout(_P) for path in dropouts if path}


def _with_parts(module: Any, parts: Mapping[str, Any]) -> Any:
    """Return an object like ``module``, in training, with others at the paths of ``parts``."""
    modules: dict[str, Any] = dict(module._modules)
    for name in {path.split(".")[0] for path in parts}:
        start = f"{name}."
        below = {p.removeprefix(start): part for p, part in parts.items() if p.startswith(start)}
        modules[name] = _with_parts(modules[name], below) if below else parts[name]
    return stand_in(module, _modules=modules, training=True)
