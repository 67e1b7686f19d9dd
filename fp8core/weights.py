"""A layer's weight as operands: quantized in every forward, unless the caller says otherwise.

Nobody can tell from a tensor whether it was written: optimizers, collectives, other views of the
same memory and other processes write where no counter is. So a quantized weight is kept only where
the caller says that the weight does not change: for microbatches by ``is_first_microbatch``, for
evaluation and generation by :func:`fp8core.frozen_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from fp8core.dispatch.select import Choice
from fp8core.errors import OperandError, UnsupportedError
from fp8core.parameter.tensor import QuantizedTensor
from fp8core.plan import TensorPlan
from fp8core.quantizer import Orientations, Quantizer

__all__ = ["How", "KeptWeight", "PerGroup", "WeightPair", "WeightQuantizer", "WeightStore"]

WeightPair: TypeAlias = (
    "Callable[[torch.Tensor, torch.Tensor, bool | None], tuple[Orientations, Orientations]]"
)
"""``f(input, weight, is_first_microbatch)``: both orientations of the input's operands, and of the
weight's."""


class WeightQuantizer(Protocol):
    """Makes the operands of a weight, or of one weight a group, or takes those that were kept."""

    choices: tuple[Choice, ...]

    def __call__(
        self, weight: Any, /, *, columnwise: bool, first: bool | None = None, source: Any
    ) -> Orientations:
        """Return the operands of ``weight [n, k]``, padded from ``source``; a sequence a group."""

    def beside(self, input: Quantizer) -> WeightPair | None:
        """Return what casts an input and the weight in one call, if the backend has such a call."""


class How(NamedTuple):
    """How a weight is quantized, by value.

    ``key`` tells kept weights apart; ``stored`` is how a QuantizedTensor has to be stored to be
    used (a plan without any low precision takes all of them); ``owner`` is what messages call the
    layer.
    """

    key: tuple[object, ...]
    stored: TensorPlan
    owner: str


class _Kept(NamedTuple):
    """The operands of a weight, how they were made, and the weight's version counter then."""

    key: tuple[object, ...]
    version: int
    operands: Orientations


class WeightStore:
    """The quantized weights that one layer keeps, one for each GEMM of its forward.

    ``num_frozen`` counts the open :func:`fp8core.frozen_weights` around the layer.
    """

    __slots__ = ("kept", "num_frozen")

    def __init__(self) -> None:
        self.kept: dict[int, _Kept] = {}
        self.num_frozen = 0


# torch without CUDA has the function, and raises when it is called.
_is_capturing: Callable[[], bool] = (
    torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False
)


class KeptWeight:
    """Quantizes a weight in every call, or keeps it where the caller says that it does not change.

    A :class:`QuantizedTensor` has its operands: nothing is quantized or kept. Nor is anything kept
    in high precision, where the operands are the weight itself; without a store, as in a graph that
    torch compiles; and while a CUDA graph is captured, whose memory is the graph's own.
    """

    __slots__ = ("_both", "_how", "_index", "_quantizer", "_rowwise", "_store", "choices")

    def __init__(
        self, quantizer: Quantizer, store: WeightStore | None, index: int, how: How
    ) -> None:
        self._quantizer = quantizer
        self._both = quantizer.cast_to(rowwise=True, columnwise=True)
        self._rowwise = quantizer.cast_to(rowwise=True, columnwise=False)
        self._store = store if quantizer.choices else None
        self._index = index
        self._how = how
        self.choices = quantizer.choices

    def __call__(
        self,
        weight: torch.Tensor,
        *,
        columnwise: bool,
        first: bool | None = None,
        source: torch.Tensor | None = None,
    ) -> Orientations:
        """Return the operands of ``weight [n, k]``; ``first`` as in :class:`Call`.

        ``source`` is the tensor that ``weight`` was padded from.

        Raises:
            OperandError: ``first`` is False, and no operands of this weight are kept, or torch has
                counted a write to it since; or the weight is a QuantizedTensor stored for another
                recipe.
            UnsupportedError: ``first`` is False while a CUDA graph is captured.
        """
        if isinstance(weight, QuantizedTensor):
            return self._operands_of(weight, columnwise)
        quantize = self._both if columnwise else self._rowwise
        store = self._store
        if store is None or (first is None and not store.num_frozen):
            return quantize(weight)
        return self._kept(store, weight, weight if source is None else source, columnwise, first)

    def _kept(
        self,
        store: WeightStore,
        weight: torch.Tensor,
        source: torch.Tensor,
        columnwise: bool,
        first: bool | None,
    ) -> Orientations:
        """Take the operands that are kept, or make and keep them: always where ``first`` is True,
        never where it is False, and None is both, in the scope of frozen weights."""
        quantize = self._both if columnwise else self._rowwise
        if _is_capturing():
            if first is False:
                raise UnsupportedError(
                    f"{self._how.owner}: is_first_microbatch=False in a CUDA graph would multiply "
                    f"by the weight of the capture in every replay. Pass None: the graph quantizes "
                    f"the weight as it is."
                )
            return quantize(weight)
        # A tensor made in inference mode has no counter.
        version = 0 if source.is_inference() else source._version
        kept = None if first is True else store.kept.get(self._index)
        if kept is not None and kept.key == self._how.key:
            if kept.version != version:
                raise OperandError(f"{self._how.owner}: {_WRITTEN}")
            if not columnwise or kept.operands.columnwise is not None:
                return kept.operands
        elif first is False:
            raise OperandError(f"{self._how.owner}: {_NOTHING_KEPT}")
        kept = None
        store.kept.pop(self._index, None)  # its memory serves for the new ones
        # Made for later calls too, which may train: what inference mode makes cannot be saved.
        with torch.inference_mode(False), torch.no_grad():
            operands = quantize(weight)
        store.kept[self._index] = _Kept(self._how.key, version, operands)
        return operands

    def beside(self, input: Quantizer) -> WeightPair | None:
        """Return what casts an input and the weight in one call, if the backend has such a call.

        A weight that is kept, or stored quantized, leaves the input to a cast of its own.
        """
        pair = input.beside(self._quantizer)
        if pair is None:
            return None
        store, cast_input = self._store, input.cast_to(rowwise=True, columnwise=True)

        def cast(
            x: torch.Tensor, weight: torch.Tensor, first: bool | None
        ) -> tuple[Orientations, Orientations]:
            is_kept = store is not None and (first is not None or store.num_frozen)
            if is_kept or isinstance(weight, QuantizedTensor):
                operands = self(weight, columnwise=True, first=first)
                return cast_input(x), operands
            return pair(x, weight)

        return cast

    def _operands_of(self, weight: QuantizedTensor, columnwise: bool) -> Orientations:
        row, column = self._how.stored
        if row is None and column is None:
            value = weight.dequantize()
            return self._both(value) if columnwise else self._rowwise(value)
        is_high = column is None  # backward in high precision: on the value that there is
        if weight.plan.rowwise != row or not (is_high or weight.plan.columnwise == column):
            raise OperandError(
                f"{self._how.owner}: the weight is stored as {weight.plan.rowwise} (columnwise "
                f"{weight.plan.columnwise}), the recipe of autocast needs {row} ({column}).\n"
                f"  Use the recipe of quantized_model_init, or no autocast, which dequantizes it."
            )
        rowwise, turned = weight.operands
        if not columnwise:
            return Orientations(rowwise, None)
        if is_high:
            value = weight.dequantize()
            turned = self._quantizer(value, rowwise=False, columnwise=True).columnwise
        return Orientations(rowwise, turned)


_NOTHING_KEPT = (
    "is_first_microbatch=False takes the weight quantized by the call with "
    "is_first_microbatch=True, but there was none with this recipe. Pass True for the first "
    "microbatch, which keeps the weight, or None, which quantizes it in every call."
)
_WRITTEN = (
    "the weight was written since it was quantized and kept. Pass is_first_microbatch=True for the "
    "first microbatch after an optimizer's step, or None, which quantizes it in every call; in "
    "fp8core.frozen_weights no weight may change."
)


class PerGroup:
    """One quantizer a group, for the weights of a grouped layer: operands come as tuples."""

    __slots__ = ("_quantizers", "choices")

    def __init__(self, quantizers: Sequence[KeptWeight]) -> None:
        self._quantizers = tuple(quantizers)
        self.choices = self._quantizers[0].choices

    def __call__(
        self,
        weights: Sequence[torch.Tensor],
        *,
        columnwise: bool,
        first: bool | None = None,
        source: Sequence[torch.Tensor],
    ) -> Orientations:
        """Quantize ``weights``, one ``[rows, cols]`` a group."""
        made = [
            quantizer(weight, columnwise=columnwise, first=first, source=own)
            for quantizer, weight, own in zip(self._quantizers, weights, source, strict=True)
        ]
        return Orientations(
            tuple(one.rowwise for one in made), tuple(one.columnwise for one in made)
        )

    def beside(self, input: Quantizer) -> None:
        """Groups are cast apart."""
