"""Attention of one sequence after the other in float64, by which every layout and mask is judged.

It uses torch's triangles and autograd, and shares nothing with the judge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fp8core.backend_api import AttentionDesc, Numerics
from fp8core.conformance.calls import OpCall
from fp8core.conformance.subject import on_cpu

ROUND = 2.0**-24  # largest relative error of one float32 rounding
FUNCTION = 2.0**-20  # error of a float32 exponential
F64 = torch.float64
DEFAULT = Numerics()


class Side(NamedTuple):
    """Where one side's sequences are: ``starts`` and ``lengths``; ``starts`` only in thd."""

    layout: str
    starts: list[int]
    lengths: list[int]

    def part(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Return sequence ``at`` of ``x``, a view ``[length, heads, d]``."""
        length = self.lengths[at]
        if self.layout == "thd":
            return x[self.starts[at] : self.starts[at] + length]
        return x[:length, at] if self.layout == "sbhd" else x[at, :length]

    def statistics(self, stats: torch.Tensor, at: int) -> torch.Tensor:
        """Return the statistics of sequence ``at``, a view ``[heads, length]``."""
        length = self.lengths[at]
        if self.layout == "thd":
            return stats[self.starts[at] : self.starts[at] + length].t()
        return stats[at, :, :length]


def sides_of(call: OpCall, desc: AttentionDesc, x: torch.Tensor, y: torch.Tensor) -> list[Side]:
    """Return the side of the queries ``x`` and that of the keys ``y``."""
    sides = []
    for name, tensor in (("q", x), ("kv", y)):
        if not desc.padding:
            length, batch = tensor.shape[:2] if desc.layout == "sbhd" else tensor.shape[:2][::-1]
            sides.append(Side(desc.layout, [], [length] * batch))
            continue
        offsets = on_cpu(call.keywords[f"cu_seqlens_{name}"])
        starts = on_cpu(call.keywords.get(f"cu_seqlens_{name}_padded", offsets))
        sides.append(Side(desc.layout, starts.tolist(), offsets.diff().tolist()))
    return sides


class Sequence(NamedTuple):
    """A sequence in float64: its inputs as leaves, and ``logits`` with ``weights``,
    ``[heads, s_q, s_kv]``; ``log_sums [heads, s_q]``, ``out [s_q, heads, d]``."""

    leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    logits: torch.Tensor
    weights: torch.Tensor
    log_sums: torch.Tensor
    out: torch.Tensor
    error: torch.Tensor


def _seen(desc: AttentionDesc, num_q: int, num_kv: int) -> torch.Tensor:
    """Return bool ``[s_q, s_kv]``: the keys that the window leaves, as an intersection of a lower
    and an upper triangle."""
    shift = num_kv - num_q if desc.bottom_right else 0
    seen = torch.ones(num_q, num_kv, dtype=torch.bool)
    left, right = desc.window
    if right >= 0:
        seen = seen.tril(shift + right)
    return seen.triu(shift - left) if left >= 0 else seen


def sequence(
    desc: AttentionDesc,
    at: int,
    parts: tuple[torch.Tensor, ...],
    keywords: dict[str, Any],
    numerics: Numerics = DEFAULT,
) -> Sequence:
    """Compute sequence ``at`` from its queries, keys and values ``[length, heads, d]``.

    ``numerics`` bounds the sums of the products of queries and keys.
    """
    q, k, v = (part.double().detach().requires_grad_() for part in parts)
    repeats = desc.heads // desc.groups
    keys, values = (torch.repeat_interleave(x, repeats, 1) for x in (k, v))
    num_q, num_kv = len(q), len(k)
    products = torch.einsum("ihd,jhd->hij", q, keys)
    sizes = torch.einsum("ihd,jhd->hij", q.detach().abs(), keys.detach().abs())
    bias = keywords.get("bias")
    if bias is not None:
        bias = bias.expand(-1, desc.heads, -1, -1)[min(at, len(bias) - 1), :, :num_q, :num_kv]
        sizes = sizes + bias.detach().abs() * (1 if desc.bias == "pre_scale" else 1 / desc.scale)
        products = products + bias if desc.bias == "pre_scale" else products
    logits = desc.scale * products
    if desc.softcap:
        logits = desc.softcap * torch.tanh(logits / desc.softcap)
    if bias is not None and desc.bias == "post_scale":
        logits = logits + bias
    if desc.bias == "alibi":
        shift = num_kv - num_q if desc.bottom_right else 0
        far = (torch.arange(num_q)[:, None] + shift - torch.arange(num_kv)).abs().double()
        logits = logits - keywords["alibi_slopes"].double()[:, None, None] * far
    seen = _seen(desc, num_q, num_kv)
    if desc.arbitrary:
        seen = seen & ~keywords["mask"][at, :, :num_q, :num_kv]
    logits = logits.masked_fill(~seen, -torch.inf)
    sink = _sink(desc, keywords)
    every = logits if sink is None else torch.cat((logits, sink.expand(-1, num_q, 1)), -1)
    is_open = (every > -torch.inf).any(-1, keepdim=True)
    weights = every.masked_fill(~is_open, 0).softmax(-1).masked_fill(~is_open, 0)[..., :num_kv]
    out = torch.einsum("hij,jhd->ihd", weights, values)
    declared = numerics.sum_error - DEFAULT.sum_error
    declared += desc.head_dim * (numerics.sum_error_per_term - DEFAULT.sum_error_per_term)
    error = ((desc.head_dim + 16) * ROUND + declared) * desc.scale * sizes + FUNCTION
    return Sequence((q, k, v), logits, weights, every.logsumexp(-1), out, error)


def _sink(desc: AttentionDesc, keywords: dict[str, Any]) -> torch.Tensor | None:
    if desc.softmax == "vanilla":
        return None
    if desc.softmax == "off-by-one":
        return torch.zeros(desc.heads, 1, 1, dtype=F64)
    offset: torch.Tensor = keywords["softmax_offset"]
    return offset[:, None, None]
