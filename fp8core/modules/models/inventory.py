"""The contents of a model: modules by path, those that transformers defines, and matmul FLOPs."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from fp8core.errors import OperandError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.reporting import some
from fp8core.torch_ops.private import RENAMED_MODULES, WRAPPED_MODULES

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


_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_lock = threading.Lock()


def claim(layers: Mapping[str, torch.nn.Module]) -> None:
    """Reserve ``layers``, by their paths, for one monitor.

    Raises:
        OperandError: another monitor has reserved one of them; then none is reserved.
    """
    with _lock:
        watched = [repr(path) for path, layer in layers.items() if layer in _watched]
        if watched:
            raise OperandError(
                f"monitor: {some(watched)} of this model is monitored already. "
                f"Close the other monitor first."
            )
        _watched.update(layers.values())


def release(layers: Iterable[torch.nn.Module]) -> None:
    """Undo :func:`claim`."""
    with _lock:
        _watched.difference_update(layers)


def refuse_watched(call_name: str, layers: Mapping[torch.nn.Module, str]) -> None:
    """Refuse the call ``call_name`` if a monitor watches one of ``layers``, mapped to their names.

    Raises:
        OperandError: a monitor watches one.
    """
    watched = [repr(name) for layer, name in layers.items() if layer in _watched]
    if watched:
        raise OperandError(
            f"{call_name}: a monitor watches {some(watched)}. Close the monitor first."
        )


# The wrappers that call the module inside them `module`: an ordinary name elsewhere.
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


class ModuleNode(NamedTuple):
    """A module of a model; ``path`` leaves out the names that wrappers add."""

    path: str
    module: torch.nn.Module
    parent: torch.nn.Module | None


def module_nodes(model: torch.nn.Module, path: str = "") -> Iterator[ModuleNode]:
    """Return a node for every path of ``model``, the root first; a shared module has several.

    The modules inside fp8core's layers, TorchScript and parametrizations are left out.
    """
    return _below(ModuleNode(path, model, None))


def _below(node: ModuleNode) -> Iterator[ModuleNode]:
    yield node
    path, module, _ = node
    if isinstance(module, torch.jit.ScriptModule):
        return
    is_layer = isinstance(module, LowPrecisionModule)
    alone = module.runs_alone() if isinstance(module, LowPrecisionModule) else ()
    for name, child in module._modules.items():  # a shared child once for each of its names
        if is_layer and name not in alone:
            continue
        if child is None or (name == "parametrizations" and parametrize.is_parametrized(module)):
            continue
        is_wrapped = name in WRAPPED_MODULES or (name == "module" and isinstance(module, _WRAPPERS))
        words = [path] if is_wrapped else [path, name]
        yield from _below(ModuleNode(".".join(filter(None, words)), child, module))


def keyed_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each module of ``model`` under the path that its keys in a state_dict have.

    Wrappers of torch leave out their own names there, so that a wrapper and the module inside have
    the same path. A shared module comes once for each of its paths.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        yield ".".join(name for name in path.split(".") if name not in RENAMED_MODULES), module


def layers_in(model: torch.nn.Module) -> dict[str, LowPrecisionModule]:
    """Return the layers of fp8core in ``model`` by path, itself included."""
    modules = model.named_modules()
    return {path: layer for path, layer in modules if isinstance(layer, LowPrecisionModule)}


class WeightSite(NamedTuple):
    """A weight of a layer: its place, and its name in messages."""

    module: LowPrecisionModule
    name: str
    label: str

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The parameter that is there now."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter


def weight_sites(model: torch.nn.Module) -> Iterator[WeightSite]:
    """Yield the GEMM weights of the layers of ``model`` that are parameters themselves."""
    for path, module in layers_in(model).items():
        weights = {parts[0] for parts in module.weight_names() if len(parts) == 1}
        for name, parameter in module._parameters.items():
            if parameter is not None and name in weights:
                yield WeightSite(module, name, f"{path}.{name}".lstrip("."))


def uses_of_parameters(model: torch.nn.Module) -> Counter[Any]:
    """Return in how many places of ``model`` each parameter is."""
    by_module = (module._parameters.values() for module in model.modules())
    return Counter(
        parameter for parameters in by_module for parameter in parameters if parameter is not None
    )


def flops_of(module: torch.nn.Module) -> int:
    """Return the forward matmul FLOPs of the linear layer ``module`` for one token, ``2 k n`` a
    GEMM; 0 for another module. A grouped layer counts the groups that a token goes through.
    """
    if isinstance(module, LowPrecisionModule):
        flops = sum(2 * math.prod(s.features) for s in module.link_shapes() if s.features)
        return module.groups_per_token * flops
    if isinstance(module, torch.nn.Linear):
        return 2 * module.in_features * module.out_features
    if (sizes := conv1d_sizes(module)) is not None:
        return 2 * math.prod(sizes)
    if any(isinstance(child, LowPrecisionModule) for child in module.children()):
        return 0  # of experts that are converted, the layers inside count
    if (experts := experts_of(module)) is not None:
        return experts.flops
    if isinstance(module, torch.nn.MultiheadAttention):  # its output projection is a child
        return sum(2 * p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
    return 0
