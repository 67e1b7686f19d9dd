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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fp8core.chain.packed_attention import HeadSizes
from fp8core.conversion.huggingface.family import (
    QKV,
    Family,
    Rule,
    Shape,
    gpt2,
    in_layer,
    llama,
    reader,
    rotary_arguments_of,
    rules_of,
    shapes_of,
)
from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.sequences.head_split import (
    join_query_key_value,
    separate_query_key_value,
)
from fp8core.reporting import some
from fp8core.tensors.delayed_state import BUFFERS

__all__ = ["from_hugging_face", "layer_arguments", "rotary_arguments", "to_hugging_face"]


def _their_shapes(rule: Rule, shapes: Mapping[str, Shape]) -> list[Shape]:
    """Return the shape of each of ``rule.theirs``."""
    ours = [shapes[in_layer(name)] for name in rule.ours]
    if len(rule.theirs) > 1:
        result: list[Shape] = [(rows, *ours[0][1:]) for rows in rule.sizes]
    elif len(rule.ours) > 1:
        result = [(sum(rule.sizes), *ours[0][1:])]
    else:
        result = ours
    return [shape[::-1] for shape in result] if rule.transposed else result


def _check_shape(owner: str, name: str, value: object, shape: Shape) -> None:
    """Refuse a tensor of another shape than the config says."""
    if not isinstance(value, torch.Tensor):
        raise OperandError(f"{owner}: {name} is {type(value).__name__}; expected a torch.Tensor.")
    fits = len(shape) == value.dim() and all(
        expected in (None, size) for expected, size in zip(shape, value.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise OperandError(f"{owner}: {name} is {list(value.shape)}; the config says [{sizes}].")


def _full_name(name: str, prefix: str) -> str:
    """Return the name of a tensor in the state_dict of a model with a head."""
    return name if name == "lm_head.weight" else prefix + name


def _popped(
    state: dict[str, torch.Tensor], shapes: Mapping[str, Shape], owner: str, prefix: str = ""
) -> list[torch.Tensor]:
    """Remove the names of ``shapes`` from ``state``, and return their tensors, of these shapes."""
    missing = [_full_name(name, prefix) for name in shapes if name not in state]
    if missing:
        raise OperandError(f"{owner}: the state_dict lacks {some(missing)}.")
    values = {name: state.pop(name) for name in shapes}
    for name, shape in shapes.items():
        _check_shape(owner, _full_name(name, prefix), values[name], shape)
    return list(values.values())


def _parted(values: Sequence[torch.Tensor], rule: Rule) -> list[torch.Tensor]:
    """Return the rows of ``values`` in the parts of the other side of ``rule``."""
    if not rule.sizes:
        return list(values)
    if len(values) == len(rule.sizes):
        return [torch.cat(list(values))]
    (value,) = values
    return list(torch.split(value, list(rule.sizes)))


def _check_empty(state: Mapping[str, torch.Tensor], owner: str) -> None:
    """Refuse tensors that no rule has taken."""
    if state:
        raise OperandError(
            f"{owner}: the state_dict has {some(list(state))}, which the config's model lacks."
        )


def _fuse(state: dict[str, torch.Tensor], sizes: HeadSizes) -> None:
    """Put one weight in the place of each query, key and value; biases likewise."""
    for name in [name for name in state if f"{QKV}.query_" in name]:
        parts = [
            state.pop(name.replace(".query_", f".{role}_")) for role in ("query", "key", "value")
        ]
        state[name.replace(".query_", ".")] = join_query_key_value(parts, sizes)


def _split(state: dict[str, torch.Tensor], sizes: HeadSizes, shapes: Mapping[str, Shape]) -> None:
    """Put query, key and value in the place of each fused weight; biases likewise."""
    for name in [name for name in state if name.endswith((f"{QKV}.weight", f"{QKV}.bias"))]:
        prefix, _, kind = name.rpartition(".")
        both = [name, *(n for n in state if n.startswith(prefix) and n.endswith(f"_{kind}"))]
        both = [n for n in both if "layer_norm" not in n]
        if len(both) > 1:
            raise OperandError(
                f"to_hugging_face: the state_dict has {some(both)}; expected a fused projection or "
                f"its parts."
            )
        _, *columns = shapes[f"{QKV}.query_{kind}"]
        rows = sizes.query_size + 2 * sizes.key_size
        _check_shape("to_hugging_face", name, state[name], (rows, *columns))
        parts = separate_query_key_value(state.pop(name), sizes)
        for role, part in zip(("query", "key", "value"), parts, strict=True):
            state[f"{prefix}.{role}_{kind}"] = part


_FAMILIES: dict[str, Callable[[Any], Family]] = {"llama": llama, "gpt2": gpt2}
# Buffers of older versions of transformers, which are computed again.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")


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
    return _family_of(config).arguments


def rotary_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of :class:`fp8core.RotaryPositionEmbedding` for a Llama.

    Raises:
        UnsupportedError: a GPT-2, which has none, or scaled embeddings other than ``"linear"``.
    """
    if _family_name(config) != "llama":
        raise UnsupportedError("rotary_arguments: a GPT-2 embeds positions; it turns no heads.")
    return rotary_arguments_of(reader(config))


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
    family, get = _family_of(config), reader(config)
    short = {
        name.removeprefix(family.prefix): value
        for name, value in state_dict.items()
        if not _COMPUTED.search(name)
    }
    (embedding,) = (rule.theirs[0] for rule in family.outer if rule.ours == ("embedding.weight",))
    is_tied = get("tie_word_embeddings", family.ties_head)
    if is_tied and "lm_head.weight" not in short and embedding in short:
        short["lm_head.weight"] = short[embedding]
    ours: dict[str, torch.Tensor] = {}
    shapes = shapes_of(family, get)
    for rule in rules_of(family, get):
        of_theirs = dict(zip(rule.theirs, _their_shapes(rule, shapes), strict=True))
        values = _popped(short, of_theirs, "from_hugging_face", family.prefix)
        if rule.transposed:
            values = [value.mT if value.dim() == 2 else value for value in values]
        ours.update(zip(rule.ours, _parted(values, rule), strict=True))
    _check_empty(short, "from_hugging_face")
    if fuse_qkv_params:
        _fuse(ours, replace(family.head_sizes, is_interleaved=qkv_weight_interleaved))
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
    family, get = _family_of(config), reader(config)
    ours = {name: value for name, value in state_dict.items() if not _is_state(name)}
    shapes = shapes_of(family, get)
    _split(ours, replace(family.head_sizes, is_interleaved=qkv_weight_interleaved), shapes)
    theirs: dict[str, torch.Tensor] = {}
    for rule in rules_of(family, get):
        of_ours = {name: shapes[in_layer(name)] for name in rule.ours}
        values = _parted(_popped(ours, of_ours, "to_hugging_face"), rule)
        if rule.transposed:
            values = [value.mT.contiguous() if value.dim() == 2 else value for value in values]
        for name, value in zip(rule.theirs, values, strict=True):
            theirs[_full_name(name, family.prefix)] = value
    _check_empty(ours, "to_hugging_face")
    return theirs


def _family_name(config: Any) -> str:
    name = reader(config)("model_type", None)
    if name not in _FAMILIES:
        raise UnsupportedError(
            f"a model of type {name!r} is not mapped to TransformerLayers; types are "
            f"{', '.join(_FAMILIES)}. fp8core.convert changes the linear layers of any model in "
            f"place."
        )
    return str(name)


def _family_of(config: Any) -> Family:
    """Return the family of a model, whose options are those that the layers have."""
    return _FAMILIES[_family_name(config)](reader(config))


def _is_state(name: str) -> bool:
    """Say whether ``name`` is no weight: delayed scales, or the speeds of rotary embeddings."""
    return name.rpartition(".")[2] in (*BUFFERS, "inv_freq")
