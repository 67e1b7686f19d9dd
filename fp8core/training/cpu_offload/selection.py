"""Which saved tensors are worth a copy to the host."""

from __future__ import annotations

import weakref

import torch

__all__ = ["is_offloaded", "mark_not_offload"]

MIN_ELEMENTS = 256 * 1024
"""Smaller tensors stay: their copies take longer to enqueue than they save."""

_kept: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Keep ``tensors``, and what else lies in their memory, on the device while they live."""
    for tensor in tensors:
        if tensor is not None:
            for part in tensor.tensors() if hasattr(tensor, "tensors") else (tensor,):
                _kept[part.untyped_storage().data_ptr()] = part


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Say whether a saved tensor is worth a copy: a large one that no parameter holds anyway."""
    if type(tensor) is not torch.Tensor or tensor.numel() < MIN_ELEMENTS:
        return False
    if isinstance(tensor._base, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_meta and tensor.untyped_storage().data_ptr() not in _kept
