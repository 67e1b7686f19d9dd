"""Weights of experts: a tensor for each expert in a file, one parameter in a model.

=====================================  =================================================
parameter of transformers 5            in files, for expert ``e`` of ``[0, experts)``
=====================================  =================================================
``experts.gate_up_proj [e, 2 n, k]``   ``experts.e.gate_proj.weight [n, k]``, then
                                       ``up_proj``; of Mixtral ``w1``, then ``w3``
``experts.down_proj [e, k, n]``        ``experts.e.down_proj.weight``; of Mixtral ``w2``
=====================================  =================================================

Mixtral's files say ``block_sparse_moe`` where the model says ``mlp``. Source: transformers 5.23,
conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.interchange.checkpoints.files import Header
from fp8core.interchange.checkpoints.layouts import stored_names
from fp8core.modules.refusals import experts_of

_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
    "up_proj": (("up_proj",), ("w1",)),
}
_PREFIXES = ((".mlp.", ".mlp."), (".mlp.", ".block_sparse_moe."))
# The model types of transformers whose files have the last ways of these.
_MIXTRALS = ("mixtral", "minimax", "minimax_m2")


class Piece(NamedTuple):
    """An entry of a file: a tensor of the model, or rows of an expert's matrix.

    ``name`` is that of the weight in the file, ``target`` the model's; ``place`` is the expert, the
    first row and the number of rows, None for the whole tensor.
    """

    name: str
    target: str
    shape: tuple[int, ...]
    place: tuple[int, int, int] | None = None


def pieces_of(name: str, shape: Sequence[int], headers: Mapping[str, Header]) -> list[Piece]:
    """Return the pieces of the model's tensor ``name`` in the file; empty if the file has none.

    Pieces of experts are complete, whether the file has each of them or not.
    """
    for ours, theirs in _PREFIXES:
        if _is_in(name.replace(ours, theirs), headers):
            return [Piece(name.replace(ours, theirs), name, tuple(shape))]
    for names in _by_expert(name, shape):
        if any(_is_in(piece.name, headers) for piece in names):
            return names
    return []


def holds_experts(module: torch.nn.Module) -> bool:
    """Say whether ``module`` holds the weights of experts as the table of this module has them."""
    experts = experts_of(module)
    if experts is None or experts.is_transposed:
        return False
    return bool(getattr(module, "is_concatenated", True))


class Naming:
    """How the files of ``model`` name its tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        self._is_mixtral = getattr(config, "model_type", None) in _MIXTRALS

    def of(self, name: str) -> str:
        """Return the name in files of a tensor, or of a module, of the model."""
        if not self._is_mixtral:
            return name
        return f"{name}.".replace(*_PREFIXES[-1]).removesuffix(".")

    def pieces(self, name: str, shape: Sequence[int]) -> list[Piece]:
        """Return the pieces of a parameter of experts; nothing if it has another name or shape."""
        ways = list(_by_expert(name, shape))
        return ways[-1 if self._is_mixtral else 0] if ways else []


def _is_in(name: str, headers: Mapping[str, Header]) -> bool:
    return name in headers or stored_names(name, headers) is not None


def _by_expert(name: str, shape: Sequence[int]) -> Iterator[list[Piece]]:
    """Yield the pieces of a parameter of experts under each way to name them."""
    prefix, _, last = name.rpartition(".")
    if len(shape) != 3 or last not in _PARTS or not prefix.endswith("experts"):
        return
    count, rows, columns = shape
    for parts in _PARTS[last]:
        if rows % len(parts):
            continue
        size = rows // len(parts)
        for ours, theirs in _PREFIXES:
            start = prefix.replace(ours, theirs)
            yield [
                Piece(
                    f"{start}.{expert}.{part}.weight",
                    name,
                    (size, columns),
                    (expert, at * size, size),
                )
                for expert in range(count)
                for at, part in enumerate(parts)
            ]
