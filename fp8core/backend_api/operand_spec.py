"""How one operand of a product is quantized, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from fp8core.backend_api.descriptor_text import spec_text

__all__ = ["OperandSpec"]


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """How one operand ``[rows, k]`` of one GEMM is quantized: one cell of a linear layer's plan.

    ``value = decode(data) * scale_inv`` (times ``global_scale_inv`` with two-level scales), where
    one scale covers ``block = (rows, k)`` elements and 0 stands for the whole dimension: ``(0, 0)``
    tensorwise, ``(1, 0)`` rowwise, ``(1, 128)`` and ``(128, 128)`` DeepSeek blocks, ``(1, 32)`` MX,
    ``(1, 16)`` NVFP4. The last block of a row may be partial. A float32 scale that overflows
    becomes the largest float32; with blocks along k, the largest value of x's dtype.

    Attributes:
        format: name of the element format.
        block: extent of a scale block, elements.
        scale_format: ``"float32"``, ``"e8m0"`` (a byte, power of two, rounded up), or ``"e4m3"``
            (a byte, under a second, tensorwise float32 scale).
        target: the value that a block's amax maps to; the format's maximum unless the recipe
            says otherwise.
        power_of_two: a float32 scale is rounded down to a power of two.
        amax_epsilon: lower bound of amax in a float32 scale, absolute.
        delayed: the scale is handed in and the amax handed out, instead of being derived.
        stochastic: round the elements stochastically instead of to the nearest, ties to even.
        transform: name of the transform applied along k before quantization, or None.
        cast_first: the value is rounded to the layer's activation dtype before amax and cast; if
            not, a fused producer hands over its float32 value.
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

    def __str__(self) -> str:
        return spec_text(self)
