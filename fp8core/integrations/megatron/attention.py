"""fp8core's attention with the arguments of Megatron's."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.integrations.megatron.config import ALIAS, adopt, refuse
from fp8core.modules.attention import DotProductAttention

__all__ = ["Fp8CoreDotProductAttention"]


class Fp8CoreDotProductAttention(DotProductAttention):
    """:class:`fp8core.DotProductAttention` with Megatron's arguments; ``[s, b, heads, size]``."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **others: Any,
    ) -> None:
        groups = getattr(others.get("pg_collection"), "tp", None)
        refuse(type(self).__name__, groups)
        super().__init__(
            config.num_attention_heads,
            config.kv_channels,
            num_gqa_groups=config.num_query_groups,
            attention_dropout=(
                config.attention_dropout if attention_dropout is None else attention_dropout
            ),
            attn_mask_type=attn_mask_type.name,
            window_size=config.window_size,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=getattr(config, "softmax_type", "vanilla"),
        )
        self.config = config
        adopt(self, config)

    def forward(  # type: ignore[override]  # Megatron's
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        *,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return ``[s, b, heads * size]``.

        Raises:
            UnsupportedError: packed sequences.
            OperandError: a mask of one's own beside a causal one.
        """
        if packed_seq_params is not None:
            raise UnsupportedError(
                f"{type(self).__name__}: packed sequences are not offered; {ALIAS}."
            )
        name = self.attn_mask_type if attn_mask_type is None else attn_mask_type.name
        if name in ("padding", "padding_causal") and attention_mask is None:
            raise OperandError(f"{type(self).__name__}: attn_mask_type={name!r} without a mask.")
        result = super().forward(
            query,
            key,
            value,
            attention_mask=attention_mask if name in ("padding", "arbitrary") else None,
            qkv_format="sbhd",
            attn_mask_type=name,
            core_attention_bias_type="no_bias" if attention_bias is None else "post_scale_bias",
            core_attention_bias=attention_bias,
        )
        assert isinstance(result, torch.Tensor)
        return result
