"""The biases of attention: those that a call gives, and those of ALiBi."""

from __future__ import annotations

import math

import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.inputs import check_is_whole, check_kind
from fp8core.modules.parallel import Parallel

__all__ = ["alibi_slopes_of", "bias_kind"]

_BIASES = {"no_bias": None, "pre_scale_bias": "pre_scale", "post_scale_bias": "post_scale"}
_BIAS_TYPES = (*_BIASES, "alibi")


def bias_kind(
    owner: object, name: str, bias: torch.Tensor | None, slopes: torch.Tensor | None
) -> str | None:
    """Return the descriptor's word for a type of bias, and check that its tensors are given."""
    if name not in _BIAS_TYPES:
        known = ", ".join(map(repr, _BIAS_TYPES))
        raise OperandError(f"{owner}: core_attention_bias_type={name!r}; expected one of {known}.")
    if slopes is not None and name != "alibi":
        raise OperandError(
            f"{owner}: alibi_slopes with core_attention_bias_type={name!r}; expected 'alibi'."
        )
    kind = _BIASES.get(name)
    if (bias is None) != (kind is None):
        given = "None" if bias is None else "given"
        raise OperandError(
            f"{owner}: core_attention_bias is {given} with core_attention_bias_type={name!r}; "
            f"'pre_scale_bias' and 'post_scale_bias' take one, the other types none."
        )
    return "alibi" if name == "alibi" else kind


def alibi_slopes_of(
    owner: object,
    heads: int,
    batch: int,
    q: torch.Tensor,
    given: torch.Tensor | None,
    spread: Parallel,
) -> torch.Tensor:
    """Return the slopes of ALiBi, float32 ``[heads]`` or ``[b, heads]``."""
    if given is None:
        return torch.tensor(
            _slopes_of_rank(owner, heads, spread), dtype=torch.float32, device=q.device
        )
    check_kind(owner, "alibi_slopes", given)
    check_is_whole(owner, "alibi_slopes", given)
    is_one_row = given.dim() == 1 or (given.dim() == 2 and given.shape[0] in (1, batch))
    if not is_one_row or given.shape[-1] != heads or given.device != q.device:
        raise OperandError(
            f"{owner}: alibi_slopes {list(given.shape)} on {given.device}; expected [{heads}] or "
            f"[{batch}, {heads}], batch and heads, on {q.device}."
        )
    if given.requires_grad:
        raise UnsupportedError(
            f"{owner}: alibi_slopes requires a gradient, which is not offered; pass "
            f"alibi_slopes.detach(), or the bias itself as core_attention_bias."
        )
    return given.to(torch.float32)


def _slopes_of_rank(owner: object, heads: int, spread: Parallel) -> list[float]:
    """Return the slopes of the ALiBi paper for the ``heads`` that a rank has of all.

    Raises:
        OperandError: the heads are spread over ranks, and the layer does not know its own.
    """
    if spread.size > 1 and not spread.group:
        raise OperandError(
            f"{owner}: ALiBi with tp_size={spread.size} needs the rank of the layer. Give it "
            f"tp_group, call set_tensor_parallel_group, or give alibi_slopes of its heads."
        )
    return _alibi_slopes(heads * spread.size)[heads * spread.rank :][:heads]


def _alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of the ALiBi paper: powers of ``2^(-8 / n)`` for n heads, n a power of two;
    further heads take every other power of ``2^(-4 / n)``.

    Source: Press et al., "Train Short, Test Long", section 3, and its code for other numbers.

    >>> _alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * at / whole) for at in range(1, whole + 1)]
    return slopes + [2 ** (-4 * at / whole) for at in range(1, 2 * (heads - whole) + 1, 2)]
