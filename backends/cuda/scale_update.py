"""Delayed scaling's update: one launch for up to 64 modules, prepared once for the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import ScaleUpdateDesc
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.private import count_writes
from fp8core_backends.cuda.stream import index_of, raw_stream

_address = torch.Tensor.data_ptr


class ScaleUpdate:
    """The callable of a ScaleUpdateDesc; :meth:`prepare` is that of one with ``prepared``."""

    __slots__ = ("_index", "_is_max", "_native", "kernel")

    def __init__(self, desc: ScaleUpdateDesc, device: torch.device, native: Any) -> None:
        self._index = index_of(device)
        self._is_max = desc.algorithm == "max"
        self._native = native
        self.kernel = "fp8core::update"

    def __call__(
        self,
        histories: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        nonfinite: Sequence[torch.Tensor] = (),
    ) -> None:
        """Update once; see the backend API."""
        self.prepare(histories, scales, targets, nonfinite)()

    def prepare(
        self,
        histories: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        nonfinite: Sequence[torch.Tensor] = (),
    ) -> Callable[[], None]:
        """Return the update of these tensors, to be called in every step."""
        tensors = (*histories, *scales, *targets, *nonfinite)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return lambda: self._update_copies(histories, scales, targets, nonfinite)
        index = self._index
        addresses, run = self._arrange(histories, scales, targets, nonfinite)

        def update() -> None:
            nonlocal addresses, run
            if [*map(_address, tensors)] != addresses:  # one moved, by .data or set_()
                if not all(tensor.is_contiguous() for tensor in tensors):
                    self._update_copies(histories, scales, targets, nonfinite)
                    return
                addresses, run = self._arrange(histories, scales, targets, nonfinite)
            run(raw_stream(index))
            # torch does not see the kernel's writes; a weight kept under an old scale must be
            # noticed.
            count_writes(scales)

        return update

    def _arrange(
        self,
        histories: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        nonfinite: Sequence[torch.Tensor],
    ) -> tuple[list[int], Callable[[int], None]]:
        """Return the addresses of all tensors, and the native update bound to them."""
        counts = [count.data_ptr() for count in nonfinite] or [0] * len(histories)
        rows = [
            (history.data_ptr(), scale.data_ptr(), target.data_ptr(), count, *history.shape)
            for history, scale, target, count in zip(
                histories, scales, targets, counts, strict=True
            )
        ]
        addresses = [tensor.data_ptr() for tensor in (*histories, *scales, *targets, *nonfinite)]
        return addresses, self._native.ScaleUpdate(rows, self._is_max, self._index)

    def _update_copies(
        self,
        histories: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        nonfinite: Sequence[torch.Tensor],
    ) -> None:
        """Update states that are not contiguous, by way of copies that are."""
        groups = (histories, scales, targets, nonfinite)
        states = [[tensor.contiguous() for tensor in group] for group in groups]
        self(*states)
        for group, updated in zip(groups, states, strict=True):
            for tensor, new in zip(group, updated, strict=True):
                if tensor is not new:
                    tensor.copy_(new)


def _problem(desc: ScaleUpdateDesc) -> str | None:
    algorithms = ("max", "most_recent")
    return None if desc.algorithm in algorithms else f"no algorithm {desc.algorithm!r}"


@runs(ScaleUpdateDesc, refuses=_problem)
def bind_update(desc: ScaleUpdateDesc, device: torch.device, native: Any) -> Callable[..., Any]:
    """Return the callable of ``desc``."""
    update = ScaleUpdate(desc, device, native)
    return update.prepare if desc.prepared else update
