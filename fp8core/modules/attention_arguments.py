"""Checks of the arguments of attention that are numbers and names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.attention_inputs import Heads
from fp8core.modules.parameters import check_size, is_number

__all__ = [
    "checked_choice",
    "checked_heads",
    "checked_scale",
    "checked_softcap",
    "refuse_given",
]


def refuse_given(owner: object, **arguments: object) -> None:
    """Raise for the first argument that is not None: these are not offered."""
    for name, value in arguments.items():
        if value is not None:
            shown = repr(value) if isinstance(value, bool | int) else type(value).__name__
            raise UnsupportedError(f"{owner}: {name}={shown} is not offered; leave it out.")


def checked_heads(
    owner: str, heads: int, groups: int | None, channels: int | tuple[int, int]
) -> Heads:
    """Return the heads, their groups, and the sizes of a key's and a value's head."""
    pair = channels if isinstance(channels, tuple | list) else (channels, channels)
    if len(pair) != 2:
        raise OperandError(
            f"{owner}(kv_channels={channels!r}): expected a size, or those of a key's and a "
            f"value's head."
        )
    sizes = [check_size(owner, "kv_channels", size) for size in pair]
    heads = check_size(owner, "num_attention_heads", heads)
    groups = heads if groups is None else check_size(owner, "num_gqa_groups", groups)
    if heads % groups:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise OperandError(
            f"{owner}(num_attention_heads={heads}, num_gqa_groups={groups}): the heads are no "
            f"multiple of the groups; expected one of {', '.join(divisors)} groups."
        )
    return Heads(heads, groups, *sizes)


def checked_scale(owner: object, scale: float | None, head_dim: int) -> float:
    """Return the factor of the logits; by default 1 over the root of a head's size."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not is_number(scale) or not math.isfinite(scale):
        raise OperandError(f"{owner}(softmax_scale={scale!r}): expected a finite number, or None.")
    return float(scale)


def checked_softcap(owner: object, softcap: float) -> float:
    """Return the cap of the logits, 0 for none."""
    if not is_number(softcap) or not 0 <= softcap < math.inf:
        raise OperandError(f"{owner}: softcap={softcap!r}; expected a finite number, 0 for none.")
    return float(softcap)


def checked_choice(owner: object, name: str, value: str, known: Sequence[str]) -> str:
    """Return ``value``, one of ``known``."""
    if value not in known:
        raise OperandError(
            f"{owner}({name}={value!r}): expected one of {', '.join(map(repr, known))}."
        )
    return value
