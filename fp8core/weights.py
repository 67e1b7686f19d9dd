"""Quantized weights kept from one microbatch to the next, as long as the weight is the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8core.dispatch.select import Choice
from fp8core.errors import OperandError, UnsupportedError
from fp8core.parameter.tensor import QuantizedTensor
from fp8core.plan import TensorPlan
from fp8core.quantizer import Cast, Orientations, Pair, Quantizer, Slot

__all__ = ["How", "KeptWeight", "PerGroup", "WeightQuantizer", "WeightStore"]


class WeightQuantizer(Protocol):
    """Makes the operands of a weight, or of one weight a group, or finds them kept."""

    choices: tuple[Choice, ...]

    def __call__(
        self,
        weight: Any,
        /,
        *,
        columnwise: bool,
        first: bool | None = None,
        source: Any,
        cast: Cast | None = None,
    ) -> Orientations:
        """Return the operands of ``weight [n, k]``, padded from ``source``; a sequence a group.

        ``cast`` may serve for both orientations, in the place of its own.
        """

    def beside(self, input: Quantizer) -> Pair | None:
        """Return what quantizes an input and the weight at once, if there is such a thing."""


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
        state: tuple[int, int, bool, int],
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

    def is_of(self, now: _Entry) -> bool:
        """Say whether ``now`` is the same weight, unchanged."""
        return self._state == now._state and self._weight() is now._weight()

    def is_same(self, now: _Entry) -> bool:
        """Say whether ``now`` is the same weight, unchanged, to be quantized in the same way."""
        return self.is_of(now) and (self._how is now._how or self._how.key == now._how.key)

    def is_current(self, now: _Entry) -> bool:
        """Say whether the delayed scale is the same, and the amax recorded if it has to be."""
        return self._scale == now._scale and (self._is_recorded or not now._is_recorded)

    def get(self, columnwise: bool) -> Orientations | None:
        """Return the operands, if they are kept and are all that is needed."""
        operands = self.operands
        if operands is None or (columnwise and operands.columnwise is None):
            return None
        return operands


class WeightStore:
    """A layer's kept weights, at most two entries for each; emptied by ``clear``.

    ``automatic`` are those of calls that leave it to the layer whether to keep the weight,
    ``marked`` those of ``is_first_microbatch=True``: what runs between two microbatches, such as an
    evaluation, has no part in them. ``is_replayed``: the layer is part of a CUDA graph, and nothing
    may be kept.
    """

    __slots__ = ("automatic", "is_replayed", "marked")

    def __init__(self) -> None:
        self.automatic: dict[int, _Entry] = {}
        self.marked: dict[int, _Entry] = {}
        self.is_replayed = False

    def clear(self) -> None:
        """Forget every kept weight."""
        self.automatic.clear()
        self.marked.clear()


# torch without CUDA has the function, and raises when it is called.
_is_capturing: Callable[[], bool] = (
    torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False
)


class _Writers:
    """What optimizers do to weights that no version counter tells.

    ``steps`` counts those of optimizers over sharded parameters, which FSDP gathers into the same
    tensors again; ``is_unseen``: steps run where nobody counts them, in a CUDA graph or compiled.
    """

    __slots__ = ("is_unseen", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.is_unseen = False


_writers = _Writers()


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Count a step as a write to its parameters, where torch's version counters do not.

    torch's fused optimizers move none, nor does what writes through ``.data``, such as
    ZeroRedundancyOptimizer. torch's other optimizers do. A compiled step of the former, which
    computes on stand-ins while this is traced, only leaves the mark that nothing may be kept.
    """
    groups = optimizer.param_groups
    is_counted = type(optimizer).__module__.startswith("torch.optim.")
    is_counted &= not any(group.get("fused") for group in groups)
    if torch.compiler.is_compiling():
        if not is_counted:
            _writers.is_unseen = True
        return
    if _is_capturing():
        _writers.is_unseen = True
    params = [own for group in groups for own in group["params"]]
    if any(type(own) not in _PLAIN for own in params):
        _writers.steps += 1
    if not is_counted:
        torch.autograd.graph.increment_version(params)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
register_optimizer_step_post_hook(_after_step)


_NOT_KEPT = (
    "is_first_microbatch=False takes the weight quantized by the call with "
    "is_first_microbatch=True, but there was none with this recipe since the weight changed. Pass "
    "True for the first microbatch, which keeps the weight, or None to have it decided."
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
        cast: Cast | None = None,
    ) -> Orientations:
        """Return the operands of ``weight [n, k]``; ``first`` as in :class:`Call`.

        ``source`` is the tensor that ``weight`` was padded from; ``cast`` quantizes both
        orientations in the place of its own, if they are not kept.

        Raises:
            OperandError: ``first`` is False, and nothing of this weight as it is now is kept; or
                the weight is a QuantizedTensor stored for another recipe.
        """
        if isinstance(weight, QuantizedTensor):
            return self._operands_of(weight, columnwise)
        source = weight if source is None else source
        quantize = (cast or self._both) if columnwise else self._rowwise
        # An inference tensor has no version counter, so nobody knows whether it changed.
        if self._store is None or source.is_inference():
            return quantize(weight)
        if _is_capturing():
            self._store.is_replayed = True
        if self._store.is_replayed or _writers.is_unseen:
            return self._each_time(weight, quantize, first)
        is_inference = torch.is_inference_mode_enabled()
        state = (source._version, source.data_ptr(), is_inference, _writers.steps)
        now = _Entry(self._how, source, state, self._scale, is_recorded=self._records)
        if first is None:
            return self._automatic(weight, now, columnwise, quantize)
        return self._marked(weight, now, columnwise, quantize, is_first=first)

    def _marked(
        self, weight: torch.Tensor, now: _Entry, columnwise: bool, quantize: Cast, *, is_first: bool
    ) -> Orientations:
        """Quantize and keep for the microbatches that follow, or take what was kept."""
        assert self._store is not None
        index, store = self._index, self._store
        if not is_first:
            found = (store.marked.get(index), store.automatic.get(index))
            entries = [entry for entry in found if entry is not None and entry.is_same(now)]
            for entry in entries:
                operands = entry.get(columnwise)
                if operands is not None:
                    return operands
            # What is not kept, or in one orientation, is made again where that gives the same bits.
            if not any(entry.is_current(now) for entry in entries):
                raise OperandError(_NOT_KEPT)
        for old in (store.marked.pop(index, None), store.automatic.get(index)):
            if old is not None:
                old.operands = None  # its memory serves for the new ones
        now.operands = quantize(weight)
        store.marked[index] = now
        return now.operands

    def _automatic(
        self, weight: torch.Tensor, now: _Entry, columnwise: bool, quantize: Cast
    ) -> Orientations:
        """Take what is kept and still right, or quantize, and keep what is likely to be used."""
        assert self._store is not None
        index, store = self._index, self._store
        marked, last = store.marked.get(index), store.automatic.get(index)
        if marked is not None:
            if not marked.is_of(now):
                del store.marked[index]
            elif marked.is_same(now) and marked.is_current(now):
                operands = marked.get(columnwise)
                if operands is not None:
                    return operands
        is_kept = not columnwise
        if last is not None:
            if last.is_same(now):
                if last.is_current(now):
                    last.was_reused = True
                    operands = last.get(columnwise)
                    if operands is not None:
                        return operands
                now.was_reused = last.was_reused
            is_kept |= last.was_reused
            last.operands = None  # its memory serves for the new ones
        operands = quantize(weight)
        if is_kept:
            now.operands = operands
        store.automatic[index] = now
        return operands

    def _each_time(self, weight: torch.Tensor, quantize: Cast, first: bool | None) -> Orientations:
        """Quantize in every call and in every replay of a CUDA graph.

        A capture computes nothing that could be kept, and a replay that updates the weight moves
        no version counter: from a capture on, what was kept could be another weight's.
        """
        if first is False:
            raise UnsupportedError(
                f"{self._how.owner}: is_first_microbatch=False in a CUDA graph, or after one or a "
                f"compiled fused optimizer, may multiply by the weight as it was before. Pass "
                f"None: it is quantized anew."
            )
        return quantize(weight)

    def beside(self, input: Quantizer) -> Pair | None:
        """Return what quantizes an input and the weight at once, if there is such a thing."""
        return input.beside(self._quantizer)

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
        cast: Cast | None = None,
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
        """There is no such thing."""
