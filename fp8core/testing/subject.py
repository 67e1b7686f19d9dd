"""The backend under test, where it is tested, and the reference that judges it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fp8core import formats
from fp8core.backend_api import (
    Alignment,
    Backend,
    DeclaresNumerics,
    DequantizeDesc,
    GemmDesc,
    Numerics,
    OpDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.errors import OperandError, UnsupportedError
from fp8core.testing.compare import Unjudged

__all__ = ["JUDGE", "Subject", "find", "on_cpu"]

JUDGE = "reference"
CPU = torch.device("cpu")


class Subject:
    """A backend, the device it is tested on, and its judge, which computes on the CPU.

    ``subject.run(desc, ...)`` has the backend compute, ``subject.judged(desc, ...)`` the judge,
    with arguments copied to the CPU.
    """

    def __init__(self, name: str, backend: Backend, device: torch.device, judge: Backend) -> None:
        self.name = name
        self.backend = backend
        self.device = device
        self.judge = judge
        self.kept: dict[Any, Any] = {}

    def refuses(self, desc: OpDesc) -> str | None:
        """Return why the backend does not run ``desc``, None if it does.

        A backend that cannot even answer refuses; a law of its own says that this is a fault.
        """
        key = ("refuses", desc)
        if key not in self.kept:
            said = attempt(lambda: self.backend.unsupported(desc, self.device))
            if isinstance(said, Failure):
                self.kept[key] = f"its unsupported() failed: {said}"
            else:
                self.kept[key] = said if said is None else str(said)
        found: str | None = self.kept[key]
        return found

    def run(self, desc: OpDesc, *arguments: Any, **keywords: Any) -> Any:
        """Run ``desc`` by the backend under test."""
        key = ("bind", desc)
        if key not in self.kept:
            self.kept[key] = self.backend.bind(desc, self.device)
        return self.kept[key](*arguments, **keywords)

    def judging(self, desc: OpDesc) -> Callable[..., Any]:
        """Return what runs ``desc`` by the judge, on tensors of the CPU.

        Raises:
            Unjudged: the judge does not know the descriptor either.
        """
        reason = self.judge.unsupported(desc, CPU)
        if reason is not None:
            raise Unjudged(f"the {JUDGE} backend cannot judge {desc}: {reason}")
        return self.judge.bind(desc, CPU)

    def judged(self, desc: OpDesc, *arguments: Any, **keywords: Any) -> Any:
        """Run ``desc`` by the judge, on copies of the arguments.

        Raises:
            Unjudged: the judge does not know the descriptor either.
        """
        arguments, keywords = on_cpu((arguments, keywords))
        return self.judging(desc)(*arguments, **keywords)

    def numerics(self, desc: OpDesc) -> Numerics:
        """Return what the backend declares about the results of ``desc``."""
        if isinstance(self.backend, DeclaresNumerics):
            return self.backend.numerics(desc, self.device)
        return Numerics()

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Return what the backend and the formats' storage want m, n and k to be multiples of."""
        own = self.backend.alignment(desc)
        return own._replace(k=math.lcm(own.k, storage_step(self, desc.a, desc.b)))

    def values(self, spec: OperandSpec | None, operand: Operand) -> torch.Tensor:
        """Return the values ``[rows, k]`` of an operand, in float64 on the CPU."""
        if spec is None:
            plain: torch.Tensor = on_cpu(operand.data)
            return plain.double()
        made: torch.Tensor = self.judged(DequantizeDesc(spec), operand)
        return made.double()

    def elements(self, spec: OperandSpec, operand: Operand) -> torch.Tensor:
        """Return the values of an operand's codes, unscaled, in float32 on the CPU."""
        plain = OperandSpec(spec.format, (0, 0), formats.by_name(spec.format).max)
        made: torch.Tensor = self.judged(
            DequantizeDesc(plain), Operand(operand.data, torch.ones(1, 1))
        )
        return made

    def quantizer(self, desc: QuantizeDesc) -> Any:
        """Return ``run`` of the backend if it quantizes like ``desc``, else a judge's stand-in."""
        if self.refuses(desc) is None:
            return self.run

        def judged(desc: OpDesc, *arguments: Any, **keywords: Any) -> Any:
            return self.here(self.judged(desc, *arguments, **keywords))

        return judged

    def here(self, tree: Any) -> Any:
        """Return a copy of ``tree`` whose tensors are on the device under test."""
        return _moved(tree, self.device)


def storage_step(subject: Subject, *specs: OperandSpec | None) -> int:
    """Return what k must be a multiple of for operands of ``specs`` to exist at all."""
    steps = [1]
    for spec in specs:
        desc = GemmDesc(spec, spec, torch.float32)
        if spec is not None and subject.judge.unsupported(desc, CPU) is None:
            steps.append(subject.judge.alignment(desc).k)
    return math.lcm(*steps)


def on_cpu(tree: Any) -> Any:
    """Return a copy of ``tree`` whose tensors are on the CPU, with the strides they have."""
    return _moved(tree, CPU)


def _moved(tree: Any, device: torch.device) -> Any:
    def move(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone() if x.device == device else x.detach().to(device)

    return pytree.tree_map_only(torch.Tensor, move, tree)


def find(name: str, device: str | None = None) -> Subject:
    """Return the installed backend ``name``, to be tested on ``device`` or on its preferred one.

    Raises:
        RecipeError: no such backend.
        PluginError: its plug-in failed to load.
        OperandError: ``device`` is no device.
        UnsupportedError: the backend cannot be used on this machine, or not on ``device``.
    """
    registry = plugins.load()
    spec = registry.spec(name, "the conformance kit")
    judge = registry.spec(JUDGE, "the conformance kit")
    try:
        where = torch.device(device or spec.device_types[0])
    except RuntimeError:
        raise OperandError(f"{device!r} is no torch device, as cpu or cuda:0 are.") from None
    if where.type not in spec.device_types and not spec.portable:
        raise UnsupportedError(
            f"backend {name!r} runs on {'/'.join(spec.device_types)}, not on {where}."
        )
    reason = registry.unusable(spec)
    if reason is not None:
        raise UnsupportedError(f"backend {name!r} cannot be used here: {reason}")
    try:
        where = torch.empty(0, device=where).device  # "cuda" is "cuda:0" from here on
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedError(f"device {where} cannot be used here: {error}") from None
    return Subject(name, registry.instance(spec), where, registry.instance(judge))
