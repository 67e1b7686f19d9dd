"""Weight gradients that backward leaves to a later call: ``delay_wgrad_compute``.

A pipeline schedule sends the gradient of a stage's input to the stage before, and computes the
gradients of its weights while it would wait. Backward then runs dgrad, and puts what wgrad needs
into the layer's queue; ``backward_dw()`` computes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.errors import UnsupportedError
from fp8core.torch_ops.private import FSDP_FLATTENED


class PendingWgrad(NamedTuple):
    """The gradients of some weights that are still to be computed, by ``run(*operands)``.

    ``run`` returns one gradient, or a sequence of them if ``is_grouped``; None for one that it has
    added to ``main_grad``. ``needed`` says which of ``weights`` are trained.
    """

    run: Callable[..., Any]
    operands: tuple[Any, ...]
    weights: Sequence[torch.Tensor]
    needed: Sequence[bool]
    is_grouped: bool

    def compute(self) -> None:
        """Compute the gradients, and hand them to autograd, which adds them to ``grad``.

        A weight that forward computed from others hands them on, and hooks run as in backward.
        """
        result = self.run(*self.operands)
        grads = result if self.is_grouped else [result]
        for weight, need, grad in zip(self.weights, self.needed, grads, strict=True):
            if not need or grad is None or not weight.requires_grad:
                continue
            rows, columns = weight.shape  # of a product that was padded
            torch.autograd.backward((weight,), (grad[:rows, :columns].to(weight.dtype),))


class _Pass:
    """The entries of one backward pass of one forward call in the queue, by link."""

    __slots__ = ("is_over", "pending")

    def __init__(self) -> None:
        self.pending: dict[int, PendingWgrad] = {}
        self.is_over = False


class WgradQueue:
    """The weight gradients of a layer that are to be computed, those of the first pass first.

    A copy of the layer starts with an empty one.
    """

    __slots__ = ("_passes",)

    def __init__(self) -> None:
        self._passes: deque[_Pass] = deque()

    def __reduce__(self) -> tuple[type[WgradQueue], tuple[()]]:
        return WgradQueue, ()

    def __len__(self) -> int:
        return len(self._passes)

    def add(self) -> _Pass:
        """Begin another pass, and return it."""
        latest = _Pass()
        self._passes.append(latest)
        return latest

    def first(self) -> list[PendingWgrad]:
        """Return what the first pass left to be computed."""
        return list(self._passes[0].pending.values())

    def compute_first(self) -> None:
        """Compute the gradients of the first pass; of one that fails, those not computed stay."""
        first = self._passes[0]
        first.is_over = True
        while first.pending:
            index = next(iter(first.pending))
            first.pending[index].compute()
            del first.pending[index]
        self._passes.popleft()


class DelayedCall:
    """A forward call of a layer whose weight gradients go into ``queue``.

    The call's graph has :meth:`stand_ins` of the weights, so that no hook of a weight runs in
    backward, and a weight that is computed from others keeps its graph until its gradient is there.
    """

    __slots__ = ("_latest", "_queue", "_sources", "_stand_ins")

    def __init__(self, queue: WgradQueue) -> None:
        self._queue = queue
        self._latest: _Pass | None = None
        self._sources: dict[int, torch.Tensor] = {}
        self._stand_ins: list[torch.Tensor] = []

    def stand_in(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a tensor without history that stands for ``weight``, trained if that is.

        Raises:
            UnsupportedError: it is computed from a parameter that FSDP1 has gathered.
        """
        if weight.grad_fn is not None and _is_of_fsdp1(weight.grad_fn):
            raise UnsupportedError(
                f"delay_wgrad_compute=True under FullyShardedDataParallel: it reduces gradients in "
                f"backward, and that of a weight {list(weight.shape)} would come later and reach "
                f"nobody. Leave out delay_wgrad_compute."
            )
        stand_in = weight.detach().requires_grad_(weight.requires_grad)
        self._sources[id(stand_in)] = weight
        self._stand_ins.append(stand_in)  # so that no other tensor gets its id
        return stand_in

    def source(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight that ``weight`` stands for.

        Raises:
            UnsupportedError: the chain computes with another tensor.
        """
        source = self._sources.get(id(weight))
        if source is None:
            raise UnsupportedError(
                f"delay_wgrad_compute=True with a weight {list(weight.shape)} that the layer "
                f"unwraps, as a DTensor, is not offered. Leave it out."
            )
        return source

    def put(self, index: int, pending: PendingWgrad) -> None:
        """Leave the gradients of the linear ``index`` to :meth:`WgradQueue.compute_first`."""
        latest = self._latest
        if latest is None or latest.is_over or index in latest.pending:
            latest = self._latest = self._queue.add()  # the graph may be used again
        latest.pending[index] = pending


def _is_of_fsdp1(node: Any) -> bool:
    """Say whether what ``node`` computes comes from a parameter that FSDP1 has made of others."""
    seen, left = {node}, [node]
    while left:
        node = left.pop()
        if getattr(getattr(node, "variable", None), FSDP_FLATTENED, False):
            return True
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        left += new
    return False
