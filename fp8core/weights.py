"""Quantized weights kept from one microbatch to the next, as long as the weight is the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fp8core.dispatch.select import Choice
from fp8core.errors import OperandError, UnsupportedError
from fp8core.parameter.tensor import QuantizedTensor
from fp8core.plan import TensorPlan
from fp8core.quantizer import Orientations, Quantizer, Slot

__all__ = ["How", "KeptWeight", "PerGroup", "WeightQuantizer", "WeightStore"]


class WeightQuantizer(Protocol):
    """Makes the operands of a weight, or of one weight a group, or finds them kept."""

    choices: tuple[Choice, ...]

    def __call__(
        self, weight: Any, /, *, columnwise: bool, first: bool | None = None, source: Any
    ) -> Orientations:
        """Return the operands of ``weight [n, k]``, padded from ``source``; a sequence a group."""


class How(NamedTuple):
    """How a weight is quantized, by value.

    ``key`` tells kept weights apart, so that evaluation and recompute share what training keeps;
    ``stored`` is how a QuantizedTensor has to be stored to be used (a plan without any low
    precision takes all of them); ``owner`` is what messages call the layer.
    """

    key: tuple[object, ...]
    stored: TensorPlan
    owner: str


class _Entry:
    """A weight as it was when it was quantized; its operands, if they are kept."""

    __slots__ = ("_how", "_is_recorded", "_scale", "_state", "_weight", "operands", "was_reused")

    def __init__(
        self,
        how: How,
        weight: torch.Tensor,
        state: tuple[int, int, bool],
        scale: torch.Tensor | None,
        *,
        is_recorded: bool,
    ) -> None:
        self._how = how
        self._weight = weakref.ref(weight)
        self._state = state
        self._scale = None if scale is None else scale._version
        self._is_recorded = is_recorded
        self.operands: Orientations | None = None
        self.was_reused = False

    def is_same(self, now: _Entry) -> bool:
        """Say whether ``now`` is the same weight, unchanged, to be quantized in the same way."""
        return (
            self._state == now._state
            and self._weight() is now._weight()
            and (self._how is now._how or self._how.key == now._how.key)
        )

    def is_current(self, now: _Entry) -> bool:
        """Say whether the delayed scale is the same, and the amax recorded if it has to be."""
        return self._scale == now._scale and (self._is_recorded or not now._is_recorded)


class WeightStore:
    """A layer's kept weights, at most one entry for each; emptied by ``clear``.

    ``is_replayed``: the layer is part of a CUDA graph, and nothing may be kept.
    """

    __slots__ = ("_entries", "is_replayed")

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self.is_replayed = False

    def clear(self) -> None:
        """Forget every kept weight."""
        self._entries.clear()

    def get(self, index: int) -> _Entry | None:
        """Return what is kept of weight ``index``."""
        return self._entries.get(index)

    def put(self, index: int, entry: _Entry) -> None:
        """Keep ``entry`` in the place of what was kept."""
        self._entries[index] = entry


_NOT_KEPT = (
    "is_first_microbatch=False takes the weight quantized by the call with "
    "is_first_microbatch=True, but there was none with this recipe since the weight changed. Pass "
    "True for the first microbatch, which keeps the weight, or None to have it decided."
)


def _serves_later(last: _Entry | None, now: _Entry) -> bool:
    """Say whether ``last`` gives a later microbatch the bits of the first: it is kept, or would be
    quantized alike."""
    return last is not None and (last.operands is not None or last.is_current(now))


# torch without CUDA has the function, and raises when it is called.
_is_capturing: Callable[[], bool] = (
    torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False
)


class KeptWeight:
    """A weight's quantizer that quantizes only what has changed since it last did.

    Changed means another tensor, storage or version counter of the weight, another delayed scale,
    or an amax that was not recorded and has to be. A write through ``.data`` changes none of these:
    say so with ``layer.invalidate_weight_cache()``. Without a store, as in a converted layer and in
    a graph that torch captures, every call quantizes anew, whatever ``first`` says.

    What is kept takes memory, in training until the optimizer's step. So, unless ``first`` asks for
    it, a call with gradients keeps the operands only where they are of use: if the weight as it was
    before was used twice, or this is the second call of this one.

    A :class:`QuantizedTensor` has its operands: nothing is quantized or kept.
    """

    __slots__ = (
        *("_both", "_how", "_index", "_quantizer", "_records", "_rowwise", "_scale", "_store"),
        "choices",
    )

    def __init__(
        self,
        quantizer: Quantizer,
        store: WeightStore | None,
        index: int,
        slot: Slot | None,
        how: How,
    ) -> None:
        self._quantizer = quantizer
        self._both = quantizer.cast_to(rowwise=True, columnwise=True)
        self._rowwise = quantizer.cast_to(rowwise=True, columnwise=False)
        self._store = store
        self._index = index
        self._how = how
        self._scale = None if slot is None else slot.scale
        self._records = slot is not None and slot.amax is not None
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
            OperandError: ``first`` is False, and nothing of this weight as it is now is kept; or
                the weight is a QuantizedTensor stored for another recipe.
        """
        if isinstance(weight, QuantizedTensor):
            return self._operands_of(weight, columnwise)
        source = weight if source is None else source
        # An inference tensor has no version counter, so nobody knows whether it changed.
        if self._store is None or source.is_inference():
            return self._quantize(weight, columnwise)
        if _is_capturing():
            self._store.is_replayed = True
        if self._store.is_replayed:
            return self._each_time(weight, columnwise, first)
        state = (source._version, source.data_ptr(), torch.is_inference_mode_enabled())
        last = self._store.get(self._index)
        entry = _Entry(self._how, source, state, self._scale, is_recorded=self._records)
        is_same = last is not None and last.is_same(entry)
        if first is False and not (is_same and _serves_later(last, entry)):
            raise OperandError(_NOT_KEPT)
        if last is not None and is_same and first is not True:
            if first is False or last.is_current(entry):
                last.was_reused = True
                operands = last.operands
                if operands is not None and (operands.columnwise is not None or not columnwise):
                    return operands
            entry.was_reused = last.was_reused
        is_kept = first is not None or not columnwise
        if last is not None:
            is_kept |= last.was_reused
            last.operands = None  # its memory serves for the new ones
        operands = self._quantize(weight, columnwise)
        if is_kept:
            entry.operands = operands
        self._store.put(self._index, entry)
        return operands

    def _each_time(
        self, weight: torch.Tensor, columnwise: bool, first: bool | None
    ) -> Orientations:
        """Quantize in every call and in every replay of a CUDA graph.

        A capture computes nothing that could be kept, and a replay that updates the weight moves
        no version counter: from a capture on, what was kept could be another weight's.
        """
        if first is False:
            raise UnsupportedError(
                f"{self._how.owner}: is_first_microbatch=False in a CUDA graph, or after one, may "
                f"multiply by the weight as it was at capture. Pass None: it is quantized anew."
            )
        return self._quantize(weight, columnwise)

    def _quantize(self, weight: torch.Tensor, columnwise: bool) -> Orientations:
        return self._both(weight) if columnwise else self._rowwise(weight)

    def _operands_of(self, weight: QuantizedTensor, columnwise: bool) -> Orientations:
        row, column = self._how.stored
        if row is None and column is None:
            return self._quantize(weight.dequantize(), columnwise)
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
