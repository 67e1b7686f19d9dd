"""Residual sums: a second tensor added as a link, and a block's branch as one link, whose input is
added to its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.chain.call import Call
from fp8core.chain.protocol import (
    Backward,
    Forward,
    GradientSum,
    Link,
    OnlyOnce,
    Out,
    Params,
    Program,
    Recordable,
    Saved,
    SavedList,
    TensorProgram,
    Unadded,
    backward_with,
)
from fp8core.chain.series import Series, only_once, row_error
from fp8core.chain.shape import BindContext, CallInputs, LinkShape
from fp8core.chain.unwrap import unwrap
from fp8core.errors import OperandError
from fp8core.torch_ops.repeats import called_in_repeats


@dataclass(frozen=True, slots=True)
class AddShape(LinkShape):
    """Adds a second tensor, which comes as its parameter; may leave the sum to a link that adds
    both tensors."""

    leaves_sum = True

    @property
    def num_params(self) -> int:
        """The second tensor."""
        return 1

    def example(self, x: torch.Tensor) -> CallInputs:
        """Return the second tensor, which has the shape of ``x``."""
        return CallInputs((x.new_empty(x.shape).requires_grad_(),))

    def bind(self, context: BindContext) -> AddLink:
        """Return the link, which adds unless the next one does."""
        link = None if context.after is None else context.after.link
        return AddLink(self, is_left_to_next=link is not None and link.adds_residual)


@dataclass(frozen=True, slots=True, eq=False)
class AddLink(Link):
    """``y = x + residual``, rounded once to the dtype of ``x``; left to the next link if it can."""

    shape: AddShape
    is_left_to_next: bool = False
    num_params: int = 1
    takes_activation = True

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> AddProgram:
        """Return the program, which is the same for any number of rows."""
        return AddProgram(self, needs_grad)


class AddProgram(TensorProgram[AddLink]):
    """Adds; backward is told the residual's shape."""

    __slots__ = ()

    @property
    def recordable(self) -> Recordable | None:
        """Return nothing that it refers to, unless the next link adds."""
        return None if self._link.is_left_to_next else Recordable()

    @property
    def saves_copies(self) -> bool:  # type: ignore[override]  # a default there
        """Whether the next link adds: it saves the sum that its backend returned."""
        return self._link.is_left_to_next

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Add, or hand both on.

        Raises:
            OperandError: the residual does not have the shape of the chain's input.
        """
        shape = params[0].shape
        if params[0].numel() != x.numel() or shape[-1:] != x.shape[-1:]:
            raise OperandError(
                f"residual add: the extra input is {list(shape)}; expected {list(x.shape)} with "
                f"the leading dimensions of the chain's input."
            )
        residual = unwrap(params[0], "residual add: the extra input").reshape(x.shape)
        if self._link.is_left_to_next and residual.dtype == x.dtype:
            return Unadded(x, residual), (), shape
        total: Any = called_in_repeats(_added, x, residual)
        return total if out is None else out(total), (), shape

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Both inputs get the gradient."""
        needs_input, needs_residual = self._needs_grad
        residual = grad.reshape(context) if needs_residual else None
        if not needs_input:
            return None, residual
        return grad if out is None else out(grad), residual


def _added(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return (x + residual).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ResidualLink(Link):
    """``x + branch(x)``, where the branch runs ``links``, which keep rows and columns.

    ``owner`` names the layer in messages, which would name that of one link otherwise. The
    gradient of ``x`` is the sum that torch's engine would accumulate from the two paths.
    """

    links: tuple[Link, ...]
    owner: str

    @property
    def num_params(self) -> int:  # type: ignore[override]  # a field's default there
        """The number of the parameters of the branch."""
        return sum(link.num_params for link in self.links)

    @property
    def needs_rng(self) -> bool:  # type: ignore[override]  # likewise
        """Whether a link of the branch does."""
        return any(link.needs_rng for link in self.links)

    @property
    def only_once(self) -> OnlyOnce | None:
        """The reason of the first link of the branch that has one, said of the owner."""
        first = only_once(self.links)
        return None if first is None else first._replace(owner=self.owner)

    @property
    def keeps_input(self) -> bool:  # type: ignore[override]  # likewise
        """As the first link of the branch."""
        return self.links[0].keeps_input

    def compare(self, shape: Sequence[int], needs_grad: Sequence[bool]) -> None:
        """As each link of the branch."""
        for link in self.links:
            link.compare(shape, needs_grad)

    def in_torch(self, bind: Callable[[Any], Any]) -> ResidualLink:
        """Return the same branch by torch's operators."""
        return ResidualLink(tuple([link.in_torch(bind) for link in self.links]), self.owner)

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> ResidualProgram:
        """Return the program around that of the branch.

        Raises:
            OperandError: the branch returns another number of rows than it is given.
        """
        quantizes = self.only_once is not None
        branch = Series(self.links, rows, needs_grad, call, quantizes=quantizes)
        num_rows = branch.num_rows(rows)
        if num_rows != rows:
            last = len(self.links) - 1
            raise row_error(self.links, last, "forward", rows=rows, due=rows, returned=num_rows)
        return ResidualProgram(self, needs_grad, branch)


class ResidualProgram(TensorProgram[ResidualLink]):
    """Runs the branch, and adds; saves what the branch saves."""

    __slots__ = ("_branch", "frees_early", "saves_copies")

    def __init__(self, link: ResidualLink, needs_grad: Sequence[bool], branch: Program) -> None:
        super().__init__(link, needs_grad)
        self._branch = branch
        self.frees_early = branch.frees_early
        self.saves_copies = branch.saves_copies

    @property
    def recordable(self) -> Recordable | None:
        """As the branch; the sums are functions of torch."""
        return self._branch.recordable

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Return the sum of ``x`` and its branch."""
        y, saved, context = self._branch.forward(x, params, call)
        total = called_in_repeats(torch.add, x, y)
        return total if out is None else out(total), saved, context

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Return the sum of the gradients of both paths, and those of the parameters."""
        branch, first = self._branch, self._link.links[0]
        if self._needs_grad[0]:
            both = GradientSum(grad)
            total, *grads = backward_with(both, branch, grad, saved, context, call, first=first)
        else:
            total, *grads = branch.backward(grad, saved, context, call)
        return (total if out is None or total is None else out(total), *grads)
