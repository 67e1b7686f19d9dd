"""How codes become values and values codes, given the list of a format's values."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from fractions import Fraction

import torch

# --- decode fast paths ---


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of uint8 codes of e4m3 as float32, of the same shape."""
    # fp16 has the same kind of exponent field, one bit wider, and a bias larger by 8:
    #   code, sign extended:     ssssssss seeeemmm
    #   shifted left by 7:       sseeeemm m0000000
    #   bit 14 cleared:          s0eeeemm m0000000   = value / 2^8 in fp16, subnormals included
    # NaN is the code with e and m all ones, the only one where adding 1 to m carries into bit 14:
    #   0x7f:                    00111111 10000000   + 0x80 = 01000000 00000000
    #   with that bit or-ed in:  01111111 10000000   = NaN in fp16
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    half.bitwise_and_(~0x4000)
    half.bitwise_or_((half + 0x80).bitwise_and_(0x4000))
    return half.view(torch.float16).to(torch.float32).mul_(256.0)


def decode_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of uint8 codes of e5m2 as float32, of the same shape."""
    # e5m2 is the upper byte of an fp16:  seeeeemm -> seeeeemm 00000000
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(8)
    return half.view(torch.float16).to(torch.float32)


# --- encode and decode by table ---
#
# A float32 and its "key": an int32 that orders like the number, with -0 < +0 and NaN at the ends.
#   bits >= 0: key = bits;   bits < 0: key = bits ^ 0x7fffffff
#   -NaN < -inf < ... < -0 (-1) < +0 (0) < ... < +inf (0x7f800000) < +NaN
# So one search over integer thresholds handles sign, zeros, inf and NaN by one rule.


def to_float32(value: float) -> float:
    """Return ``value`` rounded to float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _key(value: float) -> int:
    bits = int(struct.unpack("<i", struct.pack("<f", value))[0])
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _nan_code(values: tuple[float, ...], sign: float) -> int:
    """The largest NaN code of this sign, else of any sign, else the code of the largest value."""
    nans = [code for code, v in enumerate(values) if math.isnan(v)]
    signed = [code for code in nans if math.copysign(1.0, values[code]) == sign]
    return max(signed or nans or [values.index(max(filter(math.isfinite, values)))])


@functools.lru_cache(maxsize=64)
def _thresholds(
    values: tuple[float, ...], ties: str
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Keys t and codes c such that x has code c[i] where t[i-1] < key(x) <= t[i].

    Also whether every midpoint is a bfloat16 with an even last bit (see `encode_by_table`).
    """
    # -0.0 == 0.0, so the key tells them apart; of several codes of one value the first is used
    codes = {_key(v): c for c, v in reversed(list(enumerate(values))) if math.isfinite(v)}
    ordered = [codes[key] for key in sorted(codes)]
    keys = [_key(-math.inf) - 1]
    in_bfloat16 = True
    for low, high in itertools.pairwise(ordered):
        middle = (Fraction(values[low]) + Fraction(values[high])) / 2
        rounded = to_float32(float(middle))  # at most one float32 off
        if middle == 0:
            tie_goes_up = math.copysign(1.0, values[low]) < 0.0
        elif ties == "even":
            tie_goes_up = high % 2 == 0
        else:
            tie_goes_up = abs(values[high]) > abs(values[low])
        # t is the last key of the lower bucket
        is_above = rounded > middle or (rounded == middle and tie_goes_up)
        keys.append(_key(rounded) - int(is_above))
        in_bfloat16 &= rounded == middle and _key(abs(rounded)) & 0x1FFFF == 0
    keys.append(_key(math.inf))
    bucket_codes = (_nan_code(values, -1.0), *ordered, _nan_code(values, 1.0))
    return tuple(keys), bucket_codes, in_bfloat16


def _search(values: tuple[float, ...], ties: str, bits: torch.Tensor) -> torch.Tensor:
    """Codes of the float32 whose bits are the 1-d int32 `bits`."""
    keys, codes, _ = _thresholds(values, ties)
    bounds = torch.tensor(keys, dtype=torch.int32, device=bits.device)
    x_keys = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    bucket = torch.bucketize(x_keys, bounds, out_int32=True)
    return torch.tensor(codes, dtype=torch.uint8, device=bits.device).index_select(0, bucket)


@functools.lru_cache(maxsize=64)
def _bfloat16_codes(values: tuple[float, ...], ties: str, device: torch.device) -> torch.Tensor:
    """Code of every bfloat16, indexed by its bits [65536] uint8."""
    return _search(values, ties, torch.arange(2**16, dtype=torch.int32, device=device) << 16)


@functools.lru_cache(maxsize=64)
def value_table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Value of every byte [256] float32, NaN where the byte is no code."""
    padded = values + (math.nan,) * (256 - len(values))
    return torch.tensor(padded, dtype=torch.float32, device=device)


def encode_by_table(values: tuple[float, ...], ties: str, x: torch.Tensor) -> torch.Tensor:
    """Codes of float32 x, from the values alone: the judge of the fast paths."""
    bits = x.reshape(-1).view(torch.int32)
    *_, in_bfloat16 = _thresholds(values, ties)
    if not in_bfloat16:
        return _search(values, ties, bits).reshape(x.shape)
    # Round to odd in bfloat16, then look it up: 20 times faster on CPU than searching. It loses
    # nothing: with all midpoints at even bfloat16, the x between two of these share a code.
    #   bits:                       seeeeeee emmmmmmm nnnnnnnn nnnnnnnn
    #   low half + 0xffff:          00000000 0000000o ........ ........   o = 1 unless n is all 0
    #   or-ed with bits, >> 16:     ........ ........ seeeeeee emmmmmm(m|o)
    odd = (bits & 0xFFFF).add_(0xFFFF).bitwise_or_(bits)
    index = odd.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    # Tables that are tensor subclasses (fake tensors while tracing) must not outlive their mode.
    build = _bfloat16_codes if type(x) is torch.Tensor else _bfloat16_codes.__wrapped__
    return build(values, ties, x.device).index_select(0, index).reshape(x.shape)


# --- e8m0 ---


def encode_e8m0(x: torch.Tensor, rounding: str) -> torch.Tensor:
    """Exponent codes c, meaning 2^(c-127), of positive finite float32 x [any].

    "up": smallest power of two >= x. "down": largest <= x. "nearest": a midpoint 1.5 * 2^e goes up;
    between 2^-127 and 2^-126 everything above 2^-127 goes up, as in ml_dtypes and torch.
    Edge values: below 2^-127, and +-0, give code 0; above 2^127, and +inf, give 254 (saturated);
    NaN gives 255 and so does x < 0, which has no code.
    Source: OCP MX v1.0 sec. 5.4.1; rounding "up" is PTX `cvt.rp.satfinite.ue8m0x2`.
    """
    # bits of positive x:  0eeeeeee emmmmmmm mmmmmmmm mmmmmmmm
    # c is the exponent field after adding a number by which the mantissa m carries into it:
    #   up: m > 0 carries;  nearest: m >= 0x400000 carries;  down: nothing carries.
    # At e = 0, 2^-127 itself is the subnormal m = 0x400000: there only m > 0x400000 carries.
    bits = x.view(torch.int32) & 0x7FFFFFFF
    if rounding != "down":
        carry = 0x7FFFFF if rounding == "up" else 0x400000
        subnormal = (bits < 0x800000).int()
        bits = (bits + carry).sub_(subnormal, alpha=carry - 0x3FFFFF)
    codes = (bits >> 23).clamp_(max=254)
    return codes.masked_fill_(x.isnan() | (x < 0), 255).to(torch.uint8)
