"""Intervals of a median, and of ratios of what was measured in the same turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["CONFIDENCE", "Estimate", "geometric_mean", "median_interval", "ratios"]

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A median, and an interval that holds that of the distribution with :data:`CONFIDENCE`.

    With fewer than six values the interval is their range, which holds it less often.
    """

    median: float
    low: float
    high: float
    turns: int

    @property
    def relative_width(self) -> float:
        """The width of the interval over the median."""
        return (self.high - self.low) / self.median

    def text(self, digits: int = 3, to: str = "-") -> str:
        """Return the median, and the interval in brackets."""
        values = (f"{value:.{digits}f}" for value in self[:3])
        return "{} ({}{to}{})".format(*values, to=to)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median of at least one value, and an interval between two of the values.

    Of n independent values, the number below the median of their distribution is binomial with
    probability 1/2, whatever the distribution; so the k-th smallest and the k-th largest enclose
    it with probability ``1 - 2 P(B < k)``.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered), (1 - confidence) / 2)
    middle = statistics.median(ordered)
    return Estimate(middle, ordered[rank - 1], ordered[len(ordered) - rank], len(ordered))


def _rank(count: int, tail: float) -> int:
    """Return the largest k with ``P(Binomial(count, 1/2) < k) <= tail``, but at least 1."""
    below, rank = 0, 0
    for successes in range(count):
        below += math.comb(count, successes)
        if below > tail * 2**count:
            break
        rank = successes + 1
    return max(1, rank)


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of each turn: both sides of it ran on the chip as it was then."""
    return [value / other for value, other in zip(values, others, strict=True)]


def geometric_mean(values: Sequence[float]) -> float:
    """Return that of at least one positive value."""
    return math.exp(sum(map(math.log, values)) / len(values))
