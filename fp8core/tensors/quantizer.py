"""Quantizers, each of which makes the operands of one tensor: in high precision, and combinations.

Those that call a backend are in :mod:`fp8core.tensors.quantizer_binding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import OpDesc, Operand, OperandSpec
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

    def bound(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the cast ``run`` by the scale, which records in ``amax``."""
        return partial(run, scale=self.scale, amax_out=self.amax)

    def bound_beside(self, second: Slot, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the split cast ``run`` by this slot and the ``second``, each for one half."""
        return partial(run, scale=(self.scale, second.scale), amax_out=(self.amax, second.amax))

    def present_scale(self) -> torch.Tensor:
        """Return a copy of the scale."""
        return self.scale.clone()


Cast: TypeAlias = "Callable[..., Orientations]"
"""Casts ``x``, behind it the ``group_offsets`` of a grouped operand; ``rng`` as in QuantizeDesc."""

Casts: TypeAlias = "tuple[Cast, Cast, Cast]"
"""The casts to both orientations, to the rowwise and to the columnwise one."""

CastAndSum: TypeAlias = "Callable[[torch.Tensor], tuple[Orientations, torch.Tensor]]"
ColumnSums: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
Resolve: TypeAlias = "Callable[[OpDesc], Resolved]"
ResolveOptional: TypeAlias = "Callable[..., Resolved | None]"


class Variant(NamedTuple):
    """A cast that gives more: column sums as well, or chunks; of both orientations by default."""

    sums: bool = False
    chunked: bool = False
    rowwise: bool = True
    columnwise: bool = True


class TensorQuantizer:
    """Makes the operands of one tensor ``x [rows, cols]`` by one of three ``casts``.

    ``choices`` says who computes them. ``variants`` are a backend's calls of more than that.
    ``plan`` is how a stored tensor has to be quantized to be taken as the result; None where none
    is taken: for an orientation in high precision, reduced amaxes, and NaN that propagates.
    ``columns_of`` is how rows are stored whose values its columns are of, None for those of ``x``.
    ``constants`` are the tensors besides its argument that a cast reads and writes, if it is
    operations of backends and a reduction over ranks; None if it does more. ``row_step``: the
    columnwise operand has zeros up to a multiple of so many rows, of the tensor or of each group.
    """

    __slots__ = (
        *("_both", "_columnwise", "_rowwise", "_variants", "choices", "columns_of", "constants"),
        *("plan", "row_step"),
    )

    def __init__(
        self,
        casts: Casts,
        choices: tuple[Choice, ...] = (),
        *,
        plan: TensorPlan | None = None,
        columns_of: OperandSpec | None = None,
        constants: tuple[torch.Tensor, ...] | None = None,
        variants: Mapping[Variant, Callable[..., Any]] | None = None,
        row_step: int = 1,
    ) -> None:
        self._both, self._rowwise, self._columnwise = casts
        self._variants = variants or {}
        self.choices = choices
        self.plan = plan
        self.columns_of = columns_of
        self.constants = constants
        self.row_step = row_step

    @property
    def casts(self) -> Casts:
        """The calls for both orientations, for the rowwise and for the columnwise one."""
        return self._both, self._rowwise, self._columnwise

    @property
    def casts_chunks(self) -> bool:
        """Whether :meth:`cast_to` may return chunks; never in a captured graph, as an operator
        of one does not offer them."""
        return Variant(chunked=True) in self._variants

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return the orientations asked for, at least one; ``rng`` as in QuantizeDesc."""
        both_or_column = self._both if rowwise else self._columnwise
        run = both_or_column if columnwise else self._rowwise
        return run(x, *groups) if rng is None else run(x, *groups, rng=rng)

    def scaled(self, scale: torch.Tensor) -> TensorQuantizer:
        """Return the quantizer with that delayed ``scale``, of one that has none."""
        both, rowwise, columnwise = [partial(cast, scale=scale) for cast in self.casts]
        casts, step = (both, rowwise, columnwise), self.row_step
        return TensorQuantizer(casts, self.choices, plan=self.plan, row_step=step)

    def cast_to(self, *, rowwise: bool, columnwise: bool, chunked: bool = False) -> Cast:
        """Return the call that makes these orientations, with nothing in between.

        ``chunked``, of both orientations of dense tensors without ``rng``: the rowwise operand is
        read once, and may be :class:`fp8core.backend_api.Chunks`.
        """
        both_or_column = self._both if rowwise else self._columnwise
        whole = both_or_column if columnwise else self._rowwise
        return self._variants.get(Variant(chunked=True), whole) if chunked else whole

    def cast_and_sum(
        self, sums: ColumnSums, *, rowwise: bool, columnwise: bool, chunked: bool = False
    ) -> CastAndSum:
        """Return the call of :meth:`cast_to` that returns the column sums of the tensor as well,
        complete with the chunks: by ``sums`` where the backend does not offer both at once."""
        cast = self.cast_to(rowwise=rowwise, columnwise=columnwise, chunked=chunked)
        is_chunked = chunked and self.casts_chunks
        run = self._variants.get(Variant(True, is_chunked, rowwise, columnwise))
        return run or _in_two_calls(cast, sums)


def _in_two_calls(cast: Cast, sums: ColumnSums) -> CastAndSum:
    def run(x: torch.Tensor) -> tuple[Orientations, torch.Tensor]:
        total = sums(x)
        return cast(x), total

    return run


def each_way(cast: Cast) -> Casts:
    """Return three casts from one that takes ``rowwise`` and ``columnwise``."""
    return cast, partial(cast, columnwise=False), partial(cast, rowwise=False)


class HighPrecision(TensorQuantizer):
    """No quantization: the operands are the tensor in the activation dtype, and its view.

    Without ``turns`` there is no view: both operands are the tensor itself, which its GEMM turns.
    What autograd saves is then the tensor that it knows, with its history.
    """

    __slots__ = ()

    def __init__(self, dtype: torch.dtype, *, turns: bool = True) -> None:
        super().__init__(each_way(partial(_plain, dtype, turns)), constants=())


def _plain(
    dtype: torch.dtype,
    turns: bool,
    x: torch.Tensor,
    *groups: torch.Tensor,
    rowwise: bool = True,
    columnwise: bool = True,
    rng: torch.Tensor | None = None,
) -> Orientations:
    """Return ``x`` and its transposed view, if it ``turns``."""
    if x.dtype != dtype:
        x = x.to(dtype)
    turned = x.t() if columnwise and turns else x
    return Orientations(Operand(x) if rowwise else None, Operand(turned) if columnwise else None)


def mixed(first: TensorQuantizer, second: TensorQuantizer) -> TensorQuantizer:
    """Return the quantizer that makes the rowwise operand by ``first``, and the columnwise one by
    ``second``: one of them in low precision, the other in high precision."""
    (_, rowwise, _), (_, _, columnwise) = first.casts, second.casts

    def both(x: torch.Tensor, *groups: torch.Tensor, **rng: Any) -> Orientations:
        row = rowwise(x, *groups, **rng).rowwise
        return Orientations(row, columnwise(x, *groups, **rng).columnwise)

    return TensorQuantizer((both, rowwise, columnwise), (*first.choices, *second.choices))


def rowwise_twice(quantizer: TensorQuantizer) -> TensorQuantizer:
    """Return low precision for both orientations: the columnwise operand is the rowwise one, which
    its reader dequantizes and transposes."""
    _, rowwise, _ = quantizer.casts

    def both(x: torch.Tensor, *groups: torch.Tensor, **rng: Any) -> Orientations:
        operand = rowwise(x, *groups, **rng).rowwise
        return Orientations(operand, operand)

    def columnwise(x: torch.Tensor, *groups: torch.Tensor, **rng: Any) -> Orientations:
        return Orientations(None, rowwise(x, *groups, **rng).rowwise)

    casts = both, rowwise, columnwise
    return TensorQuantizer(casts, quantizer.choices, constants=quantizer.constants)


def completed(
    low: TensorQuantizer, high: TensorQuantizer, plan: TensorPlan, *, dequantizes: bool
) -> TensorQuantizer:
    """Return ``low``, with the one orientation that ``plan`` leaves in high precision by ``high``.

    With ``dequantizes``, a columnwise operand in high precision is the rowwise one of ``low``.
    """
    row, column = plan
    if row is None and column is not None:
        return mixed(high, low)
    if row is not None and column is None:
        return rowwise_twice(low) if dequantizes else mixed(low, high)
    return low


def observed(
    quantizer: TensorQuantizer, amax: Callable[..., torch.Tensor], recorded: torch.Tensor
) -> TensorQuantizer:
    """Return ``quantizer``, before which the ``amax`` of a tensor is recorded."""

    def after(cast: Cast) -> Cast:
        def run(x: torch.Tensor, *groups: torch.Tensor, **rng: Any) -> Orientations:
            recorded.copy_(torch.maximum(recorded, amax(x, *groups)))
            return cast(x, *groups, **rng)

        return run

    both, rowwise, columnwise = map(after, quantizer.casts)
    return TensorQuantizer((both, rowwise, columnwise), quantizer.choices)
