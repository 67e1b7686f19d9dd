"""Norm, linear, activation, linear: the feed-forward block as one chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from typing_extensions import override

from fp8core.chain.activation import activation_shape
from fp8core.chain.shape import LinkShape
from fp8core.context.recompute import checkpoint as recomputed
from fp8core.modules.calls.parameters import (
    InitMethod,
    check_normalization,
    check_size,
    default_init_method,
    refuse_arguments,
)
from fp8core.modules.layers.parallel import (
    ALONE,
    NORM_FIELDS,
    LinearParameters,
    Parallel,
    ParallelModule,
)

_NOT_OFFERED = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "symmetric_ar_type",
)


class LayerNormMLP(ParallelModule):
    """``fc2(activation(fc1(norm(x))))``.

    Parameters ``layer_norm_weight``, ``layer_norm_bias`` (LayerNorm only), ``fc1_weight
    [ffn_hidden_size, hidden_size]`` (twice the rows for a gated activation), ``fc1_bias``,
    ``fc2_weight [hidden_size, ffn_hidden_size]``, ``fc2_bias``.

    Args:
        hidden_size: size of each input and output row.
        ffn_hidden_size: size between the linears, after the activation.
        eps: added to the norm's variance.
        return_bias: return ``(y, fc2_bias)`` with that bias not added.
        init_method, output_layer_init_method: fill fc1_weight and fc2_weight.
        bias: whether both linears have one.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: one of :data:`fp8core.backend_api.ACTIVATIONS`.
        activation_params: of ``clamped_swiglu``: ``limit``, ``alpha``, ``glu_linear_offset``.
        params_dtype, device, name: as in :class:`fp8core.Linear`.
        return_layernorm_output: also return the norm's result in the activation dtype.
        return_layernorm_output_gathered: as in :class:`fp8core.LayerNormLinear`.
        set_parallel_mode: fc1 is column-parallel and fc2 row-parallel over the ranks of a group:
            each has its share of ``ffn_hidden_size``. Without it the layer is the same on all.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker: as in :class:`fp8core.Linear`.
        seq_length, micro_batch_size: accepted for compatibility; sizes are those of the input.
        zero_centered_gamma: the norm's factor is ``1 + layer_norm_weight``.
        delay_wgrad_compute: as in :class:`fp8core.Linear`.
        checkpoint: hold the input alone for backward, which computes everything else again; see
            :func:`fp8core.checkpoint`.

    The other arguments belong to features that are not offered: a value that asks for one raises
    UnsupportedError.
    """

    kind = "layernorm_mlp"
    shape_fields = (*ParallelModule.shape_fields, *NORM_FIELDS)
    call_fields = (*ParallelModule.call_fields, "checkpoint")
    fc1_weight: torch.nn.Parameter
    fc1_bias: torch.nn.Parameter | None
    fc2_weight: torch.nn.Parameter
    fc2_bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: object | None = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__(name)
        refuse_arguments(LayerNormMLP.__init__, locals(), _NOT_OFFERED)
        self.hidden_size = check_size("LayerNormMLP", "hidden_size", hidden_size)
        self.ffn_hidden_size = check_size("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size)
        arguments = (tp_group, tp_size, sequence_parallel)
        self._set_parallel(None, arguments, get_rng_state_tracker)
        self.set_parallel_mode = set_parallel_mode
        self._norm = check_normalization("LayerNormMLP", normalization), eps
        self._ffn = self._spread.part_of("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size)
        self._activation = activation_shape(activation, activation_params)
        self.zero_centered_gamma = zero_centered_gamma
        self.use_bias, self.return_bias = bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.checkpoint = checkpoint
        self._init_methods = (
            init_method or default_init_method,
            output_layer_init_method or default_init_method,
        )
        self._init_parameters(device, params_dtype, delay_wgrad_compute)

    @override
    def _linears(self) -> tuple[LinearParameters, LinearParameters]:
        hidden, ffn, (first, second) = self.hidden_size, self._ffn, self._init_methods
        inner, adds_last = ffn * (2 if self._activation.is_gated else 1), not self.return_bias
        fc1 = ("fc1_weight",), ("fc1_bias",), (inner,), hidden, first, "column", self.use_bias
        fc2 = ("fc2_weight",), ("fc2_bias",), (hidden,), ffn, second, "row"
        return LinearParameters(*fc1), LinearParameters(*fc2, self.use_bias and adds_last)

    def row_blocks(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of the parts that follow each other in parameters with several: the gate
        and the value of a gated activation, of which each rank of a parallel layer has a share."""
        if not self._activation.is_gated:
            return {}
        return dict.fromkeys(("fc1_weight", "fc1_bias"), (self._ffn, self._ffn))

    @property
    @override
    def _spread(self) -> Parallel:
        return self.parallel if self.set_parallel_mode else ALONE

    @property
    def is_link(self) -> bool:
        """Whether it can be a part of a chain: not if its forward is computed again."""
        return not self.checkpoint

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the norm, fc1, the activation and fc2, and the links of a parallel layer."""
        fc1, fc2 = map(self._links_of, self._linears())
        return (*self._behind_norm(fc1), self._activation, *fc2)

    def forward(self, input: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Compute ``[..., hidden_size]`` from ``[..., hidden_size]``.

        Returns the output, followed by ``fc2_bias`` with ``return_bias`` and by the norm's result
        with ``return_layernorm_output``. ``is_first_microbatch`` as in :class:`fp8core.Linear`.
        """
        if self.checkpoint and torch.is_grad_enabled():
            # A graph that torch captures has no recipe that a recompute could miss.
            is_captured = torch.compiler.is_compiling()
            run = torch.utils.checkpoint.checkpoint if is_captured else recomputed
            arguments = input, is_first_microbatch, self.hidden_size
            return run(self._compute, *arguments, use_reentrant=False)
        return self._compute(input, is_first_microbatch, self.hidden_size)

    def _describe(self) -> list[str]:
        return [
            f"hidden_size={self.hidden_size}",
            f"ffn_hidden_size={self.ffn_hidden_size}",
            f"activation={self._activation.name}",
            f"bias={self.use_bias}",
        ]
