"""Writing to a tensor of operands: a value is quantized, operands stored alike are copied."""

from __future__ import annotations

import torch

from fp8core.errors import UnsupportedError
from fp8core.tensors.operand_tensor import OperandTensor
from fp8core.tensors.quantizer import Orientations, Slot
from fp8core.tensors.reduced_amax import ReduceAmax
from fp8core.tensors.storage import FLOATS, make_operands, matrix_shape

__all__ = ["assign", "refuse_part", "write"]


def write(
    tensor: OperandTensor,
    value: torch.Tensor,
    *,
    slot: Slot | None = None,
    reduce_amax: ReduceAmax | None = None,
) -> None:
    """Quantize ``value``, without a cast to the nominal dtype, into the operands of ``tensor``.

    ``slot`` holds the delayed scale, the tensor's own if None; ``reduce_amax`` reduces the amaxes
    that scales follow from, over all parts of a tensor of which ``value`` is one.

    Raises:
        UnsupportedError: scales cover more than the tensor, or its delayed scale is elsewhere.
    """
    refuse_part(tensor)
    if value.shape != tensor.shape:
        value = value.expand(tensor.shape)
    value = value.detach().to(tensor.device)
    if value.dtype not in FLOATS:
        value = value.to(torch.float32 if value.is_floating_point() else tensor.dtype)
    if value.dim() != 2:
        value = value.reshape(matrix_shape(value.shape))
    slot = tensor._slot if slot is None else slot
    if slot is None and tensor._lacks_slot:
        raise UnsupportedError(
            f"a write in a graph to {tensor}, whose scale a Float8Quantizer holds: the graph has "
            f"the operands alone. Write outside of torch.compile."
        )
    assign(tensor, make_operands(value, tensor.plan, slot=slot, reduce_amax=reduce_amax))


def assign(tensor: OperandTensor, operands: Orientations) -> None:
    """Copy ``operands``, which are stored alike, into those of ``tensor``.

    What both orientations share, such as the scale of all codes, is written once: a graph of
    torch.compile refuses to write an input twice.
    """
    written: set[int] = set()
    for target, source in zip(tensor.held, operands, strict=True):
        for part, new in zip(target or (), source or (), strict=False):
            if part is not None and id(part) not in written:
                written.add(id(part))
                part.copy_(new)
                # Backward may have saved it, and torch counts no write within __torch_dispatch__.
                if not part.is_inference():
                    torch.autograd.graph.increment_version(part)


def refuse_part(tensor: OperandTensor) -> None:
    """Refuse to write to a view whose scales cover more than it.

    Raises:
        UnsupportedError: they do.
    """
    if tensor._shares_scales:
        raise UnsupportedError(
            f"a write to a view of a QuantizedTensor, {tensor}, whose scale covers more than the "
            f"view: it would change the rest. Write to the whole: value = p.dequantize(), change "
            f"value, then p.copy_(value)."
        )
