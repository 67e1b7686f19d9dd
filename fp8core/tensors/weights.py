"""A layer's weight as operands: quantized in every forward, unless the caller says otherwise.

Whether a tensor was written cannot be seen on it: optimizers, collectives, other views of the same
memory and other processes write without moving its version counter. A quantized weight is therefore
kept only where the caller says that the weight does not change: for microbatches by
``is_first_microbatch``, for evaluation and generation by :func:`fp8core.frozen_weights`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core.dispatch.select import Choice
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.operators import with_zeros
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations, Slot, TensorQuantizer
from fp8core.tensors.storage import pad_operand, padded_with, takes_partial_blocks
from fp8core.tensors.user_storage import StorageTensor
from fp8core.torch_ops.private import is_capturing


class Origins(NamedTuple):
    """The tensors that a weight is computed from, with the state of each at that time.

    A state is the version counter, the storage offset and the strides. The tensors themselves are
    kept, as an address may be reused; for a view, which FSDP creates anew in each forward, the
    tensor that it is a view of.
    """

    tensors: Sequence[torch.Tensor]
    states: Sequence[tuple[object, ...]]

    def are_tensors_of(self, origins: Origins) -> bool:
        """Say whether ``origins`` have the same tensors."""
        return [*map(id, self.tensors)] == [*map(id, origins.tensors)]

    def are(self, origins: Origins) -> bool:
        """Say whether ``origins`` have the same tensors in the same states."""
        return self.states == origins.states and self.are_tensors_of(origins)


def _origins_of(source: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Origins:
    """Return the origins of ``source``: itself if it is a parameter, else ``parameters``."""
    tensors = [
        tensor if tensor._base is None else tensor._base for tensor in parameters or (source,)
    ]
    states = [
        (version_of(tensor), tensor.storage_offset(), tensor.stride())
        for tensor in (source, *parameters)
    ]
    return Origins(tensors, states)


class CachedWeight(NamedTuple):
    """A weight's operands, their origins, and the version of their delayed scale.

    ``again`` quantizes the weight with the values of the time of its call; None for a weight that
    is computed.
    """

    key: tuple[object, ...]
    origins: Origins
    scale_version: int
    operands: Orientations
    again: Callable[[], Orientations] | None = None


class Keeping(NamedTuple):
    """Which kept weights a call uses, by the index of the weight's GEMM.

    ``first`` is the call's ``is_first_microbatch``, None in the scope of frozen weights;
    ``entries`` are the weights kept for such calls. ``origins`` returns the tensors that a weight
    is computed from if it is not a parameter itself. In a checkpoint ``used`` records the weights
    that forward used, which its recompute then uses. ``is_for_graphs``: a graph that is captured
    reads the kept weights.
    """

    first: bool | None
    entries: dict[int, CachedWeight]
    origins: Callable[[], Sequence[torch.Tensor]]
    used: dict[int, CachedWeight] | None = None
    is_for_graphs: bool = False


class WeightQuantizer:
    """Returns the operands of a weight, or of one weight a group: quantized now, or kept.

    With ``requantizes``, the columnwise operand may be missing until :meth:`requantize` is called
    in backward: the weight is in its place, see :mod:`fp8core.tensors.saving`.
    """

    __slots__ = ()

    choices: tuple[Choice, ...]
    requantizes: bool = False

    def __call__(
        self,
        weight: Any,
        /,
        *,
        columnwise: bool,
        keeping: Keeping | None = None,
    ) -> Orientations:
        """Return the operands of ``weight [n, k]``, or of a sequence of them, one a group."""
        raise NotImplementedError

    @property
    def constants(self) -> tuple[torch.Tensor, ...] | None:
        """The constants of a plain weight's quantizer; None if the weight is cached, or more is
        done."""
        return None

    def requantize(self, saved: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return ``saved``, three tensors a weight, with operands in the places of weights."""
        return list(saved)


class How(NamedTuple):
    """How a weight is quantized, by value.

    ``key`` tells kept weights apart. ``dtype`` is the one that its cast takes, None where nothing
    is cast. ``stored`` is how a QuantizedTensor has to be stored to be used; a plan in high
    precision takes any. ``owner`` names the layer in messages. ``slot`` holds the delayed scale,
    None for other recipes. ``dequantizes``: the columnwise operand is the rowwise one, see
    :func:`~fp8core.tensors.quantizer.rowwise_twice`. ``by_object``: an object of the user's
    quantizes it.
    """

    key: tuple[object, ...]
    dtype: torch.dtype | None
    stored: TensorPlan
    owner: str
    slot: Slot | None
    dequantizes: bool = False
    by_object: bool = False


class WeightStore:
    """The quantized weights that one layer keeps, one for each GEMM of its forward.

    ``microbatches`` are those of the latest ``is_first_microbatch=True``. ``scope`` are those of
    the open :func:`fp8core.frozen_weights` around the layer, None outside of one.
    ``is_for_graphs``: captured graphs read those of microbatches, see :meth:`refresh`.
    """

    __slots__ = ("_lock", "_num_open", "is_for_graphs", "microbatches", "scope")

    def __init__(self) -> None:
        self.microbatches: dict[int, CachedWeight] = {}
        self.scope: dict[int, CachedWeight] | None = None
        self.is_for_graphs = False
        self._num_open = 0
        self._lock = threading.Lock()

    def open_scope(self) -> None:
        """Begin to keep weights, until as many scopes are closed as were opened."""
        with self._lock:
            self._num_open += 1
            if self.scope is None:
                self.scope = {}

    def close_scope(self) -> None:
        """Forget the weights of the scope if no other scope is open."""
        with self._lock:
            self._num_open -= 1
            if not self._num_open and self.scope is not None:
                self.scope.clear()
                self.scope = None  # a call still running in another thread fills the old one

    def keeping(
        self, first: bool | None, origins: Callable[[], Sequence[torch.Tensor]]
    ) -> Keeping | None:
        """Return the kept weights for ``is_first_microbatch=first``, None if none are kept."""
        entries = self.scope if first is None else self.microbatches
        if entries is None:
            return None
        is_for_graphs = self.is_for_graphs and first is not None
        return Keeping(first, entries, origins, is_for_graphs=is_for_graphs)

    def refresh(self) -> None:
        """Quantize the weights of microbatches as they are now, into the same memory.

        Raises:
            UnsupportedError: one is computed from others.
        """
        for index, stored in self.microbatches.items():
            if stored.again is None:
                raise UnsupportedError(_NOT_AGAIN)
            self.microbatches[index] = _rewritten(stored)


def _rewritten(stored: CachedWeight) -> CachedWeight:
    """Quantize the weight of ``stored`` again, into the memory that captured graphs read."""
    assert stored.again is not None
    with torch.inference_mode(False), torch.no_grad():
        new = stored.again()
        for target, source in zip(stored.operands, new, strict=True):
            for part, value in zip(target or (), source or (), strict=True):
                if part is not None:
                    part.copy_(value)
    return stored._replace(origins=_origins_of(stored.origins.tensors[0], ()))


class CachingWeightQuantizer(WeightQuantizer):
    """Quantizes a weight in every call, or caches its operands where the caller says that the
    weight does not change.

    ``zeros`` are the rows and columns of zeros that the weight's products need behind its ends,
    None for none.

    Nothing is cached of a :class:`QuantizedTensor`, which holds its operands, unless they are
    padded; nor in high precision, where the weight itself is the operand; nor while a CUDA graph is
    captured, to which the memory allocated then belongs.
    """

    __slots__ = ("_both", "_dtype", "_how", "_index", "_quantizer", "_rowwise", "_zeros", "choices")

    def __init__(
        self, quantizer: TensorQuantizer, index: int, how: How, zeros: tuple[int, int] | None = None
    ) -> None:
        self._quantizer = quantizer
        self._zeros = zeros
        self._both, self._rowwise, _ = quantizer.casts
        if zeros is not None:
            self._both = of_padded(self._both, how.stored, zeros)
            self._rowwise = of_padded(self._rowwise, TensorPlan(how.stored.rowwise, None), zeros)
        self._index = index
        self._how = how
        self._dtype = how.dtype
        self.choices = quantizer.choices

    def __call__(
        self,
        weight: torch.Tensor,
        *,
        columnwise: bool,
        keeping: Keeping | None = None,
    ) -> Orientations:
        """Return the operands of ``weight [n, k]``.

        Raises:
            OperandError: the weight has another dtype than was bound. With
                ``is_first_microbatch=False``: torch has counted a write to the weight since its
                operands were kept, or it is another tensor. In the scope of frozen weights: torch
                has counted a write. A QuantizedTensor is stored for another recipe.
            UnsupportedError: while a CUDA graph is captured, ``is_first_microbatch`` is False, or
                the scope of frozen weights is open.
        """
        if isinstance(weight, QuantizedTensor):
            if self._zeros is None or keeping is None or keeping.is_for_graphs or is_capturing():
                return self._stored(weight, columnwise=columnwise)
            # A checkpoint need not know it: what is kept of it is what it holds.
            return self._cached(keeping._replace(used=None), weight, columnwise)
        self._check(weight)
        if keeping is None or not (self.choices or self._how.by_object):
            return (self._both if columnwise else self._rowwise)(weight)
        return self._cached(keeping, weight, columnwise)

    def _check(self, weight: torch.Tensor) -> None:
        """Raise OperandError if ``weight`` has another dtype than was bound."""
        if weight.dtype is not self._dtype and self._dtype is not None:
            raise OperandError(
                f"{self._how.owner}: a weight is {weight.dtype}, but the layer is bound to cast it "
                f"from {self._dtype}. Convert the layer by its to(), which binds it again; all "
                f"weights of one layer's groups or parts have one dtype."
            )

    def _cached(self, keeping: Keeping, weight: torch.Tensor, columnwise: bool) -> Orientations:
        """Return the cached operands, or quantize the weight and cache its operands."""
        first, entries, used = keeping.first, keeping.entries, keeping.used
        if used is not None:
            if self._index in used:  # this call repeats the one that used them
                return used[self._index].operands
            columnwise = True  # for the recompute
        quantize = self._both if columnwise else self._rowwise
        is_stored = isinstance(weight, QuantizedTensor)
        if is_stored:
            quantize = partial(self._stored, columnwise=columnwise)
        if is_capturing() and not (first is False and keeping.is_for_graphs):
            if first is not True:
                problem = _FROZEN_IN_GRAPH if first is None else _IN_GRAPH
                raise UnsupportedError(f"{self._how.owner}: {problem}")
            return quantize(weight)
        slot = self._how.slot
        if first is None and slot is not None and slot.amax is not None:
            return quantize(weight)  # to record its amax, which will change the scale
        is_parameter = isinstance(weight, torch.nn.Parameter)
        origins = _origins_of(weight, () if is_parameter else keeping.origins())
        scale_version = 0 if slot is None else slot.scale._version
        entry = None if first is True else self._entry(entries, first, scale_version)
        if first is True and keeping.is_for_graphs:
            entry = self._rewritten(entries, origins, columnwise)
        if entry is not None and not entry.origins.are(origins):
            # Other tensors are other weights; a parametrization may write to its buffers, and a
            # stored weight holds what it is.
            is_replaced = first is not False and not (
                is_parameter and entry.origins.are_tensors_of(origins)
            )
            if not (is_replaced or is_stored):
                raise OperandError(f"{self._how.owner}: {_WRITTEN}")
            entry = None
        if entry is None or (columnwise and entry.operands.columnwise is None):
            if is_capturing():  # microbatches of graphs, of which none was the first
                raise UnsupportedError(f"{self._how.owner}: {_IN_GRAPH}")
            entry = None
            entries.pop(self._index, None)  # frees its memory for the new ones
            # Later calls may train, and tensors created in inference mode cannot be saved.
            with torch.inference_mode(False), torch.no_grad():
                operands = quantize(weight)
            again = None
            if keeping.is_for_graphs:
                if not is_parameter or isinstance(operands.rowwise.data, StorageTensor):
                    raise UnsupportedError(f"{self._how.owner}: {_NOT_AGAIN}")
                again = partial(quantize, weight)
            entry = CachedWeight(self._how.key, origins, scale_version, operands, again)
            entries[self._index] = entry
        if used is not None:
            used[self._index] = entry
        return entry.operands

    def _rewritten(
        self, entries: dict[int, CachedWeight], origins: Origins, columnwise: bool
    ) -> CachedWeight | None:
        """Return what is kept, quantized again in its memory; None if nothing that fits is."""
        stored = entries.get(self._index)
        if (
            stored is None
            or stored.key != self._how.key
            or stored.again is None
            or not stored.origins.are_tensors_of(origins)
            or (columnwise and stored.operands.columnwise is None)
        ):
            return None
        entries[self._index] = stored = _rewritten(stored)
        return stored

    def _entry(
        self, entries: dict[int, CachedWeight], first: bool | None, scale_version: int
    ) -> CachedWeight | None:
        """Return what is kept of this GEMM's weight under this recipe, None for nothing."""
        entry = entries.get(self._index)
        if entry is None or entry.key != self._how.key:
            return None
        # Within a step, microbatches use one delayed scale.
        return None if first is None and entry.scale_version != scale_version else entry

    @property
    def constants(self) -> tuple[torch.Tensor, ...] | None:
        """The constants of the weight's quantizer."""
        return self._quantizer.constants if self._zeros is None else None

    def _stored(self, weight: torch.Tensor, *, columnwise: bool) -> Orientations:
        """Return what ``weight``, a QuantizedTensor, holds, padded."""
        assert isinstance(weight, QuantizedTensor)
        row, column = self._how.stored
        is_plain = row is None and column is None
        is_high = column is None  # backward in high precision, from the dequantized weight
        if weight.plan.rowwise is None and row == column:
            weight = weight.turned_to_rows()
        columns_of, expected = weight._casting.columns_of, self._quantizer.columns_of
        is_turned = is_high or not columnwise
        is_turned = is_turned or (weight.plan.columnwise, columns_of) == (column, expected)
        if is_plain and self._dtype is not None:
            raise OperandError(f"{self._how.owner}: {_STORED_TWICE}")
        if not is_plain and weight._value is not None:
            raise OperandError(f"{self._how.owner}: {_BESIDE_VALUE}")
        if not is_plain and weight.plan == (row, None) and not is_turned:
            raise OperandError(f"{self._how.owner}: {_ROWS_ALONE}")
        if not is_plain and (weight.plan.rowwise != row or not is_turned):
            raise OperandError(
                f"{self._how.owner}: the weight is stored as {weight.plan.rowwise} (columnwise "
                f"{weight.plan.columnwise}{_SOURCE if columns_of else ''}), the recipe of autocast "
                f"needs {row} ({column}{_SOURCE if expected else ''}).\n"
                f"  Use the recipe of quantized_model_init, or no autocast, which dequantizes it."
            )
        padded = weight if self._zeros is None else with_zeros(weight, *self._zeros)
        if is_plain:
            value = padded.dequantize()
            return self._quantizer(value, rowwise=True, columnwise=columnwise)
        assert isinstance(padded, QuantizedTensor)
        if not columnwise:
            return Orientations(padded.rowwise, None)
        rowwise, turned = padded.operands
        if self._how.dequantizes:
            return Orientations(rowwise, rowwise)
        if is_high:
            value = padded.dequantize()
            turned = self._quantizer(value, rowwise=False, columnwise=True).columnwise
        return Orientations(rowwise, turned)


_SOURCE = ", of the dequantized rows"


def of_padded(
    cast: Callable[..., Orientations], plan: TensorPlan, zeros: tuple[int, int]
) -> Callable[..., Orientations]:
    """Return ``cast``, in the orientations of ``plan``, of a weight with ``zeros`` behind its ends.

    The codes of one orientation are a byte an element to copy, of the weight two or four. Where
    each row of the weight becomes longer, its codes would be copied element by element.
    """
    row, column = plan
    spec = row or column
    if (row and column) or zeros[1] or not takes_partial_blocks(spec):
        return lambda weight, **keywords: cast(padded_with(weight, zeros), **keywords)
    assert spec is not None

    def padded(weight: torch.Tensor, **keywords: Any) -> Orientations:
        rowwise, columnwise = cast(weight, **keywords)
        if rowwise is not None:
            rowwise = pad_operand(rowwise, spec, *zeros)
        if columnwise is not None:
            columnwise = pad_operand(columnwise, spec, *zeros[::-1])
        return Orientations(rowwise, columnwise)

    return padded


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's count of writes; 0 for a tensor of inference mode, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


_IN_GRAPH = (
    "is_first_microbatch=False in a CUDA graph would multiply by the weight of the capture in "
    "every replay. Pass None: the graph quantizes the weight as it is."
)
_FROZEN_IN_GRAPH = (
    "a CUDA graph that is captured within fp8core.frozen_weights would quantize the weight in "
    "every replay, as a graph may be replayed after the scope has ended. Store the weights "
    "quantized instead, by fp8core.quantized_model_init or load_pretrained(native=True): a graph "
    "reads those as they are. Or capture outside of the scope: the graph quantizes the weight as "
    "it is."
)
_NOT_AGAIN = (
    "cache_quantized_params with a weight that is computed from others, or quantized to a storage "
    "of the user's, is not offered: nothing could quantize it again outside of the graph, into the "
    "memory that the graph reads. Leave it out."
)
_WRITTEN = (
    "the weight was written since it was quantized and kept, or is another by now. Pass "
    "is_first_microbatch=True for the first microbatch after an optimizer's step, or None, which "
    "quantizes it in every call; in fp8core.frozen_weights no weight may change."
)


_STORED_TWICE = (
    "the weight is stored quantized already, and the recipe of autocast quantizes weights to "
    "storages of its own. Create the layer without quantized_model_init, or choose the recipe that "
    "stored the weight."
)
_BESIDE_VALUE = (
    "its weight holds a value in high precision beside an operand, which no product reads as a "
    "weight. Keep the parameter in high precision: a recipe casts it with the same HybridQuantizer."
)
_ROWS_ALONE = (
    "the gradient of its input is asked for, and its weight is stored for inference, in rows "
    "alone: quantized by fp8core.quantize_, or created while gradients were off. Call the model "
    "under torch.no_grad() or torch.inference_mode(). To train, store the weights with gradients "
    "on, by fp8core.quantized_model_init, or unconvert() the model."
)


class WeightWrapper(WeightQuantizer):
    """Base of the weight quantizers around another one; they cast the weight in its own call."""

    __slots__ = ("_inner", "choices", "requantizes")

    def __init__(self, inner: WeightQuantizer) -> None:
        self._inner = inner
        self.choices = inner.choices
        self.requantizes = inner.requantizes

    def requantize(self, saved: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return ``saved`` as the inner quantizer does."""
        return self._inner.requantize(saved)


class PerGroup(WeightQuantizer):
    """A quantizer for each group, for the weights of a grouped layer: operands come as tuples."""

    __slots__ = ("_quantizers", "choices", "requantizes")

    def __init__(self, quantizers: Sequence[CachingWeightQuantizer]) -> None:
        self._quantizers = tuple(quantizers)
        self.choices = self._quantizers[0].choices
        self.requantizes = self._quantizers[0].requantizes

    def __call__(
        self,
        weights: Sequence[torch.Tensor],
        *,
        columnwise: bool,
        keeping: Keeping | None = None,
    ) -> Orientations:
        """Quantize ``weights``, one ``[rows, cols]`` a group."""
        operands = [
            quantizer(weight, columnwise=columnwise, keeping=keeping)
            for quantizer, weight in zip(self._quantizers, weights, strict=True)
        ]
        return Orientations(*zip(*operands, strict=True))

    def requantize(self, saved: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return ``saved``, three tensors a group, with operands in the places of weights."""
        operands: list[torch.Tensor | None] = []
        for group, quantizer in enumerate(self._quantizers):
            operands += quantizer.requantize(saved[3 * group : 3 * group + 3])
        return operands
