"""A norm and a linear layer as one chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from fp8core.chain.shape import LinkShape
from fp8core.errors import OperandError, RecipeError
from fp8core.modules.calls.parameters import (
    InitMethod,
    check_normalization,
    refuse_arguments,
)
from fp8core.modules.layers.linear import NOT_OFFERED, Linear
from fp8core.modules.layers.parallel import NORM_FIELDS

_OF_LINEAR = (
    *("in_features", "out_features", "sequence_parallel", "tp_group", "tp_size", "bias", "name"),
    *("get_rng_state_tracker", "rng_tracker_name", "parallel_mode", "fuse_wgrad_accumulation"),
    *("init_method", "return_bias", "params_dtype", "parameters_split", "device"),
    "delay_wgrad_compute",
)
"""The arguments that the linear takes as they are."""


class LayerNormLinear(Linear):
    """``Linear(norm(x))``; the norm's result is quantized for the linear in one step.

    Parameters ``layer_norm_weight``, ``layer_norm_bias`` (LayerNorm only) and those of
    :class:`fp8core.Linear`, whose arguments have the same meaning here.

    Args:
        eps: added to the variance.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: the norm's factor is ``1 + layer_norm_weight``.
        return_layernorm_output: also return the norm's result, rounded to the activation dtype;
            the linear then quantizes that rounded value.
        return_layernorm_output_gathered: with sequence parallelism, return that of the rows of all
            ranks; it then travels in high precision.
    """

    kind = "layernorm_linear"
    shape_fields = (*Linear.shape_fields, *NORM_FIELDS)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        rng_tracker_name: str | None = None,
    ) -> None:
        arguments = locals()
        refuse_arguments(LayerNormLinear.__init__, arguments, NOT_OFFERED)
        self._norm = (check_normalization("LayerNormLinear", normalization), eps)
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        if parallel_mode == "row":
            raise OperandError(
                "LayerNormLinear(parallel_mode='row'): a norm takes whole rows, and a row-parallel "
                "linear takes a part of each. Use a norm and fp8core.Linear."
            )
        super().__init__(**{argument: arguments[argument] for argument in _OF_LINEAR})

    def _make_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        if "layer_norm_" in (prefix for prefix, _ in self._parts):
            raise RecipeError(
                "LayerNormLinear(parameters_split=...): 'layer_norm' is the norm's own name."
            )
        super()._make_parameters(device, dtype)

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return self._behind_norm(super().link_shapes())

    def forward(
        self,
        input: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Compute ``[..., out_features]`` from ``[..., in_features]``.

        Returns the output, followed by the bias with ``return_bias`` and by the norm's result with
        ``return_layernorm_output``. The other arguments are those of :meth:`Linear.forward`.
        """
        shapes = self._call_shapes(fp8_output, fp8_grad) if fp8_output or fp8_grad else None
        return self._compute(input, is_first_microbatch, self.in_features, shapes)
