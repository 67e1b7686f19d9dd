"""How a family of models names the parameters of TransformerLayers, and how large they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.head_split import HeadSizes


def reader(config: Any) -> Any:
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


def refuse(name: str, value: object, expected: object) -> None:
    """Refuse a config whose entry ``name`` is not ``expected``."""
    if value != expected:
        raise UnsupportedError(
            f"a model with {name}={value!r} is not offered as TransformerLayers, which compute as "
            f"with {name}={expected!r}."
        )


def activation(get: Any, entry: str, default: str, ours: Mapping[str, str]) -> str:
    """Return our name, by ``ours``, of the activation that ``entry`` names, or refuse it."""
    name = get(entry, default)
    if name not in ours:
        raise UnsupportedError(
            f"a model with {entry}={name!r} is not offered as TransformerLayers; activations are "
            f"{', '.join(ours)}."
        )
    return ours[name]


QKV = "self_attention.layernorm_qkv"
MLP = "layernorm_mlp"

Shape: TypeAlias = tuple[int | None, ...]


class Rule(NamedTuple):
    """Tensors that hold the same rows: ``ours`` after each other are ``theirs`` after each other,
    of which each is transposed if ``transposed``. ``sizes`` are the rows of the more numerous."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A model of one family: the names of its parameters and the kinds of its layers.

    ``prefix`` is what a model with a head puts before the names of the model without one;
    ``layers`` comes before a layer's number. ``arguments`` are those of its TransformerLayers, of
    whose MLP the first linear has ``fc1_rows``. ``ties_head``: whether the head is the embedding's
    weight where the config does not say.
    """

    prefix: str
    layers: str
    layer: tuple[Rule, ...]
    outer: tuple[Rule, ...]
    head_sizes: HeadSizes
    arguments: dict[str, Any]
    fc1_rows: int
    ties_head: bool


def rules_of(family: Family, get: Any) -> list[Rule]:
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


def shapes_of(family: Family, get: Any) -> dict[str, Shape]:
    """Return the shapes of our parameters by their names, those of a layer without its number.

    A size that the config leaves out is None.
    """
    arguments, sizes = family.arguments, family.head_sizes
    hidden, ffn = arguments["hidden_size"], arguments["ffn_hidden_size"]
    vocabulary = get("vocab_size", None)
    shapes: dict[str, Shape] = {
        "embedding.weight": (vocabulary, hidden),
        "head.weight": (vocabulary, hidden),
        "positions.weight": (get("n_positions", None), hidden),
    }
    for norm in ("norm.", f"{QKV}.layer_norm_", f"{MLP}.layer_norm_"):
        shapes |= {f"{norm}weight": (hidden,), f"{norm}bias": (hidden,)}
    for linear, rows, columns in (
        (f"{QKV}.query_", sizes.query_size, hidden),
        (f"{QKV}.key_", sizes.key_size, hidden),
        (f"{QKV}.value_", sizes.key_size, hidden),
        ("self_attention.proj.", hidden, sizes.query_size),
        (f"{MLP}.fc1_", family.fc1_rows, hidden),
        (f"{MLP}.fc2_", hidden, ffn),
    ):
        shapes |= {f"{linear}weight": (rows, columns), f"{linear}bias": (rows,)}
    return shapes


def in_layer(name: str) -> str:
    """Return the name of a parameter in its layer."""
    return re.sub(r"^layers\.\d+\.", "", name)
