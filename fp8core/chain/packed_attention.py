"""Attention whose queries, keys and values come as the rows of one projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fp8core.chain.attention.link import AttentionLink, AttentionProgram
from fp8core.chain.attention.shape import AttentionShape
from fp8core.chain.attention.spec import check_memory
from fp8core.chain.call import DENSE, Call
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    OnlyOnce,
    Out,
    Params,
    Recordable,
    Saved,
    TensorProgram,
)
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.chain.simple import RotaryLink, RotaryShape
from fp8core.torch_ops.repeats import called_in_repeats


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The heads of an attention layer: ``num_heads`` queries share ``num_groups`` keys and values,
    each of ``head_dim`` columns. ``is_interleaved``: a projection holds the query, key and value
    heads of one group after another, instead of all query heads, then all key, then all value
    heads."""

    num_heads: int
    num_groups: int
    head_dim: int
    is_interleaved: bool

    @property
    def query_size(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Columns of all key heads, and of all value heads."""
        return self.num_groups * self.head_dim

    def split(
        self, rows: torch.Tensor, tokens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries ``[*tokens, num_heads, head_dim]``, keys and values ``[*tokens,
        num_groups, head_dim]`` of ``rows``, which have all of their columns; views where the order
        allows."""
        heads, groups, size = self.num_heads, self.num_groups, self.head_dim
        if not self.is_interleaved:
            return self.parts(rows.view(*tokens, heads + 2 * groups, size))
        share = heads // groups
        by_group = rows.view(*tokens, groups, share + 2, size)
        q, k, v = torch.split_with_sizes(by_group, [share, 1, 1], -2)
        return q.reshape(*tokens, heads, size), k.squeeze(-2), v.squeeze(-2)

    def parts(self, by_head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, keys and values, views of all heads one after the other."""
        sizes = [self.num_heads, self.num_groups, self.num_groups]
        q, k, v = torch.split_with_sizes(by_head, sizes, -2)
        return q, k, v

    def join(
        self, num_rows: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return the ``num_rows`` rows that :meth:`split` splits."""
        heads, groups, size = self.num_heads, self.num_groups, self.head_dim
        if not self.is_interleaved:
            return torch.cat((q, k, v), dim=-2).view(num_rows, (heads + 2 * groups) * size)
        by_group = q.reshape(*q.shape[:-2], groups, heads // groups, size)
        together = torch.cat((by_group, k.unsqueeze(-2), v.unsqueeze(-2)), dim=-2)
        return together.view(num_rows, (heads + 2 * groups) * size)


@dataclass(frozen=True, slots=True)
class PackedAttentionShape(LinkShape):
    """``attention`` in high precision of the rows of a projection; ``heads`` and ``rotation`` are
    as of :class:`PackedAttentionLink`.

    If it rotates, its parameter are angles, float32 ``[s, 1, 1, head_dim]``, of sequences of this
    length; else ``tokens`` are the first dimensions of the rows.
    """

    attention: AttentionShape
    heads: HeadSizes
    rotation: RotaryShape | None = None
    tokens: tuple[int, ...] = ()

    @property
    def num_params(self) -> int:
        """The angles."""
        return int(self.rotation is not None)

    def of(self, tokens: tuple[int, ...]) -> PackedAttentionShape:
        """Return the shape for rows whose first dimensions are ``tokens``: this one if it
        rotates."""
        return replace(self, tokens=tokens) if self.rotation is None else self

    def bind(self, context: BindContext) -> PackedAttentionLink:
        """Return the link."""
        rotation = None if self.rotation is None else self.rotation.bind(context)
        attention = self.attention.bind(context._replace(attention=None))
        return PackedAttentionLink(attention, self.heads, self.tokens, rotation)


@dataclass(frozen=True, slots=True, eq=False)
class PackedAttentionLink(Link):
    """``attention`` of rows ``[tokens, (heads + 2 * groups) * head_dim]``, split as ``heads`` say.

    The parameters are those of ``attention`` behind keys and values.

    ``sizes``: of attention in high precision that takes nothing but queries, keys and values, the
    first two dimensions of all its queries; () if calls bring what it takes besides. ``rotation``
    rotates queries and keys of such a batch first, by angles that are the last parameter, of all
    positions if ``sizes`` are (); None: they attend as they are.
    """

    attention: AttentionLink
    heads: HeadSizes
    sizes: tuple[int, ...] = ()
    rotation: RotaryLink | None = None
    keeps_input = True

    @property
    def num_params(self) -> int:  # type: ignore[override]  # which is a field there
        """The bias, the learned offset of the softmax and the angles, if any."""
        return self.attention.num_params - 2 + (self.rotation is not None)

    @property
    def needs_rng(self) -> bool:  # type: ignore[override]  # likewise
        """As attention."""
        return self.attention.needs_rng

    @property
    def result(self) -> str:  # type: ignore[override]  # a default there
        """As attention."""
        return self.attention.result

    @property
    def only_once(self) -> OnlyOnce | None:
        """As attention."""
        return self.attention.only_once

    def in_torch(self, bind: Callable[[Any], Any]) -> PackedAttentionLink:
        """Return attention by torch's operators, of the same rows."""
        attention: AttentionLink = bind(self.attention.shape)
        rotation = None if self.rotation is None else bind(self.rotation.shape)
        return PackedAttentionLink(attention, self.heads, self.sizes, rotation)

    def program(
        self, rows: int, needs_grad: Sequence[bool], call: Call
    ) -> PackedAttentionProgram | SizedAttentionProgram:
        """Return the program; the sizes of the batch come with the call unless they are known."""
        if self.rotation is not None:
            return RotatedAttentionProgram(self, needs_grad, self.rotation)
        if self.sizes:
            return SizedAttentionProgram(self, needs_grad)
        needs_rows, *rest = needs_grad
        inner = self.attention.program(rows, (needs_rows,) * 3 + tuple(rest), call)
        return PackedAttentionProgram(self, needs_grad, inner)

    def split(self, rows: torch.Tensor, call: Call) -> Sequence[torch.Tensor]:
        """Return the rows of the queries, and keys and values in the layout of the call."""
        tokens = rows.shape[:1] if self.attention.shape.layout == "thd" else call.sizes
        q, keys, values = self.heads.split(rows, tokens)
        return q.reshape(rows.shape[0], self.heads.query_size), keys, values


class PackedAttentionProgram(TensorProgram[PackedAttentionLink]):
    """Attends to the three parts of its rows."""

    __slots__ = ("_inner",)

    def __init__(
        self, link: PackedAttentionLink, needs_grad: Sequence[bool], inner: AttentionProgram
    ) -> None:
        super().__init__(link, needs_grad)
        self._inner = inner

    def remade(self, saved: Saved, call: Call, out: QuantizeRequest) -> Handover:
        """As attention."""
        return self._inner.remade(saved, call, out)

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
        heads = self._link.heads
        by_head = q.view(*k.shape[:-2], heads.num_heads, heads.head_dim)
        packed = heads.join(q.shape[0], by_head, k, v)
        return (packed if out is None else out(packed), *rest)


class SizedAttentionProgram(TensorProgram[PackedAttentionLink]):
    """Attends to the three parts of its rows, which it saves as they are, with the result and its
    statistics. Each direction is a function of tensors, which a recorded run calls again."""

    __slots__ = ()

    recordable = Recordable()

    def remade(self, saved: Saved, call: Call, out: QuantizeRequest) -> Handover:
        """Return the result, which is saved."""
        assert saved[0] is not None
        return out(saved[0])

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Attend."""
        return self._attended((x,), params, out)

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradient of the rows."""
        without = (None,) * len(self._needs_grad[1:])  # angles have no gradient
        if not self._needs_grad[0]:
            return None, *without
        packed = self._gradient(grad, *saved)  # type: ignore[arg-type]  # forward saved all of them
        return packed if out is None else out(packed), *without

    def _attended(
        self, tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor], out: Out
    ) -> Forward:
        """Attend to ``tensors``, the rows or three parts of them, and save these and ``params``."""
        rows = called_in_repeats(self._rows, *tensors)
        saved: Saved = ()
        if self._needs_grad[0]:
            saved = (rows, called_in_repeats(_statistics, rows), *tensors, *params)
        return rows if out is None else out(rows), saved, None

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return queries, keys and values of the rows ``x``."""
        return self._link.heads.split(x, self._link.sizes)

    def _rows(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the rows of the result; their statistics are an attribute until they are taken."""
        attention = self._link.attention
        q, k, v = tensors if len(tensors) > 1 else self._parts(*tensors)
        if attention.fallback is not None:
            check_memory(attention.fallback, attention.shape, q, k, DENSE)
        out, stats, _ = attention.run(q, k, v)
        rows: torch.Tensor = out.reshape(q.shape[0] * q.shape[1], -1)
        if self._needs_grad[0]:
            rows.attention_stats = stats  # type: ignore[attr-defined]
        return rows

    def _gradient(
        self, grad: torch.Tensor, rows: torch.Tensor, stats: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        return called_in_repeats(self._packed, grad, rows, stats, *tensors)

    def _packed(self, *saved: torch.Tensor) -> torch.Tensor:
        q, k, v = self._gradients(*saved)
        return self._joined(q, k, v)

    def _gradients(
        self, grad: torch.Tensor, rows: torch.Tensor, stats: torch.Tensor, *tensors: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return the gradients of what has attended, queries, keys and values."""
        q, k, v = tensors if len(tensors) > 1 else self._parts(*tensors)
        grad_out, out = grad.reshape(q.shape), rows.view(q.shape)
        grads: Sequence[torch.Tensor] = self._link.attention.run_backward(
            grad_out, q, k, v, out, stats
        )
        return grads[:3]

    def _joined(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._link.heads.join(q.shape[0] * q.shape[1], q, k, v)


class RotatedAttentionProgram(SizedAttentionProgram):
    """Rotates queries and keys of its rows, then attends to them. What is saved has the heads of
    all, or is each of the three parts: the rows would be held for the values alone."""

    __slots__ = ("_rotation",)

    def __init__(
        self, link: PackedAttentionLink, needs_grad: Sequence[bool], rotation: RotaryLink
    ) -> None:
        super().__init__(link, needs_grad)
        self._rotation = rotation

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Rotate, and attend."""
        link, (angles,) = self._link, params
        tokens = link.sizes or (x.shape[0] // angles.shape[0], angles.shape[0])
        q, k, v = link.heads.split(x, tokens)
        if self._rotation.rotate_parts is not None:
            return self._attended((self._rotation.rotate_parts(q, k, v, angles),), params, out)
        q, k = (self._rotation.rotate(each, *params) for each in (q, k))
        return self._attended((q, k, v.contiguous()), params, out)

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return queries, keys and values of ``x``, the heads of all, rotated."""
        return self._link.heads.parts(x)

    def _gradient(
        self, grad: torch.Tensor, rows: torch.Tensor, stats: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        *heads, angles = tensors
        q = called_in_repeats(self._of_queries, grad, rows, stats, *heads)
        k, v = called_in_repeats(_keys, q), called_in_repeats(_values, q)
        turn_back = self._rotation.turn_parts_back
        if turn_back is not None and not self._link.heads.is_interleaved:
            return turn_back(q, k, v, angles).view(q.shape[0] * q.shape[1], -1)
        q, k = (self._rotation.turn_back(each, angles) for each in (q, k))
        return called_in_repeats(self._joined, q, k, v)

    def _of_queries(self, *saved: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the queries; the others are attributes until they are taken."""
        q, k, v = self._gradients(*saved)
        q.attention_keys, q.attention_values = k, v  # type: ignore[attr-defined]
        return q


def _pop(name: str, tensor: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = getattr(tensor, name)
    delattr(tensor, name)
    return value


_statistics = partial(_pop, "attention_stats")
_keys, _values = partial(_pop, "attention_keys"), partial(_pop, "attention_values")
