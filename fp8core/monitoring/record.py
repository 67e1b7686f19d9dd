"""What is taken down while layers run: tallies of casts, counts of GEMMs, the first bad values."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fp8core.backend_api import Operand
from fp8core.errors import NonFiniteError
from fp8core.monitoring.statistics import Tally
from fp8core.reporting import logger
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Binding

__all__ = [
    "CastKey",
    "GemmCount",
    "GemmKey",
    "KeptLinear",
    "KeptTensors",
    "NonFinite",
    "Recorder",
    "Saturation",
    "StepRecord",
]


class CastKey(NamedTuple):
    """One operand of one linear: ``role`` input, weight or grad_output, and its orientation."""

    layer: str
    role: str
    orientation: str


class GemmKey(NamedTuple):
    """One of the three GEMMs of one linear."""

    layer: str
    gemm: str


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where NaN or inf was seen: ``tensor`` is input, weight, grad_output, or the result of a GEMM:
    output, grad_input, grad_weight; ``nan`` and ``inf`` count its elements."""

    step: int
    layer: str
    tensor: str
    nan: int
    inf: int

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.tensor} of {self.layer!r} has {self.nan} NaN, {self.inf} inf"
        )


@dataclass(frozen=True, slots=True)
class Saturation:
    """Where ``count`` values were clipped to the format's maximum."""

    step: int
    layer: str
    tensor: str
    orientation: str
    count: int

    def __str__(self) -> str:
        where = f"{self.tensor} ({self.orientation}) of {self.layer!r}"
        return f"step {self.step}: {self.count} values of {where} were clipped"


@dataclass(slots=True)
class GemmCount:
    """How often a GEMM ran in one step, with quantized operands and without, and who ran it."""

    backend: str
    quantized: int = 0
    high_precision: int = 0


class KeptTensors(NamedTuple):
    """A tensor before its casts, or one a group; ``splits`` are the rows of its groups."""

    values: Sequence[torch.Tensor]
    splits: Sequence[int]


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """What is kept of one linear, by role, on the CPU; the ``binding`` that it ran with."""

    binding: Binding
    tensors: dict[str, KeptTensors] = field(default_factory=dict)


@dataclass(slots=True)
class StepRecord:
    """What one step has shown so far; ``formats`` are format and backend of each operand."""

    tallies: dict[CastKey, Tally] = field(default_factory=dict)
    formats: dict[CastKey, tuple[str, str]] = field(default_factory=dict)
    gemms: dict[GemmKey, GemmCount] = field(default_factory=dict)


class Recorder:
    """Takes down what the probes of one monitor see, from any thread.

    ``is_on`` is False between observed steps: a backward that comes late finds nobody listening.
    ``raises``: NaN and inf raise where they are seen. ``keeps``: the first tensors of the latest
    step are kept.
    """

    def __init__(self, *, raises: bool = False, keeps: bool = False) -> None:
        self.is_on = True
        self.step = 0
        self.first_nonfinite: NonFinite | None = None
        self.first_saturation: Saturation | None = None
        self.kept: dict[tuple[str, int], KeptLinear] = {}
        self.current = StepRecord()
        self._raises = raises
        self._keeps = keeps
        self._kept_step = 0
        self._seen: list[tuple[torch.Tensor, str]] = []
        self._versions: dict[str, list[int]] = {}
        self._said_merged = False
        self._lock = threading.Lock()

    def take(self) -> StepRecord:
        """Return what the step has shown, and start another."""
        with self._lock:
            taken, self.current = self.current, StepRecord()
            self._seen = []
            self._versions = {}
        return taken

    def notice(self, layer: str, weights: Sequence[torch.Tensor]) -> None:
        """Warn, once, if a weight changed since it was used in this step: batches are merged."""
        found = [0 if one.is_inference() else one._version for one in weights]
        with self._lock:
            is_merged = self._versions.setdefault(layer, found) != found and not self._said_merged
            self._said_merged |= is_merged
        if is_merged:
            logger.warning(
                "monitor: the weight of %r changed within step %d, in which it had been used: "
                "step() was not called, and the rows of that step are of several batches together. "
                "Call step() of the monitor once for each step of the optimizer.",
                layer,
                self.step,
            )

    def add(self, key: CastKey, tally: Tally, format: str, backend: str) -> None:
        """Take down the tally of one or more casts to ``format``."""
        with self._lock:
            self.current.tallies.setdefault(key, Tally()).add(tally)
            self.current.formats[key] = (format, backend)
            if tally.saturated and self.first_saturation is None:
                self.first_saturation = Saturation(self.step, *key, tally.saturated)

    def lacks(self, key: CastKey, other: CastKey) -> bool:
        """Say whether fewer casts were taken down for ``key`` than for ``other``."""
        with self._lock:
            own, of_other = (self.current.tallies.get(one, Tally()) for one in (key, other))
        return own.casts < of_other.casts

    def count(self, key: GemmKey, backend: str, is_quantized: bool) -> None:
        """Count one run of a GEMM."""
        with self._lock:
            counted = self.current.gemms.setdefault(key, GemmCount(backend))
            counted.quantized += is_quantized
            counted.high_precision += not is_quantized

    def is_new(self, operand: Operand, orientation: str) -> bool:
        """Say whether ``operand`` was not asked about in this step, in this orientation."""
        with self._lock:
            for data, way in self._seen:
                if data is operand.data and way == orientation:
                    return False
            self._seen.append((operand.data, orientation))
        return True

    def check(self, layer: str, tensor: str, values: Sequence[torch.Tensor]) -> None:
        """Look for NaN and inf; the first are remembered.

        Raises:
            NonFiniteError: there are some, and the monitor was asked to raise.
        """
        bad = [one for one in values if not bool(torch.isfinite(one).all())]
        if not bad:
            return
        nan, inf = (sum(int(test(one).sum()) for one in bad) for test in (torch.isnan, torch.isinf))
        found = NonFinite(self.step, layer, tensor, nan, inf)
        with self._lock:
            if self.first_nonfinite is None:
                self.first_nonfinite = found
        if self._raises:
            raise NonFiniteError(
                f"{found}; a monitor with on_nonfinite='raise' stops here. on_nonfinite='record' "
                f"goes on and keeps the first as first_nonfinite."
            )

    def keep(
        self, linear: tuple[str, int], role: str, tensors: KeptTensors, binding: Binding
    ) -> None:
        """Keep a copy of a tensor on the CPU, the first of its step; older steps are dropped."""
        if not self._keeps:
            return
        with self._lock:
            if self._kept_step != self.step:
                self._kept_step, self.kept = self.step, {}
            kept = self.kept.setdefault(linear, KeptLinear(binding))
            if role in kept.tensors:
                return
            copies = [_copy(value) for value in tensors.values]
            kept.tensors[role] = KeptTensors(copies, tuple(tensors.splits))


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a plain copy on the CPU; of a QuantizedTensor, the values that it stands for."""
    value = value.detach()
    plain = value.dequantize() if isinstance(value, QuantizedTensor) else value
    return plain.to("cpu", copy=True)
