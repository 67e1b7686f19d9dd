"""One question about several tensors: are they of the kind that was looked at before?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fp8core.torch_ops.private import tensor_guards

__all__ = ["Likeness", "likeness_to", "sameness_to"]

Likeness: TypeAlias = Callable[..., bool]
"""Called with as many tensors as it was made from; what is no tensor is not alike."""


def likeness_to(first: torch.Tensor, others: Sequence[torch.Tensor] = ()) -> Likeness | None:
    """Return what says in one call whether tensors are like these; None if torch cannot.

    Like are distinct tensors of the same types, dtypes and devices, with as many dimensions and the
    same ``requires_grad``, of which the first has as many columns. Neither layouts, pending
    negations and zeros, wrappers of torch.func and of inference mode, nor torch.autocast, the
    transforms and the modes that are active may differ. Other sizes, strides and the memory, which
    may be freed, are not compared. The answer may be no for tensors that are like these.
    """
    if tensor_guards is None:
        return None
    tensors = (first, *others)
    sizes: list[list[int | None]] = [[None] * tensor.dim() for tensor in tensors]
    if sizes[0]:
        sizes[0][-1] = first.shape[-1]
    strides = [[None] * tensor.dim() for tensor in tensors]
    guards = tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Likeness = guards.check
    return check


def sameness_to(tensors: Sequence[torch.Tensor]) -> Likeness | None:
    """Return what says in one call whether tensors are like these, of the same sizes and strides;
    None if torch cannot. It is to be given as many."""
    if tensor_guards is None:
        return None
    guards = tensor_guards(
        *tensors,
        dynamic_dims_sizes=[list(one.shape) for one in tensors],
        dynamic_dims_strides=[list(one.stride()) for one in tensors],
    )
    check: Likeness = guards.check
    return check
