"""What delayed scaling asks for besides casts: new scales from recorded amaxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["ScaleUpdateDesc"]


@dataclass(frozen=True, slots=True)
class ScaleUpdateDesc:
    """``scale_update(histories, scales, targets, nonfinite=()) -> None``: all modules at once.

    For every slot ``s`` of every state, ``histories[i] [length, slots]`` and ``scales[i] [slots]``
    in float32, updated in place: entry 0 of the history holds the newest amax, rows 1 to
    length - 1 the older ones, the oldest first. See numerics.md's table of DelayedScaling: the amax
    of the window is taken first, then the window rolls and entry 0 becomes 0; ``scale = target /
    amax``, unless amax is 0 or not finite (then nothing of that slot changes but entry 0).
    ``nonfinite[i]``, int64 ``[1]``, grows by the number of newest amaxes that are not finite; an
    empty sequence counts nothing.

    ``algorithm`` is ``"max"`` or ``"most_recent"``.
    """

    op: ClassVar[str] = "scale_update"
    low_precision: ClassVar[bool] = False
    algorithm: str

    def __str__(self) -> str:
        return f"ScaleUpdateDesc({self.algorithm})"
