"""Comparisons that say where and by how much two results differ."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.torch_ops.private import pytree

F64 = torch.float64
ROUND = 2.0**-24  # largest relative error of one float32 rounding
FUNCTION = 2.0**-20  # error of a float32 exponential or tanh, as a share of its argument


class Broken(AssertionError):
    """A law does not hold; ``worst`` is the error as a share of the allowed error, if any."""

    def __init__(self, message: str, worst: float | None = None) -> None:
        super().__init__(message)
        self.worst = worst


class Unjudged(Exception):
    """The judge does not know the operation, so that no expected result exists."""


def require(condition: bool, message: str) -> None:
    """Raise :class:`Broken` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise Broken(message)


def same_bits(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Require equal shapes, dtypes and values; -0 differs from 0, any NaN equals any NaN."""
    ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
    same_form(name, ours, theirs)
    differs = ours != theirs
    if ours.is_floating_point():
        differs = (differs & ~(ours.isnan() & theirs.isnan())) | (
            ours.signbit() != theirs.signbit()
        )
        differs &= ~(ours.isnan() & theirs.isnan())
    if bool(differs.any()):
        raise Broken(f"{name}: {_first(differs, ours, theirs)}")


def same_tensors(title: str, ours: Any, theirs: Any) -> None:
    """Require tensors of equal bits in the same places of two trees, as results and written
    arguments are."""
    mine, yours = pytree.tree_leaves(ours), pytree.tree_flatten_with_path(theirs)[0]
    present, due = (
        [isinstance(leaf, torch.Tensor) for leaf in leaves]
        for leaves in (mine, [leaf for _, leaf in yours])
    )
    require(present == due, f"{title}: a tensor is missing, or is there unasked")
    for result, (path, expected) in zip(mine, yours, strict=True):
        if isinstance(expected, torch.Tensor):
            same_bits(f"{title}{pytree.keystr(path)}", result, expected)


def same_form(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Require equal shapes and dtypes."""
    require(
        (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype),
        f"{name} is {ours.dtype} {list(ours.shape)}, expected {theirs.dtype} {list(theirs.shape)}",
    )


def within(name: str, ours: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """Require ``|ours - expected| <= bound`` everywhere, and NaN where NaN is expected.

    ``expected`` and ``bound`` are float64 on the CPU. Returns the largest error as a share of the
    bound; 0 for empty tensors.
    """
    got = ours.detach().cpu().double()
    require(
        got.shape == expected.shape, f"{name} is {list(got.shape)}, expected {list(expected.shape)}"
    )
    if got.numel() == 0:
        return 0.0
    exact = (got == expected) | (got.isnan() & expected.isnan())
    share = ((got - expected).abs() / bound.clamp(min=torch.finfo(torch.float64).tiny)).where(
        ~exact, 0.0
    )
    share = share.nan_to_num(nan=torch.inf)
    worst = float(share.max())
    if worst > 1:
        differs = share > 1
        text = f"{name}: {_first(differs, got, expected)}; worst error is {worst:.3g} of the bound"
        raise Broken(text, worst)
    return worst


def column_sums_within(name: str, ours: torch.Tensor, x: torch.Tensor) -> float:
    """Require the sums of the columns of ``x [rows, cols]``, on the CPU, added in float32."""
    wide = x.double()
    bound = (len(x) + 4) * ROUND * wide.abs().sum(0).nan_to_num(0.0, 0.0)
    return within(name, ours, wide.sum(0), bound)


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the spacing of ``dtype`` at ``x`` (float64); below the smallest normal number, the
    spacing there."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp(min=limits.tiny)).exponent - 1
    return limits.eps * 2.0 ** exponent.double()


def signature(result: Any) -> Any:
    """Return shape and dtype of each leaf of a result, None for a leaf that is no tensor."""

    def of(leaf: Any) -> Any:
        return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else None

    leaves = pytree.tree_leaves(result, is_leaf=lambda leaf: leaf is None)
    return [of(leaf) for leaf in leaves]


def _first(differs: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> str:
    at = differs.nonzero()[0].tolist()
    where, count = tuple(at), int(differs.sum())
    return (
        f"{count} of {differs.numel()} entries differ, the first at {at}: "
        f"{ours[where].item()!r}, expected {theirs[where].item()!r}"
    )
