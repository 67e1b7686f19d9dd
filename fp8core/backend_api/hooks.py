"""The hooks a plug-in may implement. Cold: called at discovery and on request, never per op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pluggy
import torch

from fp8core.backend_api.spec import BackendSpec, OpDesc
from fp8core.formats import FormatSpec

hookimpl = pluggy.HookimplMarker("fp8core")
"""Marks the functions of a plug-in module that implement one of the hooks below."""

hookspec = pluggy.HookspecMarker("fp8core")


@hookspec
def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
    """Call ``register(spec)`` once for every backend the plug-in brings."""


@hookspec
def fp8core_register_formats(register: Callable[[FormatSpec], None]) -> None:
    """Call ``register(spec)`` once for every number format the plug-in brings."""


@hookspec
def fp8core_register_recipes(register: Callable[[str, Callable[[], Any]], None]) -> None:
    """Call ``register(name, factory)`` for every named recipe; ``factory()`` returns a Recipe."""


@hookspec(firstresult=True)
def fp8core_select_backend(
    op: str, desc: OpDesc, device: torch.device, candidates: Sequence[str]
) -> str | None:
    """Site policy: name one of ``candidates`` (all able to run ``desc``), or None for no opinion.

    Asked only where neither the program nor the environment names a backend.
    """


@hookspec
def fp8core_doctor(report: Callable[[str, str], None]) -> None:
    """Call ``report(topic, text)`` for every line the plug-in adds to ``fp8core doctor``."""
