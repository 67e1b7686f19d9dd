"""Which recomputes in backward a layer allows: those that repeat their forward exactly.

``fp8core.checkpoint`` records what its forward ran and needs no check here. Other checkpoints run
the forward again inside backward, where the recipe or the delayed scales may have changed since.
"""

from __future__ import annotations

import torch

from fp8core.context import timeline
from fp8core.context.autocast import Active, active_before
from fp8core.errors import UnsupportedError
from fp8core.modules.base import LowPrecisionModule
from fp8core.tensors.scaling import DelayedState, is_of_two_forwards, offered_scale

__all__ = ["check_scales", "is_recompute"]


def is_recompute(layer: LowPrecisionModule, asked: Active) -> bool:
    """Say whether the call of ``layer`` that runs inside backward repeats a forward.

    ``asked`` is what is active now. The call is not one of :func:`fp8core.checkpoint`.

    Raises:
        UnsupportedError: it repeats a forward that ran, or may have run, under another recipe.
    """
    repeated = timeline.recompute()
    if not (torch.is_grad_enabled() or repeated.is_asked_for):
        return False  # a hook evaluates something
    if timeline.is_entered_in_backward():
        return True
    now = (asked.quantize, asked.observe)
    if active_before(repeated, layer.outside_autocast) == {now}:
        return True
    if now == (None, None):
        raise UnsupportedError(
            f"{layer.label} is recomputed in backward outside the autocast it ran in. Use "
            f"fp8core.checkpoint, or enter autocast inside the checkpointed function."
        )
    raise UnsupportedError(
        f"{layer.label} is recomputed in backward under another recipe than it ran with. "
        f"Use fp8core.checkpoint, which keeps the recipe."
    )


def check_scales(layer: LowPrecisionModule, state: DelayedState) -> None:
    """Refuse a recompute whose delayed scales may differ from those of its forward.

    Raises:
        UnsupportedError: the scales of the forward are not known in this backward pass.
    """
    if offered_scale(state) is not None:
        return
    if is_of_two_forwards(state):
        raise UnsupportedError(
            f"{layer.label} is recomputed in a backward pass over two forwards of the model, "
            f"each with delayed scales of its own, and torch does not say which of them it "
            f"repeats. Run backward after each forward, or use fp8core.checkpoint, which keeps "
            f"the scales."
        )
    raise UnsupportedError(
        f"{layer.label} is recomputed in backward under delayed scaling, whose scales have "
        f"moved on since. Use fp8core.checkpoint, which keeps them, or, in a model that "
        f"fp8core.convert gave the recipe, use_reentrant=False."
    )
