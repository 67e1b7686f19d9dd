"""What attention computes, before it is bound."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch

from fp8core.backend_api import AttentionDesc
from fp8core.chain.attention.tensors import AttentionTensors
from fp8core.chain.shape import CallInputs, LinkShape
from fp8core.recipe.plan import AttentionPlan, Plan


@dataclass(frozen=True, slots=True)
class AttentionSpec(LinkShape):
    """What attention computes; the fields are those of :class:`~fp8core.backend_api.AttentionDesc`,
    whose groups are ``gqa_groups`` here: the rows of a call have no groups. With ``bf16_backward``
    backward quantizes nothing, whatever the recipe says.

    ``context`` is how the ranks of a group share the tokens, and the names of its groups, see
    :func:`~fp8core.chain.context_binding.bind_context`; empty for one rank.

    ``cached``: keys and values are those of a cache, as
    :class:`~fp8core.backend_api.CachedAttentionDesc` has it.

    Its parameters are ``(k, v)``, then the bias and the learned offset of the softmax, if any.
    """

    plan_type: ClassVar[type[Plan]] = AttentionPlan
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

    def columns(self, columns: int) -> int:
        """Return the columns of the values of all heads."""
        return self.heads * self.head_dim_v

    def input_columns(self, columns: int | None) -> int:
        """Return the columns of the queries of all heads."""
        return self.heads * self.head_dim

    def expected_columns(self, columns: int) -> str | None:
        """Return the columns of the queries unless they are ``columns``."""
        width = self.heads * self.head_dim
        return None if columns == width else str(width)

    def desc(self, dtype: torch.dtype) -> AttentionDesc:
        """Return the descriptor for activations of ``dtype``, of keys and values of no cache."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["bf16_backward"], values["context"], values["cached"]
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
