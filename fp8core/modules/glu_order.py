"""The order of the two halves of a gated layer's weight: one after the other, or in blocks."""

from __future__ import annotations

import torch

from fp8core.errors import OperandError


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Return ``tensor [2 n, ...]``, a weight or bias, with its halves in alternating blocks.

    ``[a, b]`` becomes ``[a0, b0, a1, b1, ...]`` of ``interleave_size`` rows each, the order that
    activations with ``glu_interleave_size`` take.

    >>> interleave_glu_tensor(torch.arange(8), 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]

    Raises:
        OperandError: the rows are no pairs of blocks.
    """
    count = _blocks(tensor, interleave_size)
    blocks = tensor.reshape(2, count, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Return the tensor whose :func:`interleave_glu_tensor` is ``tensor``.

    >>> deinterleave_glu_tensor(torch.tensor([0, 1, 4, 5, 2, 3, 6, 7]), 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    count = _blocks(tensor, interleave_size)
    blocks = tensor.reshape(count, 2, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape)


def _blocks(tensor: torch.Tensor, size: int) -> int:
    """Return how many pairs of blocks of ``size`` rows ``tensor`` has."""
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not is_size or not tensor.dim() or tensor.shape[0] % (2 * size):
        raise OperandError(
            f"interleave_size={size!r} of a tensor {list(tensor.shape)}: expected an integer >= 1 "
            f"whose double divides the first dimension."
        )
    return tensor.shape[0] // (2 * size)
