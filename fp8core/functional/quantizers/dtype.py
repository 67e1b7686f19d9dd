"""``DType``, Transformer Engine's numbers for element formats, and what else names a format."""

from __future__ import annotations

import enum

import torch

from fp8core import formats
from fp8core.errors import RecipeError, did_you_mean


class DType(enum.IntEnum):
    """Data types by the numbers that Transformer Engine gives them."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_FORMATS = {
    DType.kFloat8E4M3: "e4m3",
    DType.kFloat8E5M2: "e5m2",
    DType.kFloat4E2M1: "e2m1",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


def format_of(dtype: object, asked_by: str) -> str:
    """Return the name of the format that ``dtype`` is: a DType or its number, one of torch's FP8
    dtypes, or a format's name.

    Raises:
        RecipeError: it is something else.

    >>> format_of(DType.kFloat8E5M2, "doctest"), format_of(torch.float8_e4m3fn, "doctest")
    ('e5m2', 'e4m3')
    """
    name = dtype if isinstance(dtype, str) else None
    if isinstance(dtype, int | torch.dtype) and not isinstance(dtype, bool):
        name = _FORMATS.get(dtype)
    names = [one for one in formats.names() if one != "e8m0"]
    if name in names:
        return name
    near = did_you_mean(dtype, names) if isinstance(dtype, str) else ""
    raise RecipeError(
        f"{asked_by}: {dtype!r} is no format for elements. Expected fp8core.DType.kFloat8E4M3, "
        f"kFloat8E5M2 or kFloat4E2M1, a torch FP8 dtype, or one of {', '.join(names)}.{near}"
    )
