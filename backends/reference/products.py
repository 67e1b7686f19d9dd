"""Products of matrices whose results depend on their operands alone."""

from __future__ import annotations

import torch

# Where torch's switches, such as ``torch.set_float32_matmul_precision``, round float32 operands to
# TF32 or bfloat16. The switches belong to the process, so setting them for a product would change
# those of other threads.
_SWITCHED = ("cpu", "cuda")


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a [.., m, k] @ b [.., k, n]`` in their dtype, float32 or float64.

    Products of float32 are summed in float64 and rounded once: torch has no switch for float64.
    Devices that may lack float64, all but CPUs and CUDA, sum in float32.
    """
    if a.dtype == torch.float64 or a.device.type not in _SWITCHED:
        return a @ b
    return (a.to(torch.float64) @ b.to(torch.float64)).to(torch.float32)
