"""Operations that move rows between the ranks of a process group."""

from __future__ import annotations

from typing import ClassVar

from fp8core.chain.moving import AllReduceShape, GatherShape, ScatterShape
from fp8core.chain.shape import LinkShape
from fp8core.collectives import of_group
from fp8core.errors import OperandError
from fp8core.modules.operation import Operation
from fp8core.modules.parallel import is_group

__all__ = ["AllGather", "AllReduce", "ReduceScatter"]


class _Collective(Operation):
    """Base: an operation over the ranks of ``process_group``, the default group if None."""

    _shape: ClassVar[type[GatherShape | ScatterShape | AllReduceShape]]

    def __init__(self, process_group: object | None = None) -> None:
        super().__init__(None)
        if process_group is not None and not is_group(process_group):
            raise OperandError(
                f"ops.{type(self).__name__}(process_group={process_group!r}): expected a "
                f"torch.distributed process group, or None for the default one."
            )
        communicator = of_group(process_group)  # type: ignore[arg-type]  # checked above
        self._group = communicator.group_name
        self.process_group_size = communicator.size

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the collective; nothing for a group of one rank."""
        return (self._shape(self._group),) if self.process_group_size > 1 else ()

    def _describe(self) -> list[str]:
        return [f"process_group_size={self.process_group_size}"]


class AllGather(_Collective):
    """Concatenates the rows of all ranks along the first dimension.

    A linear that follows gets codes and scales, which the ranks cast from their rows by its recipe.
    Backward sums the gradient over the ranks, each of which keeps its rows.
    """

    _shape = GatherShape


class ReduceScatter(_Collective):
    """Sums over the ranks, each of which keeps its part of the first dimension.

    Backward concatenates the gradients of all ranks: for a linear before it, codes and scales.
    """

    _shape = ScatterShape


class AllReduce(_Collective):
    """Sums over the ranks.

    All of them have to use the result alike: the gradient, equal on all ranks, is handed on as it
    is. ``reduce_in_backward`` is accepted for compatibility, and changes nothing.
    """

    _shape = AllReduceShape

    def __init__(
        self, process_group: object | None = None, reduce_in_backward: bool = True
    ) -> None:
        super().__init__(process_group)
