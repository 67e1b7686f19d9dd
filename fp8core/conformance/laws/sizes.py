"""Law 4 for products of many rows, columns, terms and groups, and of operands of equal shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from fp8core.backend_api import GemmDesc, GroupedGemmDesc, Operand
from fp8core.conformance import inputs
from fp8core.conformance.checks import law
from fp8core.conformance.laws.gemm import aligned, each_within, product_within
from fp8core.conformance.operands import gemm_operands, grouped_operands, operand
from fp8core.conformance.subject import Subject
from fp8core.torch_ops.private import pytree

LONG = 4100
VERY_LONG = 66000  # above 65535, the largest extent of a grid of thread blocks in y and z
STEP = 1031  # the distance between the terms of a very long sum that are not zero
MANY_GROUPS = (0, 2, 1, 33, 0, 1, 1) * 10
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": inputs.transposed,
    "spaced": inputs.spaced,
    "shifted": inputs.shifted,
}


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_takes_any_m_n_and_k(subject: Subject, desc: GemmDesc) -> float:
    """Thousands of rows, of columns or of terms are within the same bound as few."""
    worst = 0.0
    for size in ((LONG, 9, 64), (9, LONG, 64), (9, 9, LONG)):
        m, n, k = aligned(subject, desc, *size)
        a, b = gemm_operands(subject, desc, m, n, k)
        product = subject.run(desc, a, b)
        worst = max(worst, product_within(subject, desc, f"m n k {(m, n, k)}", product, (a, b)))
    if desc.out_dtype != torch.bfloat16:
        return worst  # one dtype stands for the others
    for size in ((VERY_LONG, 3, 32), (3, VERY_LONG, 32), (3, 3, VERY_LONG)):
        m, n, k = aligned(subject, desc, *size)
        operands = (_sparse(subject, desc, 0, m, k), _sparse(subject, desc, 1, n, k))
        product = subject.run(desc, *operands)
        name = f"m n k {(m, n, k)}, every {STEP}th term"
        worst = max(worst, product_within(subject, desc, name, product, operands))
    return worst


def _sparse(subject: Subject, desc: GemmDesc, at: int, rows: int, k: int) -> Operand:
    """Return operand a (0) or b (1); of a very long k, most terms are zero.

    The bound grows with the magnitudes of all terms, so that among many terms of one size a
    missing one would stay within it.
    """
    dtype = torch.float32 if desc.low_precision else desc.out_dtype
    x = inputs.moderate(rows, min(k, 64), dtype, 20 + 20 * at)
    if k > x.shape[1]:
        wide = torch.zeros(rows, k, dtype=dtype)
        columns = [*range(0, k, STEP), k - 1]
        wide[:, columns] = x.repeat(1, 2)[:, : len(columns)]
        x = wide
    return operand(subject, (desc.a, desc.b)[at], subject.here(x))


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_of_as_many_rows_as_columns(subject: Subject, desc: GemmDesc) -> float:
    """With m = n, and with m = n = k, operands, scales and orientations are not confused."""
    worst = 0.0
    for size, columnwise in itertools.product(((96, 96, 160), (128, 128, 128)), (False, True)):
        m, n, k = aligned(subject, desc, *size)
        size = (max(m, n), max(m, n), k)
        a, b = gemm_operands(subject, desc, *size, columnwise=columnwise)
        result = subject.run(desc, a, b)
        worst = max(worst, product_within(subject, desc, f"m n k {size}", result, (a, b)))
    return worst


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_takes_operands_of_any_strides(subject: Subject, desc: GemmDesc) -> float:
    """Operands that another backend laid out by rows, by columns or with gaps are read right."""
    worst = 0.0
    for size in ((5, 7, 160), (64, 64, 64)):
        m, n, k = aligned(subject, desc, *size)
        operands = gemm_operands(subject, desc, m, n, k)
        for layout, lay in LAYOUTS.items():
            laid = pytree.tree_map_only(torch.Tensor, lay, operands)
            pairs = {"a and b": laid, "a": (laid[0], operands[1]), "b": (operands[0], laid[1])}
            for which, (a, b) in pairs.items():
                product = subject.run(desc, a, b)
                name = f"{layout} {which}, m n k {(m, n, k)}"
                worst = max(worst, product_within(subject, desc, name, product, (a, b)))
    return worst


def _is_no_float16(desc: GroupedGemmDesc) -> bool:
    return not desc.accumulate and desc.out_dtype != torch.float16


@law(4, "grouped_gemm", applies=_is_no_float16)
def grouped_gemm_takes_many_groups(subject: Subject, desc: GroupedGemmDesc) -> float:
    """Dozens of groups, some of them empty, some of equal length."""
    groups = grouped_operands(subject, desc, MANY_GROUPS, (6, 10, 64))
    return each_within(subject, desc, groups, subject.run(desc, *groups.arguments))


@law(4, "grouped_gemm", applies=_is_no_float16)
def grouped_gemm_takes_groups_of_any_size(subject: Subject, desc: GroupedGemmDesc) -> float:
    """A group of thousands of rows, and groups with hundreds of columns and terms."""
    groups = grouped_operands(subject, desc, (3, LONG, 33), (6, 10, 64))
    worst = each_within(subject, desc, groups, subject.run(desc, *groups.arguments))
    wide = grouped_operands(subject, desc, (33, 1, 64), (530, 530, 530))
    return max(worst, each_within(subject, desc, wide, subject.run(desc, *wide.arguments)))


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate)
def grouped_gemm_takes_operands_of_any_strides(subject: Subject, desc: GroupedGemmDesc) -> float:
    """Operands laid out by rows, by columns or with gaps, in groups as long as they are wide."""
    worst = 0.0
    groups = grouped_operands(subject, desc, (32, 0, 32), (64, 64, 64))
    a, b, offsets = groups.arguments
    for lay in LAYOUTS.values():
        laid = pytree.tree_map_only(torch.Tensor, lay, (a, b))
        laid_out = groups._replace(arguments=(*laid, offsets))
        worst = max(
            worst, each_within(subject, desc, laid_out, subject.run(desc, *laid_out.arguments))
        )
    return worst
