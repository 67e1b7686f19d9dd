"""DotProductAttention, with Transformer Engine's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fp8core.modules.attention_call import AttentionLayer
from fp8core.modules.calls.parameters import check_probability, fill, resolve_device
from fp8core.modules.layers.parallel import mark_weight
from fp8core.modules.memo import replay
from fp8core.modules.sequences.attention_arguments import (
    AttentionOptions,
    checked_choice,
    checked_heads,
    checked_scale,
    checked_softcap,
    mask_of,
    mask_type_of,
)
from fp8core.modules.sequences.attention_inputs import PaddingMask, check_layout
from fp8core.modules.sequences.context_group import ContextGroup
from fp8core.modules.sequences.inference import InferenceParams

_SOFTMAXES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(AttentionLayer):
    """``softmax(mask(scale * q k^T + bias)) v`` of every head, with dropout of the weights.

    Args:
        num_attention_heads: heads of the queries.
        kv_channels: the size of a head; or two, of keys and of values.
        num_gqa_groups: heads of keys and values, which divide those of the queries; as many if
            None. 1 is multi-query attention.
        attention_dropout: the probability with which a weight is dropped in training.
        qkv_format: ``"sbhd"``, ``"bshd"``, or ``"thd"``, the tokens of all sequences after each
            other, with ``cu_seqlens``.
        attn_mask_type: ``"no_mask"``, ``"padding"``, ``"causal"``, ``"padding_causal"``,
            ``"causal_bottom_right"``, ``"padding_causal_bottom_right"`` or ``"arbitrary"``. A
            causal mask has its diagonal at the top left corner, or at the bottom right one, where
            the last query sees all keys.
        window_size: ``(left, right)``: how many keys before and behind its own position a query
            sees; -1 is no limit.
        bottom_right_diagonal: where the diagonal of a window and of ALiBi lies, for mask types that
            do not say; at the bottom right corner if None.
        softcap: c: the scaled products become ``c * tanh(products / c)``; 0.0 leaves them.
        layer_number: the layer's number in its model, which an ``inference_params`` needs.
        attention_type: ``"self"`` or ``"cross"``: whether a padding mask is one for queries and
            keys, or a tuple of two.
        softmax_scale: ``1 / sqrt(size of a key's head)`` if None.
        softmax_type: ``"vanilla"``; ``"off-by-one"`` adds 1 to the sum that divides the
            exponentials; ``"learnable"`` adds ``exp(softmax_offset[head])``, a parameter.
        return_max_logit: whether calls also return the largest logit of each head, float32.
        name: the layer's name in messages.
        device: of ``softmax_offset``; None takes the selected backend's.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: as of
            ``set_context_parallel_group``.
        tp_size, tp_group: over how many ranks the heads are spread, each with its share of them;
            calls get that share, and dropout differs between ranks.
        sequence_parallel, get_rng_state_tracker: accepted for compatibility; they change nothing.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: object | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: object | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object | None = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(name)
        owner = type(self).__name__
        self.context_group = ContextGroup.of(owner, cp_group, cp_global_ranks, cp_comm_type)
        self._agreed: set[str] = set()
        arguments = (tp_group, tp_size, sequence_parallel)
        self._set_parallel(None, arguments, get_rng_state_tracker)
        heads = checked_heads(owner, num_attention_heads, num_gqa_groups, kv_channels)
        self.heads = heads._replace(
            heads=self.parallel.part_of(owner, "num_attention_heads", heads.heads),
            groups=self.parallel.part_of(owner, "num_gqa_groups", heads.groups),
        )
        self.attention_dropout = check_probability(owner, "attention_dropout", attention_dropout)
        self.qkv_format = check_layout(owner, qkv_format)
        self.attn_mask_type = mask_type_of(owner, attn_mask_type)
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        mask_of(owner, self.attn_mask_type, window_size, bottom_right_diagonal, has_alibi=False)
        self.softcap = checked_softcap(owner, softcap)
        self.layer_number = 1 if layer_number is None else layer_number
        self.attention_type = checked_choice(
            owner, "attention_type", attention_type, ("self", "cross")
        )
        self.softmax_scale = checked_scale(owner, softmax_scale, self.heads.head_dim)
        self.softmax_type = checked_choice(owner, "softmax_type", softmax_type, _SOFTMAXES)
        self.return_max_logit = bool(return_max_logit)
        if softmax_type == "learnable":
            offset = torch.empty(self.heads.heads, device=resolve_device(device))
            self.softmax_offset = torch.nn.Parameter(offset.float())
            if self.tp_size > 1:
                mark_weight(self.softmax_offset, 0)
        else:
            self.register_parameter("softmax_offset", None)
        self._fill_parameters()

    def _fill_parameters(self) -> None:
        fill(self.softmax_offset, torch.nn.init.zeros_)

    def set_context_parallel_group(
        self,
        cp_group: object | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object | None = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Share the tokens of all following calls over the ranks of a group; None: over none.

        Each rank then gives and takes chunk ``rank`` and chunk ``2 * size - 1 - rank`` of the
        ``2 * size`` chunks of each sequence, as
        ``fp8core.distributed.get_batch_on_this_cp_rank`` splits them. cu_seqlens, padding masks
        and max_seqlen are those of whole sequences. Gradients of ``softmax_offset`` are a rank's
        share: add them up over the group, as those of other replicated parameters.

        Args:
            cp_group: a process group; for ``"a2a+p2p"`` a list of two, that whose ranks exchange
                heads, of neighbouring ranks, and that whose ranks hand keys and values on.
            cp_global_ranks: the ranks of the group, if given, to compare with.
            cp_stream: has no effect: collectives run on the group's own stream.
            cp_comm_type: ``"p2p"``: keys and values come from one rank after the other, while the
                ones before are used; ``"all_gather"``: all at once; ``"a2a"``: ranks exchange
                tokens for heads, whose number they divide; ``"a2a+p2p"``.

        Raises:
            OperandError: no such group or way.
        """
        owner = f"{type(self).__name__}.set_context_parallel_group"
        self.context_group = ContextGroup.of(owner, cp_group, cp_global_ranks, cp_comm_type)
        self._agreed = set()

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: PaddingMask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: Mapping[str, torch.Tensor] | None = None,
        score_mod_bprop_tensors: Mapping[str, torch.Tensor] | None = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return ``[s, b, heads * size of a value's head]`` in the layout of the queries, ``[t,
        heads * size]`` in thd; with ``return_max_logit`` also the largest logit of each head.

        ``query_layer`` is ``[s_q, b, heads, size]``, ``[b, s_q, heads, size]`` or ``[t, heads,
        size]``, as ``qkv_format`` says; ``key_layer`` and ``value_layer`` likewise, with
        ``num_gqa_groups`` heads. Any strides. The arguments behind them are those of
        :class:`~fp8core.modules.sequences.attention_arguments.AttentionOptions`.

        Raises:
            OperandError: tensors that do not fit each other or the arguments; names the argument.
            UnsupportedError: an argument that is not offered.
        """
        options = (
            *(attention_mask, qkv_format, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded),
            *(cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size),
            *(bottom_right_diagonal, softcap, checkpoint_core_attention, core_attention_bias_type),
            *(core_attention_bias, alibi_slopes, fast_zero_fill, inference_params),
            *(pad_between_seqs, fp8_output, bf16_backward, num_splits, score_mod, score_mod_bprop),
            *(score_mod_tensors, score_mod_bprop_tensors, qkv_layer, kv_layer, qkv_interleave_dim),
            *(thd_attention_policies, thd_attention_policy_dispatch),
        )
        return self._attend((query_layer, key_layer, value_layer), AttentionOptions._make(options))

    def _attend(
        self, tensors: Sequence[torch.Tensor | None], options: AttentionOptions
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        query, *keys_and_values = tensors
        memo = None if torch.compiler.is_compiling() else self._bindings.memo
        if memo is not None and query is not None:
            output = replay(self, memo, query, keys_and_values, options)
            if output is not None:
                return output
        return self.prepared(tensors, options).result()
