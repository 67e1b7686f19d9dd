"""CUDA graphs of layers: forward and backward replayed with one launch each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fp8core.context.autocast import autocast
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.recipe import Recipe
from fp8core.tensors.slots import BUFFERS

__all__ = ["make_graphed_callables"]


def make_graphed_callables(
    modules: torch.nn.Module | Sequence[torch.nn.Module],
    sample_args: tuple[torch.Tensor, ...] | Sequence[tuple[torch.Tensor, ...]],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    *,
    enabled: bool = True,
    recipe: Recipe | str | None = None,
    pool: tuple[int, int] | None = None,
) -> Any:
    """Return ``modules`` with forward and backward captured in CUDA graphs, under ``recipe``.

    The argument order is Transformer Engine's. Each module is captured inside an
    ``autocast(enabled, recipe=recipe)`` of its own, so the graph updates delayed scales and
    quantizes the weights as they are at every replay; calling it needs no autocast. Warming up and
    capturing leave delayed scales and amax histories as they were. Sizes, strides, dtypes and
    ``requires_grad`` of later inputs have to be those of ``sample_args``; see
    :func:`torch.cuda.make_graphed_callables`, which does the capturing.

    Args:
        modules: one module, or several that run one after the other; none may have hooks.
        sample_args: the positional tensors of one call, or a tuple of them for each module.
        num_warmup_iters: runs before the capture, in which algorithms are chosen.
        allow_unused_input: whether an input may have no gradient.
        enabled: False captures high precision.
        recipe: a Recipe, or its name; None takes :func:`fp8core.get_default_recipe`.
        pool: memory to share with other graphs, of ``torch.cuda.graph_pool_handle()``.

    Raises:
        RecipeError: ``recipe`` is not a Recipe, or there are no modules.
        UnsupportedError: there is no CUDA device, or a module is not on one.
    """
    is_one = isinstance(modules, torch.nn.Module)
    each: tuple[torch.nn.Module, ...] = (modules,) if is_one else tuple(modules)  # type: ignore[arg-type, assignment]  # as is_one says
    if not each:
        raise RecipeError("make_graphed_callables: there are no modules.")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "make_graphed_callables captures CUDA graphs; no CUDA device is visible."
        )
    for module in each:
        devices = {str(parameter.device) for parameter in module.parameters()}
        if any(not device.startswith("cuda") for device in devices):
            raise UnsupportedError(
                f"make_graphed_callables: {type(module).__name__} is on "
                f"{', '.join(sorted(devices))}; "
                f"move it to a CUDA device."
            )
    context = autocast(enabled=enabled, recipe=recipe)
    arguments: Any = (sample_args,) if is_one else tuple(sample_args)
    shared: Any = pool  # torch's name of the type is private
    with _states_kept(each), _inside(context, each):
        graphed = torch.cuda.make_graphed_callables(
            each, arguments, num_warmup_iters, allow_unused_input, shared
        )
    return graphed[0] if is_one else graphed


@contextmanager
def _inside(context: autocast, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Have each module's forward enter ``context``; an exception restores the forwards."""
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = _entering(context, module.forward)
    try:
        yield
    except BaseException:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward
        raise


def _entering(context: autocast, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with context:
            return forward(*arguments, **keywords)

    return run


@contextmanager
def _states_kept(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore delayed scales and histories at the end; those created meanwhile start fresh."""
    layers = [layer for module in modules for layer in module.modules()]
    before = [{name: buffer.clone() for name, buffer in _delayed_state(layer)} for layer in layers]
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, kept in zip(layers, before, strict=True):
                for name, buffer in _delayed_state(layer):
                    if name in kept:
                        buffer.copy_(kept[name])
                    elif name.startswith("scale"):
                        buffer.fill_(1.0)
                    elif name.startswith("amax_history"):
                        buffer.zero_()


def _delayed_state(layer: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = layer.named_buffers(recurse=False)
    return [(name, buffer) for name, buffer in buffers if name in BUFFERS]
