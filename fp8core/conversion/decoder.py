"""Transformer layers of transformers as two chains: norm and projections to queries, keys and
values; output projection, sum, norm and feed-forward block, added to that sum. As one, with
attention between them, where a backend that records runs attends to a call without a mask, a cache
or dropout.

Whoever composes a layer as a row of :mod:`fp8core.conversion.structure` says is found by the names
of its modules, and compared on a few numbers, never known by its class. Another block, as Mixtral's
experts, runs by itself behind the sum. Between the two chains the library rotates queries and keys,
where the layer does, and transformers' own ``sdpa`` attends, or by one query a sequence a kernel.
With another attention, and where somebody has to see a module inside, the layer computes as its
class says.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.chain.activation import activation_shape
from fp8core.chain.attention.shape import AttentionShape
from fp8core.chain.packed_attention import HeadSizes, PackedAttentionShape
from fp8core.chain.residual import AddShape
from fp8core.chain.simple import RotaryShape
from fp8core.conversion.layers import RECORD, Conversion, Converted, Record, derived, in_step
from fp8core.conversion.single_query import (
    Operands,
    SdpaConfig,
    asks_registry,
    attended,
    is_plain_sdpa,
    offer_attention,
    updated,
)
from fp8core.conversion.structure import (
    HEAD_NORMS,
    FeedForward,
    Layer,
    Structure,
    activation_of,
    at,
    block_output,
    computes_plainly,
    containers,
    dropped,
    feed_of,
    inside,
    structure_of,
    summed,
    turned,
)
from fp8core.modules.composition import is_seen
from fp8core.modules.sequences.rotary import apply_rotary_pos_emb
from fp8core.modules.splice import Part, Splice
from fp8core.torch_ops.capture import constant_in_graph
from fp8core.torch_ops.operators import angles_of
from fp8core.torch_ops.private import is_capturing, is_cudnn_attention_enabled, is_deterministic

_CHAINS = "_fp8core_splices"
_CACHES = ("cache", "past_key_values", "past_key_value")
_OF_ATTENTION = (*_CACHES, "attention_mask", "position_embeddings")
_OF_ENCODER = ("encoder_hidden_states", "encoder_attention_mask")

Turn: TypeAlias = "tuple[torch.Tensor, str, torch.Tensor | None]"
"""What :func:`apply_rotary_pos_emb` takes behind a tensor."""


class FeedChains(NamedTuple):
    """The chains of a feed-forward block composed as ``feed``: of all of it, and up to its
    activation, behind which dropout may be active."""

    feed: FeedForward
    whole: Splice
    activated: Splice


class LayerChains(NamedTuple):
    """The chains of a layer composed as ``layer``: in front of attention, behind it, and of its
    feed-forward block with the norm in front; None of what it has not, or what runs by itself.

    ``arguments`` are the names of its positional arguments, ``attention`` the module, ``dropouts``
    all modules for dropout, and ``of_block`` those behind its block and behind the activation in
    that, or None. Where one is another by now, no chain runs. ``whole`` is the first two with
    attention between them.
    """

    layer: Layer
    arguments: tuple[str, ...]
    attention: Any
    dropouts: tuple[torch.nn.Module, ...]
    of_block: tuple[Any, Any]
    before: Splice | None
    behind: Splice
    block: Splice | None
    whole: Splice | None = None


def _obstacle(module: Any, structure: Structure) -> str:
    """Return why ``module`` stays apart, which has the modules of ``structure``; empty if it does
    not."""
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    if isinstance(structure, Layer):
        reason = _obstacle_of_layer(module, structure)
    else:
        reason = _obstacle_of_feed(module, structure)
    if reason or computes_plainly(module, structure):
        return reason
    return "its class computes otherwise"


def _obstacle_of_layer(module: Any, layer: Layer) -> str:
    """Return why a ``layer`` is no chain; empty if it is at least one."""
    besides = inside(module) - {path.split(".")[0] for path in layer.paths}
    if besides:
        return f"it has a {min(besides)} besides"
    if layer.attention:
        paths = [*layer.linears, *filter(None, (layer.norm,))]
        reason = _unlike(module, paths, containers(layer.linears))
        if reason:
            return reason
        attention = at(module, layer.attention)
        for name in layer.numbers:
            number = getattr(attention, name, None)
            if not isinstance(number, int | float | torch.nn.Dropout):
                return f"its attention has no {name}"
    # What no chain of attention goes on to, or goes around, is all of the layer.
    return _obstacle_of_block(module, layer) if layer.last_norm or not layer.attention else ""


def _obstacle_of_block(module: Any, layer: Layer) -> str:
    """Return why the feed-forward block of a ``layer`` is in no chain; empty if it is."""
    feed, mlp = feed_of(module, layer), at(module, layer.mlp)
    if feed is None:
        return f"it is a {type(mlp).__name__}"
    norms = [path for path in (layer.second_norm, layer.last_norm) if path]
    blocks = [layer.mlp] if layer.mlp else []
    reason = _unlike(module, norms, blocks) or _obstacle_of_feed(mlp, feed)
    if reason or layer.feed is not None or computes_plainly(mlp, feed):
        return reason
    return f"its {type(mlp).__name__} computes otherwise"


def _obstacle_of_feed(mlp: Any, feed: FeedForward) -> str:
    """Return why a feed-forward block is no chain; empty if it is."""
    reason = _unlike(mlp, feed.linears, [*containers(feed.paths), feed.activation])
    if reason or _activation_in(mlp, feed):
        return reason
    return f"its activation is {type(at(mlp, feed.activation)).__name__}"


def _activation_in(mlp: Any, feed: FeedForward) -> str | None:
    return activation_of(at(mlp, feed.activation), is_gated=len(feed.first) > 1)


def _unlike(module: Any, layers: Sequence[str], blocks: Sequence[str]) -> str:
    """Return which of ``layers`` is not converted, or has to be seen, as may one of ``blocks``; all
    are paths in ``module``."""
    for path in layers:
        if not isinstance(at(module, path), Converted):
            return f"its {path} is not converted"
    seen = [path for path in (*blocks, *layers) if is_seen(at(module, path))]
    return f"its {seen[0]} has a hook, or a forward of its own" if seen else ""


class ConvertedBlock(torch.nn.Module):
    """Base of the converted modules that run as chains where nothing has to be seen."""

    keeps_name = True  # by which frameworks find what to wrap

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute as the module's class does."""
        return in_step(self, self._compute, *arguments, **keywords)

    def _compute(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._in_chains(arguments, keywords)
        return super().forward(*arguments, **keywords) if output is None else output

    def _in_chains(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> torch.Tensor | None:
        """Return the output, None for a call that the class has to compute."""
        raise NotImplementedError


class ConvertedMLP(ConvertedBlock):
    """Base of a converted feed-forward block, which is one chain."""

    def _in_chains(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> torch.Tensor | None:
        if keywords or len(arguments) != 1:
            return None
        feed, whole, activated = vars(self)[_CHAINS]
        if not _is_dropping(_dropout(self, feed.inner_dropout)):
            y = whole.run(*arguments)
        else:
            y = activated.run(*arguments)
            if y is None or at(self, feed.second).weight.dtype != y.dtype:
                return None
            y = at(self, feed.second)(dropped(self, feed.inner_dropout, y))
        return None if y is None else dropped(self, feed.dropout, y)


class ConvertedAttention(ConvertedBlock):
    """Base of an attention of transformers in a layer that runs by its modules: ``sdpa`` attends by
    a kernel to one query a sequence."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Have the registry of the process know what attends, that of a pickle's as well."""
        super().__init_subclass__(**keywords)
        offer_attention()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the config of a pickle that has it under its own name as well."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if "config" in vars(self):
            self.config = vars(self).pop("config")

    # Not in the attribute that this hides: Dynamo of torch 2.11 reads a module's ``__dict__`` by
    # its properties, and so would come here again.
    @property
    def config(self) -> SdpaConfig:
        """The model's config, but for what attends."""
        return SdpaConfig(getattr(self, RECORD).hidden["config"])

    @config.setter
    def config(self, value: Any) -> None:
        vars(self)[RECORD].hidden["config"] = value

    def _in_chains(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> torch.Tensor | None:
        return None


class ConvertedDecoder(ConvertedBlock):
    """Base of a converted layer, which is two chains, or a residual block, which is one."""

    def _in_chains(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> torch.Tensor | None:
        chains: LayerChains = vars(self)[_CHAINS]
        if len(arguments) != 1:
            if not arguments or len(arguments) > len(chains.arguments):
                return None
            keywords = {**dict(zip(chains.arguments[1:], arguments[1:], strict=False)), **keywords}
        x = arguments[0]
        if type(x) is not torch.Tensor or x.dim() != 3:
            return None
        if chains.before is None:
            return None if keywords else self._behind(chains, x)
        is_dropping = any([_is_dropping(dropout) for dropout in chains.dropouts])
        total = None if is_dropping else self._whole(chains, x, keywords)
        if total is not None:
            return total if chains.block is not None else self._fed(chains, total)
        columns = self._attend(chains, x, keywords)
        return None if columns is None else self._behind(chains, columns, x)

    def _whole(
        self, chains: LayerChains, x: torch.Tensor, keywords: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return what all chains of the layer return for ``x [b, s, h]``, None unless attention is
        one of them in this call."""
        whole, pair, attention = chains.whole, keywords.get("position_embeddings"), chains.attention
        if whole is None or not _is_left_to_backends():
            return None
        shape = whole.attention
        assert shape is not None
        _, scaling, dropout = [getattr(attention, name) for name in chains.layer.numbers]
        is_causal = keywords.get("is_causal")
        if is_causal is None:
            is_causal = getattr(attention, "is_causal", True)
        sharing = shape.heads.num_heads // shape.heads.num_groups
        now = scaling, is_causal, getattr(attention, "num_key_value_groups", sharing)
        if (shape.attention.scale, shape.attention.window[1] == 0, sharing) != now:
            return None
        if attention.training and _probability(dropout):
            return None
        without = {**keywords, "position_embeddings": None, "is_causal": None}
        if not is_plain_sdpa(_sdpa_of(attention), without) or not whole.may_attend(x):
            return None
        if shape.rotation is None:
            return whole.run(x) if pair is None else None
        if pair is None or pair[0].shape != (1, x.shape[1], shape.heads.head_dim):
            return None
        module: Any = self
        conversion = vars(module)[RECORD].conversion
        turn = _turn_of(pair, conversion, attention)
        total = None if turn is None else whole.run(x, turn[0])
        if torch.compiler.is_compiling():  # where no layer has a turn from another
            return total
        if total is None and conversion.turn is not None:
            conversion.turn[2].discard(id(attention))  # it asks again in this forward
        return total

    def _attend(
        self, chains: LayerChains, x: torch.Tensor, keywords: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return what attention returns for ``x [b, s, h]``, before it is projected."""
        layer, attention = chains.layer, chains.attention
        caches = [keywords[name] for name in _CACHES if keywords.get(name) is not None]
        cache = caches[0] if caches else None
        pair, attend = keywords.get("position_embeddings"), _sdpa_of(attention)
        # Where transformers hands positions on, another cache takes them; one of an encoder's keys
        # and values holds another.
        is_plain = "cache_position" not in keywords or type(cache).__name__ == "DynamicCache"
        is_plain = (is_plain or cache is None) and not hasattr(cache, "is_updated")
        if attend is None or not is_plain or (pair is not None) is not layer.rotates:
            return None
        if any([keywords.get(name) is not None for name in _OF_ENCODER]):
            return None
        columns, scaling, dropout = [getattr(attention, name) for name in layer.numbers]
        if pair is not None and (pair[0].dim() != 3 or pair[0].shape[-1] != columns):
            return None  # some elements of a head are rotated, or by other positions
        assert chains.before is not None
        rows = chains.before.run(x)
        if rows is None:
            return None
        module: Any = self
        heads = _heads(attention, rows, layer, pair, vars(module)[RECORD].conversion)
        q, k, v = (each.transpose(1, 2) for each in heads)
        if cache is not None:
            k, v = updated(cache, k, v, attention.layer_idx)
        excluded = (*_OF_ATTENTION, *_OF_ENCODER)
        rest = {name: value for name, value in keywords.items() if name not in excluded}
        operands = Operands(q, k, v, keywords.get("attention_mask"))
        probability = _probability(dropout) if attention.training else 0.0
        result = None if probability else attended(attention, operands, scaling, rest, attend)
        if result is None:
            more = {"dropout": probability, "scaling": scaling, **rest}
            result = attend(attention, *operands, **more)[0]
        return result.flatten(-2)

    def _behind(self, chains: LayerChains, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the output for what attention returned, if the layer attends, and its input."""
        layer, total = chains.layer, tensors[-1]
        is_dropping = any([_is_dropping(dropout) for dropout in chains.dropouts])
        output = None if is_dropping else chains.behind.run(*tensors)
        if output is not None:
            if chains.block is not None:
                return output
            total = output
        elif layer.attention:
            projected = at(self, layer.output)(tensors[0])
            total = total + dropped(self, layer.dropouts[0], projected)
            total = at(self, layer.second_norm)(total) if layer.last_norm else total
        return self._fed(chains, total)

    def _fed(self, chains: LayerChains, total: torch.Tensor) -> torch.Tensor:
        """Return the output for the sum behind attention."""
        layer = chains.layer
        behind, within = chains.of_block
        fed = None if chains.block is None or _is_dropping(within) else chains.block.run(total)
        if fed is None:
            normalized = total if layer.last_norm else at(self, layer.second_norm)(total)
            fed = block_output(self, layer, normalized)
        elif behind is not None:
            fed = behind(fed)
        return summed(self, layer, fed, total)


def _probability(dropout: float | torch.nn.Dropout) -> float:
    return dropout.p if isinstance(dropout, torch.nn.Dropout) else dropout


def _is_left_to_backends() -> bool:
    """Return whether attention is neither by one of torch's kernels nor by torch's rules; a graph
    has that of its capture, but the rules guard it."""
    return is_cudnn_attention_enabled() and not is_deterministic()


constant_in_graph(_is_left_to_backends)


def _is_dropping(dropout: Any) -> bool:
    """Return whether the module ``dropout``, None if there is none, has to run in this call: one of
    torch that draws numbers, and any other."""
    kind = type(dropout)
    if kind is torch.nn.Dropout:
        return bool(dropout.training and dropout.p > 0)
    return dropout is not None and kind is not torch.nn.Identity


def _sdpa_of(attention: Any) -> Any:
    """Return transformers' attention by torch if ``attention`` is by it, else None."""
    config = getattr(attention, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    return functions["sdpa"]


def _heads(
    attention: Any, rows: Any, layer: Layer, pair: tuple[Any, Any] | None, conversion: Conversion
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values ``[b, s, heads, d]`` of the projections ``rows``, the first
    two normalized and rotated, if the layer does that."""
    columns = getattr(attention, layer.numbers[0])
    counts = [getattr(attention, name).out_features // columns for name in layer.projections]
    if len(counts) == 1:
        counts = [counts[0] // 3] * 3
    # A view: Dynamo cannot trace unflatten under torch's default device.
    by_head = rows.view(*rows.shape[:-1], sum(counts), columns)
    q, k, v = by_head.split(counts, -2)
    if pair is None:
        return q, k, v
    if torch.is_grad_enabled():
        v = v.contiguous()  # which would hold the others for backward
    has_norms = getattr(attention, HEAD_NORMS[0], None) is not None
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
    if cos.requires_grad or sin.requires_grad:
        return None
    # A graph keeps nothing from one layer to the next, whose graph may be another: a replay of that
    # would rotate by what the last replay of the first one left.
    if torch.compiler.is_compiling() or is_capturing():
        with torch.no_grad():
            return _turn_by(cos, sin) if conversion.rotates() else None
    # Writes to the two show in a version, but for those of a replay and of inference mode: a layer
    # that asks again is in the next forward.
    versions = [None if x.is_inference() else x._version for x in pair]
    layer = id(attention)
    sources, earlier, layers, turn = conversion.turn or ((), [], set(), None)
    is_same = all(source() is x for source, x in zip(sources, pair, strict=False))
    if turn is None or versions != earlier or not is_same or layer in layers:
        if not conversion.rotates():
            return None
        with torch.inference_mode(False), torch.no_grad():  # a later call may be one of training
            turn, layers = _turn_by(cos, sin), set()
        conversion.turn = [*map(weakref.ref, pair)], versions, layers, turn
    layers.add(layer)
    return turn


def _turn_by(cos: torch.Tensor, sin: torch.Tensor) -> Turn:
    """Return the angles of all sequences, one behind the other, and where several begin."""
    batch, length, _ = cos.shape
    angles = angles_of(cos, sin).flatten(0, 1)[:, None, None]
    if batch == 1:
        return angles, "bshd", None
    return angles, "bshd", torch.arange(batch, dtype=torch.int32, device=cos.device) * length


def fuse(model: torch.nn.Module, conversion: Conversion) -> Iterator[dict[str, str]]:
    """Have the layers of ``model``, whose linears and norms are converted, run as two chains, and
    feed-forward blocks as one. Yield by path what of each does not, empty if all of it does; of the
    others why they stay apart; and the attentions of other layers with a kernel for one query,
    with what they lack for it."""
    conversion.rotaries = _rotaries(model)
    fused, apart = {}, {}
    accepted: list[tuple[Any, Structure, str]] = []
    within: set[torch.nn.Module] = set()
    for path, module in model.named_modules():
        structure = structure_of(module)
        if structure is None:
            continue
        reason = _obstacle(module, structure)
        if reason:
            apart[path] = reason
            continue
        if isinstance(structure, Layer):
            reason = _obstacle_of_block(module, structure)
            fused[path] = f"but its feed-forward block, as {reason}" if reason else ""
            within |= {at(module, structure.mlp)} if not reason else set()
        elif module not in within:
            fused[path] = ""
        accepted.append((module, structure, reason))
    # The inner ones first: the splice of a layer notes the classes of those within.
    for module, structure, reason in reversed(accepted):
        if isinstance(structure, Layer):
            _adopt(module, structure, conversion, has_block=not reason)
        else:
            blocks = (module, *_at(module, structure.rest))
            parts = _parts_of(module, structure)
            chains = FeedChains(structure, Splice(parts, blocks), Splice(parts[:-1], blocks))
            _swap(module, ConvertedMLP, chains, conversion)
    yield from (fused, apart)
    layers = [(module, each) for module, each, _ in accepted if isinstance(each, Layer)]
    within = {at(module, layer.attention) for module, layer in layers if layer.attention}
    yield _decoding(model, within, conversion)


def _decoding(
    model: torch.nn.Module, fused: Collection[torch.nn.Module], conversion: Conversion
) -> dict[str, str]:
    """Give the attentions of ``model`` but those ``fused``, of which something is converted, the
    kernel for one query. Return by path what each lacks for it."""
    reasons = {}
    for path, module in model.named_modules():
        is_converted = any(isinstance(child, Converted) for child in module.children())
        if module in fused or not (is_converted and asks_registry(module)):
            continue
        name = getattr(vars(module)["config"], "_attn_implementation", None)
        reasons[path] = "" if name == "sdpa" else f"once it attends by sdpa, now by {name}"
        _swap(module, ConvertedAttention, None, conversion, hidden=("config",))
    return reasons


class _Rotary:
    """A rotary embedding and where a model has it, neither of which it keeps alive; a copy does not
    know the place."""

    def __init__(
        self, module: torch.nn.Module | None, owner: torch.nn.Module | None = None, name: str = ""
    ) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._owner = None if owner is None else weakref.ref(owner)
        self._kind, self._name = type(module), name

    def __reduce__(self) -> Any:
        return _Rotary, (None if self._module is None else self._module(),)

    def is_of_angles(self) -> bool:
        """Return whether its cosines and sines are those of angles: whether it is still there, of
        its class, unseen, and multiplies them by 1 for every kind of layers."""
        module = None if self._module is None else self._module()
        if module is None or type(module) is not self._kind or is_seen(module):
            return False
        if self._owner is not None:
            owner = self._owner()
            if owner is None or owner._modules.get(self._name) is not module:
                return False
        scalings = [vars(module)[name] for name in _scalings_in(module)]
        return all(isinstance(s, int | float) and s == 1 for s in scalings)


def _scalings_in(module: torch.nn.Module) -> list[str]:
    return [name for name in vars(module) if name.endswith("attention_scaling")]


def _rotaries(model: torch.nn.Module) -> list[_Rotary]:
    """Return the rotary embeddings in ``model``: what scales cosines and sines."""
    rotaries = {module: _Rotary(module) for module in model.modules() if _scalings_in(module)}
    for owner in model.modules():
        for name, child in owner.named_children():
            if child in rotaries:
                rotaries[child] = _Rotary(child, owner, name)
    return [*rotaries.values()]


def _adopt(module: Any, layer: Layer, conversion: Conversion, *, has_block: bool) -> None:
    """Have a layer run as two chains, with its feed-forward block if it ``has_block`` for that."""
    mlp, feed = at(module, layer.mlp), None
    second_norm = at(module, layer.second_norm)
    blocks = [module, *_at(module, containers(layer.paths))]
    before, block, of_block = None, None, (None, None)
    behind: list[Part] = []
    branch: list[Part] = []
    if layer.attention:
        *projections, output = _at(module, layer.linears)
        first = _at(module, [layer.norm] if layer.norm else [])
        before = Splice([*first, _together(projections)], (*blocks,))
        behind += [output, AddShape()]
        attends = _attention_of(at(module, layer.attention), layer)
        branch = [] if attends is None else [*first, _together(projections), attends, output]
    blocks += _at(module, filter(None, layer.dropouts))
    if has_block:
        feed = feed_of(module, layer)
        assert feed is not None
        parts = _parts_of(mlp, feed)
        blocks += [*([mlp] if layer.mlp else []), *_at(mlp, feed.rest)]
        if layer.last_norm:
            behind += [second_norm, parts, at(module, layer.last_norm)]
        else:
            parts = [second_norm, *parts]
            behind.append(parts)
        block = Splice(parts, blocks)
        of_block = _dropout(mlp, feed.dropout), _dropout(mlp, feed.inner_dropout)
    dropouts = *(_dropout(module, path) for path in layer.dropouts), *of_block
    names = (*inspect.signature(type(module).forward).parameters,)[1:]
    chains = LayerChains(
        layer,
        names,
        at(module, layer.attention),
        tuple(each for each in dropouts if each is not None),
        of_block,
        before,
        Splice(behind, blocks),
        block,
        Splice([branch, *behind[2:]], blocks) if branch else None,
    )
    _swap(module, ConvertedDecoder, chains, conversion)


def _at(module: Any, paths: Iterable[str]) -> list[Any]:
    return [at(module, path) for path in paths]


def _dropout(module: Any, path: str) -> Any:
    return at(module, path) if path else None


def _together(linears: Sequence[Any]) -> Part:
    return tuple(linears) if len(linears) > 1 else linears[0]


def _parts_of(mlp: Any, feed: FeedForward) -> list[Part]:
    activation = activation_shape(_activation_in(mlp, feed) or "")
    return [_together(_at(mlp, feed.first)), activation, at(mlp, feed.second)]


def _attention_of(attention: Any, layer: Layer) -> PackedAttentionShape | None:
    """Return what the module ``attention`` computes between its projections; None where it does
    more than rotate and attend, or not by numbers."""
    columns, scaling, _ = [getattr(attention, name) for name in layer.numbers]
    counts = [getattr(attention, name).out_features // columns for name in layer.projections]
    heads, groups, *values = [counts[0] // 3] * 3 if len(counts) == 1 else counts
    is_plain = getattr(attention, HEAD_NORMS[0], None) is None and values == [groups]
    if not is_plain or heads % groups or not isinstance(scaling, float):
        return None
    window = -1, 0 if getattr(attention, "is_causal", True) else -1
    shape = AttentionShape("bshd", heads, groups, columns, columns, scaling, window)
    rotation = RotaryShape("bshd") if layer.rotates else None
    return PackedAttentionShape(shape, HeadSizes(heads, groups, columns, False), rotation)


def _swap(
    module: Any,
    base: type[ConvertedBlock],
    chains: object,
    conversion: Conversion,
    hidden: Sequence[str] = (),
) -> None:
    attributes, original = vars(module), type(module)
    attributes[_CHAINS] = chains
    values = {name: attributes.pop(name) for name in hidden}
    attributes[RECORD] = Record(conversion, original, (_CHAINS,), values)
    module.__class__ = derived(base, original)
