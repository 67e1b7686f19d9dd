"""Attention before it is bound: the computation as a value, the tensors that a call brings besides
those that are differentiated, and the memory that it may take."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8core.backend_api import AttentionDesc, OperandSpec
from fp8core.chain.attention.pages import Pages
from fp8core.chain.call import Call
from fp8core.chain.protocol import Params, Saved
from fp8core.chain.shape import CallInputs, LinkShape
from fp8core.dispatch.select import Choice
from fp8core.errors import UnsupportedError


class AttentionTensors(NamedTuple):
    """The tensors of a call of attention in ``Call.tensors``, none of which is differentiated.

    The first six are keywords of :class:`~fp8core.backend_api.AttentionDesc`, the next three those
    of :class:`~fp8core.chain.attention.pages.Pages`; ``max_logit_out``, of the statistics' dtype
    ``[heads]``, is filled with the largest logits. ``Call.sizes`` are, of a dense batch, the first
    two dimensions of the queries, and with a cache the longest sequence of keys; in thd the longest
    sequence of queries and of keys; with pages, behind these, how many tokens of whole pages hold
    the longest sequence.
    """

    alibi_slopes: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    max_logit_out: torch.Tensor | None = None

    def keywords(self) -> dict[str, torch.Tensor]:
        """Return the operation's keywords among the first six that are given."""
        pairs = zip(self._fields[:6], self[:6], strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def pages(self, params: Params) -> Pages:
        """Return the pages whose keys and values are the first of ``params``."""
        (keys, values, *_), table = params, self.page_table
        assert table is not None
        return Pages(keys, values, table, self.key_scales, self.value_scales)


def in_layout(
    layout: str, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[b, tokens, heads, head size]`` in a layout, without copies."""
    if layout == "thd":
        return keys.flatten(0, 1), values.flatten(0, 1)
    if layout == "sbhd":
        return keys.transpose(0, 1), values.transpose(0, 1)
    return keys, values


NUM_SAVED = len(AttentionTensors._fields) - 1
"""How many tensors :func:`saved_tensors` returns."""


def hand_out(max_logit: torch.Tensor, call: Call) -> None:
    """Write the largest logits where the call asks for them."""
    max_logit_out = AttentionTensors(*call.tensors).max_logit_out
    assert max_logit_out is not None
    max_logit_out.copy_(max_logit)


def saved_tensors(call: Call) -> Saved:
    """Return the tensors of the call that backward reads: autograd then notices a write to them."""
    return AttentionTensors(*call.tensors)[:-1]


def of_forward(call: Call, saved: Saved) -> Call:
    """Return ``call`` with the tensors that forward saved at the end of ``saved``."""
    tensors = saved[-NUM_SAVED:]
    is_empty = not any([tensor is not None for tensor in tensors])
    return call if is_empty else call._replace(tensors=(*tensors, None))


@dataclass(frozen=True, slots=True)
class AttentionSpec(LinkShape):
    """The computation of attention, by the fields of :class:`~fp8core.backend_api.AttentionDesc`,
    whose groups are ``gqa_groups`` here: the rows of a call have no groups. With ``bf16_backward``
    backward quantizes nothing, whatever the recipe says.

    ``context`` is how the ranks of a group share the tokens, and the names of its groups, see
    :func:`~fp8core.chain.attention.shape.bind_context`; empty for one rank.

    ``cached``: keys and values are those of a cache, as
    :class:`~fp8core.backend_api.CachedAttentionDesc` has it; ``paged``: in pages, as
    :class:`~fp8core.backend_api.PagedAttentionDesc` has them with its ``kv``.

    Its parameters are ``(k, v)``, then the bias and the learned offset of the softmax, if any.
    """

    layout: str
    heads: int
    gqa_groups: int
    head_dim: int
    head_dim_v: int
    scale: float
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    padding: bool = False
    arbitrary: bool = False
    bias: str | None = None
    softcap: float = 0.0
    softmax: str = "vanilla"
    dropout: float = 0.0
    max_logit: bool = False
    bf16_backward: bool = False
    context: tuple[str, ...] = ()
    cached: bool = False
    paged: bool = False
    kv: OperandSpec | None = None

    @property
    def shares_scales_over(self) -> str | None:
        """The group that shares the tokens, where it is one."""
        return self.context[1] if len(self.context) == 2 else None

    @property
    def process_groups(self) -> tuple[str, ...]:
        """The names of the groups whose ranks share the tokens."""
        return self.context[1:]

    @property
    def has_bias(self) -> bool:
        """Whether a bias is among its parameters."""
        return self.bias in ("pre_scale", "post_scale")

    @property
    def has_offset(self) -> bool:
        """Whether the offset of the softmax is among its parameters."""
        return self.softmax == "learnable"

    @property
    def num_params(self) -> int:
        """Keys, values, and the bias and the offset, if any."""
        return 2 + self.has_bias + self.has_offset

    @property
    def widths(self) -> tuple[int, int]:
        """The columns of the queries and of the values of all heads."""
        return self.heads * self.head_dim, self.heads * self.head_dim_v

    @property
    def takes_rows_alone(self) -> bool:
        """Whether calls bring nothing but queries, keys and values of a dense batch."""
        brings = self.padding or self.arbitrary or self.dropout or self.bias or self.max_logit
        return not (brings or self.has_offset or self.layout == "thd")

    def desc(self, dtype: torch.dtype) -> AttentionDesc:
        """Return the descriptor for activations of ``dtype``, of keys and values of no cache."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("bf16_backward", "context", "cached", "paged", "kv"):
            del values[name]
        return AttentionDesc(dtype, groups=values.pop("gqa_groups"), **values)

    def example(self, x: torch.Tensor) -> CallInputs:
        """Return keys, values and the other tensors of a call of one sequence, self-attention."""
        rows = x.shape[0]
        tokens = {"thd": (rows,), "bshd": (1, rows), "sbhd": (rows, 1)}[self.layout]
        params = [
            x.new_empty(*tokens, self.gqa_groups, size).requires_grad_()
            for size in (self.head_dim, self.head_dim_v)
        ]
        if self.has_bias:
            params.append(x.new_empty(1, 1, 1, rows))
        cu_seqlens = x.new_empty(2, dtype=torch.int32) if self.padding else None
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        tensors = AttentionTensors(
            alibi_slopes=x.new_empty(self.heads) if self.bias == "alibi" else None,
            mask=x.new_empty(1, 1, 1, rows, dtype=torch.bool) if self.arbitrary else None,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_logit_out=x.new_empty(self.heads, dtype=wide) if self.max_logit else None,
        )
        sizes = (rows, rows) if self.layout == "thd" else tokens
        if self.cached and self.layout != "thd":
            sizes = (*sizes, rows)
        return CallInputs(params, tensors, sizes)


_MAX_FALLBACK_BYTES = 2 * 2**30
"""The logits of a call that a backend nobody asked for may hold at once."""


def check_memory(
    choice: Choice | None, shape: AttentionSpec, q: torch.Tensor, k: torch.Tensor, call: Call
) -> None:
    """Refuse a call whose logits are many bytes where ``choice``, a backend for other devices that
    nobody asked for, runs it; None: another runs it.

    Raises:
        UnsupportedError: says how many, and why no backend for the device runs it.
    """
    if choice is None:
        return
    if shape.layout == "thd":
        cu_seqlens = AttentionTensors(*call.tensors).cu_seqlens_q
        assert cu_seqlens is not None
        sizes = (cu_seqlens.shape[0] - 1, shape.heads, *call.sizes[:2])
    else:
        batch, length = shape.layout.index("b"), shape.layout.index("s")
        sizes = (q.shape[batch], shape.heads, q.shape[length], k.shape[length])
    num_bytes = math.prod(sizes) * (8 if q.dtype == torch.float64 else 4)
    if num_bytes > _MAX_FALLBACK_BYTES:
        name, device = choice.backend, q.device
        raise UnsupportedError(
            f"attention on {device} would run on {name}, which may hold all logits of a call at "
            f"once: {' x '.join(map(str, sizes))} of batch, heads, queries and keys are "
            f"{num_bytes / 2**30:.1f} GiB, and without being asked for it takes "
            f"{_MAX_FALLBACK_BYTES // 2**30} GiB. Call with less at a time, choose attention that "
            f"a backend for {device.type} runs, or use_backend({name!r}) to run it so. "
            f"{choice}"
        )
