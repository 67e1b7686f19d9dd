"""Attention between projections: query, key and value, attention itself, output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fp8core.chain.packed_attention import HeadSizes
from fp8core.errors import OperandError, RecipeError, UnsupportedError, checked_choice
from fp8core.modules.attention import DotProductAttention
from fp8core.modules.calls.parameters import InitMethod, refuse_arguments
from fp8core.modules.composition import (
    ComposedLayer,
    LayerCall,
    Segment,
    hands_over_codes,
    told_apart,
)
from fp8core.modules.layers.layernorm_linear import LayerNormLinear
from fp8core.modules.layers.linear import Linear
from fp8core.modules.sequences.attention_arguments import PLAIN_OPTIONS, AttentionOptions
from fp8core.modules.sequences.head_split import (
    as_heads,
    head_dim_of,
    make_qk_norms,
    split_key_value,
)
from fp8core.modules.sequences.inference import InferenceParams
from fp8core.modules.sequences.rotary import Spans, apply_rotary_pos_emb, rotated_parts

ATTENTION_TYPES = ("self", "cross")
_NOT_OFFERED = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)
# The arguments that the layers inside take as they are: attention, the linears, and both where the
# heads are spread over ranks.
_OF_ATTENTION = (
    *("num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type", "window_size"),
    *("bottom_right_diagonal", "softcap", "attention_type", "softmax_type", "device"),
)
_OF_LINEARS = ("fuse_wgrad_accumulation", "bias", "params_dtype", "device")
OF_GROUP = ("tp_group", "tp_size", "sequence_parallel", "get_rng_state_tracker")


def picked(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the ``arguments`` of these names."""
    return {name: arguments[name] for name in names}


class MultiheadAttention(ComposedLayer):
    """Projects to heads, lets them attend, and projects back to ``hidden_size``.

    Children: ``layernorm_qkv`` (a :class:`fp8core.LayerNormLinear`) or, without
    ``input_layernorm``, ``qkv`` (a :class:`fp8core.Linear`); in cross attention ``layernorm_query``
    or ``query_layer``, and ``key_value`` for the encoder's output; ``q_norm`` and ``k_norm`` if
    asked for; ``core_attention`` (a :class:`fp8core.DotProductAttention`); ``proj``. Query, key and
    value have a weight each (``query_weight``, ``key_weight``, ``value_weight``, and biases
    likewise), which are quantized as one tensor; ``fuse_qkv_params`` stores one ``weight``.

    Args:
        hidden_size: size of each input and output row.
        num_attention_heads: query heads.
        kv_channels: columns of one head; ``hidden_size / num_attention_heads`` if None.
        attention_dropout, layer_number, qkv_format: as in :class:`fp8core.DotProductAttention`.
        attn_mask_type, window_size, bottom_right_diagonal, softcap, softmax_type: likewise.
        layernorm_epsilon: added to the variance of the norm of the input.
        init_method, output_layer_init_method: fill the weights of the first projections and of
            ``proj``; the default is normal with standard deviation 0.023.
        num_gqa_groups: key and value heads, each read by an equal number of query heads; None is
            one for each query head.
        fuse_wgrad_accumulation: as in :class:`fp8core.Linear`; needs ``fuse_qkv_params``.
        return_bias: return ``proj``'s bias instead of adding it.
        return_layernorm_output: also return the normalized input.
        input_layernorm: normalize the input before it is projected.
        attention_type: ``"self"``, or ``"cross"``: keys and values come from ``encoder_output``.
        fuse_qkv_params: one weight for query, key and value, or for key and value.
        qkv_weight_interleaved: with ``fuse_qkv_params``, the rows of that weight are ordered by
            group: its query heads, its key head, its value head.
        rotary_pos_interleaved: rotary embeddings pair neighbouring columns, not the two halves.
        zero_centered_gamma, bias, normalization, params_dtype, device, name: as in
            :class:`fp8core.LayerNormLinear`.
        qk_norm_type: None, ``"RMSNorm"``, ``"LayerNorm"`` or ``"L2Normalization"`` of each head of
            queries and keys, with ``qk_norm_eps``; after the rotary embedding unless
            ``qk_norm_before_rope``.
        seq_length, micro_batch_size: accepted for compatibility; sizes are those of the input.
        set_parallel_mode: the heads are spread over the ranks of a group: the first projections are
            column-parallel, ``proj`` is row-parallel. Without it the layer is the same on all.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker: as in :class:`fp8core.Linear`.

    The other arguments belong to features that are not offered: a value that asks for one raises
    UnsupportedError.

    Raises:
        OperandError: sizes that do not divide.
        RecipeError: an unknown name of a normalization, mask, layout or attention type.
    """

    # The attributes that decide how a call runs, besides those of the layers inside.
    call_fields = (
        *("attention_type", "q_norm", "k_norm", "return_bias", "return_layernorm_output", "_sizes"),
    )

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: object | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        owner, arguments = "MultiheadAttention", locals()
        refuse_arguments(MultiheadAttention.__init__, arguments, _NOT_OFFERED)
        checked_choice(owner, "attention_type", attention_type, ATTENTION_TYPES, RecipeError)
        check_main_grad(owner, fuse_wgrad_accumulation, fuse_qkv_params)
        self.name, self.qkv_format, self.attention_type = name, qkv_format, attention_type
        self.layer_number = 1 if layer_number is None else layer_number
        self.return_bias, self.input_layernorm = return_bias, input_layernorm
        self.return_layernorm_output = input_layernorm and return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        self._add_layers(arguments)

    def _add_layers(self, arguments: Mapping[str, Any]) -> None:
        """Add the layers inside, of the constructor's ``arguments``."""
        hidden_size, num_heads = arguments["hidden_size"], arguments["num_attention_heads"]
        is_spread, is_fused = arguments["set_parallel_mode"], arguments["fuse_qkv_params"]
        spread = picked(arguments, OF_GROUP) if is_spread else {}
        head_dim = head_dim_of(
            "MultiheadAttention", hidden_size, num_heads, arguments["kv_channels"]
        )
        core_attention = self.inner(DotProductAttention)(
            num_heads,
            head_dim,
            layer_number=self.layer_number,
            name=self._name_of("core_attention"),
            **picked(arguments, _OF_ATTENTION),
            **spread,
        )
        self.tp_size = core_attention.tp_size
        self.sequence_parallel = core_attention.sequence_parallel
        self._sizes = HeadSizes(
            core_attention.heads.heads,
            core_attention.heads.groups,
            head_dim,
            is_interleaved=is_fused and arguments["qkv_weight_interleaved"],
        )
        linear = picked(arguments, _OF_LINEARS) | spread
        norm = picked(arguments, ("normalization", "zero_centered_gamma"))
        norm["eps"] = arguments["layernorm_epsilon"]
        norm["return_layernorm_output"] = self.return_layernorm_output
        first = {
            "init_method": arguments["init_method"],
            "parallel_mode": "column" if is_spread else None,
        }
        has_norm = self.input_layernorm
        self._add_projections(hidden_size, not is_fused, linear | first, norm if has_norm else None)
        self.q_norm, self.k_norm = make_qk_norms(
            arguments["qk_norm_type"],
            head_dim,
            arguments["qk_norm_eps"],
            device=arguments["device"],
            dtype=arguments["params_dtype"],
            name=self.name,
            splits_heads=self.tp_size > 1,
        )
        self.core_attention = core_attention
        self.proj = self.inner(Linear)(
            self._sizes.query_size * self.tp_size,
            hidden_size,
            parallel_mode="row" if is_spread else None,
            init_method=arguments["output_layer_init_method"],
            return_bias=self.return_bias,
            name=self._name_of("proj"),
            **linear,
        )

    def _add_projections(
        self,
        hidden_size: int,
        is_split: bool,
        linear: dict[str, Any],
        norm: dict[str, Any] | None,
    ) -> None:
        """Add the projections to query, key and value; the one of the layer's input with a norm
        unless ``norm`` is None. ``is_split``: each of the three has a weight of its own."""
        query, key = self._sizes.query_size * self.tp_size, self._sizes.key_size * self.tp_size
        parts = {"query": query, "key": key, "value": key}
        if self.attention_type == "self":
            name, split, rows = "qkv", parts if is_split else None, query + 2 * key
        else:
            name, split, rows = "query", {"query": query} if is_split else None, query
        if norm is not None:
            name = f"layernorm_{name}"
            first: torch.nn.Module = self.inner(LayerNormLinear)(
                hidden_size,
                rows,
                parameters_split=split,
                name=self._name_of(name),
                **linear,
                **norm,
            )
        else:
            if self.attention_type == "cross":  # Transformer Engine never splits this one
                name, split = "query_layer", None
            first = self.inner(Linear)(
                hidden_size, rows, parameters_split=split, name=self._name_of(name), **linear
            )
        self._projection = name
        self.add_module(name, first)
        if self.attention_type == "cross":
            self.key_value = self.inner(Linear)(
                hidden_size,
                2 * key,
                parameters_split={"key": key, "value": key} if is_split else None,
                name=self._name_of("key_value"),
                **linear,
            )

    def row_blocks(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of the parts that follow each other in parameters with several, by their
        names: queries, keys and values, of which each rank of a parallel layer has a share."""
        query, key = self._sizes.query_size, self._sizes.key_size
        sizes: dict[str, tuple[int, ...]] = {"key_value": (key, key)}
        if self.attention_type == "self":
            sizes = {self._projection: (query, key, key)}
        if self._sizes.is_interleaved:
            return {}
        return {
            f"{child}.{name}": rows
            for child, rows in sizes.items()
            for name in ("weight", "bias")
            if getattr(self, child)._parameters.get(name) is not None
        }

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
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
    ) -> Any:
        """Attend; ``hidden_states`` and the output are ``[s, b, hidden_size]`` in sbhd,
        ``[b, s, hidden_size]`` in bshd, ``[t, hidden_size]`` in thd.

        Returns the output, followed by ``proj``'s bias with ``return_bias`` and by the normalized
        input with ``return_layernorm_output``. ``encoder_output`` has the same layout, and a
        sequence length of its own. ``rotary_pos_emb`` are the angles of
        :class:`fp8core.RotaryPositionEmbedding`, or a pair of them for queries and for keys.
        ``inference_params`` holds the keys and values of earlier tokens, behind which the positions
        of ``hidden_states`` start; those of cross attention are computed from the whole
        ``encoder_output`` in each call, and not kept. ``is_first_microbatch`` as in
        :class:`fp8core.Linear`; the other arguments are those of
        :class:`fp8core.DotProductAttention`, whose constructor's values None stands for.

        Raises:
            OperandError: tensors that do not fit, or an encoder output that is missing or unused.
            UnsupportedError: cross attention with ``inference_params`` and a causal mask, a window
                or ALiBi, as a step does not say where its queries are among the keys.
        """
        angles, rotation = told_apart(rotary_pos_emb)
        arguments = (
            *(attention_mask, encoder_output, attn_mask_type, window_size, bottom_right_diagonal),
            *(is_first_microbatch, checkpoint_core_attention, inference_params, rotation),
            *(core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q),
            *(cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q),
            *(max_seqlen_kv, fast_zero_fill, pad_between_seqs, thd_attention_policies),
            *(thd_attention_policy_dispatch, softcap),
        )
        return self._run(hidden_states, arguments, angles)

    def _compose(
        self,
        hidden_states: torch.Tensor,
        arguments: tuple[object, ...],
        angles: torch.Tensor | None,
    ) -> Any:
        """Return the output of a call that is not like the last one."""
        named: dict[str, Any] = dict(zip(ARGUMENTS, arguments, strict=True))
        if angles is not None:
            named["rotary_pos_emb"] = angles
        options, is_first = self._options(named), named["is_first_microbatch"]
        normalized, has_steps = None, self._has_steps(named)

        def alone(at: int, value: Any) -> Any:
            nonlocal normalized
            if at == 2:
                return self.proj(value, is_first)
            if at == 1:
                is_split = type(value) is tuple
                qkv = value if is_split else self._sizes.split(value, value.shape[:-1])
                return self.core_attention(*qkv, named["attention_mask"], **options)
            rows = getattr(self, self._projection)(value, is_first)
            if self.return_layernorm_output:
                rows, normalized = rows
            return self._prepared(rows, named) if has_steps else rows

        segments: Sequence[Segment] = ()
        if is_first is None and self._may_join(named, arguments):
            segments = self.segments(named)
        items: Sequence[Sequence[Segment]] = [*zip(segments, strict=True)] or [()] * 3
        call = LayerCall(self, items, alone, arguments, angles)
        outputs = self._chain.run(call, hidden_states)
        if segments and self.return_bias and isinstance(outputs, torch.Tensor):
            outputs = outputs, self.proj.parameter("bias")  # a chain returns no bias
        if not self.return_layernorm_output:
            return outputs
        return (*(outputs if isinstance(outputs, tuple) else (outputs,)), normalized)

    def _may_join(self, named: Mapping[str, Any], arguments: tuple[object, ...]) -> bool:
        """Whether layers of a call may be one chain; where more than rows crosses to attention, in
        codes alone."""
        attention = self.core_attention
        if torch.compiler.is_compiling() or not isinstance(attention, DotProductAttention):
            return False
        is_dense = PLAIN_OPTIONS.issuperset(map(type, arguments)) and not self._has_steps(
            named, but_rotation=True
        )
        if not is_dense and not hands_over_codes(attention):
            return False
        return self._chain.may_join(attention, arguments)

    def segments(self, arguments: Mapping[str, Any]) -> Sequence[Segment]:
        """Return the layers of a call with the ``arguments`` of :meth:`forward`, in order; none if
        each of them has to run by itself."""
        attention, angles = self.core_attention, None
        is_attention = isinstance(attention, DotProductAttention)
        hands_over = is_attention and hands_over_codes(attention)
        has_steps = self._has_steps(arguments, but_rotation=not hands_over)
        if not hands_over:
            angles = told_apart(arguments["rotary_pos_emb"])[0]
        first, proj = getattr(self, self._projection), self.proj
        returned = [getattr(layer, "return_bias", False) for layer in (first, proj)]
        is_whole = is_attention and returned == [False, self.return_bias]
        if not is_whole or (has_steps and not hands_over):
            return ()
        options = AttentionOptions(arguments["attention_mask"], **self._options(arguments))
        heads = None if has_steps else self._sizes
        return (
            Segment(first, self, hands_over),
            Segment(attention, self, hands_over, options, heads, angles),
            Segment(proj, self, hands_over),
        )

    def _options(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a call's ``arguments`` that attention takes behind the mask."""
        if (arguments["encoder_output"] is None) != (self.attention_type == "self"):
            self._refuse_encoder_output()
        options = {name: arguments[name] for name in _OF_CALLS}
        if self.attention_type == "cross" and options["inference_params"] is not None:
            names = ("attn_mask_type", "window_size", "core_attention_bias_type")
            self.core_attention.refuse_positions(*[options[name] for name in names])
            options["inference_params"] = None
        return options

    def _has_steps(self, arguments: Mapping[str, Any], *, but_rotation: bool = False) -> bool:
        """Whether queries and keys are more than rows of the first projection: normalized, rotated,
        those of a cache or of an encoder; ``but_rotation``: more than by one tensor of angles."""
        angles = arguments["rotary_pos_emb"]
        if but_rotation and told_apart(angles)[0] is not None:
            angles = None
        return (
            self.attention_type != "self"
            or self.q_norm is not None
            or self.k_norm is not None
            or angles is not None
            or arguments["inference_params"] is not None
        )

    def _prepared(
        self, rows: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value of the ``rows`` of the first projection, each ``[..., heads,
        head_dim]``, normalized and rotated."""
        if self.attention_type == "self":
            query, key, value = self._sizes.split(rows, rows.shape[:-1])
        else:
            query = as_heads(rows, self._sizes.head_dim)
            pairs = self.key_value(arguments["encoder_output"], arguments["is_first_microbatch"])
            key, value = split_key_value(pairs, self._sizes)
        if self.qk_norm_before_rope:
            query, key = self._normalize(query, key)
        if arguments["rotary_pos_emb"] is not None:
            query, key, value = self._rotate((query, key, value), arguments)
            if self.q_norm is None:  # whose backward holds the projection in any case
                value = _without_its_neighbours(value)
        if not self.qk_norm_before_rope:
            query, key = self._normalize(query, key)
        return query, key, value

    def _refuse_encoder_output(self) -> None:
        if self.attention_type == "cross":
            raise OperandError(
                "MultiheadAttention(attention_type='cross'): encoder_output is None; expected the "
                "tensor that keys and values are projected from."
            )
        raise OperandError(
            "MultiheadAttention(attention_type='self') takes keys and values from hidden_states; "
            "encoder_output needs attention_type='cross' (TransformerLayer: layer_type='decoder')."
        )

    def _normalize(
        self, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def _rotate(
        self, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query and key rotated, and value; those of a step start behind the tokens of the
        cache, the keys of cross attention at 0."""
        angles, cache = arguments["rotary_pos_emb"], arguments["inference_params"]
        pair = angles if isinstance(angles, tuple | list) else (angles, angles)
        if len(pair) != 2:
            raise OperandError(
                f"MultiheadAttention: rotary_pos_emb is a {type(angles).__name__} of {len(pair)}; "
                f"expected a tensor, or two: the angles of queries and those of keys."
            )
        spans: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        for side in ("q", "kv"):
            padded = arguments[f"cu_seqlens_{side}_padded"]
            spans.append((None, arguments[f"cu_seqlens_{side}"] if padded is None else padded))
        group = self.core_attention.context_group
        if cache is not None:
            step = cache.get_seqlens_pre_step(), cache.step_cu_seqlens[0]
            spans = [step, step if self.attention_type == "self" else spans[1]]
            # Keys and values of one memory are stored in one launch, unless a norm has new ones.
            is_last = self.q_norm is None or self.qk_norm_before_rope
            if spans[1] is step and pair[0] is pair[1] and is_last:
                layout, interleaved = self.qkv_format, self.rotary_pos_interleaved
                joined = rotated_parts(layout, interleaved, heads, pair[0], Spans(*step))
                if joined is not None:
                    return self._sizes.parts(joined)
        query, key = (
            apply_rotary_pos_emb(
                tensor,
                freqs,
                self.qkv_format,
                start_positions=start,
                interleaved=self.rotary_pos_interleaved,
                cu_seqlens=ends,
                cp_size=group.size,
                cp_rank=group.rank,
            )
            for tensor, freqs, (start, ends) in zip(heads[:2], pair, spans, strict=True)
        )
        return query, key, heads[2]


ARGUMENTS = tuple(inspect.signature(MultiheadAttention.forward).parameters)[2:]
"""The names of the arguments of a call behind its input."""

_OF_CALLS = tuple(name for name in ARGUMENTS if name in AttentionOptions._fields[1:])
"""Those that attention takes as they are, besides the mask."""


def _without_its_neighbours(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``value`` if backward would hold the whole projection that it is a view of:
    queries and keys, which are kept rotated."""
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    return value.contiguous()


def check_main_grad(owner: str, fuse_wgrad_accumulation: bool, fuse_qkv_params: bool) -> None:
    """Refuse accumulation into ``main_grad`` where query, key and value have a weight each.

    Raises:
        UnsupportedError: the first is asked for, and the second is not.
    """
    if fuse_wgrad_accumulation and not fuse_qkv_params:
        raise UnsupportedError(
            f"{owner}(fuse_wgrad_accumulation=True) needs fuse_qkv_params=True: the gradient of "
            f"query, key and value is computed as one tensor, which goes to one main_grad."
        )
