"""Results that belong to a tensor, found again as long as the tensor lives and nobody writes it."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

__all__ = ["Companions"]

T = TypeVar("T")


class Companions(Generic[T]):
    """What belongs to a tensor: the very object, not one that is equal to it.

    A tensor is not kept alive, its companion is until the tensor is gone.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, tensor: torch.Tensor, companion: T) -> None:
        """Remember ``companion``; without effect for tensors whose writes torch does not count."""
        if tensor.is_inference():
            return
        key = id(tensor)

        def forget(dead: weakref.ref[torch.Tensor]) -> None:
            held = self._held.get(key)
            if held is not None and held[0] is dead:
                del self._held[key]

        self._held[key] = weakref.ref(tensor, forget), tensor._version, companion

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return what was remembered, None if nothing was or if ``tensor`` was written since."""
        held = self._held.get(id(tensor))
        if held is None or held[0]() is not tensor or held[1] != tensor._version:
            return None
        return held[2]
