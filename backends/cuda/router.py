"""The router of a mixture of experts: a warp for each token."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import (
    SCORE_FUNCTIONS,
    OperandError,
    RouterBackwardDesc,
    RouterDesc,
    UnsupportedError,
)
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import first_problem, runs
from fp8core_backends.cuda.stream import index_of, raw_stream

_MOST_GROUPS = 32


def _problem(desc: RouterDesc | RouterBackwardDesc) -> str | None:
    """Say why there is no kernel for ``desc``, or None."""
    is_softmax = desc.score_function == "softmax"
    return first_problem(
        (desc.dtype not in DTYPES, f"no router of {desc.dtype}"),
        (desc.score_function not in SCORE_FUNCTIONS, f"no scores {desc.score_function!r}"),
        (desc.topk < 1, f"top {desc.topk} of the experts"),
        (desc.pre_softmax and not is_softmax, f"no softmax before {desc.score_function}"),
        (bool(desc.num_groups) != bool(desc.group_topk), "num_groups or group_topk alone"),
        (not 0 <= desc.num_groups <= _MOST_GROUPS, f"{desc.num_groups} groups of experts"),
        (desc.group_topk > desc.num_groups, "more groups are chosen than there are"),
        (bool(desc.group_topk) and desc.topk % (desc.group_topk or 1) != 0, "unequal groups"),
        (desc.of_all and bool(desc.num_groups), "no groups for the probabilities of all"),
    )


class _Router:
    """Base of forward and backward: the native router, and memory for results."""

    __slots__ = ("_desc", "_empty", "_index", "_native", "_native_router", "kernel")

    def __init__(
        self, desc: RouterDesc | RouterBackwardDesc, device: torch.device, native: Any
    ) -> None:
        self._desc = desc
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._native = native
        self._native_router = native.Router(
            native.InputType.__members__[DTYPES[desc.dtype]],
            desc.topk,
            native.ScoreFunction.__members__[desc.score_function],
            desc.pre_softmax,
            desc.num_groups,
            desc.group_topk,
            desc.scaling_factor,
            desc.of_all,
            self._index,
        )

    def _check_experts(self, experts: int) -> None:
        if experts > self._native.MOST_EXPERTS:
            raise UnsupportedError(
                f"a router of {experts} experts: the kernel takes {self._native.MOST_EXPERTS}. "
                f"Choose fp8core.use_backend(router='reference', router_backward='reference')."
            )

    def _result(self, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return self._empty(size, (max(size[1], 1), 1), dtype)


@runs(RouterDesc, refuses=_problem)
class Router(_Router):
    """The callable of a RouterDesc: one launch."""

    __slots__ = ()

    def __init__(self, desc: RouterDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        self.kernel = "fp8core::route_tokens"

    def __call__(
        self, logits: torch.Tensor, *, expert_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``probs``, ``routing_map`` and ``scores``; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, shape or device than the kernel reads.
            UnsupportedError: more experts than the kernel takes.
        """
        if logits.dtype != self._desc.dtype or logits.dim() != 2:
            raise OperandError(
                f"router of {logits.dtype} {list(logits.shape)}; bound for {self._desc.dtype}, two "
                f"dimensions."
            )
        tokens, experts = logits.shape
        size = (tokens, experts)
        self._check_experts(experts)
        kind = self._native.InputType.float32
        if expert_bias is not None:
            is_right = expert_bias.is_floating_point() and expert_bias.shape == (experts,)
            if not is_right or expert_bias.device != logits.device:
                raise OperandError(
                    f"router: expert_bias {expert_bias.dtype} {list(expert_bias.shape)} on "
                    f"{expert_bias.device}; expected floats [{experts}] on {logits.device}."
                )
            if expert_bias.dtype not in DTYPES:
                expert_bias = expert_bias.float()
            expert_bias = expert_bias.contiguous()  # held until the kernel is enqueued
            kind = self._native.InputType.__members__[DTYPES[expert_bias.dtype]]
        logits, stride = adjacent_columns(logits)
        probs = self._result(size, torch.float32 if self._desc.of_all else self._desc.dtype)
        chosen, scores = self._result(size, torch.bool), self._result(size, torch.float32)
        bias = 0 if expert_bias is None else expert_bias.data_ptr()
        results = (probs.data_ptr(), chosen.data_ptr(), scores.data_ptr())
        arguments = (logits.data_ptr(), tokens, experts, stride, bias, kind, *results)
        self._native_router(arguments, raw_stream(self._index))
        return probs, chosen, scores


@runs(RouterBackwardDesc, refuses=_problem)
class RouterBackward(_Router):
    """The callable of a RouterBackwardDesc: one launch."""

    __slots__ = ()

    def __init__(self, desc: RouterBackwardDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        self.kernel = "fp8core::route_tokens_backward"

    def __call__(
        self, grad_probs: torch.Tensor, routing_map: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """Return ``grad_logits``; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, shape or device than the kernel reads.
            UnsupportedError: more experts than the kernel takes.
        """
        due = torch.float32 if self._desc.of_all else self._desc.dtype
        expected = ((grad_probs, due), (routing_map, torch.bool), (scores, torch.float32))
        for tensor, dtype in expected:
            if (
                tensor.dtype != dtype
                or tensor.shape != scores.shape
                or tensor.device != scores.device
            ):
                raise OperandError(
                    f"router_backward: {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
                    f"expected {dtype} {list(scores.shape)} on {scores.device}."
                )
        tokens, experts = scores.shape
        size = (tokens, experts)
        self._check_experts(experts)
        grad_probs, stride = adjacent_columns(grad_probs)
        routing_map, scores = routing_map.contiguous(), scores.contiguous()
        grad = self._result(size, self._desc.dtype)
        saved = (routing_map.data_ptr(), scores.data_ptr(), grad.data_ptr())
        arguments = (grad_probs.data_ptr(), tokens, experts, stride, *saved)
        self._native_router.backward(arguments, raw_stream(self._index))
        return grad
