"""How a layer is quantized, as values: what a recipe returns, and custom recipes build."""

from __future__ import annotations

from fp8core.recipe.plan import (
    HIGH_PRECISION,
    NONFINITE,
    AmaxAlgorithm,
    AttentionPlan,
    DelayedPlan,
    GemmPlan,
    LayerRole,
    LinearPlan,
    Plan,
    ScalingAlgorithm,
    SlotNames,
    TensorPlan,
)

__all__ = [
    "HIGH_PRECISION",
    "NONFINITE",
    "AmaxAlgorithm",
    "AttentionPlan",
    "DelayedPlan",
    "GemmPlan",
    "LayerRole",
    "LinearPlan",
    "Plan",
    "ScalingAlgorithm",
    "SlotNames",
    "TensorPlan",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
