r"""The record of a step: tallies of casts, counts of GEMMs, the first NaN, inf and clipping.

The statistics of a cast: counts are exact, sums are float64.

``x [rows, k]`` are the values before the cast and ``q`` those of the operand, both in the layout of
the operand: a columnwise operand has the shape of ``x.T``, and if the recipe transforms the values
(the Hadamard transform of NVFP4), ``x`` are the transformed ones. ``F`` are the elements with
finite ``x``, ``f`` is the factor of an element's block (``scale_inv``, times the global one),
``max`` the format's largest value and ``step`` its distance to the next lower one. Then::

    amax             = max |x|                              over F; 0 if F is empty
    underflow_share  = #{x != 0 and q == 0} / #{x != 0}     over F; 0 if all of x is 0
    saturation_share = #{|x| > (max + step / 2) f and q != 0} / #{x != 0}
    sqnr_db          = 10 log10(sum x^2 / sum (x - q)^2)    over F
    worst_row_sqnr_db = the least sqnr_db of a row with a nonzero value
    zero_block_share = #{blocks with x == 0 throughout} / #{blocks}

A value is *saturated* if rounding alone would have taken it beyond ``max``; one in
``(max, max + step / 2]`` is rounded, not clipped. ``sqnr_db`` is inf if the cast changed no value,
NaN if all values are zero, and -inf if a finite value became NaN or inf. ``scale`` is ``1 / f``,
the factor that a block is multiplied by; its minimum, median (the lower of two) and maximum, and
the standard deviation of ``log2 scale`` (of the whole population), are taken over the blocks that
are not zero blocks. NaN and inf in ``x`` are counted, and left out of all other statistics.
The zeros of padding are left out, with the blocks that hold nothing else; a transform spreads
values over the padding among its 16 elements, which then counts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fp8core import formats
from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import NonFiniteError
from fp8core.reporting import logger
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer_binding import Binding
from fp8core.tensors.weights import version_of

EXPONENTS = range(-150, 129)
"""The binary exponents that are counted apart; a smaller or larger one counts as the nearest."""


@dataclass(frozen=True, slots=True, eq=False)
class ObservedCast:
    """A tensor before and after its cast: ``value`` and ``decoded`` ``[rows, k]``.

    ``spec`` is None for high precision. ``factors`` are float32, one a block. ``real`` bool
    ``[rows, k]`` is False at padding; None if there is none. ``is_compared`` is False if no value
    before the cast exists, as for a parameter that is kept in low precision: ``value`` is
    ``decoded`` then, and the statistics that compare the two are NaN.
    """

    value: torch.Tensor
    decoded: torch.Tensor
    spec: OperandSpec | None
    factors: torch.Tensor | None
    real: torch.Tensor | None = None
    is_compared: bool = True


@dataclass(slots=True)
class Tally:
    """Counts and sums of one or more casts; :meth:`add` adds those of further ones.

    Counts and energies add up, ``amax`` is the largest, ``worst_row`` (dB) the least, and the
    blocks of all casts have the same weight. ``scales`` are float64, of the nonzero blocks;
    ``exponents`` counts values by ``floor(log2 |x|)``, one entry for each of :data:`EXPONENTS`;
    ``grid`` is ``log2 scale`` of the first cast's blocks, NaN in a zero block.
    """

    casts: int = 0
    elements: int = 0
    nan: int = 0
    inf: int = 0
    nonzero: int = 0
    underflow: int = 0
    saturated: int = 0
    blocks: int = 0
    zero_blocks: int = 0
    amax: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    worst_row: float = math.nan
    is_compared: bool = True
    scales: list[torch.Tensor] = field(default_factory=list)
    exponents: torch.Tensor | None = None
    grid: torch.Tensor | None = None

    def add(self, tally: Tally) -> None:
        """Add the casts of ``tally``."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(tally, name))
        self.amax = max(self.amax, tally.amax)
        if not tally.worst_row >= self.worst_row:  # NaN: no row yet
            self.worst_row = self.worst_row if math.isnan(tally.worst_row) else tally.worst_row
        self.is_compared = self.is_compared and tally.is_compared
        self.scales += tally.scales
        if self.exponents is None or tally.exponents is None:
            self.exponents = tally.exponents if self.exponents is None else self.exponents
        else:
            self.exponents = self.exponents + tally.exponents
        self.grid = tally.grid if self.grid is None else self.grid

    def share(self, count: int) -> float:
        """Return ``count`` as a share of the nonzero values; NaN if the casts are not compared."""
        if not self.is_compared:
            return math.nan
        return count / self.nonzero if self.nonzero else 0.0

    @property
    def sqnr_db(self) -> float:
        """SQNR over all casts, dB; NaN if they are not compared."""
        return decibels(self.signal, self.noise) if self.is_compared else math.nan

    @property
    def zero_block_share(self) -> float:
        """The share of blocks whose values are all zero; NaN without blocks."""
        return self.zero_blocks / self.blocks if self.blocks else math.nan

    def scale_spread(self) -> tuple[float, float, float, float]:
        """Return minimum, median and maximum of the scales, and the deviation of their log2.

        NaN, four times, without a scale.
        """
        scales = torch.cat(self.scales) if self.scales else torch.empty(0)
        if not scales.numel():
            return (math.nan,) * 4
        deviation = float(scales.log2().std(correction=0))
        return float(scales.min()), float(scales.median()), float(scales.max()), deviation


_COUNTS = ("elements", "nan", "inf", "nonzero", "underflow", "saturated")
_SUMS = ("casts", *_COUNTS, "blocks", "zero_blocks", "signal", "noise")  # what adds up


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``: inf without noise, NaN with neither.

    >>> decibels(100.0, 1.0), decibels(1.0, 0.0), decibels(0.0, 0.0), decibels(1.0, math.inf)
    (20.0, inf, nan, -inf)
    """
    if noise == 0:
        return math.inf if signal else math.nan
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio else -math.inf


@torch.no_grad()
def measure(cast: ObservedCast) -> Tally:
    """Return the tally of one cast. Waits for the device."""
    value = cast.value.to(torch.float64)
    finite = torch.isfinite(value)
    x = torch.where(finite, value, 0.0)
    q = cast.decoded.to(torch.float64)
    error = torch.where(finite, torch.where(torch.isfinite(q), x - q, math.inf), 0.0)
    signal, noise = (x * x).sum(1), (error * error).sum(1)
    rows = 10 * torch.log10(signal / noise)
    rows = torch.where(signal > 0, rows, math.inf)
    nonzero = x != 0
    lost = nonzero & (q == 0)
    elements = x.numel() if cast.real is None else (cast.real | (value != 0)).sum()
    counts = [
        *(elements, value.isnan().sum(), value.isinf().sum()),
        *(nonzero.sum(), lost.sum(), _saturated(cast, x, lost)),
    ]
    largest = x.abs().amax() if x.numel() else 0.0
    worst = rows.amin() if rows.numel() else math.inf
    has_rows = (signal > 0).any()
    numbers = [*counts, largest, signal.sum(), noise.sum(), worst, has_rows]
    stacked = [torch.as_tensor(n, dtype=torch.float64, device=x.device) for n in numbers]
    *counted, amax, total, lost_total, least, has_row = torch.stack(stacked).tolist()
    tally = Tally(casts=1, amax=amax, signal=total, noise=lost_total)
    for name, count in zip(_COUNTS, counted, strict=True):
        setattr(tally, name, int(count))
    tally.worst_row = least if has_row and cast.is_compared else math.nan
    tally.is_compared = cast.is_compared
    tally.exponents = _exponents(x)
    if cast.spec is not None and cast.factors is not None and x.numel():
        _measure_blocks(tally, cast, cast.factors, nonzero)
    return tally


def _saturated(cast: ObservedCast, x: torch.Tensor, lost: torch.Tensor) -> torch.Tensor | int:
    if cast.spec is None or cast.factors is None or not x.numel():
        return 0
    values = formats.by_name(cast.spec.format).values
    largest, below = sorted({abs(value) for value in values if math.isfinite(value)})[:-3:-1]
    factors = cast.factors.to(torch.float64)
    for dim, (size, block) in enumerate(zip(x.shape, cast.spec.block, strict=True)):
        if block:
            factors = factors.repeat_interleave(block, dim).narrow(dim, 0, size)
    return ((x.abs() > (largest + (largest - below) / 2) * factors) & ~lost).sum()


def _exponents(x: torch.Tensor) -> torch.Tensor:
    # frexp: x = m 2^e, m in [1/2, 1)
    exponents = torch.frexp(x[x != 0]).exponent.to(torch.int64) - 1
    bins = exponents.clamp(EXPONENTS.start, EXPONENTS.stop - 1) - EXPONENTS.start
    return torch.bincount(bins, minlength=len(EXPONENTS)).cpu()


def _measure_blocks(
    tally: Tally, cast: ObservedCast, factors: torch.Tensor, nonzero: torch.Tensor
) -> None:
    assert cast.spec is not None
    is_zero = ~_any_in_block(nonzero, cast.spec.block)
    present = torch.ones_like(is_zero)
    # A transform spreads a value over its 16 elements, whichever of them are padding.
    if cast.real is not None:
        present = _any_in_block(cast.real | nonzero, cast.spec.block)
    tally.blocks = int(present.sum())
    tally.zero_blocks = int((present & is_zero).sum())
    scale = 1 / factors.to(torch.float64)
    is_scaled = ~is_zero & torch.isfinite(scale)
    tally.scales = [scale[is_scaled].cpu()]
    tally.grid = torch.where(is_scaled, scale, math.nan).log2().cpu()


def _any_in_block(flags: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return for each block, the last of which may be partial, whether any of its flags is set."""
    extent = [min(step or size, size) for size, step in zip(flags.shape, block, strict=True)]
    pooled = torch.nn.functional.max_pool2d(flags.float()[None], extent, ceil_mode=True)
    return pooled[0] > 0


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
        self._seen: dict[tuple[int, str], torch.Tensor] = {}
        self._versions: dict[str, list[int]] = {}
        self._has_warned = False
        self._lock = threading.Lock()

    def take(self) -> StepRecord:
        """Return the record of the step, and start the record of the next."""
        with self._lock:
            finished, self.current = self.current, StepRecord()
            self._seen = {}
            self._versions = {}
        return finished

    def notice(self, layer: str, weights: Sequence[torch.Tensor]) -> None:
        """Warn, once, if a weight changed between two uses in this step: step() was forgotten."""
        versions = [*map(version_of, weights)]
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
        key = id(operand.data), orientation
        with self._lock:
            is_new = key not in self._seen
            self._seen[key] = operand.data  # which is held, so that no other gets its id
        return is_new

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
