"""The record of a step: tallies of casts, counts of GEMMs, the first NaN, inf and clipping."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fp8core.backend_api import Operand
from fp8core.errors import NonFiniteError
from fp8core.inspection.monitoring.statistics import Tally
from fp8core.reporting import logger
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer_binding import Binding


class CastKey(NamedTuple):
    """An operand of a linear: ``role`` input, weight or grad_output, and its orientation."""

    layer: str
    role: str
    orientation: str


class GemmKey(NamedTuple):
    """A GEMM of the three of a linear."""

    layer: str
    gemm: str


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The tensor in which NaN or inf was seen, with the count of each.

    ``tensor`` is input, weight, grad_output, or the result of a GEMM: output, grad_input,
    grad_weight.
    """

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
    """The operand in which ``count`` values were clipped to the format's maximum."""

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
    """How often a GEMM ran in one step, with quantized operands and without, and its backend."""

    backend: str
    quantized: int = 0
    high_precision: int = 0


class SavedTensors(NamedTuple):
    """A tensor before its casts, or one for each group; ``splits`` are the rows of the groups."""

    values: Sequence[torch.Tensor]
    splits: Sequence[int]


@dataclass(frozen=True, slots=True)
class SavedLinear:
    """The kept tensors of one linear by role, on the CPU, and the ``binding`` that it ran with."""

    binding: Binding
    tensors: dict[str, SavedTensors] = field(default_factory=dict)


@dataclass(slots=True)
class StepRecord:
    """The tallies and counts of one step; ``formats`` are format and backend of each operand."""

    tallies: dict[CastKey, Tally] = field(default_factory=dict)
    formats: dict[CastKey, tuple[str, str]] = field(default_factory=dict)
    gemms: dict[GemmKey, GemmCount] = field(default_factory=dict)


class Recorder:
    """Records the observations of one monitor's probes, from any thread.

    ``is_on`` is False between observed steps, so that a late backward is not recorded. With
    ``raises``, NaN and inf raise an error where they are seen. With ``keeps``, the first tensors of
    the latest step are kept.
    """

    def __init__(self, *, raises: bool = False, keeps: bool = False) -> None:
        self.is_on = True
        self.step = 0
        self.first_nonfinite: NonFinite | None = None
        self.first_saturation: Saturation | None = None
        self.saved: dict[tuple[str, int], SavedLinear] = {}
        self.current = StepRecord()
        self._raises = raises
        self._keeps = keeps
        self._saved_step = 0
        self._seen: list[tuple[torch.Tensor, str]] = []
        self._versions: dict[str, list[int]] = {}
        self._has_warned = False
        self._lock = threading.Lock()

    def take(self) -> StepRecord:
        """Return the record of the step, and start the record of the next."""
        with self._lock:
            finished, self.current = self.current, StepRecord()
            self._seen = []
            self._versions = {}
        return finished

    def notice(self, layer: str, weights: Sequence[torch.Tensor]) -> None:
        """Warn, once, if a weight changed between two uses in this step: step() was forgotten."""
        versions = [0 if weight.is_inference() else weight._version for weight in weights]
        with self._lock:
            is_changed = self._versions.setdefault(layer, versions) != versions
            is_first = is_changed and not self._has_warned
            self._has_warned |= is_changed
        if is_first:
            logger.warning(
                "monitor: the weight of %r changed within step %d, after it was used: step() was "
                "not called, so the rows of that step mix several batches. Call step() of the "
                "monitor once for each step of the optimizer.",
                layer,
                self.step,
            )

    def add(self, key: CastKey, tally: Tally, format: str, backend: str) -> None:
        """Record the tally of one or more casts to ``format``."""
        with self._lock:
            self.current.tallies.setdefault(key, Tally()).add(tally)
            self.current.formats[key] = (format, backend)
            if tally.saturated and self.first_saturation is None:
                self.first_saturation = Saturation(self.step, *key, tally.saturated)

    def lacks(self, key: CastKey, reference: CastKey) -> bool:
        """Return whether fewer casts were recorded for ``key`` than for ``reference``."""
        with self._lock:
            of_key, of_reference = (
                self.current.tallies.get(cast_key, Tally()) for cast_key in (key, reference)
            )
        return of_key.casts < of_reference.casts

    def count(self, key: GemmKey, backend: str, is_quantized: bool) -> None:
        """Count one run of a GEMM."""
        with self._lock:
            counted = self.current.gemms.setdefault(key, GemmCount(backend))
            counted.quantized += is_quantized
            counted.high_precision += not is_quantized

    def is_new(self, operand: Operand, orientation: str) -> bool:
        """Return whether this is the first call in this step for ``operand`` and orientation."""
        with self._lock:
            for data, its_orientation in self._seen:
                if data is operand.data and its_orientation == orientation:
                    return False
            self._seen.append((operand.data, orientation))
        return True

    def check(self, layer: str, tensor: str, values: Sequence[torch.Tensor]) -> None:
        """Look for NaN and inf; ``first_nonfinite`` holds the first.

        Raises:
            NonFiniteError: there are some, and the monitor has on_nonfinite="raise".
        """
        bad = [value for value in values if not bool(torch.isfinite(value).all())]
        if not bad:
            return
        nan, inf = (
            sum(int(test(value).sum()) for value in bad) for test in (torch.isnan, torch.isinf)
        )
        nonfinite = NonFinite(self.step, layer, tensor, nan, inf)
        with self._lock:
            if self.first_nonfinite is None:
                self.first_nonfinite = nonfinite
        if self._raises:
            raise NonFiniteError(
                f"{nonfinite}; a monitor with on_nonfinite='raise' stops here. With "
                f"on_nonfinite='record' it goes on, and first_nonfinite holds the first."
            )

    def keep(
        self, linear: tuple[str, int], role: str, tensors: SavedTensors, binding: Binding
    ) -> None:
        """Keep a copy of a role's first tensors of a step on the CPU; drop those of older steps."""
        if not self._keeps:
            return
        with self._lock:
            if self._saved_step != self.step:
                self._saved_step, self.saved = self.step, {}
            saved = self.saved.setdefault(linear, SavedLinear(binding))
            if role in saved.tensors:
                return
            copies = [_copy(value) for value in tensors.values]
            saved.tensors[role] = SavedTensors(copies, tuple(tensors.splits))


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a plain copy on the CPU; a QuantizedTensor is dequantized."""
    value = value.detach()
    plain = value.dequantize() if isinstance(value, QuantizedTensor) else value
    return plain.to("cpu", copy=True)
