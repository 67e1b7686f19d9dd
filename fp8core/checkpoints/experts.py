"""Weights of experts that a file holds one by one, and a model in one parameter.

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
from typing import NamedTuple

from fp8core.checkpoints.files import Header
from fp8core.checkpoints.stored import stored_names

__all__ = ["Piece", "pieces_of"]

_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
    "up_proj": (("up_proj",), ("w1",)),
}
_PREFIXES = ((".mlp.", ".mlp."), (".mlp.", ".block_sparse_moe."))


class Piece(NamedTuple):
    """What a file holds under one name: a tensor of the model, or rows of one expert's matrix.

    ``name`` is that of the weight in the file, ``target`` the model's; ``place`` is the expert, the
    first row and the number of rows, None for the whole tensor.
    """

    name: str
    target: str
    shape: tuple[int, ...]
    place: tuple[int, int, int] | None = None


def pieces_of(name: str, shape: Sequence[int], headers: Mapping[str, Header]) -> list[Piece]:
    """Return what the file has of the model's tensor ``name``; nothing if it has none of it.

    Pieces of experts are complete, whether the file has each of them or not.
    """
    for ours, theirs in _PREFIXES:
        if _is_in(name.replace(ours, theirs), headers):
            return [Piece(name.replace(ours, theirs), name, tuple(shape))]
    for names in _by_expert(name, shape):
        if any(_is_in(one.name, headers) for one in names):
            return names
    return []


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
