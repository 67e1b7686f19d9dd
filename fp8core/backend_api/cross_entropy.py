"""The cross entropy of logits and their gradient, without a matrix of probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fp8core.backend_api.descriptor_text import dtype_text, text

__all__ = ["CrossEntropyBackwardDesc", "CrossEntropyDesc"]


@dataclass(frozen=True, slots=True)
class CrossEntropyDesc:
    """``cross_entropy(x, target) -> (loss, largest, log_sum)`` of logits ``x [t, v]`` in ``dtype``.

    ``target [t]`` is int64. The results are float32 ``[t]`` (float64 from float64), computed in
    that precision, and with ``s = label_smoothing``::

        largest = max(x)
        log_sum = log(sum(exp(x - largest)))
        loss = (1 - s) * (largest - x[target]) + s * mean(largest - x) + log_sum

    One number would not do for ``largest`` and ``log_sum``: their sum is rounded to the precision
    of the larger one, by which every probability would be off.

    ``loss`` is 0 where the target is ``ignore_index``, and inf where it is another number outside
    of 0 to v - 1: the host does not read targets, and they must be no addresses.
    """

    op: ClassVar[str] = "cross_entropy"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    label_smoothing: float = 0.0
    ignore_index: int = -100

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype))


@dataclass(frozen=True, slots=True)
class CrossEntropyBackwardDesc:
    """``cross_entropy_backward(grad, x, target, largest, log_sum) -> grad_x [t, v]`` in ``dtype``.

    From ``grad [t]``, the gradient of ``loss`` in its dtype and of any stride, with
    ``s = label_smoothing``::

        grad_x = grad * (exp(x - largest - log_sum) - (1 - s) * one_hot(target) - s / v)

    Zeros where the target is ``ignore_index``; the one_hot of another number outside of 0 to v - 1
    is zeros. Computed in float32 (float64 from float64), rounded once.
    """

    op: ClassVar[str] = "cross_entropy_backward"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    label_smoothing: float = 0.0
    ignore_index: int = -100

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype))
