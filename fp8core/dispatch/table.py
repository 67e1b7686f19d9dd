"""Resolved operations: a descriptor is bound to a callable once, and then looked up by value.

A *resolver* returns an operation for a descriptor. :data:`DISPATCH` is the resolver of backends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import (
    Alignment,
    AttentionBackwardDesc,
    AttentionDesc,
    BackendSpec,
    FusedDesc,
    GemmDesc,
    OpDesc,
    QuantizeDesc,
    Ranks,
    Recorder,
    Transfers,
    variant_of,
)
from fp8core.backend_api.spec import GRAPH_VARIANTS
from fp8core.dispatch import plugins, policy, select, settings
from fp8core.dispatch.registry import Bound, Kernels, Registry, named_kernels
from fp8core.errors import UnsupportedError
from fp8core.reporting import log_once
from fp8core.torch_ops import definition, nonfinite, operators
from fp8core.torch_ops.capture import in_plain_mode, is_faked
from fp8core.torch_ops.encoding import Operation, decode

_Key: TypeAlias = "tuple[policy.Policy, settings.Settings, Registry, int]"
"""The part of a choice's cache key that is read anew each time: the thread's policy, the settings,
the registry of plug-ins and the number of its rows."""

# Announced in any precision: a fallback may need memory quadratic in the sequence length.
_ATTENTION = (AttentionDesc, AttentionBackwardDesc)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A bound operation: the callable for the hot path, what records its calls, None if nothing
    does, and the choice of its backend. In a captured graph the callable is an operator."""

    run: Callable[..., Any]
    recorder: Recorder | None
    choice: select.Choice
    alignment: Alignment


class _Thread(threading.local):
    is_capturing: bool | None = None  # None: torch's compiler and modes decide


_thread = _Thread()


@contextmanager
def _resolving_to(*, is_captured: bool) -> Iterator[None]:
    outer, _thread.is_capturing = _thread.is_capturing, is_captured
    try:
        yield
    finally:
        _thread.is_capturing = outer


capturing = functools.partial(_resolving_to, is_captured=True)
"""Have the calling thread resolve to operators, as for a graph that torch is capturing.

torch.compiler.is_compiling() is not enough: it is off while torch 2.11 calls functions of
constants."""

in_eager = functools.partial(_resolving_to, is_captured=False)
"""Have the calling thread resolve to the backends' own callables, also while torch captures:
for callables that torch is to trace and differentiate, which it cannot do inside an operator."""


def is_captured() -> bool:
    """Return whether the calling thread resolves to operators of graphs."""
    set_by_capture = _thread.is_capturing
    if set_by_capture is not None:
        return set_by_capture
    return torch.compiler.is_compiling() or is_faked()  # fake tensors have no memory for kernels


def resolve(desc: OpDesc, device: torch.device, *, backend: str | None = None) -> Resolved:
    """Bind ``desc`` for ``device`` under the thread's policy and the environment as it is now.

    A substitution is logged, once a process. So is a backend that declines a product in low
    precision, or attention in any precision, and leaves the operation to another backend. While
    torch compiles or exports, and under FakeTensorMode, the callable is an operator of
    ``torch.ops.fp8core``.

    Raises:
        UnsupportedError, RecipeError, PluginError: see :func:`fp8core.dispatch.select.choose`.
    """
    registry = plugins.load()
    key = (policy.chosen(), settings.read(), registry, len(registry.rows))
    return _resolve(desc, device, backend, is_captured(), key)


def resolve_optional(desc: OpDesc, device: torch.device, backend: str) -> Resolved | None:
    """Bind an optional operation by ``backend``, or return None if ``backend`` does not run it
    or is left out of it, or a graph that torch captures has no operator of it: there a fusion has
    to count NaN and inf."""
    variant = variant_of(desc)
    is_in_graph = _thread.is_capturing or torch.compiler.is_compiling()
    if variant is not None and is_captured() and not (is_in_graph and variant in GRAPH_VARIANTS):
        return None
    if policy.chosen().why_left_out(backend, desc.op) is not None:
        return None
    registry = plugins.load()
    needed = counted(desc) if is_captured() and isinstance(desc, FusedDesc) else desc
    if registry.unsupported(registry.backends[backend], needed, device) is not None:
        return None
    return resolve(desc, device, backend=backend)


def transfers(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Transfers | None:
    """Return the transfers of rows between ``ranks`` beside products, by the backend that
    multiplies tensors of ``dtype``. None if the backend has none, and in a graph, whose collectives
    are torch's."""
    if is_captured():
        return None
    backend = resolve(GemmDesc(None, None, dtype), device).choice.backend
    registry = plugins.load()
    return registry.transfers(registry.backends[backend], ranks, device)


@functools.lru_cache(maxsize=4096)
def _resolve(*arguments: Any) -> Resolved:
    return in_plain_mode(functools.partial(_resolved, *arguments))


def _resolved(
    desc: OpDesc,
    device: torch.device,
    backend: str | None,
    is_captured: bool,
    key: _Key,
) -> Resolved:
    active, _, registry, _ = key
    plain = counted(desc, False)  # no reason for another backend
    choice = select.choose(plain, device, active, backend)
    if choice.substitution:
        log_once(f"{desc.op} on {device} runs on {choice.backend}: {choice.substitution} [{desc}]")
    if select.is_product(desc) or isinstance(desc, _ATTENTION):
        _announce_declined(choice)
    if isinstance(desc, _ATTENTION) and select.is_fallback(choice):
        _announce_fallback(choice)
    spec = registry.backends[choice.backend]
    alignment = registry.alignment(spec, desc) if isinstance(desc, GemmDesc) else Alignment()
    if is_captured:
        bound = Bound(operators.call_of(Operation(choice.backend, plain, spec.transposes)))
    else:
        bound = _bind(registry, spec, desc, device)
    return Resolved(bound.run, bound.recorder, choice, alignment)


def counted(desc: OpDesc, is_counted: bool = True) -> OpDesc:
    """Return ``desc``, a cast or a fusion with one, as it counts NaN and inf or does not; another
    descriptor as it is."""
    if isinstance(desc, FusedDesc):
        return replace(desc, quantize=replace(desc.quantize, counted=is_counted))
    return replace(desc, counted=is_counted) if isinstance(desc, QuantizeDesc) else desc


def _bind(registry: Registry, spec: BackendSpec, desc: OpDesc, device: torch.device) -> Bound:
    """Bind ``desc``; NaN and inf are counted beside a cast that the backend does not count in."""
    plain = counted(desc, False)
    if desc == plain or registry.unsupported(spec, desc, device) is None:
        return registry.bind(spec, desc, device)
    bound = registry.bind(spec, plain, device)
    return bound._replace(run=nonfinite.counting(bound.run))


def forget() -> None:
    """Forget every resolved operation; layers keep the callables that they have bound."""
    _resolve.cache_clear()


def _announce_declined(choice: select.Choice) -> None:
    """Warn, once for each backend and reason, that a backend of higher priority declines.

    Without the warning, a run on a slower backend looks like any other.
    """
    for refusal in select.declined(choice):
        backend, reason = refusal.backend, refusal.reason
        log_once(
            f"{choice.desc.op} on {choice.device} runs on {choice.backend}, as {backend}, which "
            f"comes before it, declines: {reason} [{choice.desc}]",
            about=f"{backend} declines {choice.desc.op} on {choice.device.type}: {reason}",
        )


def _announce_fallback(choice: select.Choice) -> None:
    """Warn, once for each operation and device, that no backend for the device precedes the chosen
    one.

    A backend for the device that declines is left to :func:`_announce_declined`.
    """
    if not select.declined(choice):
        log_once(
            f"{choice.desc.op} on {choice.device} runs on {choice.backend}, as no backend for "
            f"{choice.device.type} comes before it [{choice.desc}]",
            about=f"{choice.desc.op} on {choice.device.type} falls back to {choice.backend}",
        )


def kernels_of(choice: select.Choice) -> Kernels:
    """Return the kernels of ``choice``, whose operation is bound, as by a layer, and not run.

    Raises:
        PluginError: binding it failed, or what it names is no kernel.
    """
    registry = plugins.load()
    run, _ = registry.bind(registry.backends[choice.backend], choice.desc, choice.device)
    who = f"{choice.backend} says that it runs {choice.desc}, but its bind() returned a callable"
    return named_kernels(run, f"{who} which")


def _bind_named(text: str, device: torch.device) -> Callable[..., Any]:
    """Bind the operation encoded in ``text`` by the backend that was chosen when a graph was
    compiled or exported; its casts count NaN and inf."""
    return _bind_for(plugins.load(), text, device)


@functools.lru_cache(maxsize=4096)
def _bind_for(registry: Registry, text: str, device: torch.device) -> Callable[..., Any]:
    backend, desc, *_ = decode(text)
    spec = registry.spec(backend, "a compiled graph")
    desc, plain = counted(desc), desc
    reason = registry.unsupported(spec, desc if isinstance(desc, FusedDesc) else plain, device)
    if reason is not None:
        raise UnsupportedError(f"a compiled graph has {desc} for {backend} on {device}: {reason}")
    return in_plain_mode(functools.partial(_bind, registry, spec, desc, device)).run


definition.set_binder(_bind_named)


class Purpose(NamedTuple):
    """The purpose of an operation: the position of its link in the chain, and the name of its step
    within the link, as ``fprop``, ``weight`` or ``gelu backward``."""

    position: int = 0
    step: str = ""


UNNAMED = Purpose()
"""The purpose of an operation that belongs to no chain."""


class Resolver:
    """The source of operations for links and quantizers that are being bound: :func:`resolve`,
    :func:`resolve_optional` and :func:`transfers`, unless a subclass says otherwise."""

    __slots__ = ()

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        """Return the operation for ``desc``, or raise UnsupportedError."""
        return resolve(desc, device)

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        """Return the operation for ``desc`` by ``backend``, None if ``backend`` does not run it."""
        return resolve_optional(desc, device, backend)

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Transfers | None:
        """Return the transfers of rows between ``ranks`` beside products of ``dtype``, or None."""
        return transfers(ranks, device, dtype)


DISPATCH = Resolver()


class TrackingResolver(Resolver):
    """A resolver that asks another resolver, and notes the operations."""

    __slots__ = ("_operations", "_resolver")

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._operations: list[Resolved] = []

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of all operations so far; None if they have several, or one has none."""
        first, *rest = [operation.recorder for operation in self._operations] or [None]
        return first if all(recorder is first for recorder in rest) else None

    @property
    def has_casts(self) -> bool:
        """Whether one of the operations is a cast."""
        return any(isinstance(each.choice.desc, QuantizeDesc) for each in self._operations)

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        """Return the operation for ``desc``, or raise UnsupportedError."""
        resolved = self._resolver.resolve(desc, device, purpose)
        self._operations.append(resolved)
        return resolved

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        """Return the operation for ``desc`` by ``backend``, None if ``backend`` does not run it."""
        resolved = self._resolver.resolve_optional(desc, device, backend, purpose)
        if resolved is not None:
            self._operations.append(resolved)
        return resolved

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Transfers | None:
        """Return the transfers of rows between ``ranks`` beside products of ``dtype``, or None."""
        return self._resolver.transfers(ranks, device, dtype)
