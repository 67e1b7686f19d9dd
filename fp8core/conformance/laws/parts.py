"""Law 4 for products that are computed some rows at a time, while others travel between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp8core.backend_api import GemmDesc, Operand
from fp8core.conformance import inputs
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require, same_bits
from fp8core.conformance.laws.gemm import aligned
from fp8core.conformance.operands import gemm_operands
from fp8core.conformance.subject import Subject

PARTS = 2, 4
# Rows of a part, columns and what is contracted; parts end with blocks of any recipe.
SIZES = (128, 48, 160), (256, 256, 512)


@contextmanager
def repeatable() -> Iterator[None]:
    """Torch's setting for algorithms that are the same in every process."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def rows_of(a: Operand, at: int, rows: int, whole: int) -> Operand:
    """Return ``rows`` of the ``whole`` rows of a rowwise operand, from row ``at`` on."""
    data, *scales = (
        part if part is None or part.shape[0] == 1 else _of_rows(part, at, rows, whole)
        for part in a
    )
    assert data is not None
    return Operand(data, *scales)


def _of_rows(x: torch.Tensor, at: int, rows: int, whole: int) -> torch.Tensor:
    step = whole // x.shape[0]
    return x[at // step : (at + rows) // step]


@law(4, "gemm", applies=lambda desc: type(desc) is GemmDesc and not desc.accumulate)
def gemm_parts_have_the_bits_of_the_whole(subject: Subject, desc: GemmDesc) -> None:
    """``gemm_part``, if offered, writes what the call gives these rows, and nothing beside them.

    With and without a bias.
    """
    gemm_part = subject.offers(desc).gemm_part
    if gemm_part is None:
        return
    with repeatable():
        for (rows, n, k), parts in ((size, parts) for size in SIZES for parts in PARTS):
            m, n, k = aligned(subject, desc, rows * parts, n, k)
            a, b = gemm_operands(subject, desc, m, n, k)
            for bias in (None, subject.here(inputs.normal((n,), desc.out_dtype, 5))):
                whole = subject.run(desc, a, b, bias=bias)
                out = torch.full_like(whole, 77.0)
                for at in reversed(range(0, m, m // parts)):
                    untouched = out[:at].clone()
                    part = out[at : at + m // parts]
                    result = gemm_part(m, rows_of(a, at, m // parts, m), b, bias=bias, out=part)
                    require(result is part, "gemm_part returned another tensor than out")
                    require(torch.equal(out[:at], untouched), "wrote beside out")
                same_bits(f"{parts} parts of {m} rows, n {n}, k {k}", out, whole)
