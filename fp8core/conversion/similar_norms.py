"""Classes of models that compute an RMSNorm, such as ``LlamaRMSNorm``: told by their results."""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch

from fp8core.dispatch.isolation import Failure, attempt

__all__ = ["SimilarNorm", "looks_like_rms_norm", "similar_norm"]

_EPS = ("variance_epsilon", "eps", "epsilon")


class SimilarNorm(NamedTuple):
    """An RMSNorm of ``size``; the factor is ``1 + weight`` if ``zero_centered``."""

    size: int
    eps: float
    zero_centered: bool


def looks_like_rms_norm(module: torch.nn.Module) -> bool:
    """Return whether ``module`` may be an RMSNorm: by its name, parameters and arguments."""
    weight = module._parameters.get("weight")
    return (
        "norm" in type(module).__name__.lower()
        and weight is not None
        and weight.dim() == 1
        and len(module._parameters) == 1
        and not module._buffers
        and not module._modules
        and _eps(module) is not None
        and len(inspect.signature(type(module).forward).parameters) == 2  # self and the input
    )


def similar_norm(module: torch.nn.Module) -> SimilarNorm | None:
    """Return the RMSNorm that ``module`` computes, or None if it computes something else.

    Its forward runs on four rows on the CPU, with a weight of other values than the module's, and
    is compared with torch's.
    """
    eps = _eps(module)
    assert eps is not None
    size = module._parameters["weight"].shape[0]  # type: ignore[union-attr]  # it looks like a norm
    x = torch.arange(4 * size, dtype=torch.float32, device="cpu").view(4, size).sin()
    # In the second row eps is as large as the mean square.
    x = x * torch.tensor([[1.0], [math.sqrt(eps)], [30.0], [0.1]], device="cpu")
    weight = torch.linspace(0.5, 1.5, size, device="cpu")
    kind = type(module)
    stand_in: Any = kind.__new__(kind)
    vars(stand_in).update(vars(module))
    vars(stand_in)["_parameters"] = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        result = attempt(lambda: kind.forward(stand_in, x))
    if isinstance(result, Failure) or not isinstance(result, torch.Tensor):
        return None
    for zero_centered in (False, True):
        factor = 1 + weight if zero_centered else weight
        want = torch.nn.functional.rms_norm(x, (size,), factor, eps)
        if result.shape == want.shape and torch.allclose(result.float(), want, 1e-5, 1e-7):
            return SimilarNorm(size, eps, zero_centered)
    return None


def _eps(module: torch.nn.Module) -> float | None:
    values = (vars(module).get(name) for name in _EPS)
    return next((value for value in values if isinstance(value, float) and value > 0), None)
