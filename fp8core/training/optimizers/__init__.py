"""Optimizers whose step is one operation of a backend for all parameters.

The names and arguments are those of ``transformer_engine.pytorch.optimizers``. Any optimizer of
torch works as well, with :class:`fp8core.MasterWeights` for parameters of lower precision.
"""

from __future__ import annotations

from fp8core.training.optimizers.fused import FusedSGD
from fp8core.training.optimizers.fused_adam import FusedAdam
from fp8core.training.optimizers.multi_tensor import (
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_fp8,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]
