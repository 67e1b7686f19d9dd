"""Law 5 for a whole backend: every tensor that layers pass to it has memory that it can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from fp8core import recipe
from fp8core.backend_api import Backend, OpDesc
from fp8core.chain.unwrap import PLAIN
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require
from fp8core.conformance.subject import Subject
from fp8core.context.autocast import autocast
from fp8core.dispatch import plugins, policy, table
from fp8core.errors import UnsupportedError
from fp8core.modules.linear import Linear
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.private import lazily_negated, lazy_zeros, pytree

SIZE = 64


@law(5)
def no_operand_without_memory_reaches_it(subject: Subject) -> None:
    """Every tensor that a layer hands the backend is a plain one with an address, or is empty.

    Under each recipe that the device runs, layers get a QuantizedTensor as input and as gradient,
    then a lazily negated tensor and zeros without memory. The law passes for a backend that is not
    installed, as layers cannot choose it.
    """
    if subject.name not in plugins.load().backends:
        return
    faults: list[str] = []
    bind = type(subject.backend).bind

    def spied(self: Backend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        return _looking(bind(self, desc, device), desc, faults)

    table.forget()
    try:
        with patch.object(type(subject.backend), "bind", spied), policy.use_backend(subject.name):
            for name in recipe.names():
                try:
                    _run_layer(name, subject.device)
                except Exception:
                    if not faults:
                        raise
    finally:
        table.forget()
    require(not faults, "; ".join(dict.fromkeys(faults)))


def _run_layer(name: str, device: torch.device) -> None:
    """Run a layer forward and backward on QuantizedTensors and on torch's lazy tensors.

    Returns early where the recipe does not run on the device.
    """
    chosen = recipe.by_name(name)
    layer = Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device=device)
    current = recipe.Float8CurrentScaling()
    plan = plan_of(LinearPlan, current, LayerRole("linear"), torch.bfloat16)
    values = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    try:
        stored = QuantizedTensor.quantize(values, plan.input)
        with autocast(recipe=chosen):
            y = layer(stored)
    except UnsupportedError:  # not every recipe runs on every device
        return
    y.backward(QuantizedTensor.quantize(values, plan.grad_output))
    zeros = lazy_zeros(values.shape, dtype=values.dtype, device=device)
    for x in (lazily_negated(values), zeros):
        with autocast(recipe=chosen):
            y = layer(x)
        y.backward(x)


def _looking(run: Callable[..., Any], desc: OpDesc, faults: list[str]) -> Callable[..., Any]:
    """Return ``run``, wrapped so that operands without readable memory are added to ``faults``."""

    def look(*arguments: Any, **keywords: Any) -> Any:
        for leaf in pytree.tree_leaves((arguments, keywords)):
            if isinstance(leaf, torch.Tensor):
                if type(leaf) not in PLAIN or _is_hollow(leaf):
                    faults.append(f"{desc} was given a {type(leaf).__name__} without memory")
                elif leaf.is_neg():
                    faults.append(f"{desc} was given a tensor whose memory is to be negated")
        return run(*arguments, **keywords)

    return look


def _is_hollow(x: torch.Tensor) -> bool:
    return bool(x.numel()) and not x.is_meta and not x.data_ptr()
