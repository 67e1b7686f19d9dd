"""The computation of a linear layer: sizes, dtypes, and what becomes of its gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from fp8core.backend_api import GemmDesc, GroupedGemmDesc
from fp8core.chain.shape import LinkShape
from fp8core.recipe.plan import GemmPlan, LinearPlan


@dataclass(frozen=True, slots=True)
class LinearSpec(LinkShape):
    """The computation of a linear layer, apart from its recipe; ``groups`` is 0 for a dense layer.

    ``accumulates``: weight gradients are added to ``weight.main_grad``. ``offsets_on_device``: the
    host never reads the sizes of the groups. ``delays_wgrad``: backward leaves them to the layer's
    queue. ``saves_input``: backward casts the input again instead of holding its codes.
    """

    in_features: int
    out_features: int
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    groups: int = 0
    accumulates: bool = False
    offsets_on_device: bool = False
    delays_wgrad: bool = False
    saves_input: bool = False

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return self.groups or 1

    @property
    def num_params(self) -> int:
        """The number of weights and biases."""
        return self.num_weights * (1 if self.bias_dtype is None else 2)

    @property
    def features(self) -> tuple[int, int]:
        """The columns that its matrix product takes and returns."""
        return self.in_features, self.out_features

    @property
    def quantizes(self) -> bool:
        """Whether its link quantizes: input and gradient, unless the recipe leaves them alone."""
        return True

    def columns(self, columns: int) -> int:
        """Return the output features."""
        return self.out_features

    def input_columns(self, columns: int | None) -> int:
        """Return the input features."""
        return self.in_features

    def expected_columns(self, columns: int) -> str | None:
        """Return the input features unless they are ``columns``."""
        return None if columns == self.in_features else str(self.in_features)

    def with_offsets_on_device(self) -> LinearSpec:
        """Return the shape for calls whose group sizes the host never reads."""
        return dataclasses.replace(self, offsets_on_device=True)

    def gemm_desc(self, name: str, plan: LinearPlan, dtype: torch.dtype) -> GemmDesc:
        """Return what ``name``, fprop, dgrad or wgrad, computes for activations of ``dtype``."""
        gemm: GemmPlan = getattr(plan, name)
        # In high precision the result is rounded to the activation dtype first, as torch.autocast
        # does.
        is_low = gemm.a is not None or gemm.b is not None
        out_dtype = self.weight_dtype if name == "wgrad" and is_low else dtype
        accumulates = name == "wgrad" and self.accumulates
        if accumulates:
            out_dtype = torch.float32
        fields = (gemm.a, gemm.b, out_dtype, accumulates, gemm.fast_accumulation)
        if not self.groups:
            return GemmDesc(*fields)
        return GroupedGemmDesc(*fields, name == "wgrad", self.offsets_on_device)
