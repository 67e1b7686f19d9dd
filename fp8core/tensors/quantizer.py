"""Quantizers, each of which makes the operands of one tensor: base, high precision, combinations.

Those that call a backend are in :mod:`fp8core.tensors.quantizer_binding`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import AmaxDesc, OpDesc, Operand, QuantizeDesc
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import Resolved
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
Resolve: TypeAlias = "Callable[[OpDesc], Resolved]"
ResolveOptional: TypeAlias = "Callable[[OpDesc, str], Resolved | None]"


class TensorQuantizer:
    """Makes the operands of one tensor ``x [rows, cols]``; ``choices`` says who computes them.

    A cast is the call alone; a backend's shortcuts are a subclass's.
    """

    __slots__ = ()

    choices: tuple[Choice, ...]

    @property
    def casts_chunks(self) -> bool:
        """Whether :meth:`cast_chunked` may return chunks; never in a captured graph."""
        return False

    @property
    def plan(self) -> TensorPlan | None:
        """How a stored tensor has to be quantized to be taken as the result; None where none is
        taken: for an orientation in high precision, reduced amaxes, and NaN that propagates."""
        return None

    @property
    def constants(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors besides its argument that a cast reads and writes, if it is operations of
        backends and a reduction over ranks; None if it does more."""
        return None

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
        return self._cast(x, groups, rng, rowwise=rowwise, columnwise=columnwise)

    def _cast(
        self, x: torch.Tensor, groups: Groups, rng: Any, *, rowwise: bool, columnwise: bool
    ) -> Orientations:
        raise NotImplementedError

    def cast_to(self, *, rowwise: bool, columnwise: bool) -> Cast:
        """Return the call for dense tensors without ``rng`` that makes these orientations."""
        return partial(self, rowwise=rowwise, columnwise=columnwise)

    def cast_chunked(self) -> Cast:
        """Return the call for both orientations of dense tensors without ``rng``. The rowwise
        operand is read once, and may be :class:`fp8core.backend_api.Chunks`."""
        return self.cast_to(rowwise=True, columnwise=True)

    def cast_and_sum(self, sums: ColumnSums, *, rowwise: bool, columnwise: bool) -> CastAndSum:
        """Return the call of :meth:`cast_to` that returns the column sums of the tensor as well:
        by ``sums`` where the backend does not offer both at once."""
        return _in_two_calls(self.cast_to(rowwise=rowwise, columnwise=columnwise), sums)

    def cast_chunked_and_sum(self, sums: ColumnSums) -> CastAndSum:
        """Return the call of :meth:`cast_chunked` with column sums, complete with the chunks."""
        return _in_two_calls(self.cast_chunked(), sums)

    def pair_with(self, second: TensorQuantizer) -> Pair | None:
        """Return the call for both orientations of this tensor and ``second``'s, if any."""
        return None


def _in_two_calls(cast: Cast, sums: ColumnSums) -> CastAndSum:
    def run(x: torch.Tensor) -> tuple[Orientations, torch.Tensor]:
        total = sums(x)
        return cast(x), total

    return run


class HighPrecision(TensorQuantizer):
    """No quantization: the operands are the tensor in the activation dtype, and its view."""

    __slots__ = ("_dtype", "choices")

    _turns = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.choices: tuple[Choice, ...] = ()

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return ``x`` and its transposed view."""
        if x.dtype != self._dtype:
            x = x.to(self._dtype)
        turned = x.t() if columnwise and self._turns else x
        return Orientations(
            Operand(x) if rowwise else None, Operand(turned) if columnwise else None
        )


class Unturned(HighPrecision):
    """No quantization, and no view: both operands are the tensor itself, which its GEMM turns.

    What autograd saves is then the tensor that it knows, with its history.
    """

    __slots__ = ()

    _turns = False


class MixedPrecision(TensorQuantizer):
    """A quantizer of one orientation in low precision; the second stays in high precision."""

    __slots__ = ("_columnwise", "_rowwise", "choices")

    def __init__(self, rowwise: TensorQuantizer, columnwise: TensorQuantizer) -> None:
        self._rowwise = rowwise
        self._columnwise = columnwise
        self.choices = (*rowwise.choices, *columnwise.choices)

    def _cast(
        self, x: torch.Tensor, groups: Groups, rng: Any, *, rowwise: bool, columnwise: bool
    ) -> Orientations:
        row = self._rowwise(x, groups, columnwise=False, rng=rng).rowwise if rowwise else None
        if not columnwise:
            return Orientations(row, None)
        return Orientations(row, self._columnwise(x, groups, rowwise=False, rng=rng).columnwise)


class RowwiseTwice(TensorQuantizer):
    """Low precision for both orientations: the columnwise operand is the rowwise one, which its
    reader dequantizes and transposes."""

    __slots__ = ("_rowwise", "choices")

    def __init__(self, rowwise: TensorQuantizer) -> None:
        self._rowwise = rowwise
        self.choices = rowwise.choices

    def _cast(
        self, x: torch.Tensor, groups: Groups, rng: Any, *, rowwise: bool, columnwise: bool
    ) -> Orientations:
        operand = self._rowwise(x, groups, columnwise=False, rng=rng).rowwise
        return Orientations(operand if rowwise else None, operand if columnwise else None)


class Observer(TensorQuantizer):
    """Records the amax that ``desc`` would record, then hands the tensor to another quantizer."""

    __slots__ = ("_amax", "_inner", "_recorded", "choices")

    def __init__(
        self, inner: TensorQuantizer, desc: QuantizeDesc, resolve: Resolve, recorded: torch.Tensor
    ) -> None:
        self._inner = inner
        self._amax = resolve(AmaxDesc(desc)).run
        self._recorded = recorded
        self.choices = inner.choices

    def _cast(
        self, x: torch.Tensor, groups: Groups, rng: Any, *, rowwise: bool, columnwise: bool
    ) -> Orientations:
        self._recorded.copy_(torch.maximum(self._recorded, self._amax(x, *groups)))
        return self._inner(x, groups, rowwise=rowwise, columnwise=columnwise, rng=rng)
