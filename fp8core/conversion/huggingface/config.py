"""The config of a model in transformers, read as an object or as the content of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8core.errors import OperandError, UnsupportedError

__all__ = ["activation", "reader", "refuse"]


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


def refuse(name: str, given: object, wanted: object) -> None:
    """Refuse a config whose entry ``name`` is not ``wanted``."""
    if given != wanted:
        raise UnsupportedError(
            f"a model with {name}={given!r} is not offered as TransformerLayers, which compute as "
            f"with {name}={wanted!r}."
        )


def activation(get: Any, entry: str, default: str, known: Mapping[str, str]) -> str:
    """Return ours of the ``known`` activations for the one that ``entry`` names, or refuse it."""
    name = get(entry, default)
    if name not in known:
        raise UnsupportedError(
            f"a model with {entry}={name!r} is not offered as TransformerLayers; activations are "
            f"{', '.join(known)}."
        )
    return known[name]
