"""A toy backend that offers fused operations, each made of the pair that it stands for."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    API_VERSION,
    AddNormDesc,
    BackendSpec,
    FusedDesc,
    OpDesc,
    Operand,
    Quantized,
    QuantizeDesc,
    hookimpl,
    variant_of,
)
from fp8core.conformance.calls import OpCall
from fp8core.conformance.laws.fused import add_pair, pair
from fp8core.dispatch import plugins, table
from fp8core_backends.reference.backend import ReferenceBackend
from tests.device import DEVICE

Spoil = Callable[[Quantized], Quantized]
Refuse = Callable[[FusedDesc], bool]


class FusedToy(ReferenceBackend):
    """The reference backend plus the fused operations in ``offered``; counts every call.

    ``spoil`` is applied to what a fused operation quantized; what ``refuse`` says is not offered,
    nor is a variant of a fusion that is not among ``variants``.
    """

    def __init__(
        self,
        offered: set[str],
        calls: Counter[str],
        spoil: Spoil,
        refuse: Refuse,
        variants: Collection[str],
    ) -> None:
        self._offered = offered
        self._variants = variants
        self._calls = calls
        self._spoil = spoil
        self._refuse = refuse

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if not isinstance(desc, FusedDesc | AddNormDesc):
            return super().unsupported(desc, device)
        is_refused = isinstance(desc, FusedDesc) and (
            variant_of(desc) not in (None, *self._variants) or self._refuse(desc)
        )
        return None if desc.op in self._offered and not is_refused else f"no {desc.op}"

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = self._fuse(desc, device)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self._calls[desc.op] += 1
            return run(*arguments, **keywords)

        return counted

    def _fuse(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        if not isinstance(desc, FusedDesc | AddNormDesc):
            return super().bind(desc, device)
        bind = super().bind

        def part(own: OpDesc, *arguments: Any, **keywords: Any) -> Any:
            made = bind(own, device)(*arguments, **keywords)
            if isinstance(own, QuantizeDesc):
                assert arguments[0].dtype == own.dtype
                return self._spoil(made)
            return made

        make = pair if isinstance(desc, FusedDesc) else add_pair
        return lambda *arguments, **keywords: make(part, OpCall(desc, arguments, keywords))


def unspoilt(made: Quantized) -> Quantized:
    return made


def swapped(made: Quantized) -> Quantized:
    return Quantized(made.columnwise, made.rowwise)


def without_columnwise(made: Quantized) -> Quantized:
    return Quantized(made.rowwise, None)


def with_unasked(made: Quantized) -> Quantized:
    return Quantized(made.rowwise, made.columnwise or made.rowwise)


def transposed_rowwise(made: Quantized) -> Quantized:
    assert made.rowwise is not None
    return Quantized(Operand(made.rowwise.data.t(), *made.rowwise[1:]), made.columnwise)


@contextlib.contextmanager
def installed(
    *offered: str,
    spoil: Spoil = unspoilt,
    refuse: Refuse = lambda desc: False,
    variants: Collection[str] = (),
) -> Iterator[Counter[str]]:
    """Have the layers of the body use the toy backend; yields the counts of its calls."""
    calls: Counter[str] = Counter()
    with registered(100, fused_toy=lambda: FusedToy(set(offered), calls, spoil, refuse, variants)):
        yield calls


@contextlib.contextmanager
def registered(priority: int, **kinds: Callable[[], Any]) -> Iterator[None]:
    """Have a plug-in bring a backend for the device of tests by each name, and nothing else."""
    module, plugin = types.ModuleType("registered_backends"), types.ModuleType("registered_plugin")

    @hookimpl
    def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
        fields: dict[str, Any] = {"priority": priority, "api_version": API_VERSION}
        for name in kinds:
            register(BackendSpec(name, (DEVICE.type,), f"{module.__name__}:{name}", **fields))

    plugin.fp8core_register_backends = fp8core_register_backends  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in kinds.items():
            setattr(module, name, kind)
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(plugins, "_loaded", [])
        plugins.register(plugin, "registered")
        yield
    table._resolve.cache_clear()
