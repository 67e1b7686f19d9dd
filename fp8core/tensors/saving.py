"""Tensors saved for backward by Transformer Engine's functions.

Its storage classes are no tensors, and are taken apart to be saved. A QuantizedTensor is one, which
autograd saves as it is; so these functions pass tensors on, and scripts that call them run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from fp8core.errors import OperandError

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
    *tensors: torch.Tensor | None,
) -> tuple[list[torch.Tensor | None], list[None]]:
    """Return what ``ctx.save_for_backward`` takes, and what ``ctx.tensor_objects`` keeps.

    Raises:
        OperandError: one is neither a tensor nor None.
    """
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise OperandError(
                f"prepare_for_saving: {type(tensor).__name__}; expected a torch.Tensor or None."
            )
    return list(tensors), [None] * len(tensors)


def restore_from_saved(
    tensors: Sequence[None],
    saved_tensors: Sequence[torch.Tensor | None],
    return_saved_tensors: bool = False,
) -> Any:
    """Return the first of ``saved_tensors``, one for each of ``tensors``; with
    ``return_saved_tensors`` those that are left as well.

    Raises:
        OperandError: there are fewer.
    """
    count = len(tensors)
    if len(saved_tensors) < count:
        raise OperandError(
            f"restore_from_saved: {len(saved_tensors)} saved tensors for {count} that were "
            f"prepared. Save all that prepare_for_saving returned."
        )
    restored = list(saved_tensors[:count])
    return (restored, list(saved_tensors[count:])) if return_saved_tensors else restored


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
