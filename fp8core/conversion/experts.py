"""Converted experts of transformers: their 3-D weights multiply as grouped linear layers.

The parameters stay those of the experts, one 3-D tensor for each linear of all experts. Two layers
inside, without parameters, compute with its slices; under delayed scaling they hold its scales.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from fp8core.conversion.layers import RECORD, Conversion, Record, adopt, derived, release
from fp8core.errors import UnsupportedError
from fp8core.modules.layers.grouped_linear import KINDS, GroupedLinear, stays_on_device
from fp8core.modules.models.inventory import Experts, ExpertWeight, experts_of
from fp8core.modules.state.delayed import quantized_apart
from fp8core.reporting import log_once
from fp8core.tensors.parameter import quantized_model_init
from fp8core.tensors.quantized_tensor import QuantizedTensor

_SUFFIX = "_linear"


def layer_names(experts: Experts, path: str) -> list[str]:
    """Return the paths of the two layers inside of converted experts at ``path``."""
    return [f"{path}.{weight.weight}{_SUFFIX}".lstrip(".") for weight in experts.weights]


class _Slices:
    """The weights of the experts as parts of one that is stored, made once: to make them takes the
    host longer than to launch their products. They share its memory. A copy begins with none."""

    def __init__(self) -> None:
        self._last: tuple[QuantizedTensor, list[torch.Tensor]] | None = None

    def of(self, stacked: QuantizedTensor) -> list[torch.Tensor]:
        """Return the parts of ``stacked`` along its first dimension."""
        if torch.compiler.is_compiling():
            return list(stacked.unbind(0))
        last = self._last
        if last is None or not _has_memory_of(stacked, last[0]):
            with torch.inference_mode(False):
                whole: Any = stacked.detach()  # a view would keep the parameter
                last = self._last = (whole, list(whole.unbind(0)))
        return last[1]

    def __reduce__(self) -> tuple[type[_Slices], tuple[()]]:
        return _Slices, ()


def _has_memory_of(tensor: QuantizedTensor, former: QuantizedTensor) -> bool:
    """Say whether ``tensor`` has the memory that ``former`` was made of, and is stored alike."""
    parts, before = tensor.tensors(), former.tensors()
    is_equal = (tensor.plan, tensor.dtype) == (former.plan, former.dtype)
    return is_equal and len(parts) == len(before) and all(map(operator.is_, parts, before))


class ExpertsLinear(GroupedLinear):
    """A linear of all experts, whose weights are slices of a parameter of its owner."""

    def __init__(self, owner: torch.nn.Module, experts: Experts, weight: ExpertWeight) -> None:
        parameter: Any = owner._parameters[weight.weight]
        with quantized_model_init(enabled=False):
            super().__init__(
                experts.num_experts,
                weight.in_features,
                weight.out_features,
                bias=weight.bias is not None,
                params_dtype=parameter.dtype,
                device="meta",
            )
        self._parameters.clear()
        self.single = KINDS  # slices of the owner's parameters
        self.groups_per_token = experts.experts_per_token
        self.is_transposed = experts.is_transposed
        self.stacked_name = weight.weight  # the owner's name of all weights
        self._names = {"weight": weight.weight, "bias": weight.bias}
        self._slices = _Slices()
        # In a tuple, as torch would register the owner as a child, and a module has no circles.
        self._owner = (owner,)

    @property
    def owner(self) -> torch.nn.Module:
        """The experts, whose parameter holds the weights."""
        return self._owner[0]

    def _stacked(self, kind: str) -> torch.Tensor | None:
        """Return the owner's tensor of all weights, or of all biases."""
        name = self._names[kind]
        return None if name is None else getattr(self._owner[0], name)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yield the owner's parameters that it computes with; its state_dict has none of them."""
        parameters: Any = map(self._stacked, self._names)
        yield from [each for each in parameters if each is not None]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of all weights, or of all biases."""
        stacked = self._stacked("bias" if name.startswith("bias") else "weight")
        assert stacked is not None
        return stacked.dtype

    def _all(self, kind: str) -> list[torch.Tensor]:
        stacked = self._stacked(kind)
        if stacked is None:
            return []
        if kind == "weight" and self.is_transposed:
            stacked = stacked.mT.contiguous()
        elif isinstance(stacked, QuantizedTensor) and not stacked.requires_grad:
            return self._slices.of(stacked)
        return list(stacked.unbind(0))

    def _fill_parameters(self) -> None:
        """Leave the owner's parameters as they are."""


class ConvertedExperts(torch.nn.Module):
    """Base of converted experts: each token's rows go through the linears of its experts."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' results ``[tokens, hidden]``.

        ``hidden_states [tokens, hidden]``; ``top_k_index [tokens, k]`` names the experts of each
        token, ``top_k_weights [tokens, k]`` weighs them.

        Raises:
            UnsupportedError: the experts are spread over ranks by transformers' expert parallelism.
        """
        module: Any = self
        if getattr(module, "_is_expert_parallel", False):
            raise UnsupportedError(
                f"{type(self).__name__}: experts that transformers spreads over ranks are not "
                f"offered converted. Leave them out with skip, or load without a parallel plan."
            )
        per_token = top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)
        ascending, order = chosen.sort(stable=True)
        # No bincount, whose host waits for the largest: a CUDA graph may capture this.
        numbers = torch.arange(module.num_experts + 1, device=chosen.device, dtype=chosen.dtype)
        counts = torch.searchsorted(ascending, numbers).diff()
        first, second = self._linears()
        rows = self._product(first, hidden_states[order // per_token], counts)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = self._product(second, rows, counts)
        if getattr(module, "has_post_expert_norm", False):
            rows = module.post_expert_norm(rows)
        rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        by_token = rows[order.argsort()].view(-1, per_token, rows.shape[-1])
        return by_token.sum(1).to(hidden_states.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> ConvertedExperts:
        """Move stored weights as they are, and forget the parts of the memory that they leave."""
        for linear in self._linears():
            linear._slices = _Slices()
        with quantized_apart(self._parameters, fn):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def _linears(self) -> list[ExpertsLinear]:
        return [child for child in self.children() if isinstance(child, ExpertsLinear)]

    def _product(
        self, linear: ExpertsLinear, rows: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        if not stays_on_device(counts):
            return linear(rows, counts.tolist())  # type: ignore[no-any-return]  # torch's __call__
        try:
            return linear(rows, counts)  # type: ignore[no-any-return]  # likewise
        except UnsupportedError as error:
            log_once(
                f"{linear.label}: the host waits for the number of rows of each expert: {error}",
                about="experts read on the host",
            )
            return linear(rows, counts.tolist())  # type: ignore[no-any-return]  # likewise


def adopt_experts(module: torch.nn.Module, path: str, conversion: Conversion) -> None:
    """Add the experts ``module`` to ``conversion``: they change their class and get two layers."""
    original, experts = type(module), experts_of(module)
    assert experts is not None
    added = []
    for weight, name in zip(experts.weights, layer_names(experts, path), strict=True):
        linear = ExpertsLinear(module, experts, weight)
        linear.train(module.training)
        adopt(linear, name, conversion)
        module.add_module(f"{weight.weight}{_SUFFIX}", linear)
        added.append(f"{weight.weight}{_SUFFIX}")
    vars(module)[RECORD] = Record(conversion, original, tuple(added), {})
    module.__class__ = derived(ConvertedExperts, original)


def release_experts(module: torch.nn.Module) -> None:
    """Undo :func:`adopt_experts`, but for what the two layers inside took by :func:`adopt`."""
    for name in vars(module)[RECORD].added:
        del module._modules[name]
    release(module)
