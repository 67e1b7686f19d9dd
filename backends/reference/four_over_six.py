"""The error that decides whether a block of e2m1 maps its amax to 6 or to 4."""

from __future__ import annotations

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core_backends.reference import blocks


def error(
    spec: OperandSpec,
    x: torch.Tensor,
    block: tuple[int, int],
    *,
    multiplier: torch.Tensor,
    scale: torch.Tensor,
    outer_amax: torch.Tensor,
    dim: int,
) -> torch.Tensor:
    """Return the error of each block of ``x`` if its elements are ``e2m1(x * multiplier)``.

    ``multiplier`` and ``scale``, the block's own as a value of e4m3, are float32 in the layout of
    the blocks, and so is the result; ``outer_amax`` is that of the tensor or of each row of the
    operand. A value is ``e2m1 * scale * outer_amax / (6 * scale_max)``, rounded after each step.
    Errors are added in a fixed order: along k one after the other, then, of a square block, rows
    that are 8, 4, 2 and 1 apart. Source: docs/numerics.md, NVFP4BlockScaling.
    """
    element = formats.by_name(spec.format)
    decoded = element.decode(element.encode(blocks.multiply(x, multiplier, block)))
    values = blocks.multiply(decoded, scale, block) * outer_amax
    values = values / torch.full_like(values, spec.target * spec.scale_max)
    difference = values - x.to(torch.float32)
    size = difference.abs() if spec.four_over_six == "MAE" else difference * difference
    along_k = size if dim == 1 else size.t()
    rows, k = along_k.shape
    missing = (0, -k % 16, 0, -rows % spec.block[0])
    parts = (
        torch.nn.functional.pad(along_k, missing)
        .reshape(-(-rows // spec.block[0]) * spec.block[0], -1, 16)
        .unbind(2)
    )
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    if spec.block[0] == 16:
        total = total.reshape(-1, 16, total.shape[1])
        for half in (8, 4, 2, 1):
            total = total[:, :half] + total[:, half : 2 * half]
        total = total.squeeze(1)
    return total if dim == 1 else total.t()
