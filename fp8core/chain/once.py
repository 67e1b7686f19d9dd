"""Why a link supports first derivatives only: torch's operators may not replace it."""

from __future__ import annotations

from typing import NamedTuple

from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import LinearPlan
from fp8core.tensors.quantizer_binding import Binding


class OnlyOnce(NamedTuple):
    """Why a link has first derivatives only: no transform and no second derivative.

    ``owner`` names its layer in messages, ``state`` says in which state of the layer this holds,
    ``remedy`` what the user can do.
    """

    owner: str
    state: str
    remedy: str

    def error(self, name: str) -> UnsupportedError:
        """Return the error about the transform or derivative called ``name``."""
        return UnsupportedError(f"{self.owner}: {name} is not offered {self.state}. {self.remedy}")


_HIGH_PRECISION = (
    "Call it inside fp8core.autocast(enabled=False), where it computes with torch's operators."
)


def in_low_precision(owner: str) -> OnlyOnce:
    """Return the reason of a link whose recipe rounds: rounding has no useful derivative."""
    return OnlyOnce(owner, "in low precision", _HIGH_PRECISION)


def over_ranks(owner: str) -> OnlyOnce:
    """Return the reason of a link in a chain with collectives, which have no second derivative."""
    remedy = "Compute that derivative with a layer of one rank (tp_size=1)."
    return OnlyOnce(owner, "over several ranks", remedy)


def linear_only_once(
    plan: LinearPlan,
    binding: Binding,
    owner: str,
    *,
    accumulates: bool,
    delays_wgrad: bool,
    is_parallel: bool,
) -> OnlyOnce | None:
    """Return the reason of a linear of ``plan``, None if there is none.

    ``accumulates`` and ``delays_wgrad`` are as in :class:`~fp8core.chain.linear.shape.LinearShape`;
    ``is_parallel``: its chain has collectives.
    """
    if is_parallel:
        return over_ranks(owner)
    if binding.is_observing:
        return OnlyOnce(owner, "while it calibrates", _HIGH_PRECISION)
    if accumulates:
        remedy = "Make the layer with fuse_wgrad_accumulation=False."
        return OnlyOnce(owner, "with fuse_wgrad_accumulation=True", remedy)
    if delays_wgrad:
        remedy = "Make the layer with delay_wgrad_compute=False."
        return OnlyOnce(owner, "with delay_wgrad_compute=True", remedy)
    return None if plan.is_high_precision else in_low_precision(owner)


COMPUTED_TOGETHER = OnlyOnce(
    "a layer in high precision",
    "where its backend pads, or adds and normalizes at once",
    'Choose one that does neither: fp8core.use_backend("reference").',
)
"""The saved tensors are copies that the backend returned, without a history."""
