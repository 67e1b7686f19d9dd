"""Transformer Engine's mask types as one mask: a window, a diagonal, and where lengths come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fp8core.errors import OperandError, did_you_mean

__all__ = ["MASK_TYPES", "UNLIMITED", "Mask", "MaskType", "mask_of", "mask_type_of"]

Window = tuple[int, int]
UNLIMITED: Window = (-1, -1)


class MaskType(NamedTuple):
    """What the name of a mask type stands for; ``bottom_right`` None leaves it to the argument
    ``bottom_right_diagonal``."""

    causal: bool = False
    padding: bool = False
    arbitrary: bool = False
    bottom_right: bool | None = None


MASK_TYPES: Mapping[str, MaskType] = {
    "no_mask": MaskType(),
    "padding": MaskType(padding=True),
    "causal": MaskType(causal=True, bottom_right=False),
    "padding_causal": MaskType(causal=True, padding=True, bottom_right=False),
    "causal_bottom_right": MaskType(causal=True, bottom_right=True),
    "padding_causal_bottom_right": MaskType(causal=True, padding=True, bottom_right=True),
    "arbitrary": MaskType(arbitrary=True),
}
"""Transformer Engine's names; ``"padding,causal"`` and ``"causal,padding"`` are also read."""

_OTHER_NAMES = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}


class Mask(NamedTuple):
    """The mask of a call, as :class:`~fp8core.backend_api.AttentionDesc` has it."""

    window: Window
    bottom_right: bool
    padding: bool
    arbitrary: bool


def mask_type_of(owner: object, name: str) -> str:
    """Return the name of a mask type in the spelling of :data:`MASK_TYPES`.

    Raises:
        OperandError: there is no such mask type.
    """
    known = _OTHER_NAMES.get(name, name) if isinstance(name, str) else None
    if known is None or known not in MASK_TYPES:
        raise OperandError(
            f"{owner}: attn_mask_type={name!r}; expected one of {', '.join(MASK_TYPES)}."
            f"{did_you_mean(str(name), MASK_TYPES)}"
        )
    return known


def mask_of(
    owner: object, name: str, window: Window | None, bottom_right: bool | None, *, has_alibi: bool
) -> Mask:
    """Return the mask of a type, a window and a diagonal.

    The diagonal of ``bottom_right`` None is at the bottom right, as Transformer Engine has it, and
    where neither window nor ALiBi reads it, it is False.

    Raises:
        OperandError: no such window, or one that contradicts the mask type.
    """
    kind = MASK_TYPES[name]
    left, right = _checked_window(owner, window)
    if kind.arbitrary and (left, right) != UNLIMITED:
        raise OperandError(
            f"{owner}: window_size={(left, right)} with attn_mask_type='arbitrary'. Put the window "
            f"into attention_mask, or use the window with another mask type."
        )
    if not kind.causal and (left, right) == (-1, 0):
        raise OperandError(
            f"{owner}: window_size=(-1, 0), which is causal, with attn_mask_type={name!r}. Ask for "
            f"'causal_bottom_right' (or 'padding_causal_bottom_right'), or for no window: (-1, -1)."
        )
    if kind.causal:
        right = 0
    diagonal = kind.bottom_right if kind.bottom_right is not None else bottom_right in (None, True)
    reads_diagonal = has_alibi or (left, right) != UNLIMITED
    return Mask((left, right), diagonal and reads_diagonal, kind.padding, kind.arbitrary)


def _checked_window(owner: object, window: Window | None) -> Window:
    if window is None:
        return UNLIMITED
    sides = list(window) if isinstance(window, tuple | list) else []
    if len(sides) != 2 or any(type(side) is not int or side < -1 for side in sides):
        raise OperandError(
            f"{owner}: window_size={window!r}; expected (left, right), the numbers of keys that a "
            f"query sees before and behind its own position, -1 for no limit."
        )
    return sides[0], sides[1]
