"""Law 4 for products of many rows, columns, terms and groups, and of operands that look alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from fp8core.backend_api import GemmDesc, GroupedGemmDesc, Operand
from fp8core.testing import inputs
from fp8core.testing.calls import gemm_operands, grouped_operands, operand
from fp8core.testing.checks import law
from fp8core.testing.laws.gemm import aligned, product_within
from fp8core.testing.laws.grouped import each_within
from fp8core.testing.subject import Subject
from fp8core.torch_ops.private import pytree

LONG = 4100
VERY_LONG = 66000  # more than 16 bits count: what a grid of thread blocks has in one dimension
STEP = 1031  # from one to the next of the few terms of a very long sum that are not zero
MANY_GROUPS = (0, 2, 1, 33, 0, 1, 1) * 10
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": inputs.transposed,
    "spaced": inputs.spaced,
    "shifted": inputs.shifted,
}


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_takes_any_m_n_and_k(subject: Subject, desc: GemmDesc) -> float:
    """Thousands of rows, of columns or of terms are computed as few are."""
    worst = 0.0
    for size in ((LONG, 9, 64), (9, LONG, 64), (9, 9, LONG)):
        own = aligned(subject, desc, *size)
        a, b = gemm_operands(subject, desc, *own)
        what = f"m n k {own}"
        worst = max(worst, product_within(subject, desc, what, subject.run(desc, a, b), (a, b)))
    if desc.out_dtype != torch.bfloat16:
        return worst  # one dtype stands for the others
    for size in ((VERY_LONG, 3, 32), (3, VERY_LONG, 32), (3, 3, VERY_LONG)):
        m, n, k = aligned(subject, desc, *size)
        operands = (_sparse(subject, desc, 0, m, k), _sparse(subject, desc, 1, n, k))
        made = subject.run(desc, *operands)
        what = f"m n k {(m, n, k)}, every {STEP}th term"
        worst = max(worst, product_within(subject, desc, what, made, operands))
    return worst


def _sparse(subject: Subject, desc: GemmDesc, at: int, rows: int, k: int) -> Operand:
    """Return an operand most of whose terms are zero if it has many, so that none goes unseen."""
    dtype = torch.float32 if desc.low_precision else desc.out_dtype
    x = inputs.moderate(rows, min(k, 64), dtype, 20 + 20 * at)
    if k > x.shape[1]:
        wide = torch.zeros(rows, k, dtype=dtype)
        kept = [*range(0, k, STEP), k - 1]
        wide[:, kept] = x.repeat(1, 2)[:, : len(kept)]
        x = wide
    return operand(subject, (desc.a, desc.b)[at], subject.here(x))


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_of_as_many_rows_as_columns(subject: Subject, desc: GemmDesc) -> float:
    """With m = n each operand keeps its own scales; with k too, strides tell what is a row."""
    worst = 0.0
    for size, columnwise in itertools.product(((96, 96, 160), (128, 128, 128)), (False, True)):
        own = aligned(subject, desc, *size)
        size = (max(own[:2]), max(own[:2]), own[2])
        a, b = gemm_operands(subject, desc, *size, columnwise=columnwise)
        made = subject.run(desc, a, b)
        worst = max(worst, product_within(subject, desc, f"m n k {size}", made, (a, b)))
    return worst


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_takes_operands_of_any_strides(subject: Subject, desc: GemmDesc) -> float:
    """Operands that another backend laid out by rows, by columns or with gaps are the same ones."""
    worst = 0.0
    for size in ((5, 7, 160), (64, 64, 64)):
        own = aligned(subject, desc, *size)
        operands = gemm_operands(subject, desc, *own)
        for what, lay in LAYOUTS.items():
            laid = pytree.tree_map_only(torch.Tensor, lay, operands)
            pairs = {"a and b": laid, "a": (laid[0], operands[1]), "b": (operands[0], laid[1])}
            for whose, (a, b) in pairs.items():
                made = subject.run(desc, a, b)
                text = f"{what} {whose}, m n k {own}"
                worst = max(worst, product_within(subject, desc, text, made, (a, b)))
    return worst


def _is_no_float16(desc: GroupedGemmDesc) -> bool:
    return not desc.accumulate and desc.out_dtype != torch.float16


@law(4, "grouped_gemm", applies=_is_no_float16)
def grouped_gemm_takes_many_groups(subject: Subject, desc: GroupedGemmDesc) -> float:
    """Dozens of groups, some of them empty, some as long as others."""
    groups = grouped_operands(subject, desc, MANY_GROUPS, (6, 10, 64))
    return each_within(subject, desc, groups, subject.run(desc, *groups.arguments))


@law(4, "grouped_gemm", applies=_is_no_float16)
def grouped_gemm_takes_groups_of_any_size(subject: Subject, desc: GroupedGemmDesc) -> float:
    """A group of thousands of rows, and wide results of it."""
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
        own = groups._replace(arguments=(*laid, offsets))
        worst = max(worst, each_within(subject, desc, own, subject.run(desc, *own.arguments)))
    return worst
