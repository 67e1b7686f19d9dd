"""How the operands of a linear travel where several ranks have their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.chain.linear.spec import LinearSpec
from fp8core.chain.shape import BindContext
from fp8core.chain.shards import GemmPart, SentCast, Shards
from fp8core.collectives import Communicator
from fp8core.dispatch.table import Resolved
from fp8core.tensors.quantizer_binding import MaximumOverShards, bind_quantizer


class Parts(NamedTuple):
    """What computes some rows of fprop and of dgrad: see
    :class:`~fp8core.chain.linear.operations.LinearOperations`."""

    fprop_part: GemmPart | None = None
    dgrad_part: GemmPart | None = None
    dgrad_rows: GemmPart | None = None


def bind_parts(gemms: dict[str, Resolved], context: BindContext, *, is_left: bool) -> Parts:
    """Return what computes some rows of a product, where ranks beside the link have parts of the
    rows, and where others are cast meanwhile. ``is_left``: the products are torch's to
    differentiate, and are whole; so are those that are watched."""
    if is_left or context.watch is not None:
        return Parts()
    neighbours = [one.shape for one in (context.before, context.after) if one is not None]
    has_movers = any(one.movement is not None for one in neighbours)
    reads_rows = context.before is not None and context.before.shape.reads_grad_rows
    fprop, dgrad = (gemms[name].offers.gemm_part for name in ("fprop", "dgrad"))
    return Parts(
        fprop_part=fprop if has_movers else None,
        dgrad_part=dgrad if has_movers or reads_rows else None,
        dgrad_rows=dgrad,
    )


def bind_shards(
    shape: LinearSpec, context: BindContext, tensor: str, gemm_part: GemmPart | None
) -> Shards | None:
    """Return how ``tensor`` travels quantized if each rank has some of its rows; None: it does not.

    A bias is summed over all rows, and an input that is cast again is held as it came: both need
    the whole tensor. So does a quantizer object, of which nobody knows what its scales cover.
    """
    is_input = tensor == "input"
    communicator = context.input_shards if is_input else context.grad_shards
    needs_whole = shape.saves_input if is_input else shape.bias_dtype is not None
    if communicator is None or needs_whole or tensor in dict(context.plan.makers):
        return None
    plan = context.gemm_plan
    is_decoded = is_input and plan.dequantizes and plan.input.columnwise is None
    transfers = context.transfers(communicator)
    return Shards(
        communicator,
        plan.tensors[tensor],
        tensor,
        is_input,
        is_decoded,
        transfers,
        in_parts=transfers is not None and gemm_part is not None,
    )


def bind_sent(
    shape: LinearSpec,
    context: BindContext,
    tensor: str,
    dtype: torch.dtype,
) -> SentCast | None:
    """Return how ``tensor`` is cast before its rows are exchanged; None: they travel as they are.

    As in :func:`bind_shards`, a bias and an input that is cast again need rows in high precision.
    """
    is_input, plan = tensor == "input", context.gemm_plan
    communicator = context.input_exchange if is_input else context.grad_exchange
    needs_rows = shape.saves_input if is_input else shape.bias_dtype is not None
    if communicator is None or needs_rows or tensor in dict(plan.makers) or plan.dequantizes:
        return None
    specs = plan.tensors[tensor]
    # Delayed scales of an expert are on its rank alone.
    if plan.nonfinite == "propagate" or None in specs or specs.is_delayed:
        return None
    quantizer = bind_quantizer(
        specs,
        dtype,
        context.binding,
        purpose=context.purpose(tensor),
        grouped=True,
        nonfinite=context.nonfinite,
        reduce_amax=amax_reduction(communicator, context),
    )
    return SentCast(communicator, specs, quantizer, tensor)


def amax_reduction(
    communicator: Communicator | None, context: BindContext
) -> MaximumOverShards | None:
    """Return what reduces the amaxes of a tensor whose rows are on several ranks."""
    if communicator is None:
        return None
    maximum = getattr(context.transfers(communicator), "maximum", None)

    def largest(amaxes: torch.Tensor) -> torch.Tensor:
        return communicator.max(amaxes, "amax", maximum, at_once=True).wait()

    return MaximumOverShards(largest)
