"""Norm, linear, activation, linear: the feed-forward block as one chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from typing_extensions import override

from fp8core.chain.activation import activation_shape
from fp8core.chain.norm import NormShape
from fp8core.chain.shape import LinkShape
from fp8core.chain.simple import BiasShape
from fp8core.context.recompute import checkpoint as recomputed
from fp8core.modules.calls.parameters import (
    InitMethod,
    check_normalization,
    check_size,
    default_init_method,
    fill,
    make_parameter,
    refuse_arguments,
    resolve_device,
)
from fp8core.modules.layers.layernorm_linear import (
    NORM_PARAMETERS,
    norm_params,
    reset_norm,
    with_output,
)
from fp8core.modules.layers.norm import register_norm
from fp8core.modules.layers.parallel import ALONE, Parallel, ParallelModule, mark_norm, mark_weight
from fp8core.modules.run import run_layer
from fp8core.recipe.plan import LayerRole
from fp8core.tensors.parameter import make_weight

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
    call_fields = (
        *ParallelModule.call_fields,
        *("checkpoint", "return_bias", "return_layernorm_output"),
    )
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
        target = resolve_device(device)
        self._make_parameters(target, params_dtype)
        if delay_wgrad_compute:
            self._delay_wgrads()
        if target.type != "meta":
            self.reset_parameters()

    def _make_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        register_norm(self, self._norm[0], (self.hidden_size,), device, dtype)
        inner = self._ffn * (2 if self._activation.is_gated else 1)
        sizes = (inner, self.hidden_size), (self.hidden_size, self._ffn)
        for name, (rows, columns) in zip(("fc1", "fc2"), sizes, strict=True):
            weight = make_weight((rows, columns), device, dtype, LayerRole(self.kind, self.name))
            bias = make_parameter(rows, device=device, dtype=dtype) if self.use_bias else None
            self.register_parameter(f"{name}_weight", weight)
            self.register_parameter(f"{name}_bias", bias)
        mark_norm(norm_params(self, self._norm[0]), self.sequence_parallel)
        mark_weight(self.fc1_weight, 0)
        mark_weight(self.fc1_bias, 0)
        mark_weight(self.fc2_weight, 1)
        mark_norm([self.fc2_bias], self._spread.sequence)

    def row_blocks(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of the parts that follow each other in parameters with several: the gate
        and the value of a gated activation, of which each rank of a parallel layer has a share."""
        if not self._activation.is_gated:
            return {}
        return dict.fromkeys(("fc1_weight", "fc1_bias"), (self._ffn, self._ffn))

    @property
    def _spread(self) -> Parallel:
        """How the linears are spread over ranks: not without ``set_parallel_mode``."""
        return self.parallel if self.set_parallel_mode else ALONE

    def _fill_parameters(self) -> None:
        """Fill the weights, zero the biases, and start the norm as the identity."""
        reset_norm(self, self.zero_centered_gamma)
        for name, method in zip(("fc1", "fc2"), self._init_methods, strict=True):
            with self._forked():
                fill(self._parameters.get(f"{name}_weight"), method)
            fill(self._parameters.get(f"{name}_bias"), torch.nn.init.zeros_)

    @property
    def is_link(self) -> bool:
        """Whether it can be a part of a chain: not if its forward is computed again."""
        return not self.checkpoint

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the norm, fc1, the activation and fc2, and the links of a parallel layer."""
        kind, eps = self._norm
        hidden, ffn = self.hidden_size, self._ffn
        inner = ffn * (2 if self._activation.is_gated else 1)
        norm_dtype = self.dtype_of("layer_norm_weight")
        before, after = self._spread.before_column, self._spread.after_row
        first, second = ("fc1_bias", "fc2_bias") if self.use_bias else (None, None)
        fc1 = self._linear_shape((hidden, inner), "fc1_weight", first)
        adds_bias = self.use_bias and not self.return_bias
        if not adds_bias or self._spread.size > 1:
            second = None
        fc2 = self._linear_shape((ffn, hidden), "fc2_weight", second)
        bias: tuple[LinkShape, ...] = ()
        if after and adds_bias:  # once, and not by each rank
            bias = (BiasShape(hidden, self.dtype_of("fc2_bias")),)
        return (
            NormShape(kind, hidden, eps, self.zero_centered_gamma, norm_dtype),
            *with_output((*before, fc1), self),
            self._activation,
            *(fc2, *after, *bias),
        )

    @override
    def link_names(self) -> list[tuple[str, ...]] | None:
        linears = ["fc1_weight", "fc2_weight"]
        if self.use_bias:
            linears = ["fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
            linears = linears[:3] if self.return_bias else linears
        return [*NORM_PARAMETERS[self._norm[0]], *((name,) for name in linears)]

    def forward(self, input: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Compute ``[..., hidden_size]`` from ``[..., hidden_size]``.

        Returns the output, followed by ``fc2_bias`` with ``return_bias`` and by the norm's result
        with ``return_layernorm_output``. ``is_first_microbatch`` as in :class:`fp8core.Linear`.
        """
        if self.checkpoint and torch.is_grad_enabled():
            # A graph that torch captures has no recipe that a recompute could miss.
            is_captured = torch.compiler.is_compiling()
            run = torch.utils.checkpoint.checkpoint if is_captured else recomputed
            return run(self._run, input, is_first_microbatch, use_reentrant=False)
        return self._run(input, is_first_microbatch)

    def _run(self, input: torch.Tensor, is_first_microbatch: bool | None) -> Any:
        outputs: list[Any] = run_layer(
            self,
            input,
            is_first_microbatch,
            columns=self.hidden_size,
            num_inner=len(NORM_PARAMETERS[self._norm[0]]),
        )
        if self.return_bias:
            outputs.insert(1, self.fc2_bias)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _describe(self) -> list[str]:
        return [
            f"hidden_size={self.hidden_size}",
            f"ffn_hidden_size={self.ffn_hidden_size}",
            f"activation={self._activation.name}",
            f"bias={self.use_bias}",
        ]
