"""What a rank sends in a step of a layer that is spread over several, without sending anything.

The layer's own chain runs forward and backward on meta tensors, and its communicators count.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from fp8core.collectives import Communicator, Traffic
from fp8core.inspection.on_meta import ROWS, MetaChain
from fp8core.modules.agreement import communicators_of
from fp8core.modules.base import LowPrecisionModule
from fp8core.recipe import Recipe

__all__ = ["Sent", "sent_by"]


class Sent(NamedTuple):
    """One kind of collective of a layer, forward and backward.

    Attributes:
        collective: gather, scatter, sum, max or exchange.
        tensor: what travels: ``input``, ``input scales``, ``input again`` in backward, ``output``,
            ``grad_output``, ``grad_input``, ``amax``.
        group: the name of the process group, and ``ranks`` how many there are.
        format: how the tensor is quantized, or its dtype.
        calls: how often it is called in a step.
        a_row: bytes that a rank sends for each row of its input, in calls whose rows are whole
            blocks on each rank; others may send a tensor in high precision.
        fixed: bytes that it sends whatever the number of rows.
        way: how it runs: ``plain``, a collective of the process group; ``beside products``, copies
            by the backend; ``in parts``, such copies while the product that reads or writes the
            tensor computes other rows; ``read by each rank``, numbers that the backend reads from
            the memory of other ranks.
    """

    collective: str
    tensor: str
    group: str
    ranks: int
    format: str
    calls: int
    a_row: float
    fixed: int
    way: str = "plain"

    def __str__(self) -> str:
        sizes = [f"{self.a_row:,.2f} bytes a row"] if self.a_row else []
        sizes += [f"{self.fixed:,} bytes a step"] if self.fixed or not sizes else []
        return (
            f"{self.collective} of {self.tensor} over {self.ranks} ranks of group {self.group!r}: "
            f"{self.format}, sends {' and '.join(sizes)}, {self.way}"
        )


def sent_by(
    layer: LowPrecisionModule, recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> list[Sent]:
    """Return what a rank sends in a step of ``layer`` under ``recipe``, with all gradients.

    Empty for a layer of one rank, and for one whose input has no known size.

    Raises:
        UnsupportedError: no backend runs one of the layer's operations on the device.
    """
    communicators = communicators_of(layer.link_shapes())
    if not communicators or not MetaChain.can_run(layer):
        return []
    meta = MetaChain(layer, recipe, device, dtype)
    few, many = (_counted(meta, communicators, rows) for rows in (ROWS, 2 * ROWS))
    return [
        Sent(
            collective,
            tensor,
            communicator.group_name,
            communicator.size,
            _format(meta, tensor),
            calls,
            (many[at][collective, tensor].bytes - sent) / ROWS,
            2 * sent - many[at][collective, tensor].bytes,
            few[at].way(collective, tensor),
        )
        for at, communicator in enumerate(communicators)
        for (collective, tensor), (calls, sent) in few[at]
    ]


def _counted(meta: MetaChain, communicators: list[Communicator], rows: int) -> list[Traffic]:
    with contextlib.ExitStack() as stack:
        counts = [stack.enter_context(one.counting()) for one in communicators]
        forward, _ = stack.enter_context(meta.forward(rows))
        y = forward()
        torch.autograd.backward((y,), (torch.empty_like(y),))
        return counts


def _format(meta: MetaChain, tensor: str) -> str:
    """Return how ``tensor`` is quantized, or the dtype in which it travels."""
    name, *rest = tensor.split()
    if name == "amax" or rest[-1:] == ["scales"]:
        return "scales" if rest else "float32"
    plan = meta.plan.tensors.get(name)
    spec = None if plan is None else plan.columnwise if "again" in rest else plan.rowwise
    return str(meta.dtype).removeprefix("torch.") if spec is None else str(spec)
