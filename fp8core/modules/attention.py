"""DotProductAttention, with Transformer Engine's arguments, and its calls.

What a call is given besides queries, keys and values are :class:`AttentionOptions`, whoever calls:
a user, or a layer with attention inside. :meth:`DotProductAttention.prepared` checks them, wherever
attention then runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from typing_extensions import override

from fp8core.backend_api import ATTENTION_LAYOUTS
from fp8core.chain import run as chain
from fp8core.chain.attention.pages import CODES, Pages
from fp8core.chain.attention.shape import AttentionShape
from fp8core.chain.attention.spec import AttentionTensors
from fp8core.chain.call import Call
from fp8core.chain.moving import gradients_text
from fp8core.chain.shape import LinkShape
from fp8core.chain.unwrap import PLAIN
from fp8core.collectives import named
from fp8core.context.recompute import checkpoint
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError, checked_choice
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound
from fp8core.modules.calls.parameters import check_probability, fill, resolve_device
from fp8core.modules.layers.parallel import ParallelModule, mark_weight
from fp8core.modules.memo import replay
from fp8core.modules.run import note, run_links
from fp8core.modules.sequences.attention_arguments import (
    MASK_TYPES,
    UNLIMITED,
    AttentionOptions,
    Mask,
    alibi_slopes_of,
    bias_kind,
    checked_heads,
    checked_scale,
    checked_softcap,
    mask_of,
    mask_type_of,
    mask_type_with_cache,
    replayed_step,
    with_cache,
)
from fp8core.modules.sequences.attention_inputs import (
    Lengths,
    PaddingMask,
    Qkv,
    batch_of,
    check_bias,
    check_mask,
    check_pad_between,
    check_unread_lengths,
    checked_qkv,
    lengths_of,
    unpacked,
)
from fp8core.modules.sequences.context_group import ContextGroup, check_context
from fp8core.modules.sequences.inference import InferenceParams
from fp8core.reporting import log_once
from fp8core.torch_ops.capture import constant_in_graph, untraced
from fp8core.torch_ops.repeats import sameness_to

_MOST_CALLS = 256
_SOFTMAXES = ("vanilla", "off-by-one", "learnable")


class Owner(NamedTuple):
    """A layer in messages. Its name is read by a message alone: a captured graph is guarded
    by what its call reads, and layers of one shape share a graph."""

    layer: DotProductAttention

    def __str__(self) -> str:
        return self.layer.label


AttentionInputs: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]"
"""Queries, keys, values and the bias, if there is one."""


class AttentionCall(NamedTuple):
    """A call of ``layer`` ready to be computed, and computed again by a checkpoint.

    ``inputs`` are queries, keys, values and the bias or None; ``new`` queries, keys and values as
    they were given, of which a cache has stored the last two.
    """

    layer: DotProductAttention
    shape: AttentionShape
    tensors: AttentionTensors
    lengths: Lengths
    options: AttentionOptions
    new: Qkv
    inputs: AttentionInputs

    def bind(self, q: torch.Tensor) -> tuple[Bound, Call]:
        """Return the layer bound for queries like ``q``, and what the call brings, but for the
        memory of the largest logits."""
        layer, shape, lengths = self.layer, self.shape, self.lengths
        bound = bind(layer, q.device, q.dtype, shapes=(shape,))
        sizes: tuple[int, ...] = tuple(q.shape[:2])
        if shape.layout == "thd":
            assert lengths.max_seqlen_q is not None
            assert lengths.max_seqlen_kv is not None
            sizes = lengths.max_seqlen_q, lengths.max_seqlen_kv
        elif shape.cached:
            assert lengths.max_seqlen_kv is not None
            sizes = (*sizes, lengths.max_seqlen_kv)
        if shape.paged:
            assert self.options.inference_params is not None
            sizes = (*sizes, self.options.inference_params.read_length)
        call = bound.call_on(q.device)._replace(tensors=self.tensors, sizes=sizes)
        if call.rng is not None and layer.parallel.rank:
            call = call._replace(rng=call.rng + layer.parallel.rank)  # other heads, other masks
        return bound, call

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the result, with the largest logits if the layer returns them."""
        layer, shape = self.layer, self.shape
        bound, call = self.bind(q)
        max_logit = None
        if shape.max_logit:
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            max_logit = torch.empty(shape.heads, dtype=wide, device=q.device)
            call = call._replace(tensors=self.tensors._replace(max_logit_out=max_logit))
        params = [param for param in (k, v, bias, layer.softmax_offset) if param is not None]
        out = run_links(layer, bound, bound.parts[0], q.flatten(-2), params, call)
        return out if max_logit is None else (out, max_logit)

    def result(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return what :meth:`run` does, computed as the options ask, with a memo if calls like it
        may be replayed."""
        if self.options.checkpoint_core_attention:
            return self._checkpointed()
        is_compiling = torch.compiler.is_compiling()
        arguments = None if is_compiling or self.layer.drops_all else self.options.for_memo()
        return self.run(*self.inputs) if arguments is None else self._run_and_note(arguments)

    def _checkpointed(self) -> torch.Tensor:
        repeat = checkpoint
        if torch.compiler.is_compiling():  # the recipe, which fp8core's own repeats, is a constant
            repeat = torch_checkpoint
            if self.shape.dropout:
                raise UnsupportedError(
                    f"{Owner(self.layer)}: checkpoint_core_attention with dropout is not offered "
                    f"under torch.compile and torch.export: a graph draws a seed once. Leave it "
                    f"out: a compiler chooses itself what it computes again."
                )
        output: torch.Tensor = repeat(self.run, *self.inputs, use_reentrant=False)
        return output

    @untraced
    def _run_and_note(
        self, arguments: AttentionOptions
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return :meth:`run` of the inputs, and note what it does for calls of tensors alike with
        the same ``arguments``, unless other tensors take part than those of a cache."""
        output, cache, shape = self.run(*self.inputs), self.options.inference_params, self.shape
        q, k, v, bias = self.inputs
        new = (q, k, v) if cache is None else self.new
        brought = (bias, self.layer.softmax_offset, *(() if shape.cached else self.tensors))
        is_plain = PLAIN.issuperset(map(type, (output, *new)))
        if not is_plain or any(tensor is not None for tensor in brought):
            return output
        bound, call = self.bind(q)
        if cache is not None and (torch.is_grad_enabled() or not _reads_capacity(bound)):
            return output  # the length of the longest sequence takes part
        if shape.kv is not None:
            return output  # the note would keep the scales of the cache alive
        is_same = sameness_to(new)
        run = chain.prepared_run(bound.parts[0], q.flatten(-2), (k, v), call)
        if is_same is not None and run is not None and call.rng is None:

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
                return run(q.flatten(-2), k, v)

            if cache is not None:
                attend = replayed_step(
                    *(self.layer, cache, shape.layout, run), in_pages=shape.paged
                )
            prepared = chain.Prepared(is_same, torch.Tensor.data_ptr, attend)
            note(self.layer, bound, prepared, 2, arguments=arguments)
        return output


def _reads_capacity(bound: Bound) -> bool:
    """Whether attention is bound to what reads a cache at its capacity."""
    return any(getattr(link, "run_cached", None) is not None for link in bound.links)


class DotProductAttention(ParallelModule):
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

    kind = "attention"
    call_fields = (
        *ParallelModule.call_fields,
        *("qkv_format", "attn_mask_type", "window_size", "bottom_right_diagonal", "softcap"),
        *("softmax_scale", "heads", "attention_dropout", "return_max_logit", "softmax_type"),
        *("attention_type", "context_group", "parallel"),
    )
    is_link = False
    plan_type = AttentionShape.plan_type

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
        self._agreed: set[str] = set()  # the calls on which the ranks of that group have agreed
        spread = (tp_group, tp_size, sequence_parallel)
        self._set_parallel(None, spread, get_rng_state_tracker)
        sizes = num_attention_heads, num_gqa_groups, kv_channels
        self.heads = checked_heads(owner, self.parallel, *sizes)
        self.attention_dropout = check_probability(owner, "attention_dropout", attention_dropout)
        self.qkv_format = checked_choice(owner, "qkv_format", qkv_format, ATTENTION_LAYOUTS)
        self.attn_mask_type = mask_type_of(owner, attn_mask_type)
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        mask_of(owner, self.attn_mask_type, window_size, bottom_right_diagonal, has_alibi=False)
        self.softcap = checked_softcap(owner, softcap)
        self.layer_number = 1 if layer_number is None else layer_number
        sides = ("self", "cross")
        self.attention_type = checked_choice(owner, "attention_type", attention_type, sides)
        self.softmax_scale = checked_scale(owner, softmax_scale, self.heads.head_dim)
        self.softmax_type = checked_choice(owner, "softmax_type", softmax_type, _SOFTMAXES)
        self.return_max_logit = bool(return_max_logit)
        self._add_offset(device)
        self._fill_parameters()

    def _add_offset(self, device: torch.device | str | None) -> None:
        """Add the offset of the softmax, None unless that learns one."""
        self.softmax_offset: torch.nn.Parameter | None
        if self.softmax_type != "learnable":
            self.register_parameter("softmax_offset", None)
            return
        offset = torch.empty(self.heads.heads, device=resolve_device(device))
        self.softmax_offset = torch.nn.Parameter(offset.float())
        if self.tp_size > 1:
            mark_weight(self.softmax_offset, 0)

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

    @property
    def runs_apart(self) -> bool:
        """Whether a call has conditions of its own, which no chain with neighbours meets."""
        return False

    @property
    def drops_all(self) -> bool:
        """Whether every weight is dropped: attention to values of 0 without dropout is the same."""
        return self.training and self.attention_dropout == 1

    def prepared(
        self, tensors: Sequence[torch.Tensor | None], options: AttentionOptions
    ) -> AttentionCall:
        """Return a call that is checked and ready to run; ``tensors`` are queries, keys and values,
        each None if ``options`` has it.

        Keys and values are those of the cache, if there is one, in which those given are stored.

        Raises:
            OperandError: tensors that do not fit each other or the options; names the argument.
            UnsupportedError: an option that is not offered, or an arbitrary mask with a cache.
        """
        owner, cache = Owner(self), options.inference_params
        options.refuse_not_offered(owner)
        packed = options.qkv_layer, options.kv_layer
        new = qkv = unpacked(owner, tensors, *packed, options.qkv_interleave_dim)
        attention_mask, mask_type = options.attention_mask, options.attn_mask_type
        bottom_right = options.bottom_right_diagonal
        layout = options.qkv_format or self.qkv_format
        checked_choice(owner, "qkv_format", layout, ATTENTION_LAYOUTS)
        qkv = checked_qkv(owner, self.heads, layout, qkv)
        if cache is not None:
            mask_type = mask_type_of(owner, mask_type or self.attn_mask_type)
            mask_type = mask_type_with_cache(owner, mask_type)
            bottom_right = True
        bias, slopes = options.core_attention_bias, options.alibi_slopes
        bias_type = bias_kind(owner, options.core_attention_bias_type, bias, slopes)
        mask = self._mask(layout, mask_type, options.window_size, bottom_right, bias_type)
        lengths, is_cached, pages = None, False, None
        if cache is not None:
            qkv, lengths, is_cached, pages = with_cache(
                owner, self, cache, layout, qkv, at_capacity=bias is None
            )
        if self.drops_all:  # no backend scales by 1 / (1 - p)
            qkv = qkv._replace(v=qkv.v * 0)
        if lengths is None:
            lengths = self._lengths(layout, mask, qkv, attention_mask, options.lengths)
        check_pad_between(owner, options.pad_between_seqs, lengths)
        heads = self.heads.heads
        if bias is not None:
            bias = check_bias(owner, qkv, layout, heads, lengths, bias)
        batch = batch_of(layout, qkv, lengths)
        brought = AttentionTensors(
            alibi_slopes_of(owner, heads, batch, qkv.q, slopes, self.parallel)
            if bias_type == "alibi"
            else None,
            check_mask(owner, qkv, layout, heads, attention_mask) if mask.arbitrary else None,
            *lengths.offsets.values(),
            *(() if pages is None else pages[2:]),
        )
        cap = self.softcap if options.softcap is None else checked_softcap(owner, options.softcap)
        shape = self._shape(
            *(layout, mask, bias_type, cap),
            bf16_backward=bool(options.bf16_backward),
            cached=is_cached,
            pages=pages,
        )
        if shape.context:
            self._agree(shape, qkv, lengths, cache)
        return AttentionCall(self, shape, brought, lengths, options, new, (*qkv, bias))

    def count_slot_sets(self) -> int:
        """Return 1: a call computes its plan once."""
        return 1

    @override
    def link_names(self) -> list[tuple[str, ...]] | None:
        return [("softmax_offset",)] if self.softmax_type == "learnable" else []

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shape of a call whose arguments leave everything to the constructor; in thd
        with a mask type without padding, which each call overrides, of a call with padding."""
        layout = self.qkv_format
        is_overridden = layout == "thd" and not MASK_TYPES[self.attn_mask_type].padding
        mask = self._mask(layout, "padding" if is_overridden else None, None, None, None)
        return (self._shape(self.qkv_format, mask, None, self.softcap),)

    def _mask(
        self,
        layout: str,
        mask_type: str | None,
        window_size: tuple[int, int] | None,
        bottom_right: bool | None,
        bias_type: str | None,
    ) -> Mask:
        """Return the mask of a call; None stands for what the constructor was given."""
        owner = Owner(self)
        name = self.attn_mask_type if mask_type is None else mask_type_of(owner, mask_type)
        mask = mask_of(
            owner,
            name,
            self.window_size if window_size is None else window_size,
            self.bottom_right_diagonal if bottom_right is None else bottom_right,
            has_alibi=bias_type == "alibi",
        )
        if layout == "thd" and not mask.padding:
            expected = ", ".join(name for name, kind in MASK_TYPES.items() if kind.padding)
            raise OperandError(
                f"{owner}: attn_mask_type={name!r} with qkv_format='thd', whose sequences have "
                f"lengths; expected one of {expected}."
            )
        return mask

    def refuse_positions(
        self, mask_type: str | None, window_size: tuple[int, int] | None, bias_type: str
    ) -> None:
        """Refuse what depends on where queries are among the keys, for the queries of a step whose
        keys are not those of its cache; the arguments are those of a call.

        Raises:
            UnsupportedError: a causal mask, a window or ALiBi.
        """
        mask = self._mask(self.qkv_format, mask_type, window_size, None, bias_type)
        if mask.window == UNLIMITED and bias_type != "alibi":
            return
        cause = "ALiBi" if bias_type == "alibi" else f"a causal mask or window {mask.window}"
        raise UnsupportedError(
            f"{Owner(self)}: {cause} in cross attention with inference_params is not offered: a "
            f"step has some of the queries, whose positions among the encoder's keys follow from "
            f"all. Use 'no_mask' or 'padding' without a window, or leave out inference_params and "
            f"give all queries."
        )

    def _lengths(
        self, layout: str, mask: Mask, qkv: Qkv, padding_mask: PaddingMask, lengths: Lengths
    ) -> Lengths:
        """Return the lengths of a call; none where the mask has no padding."""
        owner = Owner(self)
        if not mask.padding:
            if padding_mask is not None and not mask.arbitrary:
                _log_ignored()
            check_unread_lengths(owner, layout, qkv, lengths)
            return Lengths()
        is_pair = isinstance(padding_mask, tuple | list)
        if padding_mask is not None and not is_pair and self.attention_type == "cross":
            raise OperandError(
                f"{owner}: attention_mask is one tensor in cross attention; expected a tuple of "
                f"that of the queries and that of the keys."
            )
        size = self.context_group.size
        return lengths_of(owner, layout, qkv, padding_mask, lengths, num_ranks=size)

    def _agree(
        self, shape: AttentionShape, qkv: Qkv, lengths: Lengths, cache: InferenceParams | None
    ) -> None:
        """Check a call over several ranks, and, the first time that it is made, that all ranks make
        the same one."""
        owner, group = Owner(self), self.context_group
        if cache is not None:
            raise UnsupportedError(
                f"{owner}: inference_params with context parallelism is not offered; leave out the "
                f"group: set_context_parallel_group(None)."
            )
        problem: Fp8CoreError | None = None
        try:
            call = check_context(owner, group, shape, qkv, lengths)
        except Fp8CoreError as error:  # the other ranks wait for this one
            if torch.compiler.is_compiling():
                raise
            problem, call = error, f"refused, {error}"
        is_grad_enabled = torch.is_grad_enabled()
        due = gradients_text([is_grad_enabled and x.requires_grad for x in qkv])
        call = f"{call}, {due}"
        if torch.compiler.is_compiling() or call in self._agreed:
            return
        for name in group.names:
            named(name).agree(call, "a call of attention")
        if problem is not None:
            raise problem
        if len(self._agreed) >= _MOST_CALLS:  # packed sequences without end
            self._agreed.clear()
        self._agreed.add(call)

    def _shape(
        self,
        layout: str,
        mask: Mask,
        bias_type: str | None,
        cap: float,
        *,
        bf16_backward: bool = False,
        cached: bool = False,
        pages: Pages | None = None,
    ) -> AttentionShape:
        return AttentionShape(
            layout,
            *self.heads,
            self.softmax_scale,
            *mask,
            bias_type,
            cap,
            self.softmax_type,
            self.attention_dropout if self.training and not self.drops_all else 0.0,
            self.return_max_logit,
            bf16_backward,
            self.context_group.context,
            cached,
            pages is not None,
            None if pages is None or pages.key_scales is None else CODES,
        )

    @property
    def label(self) -> str:
        """The layer in messages, by its name in the model, else by its class and sizes."""
        sizes = f"{type(self).__name__}({self.heads.heads}, {self._head_sizes()})"
        return sizes if self.name is None else f"{self.name!r} ({sizes})"

    def _head_sizes(self) -> str:
        _, _, head_dim, head_dim_v = self.heads
        return str(head_dim) if head_dim == head_dim_v else f"({head_dim}, {head_dim_v})"

    def _describe(self) -> list[str]:
        heads, sizes = self.heads, self._head_sizes()
        words = [f"num_attention_heads={heads.heads}", f"kv_channels={sizes}"]
        if heads.groups != heads.heads:
            words.append(f"num_gqa_groups={heads.groups}")
        return [*words, f"attn_mask_type={self.attn_mask_type!r}"]


def _log_ignored() -> None:
    log_once(
        "DotProductAttention ignores attention_mask where the mask type has no padding and is not "
        "'arbitrary'."
    )


constant_in_graph(_log_ignored)
