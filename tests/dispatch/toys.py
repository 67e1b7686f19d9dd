"""Toy plug-ins: backends that compute as the reference does, and a place of their own to live in.

``isolation()`` gives a test an environment without ``FP8CORE_*``, an empty registry of plug-ins,
its own copy of the formats and of what was logged, and puts everything back.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pytest
import torch

from fp8core import formats, reporting
from fp8core.backend_api import (
    API_VERSION,
    Alignment,
    AmaxDesc,
    BackendSpec,
    FormatSpec,
    GemmDesc,
    GroupedGemmDesc,
    OpDesc,
    OperandSpec,
    QuantizeDesc,
    ScaleUpdateDesc,
    hookimpl,
    variant_of,
)
from fp8core.dispatch import plugins, table
from fp8core.recipe import Float8RowwiseScaling
from fp8core_backends.reference.backend import ReferenceBackend
from tests.device import DEVICE

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")  # a name to ask about; nothing touches the device

E4M3 = OperandSpec("e4m3", (0, 0), 448.0)
GEMM = GemmDesc(E4M3, E4M3, torch.bfloat16)
GROUPED_GEMM = GroupedGemmDesc(E4M3, E4M3, torch.bfloat16)
PLAIN_GEMM = GemmDesc(None, None, torch.bfloat16)
QUANTIZE = QuantizeDesc(torch.bfloat16, E4M3, E4M3)
AMAX = AmaxDesc(QUANTIZE)
SCALE_UPDATE = ScaleUpdateDesc("max")

BUILT_IN = ("e2m1", "e4m3", "e5m2", "e8m0")
"""The formats that no plug-in brings."""

TOY8 = formats.minifloat("toy8", 3, 4, specials="finite")
"""A format of 8 bits that nobody else has; its maximum is 31."""

Refusal = Callable[[OpDesc], str | None]
Bind = Callable[["ToyBackend", OpDesc, torch.device], Callable[..., Any]]
Install = Callable[..., None]
"""The fixture ``install``: the source of each module by its name."""


def _reference_alone(group: str) -> list[EntryPoint]:
    return [point for point in entry_points(group=group) if point.name == "reference"]


@contextlib.contextmanager
def isolation() -> Iterator[None]:
    """Run the body with plug-ins, formats, log lines and environment of its own.

    Of what is installed it sees the reference backend alone.
    """
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("FP8CORE_")]:
            patch.delenv(name)
        patch.setattr(plugins, "entry_points", _reference_alone)
        patch.setattr(plugins, "_loaded", [])
        patch.setattr(plugins, "_set_aside", {})
        patch.setattr(formats, "_formats", {one: formats._formats[one] for one in BUILT_IN})
        patch.setattr(formats, "_pending_discovery", [plugins.load])
        patch.setattr(reporting, "_logged", set())
        yield
    for name in sys.modules.keys() - modules:
        if name.startswith("toy_"):
            del sys.modules[name]
    table._resolve.cache_clear()


class ToyBackend:
    """Runs what ``refuse`` does not refuse, as the reference does, and counts the calls."""

    def __init__(
        self,
        refuse: Refusal,
        calls: list[str],
        bind: Bind | None = None,
        *,
        has_variants: bool = False,
    ) -> None:
        self._reference = ReferenceBackend()
        self._has_variants = has_variants
        self._bind = bind
        self._refuse = refuse
        self._calls = calls

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if not self._has_variants and (variant := variant_of(desc)) is not None:
            return f"no {variant}"
        return self._refuse(desc)

    def alignment(self, desc: GemmDesc) -> Alignment:
        return Alignment()

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        if self._bind is not None:
            return self._bind(self, desc, device)
        run = self._reference.bind(desc, device)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(desc.op)
            return run(*args, **kwargs)

        return counted


def named_kernel(name: str) -> Callable[..., None]:
    """A callable that says which kernel it runs, and runs none."""

    def run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is to be computed")

    run.kernel = name  # type: ignore[attr-defined]
    return run


def takes_all(desc: OpDesc) -> str | None:
    return None


def backend(
    name: str,
    *,
    refuse: Refusal = takes_all,
    calls: list[str] | None = None,
    bind: Bind | None = None,
    has_variants: bool = False,
    device_types: Sequence[str] = (DEVICE.type,),
    **fields: Any,
) -> BackendSpec:
    """The spec of a toy backend; its factory is in a module made for it."""
    module = types.ModuleType(f"toy_backend_{name}")
    record = [] if calls is None else calls
    module.Made = lambda: ToyBackend(refuse, record, bind, has_variants=has_variants)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    fields.setdefault("api_version", API_VERSION)
    return BackendSpec(name, device_types, f"{module.__name__}:Made", **fields)


def plugin(
    *,
    backends: Sequence[BackendSpec] = (),
    own_formats: Sequence[FormatSpec] = (),
    recipes: Mapping[str, Callable[[], Any]] | None = None,
    **hooks: Callable[..., Any],
) -> types.ModuleType:
    """A plug-in module; ``hooks`` are further hook functions by name."""

    def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
        for spec in backends:
            register(spec)

    def fp8core_register_formats(register: Callable[[FormatSpec], None]) -> None:
        for spec in own_formats:
            register(spec)

    def fp8core_register_recipes(register: Callable[[str, Callable[[], Any]], None]) -> None:
        for name, factory in (recipes or {}).items():
            register(name, factory)

    functions = {
        "fp8core_register_backends": fp8core_register_backends,
        "fp8core_register_formats": fp8core_register_formats,
        "fp8core_register_recipes": fp8core_register_recipes,
        **hooks,
    }
    module = types.ModuleType("toy_plugin")
    for name, function in functions.items():
        setattr(module, name, hookimpl(function))
    return module


def register(*backends: BackendSpec, **hooks: Any) -> None:
    """Register one plug-in called ``toy`` that brings ``backends``."""
    plugins.register(plugin(backends=backends, **hooks), "toy")


def whole_plugin(calls: list[str] | None = None) -> types.ModuleType:
    """A plug-in with one of each: backend ``toy``, format ``toy8``, recipe ``toy_rowwise``."""
    return plugin(
        backends=[backend("toy", calls=calls, preferred_recipe="toy_rowwise")],
        own_formats=[TOY8],
        recipes={"toy_rowwise": lambda: Float8RowwiseScaling(fp8_format="toy8")},
    )
