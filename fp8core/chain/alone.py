"""Single operations of backends outside of a chain, and their derivatives by torch's operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import AttentionDesc, NormDesc
from fp8core.chain.unwrap import PLAIN, are_readable, as_readable, unwrap
from fp8core.dispatch import plugins, policy, select, table
from fp8core.dispatch.registry import Registry
from fp8core.errors import UnsupportedError
from fp8core.torch_ops.capture import constant_in_graph, is_captured
from fp8core.torch_ops.encoding import Operation, encode
from fp8core.torch_ops.operators import OPERATORS
from fp8core.torch_ops.private import forward_mode_level, is_transform_active

Run: TypeAlias = Callable[..., Any]

Described: TypeAlias = "tuple[type[Any], tuple[Any, ...]]"
"""A descriptor by its class and its values, which torch.compile can hand over as constants."""


def bound(kind: type[Any], values: tuple[Any, ...], x: torch.Tensor) -> Run:
    """Return what runs the descriptor ``kind(*values)`` for ``x`` under the thread's policy.

    The environment is read when an operation is bound for the first time.

    Raises:
        UnsupportedError, RecipeError, PluginError: as :func:`fp8core.dispatch.table.resolve`.
    """
    run = offered(kind, values, None, x)
    assert run is not None  # without another descriptor it is resolved, or refused
    return run


def offered(
    kind: type[Any], values: tuple[Any, ...], plain: Described | None, x: torch.Tensor
) -> Run | None:
    """Return what :func:`bound` does, of an optional descriptor: by the backend that is chosen for
    the descriptor ``plain``; None if that backend does not offer it."""
    backends, device = policy.current(), x.device
    if is_captured(x):  # a kernel would read its address
        # torch.compile takes a text as a constant, and reads what makes a call of it.
        text = _captured(kind, values, device, backends.values(), plain)
        return functools.partial(OPERATORS[kind.op], text) if text else None
    registry = plugins.load()
    return _bound((kind, values, plain), device, backends, registry, len(registry.rows))


@functools.lru_cache(maxsize=1024)
def _bound(
    described: tuple[type[Any], tuple[Any, ...], Described | None],
    device: torch.device,
    backends: policy.Policy,
    registry: Registry,
    num_plugins: int,
) -> Run | None:
    resolved = _resolved(*described, device)
    return None if resolved is None else resolved.run


def records(desc: AttentionDesc, device: torch.device) -> bool:
    """Return whether the backend that is chosen for ``desc`` records runs of ``device``: those of
    norms, which each that records anything does."""
    registry = plugins.load()
    return _records(desc, device, policy.current(), registry, len(registry.rows))


@functools.lru_cache(maxsize=1024)
def _records(
    desc: AttentionDesc,
    device: torch.device,
    backends: policy.Policy,
    registry: Registry,
    num_plugins: int,
) -> bool:
    chosen = select.choose(desc, device, backends).backend
    norm = table.resolve_optional(NormDesc("rmsnorm", desc.dtype, desc.dtype, 1e-5), device, chosen)
    return norm is not None and norm.recorder is not None


def _resolved(
    kind: type[Any], values: tuple[Any, ...], plain: Described | None, device: torch.device
) -> table.Resolved | None:
    """Return ``kind(*values)``, an optional one by the backend chosen for ``plain``; of that choice
    nothing is said, as nothing runs by it."""
    if plain is None:
        return table.resolve(kind(*values), device)
    try:
        choice = select.choose(plain[0](*plain[1]), device, policy.current())
    except UnsupportedError:
        return None
    return table.resolve_optional(kind(*values), device, choice.backend)


def _captured(
    kind: type[Any],
    values: tuple[Any, ...],
    device: torch.device,
    backends: policy.Values,
    plain: Described | None,
) -> str:
    """Return the text of the operation, while torch compiles or exports; empty of an optional one
    that is not offered, as :func:`offered` has it with ``plain``."""
    with policy.activated(policy.Policy(*backends)), table.capturing():
        resolved = _resolved(kind, values, plain, device)
    return (
        "" if resolved is None else encode(Operation(resolved.choice.backend, resolved.choice.desc))
    )


constant_in_graph(_captured)


@functools.lru_cache(maxsize=1024)
def in_torch(kind: Any, values: tuple[Any, ...], device: torch.device) -> Run:
    """Return the reference's computation, made of torch's operators, which torch differentiates."""
    with policy.activated(policy.Policy(backend="reference")), table.in_eager():
        return table.resolve(kind(*values), device).run


def plain(x: torch.Tensor, role: str) -> torch.Tensor:
    """Return ``x`` with its values in memory that a backend may read; ``role`` is its name in
    messages. A tensor that is stored quantized is dequantized.

    Raises:
        OperandError: its values are elsewhere, as those of a DTensor.
    """
    if type(x) not in PLAIN:
        x = unwrap(x, role)
    if is_captured(x) or is_transformed() or are_readable(x):
        return x
    return as_readable(x, x.device, role)


def needs_node(*tensors: torch.Tensor | None) -> bool:
    """Say whether a gradient of one of ``tensors`` may be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_transformed() -> bool:
    """Say whether a transform of torch.func, or forward-mode differentiation, has to see torch's
    own operators."""
    return is_transform_active() or forward_mode_level() >= 0


def derivatives(
    run: Run, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of ``tensors``, themselves differentiable.

    ``run(*tensors)`` computes the outputs with torch's operators, ``grads`` are their gradients.
    """
    with torch.enable_grad():
        inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in tensors]
        outputs = run(*inputs)
        pairs = [
            (y, g) for y, g in zip(outputs, grads, strict=True) if y is not None and g is not None
        ]
        return torch.autograd.grad(
            [y for y, _ in pairs],
            inputs,
            [g for _, g in pairs],
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
