"""A reference to a module that does not keep it alive."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

__all__ = ["WeakModule"]


class WeakModule:
    """Refers to ``module``; a deep copy, as of the model, refers to the copy of the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._reference = weakref.ref(module)

    def __call__(self) -> torch.nn.Module | None:
        """Return the module; None once it is freed."""
        return self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        module = self()
        return self if module is None else WeakModule(copy.deepcopy(module, memo))
