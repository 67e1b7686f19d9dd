"""``prepare``: a model of fp8core's layers, each with its path as its name."""

from __future__ import annotations

import torch

from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.first_step import announce

__all__ = ["prepare"]


def prepare(model: torch.nn.Module) -> torch.nn.Module:
    """Give every fp8core layer of ``model`` its path as its name, and return the model.

    Messages then name the layer, and :class:`fp8core.recipe.PerLayer` can match it. The model's
    first forward logs what ran in low precision.
    """
    for path, module in model.named_modules():
        if isinstance(module, LowPrecisionModule):
            module.name = path or module.name
            module.unbind()
    announce(model, is_wanted=False)
    return model
