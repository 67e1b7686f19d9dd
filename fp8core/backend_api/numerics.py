"""By how much a backend's results may differ from the reference's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from fp8core.backend_api.operations import OpDesc

__all__ = ["DeclaresNumerics", "Numerics"]


@dataclass(frozen=True, slots=True)
class Numerics:
    """By how much a backend's results may differ; the conformance tests hold it to that.

    Attributes:
        source: where the figures below come from: a manual's section, a measurement. Needed as
            soon as one of them is not the default.
        code_steps: how many representable values of the format a quantized element may be away
            from the reference's. 0: bit for bit.
        scale_ulps: how many units in the last place a scale may be away from the reference's, or
            codes, where scales are bytes. 0: bit for bit.
        amax_range: the largest magnitudes of a block, both ends included, for which the two bounds
            above hold. Codes and scales of other blocks are the device's: those of tiny values and
            of inf. A block of zeros gives zeros in any case. NaN is in the default range alone.
        sum_error_per_term, sum_error: a product ``d = a @ b.T`` over ``k`` terms is within ``c *
            (|a| @ |b|.T)`` plus 1 ulp of the output of the exact sum, with ``c = sum_error + k *
            sum_error_per_term``. The defaults are those of float32 sums in any order, with four
            more roundings for the scales, wherever they are applied.
    """

    source: str = ""
    code_steps: int = 0
    scale_ulps: int = 0
    amax_range: tuple[float, float] = (0.0, math.inf)
    sum_error_per_term: float = 2.0**-24
    sum_error: float = 2.0**-22


@runtime_checkable
class DeclaresNumerics(Protocol):
    """A backend that bounds the difference of its results; without this it is ``Numerics()``."""

    def numerics(self, desc: OpDesc, device: torch.device) -> Numerics:
        """Return the bounds that hold for ``desc``, a supported descriptor, on ``device``."""
