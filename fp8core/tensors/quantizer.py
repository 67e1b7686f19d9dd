"""The protocol of quantizers, each of which makes the operands of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from fp8core.dispatch.select import Choice
from fp8core.recipe.plan import TensorPlan

Groups: TypeAlias = "tuple[torch.Tensor, ...]"
"""``()`` for a dense operand, ``(group_offsets,)`` for a grouped one."""


class Orientations(NamedTuple):
    """A tensor's operands, None for the orientation that was not asked for."""

    rowwise: Any
    columnwise: Any


class Slot(NamedTuple):
    """A tensor's place in a delayed state: ``scale`` and ``amax``, one entry, or one a group.

    ``amax`` is None where nothing is to be recorded.
    """

    scale: torch.Tensor
    amax: torch.Tensor | None


Cast: TypeAlias = "Callable[[torch.Tensor], Orientations]"
CastAndSum: TypeAlias = "Callable[[torch.Tensor], tuple[Orientations, torch.Tensor]]"
Pair: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], tuple[Orientations, Orientations]]"
ColumnSums: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


class TensorQuantizer(Protocol):
    """Makes the operands of one tensor ``x [rows, cols]``; ``choices`` says who computes them."""

    choices: tuple[Choice, ...]

    @property
    def casts_chunks(self) -> bool:
        """Whether :meth:`cast_chunked` may return chunks; never in a captured graph."""

    @property
    def plan(self) -> TensorPlan | None:
        """How a stored tensor has to be quantized to be taken as the result; None where none is
        taken: for an orientation in high precision, reduced amaxes, and NaN that propagates."""

    @property
    def constants(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors besides its argument that a cast reads and writes, if it is operations of
        backends and a reduction over ranks; None if it does more."""

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return the orientations asked for; ``rng`` as in QuantizeDesc."""

    def cast_to(self, *, rowwise: bool, columnwise: bool) -> Cast:
        """Return the call for dense tensors without ``rng`` that makes these orientations."""

    def cast_chunked(self) -> Cast:
        """Return the call for both orientations of dense tensors without ``rng``. The rowwise
        operand is read once, and may be :class:`fp8core.backend_api.Chunks`."""

    def cast_and_sum(self, sums: ColumnSums, *, rowwise: bool, columnwise: bool) -> CastAndSum:
        """Return the call of :meth:`cast_to` that returns the column sums of the tensor as well:
        by ``sums`` where the backend does not offer both at once."""

    def cast_chunked_and_sum(self, sums: ColumnSums) -> CastAndSum:
        """Return the call of :meth:`cast_chunked` with column sums, complete with the chunks."""

    def pair_with(self, second: TensorQuantizer) -> Pair | None:
        """Return the call for both orientations of this tensor and ``second``'s, if any."""


class BaseQuantizer:
    """Base of the quantizers: a backend's shortcuts, which a quantizer without one does without."""

    __slots__ = ()

    @property
    def casts_chunks(self) -> bool:
        """False: the cast makes no chunks."""
        return False

    @property
    def plan(self) -> TensorPlan | None:
        """None: no stored tensor can be the result."""
        return None

    @property
    def constants(self) -> tuple[torch.Tensor, ...] | None:
        """None: the cast is more than operations of backends."""
        return None

    def cast_to(self: TensorQuantizer, *, rowwise: bool, columnwise: bool) -> Cast:
        """Return the call for dense tensors without ``rng`` that makes these orientations."""
        return partial(self, rowwise=rowwise, columnwise=columnwise)

    def cast_chunked(self: TensorQuantizer) -> Cast:
        """Return the call for both orientations."""
        return self.cast_to(rowwise=True, columnwise=True)

    def cast_and_sum(
        self: TensorQuantizer, sums: ColumnSums, *, rowwise: bool, columnwise: bool
    ) -> CastAndSum:
        """Return two calls in one."""
        return _in_two_calls(self.cast_to(rowwise=rowwise, columnwise=columnwise), sums)

    def cast_chunked_and_sum(self: TensorQuantizer, sums: ColumnSums) -> CastAndSum:
        """Return two calls in one."""
        return _in_two_calls(self.cast_chunked(), sums)

    def pair_with(self, second: TensorQuantizer) -> Pair | None:
        """There is none."""
        return None


def _in_two_calls(cast: Cast, sums: ColumnSums) -> CastAndSum:
    def run(x: torch.Tensor) -> tuple[Orientations, torch.Tensor]:
        total = sums(x)
        return cast(x), total

    return run
