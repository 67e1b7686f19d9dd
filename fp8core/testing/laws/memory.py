"""Law 5 for a whole backend: what its layers hand it is memory that it may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from fp8core import recipe
from fp8core.backend_api import Backend, OpDesc
from fp8core.chain.unwrap import PLAIN
from fp8core.context.autocast import autocast
from fp8core.dispatch import plugins, policy, table
from fp8core.errors import UnsupportedError
from fp8core.modules.linear import Linear
from fp8core.recipe.plan import LayerRole
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.testing.checks import law
from fp8core.testing.compare import require
from fp8core.testing.subject import Subject
from fp8core.torch_ops.private import lazily_negated, lazy_zeros, pytree

SIZE = 64


@law(5)
def no_operand_without_memory_reaches_it(subject: Subject) -> None:
    """Every tensor that a layer hands the backend is a plain one with an address, or is empty.

    Layers get a QuantizedTensor as input and as gradient, then a tensor that torch has still to
    negate, and zeros that it has still to make, under each recipe that runs there. Says nothing
    about a backend that is not installed, as layers cannot choose it.
    """
    if subject.name not in plugins.load().backends:
        return
    found: list[str] = []
    bind = type(subject.backend).bind

    def spied(self: Backend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        return _looking(bind(self, desc, device), desc, found)

    table.forget()
    try:
        with patch.object(type(subject.backend), "bind", spied), policy.use_backend(subject.name):
            for name in recipe.names():
                try:
                    _run_layer(name, subject.device)
                except Exception:
                    if not found:
                        raise
    finally:
        table.forget()
    require(not found, "; ".join(dict.fromkeys(found)))


def _run_layer(name: str, device: torch.device) -> None:
    """Run a layer forward and back on tensors that are stored quantized, if the recipe can."""
    chosen = recipe.by_name(name)
    layer = Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device=device)
    plan = recipe.by_name("current").plan(LayerRole("linear"), torch.bfloat16)
    values = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    try:
        stored = QuantizedTensor.quantize(values, plan.input)
        with autocast(recipe=chosen):
            y = layer(stored)
    except UnsupportedError:  # not every recipe runs on every device
        return
    y.backward(QuantizedTensor.quantize(values, plan.grad_output))
    zeros = lazy_zeros(values.shape, dtype=values.dtype, device=device)
    for own in (lazily_negated(values), zeros):
        with autocast(recipe=chosen):
            y = layer(own)
        y.backward(own)


def _looking(run: Callable[..., Any], desc: OpDesc, found: list[str]) -> Callable[..., Any]:
    """Return ``run``, which also takes down what it is given without memory."""

    def look(*arguments: Any, **keywords: Any) -> Any:
        for own in pytree.tree_leaves((arguments, keywords)):
            if isinstance(own, torch.Tensor):
                if type(own) not in PLAIN or _is_hollow(own):
                    found.append(f"{desc} was given a {type(own).__name__} without memory")
                elif own.is_neg():
                    found.append(f"{desc} was given a tensor whose memory is to be negated")
        return run(*arguments, **keywords)

    return look


def _is_hollow(x: torch.Tensor) -> bool:
    return bool(x.numel()) and not x.is_meta and not x.data_ptr()
