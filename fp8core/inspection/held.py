"""How many bytes a layer holds from forward to backward, without computing anything.

The layer's own chain runs on meta tensors, which have shapes and no values, and every tensor that
autograd saves is counted. Nothing here knows what a link saves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.inspection.on_meta import ROWS, MetaChain
from fp8core.modules.base import LowPrecisionModule
from fp8core.recipe import Recipe

__all__ = ["Held", "held_by"]


class Held(NamedTuple):
    """Bytes that a layer holds from its forward to its backward, which computes the gradients of
    its input and of the parameters that require one.

    Attributes:
        a_row: for each row of the input: activations, their codes and statistics. The input itself
            is among them where backward reads it. A call of other rows than whole blocks holds
            more: where it is padded, as under MXFP8 to a multiple of 32 rows, the operands of a
            product have the zero rows too, and a block that is not full has a whole scale.
        fixed: whatever the number of rows: the copies of the weights, and weights that forward
            computes from parameters. Parameters are not counted.

    Of grouped layers, scales of blocks count as for the groups that have the most of them.
    """

    a_row: float
    fixed: int

    def __str__(self) -> str:
        return (
            f"holds {self.a_row:,.0f} bytes a row from forward to backward, and "
            f"{self.fixed / 2**20:,.1f} MiB of weights' copies"
        )


def held_by(
    layer: LowPrecisionModule, recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> Held | None:
    """Return what ``layer`` holds on ``device`` under ``recipe``, on activations of ``dtype``; None
    if it takes any number of columns, on which that depends, or runs other modules between its
    chains.

    Raises:
        UnsupportedError: no backend runs one of the layer's operations on the device.
    """
    if not MetaChain.can_run(layer):
        return None
    meta = MetaChain(layer, recipe, device, dtype)
    few, many = (_bytes(meta, rows) for rows in (ROWS, 2 * ROWS))
    return Held((many - few) / ROWS, 2 * few - many)


def _bytes(meta: MetaChain, rows: int) -> int:
    """Return the bytes of the storages that autograd saves in one forward of ``rows`` rows."""
    with meta.forward(rows) as (forward, own):
        # By identity: torch has one object for each storage as long as somebody holds it.
        counted = {id(param.untyped_storage()): param.untyped_storage() for param in own}
        num_own = len(counted)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            counted[id(storage)] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward()
        return sum(storage.nbytes() for storage in list(counted.values())[num_own:])
