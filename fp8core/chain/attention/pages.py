"""Keys and values in pages: where a cache has those of its sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.backend_api import DequantizeDesc, Operand, OperandSpec, QuantizeDesc
from fp8core.chain.alone import bound
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.nonfinite import counter_of_writes

CODES = OperandSpec("e4m3", (1, 0), 448.0)
"""How a cache of codes has keys and values: with a scale for each head of a token."""


class Pages(NamedTuple):
    """The keys and values of a layer, as :class:`~fp8core.backend_api.PagedAttentionDesc` has them;
    the scales are None in high precision."""

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def operands(self) -> tuple[torch.Tensor | Operand, torch.Tensor | Operand]:
        """Keys and values as the operation takes them."""
        if self.key_scales is None:
            return self.keys, self.values
        return Operand(self.keys, self.key_scales), Operand(self.values, self.value_scales)

    def gathered(self, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values in ``dtype``, which they have unless they are codes, of each
        sequence one after the other, ``[b, tokens, heads, head size]``, copied: ``tokens`` of whole
        pages, or the first of one."""
        table = self.page_table[:, : -(-tokens // self.keys.shape[1])].long()
        keys, values = (x[:, :tokens][table].flatten(1, 2) for x in (self.keys, self.values))
        if self.key_scales is None or self.value_scales is None:
            return keys, values
        scales = [x[:, :tokens][table].flatten(1, 2) for x in (self.key_scales, self.value_scales)]
        dequantize = bound(_Dequantize, (dtype,), keys)
        keys, values = (
            dequantize(Operand(codes.flatten(0, -2), scale.flatten(0, -2))).view(codes.shape)
            for codes, scale in zip((keys, values), scales, strict=True)
        )
        return keys, values


class _Cast:
    """Makes the descriptor of the cast of a dtype, which counts NaN and inf or does not: a spec is
    no constant in a graph."""

    op = QuantizeDesc.op

    def __new__(cls, dtype: torch.dtype, counted: bool) -> QuantizeDesc:  # type: ignore[misc]  # as it says
        return QuantizeDesc(dtype, CODES, None, counted=counted)


class _Dequantize:
    """Makes the descriptor of the values in a dtype."""

    op = DequantizeDesc.op

    def __new__(cls, dtype: torch.dtype) -> DequantizeDesc:  # type: ignore[misc]  # as it says
        return DequantizeDesc(CODES, dtype)


def codes_of(
    x: torch.Tensor, excluded: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of keys or values ``[t, .., head size]``, uint8, and their scales
    ``[t, .., 1]``, float32.

    NaN and inf count for the device, once somebody has asked, without those of tokens that are
    ``excluded``, bool ``[t]``, whose codes then have no meaning.
    """
    is_in_graph = is_captured(x)  # whose casts count by themselves
    count = None if is_in_graph else counter_of_writes(x.device, in_training=False)
    if excluded is not None and (is_in_graph or count is not None):
        x = x.masked_fill(excluded.view(-1, *[1] * (x.dim() - 1)), 0)
    keywords = {} if count is None else {"nonfinite_out": count}
    cast = bound(_Cast, (x.dtype, count is not None), x)
    operand = cast(x.reshape(-1, x.shape[-1]), **keywords).rowwise
    return operand.data.view(x.shape), operand.scale_inv.view(*x.shape[:-1], 1)
