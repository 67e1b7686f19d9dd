"""Resolved operations: a descriptor becomes a callable once, and is looked up by value after."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.backend_api import Alignment, GemmDesc, OpDesc
from fp8core.dispatch import plugins, policy, select, settings
from fp8core.reporting import log_once

__all__ = ["Resolved", "resolve", "resolve_optional"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A bound operation: the callable for the hot path, and how it was chosen."""

    run: Callable[..., Any]
    choice: select.Choice
    alignment: Alignment


def resolve(desc: OpDesc, device: torch.device, *, backend: str | None = None) -> Resolved:
    """Bind ``desc`` for ``device`` under the thread's policy and the environment as it is now.

    A substituted backend is logged, once a process.

    Raises:
        UnsupportedError, RecipeError, PluginError: see :func:`fp8core.dispatch.select.choose`.
    """
    registry = plugins.load()
    key = (policy.current(), settings.read(), registry, len(registry.rows))
    return _resolve(desc, device, backend, key)


def resolve_optional(desc: OpDesc, device: torch.device, backend: str) -> Resolved | None:
    """Bind an optional operation by ``backend``, or return None if it does not offer it."""
    registry = plugins.load()
    implementation = registry.instance(registry.backends[backend])
    if implementation.unsupported(desc, device) is not None:
        return None
    return resolve(desc, device, backend=backend)


@functools.lru_cache(maxsize=4096)
def _resolve(
    desc: OpDesc,
    device: torch.device,
    backend: str | None,
    key: tuple[policy.Policy, settings.Settings, plugins.Registry, int],
) -> Resolved:
    asked, _, registry, _ = key
    choice = select.choose(desc, device, asked, backend)
    if choice.substitution:
        log_once(f"{desc.op} on {device} runs on {choice.backend}: {choice.substitution} [{desc}]")
    implementation = registry.instance(registry.backends[choice.backend])
    alignment = implementation.alignment(desc) if isinstance(desc, GemmDesc) else Alignment()
    return Resolved(implementation.bind(desc, device), choice, alignment)
