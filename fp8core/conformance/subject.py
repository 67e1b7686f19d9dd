"""The backend under test, its device, and the reference backend that judges it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from fp8core import formats
from fp8core.backend_api import (
    Alignment,
    Backend,
    BackendSpec,
    DeclaresNumerics,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    Numerics,
    OpDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core.conformance.compare import Unjudged
from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.dispatch.registry import unknown_fields
from fp8core.errors import OperandError, UnsupportedError
from fp8core.torch_ops.private import pytree

Size: TypeAlias = tuple[int, ...]
JUDGE = "reference"
CPU = torch.device("cpu")


class Subject:
    """A backend, the device it is tested on, and its judge, which computes on the CPU.

    ``subject.run(desc, ...)`` has the backend compute, ``subject.judged(desc, ...)`` the judge,
    with arguments copied to the CPU. A backend without a ``spec`` knows every field of operands.
    ``subject.device`` has an index where there can be several: "cuda" is the current one.
    ``sizes`` gives laws about an operation other sizes than their own, in the same form: those at
    which a backend's kernels divide their work in another way.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        device: torch.device,
        judge: Backend,
        spec: BackendSpec | None = None,
        sizes: Mapping[str, Sequence[Size]] | None = None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.backend = backend
        self.device = torch.empty(0, device=device).device  # as tensors on it name it
        self.judge = judge
        self.results: dict[Any, Any] = {}
        self._sizes = sizes or {}

    def sizes(self, op: str, *default: Size) -> Sequence[Size]:
        """Return the sizes with which laws try ``op``: ``default``, or those that were given."""
        return self._sizes.get(op, default)

    def refuses(self, desc: OpDesc) -> str | None:
        """Return why the backend does not support ``desc``, or is not asked; None if it does.

        An ``unsupported()`` that raises counts as a refusal; a law about ``unsupported()`` reports
        it as a fault.
        """
        key = ("refuses", desc)
        if key not in self.results:
            unknown = None if self.spec is None else unknown_fields(self.spec, desc)
            said = unknown or attempt(lambda: self.backend.unsupported(desc, self.device))
            if isinstance(said, Failure):
                self.results[key] = f"its unsupported() failed: {said}"
            else:
                self.results[key] = said if said is None else str(said)
        reason: str | None = self.results[key]
        return reason

    def run(self, desc: OpDesc, *arguments: Any, **keywords: Any) -> Any:
        """Run ``desc`` on the backend under test."""
        return self.bound(desc)(*arguments, **keywords)

    def bound(self, desc: OpDesc) -> Callable[..., Any]:
        """Return the callable that the backend under test has bound for ``desc``."""
        key = ("bind", desc)
        if key not in self.results:
            self.results[key] = self.backend.bind(desc, self.device)
        run: Callable[..., Any] = self.results[key]
        return run

    def variant(self, desc: OpDesc, **fields: int) -> Callable[..., Any] | None:
        """Return the callable of the variant of ``desc`` with these fields, None if the backend
        denies it; of a fusion they are those of its cast."""
        values: dict[str, Any] = dict(fields)
        if isinstance(desc, FusedDesc):
            values = {"quantize": replace(desc.quantize, **values)}
        variant: OpDesc = replace(desc, **values)
        return None if self.refuses(variant) is not None else self.bound(variant)

    def judging(self, desc: OpDesc) -> Callable[..., Any]:
        """Return the judge's callable for ``desc``, which takes tensors on the CPU.

        Raises:
            Unjudged: the judge does not know the descriptor either.
        """
        reason = self.judge.unsupported(desc, CPU)
        if reason is not None:
            raise Unjudged(f"the {JUDGE} backend cannot judge {desc}: {reason}")
        return self.judge.bind(desc, CPU)

    def judged(self, desc: OpDesc, *arguments: Any, **keywords: Any) -> Any:
        """Run ``desc`` on the judge, with copies of the arguments.

        Raises:
            Unjudged: the judge does not know the descriptor either.
        """
        arguments, keywords = on_cpu((arguments, keywords))
        return self.judging(desc)(*arguments, **keywords)

    def numerics(self, desc: OpDesc) -> Numerics:
        """Return the error bounds that the backend declares for ``desc``, else the default ones."""
        if isinstance(self.backend, DeclaresNumerics):
            return self.backend.numerics(desc, self.device)
        return Numerics()

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Return the numbers that m, n and k must be multiples of, for the backend and for the
        storage of the formats."""
        align = self.backend.alignment(desc)
        return align._replace(k=math.lcm(align.k, storage_step(self, desc.a, desc.b)))

    def values(self, spec: OperandSpec | None, operand: Operand) -> torch.Tensor:
        """Return the values ``[rows, k]`` of an operand, in float64 on the CPU."""
        if spec is None:
            plain: torch.Tensor = on_cpu(operand.data)
            return plain.double()
        dequantized: torch.Tensor = self.judged(DequantizeDesc(spec), operand)
        return dequantized.double()

    def elements(self, spec: OperandSpec, operand: Operand) -> torch.Tensor:
        """Return the values of an operand's codes, unscaled, in float32 on the CPU."""
        plain = OperandSpec(spec.format, (0, 0), formats.by_name(spec.format).max)
        decoded: torch.Tensor = self.judged(
            DequantizeDesc(plain), Operand(operand.data, torch.ones(1, 1))
        )
        return decoded

    def quantizer(self, desc: QuantizeDesc) -> Any:
        """Return :meth:`run` if the backend supports ``desc``, else a function that lets the judge
        quantize and copies the result to the device."""
        if self.refuses(desc) is None:
            return self.run

        def judged(desc: OpDesc, *arguments: Any, **keywords: Any) -> Any:
            return self.here(self.judged(desc, *arguments, **keywords))

        return judged

    def here(self, tree: Any) -> Any:
        """Return a copy of ``tree`` whose tensors are on the device under test."""
        return _moved(tree, self.device)


def storage_step(subject: Subject, *specs: OperandSpec | None) -> int:
    """Return the number that k must be a multiple of for operands of ``specs`` to be stored."""
    steps = [1]
    for spec in specs:
        desc = GemmDesc(spec, spec, torch.float32)
        if spec is not None and subject.judge.unsupported(desc, CPU) is None:
            steps.append(subject.judge.alignment(desc).k)
    return math.lcm(*steps)


def on_cpu(tree: Any) -> Any:
    """Return a copy of ``tree`` whose tensors are on the CPU, with their strides."""
    return _moved(tree, CPU)


def _moved(tree: Any, device: torch.device) -> Any:
    def move(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone() if x.device == device else x.detach().to(device)

    return pytree.tree_map_only(torch.Tensor, move, tree)


def find(name: str, device: str | None = None) -> Subject:
    """Return the installed backend ``name``, to be tested on ``device`` or on its preferred one.

    Raises:
        RecipeError: no backend of this name is installed.
        PluginError: its plug-in failed to load.
        OperandError: ``device`` does not name a device.
        UnsupportedError: the backend cannot be used on this machine, or not on ``device``.
    """
    registry = plugins.load()
    spec = registry.spec(name, "the conformance kit")
    judge = registry.spec(JUDGE, "the conformance kit")
    try:
        torch_device = torch.device(device or spec.device_types[0])
    except RuntimeError:
        raise OperandError(f"{device!r} is no torch device, as cpu or cuda:0 are.") from None
    if torch_device.type not in spec.device_types and not spec.portable:
        raise UnsupportedError(
            f"backend {name!r} runs on {'/'.join(spec.device_types)}, not on {torch_device}."
        )
    reason = registry.unusable(spec)
    if reason is not None:
        raise UnsupportedError(f"backend {name!r} cannot be used here: {reason}")
    backends = registry.instance(spec), registry.instance(judge)
    try:
        return Subject(name, backends[0], torch_device, backends[1], spec)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedError(f"device {torch_device} cannot be used here: {error}") from None
