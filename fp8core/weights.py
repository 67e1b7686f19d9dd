"""Quantized weights kept from one microbatch to the next, as long as the weight is the same."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8core.errors import OperandError
from fp8core.quantizer import Orientations, Quantizer

__all__ = ["KeptWeight", "PerGroup", "WeightStore"]


class _Entry(NamedTuple):
    quantizer: Quantizer
    weight: weakref.ReferenceType[torch.Tensor]
    state: tuple[object, ...]
    operands: Orientations


class WeightStore:
    """A layer's kept weights, at most one entry for each; emptied by ``clear``."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def clear(self) -> None:
        """Forget every kept weight."""
        self._entries.clear()

    def get(self, index: int) -> _Entry | None:
        """Return what is kept of weight ``index``."""
        return self._entries.get(index)

    def put(self, index: int, entry: _Entry) -> None:
        """Keep ``entry`` in the place of what was kept."""
        self._entries[index] = entry


class KeptWeight:
    """A weight's quantizer that quantizes only what has changed since it last did.

    Changed means another tensor, storage or version counter of the weight, or another delayed
    scale. A write through ``.data`` changes none of these: say so with
    ``layer.invalidate_weight_cache()``. Without a store, as in a graph that torch captures, every
    call quantizes anew, whatever ``first`` says.
    """

    __slots__ = ("_index", "_quantizer", "_scale", "_store", "choices")

    def __init__(
        self,
        quantizer: Quantizer,
        store: WeightStore | None,
        index: int,
        scale: torch.Tensor | None,
    ) -> None:
        self._quantizer = quantizer
        self._store = store
        self._index = index
        self._scale = scale
        self.choices = quantizer.choices

    def __call__(
        self, weight: torch.Tensor, *, columnwise: bool, first: bool | None = None
    ) -> Orientations:
        """Return the operands of ``weight [n, k]``; ``first`` as in :class:`Call`.

        Raises:
            OperandError: ``first`` is False, and nothing of this weight as it is now is kept.
        """
        # An inference tensor has no version counter, so nobody knows whether it changed.
        if self._store is None or weight.is_inference():
            return self._quantizer(weight, columnwise=columnwise)
        state = (weight._version, weight.data_ptr(), torch.is_inference_mode_enabled())
        entry = self._store.get(self._index)
        is_same = (
            entry is not None
            and entry.quantizer is self._quantizer
            and entry.weight() is weight
            and entry.state[:3] == state
        )
        if first is False and not is_same:
            raise OperandError(
                "is_first_microbatch=False takes the weight quantized by the call with "
                "is_first_microbatch=True, but there was none with this recipe since the weight "
                "changed. Pass True for the first microbatch, or None to have it decided."
            )
        scale_version = None if self._scale is None else self._scale._version
        if entry is not None and is_same and first is not True:
            fits = entry.operands.columnwise is not None or not columnwise
            if fits and (first is False or entry.state[3] == scale_version):
                return entry.operands
        operands = self._quantizer(weight, columnwise=columnwise)
        kept = _Entry(self._quantizer, weakref.ref(weight), (*state, scale_version), operands)
        self._store.put(self._index, kept)
        return operands


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
    ) -> Orientations:
        """Quantize ``weights``, one ``[rows, cols]`` a group."""
        made = [
            quantizer(weight, columnwise=columnwise, first=first)
            for quantizer, weight in zip(self._quantizers, weights, strict=True)
        ]
        return Orientations(
            tuple(one.rowwise for one in made), tuple(one.columnwise for one in made)
        )
