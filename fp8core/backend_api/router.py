"""The router of a mixture of experts: scores from logits, and the experts with the highest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fp8core.backend_api.descriptor_text import dtype_text, text

__all__ = ["SCORE_FUNCTIONS", "RouterBackwardDesc", "RouterDesc"]

SCORE_FUNCTIONS: tuple[str, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
"""Scores of logits x: ``softmax(x)``, ``sigmoid(x)``, ``sqrt(log(1 + exp(x)))``."""


@dataclass(frozen=True, slots=True)
class RouterDesc:
    """``router(logits, *, expert_bias=None) -> (probs, routing_map, scores)``.

    ``logits [t, e]`` in ``dtype``, computed in float32. A token goes to the ``topk`` experts that
    rank highest; of experts that rank alike the one with the lower number comes first, and NaN
    comes before every number. ``routing_map [t, e]`` is bool.

    Without ``of_all``, ``probs [t, e]`` in ``dtype`` are 0 for the other experts:

    * ``"softmax"``: experts rank by their logits, and ``probs`` is the softmax over the chosen
      ones; with ``pre_softmax`` it is the softmax over all experts;
    * ``"sigmoid"``, ``"sqrtsoftplus"``: experts rank by their scores, plus ``expert_bias [e]``
      (any floating-point dtype) if it is given. ``probs`` are the scores without it, divided by
      their sum over the chosen experts plus 1e-20 where ``topk`` is above 1.

    Then they are multiplied by ``scaling_factor``. With ``num_groups``, the experts are that many
    groups of neighbours; only experts of the ``group_topk`` groups rank whose ``topk / group_topk``
    highest ranks have the largest sums.

    With ``of_all``, for an auxiliary loss, ``probs [t, e]`` are float32 and those of every expert:
    softmax over all, or the scores divided by their sum over all, plus 1e-20, for any ``topk``.

    ``scores [t, e]``, float32, is what :class:`RouterBackwardDesc` needs besides: the scores before
    the division, of a softmax over the chosen experts 0 for the others.
    """

    op: ClassVar[str] = "router"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    topk: int
    score_function: str
    pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 0
    scaling_factor: float = 1.0
    of_all: bool = False

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype), f"top {self.topk}", self.score_function)


@dataclass(frozen=True, slots=True)
class RouterBackwardDesc:
    """``router_backward(grad_probs, routing_map, scores) -> grad_logits``.

    The gradient of :class:`RouterDesc` with the same fields, ``grad_logits [t, e]`` in ``dtype``,
    from a gradient in the dtype of ``probs`` and what forward returned. Computed in float32,
    rounded once. The choice of experts has no gradient.
    """

    op: ClassVar[str] = "router_backward"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    topk: int
    score_function: str
    pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 0
    scaling_factor: float = 1.0
    of_all: bool = False

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype), f"top {self.topk}", self.score_function)
