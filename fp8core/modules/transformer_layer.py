"""A Transformer layer: attention, feed-forward block, norms and residuals."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fp8core.chain.node import is_under_torch_autocast
from fp8core.errors import OperandError, RecipeError, checked_choice
from fp8core.modules.calls.inputs import check_kind
from fp8core.modules.calls.parameters import InitMethod, check_probability, refuse_arguments
from fp8core.modules.composition import (
    ComposedLayer,
    LayerCall,
    Segment,
    is_seen,
    kind_of,
    told_apart,
)
from fp8core.modules.layers.layernorm_mlp import LayerNormMLP
from fp8core.modules.layers.norm import LayerNorm, RMSNorm
from fp8core.modules.layers.operation import DropPath, SampleSplit
from fp8core.modules.multihead_attention import (
    ARGUMENTS,
    OF_GROUP,
    MultiheadAttention,
    check_main_grad,
    picked,
)
from fp8core.modules.sequences.attention_arguments import PLAIN_OPTIONS
from fp8core.modules.sequences.inference import InferenceParams

LAYER_TYPES = ("encoder", "decoder")
_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
# The other ub_ arguments refine ub_tp_comm_overlap, and have no effect without it.
_NOT_OFFERED = ("ub_tp_comm_overlap",)
# The arguments that attention and feed-forward block take as they are, and those of attention.
_OF_BLOCKS = (
    *("bias", "normalization", "zero_centered_gamma", "fuse_wgrad_accumulation", "init_method"),
    *("output_layer_init_method", "params_dtype", "device", "set_parallel_mode", *OF_GROUP),
)
_OF_ATTENTION = (
    *("hidden_size", "num_attention_heads", "kv_channels", "num_gqa_groups", "layer_number"),
    *("attention_dropout", "layernorm_epsilon"),
    *("softcap", "softmax_type", "fuse_qkv_params", "qkv_weight_interleaved"),
    *("rotary_pos_interleaved", "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope"),
)

# What the layer calls the arguments of self attention, and those of cross attention, if otherwise.
_OF_SELF = {
    "attn_mask_type": "self_attn_mask_type",
    "cu_seqlens_kv": "cu_seqlens_q",
    "cu_seqlens_kv_padded": "cu_seqlens_q_padded",
    "max_seqlen_kv": "max_seqlen_q",
}
_OF_CROSS = {
    "attention_mask": "enc_dec_attn_mask",
    "attn_mask_type": "enc_dec_attn_mask_type",
    "window_size": "enc_dec_window_size",
    "bottom_right_diagonal": "enc_dec_bottom_right_diagonal",
}


class TransformerLayer(ComposedLayer):
    """Attention and a feed-forward block, each added to its input.

    ``self_attention`` (a :class:`fp8core.MultiheadAttention`), for a decoder ``inter_attention``,
    ``layernorm_mlp`` (a :class:`fp8core.LayerNormMLP`), and ``layernorm`` with
    ``output_layernorm``: parameter names and shapes are Transformer Engine's. Only the linear
    layers, and attention if the recipe says so, take the precision of the active ``autocast``.

    Args:
        hidden_size: size of each input and output row.
        ffn_hidden_size: size between the linears of the feed-forward block.
        num_attention_heads, num_gqa_groups, kv_channels, layer_number: as in
            :class:`fp8core.MultiheadAttention`.
        layernorm_epsilon: added to the variance of each norm.
        hidden_dropout: probability of dropout on the output of attention and feed-forward block.
        attention_dropout: probability of dropout on the attention weights.
        init_method, output_layer_init_method: fill the weights that read the residual stream, and
            those that write to it; the default is normal with standard deviation 0.023.
        self_attn_mask_type, window_size, bottom_right_diagonal, softcap, softmax_type: of self
            attention; see :class:`fp8core.DotProductAttention`.
        enc_dec_attn_mask_type, enc_dec_bottom_right_diagonal, enc_dec_window_size: of a decoder's
            cross attention.
        apply_residual_connection_post_layernorm: the residual is a block's normalized input.
        output_layernorm: normalize the layer's output instead of self attention's input (post-LN).
        parallel_attention_mlp: attention and feed-forward block read the same input, and their sum
            is added to it once.
        layer_type: ``"encoder"``, or ``"decoder"``, which also attends to an encoder's output.
        drop_path_rate: probability with which a sample skips a block in training.
        fuse_qkv_params, qkv_weight_interleaved, rotary_pos_interleaved: as in
            :class:`fp8core.MultiheadAttention`.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope: likewise.
        bias: whether the linear layers have one.
        activation, activation_params: as in :class:`fp8core.LayerNormMLP`.
        normalization, zero_centered_gamma: of each norm, as in :class:`fp8core.LayerNormLinear`.
        attn_input_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        params_dtype, device, name, fuse_wgrad_accumulation: as in :class:`fp8core.Linear`;
            accumulation needs ``fuse_qkv_params``.
        seq_length, micro_batch_size: accepted for compatibility; sizes are those of the input.
        set_parallel_mode, tp_group, tp_size, sequence_parallel, get_rng_state_tracker: as in
            :class:`fp8core.MultiheadAttention` and :class:`fp8core.LayerNormMLP`. With sequence
            parallelism each rank has its part of the first dimension, and hidden dropout has to
            differ between ranks: run the layer within the tracker's fork.

    Dropout and dropped paths follow torch's generators: a seed repeats them, and so does
    :func:`fp8core.checkpoint`. The other arguments belong to features that are not offered: a value
    that asks for one raises UnsupportedError.

    Raises:
        OperandError: sizes that do not divide, or options that exclude each other.
        RecipeError: an unknown name of a layer type, normalization, activation, mask or layout.
    """

    # The attributes that decide how a call runs.
    call_fields = (
        *("training", "layer_type", "output_layernorm", "parallel_attention_mlp", "drop_path"),
        *("apply_residual_connection_post_layernorm", "hidden_dropout"),
    )

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: object | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        _check_options(locals())
        self._add_layers(locals())

    def _add_layers(self, arguments: Mapping[str, Any]) -> None:
        """Add the blocks, of the constructor's ``arguments``."""
        self.name, self.layer_number = arguments["name"], arguments["layer_number"]
        self.layer_type = arguments["layer_type"]
        self.output_layernorm = arguments["output_layernorm"]
        self.parallel_attention_mlp = arguments["parallel_attention_mlp"]
        normalizes_residual = arguments["apply_residual_connection_post_layernorm"]
        self.apply_residual_connection_post_layernorm = normalizes_residual
        self.hidden_dropout = check_probability(
            "TransformerLayer", "hidden_dropout", arguments["hidden_dropout"]
        )
        hidden_size, eps = arguments["hidden_size"], arguments["layernorm_epsilon"]
        of_blocks = picked(arguments, _OF_BLOCKS)
        of_blocks["return_layernorm_output"] = normalizes_residual
        self._add_attention(arguments, of_blocks | picked(arguments, _OF_ATTENTION))
        self.layernorm_mlp = self.inner(LayerNormMLP)(
            hidden_size,
            arguments["ffn_hidden_size"],
            eps=eps,
            name=self._name_of("layernorm_mlp"),
            **picked(arguments, ("activation", "activation_params")),
            **of_blocks,
        )
        rate = check_probability("TransformerLayer", "drop_path_rate", arguments["drop_path_rate"])
        self.drop_path = DropPath(rate, arguments["attn_input_format"]) if rate else None
        if self.output_layernorm:
            self.layernorm = self.inner(_NORMS[arguments["normalization"]])(
                hidden_size,
                eps,
                name=self._name_of("layernorm"),
                sequence_parallel=self.layernorm_mlp.sequence_parallel,
                **picked(arguments, ("params_dtype", "zero_centered_gamma", "device")),
            )

    def _add_attention(self, arguments: Mapping[str, Any], shared: dict[str, Any]) -> None:
        """Add self attention, and a decoder's cross attention; ``shared`` are those of both."""
        shared["qkv_format"] = arguments["attn_input_format"]
        self.self_attention = self.inner(MultiheadAttention)(
            attn_mask_type=arguments["self_attn_mask_type"],
            input_layernorm=not self.output_layernorm,
            name=self._name_of("self_attention"),
            **picked(arguments, ("window_size", "bottom_right_diagonal")),
            **shared,
        )
        if self.layer_type == "decoder":
            self.inter_attention = self.inner(MultiheadAttention)(
                attn_mask_type=arguments["enc_dec_attn_mask_type"],
                window_size=arguments["enc_dec_window_size"],
                bottom_right_diagonal=arguments["enc_dec_bottom_right_diagonal"],
                input_layernorm=True,
                attention_type="cross",
                name=self._name_of("inter_attention"),
                **shared,
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: object | None = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Compute the layer; input and output are ``[s, b, hidden_size]`` in sbhd, ``[b, s,
        hidden_size]`` in bshd, ``[t, hidden_size]`` in thd.

        ``attention_mask`` and the arguments after it, up to ``bottom_right_diagonal``, are self
        attention's; those that begin with ``enc_dec_`` are cross attention's, which takes keys and
        values from ``encoder_output``. In self attention keys have the lengths of queries, so that
        the lengths of keys (``cu_seqlens_kv``, ``cu_seqlens_kv_padded``, ``max_seqlen_kv``) are
        cross attention's. The other arguments are those of :meth:`MultiheadAttention.forward`.

        Raises:
            OperandError: tensors that do not fit, or an encoder output that is missing or unused.
        """
        angles, rotation = told_apart(rotary_pos_emb)
        arguments = (
            *(attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal),
            *(encoder_output, enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size),
            *(enc_dec_bottom_right_diagonal, is_first_microbatch, checkpoint_core_attention),
            *(inference_params, rotation, core_attention_bias_type, core_attention_bias),
            *(alibi_slopes, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded),
            *(cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill),
            *(pad_between_seqs, thd_attention_policies, thd_attention_policy_dispatch, softcap),
        )
        output: torch.Tensor = self._run(hidden_states, arguments, angles)
        return output

    def _compose(
        self,
        hidden_states: torch.Tensor,
        arguments: tuple[object, ...],
        angles: torch.Tensor | None,
    ) -> Any:
        """Return the output of a call that is not like the last one."""
        named: dict[str, Any] = dict(zip(_ARGUMENTS, arguments, strict=True))
        if angles is not None:
            named["rotary_pos_emb"] = angles
        check_kind("TransformerLayer", "hidden_states", hidden_states)
        self._check_encoder_arguments(named)
        if is_under_torch_autocast(hidden_states):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
        of_self = {name: named[_OF_SELF.get(name, name)] for name in ARGUMENTS}
        blocks: list[tuple[torch.nn.Module, dict[str, Any]]]
        blocks = [(self.self_attention, of_self | {"encoder_output": None})]
        if self.layer_type == "decoder":
            of_cross = {name: named[_OF_CROSS.get(name, name)] for name in ARGUMENTS}
            blocks.append((self.inter_attention, of_cross))
        if not self.parallel_attention_mlp:
            blocks.append((self.layernorm_mlp, {}))
        is_first = named["is_first_microbatch"]
        drops = self.drop_path is not None or (self.hidden_dropout and self.training)

        def alone(at: int, value: Any) -> Any:
            block, of_block = blocks[at]
            branch = block(value, **of_block) if of_block else block(value, is_first)
            if self.parallel_attention_mlp:
                branch = branch + self.layernorm_mlp(value, is_first)
            residual = value
            if isinstance(branch, tuple):  # with the normalized input
                branch, residual = branch
            if drops:
                branch = self._dropped(branch, named)
            if at + 1 < len(blocks) or not self.output_layernorm:
                return residual + branch
            return self.layernorm(branch, residual=residual)

        is_sum = not (drops or self.output_layernorm) and len(blocks) == 2
        items: Sequence[Sequence[Segment]] = ()
        if is_sum and is_first is None and PLAIN_OPTIONS.issuperset(map(type, arguments)):
            items = self._items(arguments, blocks[0][1])
        label = self._label if items else ""
        call = LayerCall(self, items or [()] * len(blocks), alone, arguments, angles, label)
        return self._chain.run(call, hidden_states)

    def _items(
        self, arguments: tuple[object, ...], of_self: Mapping[str, Any]
    ) -> Sequence[Sequence[Segment]]:
        """Return the layers of both blocks, none if one block has to run by itself; ``of_self`` are
        the arguments of self attention."""
        block, mlp = self.self_attention, self._modules["layernorm_mlp"]
        if not isinstance(mlp, LayerNormMLP) or not self._chain.may_join(mlp, arguments):
            return ()
        if kind_of(block) is not MultiheadAttention or is_seen(block) or block.return_bias:
            return ()
        segments = block.segments(of_self)
        if not segments or segments[0].hands_over:
            return ()
        return segments, (Segment(mlp, mlp),)

    @property
    def _label(self) -> str:
        """The layer in messages."""
        mlp = self.layernorm_mlp
        label = f"TransformerLayer({mlp.hidden_size}, {mlp.ffn_hidden_size})"
        return label if self.name is None else f"{self.name!r} ({label})"

    def _dropped(self, branch: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return the branch after dropout and dropped paths."""
        if self.hidden_dropout and self.training:
            branch = torch.nn.functional.dropout(branch, self.hidden_dropout)
        if self.drop_path is not None:
            padded = arguments["cu_seqlens_q_padded"]
            samples = arguments["cu_seqlens_q"] if padded is None else padded
            dropped: torch.Tensor = self.drop_path(branch, samples, self._sample_split())
            return dropped
        return branch

    def _sample_split(self) -> SampleSplit:
        """Return how ranks share the tokens of samples outside of the blocks."""
        attention = self.self_attention.core_attention
        context, tensor = attention.context_group, attention.parallel
        groups = context.names if tensor.size == 1 else (*context.names, tensor.group)
        return SampleSplit(groups, context.size, tensor.rank if tensor.sequence else 0)

    def _check_encoder_arguments(self, arguments: Mapping[str, Any]) -> None:
        for argument in ("encoder_output", "enc_dec_attn_mask"):
            if self.layer_type == "encoder" and arguments[argument] is not None:
                raise OperandError(
                    f"TransformerLayer(layer_type='encoder'): {argument} is given, but there is no "
                    f"cross attention to use it. Construct the layer with layer_type='decoder'."
                )
        if self.layer_type == "decoder" and arguments["encoder_output"] is None:
            raise OperandError(
                "TransformerLayer(layer_type='decoder'): encoder_output is None; expected the "
                "encoder's output, in the layout of hidden_states."
            )

    def extra_repr(self) -> str:
        """Return the options that the children do not show."""
        words = [f"layer_type={self.layer_type}", f"hidden_dropout={self.hidden_dropout}"]
        flags = (
            *("output_layernorm", "apply_residual_connection_post_layernorm"),
            "parallel_attention_mlp",
        )
        return ", ".join([*words, *(f"{flag}=True" for flag in flags if getattr(self, flag))])


_ARGUMENTS = tuple(inspect.signature(TransformerLayer.forward).parameters)[2:]
"""The names of the arguments of a call behind its input."""


def _check_options(arguments: Mapping[str, Any]) -> None:
    """Refuse what is not offered, an unknown layer type, and options that exclude each other."""
    refuse_arguments(TransformerLayer.__init__, arguments, _NOT_OFFERED)
    layer_type = arguments["layer_type"]
    checked_choice("TransformerLayer", "layer_type", layer_type, LAYER_TYPES, RecipeError)
    if arguments["parallel_attention_mlp"]:
        _check_parallel(arguments)
    check_main_grad(
        "TransformerLayer", arguments["fuse_wgrad_accumulation"], arguments["fuse_qkv_params"]
    )


def _check_parallel(arguments: Mapping[str, Any]) -> None:
    """Refuse what has no meaning where attention and feed-forward block read the same input."""
    flags = ("apply_residual_connection_post_layernorm", "output_layernorm")
    excluded = ["layer_type='decoder'"] if arguments["layer_type"] == "decoder" else []
    excluded += [f"{flag}=True" for flag in flags if arguments[flag]]
    if excluded:
        raise OperandError(
            f"TransformerLayer(parallel_attention_mlp=True, {excluded[0]}): the two exclude each "
            f"other; leave one out."
        )
