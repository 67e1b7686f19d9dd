r"""The statistics of one cast: counts are exact, sums are float64.

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
from dataclasses import dataclass, field

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec

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
        for name in SUMS:
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
SUMS = ("casts", *_COUNTS, "blocks", "zero_blocks", "signal", "noise")
"""The fields of a tally that add up."""


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
    largest, below = sorted({abs(v) for v in _finite_values(cast.spec.format)})[:-3:-1]
    factors = cast.factors.to(torch.float64)
    for dim, (size, block) in enumerate(zip(x.shape, cast.spec.block, strict=True)):
        if block:
            factors = factors.repeat_interleave(block, dim).narrow(dim, 0, size)
    return ((x.abs() > (largest + (largest - below) / 2) * factors) & ~lost).sum()


def _finite_values(name: str) -> list[float]:
    return [value for value in formats.by_name(name).values if math.isfinite(value)]


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
