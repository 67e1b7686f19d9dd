"""The operations that a linear is bound to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.backend_api import GemmDesc
from fp8core.chain.dequantized import Decode
from fp8core.chain.linear.spec import LinearSpec
from fp8core.chain.shards import GemmPart, Shards
from fp8core.dispatch.select import Choice
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.quantizer import TensorQuantizer
from fp8core.tensors.weights import WeightQuantizer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinearOperations:
    """Three quantizers and three GEMMs, with what each of them is bound to.

    ``input_dtype`` and ``grad_dtype`` are those of the tensors that the neighbours hand over.
    ``choices`` says, by GEMM and tensor, who computes. ``column_sums`` computes the gradient of the
    bias, if there is one. ``backward_state`` is that in which the cast of the gradient records.
    ``decode_input`` and ``decode_weight`` make the operand of wgrad and dgrad from that of fprop,
    None where forward makes both. ``input_shards`` and ``grad_shards`` say how the two tensors
    travel where each rank has some of their rows. ``fprop_part`` and ``dgrad_part`` compute some
    rows of a product, None unless others may travel or be cast meanwhile; ``dgrad_rows`` those of a
    gradient that comes in chunks, None where dgrad itself does. ``wgrad`` adds zeros to operands
    whose rows are no multiple of ``wgrad_rows``.
    """

    shape: LinearSpec
    input: TensorQuantizer
    weight: WeightQuantizer
    grad_output: TensorQuantizer
    fprop: Callable[..., Any]
    dgrad: Callable[..., Any]
    wgrad: Callable[..., Any]
    column_sums: Callable[[torch.Tensor], torch.Tensor] | None
    backward_state: DelayedState | None
    input_dtype: torch.dtype
    grad_dtype: torch.dtype
    choices: dict[str, Choice]
    decode_input: Decode | None = None
    decode_weight: Decode | None = None
    input_shards: Shards | None = None
    grad_shards: Shards | None = None
    fprop_part: GemmPart | None = None
    dgrad_part: GemmPart | None = None
    dgrad_rows: GemmPart | None = None
    wgrad_rows: int = 1

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype that fprop computes."""
        return _out_dtype(self.choices["fprop"])

    @property
    def grad_input_dtype(self) -> torch.dtype:
        """The dtype that dgrad computes."""
        return _out_dtype(self.choices["dgrad"])

    @property
    def grad_weight_dtype(self) -> torch.dtype:
        """The dtype that wgrad computes."""
        return _out_dtype(self.choices["wgrad"])


def _out_dtype(choice: Choice) -> torch.dtype:
    assert isinstance(choice.desc, GemmDesc)
    return choice.desc.out_dtype
