"""Results that belong to a tensor, found again as long as the tensor lives and nobody writes it."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Companions(Generic[T]):
    """Companions of tensors, of the very objects, not of equal ones.

    A tensor is not kept alive by them; a companion lives until its tensor is gone.
    """

    def __init__(self) -> None:
        self._companions: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}

    def __len__(self) -> int:
        return len(self._companions)

    def put(self, tensor: torch.Tensor, companion: T) -> None:
        """Remember ``companion``; without effect for tensors whose writes torch does not count."""
        if tensor.is_inference():
            return
        key = id(tensor)

        def forget(dead: weakref.ref[torch.Tensor]) -> None:
            entry = self._companions.get(key)
            if entry is not None and entry[0] is dead:
                del self._companions[key]

        self._companions[key] = weakref.ref(tensor, forget), tensor._version, companion

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return what was remembered, None if nothing was or if ``tensor`` was written since."""
        entry = self._companions.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[1] != tensor._version:
            return None
        return entry[2]
