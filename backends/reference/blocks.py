"""Views of a matrix as blocks; the last block of a row or column may be partial.

``x [rows, cols]`` with ``block = (br, bc)``, 0 standing for the whole dimension, is seen as
``[ceil(rows / br), br, ceil(cols / bc), bc]``.
"""

from __future__ import annotations

import torch


def extent(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """Return the block's rows and columns in elements, at least 1."""
    rows, cols = shape
    return block[0] or max(rows, 1), block[1] or max(cols, 1)


def _as_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, cols = x.shape
    br, bc = extent(x.shape, block)
    missing = (-cols % bc, -rows % br)
    if any(missing):
        x = torch.nn.functional.pad(x, (0, missing[0], 0, missing[1]))
    return x.reshape(x.shape[0] // br, br, x.shape[1] // bc, bc)


def amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return each block's largest magnitude, float32 ``[ceil(rows / br), ceil(cols / bc)]``.

    NaN elements are ignored, as CUDA's fmaxf does; a block of NaN alone, or none at all, gives 0.
    A tensorwise or rowwise amax of an empty tensor keeps its one block: 0.
    """
    if x.numel() == 0:
        counts = [
            -(-size // step) if step else 1 for size, step in zip(x.shape, block, strict=True)
        ]
        return torch.zeros(counts, dtype=torch.float32, device=x.device)
    largest = _reduce(x, block)
    # Replacing NaN costs a pass over x, so on the CPU it is done only when there is one; on a
    # device the question itself would wait for the device, and a fake tensor has no answer.
    if x.device.type != "cpu" or type(largest) is not torch.Tensor or largest.isnan().any():
        largest = _reduce(torch.where(x.isnan(), 0.0, x), block)
    return largest.to(torch.float32)


def _reduce(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    if block == (0, 0):
        low, high = torch.aminmax(x)
        return torch.maximum(low.abs(), high.abs()).reshape(1, 1)
    return _as_blocks(x, block).abs().amax(dim=(1, 3))


def multiply(x: torch.Tensor, factors: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return ``x`` in float32 with every block multiplied by its entry of ``factors``."""
    if x.numel() == 0:
        return x.to(torch.float32)
    if factors.numel() == 1:
        return x.to(torch.float32) * factors
    br, bc = extent(x.shape, block)
    rows, cols = x.shape
    if br == 1 and bc >= cols:
        return x.to(torch.float32) * factors
    if rows % br or cols % bc:
        spread = factors.repeat_interleave(br, 0)[:rows].repeat_interleave(bc, 1)[:, :cols]
        return x.to(torch.float32) * spread
    product = _as_blocks(x, block).to(torch.float32) * factors[:, None, :, None]
    return product.reshape(rows, cols)
