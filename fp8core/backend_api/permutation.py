"""Permutation of tokens for experts: where each token's rows go, and rows sent there and back.

A *route* is two tensors that say the same. ``index [t, k]``, int32, has the k rows to which token i
may go: ``index[i, j]`` is a row, -1 where there is none. ``sources [m]``, int32, is its inverse:
``sources[d] = i * k + j`` if ``index[i, j] = d``, -1 for a row to which no token goes. So a row
takes at most one token. A number that is no row, or no entry of the route, counts as -1: the host
does not read routes, and they must be no addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fp8core.backend_api.descriptor_text import dtype_text, text

__all__ = ["ROUTE_KINDS", "CombineBackwardDesc", "CombineDesc", "DispatchDesc", "RouteDesc"]

ROUTE_KINDS: tuple[str, ...] = ("mask", "experts", "rows")
"""What ``routing`` of a :class:`RouteDesc` holds."""


@dataclass(frozen=True, slots=True)
class RouteDesc:
    """``route(routing, rows) -> (index, sources)``: a route to ``rows`` rows.

    ``routing`` is bool or an integer tensor, ``dtype``:

    * ``"mask"``: ``[t, e]``, not 0 where token i goes to expert j; ``k`` is e;
    * ``"experts"``: ``[t, k]``, the numbers of a token's experts; a negative one stands for none;
    * ``"rows"``: ``[t, k]``, the rows themselves, each of them once; a negative one stands for
      none.

    With experts, the rows are those of expert 0, then those of expert 1; among the rows of an
    expert, in the order of the tokens, and of ``routing``'s columns. Tokens for which there is no
    row among the first ``rows`` are dropped: they get -1.
    """

    op: ClassVar[str] = "route"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    kind: str

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype), self.kind)


@dataclass(frozen=True, slots=True)
class DispatchDesc:
    """``dispatch_rows(x, index, sources, *, probs=None) -> (y, permuted_probs)``.

    ``y [m, n] = x[sources // k]`` in ``dtype``, bit for bit, from ``x [t, n]``; zeros where
    ``sources`` is -1. ``probs [t, k]`` has any floating-point dtype: then ``permuted_probs [m]`` is
    ``probs.flatten()[sources]``, 0 where there is none; else it is None. Results are contiguous.

    Attributes:
        skips_improbable: with ``probs``, a row whose probability is 0 is zeros too.
    """

    op: ClassVar[str] = "dispatch_rows"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    skips_improbable: bool = False

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype))


@dataclass(frozen=True, slots=True)
class CombineDesc:
    """``combine_rows(x, index, *, weights=None, row_values=None) -> (y, values)``.

    ``y [t, n]`` in ``dtype``: the sum over j of ``weights[i, j] * x[index[i, j]]``, from
    ``x [m, n]``; without ``weights [t, k]``, which have any floating-point dtype, of the rows
    alone. Added in float32 (float64 from float64), in the order of j, and rounded once; zeros for a
    token without rows. ``row_values [m]``: then ``values [t, k]`` is ``row_values[index]``, 0 where
    there is none; else it is None. Results are contiguous.
    """

    op: ClassVar[str] = "combine_rows"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype))


@dataclass(frozen=True, slots=True)
class CombineBackwardDesc:
    """``combine_rows_backward(grad, x, index, sources, weights) -> (grad_x, grad_weights)``.

    The gradients of :class:`CombineDesc` with weights, from ``grad [t, n]``:
    ``grad_x [m, n] = weights.flatten()[sources] * grad[sources // k]`` in ``dtype``, zeros where
    ``sources`` is -1, and ``grad_weights [t, k]``, in the dtype of the weights, the products
    ``grad[i] . x[index[i, j]]``, 0 where there is no row. Computed in float32 (float64 from
    float64), rounded once. Results are contiguous.
    """

    op: ClassVar[str] = "combine_rows_backward"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype))
