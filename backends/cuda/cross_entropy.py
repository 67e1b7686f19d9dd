"""Cross entropy of logits: each row is read once in forward, and once in backward."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import CrossEntropyBackwardDesc, CrossEntropyDesc, OperandError
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.stream import index_of, raw_stream


def _problem(desc: CrossEntropyDesc | CrossEntropyBackwardDesc) -> str | None:
    """Say why there is no kernel for ``desc``, or None."""
    if not 0 <= desc.label_smoothing <= 1:
        return f"no label smoothing of {desc.label_smoothing}"
    return None if desc.dtype in DTYPES else f"no cross entropy of {desc.dtype}"


class _CrossEntropy:
    """Base of forward and backward: the native loss, and the checks of logits and targets."""

    __slots__ = ("_desc", "_empty", "_index", "_native_loss", "kernel")

    def __init__(
        self, desc: CrossEntropyDesc | CrossEntropyBackwardDesc, device: torch.device, native: Any
    ) -> None:
        self._desc = desc
        self._index = index_of(device)
        self._empty = allocator(self._index)
        input_type = native.InputType.__members__[DTYPES[desc.dtype]]
        self._native_loss = native.CrossEntropy(
            input_type, desc.label_smoothing, desc.ignore_index, self._index
        )

    def _check(self, x: torch.Tensor, target: torch.Tensor) -> None:
        if x.dtype != self._desc.dtype or x.dim() != 2:
            raise OperandError(
                f"cross_entropy of {x.dtype} {list(x.shape)}; bound for {self._desc.dtype}, two "
                f"dimensions."
            )
        if target.dtype != torch.int64 or target.shape != x.shape[:1] or target.device != x.device:
            raise OperandError(
                f"cross_entropy: target {target.dtype} {list(target.shape)} on {target.device}; "
                f"expected torch.int64 [{x.shape[0]}] on {x.device}."
            )


@runs(CrossEntropyDesc, refuses=_problem)
class CrossEntropy(_CrossEntropy):
    """The callable of a CrossEntropyDesc: one launch."""

    __slots__ = ()

    def __init__(self, desc: CrossEntropyDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        self.kernel = "fp8core::log_sums"

    def __call__(
        self, x: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``loss``, ``largest`` and ``log_sum``; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, shape or device than the kernel reads.
        """
        self._check(x, target)
        rows, cols = x.shape
        x, stride = adjacent_columns(x)
        loss = self._empty((rows,), (1,), torch.float32)
        largest = self._empty((rows,), (1,), torch.float32)
        log_sum = self._empty((rows,), (1,), torch.float32)
        targets = (target.data_ptr(), target.stride(0) if rows else 1)
        results = (loss.data_ptr(), largest.data_ptr(), log_sum.data_ptr())
        self._native_loss(
            (x.data_ptr(), rows, cols, stride, *targets, *results), raw_stream(self._index)
        )
        return loss, largest, log_sum


@runs(CrossEntropyBackwardDesc, refuses=_problem)
class CrossEntropyBackward(_CrossEntropy):
    """The callable of a CrossEntropyBackwardDesc: one launch."""

    __slots__ = ()

    def __init__(self, desc: CrossEntropyBackwardDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        self.kernel = "fp8core::gradients"

    def __call__(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        target: torch.Tensor,
        largest: torch.Tensor,
        log_sum: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``grad_x``; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, shape or device than the kernel reads.
        """
        self._check(x, target)
        for tensor in (grad, largest, log_sum):
            if (
                tensor.dtype != torch.float32
                or tensor.shape != x.shape[:1]
                or tensor.device != x.device
            ):
                raise OperandError(
                    f"cross_entropy_backward: {tensor.dtype} {list(tensor.shape)} on "
                    f"{tensor.device}; expected torch.float32 [{x.shape[0]}] on {x.device}."
                )
        rows, cols = x.shape
        x, stride = adjacent_columns(x)
        # Held until the kernel is enqueued.
        largest, log_sum = largest.contiguous(), log_sum.contiguous()
        grad_x = self._empty((rows, cols), (max(cols, 1), 1), self._desc.dtype)
        targets = (target.data_ptr(), target.stride(0) if rows else 1)
        sums = (largest.data_ptr(), log_sum.data_ptr())
        of_loss = (grad.data_ptr(), grad.stride(0) if rows else 1)
        self._native_loss.backward(
            (x.data_ptr(), rows, cols, stride, *targets, *sums, *of_loss, grad_x.data_ptr()),
            raw_stream(self._index),
        )
        return grad_x
