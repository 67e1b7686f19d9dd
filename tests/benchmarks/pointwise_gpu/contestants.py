"""Who computes an operation: fp8core's backend by recipe, torch.compile, Liger and QuACK."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Operand, QuantizeDesc
from tests.benchmarks.layers_gpu.cases import HIGH
from tests.benchmarks.measuring.contest import Unavailable
from tests.benchmarks.measuring.device import Device
from tests.benchmarks.pointwise_gpu.operations import (
    EPS,
    FORMULAS,
    Inputs,
    Operation,
    statistics_of,
)

__all__ = ["LIBRARIES", "PEERS", "Entrant", "enter", "names_of"]

LIBRARIES = ("fp8core", "torch.compile", "liger", "quack")
PEERS = ("torch.compile", "liger", "quack")
Call = Callable[[], Any]


class Entrant(NamedTuple):
    """One call for each set of inputs.

    ``result`` picks the tensor to compare from a call's results; None where that is quantized.
    """

    calls: Sequence[Call]
    result: Callable[[Any], torch.Tensor] | None


class Kernel(NamedTuple):
    """A peer's function, its arguments from a set of inputs, and where its result is."""

    run: Callable[..., Any]
    arrange: Callable[..., tuple[Any, ...]] = lambda *own: own
    result: Callable[[Any], torch.Tensor] = lambda results: results[0]

    def enter(self, sets: Sequence[Inputs]) -> Entrant:
        """Return the calls for all sets."""
        return Entrant([partial(self.run, *self.arrange(*own)) for own in sets], self.result)


def names_of(operation: Operation, recipes: Sequence[str], libraries: Sequence[str]) -> list[str]:
    """Return the contestants of an operation: fp8core's for each recipe that it has a form for."""
    names = []
    if "fp8core" in libraries:
        names += [f"fp8core {name}" for name in recipes if operation.desc(name) is not None]
    if not operation.has_recipe:
        names += [peer for peer in PEERS if peer in libraries]
    return names


def enter(name: str, operation: Operation, sets: list[Inputs], device: Device) -> Entrant:
    """Return what runs in turns.

    Raises:
        Unavailable, ImportError: there is nothing to run; says why.
    """
    library, _, recipe = name.partition(" ")
    if library == "fp8core":
        return _ours(operation, recipe, sets, device)
    return _MAKERS[library](operation, sets)


def _ours(operation: Operation, recipe: str, sets: list[Inputs], device: Device) -> Entrant:
    desc, backend, where = operation.desc(recipe), device.backend(), device.torch_device
    assert desc is not None
    reason = backend.unsupported(desc, where)
    if reason is not None:
        raise Unavailable(reason)
    run = backend.bind(desc, where)
    keywords = {} if recipe == HIGH else _cast_keywords(operation, recipe, sets[0], where)
    if operation.step == "dequantize":
        rowwise = operation.plan(recipe)._replace(columnwise=None)
        cast = backend.bind(QuantizeDesc(torch.bfloat16, *rowwise), where)
        arguments: list[tuple[Any, ...]] = [(cast(*own, **keywords).rowwise,) for own in sets]
        assert all(isinstance(own[0], Operand) for own in arguments)
        keywords = {}
    else:
        arguments = [_with_no_mean(operation, own) for own in sets]
    calls = [partial(run, *own, **keywords) for own in arguments]
    return Entrant(calls, _plain_result(operation) if not keywords else None)


def _with_no_mean(operation: Operation, own: Inputs) -> tuple[Any, ...]:
    """Return the arguments of fp8core's call, which names a mean for RMSNorms, too."""
    if (operation.step, operation.kind) != ("norm_backward", "rmsnorm"):
        return own
    grad, x, weight, rstd = own
    return grad, x, weight, None, rstd


def _cast_keywords(
    operation: Operation, recipe: str, own: Inputs, where: torch.device
) -> dict[str, Any]:
    """Return what a layer hands to a cast: a count of NaN and inf, and delayed scales."""
    plan = operation.plan(recipe)
    keywords: dict[str, Any] = {"nonfinite_out": torch.zeros(1, dtype=torch.int64, device=where)}
    if plan.is_delayed:
        spec = plan.rowwise or plan.columnwise
        assert spec is not None
        amax = 0.05 if operation.step.endswith("backward") else 5.0  # of the normal inputs' results
        keywords["scale"] = torch.full((1,), spec.target / amax, device=where)
        keywords["amax_out"] = torch.zeros(1, device=where)
    if any(spec is not None and spec.stochastic for spec in plan):
        keywords["rng"] = torch.tensor([7, 9])
    return keywords


def _plain_result(operation: Operation) -> Callable[[Any], torch.Tensor]:
    if operation.step == "add_norm":
        return lambda results: results[1]
    if operation.step in ("norm", "norm_backward"):
        return lambda results: results[0]
    return _itself


def _itself(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result
    return tensor


def _compiled(operation: Operation, sets: list[Inputs]) -> Entrant:
    """Return the operation as torch.compile makes it from float32 formulas."""
    formula, kind, step = FORMULAS.get(operation.step), operation.kind, operation.step

    def compute(*own: torch.Tensor) -> Any:
        if formula is None:
            return own[0].sum(0, dtype=torch.float32)
        if step == "add_norm":
            own = (own[0] + own[1], *own[2:])
        wide = [tensor.float() for tensor in own]
        if step == "add_norm":
            return (own[0], FORMULAS["norm"](kind, *wide).bfloat16(), *_vectors(kind, own[0]))
        result = formula(kind, *wide).bfloat16()
        if step == "norm":
            return (result, *_vectors(kind, own[0]))
        if step == "norm_backward":
            return (result, *_parameter_gradients(*wide))
        return result

    torch.compiler.reset()  # it stops compiling a function that has met many shapes
    run: Callable[..., Any] = torch.compile(compute, dynamic=False, fullgraph=True)
    return Kernel(run, result=_plain_result(operation)).enter(sets)


def _vectors(kind: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, rstd = statistics_of(kind, x)
    return (*mean, rstd)


def _parameter_gradients(
    grad: torch.Tensor, x: torch.Tensor, _: torch.Tensor, *statistics: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    *mean, rstd = statistics
    normalized = (x - mean[0][:, None] if mean else x) * rstd[:, None]
    return ((grad * normalized).sum(0), grad.sum(0))[: len(statistics)]


def _liger(operation: Operation, sets: list[Inputs]) -> Entrant:
    """Return Liger's kernels, with its defaults: the gradient of an RMSNorm is written over
    grad_output, so that what is replayed is the gradient of a gradient."""
    from liger_kernel.ops import layer_norm, rms_norm, swiglu

    def rms_backward_arguments(
        grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
    ) -> tuple[Any, ...]:
        *_, block, warps, mode = rms_norm.rms_norm_forward(x, weight, EPS, 0.0, "llama", None)
        return grad.clone(), x, weight, rstd, 0.0, mode, block, warps, True, None

    kernels = {
        ("norm", "rmsnorm"): Kernel(
            rms_norm.rms_norm_forward, lambda x, weight: (x, weight, EPS, 0.0, "llama", None)
        ),
        ("norm", "layernorm"): Kernel(layer_norm.layer_norm_forward, lambda *own: (*own, EPS)),
        ("norm_backward", "rmsnorm"): Kernel(rms_norm.rms_norm_backward, rms_backward_arguments),
        ("norm_backward", "layernorm"): Kernel(
            layer_norm.layer_norm_backward,
            lambda grad, x, weight, mean, rstd: (grad, x, weight, weight, mean, rstd),
        ),
        ("activation", "swiglu"): Kernel(
            swiglu.swiglu_fused_gate_up_forward, result=lambda results: results[1]
        ),
        ("activation_backward", "swiglu"): Kernel(
            swiglu.swiglu_fused_gate_up_backward, lambda grad, x: (x, grad), _itself
        ),
    }
    return _known(kernels, operation).enter(sets)


def _quack(operation: Operation, sets: list[Inputs]) -> Entrant:
    """Return QuACK's kernels; its LayerNorm takes parameters of float32."""
    from quack import rmsnorm

    kernels = {
        ("norm", "rmsnorm"): Kernel(partial(rmsnorm.rmsnorm_fwd, eps=EPS, store_rstd=True)),
        ("add_norm", "rmsnorm"): Kernel(
            partial(rmsnorm.rmsnorm_fwd, eps=EPS, store_rstd=True),
            lambda x, residual, weight: (x, weight, None, residual),
        ),
        ("norm_backward", "rmsnorm"): Kernel(
            rmsnorm.rmsnorm_bwd, lambda grad, x, weight, rstd: (x, weight, grad, rstd)
        ),
        ("norm", "layernorm"): Kernel(
            partial(rmsnorm.layernorm_fwd, eps=EPS, return_rstd=True, return_mean=True),
            lambda x, weight, bias: (x, weight.float(), bias.float()),
        ),
        ("norm_backward", "layernorm"): Kernel(
            rmsnorm.layernorm_bwd,
            lambda grad, x, weight, mean, rstd: (x, weight.float(), grad, rstd, mean),
        ),
    }
    return _known(kernels, operation).enter(sets)


def _known(kernels: dict[tuple[str, str], Kernel], operation: Operation) -> Kernel:
    kernel = kernels.get((operation.step, operation.kind))
    if kernel is None:
        raise Unavailable("it has no kernel for this operation alone")
    return kernel


_MAKERS: dict[str, Callable[[Operation, list[Inputs]], Entrant]] = {
    "torch.compile": _compiled,
    "liger": _liger,
    "quack": _quack,
}
