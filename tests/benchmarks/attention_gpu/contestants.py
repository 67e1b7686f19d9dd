"""Who is measured: attention of torch, Transformer Engine and fp8core, forward from one set of
tensors; backward is autograd's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8core
from fp8core import recipe
from tests.benchmarks.attention_gpu.cases import Case

__all__ = ["CONTESTANTS", "CUDNN", "OURS", "Forward"]

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CUDNN, OURS = "torch cudnn", "fp8core bf16"


def torch_attention(case: Case, kind: SDPBackend) -> Forward:
    """Return torch's attention by one of its kernels, of views ``[b, heads, s, d]``."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        views = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        with sdpa_kernel([kind]):
            out = torch.nn.functional.scaled_dot_product_attention(
                *views,
                is_causal=case.is_causal,
                scale=case.scale,
                enable_gqa=case.groups != case.heads,
            )
        return out.permute(2, 0, 1, 3).flatten(2)

    return forward


def ours(case: Case, chosen: Callable[[], recipe.Recipe] | None) -> Forward:
    """Return fp8core's layer, under a recipe if one is given."""
    layer = fp8core.DotProductAttention(
        case.heads,
        case.head_dim,
        case.groups,
        attn_mask_type="causal" if case.is_causal else "no_mask",
        softmax_scale=case.scale,
    )

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if chosen is None:
            plain: torch.Tensor = layer(q, k, v)
            return plain
        with fp8core.autocast(recipe=chosen()):
            quantized: torch.Tensor = layer(q, k, v)
        return quantized

    return forward


def transformer_engine(case: Case) -> Forward:
    """Return Transformer Engine's layer, in bfloat16."""
    import transformer_engine.pytorch as te

    layer = te.DotProductAttention(
        case.heads,
        case.head_dim,
        num_gqa_groups=case.groups,
        attention_dropout=0.0,
        attn_mask_type="causal" if case.is_causal else "no_mask",
        softmax_scale=case.scale,
    )
    forward: Forward = layer
    return forward


CONTESTANTS: dict[str, Callable[[Case], Forward]] = {
    CUDNN: lambda case: torch_attention(case, SDPBackend.CUDNN_ATTENTION),
    "torch flash": lambda case: torch_attention(case, SDPBackend.FLASH_ATTENTION),
    "te bf16": transformer_engine,
    OURS: lambda case: ours(case, None),
    "fp8core current": lambda case: ours(case, lambda: recipe.Float8CurrentScaling(fp8_dpa=True)),
    "fp8core delayed": lambda case: ours(case, lambda: recipe.DelayedScaling(fp8_dpa=True)),
}
