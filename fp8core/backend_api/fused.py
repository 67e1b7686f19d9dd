"""Optional operations: two in one call, with the results of the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fp8core.backend_api.descriptor_text import text
from fp8core.backend_api.descriptors import QuantizeDesc
from fp8core.backend_api.layers import (
    ActivationBackwardDesc,
    ActivationDesc,
    NormBackwardDesc,
    NormDesc,
)

__all__ = ["AddNormDesc", "FusedDesc"]


@dataclass(frozen=True, slots=True)
class FusedDesc:
    """Optional: a producer and the quantization of its result, in one call.

    Named ``<producer.op>_quantize``. Takes the producer's arguments, then the keywords of
    :class:`QuantizeDesc`; returns the producer's result with a :class:`Quantized` in the place of
    its first tensor. Equals the pair bit for bit; the pair hands over in ``quantize.dtype``, which
    is float32 where the plan does not round before the cast. With ``sums`` the column sums of that
    tensor in float32 ``[n]`` are appended: a bias gradient.
    """

    low_precision: ClassVar[bool] = True
    producer: NormDesc | NormBackwardDesc | ActivationDesc | ActivationBackwardDesc
    quantize: QuantizeDesc
    sums: bool = False

    @property
    def op(self) -> str:
        """The operation's name."""
        return f"{self.producer.op}_quantize"

    def __str__(self) -> str:
        return text(self, f"{self.producer} then {self.quantize}")


@dataclass(frozen=True, slots=True)
class AddNormDesc:
    """Optional: ``add_norm(x, residual, weight, bias=None) -> (sum, y, mean, rstd)``.

    The sum is rounded to ``norm.dtype`` before it is normalized, as the pair does.
    """

    op: ClassVar[str] = "add_norm"
    low_precision: ClassVar[bool] = False
    norm: NormDesc

    def __str__(self) -> str:
        return f"AddNormDesc({self.norm})"
