"""The saving of weights from forward to backward, and Transformer Engine's functions that save.

The columnwise codes of a weight, a byte for each element, would be held from forward to backward by
every layer of a model. A layer that holds none quantizes the weight again in backward: forward
quantizes it rowwise, for its own product, and gives the weight itself to autograd, which counts the
writes to the weight. A delayed scale is updated between forward and backward, so forward's scale is
saved as well; so is an amax of the weight, to read the weight once less; all other scales follow
from the weight. The two casts together have the bits of one cast in both orientations.

Transformer Engine's functions take its storage classes apart to save them, as these are no tensors.
A QuantizedTensor is a tensor, which autograd saves as it is; so the functions of these names pass
tensors on here, and take a user's storages apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.errors import OperandError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations, TensorQuantizer
from fp8core.tensors.quantizer_binding import CastsByAmax
from fp8core.tensors.user_storage import QuantizedTensorStorage
from fp8core.tensors.weights import CachingWeightQuantizer, How, Keeping, of_padded
from fp8core.torch_ops.capture import is_captured


class Unquantized(NamedTuple):
    """A weight in the place of its columnwise operand, which has three tensors too.

    ``scaling`` is the delayed scale that the operand has to have, or the weight's amax; None where
    its scales follow from the weight alone.
    """

    weight: torch.Tensor
    scaling: torch.Tensor | None
    unused: None = None


def is_unquantized(data: torch.Tensor) -> bool:
    """Say whether ``data`` is the first tensor of an :class:`Unquantized`, not of an operand, whose
    codes are uint8."""
    return data.dtype != torch.uint8


class RequantizedWeight(CachingWeightQuantizer):
    """Quantizes a weight columnwise in backward, where that saves memory.

    A weight that is cached, or stored quantized, is quantized in forward, as its codes are in
    memory anyway; and so is a weight that is no parameter, as each forward computes it from
    several: the layer alone would hold the weight, which is larger than its codes.
    """

    __slots__ = ("_by_amax", "_casts_both", "_columnwise", "_is_delayed")

    requantizes = True

    def __init__(
        self,
        quantizer: TensorQuantizer,
        index: int,
        how: How,
        plan: TensorPlan,
        columnwise: Callable[..., Orientations],
        zeros: tuple[int, int] | None = None,
        *,
        by_amax: CastsByAmax | None = None,
    ) -> None:
        super().__init__(quantizer, index, how, zeros)
        row, column = plan
        assert column is not None
        # Forward's cast is the one that counts NaN and inf and records the amax.
        self._casts_both = row is None or (column.delayed and not row.delayed)
        self._is_delayed = column.delayed
        self._by_amax = by_amax
        if by_amax is not None:
            columnwise = by_amax.columnwise
            if zeros is not None:
                rowwise = of_padded(by_amax.rowwise, TensorPlan(row, None), zeros)
                self._by_amax = by_amax._replace(rowwise=rowwise)
        if zeros is not None:
            columnwise = of_padded(columnwise, TensorPlan(None, column), zeros)
        self._columnwise = columnwise

    def __call__(
        self,
        weight: torch.Tensor,
        *,
        columnwise: bool,
        keeping: Keeping | None = None,
    ) -> Orientations:
        """Return the operands of ``weight``, the columnwise one as :class:`Unquantized`.

        Raises:
            OperandError, UnsupportedError: as its base class.
        """
        is_plain = keeping is None and type(weight) is torch.nn.Parameter
        needs_no_weight = not columnwise or weight.is_inference()
        if needs_no_weight or not (is_plain or self._costs_nothing_to_save(weight, keeping)):
            return super().__call__(weight, columnwise=columnwise, keeping=keeping)
        if self._by_amax is not None:
            self._check(weight)
            scaling = self._by_amax.amax(weight)
            rowwise = self._by_amax.rowwise(weight, amax=scaling).rowwise
            return Orientations(rowwise, Unquantized(weight, scaling))
        operands = super().__call__(weight, columnwise=self._casts_both, keeping=keeping)
        slot = self._how.slot
        scale = slot.present_scale() if slot is not None and self._is_delayed else None
        return Orientations(operands.rowwise, Unquantized(weight, scale))

    def _costs_nothing_to_save(self, weight: torch.Tensor, keeping: Keeping | None) -> bool:
        """Say whether ``weight`` costs nothing to save, and its codes are not kept beyond the call.

        In the scope of frozen weights they are not under delayed scaling: a call that trains
        quantizes the weight to record its amax, and its recompute has to save what it saved. Of a
        graph that torch captures, its partitioner decides what is saved.
        """
        is_stored = keeping is not None and (keeping.first is not None or self._how.slot is None)
        if is_stored or isinstance(weight, QuantizedTensor):
            return False
        return is_captured(weight) or is_of_parameter(weight)

    def requantize(self, saved: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the columnwise operand of ``saved``, an :class:`Unquantized` or an operand.

        The cast records no amax and counts no NaN or inf, as forward did both.
        """
        weight, scaling, _ = saved
        if weight is None or weight.dtype is torch.uint8:
            return list(saved)
        keywords = {}
        if scaling is not None:
            keywords["scale" if self._by_amax is None else "amax"] = scaling
        return list(self._columnwise(weight, **keywords).columnwise)


def is_of_parameter(weight: torch.Tensor) -> bool:
    """Say whether the memory of the plain tensor ``weight`` is that of a parameter which autograd
    can save: it is one, or a view of one."""
    origin = weight if weight._base is None else weight._base
    return isinstance(origin, torch.nn.Parameter) and not weight.is_inference()


Note: TypeAlias = Callable[..., None]


class _Thread(threading.local):
    note: Note | None = None


_thread = _Thread()


def set_note(note: Note | None) -> Note | None:
    """Call ``note`` with the codes and scales of the weights that this thread's layers save; return
    what was called before."""
    before, _thread.note = _thread.note, note
    return before


def is_noting() -> bool:
    """Say whether this thread's layers are asked for their weights."""
    return _thread.note is not None


def note_weight(operand: tuple[object, ...]) -> None:
    """Say that the tensors of ``operand``, or of a tuple of operands, are those of a weight."""
    note = _thread.note
    if note is None:
        return
    for part in operand:
        if isinstance(part, tuple):
            note_weight(part)
        elif isinstance(part, torch.Tensor):
            note(part)


def prepare_for_saving(
    *tensors: torch.Tensor | QuantizedTensorStorage | None,
) -> tuple[list[torch.Tensor | None], list[QuantizedTensorStorage | None]]:
    """Return what ``ctx.save_for_backward`` takes, and what ``ctx.tensor_objects`` keeps: a user's
    storages, by their ``prepare_for_saving``, and None for each tensor.

    Raises:
        OperandError: one is neither a tensor, nor a storage, nor None.
    """
    saved: list[torch.Tensor | None] = []
    objects: list[QuantizedTensorStorage | None] = []
    for tensor in tensors:
        parts: list[torch.Tensor | None]
        if tensor is None or isinstance(tensor, torch.Tensor):
            parts, storage = [tensor], None
        elif isinstance(tensor, QuantizedTensorStorage):
            parts, storage = tensor.prepare_for_saving()
        else:
            raise OperandError(
                f"prepare_for_saving: {type(tensor).__name__}; expected a torch.Tensor, a "
                f"QuantizedTensorStorage or None."
            )
        saved += parts
        objects.append(storage)
    return saved, objects


def restore_from_saved(
    tensors: Sequence[QuantizedTensorStorage | None],
    saved_tensors: Sequence[torch.Tensor | None],
    return_saved_tensors: bool = False,
) -> Any:
    """Return the first of ``saved_tensors``, one for each None of ``tensors``, and its storages,
    which take back theirs; with ``return_saved_tensors`` those that are left as well.

    Raises:
        OperandError: there are fewer.
    """
    restored: list[Any] = []
    left = saved_tensors
    for storage in tensors:
        if storage is not None:
            left = storage.restore_from_saved(left)
            restored.append(storage)
        elif left:
            restored.append(left[0])
            left = left[1:]
        else:
            raise OperandError(
                f"restore_from_saved: {len(saved_tensors)} saved tensors for {len(tensors)} that "
                f"were prepared. Save all that prepare_for_saving returned."
            )
    return (restored, list(left)) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """Return the tensors that ``ctx``, of an autograd.Function, saved with its ``tensor_objects``,
    which it then forgets.

    Raises:
        OperandError: it has no ``tensor_objects``.
    """
    objects = getattr(ctx, "tensor_objects", None)
    if objects is None:
        raise OperandError(
            "restore_from_func_ctx: ctx.tensor_objects is not set. Keep there what "
            "prepare_for_saving returned second; a graph that is kept restores it once."
        )
    restored = restore_from_saved(objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return restored
