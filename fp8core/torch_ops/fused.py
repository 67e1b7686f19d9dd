"""Dropout as an operator of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fp8core.torch_ops.definition import define
from fp8core.torch_ops.private import (
    is_legacy_batched,
    is_transform_active,
    legacy_vmap,
    without_interpreters,
    without_keys,
)
from fp8core.torch_ops.shapes import is_captured

__all__ = ["drop"]


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    """Run the body outside torch's transforms, so that all gradients of a batch get one mask."""
    # Not by its count of nestings: that is the thread's, and GPUs have a thread for backward.
    with without_keys(legacy_vmap), without_interpreters():
        yield


def _dropped(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    if x.is_meta:  # meta has no generator, and no values
        return x * 1
    seed, offset = (int(value) for value in rng)
    generator = torch.Generator(device=x.device)
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + offset + index) & (2**63 - 1))
    is_batched = is_legacy_batched(x)
    is_plain = not (is_batched or is_transform_active())
    with contextlib.nullcontext() if is_plain else _outside_transforms():
        noise = torch.rand(x.shape, generator=generator, device=x.device)
    kept_rate = 1 - p or 1  # nothing is kept where it is 0
    return x * ((noise >= p).to(x.dtype) / kept_rate)


@define(
    "(Tensor x, Tensor rng, int index, float p) -> Tensor",
    lambda x, rng, index, p: x.new_empty(x.shape),
)
def _drop(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    return _dropped(x, rng, index, p).contiguous()


def drop(x: torch.Tensor, rng: torch.Tensor, index: int, p: float) -> torch.Tensor:
    """Zero elements of ``x`` with probability ``p`` and scale the rest by ``1 / (1 - p)``.

    ``rng`` int64 ``[2]`` is a seed and an offset; ``index`` tells apart the uses of one seed.
    """
    if is_captured(x):
        result: torch.Tensor = _drop(x, rng, index, p)
        return result
    return _dropped(x, rng, index, p)
