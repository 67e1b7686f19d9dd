"""HiFloat8 (HiF8), the 8-bit float of Ascend 950: its values, and its casts in torch and numpy.

A code is a sign, a prefix ("dot") that says how many bits the exponent has, the exponent as sign
and magnitude without its leading 1, and the mantissa::

    S 11 EEEE M     exponents  8 to 15 and  -8 to -15, 1 bit of mantissa
    S 10 EEE MM     exponents  4 to  7 and  -4 to  -7, 2 bits
    S 01 EE MMM     exponents  2 and 3 and  -2 and -3, 3 bits
    S 001 E MMM     exponents  1 and -1,               3 bits
    S 0001 MMM      exponent   0,                      3 bits
    S 0000 MMM      without mantissa: 2^(MMM - 23); 0x00 is the only zero, 0x80 the only NaN

The codes 0x6f and 0xef, which would be the values beyond 2^15, are +inf and -inf. The spacing is
finest up to 15 and twice as wide up to 224, so recipes scale inputs and weights to 15 and gradients
to 224 instead of to the largest value, 2^15, where one bit of mantissa is left.

Source: Luo et al., "Ascend HiFloat8 Format for Deep Learning", arXiv 2409.16626, sections 2 and 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fp8core.errors import OperandError
from fp8core.formats import FormatSpec

_NAN, _INF = 0x80, 0x6F
# Prefix, bits of the exponent and of the mantissa.
_FIELDS = ((0b0001, 0, 3), (0b001, 1, 3), (0b01, 2, 3), (0b10, 3, 2), (0b11, 4, 1))
_OVERFLOW = 40960.0  # halfway from 2^15 to 1.5 * 2^15, whose code is that of inf

Overflow = Literal["saturate", "infinite"]


def _positive_values() -> Iterator[tuple[int, float]]:
    """Yield code and value of each code without the sign bit, but for zero and inf."""
    for code in range(1, 8):
        yield code, math.ldexp(1.0, code - 23)
    for prefix, exponent_bits, mantissa_bits in _FIELDS:
        for rest in range(2 ** (exponent_bits + mantissa_bits)):
            field, mantissa = divmod(rest, 2**mantissa_bits)
            exponent = 0
            if exponent_bits:  # sign, then the magnitude without its leading 1
                is_negative, low = divmod(field, 2 ** (exponent_bits - 1))
                magnitude = 2 ** (exponent_bits - 1) + low
                exponent = -magnitude if is_negative else magnitude
            significand = 2**mantissa_bits + mantissa
            value = math.ldexp(significand, exponent - mantissa_bits)
            yield prefix << (exponent_bits + mantissa_bits) | rest, value


def _values() -> tuple[float, ...]:
    positive = {0: 0.0, **dict(_positive_values()), _INF: math.inf}
    magnitudes = [positive[code] for code in range(128)]
    return (*magnitudes, math.nan, *(-value for value in magnitudes[1:]))


_TABLE = FormatSpec("hif8", 8, _values(), "away", None)
"""Rounding to the nearest value, by the rules that all formats share."""


def _encode(x: torch.Tensor, rounding: str) -> torch.Tensor:
    """Return the codes of float32 ``x``; what is beyond the largest value becomes that."""
    return _TABLE.encode(_round_hybrid(x) if rounding == "hybrid" else x)


HIF8 = FormatSpec(
    "hif8",
    8,
    _TABLE.values,
    "away",
    None,
    encoder=_encode,
    roundings=("nearest", "hybrid"),
    targets=(15.0, 224.0),
)
"""The format as recipes use it: ``Format.HIF8``.

``encode`` rounds to the nearest value, a midpoint away from zero (Huawei's "TA"), and saturates.
``encode(x, rounding="hybrid")`` is experimental, see :func:`encode`.

>>> HIF8.encode(torch.tensor([1.0625, 15.5, -0.0, 1e9, float("-inf"), float("nan")])).tolist()
[9, 64, 0, 110, 238, 128]
>>> HIF8.max, HIF8.target_fwd, HIF8.target_bwd
(32768.0, 15.0, 224.0)
"""


def encode(
    x: torch.Tensor, *, rounding: str = "nearest", overflow: Overflow = "saturate"
) -> torch.Tensor:
    """Return the uint8 codes of ``x``, float32, bfloat16 or float16 of any shape.

    ``overflow``: magnitudes that round beyond 2^15, which are those from 40960 on, inf included,
    become 2^15 (``"saturate"``, as all casts of recipes do) or inf (``"infinite"``). Which of them
    an Ascend 950 does by default is not verified.

    ``rounding="hybrid"`` is experimental: exponents of magnitude 4 and more, where there are few
    bits of mantissa, are rounded up if the first 14 discarded bits exceed the last 14 bits of the
    float32 mantissa, which stand in for random ones; other values are rounded to the nearest. This
    follows the paper's description and was compared with no device. It gives the same codes each
    time, values of the format stay as they are, and bfloat16, whose last bits are 0, is always
    rounded away from zero there.

    Raises:
        OperandError: x has another dtype, or ``overflow`` is neither name.
        UnsupportedError: there is no such rounding.

    >>> encode(torch.tensor([40959.0, 40960.0, -1e9]), overflow="infinite").tolist()
    [110, 111, 239]
    """
    if overflow not in ("saturate", "infinite"):
        raise OperandError(f"hif8.encode(overflow={overflow!r}): expected 'saturate' or 'infinite'")
    codes = HIF8.encode(x, rounding=rounding)
    if overflow == "saturate":
        return codes
    values = x.detach().to(torch.float32)
    values = _round_hybrid(values) if rounding == "hybrid" else values
    codes = codes.masked_fill(values >= _OVERFLOW, _INF)
    return codes.masked_fill(values <= -_OVERFLOW, _INF | 0x80)


def _round_hybrid(x: torch.Tensor) -> torch.Tensor:
    """Return float32 ``x`` where magnitudes of 16 and more, or below 1/8, are values of the format.

    Others, and those outside of the exponents of the format, are returned unchanged.
    """
    # bits:  s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm, of which the first 2, 1 or 0 m are kept
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    exponent = (magnitude >> 23) - 127
    distance = exponent.abs()
    bits_left = 2 - (distance > 7).int() - (distance > 15).int()
    discarded = 23 - bits_left
    fraction = magnitude & ((1 << discarded) - 1)
    is_up = (fraction >> (discarded - 14)) > (magnitude & 0x3FFF)
    rounded = ((magnitude >> discarded) + is_up) << discarded
    is_pseudo_random = (distance > 3) & (exponent >= -22) & (exponent <= 15)
    rounded = torch.where(is_pseudo_random, rounded, magnitude)
    return (rounded | (bits & -0x80000000)).view(torch.float32).reshape(x.shape)


@functools.cache
def _magnitudes() -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return the codes without the sign bit in the order of their values, inf as 1.5 * 2^15, and
    the midpoint of each and the next."""
    values = np.array(_TABLE.values[:128])
    values[_INF] = 1.5 * 2.0**15
    codes = np.argsort(values)
    ordered = values[codes]
    return codes.astype(np.uint8), (ordered[:-1] + ordered[1:]) / 2


def encode_numpy(x: NDArray[Any], *, overflow: Overflow = "saturate") -> NDArray[np.uint8]:
    """Return the codes of a numpy array of floats, nearest, of its shape; see :func:`encode`.

    float64 is rounded once. A search in the sorted values, apart from torch's way.

    >>> encode_numpy(np.array([1.0625, -40960.0, np.nan])).tolist()
    [9, 238, 128]
    """
    if overflow not in ("saturate", "infinite"):
        raise OperandError(f"encode_numpy(overflow={overflow!r}): 'saturate' or 'infinite'")
    codes, midpoints = _magnitudes()
    with np.errstate(invalid="ignore"):  # numpy warns of signaling NaN
        values = np.asarray(x).astype(np.float64)
    magnitudes = codes[np.searchsorted(midpoints, np.abs(values), side="right")]
    if overflow == "saturate":
        magnitudes = np.where(magnitudes == _INF, np.uint8(_INF - 1), magnitudes)
    is_negative = (values < 0) & (magnitudes != 0)  # there is no -0
    signed = magnitudes | np.where(is_negative, np.uint8(0x80), np.uint8(0))
    encoded: NDArray[np.uint8] = np.where(np.isnan(values), np.uint8(_NAN), signed)
    return encoded


def decode_numpy(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of uint8 codes as float32, of their shape.

    >>> decode_numpy(np.array([0x08, 0x6E, 0x6F, 0x80], np.uint8)).tolist()
    [1.0, 32768.0, inf, nan]
    """
    return np.array(_TABLE.values, np.float32)[codes]
