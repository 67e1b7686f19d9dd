"""The quantizer to 4 bits under two levels of scales."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed

from fp8core.backend_api import OperandSpec
from fp8core.errors import RecipeError
from fp8core.functional.quantizers.dtype import DType, format_of
from fp8core.functional.quantizers.float8 import ReducingQuantizer
from fp8core.recipe.plan import TensorPlan


class NVFP4Quantizer(ReducingQuantizer):
    """e2m1 elements, an e4m3 scale for every 16 along the contraction, one float32 scale above.

    Args:
        fp4_dtype: ``DType.kFloat4E2M1``.
        rowwise, columnwise: which orientations are made.
        with_amax_reduction: take the maximum of amaxes over ``amax_reduction_group``, of all
            processes if that is None; each holds a part of one tensor.
        with_rht: the columnwise operand is transformed by a Hadamard matrix of 16 along its rows'
            contraction first. Its amax is always that of the transformed elements, so
            ``with_post_rht_amax`` says nothing more.
        with_2d_quantization: blocks of 16 x 16.
        stochastic_rounding: elements are rounded up or down with probabilities that keep the mean.
        row_scaled_nvfp4: a float32 scale for each row instead of one for the tensor.
        nvfp4_use_4over6: each block maps its amax to 6 or to 4, whichever loses less.
        nvfp4_e4m3_max: with ``nvfp4_use_4over6`` the value that the largest block scale maps to,
            448 or 256; unused without it.
        nvfp4_4over6_err_mode: what is compared, ``"MAE"`` or ``"MSE"``.
        with_random_sign_mask: the transform takes its fixed signs; False leaves them out.

    Raises:
        RecipeError: an option has another value, or rules another one out; see
            :class:`fp8core.backend_api.OperandSpec`.
    """

    def __init__(
        self,
        fp4_dtype: object = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        owner = type(self).__name__
        if format_of(fp4_dtype, owner) != "e2m1":
            raise RecipeError(f"{owner}(fp4_dtype={fp4_dtype!r}): expected DType.kFloat4E2M1.")
        mode = nvfp4_4over6_err_mode
        if not isinstance(mode, str) or mode.upper() not in ("MAE", "MSE"):
            raise RecipeError(f"{owner}(nvfp4_4over6_err_mode={mode!r}): expected 'MAE' or 'MSE'.")
        self.dtype = fp4_dtype
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = mode.upper()
        self.with_random_sign_mask = with_random_sign_mask
        _ = self.plan  # a RecipeError belongs here

    @property
    def plan(self) -> TensorPlan:
        """Scales of two levels."""
        row = OperandSpec(
            "e2m1",
            (16, 16) if self.with_2d_quantization else (1, 16),
            6.0,
            scale_format="e4m3",
            stochastic=self.stochastic_rounding,
            row_scaled=self.row_scaled_nvfp4,
            four_over_six=self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else None,
            scale_max=float(self.nvfp4_e4m3_max),
        )
        if not self.with_rht:
            return TensorPlan(row, row)
        name = "hadamard16" if self.with_random_sign_mask else "hadamard16_unsigned"
        return TensorPlan(row, dataclasses.replace(row, transform=name))
