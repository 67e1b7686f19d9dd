"""What a recipe decides for a layer: a 3 x 2 table of operands, and nothing else.

A linear layer is three GEMMs over three tensors, each quantized along the dimension contracted:

====================== ======================= =======================
GEMM                   a ``[m, k]``            b ``[n, k]``
====================== ======================= =======================
fprop  y  = x w^T      input, rowwise          weight, rowwise
dgrad  dx = dy w       grad_output, rowwise    weight, columnwise
wgrad  dw = dy^T x     grad_output, columnwise input, columnwise
====================== ======================= =======================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import OperandSpec

__all__ = [
    "HIGH_PRECISION",
    "NONFINITE",
    "AmaxAlgorithm",
    "DelayedPlan",
    "GemmPlan",
    "LayerRole",
    "LinearPlan",
    "ScalingAlgorithm",
    "TensorPlan",
]

AmaxAlgorithm: TypeAlias = str | Callable[[torch.Tensor], torch.Tensor]
"""``"max"``, ``"most_recent"``, or ``f(amax_history [length, slots]) -> amax [slots]``."""

ScalingAlgorithm: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor
]
"""``f(amax [slots], scale [slots], fp8_max [slots], recipe) -> scale [slots]``."""


@dataclass(frozen=True, slots=True)
class LayerRole:
    """What a layer is to its model: ``kind`` is ``"linear"`` or ``"grouped_linear"``, ``name`` its
    path in the model where the model was prepared or the layer was given one."""

    kind: str = "linear"
    name: str | None = None


class TensorPlan(NamedTuple):
    """How one tensor is quantized, in the orientation of each of its two GEMMs; None: it is not."""

    rowwise: OperandSpec | None
    columnwise: OperandSpec | None


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The operands of one GEMM (None: high precision), and how it may accumulate."""

    a: OperandSpec | None = None
    b: OperandSpec | None = None
    fast_accumulation: bool = False


@dataclass(frozen=True, slots=True)
class DelayedPlan:
    """How delayed scales follow the amaxes; see the table of DelayedScaling in docs.

    ``scale = max * 2^-margin / amax`` over the last ``history_len`` updates.
    """

    history_len: int
    margin: float
    amax_algorithm: AmaxAlgorithm
    scaling_algorithm: ScalingAlgorithm | None
    reduce_amax: bool


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """The three GEMMs of a linear layer; ``delayed`` if any operand is scaled by delayed scales.

    ``nonfinite`` says what a cast makes of a tensor with NaN or inf: ``"saturate"``, the codes that
    the format has for them, inf becoming its largest value; ``"propagate"``, also scales of NaN, so
    that every result that the tensor has part in is NaN.
    """

    fprop: GemmPlan = GemmPlan()
    dgrad: GemmPlan = GemmPlan()
    wgrad: GemmPlan = GemmPlan()
    delayed: DelayedPlan | None = None
    nonfinite: str = "saturate"

    @property
    def is_high_precision(self) -> bool:
        """Whether nothing is quantized."""
        gemms = (self.fprop, self.dgrad, self.wgrad)
        return all(gemm.a is None and gemm.b is None for gemm in gemms)

    @property
    def input(self) -> TensorPlan:
        """How the input is quantized."""
        return TensorPlan(self.fprop.a, self.wgrad.b)

    @property
    def weight(self) -> TensorPlan:
        """How the weight is quantized."""
        return TensorPlan(self.fprop.b, self.dgrad.b)

    @property
    def grad_output(self) -> TensorPlan:
        """How the gradient of the output is quantized."""
        return TensorPlan(self.dgrad.a, self.wgrad.a)


NONFINITE = ("saturate", "propagate")
"""What ``LinearPlan.nonfinite`` may be."""

HIGH_PRECISION = LinearPlan()
"""No quantization at all."""


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
