"""Weights and sizes of Hugging Face's Llama and GPT-2 as those of TransformerLayers, both ways.

A model of TransformerLayers has no class of its own here; the names of its parameters are

=========================  =======================================================
``embedding.weight``       ``embed_tokens`` of Llama, ``wte`` of GPT-2
``positions.weight``       ``wpe`` of GPT-2; Llama has rotary embeddings
``layers.N.*``             a :class:`fp8core.TransformerLayer`, N from 0
``norm.weight, .bias``     the norm before the head
``head.weight``            ``lm_head``, which may be the embedding's weight
=========================  =======================================================

``docs/examples/decoder.py`` is such a model. Nothing is imported from ``transformers``: a config is
one of its objects, or the content of a ``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.head_split import HeadSizes, join_query_key_value, separate_query_key_value
from fp8core.reporting import some
from fp8core.tensors.slots import BUFFERS

__all__ = ["from_hugging_face", "layer_arguments", "rotary_arguments", "to_hugging_face"]

_QKV = "self_attention.layernorm_qkv"
_MLP = "layernorm_mlp"
_LLAMA_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "relu": "reglu",
    "gelu_new": "geglu",
    "gelu_pytorch_tanh": "geglu",
}
_GPT2_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Buffers of older versions of transformers, which are computed again.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")


_Shape: TypeAlias = tuple[int | None, ...]


class _Rule(NamedTuple):
    """Tensors that hold the same rows: ``ours`` after each other are ``theirs`` after each other,
    of which each is transposed if ``transposed``. ``sizes`` are the rows of the more numerous."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class _Family:
    """How one family of models names its parameters.

    ``prefix`` is what a model with a head puts before the names of the model without one;
    ``layers`` comes before a layer's number.
    """

    prefix: str
    layers: str
    layer: tuple[_Rule, ...]
    outer: tuple[_Rule, ...]
    head_sizes: HeadSizes


def layer_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of :class:`fp8core.TransformerLayer` for a layer of the model.

    ``config`` is that of a Llama or a GPT-2. ``layer_number`` and dtypes are left to the caller,
    who may also add ``fuse_qkv_params=True``.

    >>> config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "resid_pdrop": 0.0}
    >>> layer_arguments(config)["ffn_hidden_size"]
    256

    Raises:
        UnsupportedError: another family of models, or an option that a TransformerLayer does not
            have; names it.
    """
    get = _reader(config)
    if _family_name(config) == "llama":
        return _llama_arguments(get)
    return _gpt2_arguments(get)


def rotary_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of :class:`fp8core.RotaryPositionEmbedding` for a Llama.

    Raises:
        UnsupportedError: a GPT-2, which has none, or scaled embeddings other than ``"linear"``.
    """
    if _family_name(config) != "llama":
        raise UnsupportedError("rotary_arguments: a GPT-2 embeds positions; it turns no heads.")
    get = _reader(config)
    # Up to transformers 4 `rope_theta` and `rope_scaling`, from 5 on `rope_parameters`.
    rope = get("rope_parameters", None) or get("rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear"):
        raise UnsupportedError(
            f"rotary_arguments: rope_type={kind!r} is not offered; RotaryPositionEmbedding has "
            f"'default' and 'linear'. Pass other angles as rotary_pos_emb, float32 "
            f"[positions, 1, 1, head size]."
        )
    arguments = {
        "dim": _llama_sizes(get).head_dim,
        "rotary_base": rope.get("rope_theta", get("rope_theta", 10000.0)),
    }
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = rope["factor"]
        # Beyond this times the factor the module would stretch positions further.
        arguments["pretrained_max_position_embeddings"] = get("max_position_embeddings", 2048)
    return arguments


def from_hugging_face(
    state_dict: Mapping[str, torch.Tensor],
    config: Any,
    *,
    fuse_qkv_params: bool = False,
    qkv_weight_interleaved: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the parameters of a model of TransformerLayers; see the module for their names.

    Args:
        state_dict: of a model with or without a head; its tensors are not written, and the result
            may share their memory. The head may be missing where the config ties it to the
            embedding.
        config: its config.
        fuse_qkv_params, qkv_weight_interleaved: as in :class:`fp8core.TransformerLayer`.

    Raises:
        OperandError: tensors that are missing, too many, or of other shapes than the config's.
        UnsupportedError: see :func:`layer_arguments`.
    """
    family = _family(config)
    short = {
        name.removeprefix(family.prefix): value
        for name, value in state_dict.items()
        if not _COMPUTED.search(name)
    }
    (embedding,) = (rule.theirs[0] for rule in family.outer if rule.ours == ("embedding.weight",))
    is_tied = _reader(config)("tie_word_embeddings", _family_name(config) == "gpt2")
    if is_tied and "lm_head.weight" not in short and embedding in short:
        short["lm_head.weight"] = short[embedding]
    ours: dict[str, torch.Tensor] = {}
    shapes = _shapes(family, config)
    for rule in _rules(family, _reader(config)):
        values = _taken(short, rule.theirs, "from_hugging_face", family.prefix)
        for name, value, shape in zip(
            rule.theirs, values, _their_shapes(rule, shapes), strict=True
        ):
            _check_shape("from_hugging_face", _full(name, family.prefix), value, shape)
        if rule.transposed:
            values = [value.mT if value.dim() == 2 else value for value in values]
        ours.update(zip(rule.ours, _parted(values, rule), strict=True))
    _check_empty(short, "from_hugging_face")
    if fuse_qkv_params:
        _fuse(ours, _with_order(family.head_sizes, qkv_weight_interleaved))
    return ours


def to_hugging_face(
    state_dict: Mapping[str, torch.Tensor], config: Any, *, qkv_weight_interleaved: bool = True
) -> dict[str, torch.Tensor]:
    """Return the state_dict of Hugging Face's model with a head; the inverse of
    :func:`from_hugging_face`.

    Args:
        state_dict: of a model of TransformerLayers, with delayed scales or without; projections
            may be split or fused.
        config: of the Llama or GPT-2.
        qkv_weight_interleaved: the order of a fused projection.

    Raises:
        OperandError: tensors that are missing, too many, or of other shapes than the config's.
        UnsupportedError: see :func:`layer_arguments`.
    """
    family = _family(config)
    ours = {name: value for name, value in state_dict.items() if not _is_state(name)}
    shapes = _shapes(family, config)
    _split(ours, _with_order(family.head_sizes, qkv_weight_interleaved), shapes)
    theirs: dict[str, torch.Tensor] = {}
    for rule in _rules(family, _reader(config)):
        values = _taken(ours, rule.ours, "to_hugging_face", "")
        for name, value in zip(rule.ours, values, strict=True):
            _check_shape("to_hugging_face", name, value, shapes[_in_layer(name)])
        values = _parted(values, rule)
        if rule.transposed:
            values = [value.mT.contiguous() if value.dim() == 2 else value for value in values]
        for name, value in zip(rule.theirs, values, strict=True):
            theirs[_full(name, family.prefix)] = value
    _check_empty(ours, "to_hugging_face")
    return theirs


def _reader(config: Any) -> Any:
    """Return a function that reads an entry of ``config``, with a default unless it must exist."""
    if not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        raise OperandError(
            f"config is {type(config).__name__}; expected the config of a model in transformers, "
            f"or the content of its config.json as a dict."
        )
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)

    def get(name: str, *default: Any) -> Any:
        if name in values:
            return values[name]
        value = getattr(config, name, None)  # an alias of transformers, such as n_embd's
        if value is not None:
            return value
        if default:
            return default[0]
        raise OperandError(f"the config of the model has no {name!r}.")

    return get


def _family_name(config: Any) -> str:
    name = _reader(config)("model_type", None)
    if name not in ("llama", "gpt2"):
        raise UnsupportedError(
            f"a model of type {name!r} is not mapped to TransformerLayers; types are llama, gpt2. "
            f"fp8core.convert changes the linear layers of any model in place."
        )
    return str(name)


def _family(config: Any) -> _Family:
    layer_arguments(config)  # which refuses options that the layers do not have
    get = _reader(config)
    return _llama(get) if _family_name(config) == "llama" else _gpt2(get)


def _refuse(name: str, given: object, wanted: object) -> None:
    """Refuse a config whose entry ``name`` is not ``wanted``."""
    if given != wanted:
        raise UnsupportedError(
            f"a model with {name}={given!r} is not offered as TransformerLayers, which compute as "
            f"with {name}={wanted!r}."
        )


def _activation(get: Any, entry: str, default: str, known: Mapping[str, str]) -> str:
    name = get(entry, default)
    if name not in known:
        raise UnsupportedError(
            f"a model with {entry}={name!r} is not offered as TransformerLayers; activations are "
            f"{', '.join(known)}."
        )
    return known[name]


def _llama_sizes(get: Any) -> HeadSizes:
    heads = get("num_attention_heads")
    groups = get("num_key_value_heads", None) or heads
    head_dim = get("head_dim", None) or get("hidden_size") // heads
    return HeadSizes(heads, groups, head_dim, is_interleaved=False)


def _llama_arguments(get: Any) -> dict[str, Any]:
    sizes, bias = _llama_sizes(get), get("attention_bias", False)
    _refuse("mlp_bias", get("mlp_bias", False), bias)
    return {
        "hidden_size": get("hidden_size"),
        "ffn_hidden_size": get("intermediate_size"),
        "num_attention_heads": sizes.num_heads,
        "num_gqa_groups": sizes.num_groups,
        "kv_channels": sizes.head_dim,
        "layernorm_epsilon": get("rms_norm_eps", 1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": get("attention_dropout", 0.0),
        "self_attn_mask_type": "causal",
        "normalization": "RMSNorm",
        "activation": _activation(get, "hidden_act", "silu", _LLAMA_ACTIVATIONS),
        "bias": bias,
    }


def _gpt2_arguments(get: Any) -> dict[str, Any]:
    for name, wanted in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        _refuse(name, get(name, wanted), wanted)
    hidden = get("n_embd")
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": get("n_inner", None) or 4 * hidden,
        "num_attention_heads": get("n_head"),
        "layernorm_epsilon": get("layer_norm_epsilon", 1e-5),
        "hidden_dropout": get("resid_pdrop", 0.1),
        "attention_dropout": get("attn_pdrop", 0.1),
        "self_attn_mask_type": "causal",
        "normalization": "LayerNorm",
        "activation": _activation(get, "activation_function", "gelu_new", _GPT2_ACTIVATIONS),
        "bias": True,
    }


def _llama(get: Any) -> _Family:
    sizes, ffn = _llama_sizes(get), get("intermediate_size")
    kinds = ("weight", "bias") if get("attention_bias", False) else ("weight",)
    rules = [
        _Rule((f"{_QKV}.layer_norm_weight",), ("input_layernorm.weight",)),
        _Rule((f"{_MLP}.layer_norm_weight",), ("post_attention_layernorm.weight",)),
    ]
    for kind in kinds:
        rules += [
            *(
                _Rule((f"{_QKV}.{ours}_{kind}",), (f"self_attn.{theirs}_proj.{kind}",))
                for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))
            ),
            _Rule((f"self_attention.proj.{kind}",), (f"self_attn.o_proj.{kind}",)),
            _Rule(
                (f"{_MLP}.fc1_{kind}",),
                (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"),
                (ffn, ffn),
            ),
            _Rule((f"{_MLP}.fc2_{kind}",), (f"mlp.down_proj.{kind}",)),
        ]
    outer = (
        _Rule(("embedding.weight",), ("embed_tokens.weight",)),
        _Rule(("norm.weight",), ("norm.weight",)),
        _Rule(("head.weight",), ("lm_head.weight",)),
    )
    return _Family("model.", "layers.", tuple(rules), outer, sizes)


def _gpt2(get: Any) -> _Family:
    heads, hidden = get("n_head"), get("n_embd")
    parts = tuple(f"{_QKV}.{part}" for part in ("query", "key", "value"))
    rules = []
    for kind in ("weight", "bias"):
        rules += [
            _Rule((f"{_QKV}.layer_norm_{kind}",), (f"ln_1.{kind}",)),
            _Rule((f"{_MLP}.layer_norm_{kind}",), (f"ln_2.{kind}",)),
            # Conv1D of transformers multiplies by its weight, not by the transposed one.
            _Rule(
                tuple(f"{part}_{kind}" for part in parts),
                (f"attn.c_attn.{kind}",),
                (hidden, hidden, hidden),
                transposed=True,
            ),
            *(
                _Rule((f"{ours}{kind}",), (f"{theirs}.{kind}",), transposed=True)
                for ours, theirs in (
                    ("self_attention.proj.", "attn.c_proj"),
                    (f"{_MLP}.fc1_", "mlp.c_fc"),
                    (f"{_MLP}.fc2_", "mlp.c_proj"),
                )
            ),
        ]
    outer = (
        _Rule(("embedding.weight",), ("wte.weight",)),
        _Rule(("positions.weight",), ("wpe.weight",)),
        _Rule(("norm.weight",), ("ln_f.weight",)),
        _Rule(("norm.bias",), ("ln_f.bias",)),
        _Rule(("head.weight",), ("lm_head.weight",)),
    )
    sizes = HeadSizes(heads, heads, hidden // heads, is_interleaved=False)
    return _Family("transformer.", "h.", tuple(rules), outer, sizes)


def _rules(family: _Family, get: Any) -> list[_Rule]:
    """Return the rules of the whole model, each layer's with its number."""
    count = get("num_hidden_layers", None)
    rules = list(family.outer)
    for number in range(get("n_layer") if count is None else count):
        rules += [
            rule._replace(
                ours=tuple(f"layers.{number}.{name}" for name in rule.ours),
                theirs=tuple(f"{family.layers}{number}.{name}" for name in rule.theirs),
            )
            for rule in family.layer
        ]
    return rules


def _shapes(family: _Family, config: Any) -> dict[str, _Shape]:
    """Return the shapes of our parameters by their names, those of a layer without its number.

    A size that the config leaves out is None.
    """
    arguments, sizes, get = layer_arguments(config), family.head_sizes, _reader(config)
    hidden, ffn = arguments["hidden_size"], arguments["ffn_hidden_size"]
    first = 2 * ffn if _family_name(config) == "llama" else ffn  # a Llama's activation is gated
    vocabulary = get("vocab_size", None)
    shapes: dict[str, _Shape] = {
        "embedding.weight": (vocabulary, hidden),
        "head.weight": (vocabulary, hidden),
        "positions.weight": (get("n_positions", None), hidden),
    }
    for norm in ("norm.", f"{_QKV}.layer_norm_", f"{_MLP}.layer_norm_"):
        shapes |= {f"{norm}weight": (hidden,), f"{norm}bias": (hidden,)}
    for linear, rows, columns in (
        (f"{_QKV}.query_", sizes.query_size, hidden),
        (f"{_QKV}.key_", sizes.key_size, hidden),
        (f"{_QKV}.value_", sizes.key_size, hidden),
        ("self_attention.proj.", hidden, sizes.query_size),
        (f"{_MLP}.fc1_", first, hidden),
        (f"{_MLP}.fc2_", hidden, ffn),
    ):
        shapes |= {f"{linear}weight": (rows, columns), f"{linear}bias": (rows,)}
    return shapes


def _in_layer(name: str) -> str:
    """Return the name of a parameter in its layer."""
    return re.sub(r"^layers\.\d+\.", "", name)


def _their_shapes(rule: _Rule, shapes: Mapping[str, _Shape]) -> list[_Shape]:
    """Return the shape of each of ``rule.theirs``."""
    ours = [shapes[_in_layer(name)] for name in rule.ours]
    if len(rule.theirs) > 1:
        found: list[_Shape] = [(rows, *ours[0][1:]) for rows in rule.sizes]
    elif len(rule.ours) > 1:
        found = [(sum(rule.sizes), *ours[0][1:])]
    else:
        found = ours
    return [shape[::-1] for shape in found] if rule.transposed else found


def _check_shape(owner: str, name: str, value: object, shape: _Shape) -> None:
    """Refuse a tensor of another shape than the config says."""
    if not isinstance(value, torch.Tensor):
        raise OperandError(f"{owner}: {name} is {type(value).__name__}; expected a torch.Tensor.")
    fits = len(shape) == value.dim() and all(
        wanted in (None, given) for wanted, given in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise OperandError(f"{owner}: {name} is {list(value.shape)}; the config says [{wanted}].")


def _full(name: str, prefix: str) -> str:
    """Return the name of a tensor in the state_dict of a model with a head."""
    return name if name == "lm_head.weight" else prefix + name


def _taken(
    state: dict[str, torch.Tensor], names: Sequence[str], owner: str, prefix: str
) -> list[torch.Tensor]:
    """Remove ``names`` from ``state`` and return their tensors."""
    missing = [_full(name, prefix) for name in names if name not in state]
    if missing:
        raise OperandError(f"{owner}: the state_dict lacks {some(missing)}.")
    return [state.pop(name) for name in names]


def _parted(values: Sequence[torch.Tensor], rule: _Rule) -> list[torch.Tensor]:
    """Return the rows of ``values`` in the parts of the other side of ``rule``."""
    if not rule.sizes:
        return list(values)
    if len(values) == len(rule.sizes):
        return [torch.cat(list(values))]
    (value,) = values
    return list(torch.split(value, list(rule.sizes)))


def _check_empty(state: Mapping[str, torch.Tensor], owner: str) -> None:
    if state:
        raise OperandError(
            f"{owner}: the state_dict has {some(list(state))}, which the config's model lacks."
        )


def _is_state(name: str) -> bool:
    """Say whether ``name`` is no weight: delayed scales, or the speeds of rotary embeddings."""
    return name.rpartition(".")[2] in (*BUFFERS, "inv_freq")


def _with_order(sizes: HeadSizes, is_interleaved: bool) -> HeadSizes:
    return HeadSizes(sizes.num_heads, sizes.num_groups, sizes.head_dim, is_interleaved)


def _fuse(state: dict[str, torch.Tensor], sizes: HeadSizes) -> None:
    """Put one weight in the place of each query, key and value; biases likewise."""
    for name in [name for name in state if f"{_QKV}.query_" in name]:
        parts = [
            state.pop(name.replace(".query_", f".{one}_")) for one in ("query", "key", "value")
        ]
        state[name.replace(".query_", ".")] = join_query_key_value(parts, sizes)


def _split(state: dict[str, torch.Tensor], sizes: HeadSizes, shapes: Mapping[str, _Shape]) -> None:
    """Put query, key and value in the place of each fused weight; biases likewise."""
    for name in [name for name in state if name.endswith((f"{_QKV}.weight", f"{_QKV}.bias"))]:
        prefix, _, kind = name.rpartition(".")
        both = [name, *(n for n in state if n.startswith(prefix) and n.endswith(f"_{kind}"))]
        both = [n for n in both if "layer_norm" not in n]
        if len(both) > 1:
            raise OperandError(
                f"to_hugging_face: the state_dict has {some(both)}; expected a fused projection or "
                f"its parts."
            )
        _, *columns = shapes[f"{_QKV}.query_{kind}"]
        rows = sizes.query_size + 2 * sizes.key_size
        _check_shape("to_hugging_face", name, state[name], (rows, *columns))
        parts = separate_query_key_value(state.pop(name), sizes)
        for one, part in zip(("query", "key", "value"), parts, strict=True):
            state[f"{prefix}.{one}_{kind}"] = part
