"""Attention whose queries, keys and values come as the rows of one projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.chain.attention.link import AttentionLink, AttentionProgram
from fp8core.chain.call import Call
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.once import OnlyOnce
from fp8core.chain.protocol import Backward, Forward, Out, Params, Saved, TensorProgram
from fp8core.chain.request import QuantizeRequest

__all__ = ["PackedAttentionLink"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedAttentionLink(LinkDefaults):
    """``attention`` of rows ``[tokens, (heads + 2 * groups) * head_dim]``: all queries, then all
    keys, then all values; with ``is_interleaved`` those of one group after another.

    The parameters are those of ``attention`` behind keys and values.
    """

    attention: AttentionLink
    is_interleaved: bool = False

    @property
    def num_params(self) -> int:  # type: ignore[override]  # which is a field there
        """The bias and the learned offset of the softmax, if any."""
        return self.attention.num_params - 2

    @property
    def needs_rng(self) -> bool:  # type: ignore[override]  # likewise
        """As attention."""
        return self.attention.needs_rng

    @property
    def only_once(self) -> OnlyOnce | None:
        """As attention."""
        return self.attention.only_once

    def in_torch(self, bind: Callable[[Any], Any]) -> PackedAttentionLink:
        """Return attention by torch's operators, of the same rows."""
        return PackedAttentionLink(self.attention.in_torch(bind), self.is_interleaved)

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> PackedAttentionProgram:
        """Return the program; the sizes of the batch come with the call."""
        needs_rows, *rest = needs_grad
        inner = self.attention.program(rows, (needs_rows,) * 3 + tuple(rest), call)
        return PackedAttentionProgram(self, needs_grad, inner)

    def split(self, rows: torch.Tensor, call: Call) -> Sequence[torch.Tensor]:
        """Return the rows of the queries, and keys and values in the layout of the call."""
        shape = self.attention.shape
        heads, groups, size = shape.heads, shape.gqa_groups, shape.head_dim
        if self.is_interleaved:
            share = heads // groups
            by_group = rows.view(rows.shape[0], groups, share + 2, size)
            q, k, v = torch.split(by_group, [share, 1, 1], dim=2)
        else:
            by_head = rows.view(rows.shape[0], heads + 2 * groups, size)
            q, k, v = torch.split(by_head, [heads, groups, groups], dim=1)
        tokens = rows.shape[:1] if shape.layout == "thd" else call.sizes
        keys, values = (x.reshape(*tokens, groups, size) for x in (k, v))
        return q.reshape(rows.shape[0], heads * size), keys, values

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows of what :meth:`split` returned."""
        rows = parts[0].shape[0]
        shape = self.attention.shape
        if not self.is_interleaved:
            return torch.cat([part.reshape(rows, -1) for part in parts], dim=1)
        size = shape.head_dim
        by_group = [part.reshape(rows, shape.gqa_groups, -1, size) for part in parts]
        return torch.cat(by_group, dim=2).view(rows, -1)


class PackedAttentionProgram(TensorProgram[PackedAttentionLink]):
    """Attends to the three parts of its rows."""

    __slots__ = ("_inner",)

    def __init__(
        self, link: PackedAttentionLink, needs_grad: Sequence[bool], inner: AttentionProgram
    ) -> None:
        super().__init__(link, needs_grad)
        self._inner = inner

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """As attention."""
        return self._inner.request_grad(call)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Attend."""
        q, *keys_and_values = self._link.split(x, call)
        return self._inner.forward(q, (*keys_and_values, *params), call, out)

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients of the rows and of the parameters."""
        q, k, v, *rest = self._inner.backward(grad, saved, context, call)
        if not self._needs_grad[0]:
            return (None, *rest)
        packed = self._link.join((q, k, v))
        return (packed if out is None else out(packed), *rest)
