"""Layers of Hugging Face's transformers, recognized by their attributes, without importing it."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["ExpertWeight", "Experts", "conv1d_sizes", "experts_of"]

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
# What transformers' decorator `use_experts_implementation` gives the experts of a model.
_EXPERTS = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")


class ExpertWeight(NamedTuple):
    """The weight of one linear of all experts: the names of its parameters, and its features."""

    weight: str
    bias: str | None
    in_features: int
    out_features: int


class Experts(NamedTuple):
    """The experts of a mixture, whose weights are 3-D parameters.

    Attributes:
        num_experts: how many there are.
        experts_per_token: how many of them compute each token.
        is_transposed: whether a weight is ``[experts, in_features, out_features]``, instead of
            ``[experts, out_features, in_features]``.
        weights: the first linear of the experts, and the second.
    """

    num_experts: int
    experts_per_token: int
    is_transposed: bool
    weights: tuple[ExpertWeight, ExpertWeight]

    @property
    def flops(self) -> int:
        """Forward matmul FLOPs of one token."""
        one = sum(2 * weight.in_features * weight.out_features for weight in self.weights)
        return self.experts_per_token * one


def conv1d_sizes(module: torch.nn.Module) -> tuple[int, int] | None:
    """Return ``(in_features, out_features)`` of a ``Conv1D`` of transformers, as in GPT-2.

    None for another module, and for one of a derived class. Its weight is ``[in_features,
    out_features]``.
    """
    if (type(module).__module__, type(module).__name__) != _CONV1D:
        return None
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    return weight.shape[0], weight.shape[1]


def experts_of(module: torch.nn.Module) -> Experts | None:
    """Return the experts that ``module`` is, as transformers 5 writes them; None for others."""
    given = vars(module)
    if not all(name in given for name in _EXPERTS) or not hasattr(module, "_apply_gate"):
        return None
    weights = []
    for name in ("gate_up_proj" if given["has_gate"] else "up_proj", "down_proj"):
        weight = module._parameters.get(name)
        if weight is None or weight.dim() != 3 or weight.shape[0] != given["num_experts"]:
            return None
        bias = f"{name}_bias" if given["has_bias"] else None
        if bias is not None and module._parameters.get(bias) is None:
            return None
        first, second = weight.shape[1], weight.shape[2]
        sizes = (first, second) if given["is_transposed"] else (second, first)
        weights.append(ExpertWeight(name, bias, *sizes))
    config = given.get("config")
    per_token = getattr(config, "num_experts_per_tok", None) or 1
    return Experts(
        given["num_experts"], int(per_token), given["is_transposed"], (weights[0], weights[1])
    )
