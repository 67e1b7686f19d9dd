"""The rows of a projection as heads: how query, key and value lie in it, in two orders."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.chain.packed_attention import HeadSizes
from fp8core.errors import OperandError, RecipeError, checked_choice
from fp8core.modules.calls.parameters import check_size
from fp8core.modules.layers.norm import LayerNorm, RMSNorm
from fp8core.modules.layers.operation import L2Normalization

_WITH_WEIGHT = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


def make_qk_norms(
    kind: str | None,
    head_dim: int,
    eps: float,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    name: str | None,
    splits_heads: bool,
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """Return the norms of queries and of keys; both None if ``kind`` is.

    ``name`` is that of the attention layer, in which they are ``q_norm`` and ``k_norm``.
    ``splits_heads``: each rank of a group has some of the heads, and the gradients of those alone.

    Raises:
        RecipeError: an unknown kind; lists the known.
    """
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        return L2Normalization(eps=eps), L2Normalization(eps=eps)
    kinds = (None, "L2Normalization", *_WITH_WEIGHT)
    checked_choice("MultiheadAttention", "qk_norm_type", kind, kinds, RecipeError)
    norms = (
        _WITH_WEIGHT[kind](
            head_dim,
            eps,
            params_dtype=dtype,
            device=device,
            sequence_parallel=splits_heads,
            name=None if name is None else f"{name}.{part}",
        )
        for part in ("q_norm", "k_norm")
    )
    first, second = norms
    return first, second


def head_dim_of(owner: str, hidden_size: int, num_heads: int, kv_channels: int | None) -> int:
    """Return the columns of one head: ``kv_channels``, or an equal share of ``hidden_size`` if that
    is None (or 0, as in Transformer Engine).

    Raises:
        OperandError: a size that is no positive integer, or heads that do not divide the rows.
    """
    check_size(owner, "hidden_size", hidden_size)
    check_size(owner, "num_attention_heads", num_heads)
    if kv_channels:
        return check_size(owner, "kv_channels", kv_channels)
    if hidden_size % num_heads:
        raise OperandError(
            f"{owner}(hidden_size={hidden_size}, num_attention_heads={num_heads}): the heads do "
            f"not divide the hidden size. Give kv_channels, the columns of one head."
        )
    return hidden_size // num_heads


def split_key_value(rows: torch.Tensor, sizes: HeadSizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value ``[..., num_groups, head_dim]`` of ``rows [..., 2 * num_groups *
    head_dim]``, as views."""
    if not sizes.is_interleaved:
        heads = [sizes.num_groups, sizes.num_groups]
        key, value = torch.split_with_sizes(as_heads(rows, sizes.head_dim), heads, -2)
        return key, value
    grouped = rows.view(*rows.shape[:-1], sizes.num_groups, 2, sizes.head_dim)
    key, value = torch.unbind(grouped, dim=-2)
    return key, value


def join_query_key_value(parts: Sequence[torch.Tensor], sizes: HeadSizes) -> torch.Tensor:
    """Return the weight or bias of a fused projection from those of query, key and value; rows are
    the first dimension."""
    if not sizes.is_interleaved:
        return torch.cat(list(parts))
    by_group = [_by_group(part, sizes) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def separate_query_key_value(
    fused: torch.Tensor, sizes: HeadSizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights or biases of query, key and value; undoes :func:`join_query_key_value`."""
    columns = [sizes.query_size, sizes.key_size, sizes.key_size]
    if not sizes.is_interleaved:
        query, key, value = torch.split(fused, columns)
        return query, key, value
    shares = [size // sizes.num_groups for size in columns]
    query, key, value = torch.split(_by_group(fused, sizes), shares, dim=1)
    return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


def as_heads(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return ``rows [..., n * head_dim]`` as ``[..., n, head_dim]``, a view."""
    # No -1: it has no value where there are no rows.
    return rows.view(*rows.shape[:-1], rows.shape[-1] // head_dim, head_dim)


def _by_group(rows: torch.Tensor, sizes: HeadSizes) -> torch.Tensor:
    return rows.reshape(sizes.num_groups, -1, *rows.shape[1:])
