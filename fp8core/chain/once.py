"""What keeps torch's own operators from taking a link's place, so that it serves one backward."""

from __future__ import annotations

from typing import NamedTuple

from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import LinearPlan
from fp8core.tensors.quantizer import Binding

__all__ = ["COMPUTED_AS_ONE", "OnlyOnce", "in_low_precision", "linear_only_once"]


class OnlyOnce(NamedTuple):
    """Why a link serves one backward pass and nothing else: no transform, no second derivative.

    ``owner`` is what messages call its layer, ``state`` what keeps torch's operators from taking
    its place, ``remedy`` what the user can do.
    """

    owner: str
    state: str
    remedy: str

    def error(self, asked: str) -> UnsupportedError:
        """Return what to raise where ``asked``, a transform by its name, meets the link."""
        return UnsupportedError(f"{self.owner}: {asked} is not offered {self.state}. {self.remedy}")


_HIGH_PRECISION = (
    "Call it inside fp8core.autocast(enabled=False), where it computes with torch's own operators."
)


def in_low_precision(owner: str) -> OnlyOnce:
    """Return it for a link whose recipe rounds: rounding has no derivative to go on with."""
    return OnlyOnce(owner, "in low precision", _HIGH_PRECISION)


def linear_only_once(
    accumulates: bool, plan: LinearPlan, binding: Binding, owner: str
) -> OnlyOnce | None:
    """Return it for a linear of ``plan``; ``accumulates`` as in LinearShape."""
    if binding.is_observing:
        return OnlyOnce(owner, "while it calibrates", _HIGH_PRECISION)
    if accumulates:
        remedy = "Make the layer with fuse_wgrad_accumulation=False."
        return OnlyOnce(owner, "with fuse_wgrad_accumulation=True", remedy)
    return None if plan.is_high_precision else in_low_precision(owner)


COMPUTED_AS_ONE = OnlyOnce(
    "a layer in high precision",
    "where its backend pads, or adds and normalizes at once",
    'Choose one that does neither: fp8core.use_backend("reference").',
)
"""What was saved are tensors of the backend's own making, which no history leads to."""
