"""Arguments of Transformer Engine whose features are not offered.

A value that asks for no such feature passes, so that a script written for Transformer Engine runs;
any other value is refused, with the name of the argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from fp8core.errors import UnsupportedError

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
# The attributes that transformers' `use_experts_implementation` gives the experts of a model.
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
        flops = sum(2 * weight.in_features * weight.out_features for weight in self.weights)
        return self.experts_per_token * flops


def conv1d_sizes(module: torch.nn.Module) -> tuple[int, int] | None:
    """Return ``(in_features, out_features)`` of a ``Conv1D`` of transformers, as in GPT-2.

    None for another module, and for one of a derived class. The weight of a Conv1D is
    ``[in_features, out_features]``.
    """
    if (type(module).__module__, type(module).__name__) != _CONV1D:
        return None
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    return weight.shape[0], weight.shape[1]


def experts_of(module: torch.nn.Module) -> Experts | None:
    """Return the experts of ``module``, a class that transformers 5 generates; None for another
    module."""
    attributes = vars(module)
    if not all(name in attributes for name in _EXPERTS) or not hasattr(module, "_apply_gate"):
        return None
    weights = []
    for name in ("gate_up_proj" if attributes["has_gate"] else "up_proj", "down_proj"):
        weight = module._parameters.get(name)
        if weight is None or weight.dim() != 3 or weight.shape[0] != attributes["num_experts"]:
            return None
        bias = f"{name}_bias" if attributes["has_bias"] else None
        if bias is not None and module._parameters.get(bias) is None:
            return None
        first, second = weight.shape[1], weight.shape[2]
        sizes = (first, second) if attributes["is_transposed"] else (second, first)
        weights.append(ExpertWeight(name, bias, *sizes))
    config = attributes.get("config")
    per_token = getattr(config, "num_experts_per_tok", None) or 1
    return Experts(
        attributes["num_experts"],
        int(per_token),
        attributes["is_transposed"],
        (weights[0], weights[1]),
    )


def refuse_arguments(
    function: Callable[..., object],
    arguments: Mapping[str, object],
    names: Iterable[str],
    *,
    owner: str | None = None,
) -> None:
    """Raise UnsupportedError for the first of ``names`` whose value asks for a feature.

    Values that ask for no feature: the default that ``function`` declares; None or False where the
    default is None or False; a process group of one rank; options of tensor parallelism without
    effect on one rank, as more ranks are refused (``parallel_mode``, ``set_parallel_mode``,
    ``return_layernorm_output_gathered``); and the names ``rng_tracker_name`` and ``ub_name``, as
    the features that they name are refused. ``owner`` is the function's name in messages, by
    default its own.
    """
    parameters = inspect.signature(function).parameters
    owner = owner or function.__qualname__.removesuffix(".__init__")
    for name in names:
        value, default = arguments[name], parameters[name].default
        if _asks_for_nothing(value, default) or _is_idle(name, value):
            continue
        shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise UnsupportedError(f"{owner}({name}={shown}) is not offered; leave it at {default!r}.")


def _asks_for_nothing(value: object, default: object) -> bool:
    if isinstance(value, torch.Tensor):  # which has no truth value
        return False
    return value == default or (not value and not default)


def _is_idle(name: str, value: object) -> bool:
    """Return whether ``value``, which is not the default, changes nothing on a single rank."""
    match name:
        case "tp_group" | "tensor_parallel_group" | "dist_process_group":
            return _is_single_rank(value)
        case "parallel_mode" | "tensor_parallel_mode":
            return value in ("column", "row")
        case "set_parallel_mode" | "return_layernorm_output_gathered":
            return value is True
        case "rng_tracker_name" | "ub_name":
            return isinstance(value, str)
    return False


def _is_single_rank(group: object) -> bool:
    if not torch.distributed.is_available():
        return False
    return isinstance(group, torch.distributed.ProcessGroup) and group.size() == 1
