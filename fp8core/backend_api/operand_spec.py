"""How one operand of a product is quantized: a value, which is legal or cannot be constructed.

Descriptors print the fields without a default, then those that differ from theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core import formats
from fp8core.errors import RecipeError

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
"""The targets that are not printed. A table, so that printing does not load plug-ins."""


def text(desc: Any, *words: str) -> str:
    """Return ``Name(word, ..., flag, field=value)``; the words are the fields without a default,
    and the dtype.
    """
    return f"{type(desc).__name__}({', '.join([*words, *_unusual(desc, 'dtype')])})"


def plain_text(desc: Any) -> str:
    """Return the :func:`text` whose words are the fields without a default, as they print."""
    values = [getattr(desc, part.name) for part in fields(desc) if part.default is MISSING]
    return text(desc, *(dtype_text(v) if isinstance(v, torch.dtype) else str(v) for v in values))


def spec_text(spec: Any) -> str:
    """Return the text of an OperandSpec: ``e4m3 block=(1,32) e8m0``."""
    words = [spec.format, f"block={spec.block}".replace(" ", "")]
    words += [spec.scale_format] if spec.scale_format != "float32" else []
    words += [f"target={spec.target}"] if spec.target != _LARGEST.get(spec.format) else []
    return " ".join([*words, *_unusual(spec, "scale_format")])


def dtype_text(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _unusual(desc: Any, *told: str) -> list[str]:
    """Return the fields that differ from their default, without the ``told`` ones; a flag as its
    name."""
    values = [(field.name, getattr(desc, field.name), field.default) for field in fields(desc)]
    return [
        name if value is True else f"{name}={value}"
        for name, value, default in values
        if name not in told and default is not MISSING and value != default
    ]


class Operand(NamedTuple):
    """An operand ``[rows, k]`` of a GEMM: flat plain tensors, so that autograd can save them.

    Quantized, ``data`` is uint8: ``[rows, k]`` codes, or ``[rows, k / 2]`` for a 4-bit format,
    where element ``2 i`` is in the low half of byte ``i``. ``scale_inv`` is ``[ceil(rows / br),
    ceil(k / bk)]`` in float32, or uint8 codes of the scale format. ``global_scale_inv`` is
    float32 for two-level scales, ``[1, 1]``, or ``[rows, 1]`` if they are ``row_scaled``, else
    None. ``fp8core.backend_api.descriptors`` says how
    the operands of several groups are stored as one.

    In high precision (a descriptor's spec is None), ``data`` is the tensor itself, without scales.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor | None = None
    global_scale_inv: torch.Tensor | None = None


def codes_per_byte(spec: OperandSpec) -> int:
    """Return the number of codes in a byte of ``data``: 2 for a 4-bit format, else 1."""
    return 8 // formats.by_name(spec.format).bits


class Quantized(NamedTuple):
    """The orientations of one tensor ``x [rows, cols]`` that were asked for, None for the other.

    ``rowwise`` has the shape of ``x``, ``columnwise`` that of ``x.T``.
    """

    rowwise: Operand | None
    columnwise: Operand | None


def scale_inverses(spec: OperandSpec, operand: Operand) -> torch.Tensor:
    """Return the factor of each block of ``operand``, float32, both levels multiplied.

    ``value = decode(data) * factor``; the shape is that of ``operand.scale_inv``.
    """
    assert operand.scale_inv is not None
    scale_inv = operand.scale_inv
    if spec.scale_format != "float32":
        scale_inv = formats.by_name(spec.scale_format).decode(scale_inv)
    if operand.global_scale_inv is not None:
        scale_inv = scale_inv * operand.global_scale_inv
    return scale_inv


_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs of the transform. Source: docs/numerics.md 3.5, RHT."""


_NO_SIGNS = (1,) * 16


@functools.lru_cache(maxsize=16)
def _signs(device: torch.device, signs: tuple[int, ...]) -> torch.Tensor:
    """Return the signs divided by 16, so that no sum of 16 bfloat16 numbers overflows. Dividing
    changes no rounding: multiples of 2^-133 keep 16 bits down to the last of float32."""
    sixteenths = [sign / 16 for sign in signs]
    return torch.tensor(sixteenths, dtype=torch.float32, device="cpu").to(device)


def hadamard16(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Transform every 16 elements along ``dim`` by ``diag(signs) H / 4``; bf16 in and out.

    The matrix is orthogonal, so a GEMM over two operands transformed along k is unchanged but for
    rounding. Sums are float32, of two at a time in a fixed order, so that every device computes the
    same bits; inf is a result beyond bfloat16 alone. Source: docs/numerics.md, NVFP4BlockScaling.
    """
    return _transformed(x, dim, _SIGNS)


def hadamard16_unsigned(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Transform as :func:`hadamard16` does, by ``H / 4`` alone."""
    return _transformed(x, dim, _NO_SIGNS)


def _transformed(x: torch.Tensor, dim: int, by: tuple[int, ...]) -> torch.Tensor:
    rows, cols = x.shape
    values = x.to(torch.bfloat16).to(torch.float32)
    # A tensor subclass (fake while tracing) must not outlive its mode, so its signs are not cached.
    make = _signs if type(x) is torch.Tensor else _signs.__wrapped__
    shape = (rows // 16, 16, cols) if dim == 0 else (rows, cols // 16, 16)
    along = 1 if dim == 0 else 2
    signs = make(x.device, by)
    signed = values.reshape(shape) * (signs[:, None] if dim == 0 else signs)
    transformed = torch.stack(_hadamard(signed.unbind(along)), along) * 4
    return transformed.reshape(rows, cols).to(torch.bfloat16)


def _hadamard(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``H`` times 16 values, by sums of two at a time."""
    parts = list(values)
    for half in (1, 2, 4, 8):  # H of 2 h elements is [[H, H], [H, -H]] of h
        for first in range(16):
            if not first & half:
                upper, lower = parts[first], parts[first | half]
                parts[first], parts[first | half] = upper + lower, upper - lower
    return parts


def _inverse(x: torch.Tensor, by: tuple[int, ...]) -> torch.Tensor:
    """Return ``x [rows, k]``, float32, transformed back: ``H / 4`` is its own inverse."""
    rows, k = x.shape
    parts = _hadamard(x.reshape(rows, k // 16, 16).unbind(2))
    signed = [part * (sign / 4) for part, sign in zip(parts, by, strict=True)]
    return torch.stack(signed, 2).reshape(rows, k)


TRANSFORMS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "hadamard16": partial(_transformed, by=_SIGNS),
    "hadamard16_unsigned": partial(_transformed, by=_NO_SIGNS),
}
"""``f(x [rows, cols], dim) -> [rows, cols]`` by the name that :class:`OperandSpec` has for it."""

INVERSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hadamard16": lambda x: _inverse(x, _SIGNS),
    "hadamard16_unsigned": lambda x: _inverse(x, _NO_SIGNS),
}
"""``f(x [rows, k]) -> [rows, k]`` in float32 that undoes the transform of that name along k."""


_SCALE_FORMATS = ("float32", "e8m0", "e4m3")
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
_FLOAT32_MIN = 2.0**-149


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """How one operand ``[rows, k]`` of one GEMM is quantized: one cell of a linear layer's plan.

    ``value = decode(data) * scale_inv`` (times ``global_scale_inv`` with two-level scales), where
    one scale covers ``block = (rows, k)`` elements and 0 stands for the whole dimension: ``(0, 0)``
    tensorwise, ``(1, 0)`` rowwise, ``(1, 128)`` and ``(128, 128)`` DeepSeek blocks, ``(1, 32)`` MX,
    ``(1, 16)`` NVFP4. The last block of a row may be partial. A float32 scale that overflows
    becomes the largest float32; with blocks along k, the largest value of x's dtype.

    Attributes:
        format: name of the element format. Whether a format of that name is registered is not
            asked here: a plug-in may write down a spec before its format is registered.
        block: extent of a scale block, elements: ``(0, 0)``, ``(1, 0)``, or two sizes from 1 on.
        scale_format: ``"float32"``, ``"e8m0"`` (a byte, power of two, rounded up), or ``"e4m3"``
            (a byte, under a second, tensorwise float32 scale). Bytes need blocks along k.
        target: the value that a block's amax maps to; the format's maximum unless the recipe
            says otherwise.
        power_of_two: a float32 scale is rounded down to a power of two.
        amax_epsilon: lower bound of amax in a float32 scale, absolute.
        delayed: the scale is handed in and the amax handed out, instead of being derived. One
            float32 scale for the tensor, as it is handed in: not rounded, without amax_epsilon.
        stochastic: round the elements stochastically instead of to the nearest, ties to even.
        transform: name of the transform applied along k before quantization, or None. A backend
            may know others than :data:`TRANSFORMS`. Those go with two-level scales, whose blocks
            are a multiple of their 16 elements along k.
        cast_first: the value is rounded to the layer's activation dtype before amax and cast; if
            not, a fused producer hands over its float32 value.
        row_scaled: of two-level scales, the outer one is that of a row instead of the tensor.
        four_over_six: each block of two-level scales maps its amax to 6 or to 4, whichever loses
            less: ``"MAE"`` by the sum of the errors' magnitudes, ``"MSE"`` of their squares, None
            maps every amax to the target. docs/numerics.md, NVFP4BlockScaling, has the arithmetic.
        scale_max: of two-level scales, the value of a block's scale that the largest amax under
            one outer scale maps to: 448, or 256 with ``four_over_six``.

    Raises:
        RecipeError: a field has another value than these, or one that contradicts another field.
            Backends are never asked about such a spec; a legal one that a backend cannot run is
            refused by its ``unsupported``.

    >>> OperandSpec("e4m3", (3, 0), 448.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fp8core.errors.RecipeError: OperandSpec(block=(3, 0)): expected (0, 0), (1, 0), or two ...
    """

    format: str
    block: tuple[int, int]
    target: float
    scale_format: str = "float32"
    power_of_two: bool = False
    amax_epsilon: float = 0.0
    delayed: bool = False
    stochastic: bool = False
    transform: str | None = None
    cast_first: bool = True
    row_scaled: bool = False
    four_over_six: str | None = None
    scale_max: float = 448.0

    def __post_init__(self) -> None:
        """Check each field, then each pair that may contradict each other."""
        for name, expected in _illegal_fields(self):
            raise RecipeError(f"OperandSpec({name}={getattr(self, name)!r}): expected {expected}.")

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Take the fields of a copy or a pickle, and check them as the constructor does."""
        for field, value in zip(fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)  # frozen
        self.__post_init__()

    def __deepcopy__(self, memo: object) -> OperandSpec:
        """Return itself, which nothing changes."""
        return self

    @property
    def later_fields(self) -> tuple[str, ...]:
        """The fields that the contract has since 3.3 and that differ from their defaults. A backend
        names those it knows in ``BackendSpec.operand_fields``, and is not asked about others."""
        changes = {"row_scaled": self.row_scaled, "four_over_six": self.four_over_six is not None}
        changes["scale_max"] = self.scale_max != 448
        return tuple(name for name, differs in changes.items() if differs)

    def __str__(self) -> str:
        return spec_text(self)


def _illegal_fields(spec: OperandSpec) -> Iterator[tuple[str, str]]:
    """Yield each field that is illegal by itself, then, if all are legal, each contradiction.

    The caller stops at the first, so that nothing is compared before its type is known.
    """
    if not isinstance(spec.format, str) or not spec.format:
        yield "format", "the name of a format"
    if spec.format == "e8m0":
        yield "format", "a format for elements; e8m0 is for scales, it has no zero"
    if not _is_block(spec.block):
        yield "block", "(0, 0), (1, 0), or two whole numbers from 1 on"
    if not _is_number(spec.target) or not _FLOAT32_MIN <= spec.target <= _FLOAT32_MAX:
        yield "target", "a positive number in the range of float32"
    if not isinstance(spec.scale_format, str) or spec.scale_format not in _SCALE_FORMATS:
        yield "scale_format", f"one of {_SCALE_FORMATS}"
    if not _is_number(spec.amax_epsilon) or not 0 <= spec.amax_epsilon <= _FLOAT32_MAX:
        yield "amax_epsilon", "0, or a positive number in the range of float32"
    for flag in ("power_of_two", "delayed", "stochastic", "cast_first", "row_scaled"):
        if type(getattr(spec, flag)) is not bool:
            yield flag, "True or False"
    if spec.transform is not None and (not isinstance(spec.transform, str) or not spec.transform):
        yield "transform", "None or the name of a transform"
    if spec.four_over_six not in (None, "MAE", "MSE"):
        yield "four_over_six", "None, 'MAE' or 'MSE'"
    if not _is_number(spec.scale_max) or spec.scale_max not in (448, 256):
        yield "scale_max", "448 or 256"
    yield from _contradictions(spec)


def _contradictions(spec: OperandSpec) -> Iterator[tuple[str, str]]:
    """Yield each field whose value another field rules out."""
    scale_bytes = f"bytes (scale_format={spec.scale_format!r})"
    if spec.scale_format != "float32":
        if 0 in spec.block:
            yield "block", f"two whole numbers from 1 on: {scale_bytes} are scales of blocks"
        if spec.power_of_two:
            yield "power_of_two", f"False: {scale_bytes} are not rounded again"
        if spec.amax_epsilon:
            yield "amax_epsilon", f"0: {scale_bytes} take no lower bound of amax"
        if spec.delayed:
            yield "delayed", f"False: {scale_bytes} are derived, a delayed scale is one float32"
    if spec.delayed:
        if spec.block != (0, 0):
            yield "block", "(0, 0): a delayed scale is that of the whole tensor"
        if spec.power_of_two:
            yield "power_of_two", "False: a delayed scale is taken as it is handed in"
        if spec.amax_epsilon:
            yield "amax_epsilon", "0: a delayed scale is taken as it is handed in"
    if spec.transform in TRANSFORMS:
        if spec.scale_format != "e4m3":
            yield (
                "transform",
                f"None: only two-level scales (scale_format='e4m3') take {spec.transform}",
            )
        if spec.block[1] % 16:
            yield "block", f"a multiple of 16 along k: {spec.transform} mixes 16 elements at a time"
    yield from _level_contradictions(spec)


def _level_contradictions(spec: OperandSpec) -> Iterator[tuple[str, str]]:
    """Yield each field of two-level scales that another field rules out."""
    if spec.later_fields and spec.scale_format != "e4m3":
        yield "scale_format", "'e4m3': row_scaled, four_over_six and scale_max are of two levels"
    if spec.row_scaled and spec.block[0] != 1:
        yield "row_scaled", f"False: a block of {spec.block[0]} rows has no outer scale of a row"
    if spec.four_over_six is None and spec.scale_max != 448:
        yield "scale_max", "448: 256 goes with four_over_six"
    if spec.four_over_six is not None:
        if spec.stochastic:
            yield "stochastic", "False: four_over_six compares values rounded to the nearest"
        if spec.block not in ((1, 16), (16, 16)):
            yield "block", "(1, 16) or (16, 16) with four_over_six"
        if spec.format != "e2m1" or spec.target != 6:
            yield "four_over_six", "None: it maps an amax to 4 or to 6, the largest values of e2m1"


def _is_block(block: Any) -> bool:
    if not isinstance(block, tuple) or [*map(type, block)] != [int, int]:
        return False
    return block in ((0, 0), (1, 0)) or min(block) >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
