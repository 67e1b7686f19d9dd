"""FP8 products with the sums of Hopper's tensor cores, as the golden vectors were computed.

A tensor core adds 32 products and the sum before them at once: each term is cut off (towards zero)
13 bits below the largest exponent among them, where a product has the exponents of its two factors
added, and the sum is cut off to 13 bits behind its leading one. cuBLAS's fast accumulation does
nothing else; without it, and with blocks of 128, the sum of each 128 products is added in float32
to those before. Scales multiply a sum in float32, those of the operands with each other first.

With these sums layers equal Transformer Engine's on an H200 bit for bit, but for what tests say.
"""

from __future__ import annotations

import pytest
import torch

from fp8core.backend_api import GemmDesc, Operand, OperandSpec
from fp8core.formats import by_name
from fp8core_backends.reference import gemm

__all__ = ["cut_off", "hopper_product", "use_hopper_sums"]

BITS = 13
PRODUCTS_AT_ONCE = 32
PRODUCTS_IN_FLOAT32 = 128
PRODUCTS_IN_CACHE = 1 << 18


def cut_off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the most that ``a [..., m, k] @ b [n, k].T`` loses by these sums, ``[..., m, n]``.

    Of ``k / 32`` steps, each cuts off 33 terms and then a sum, by up to ``2**-13`` of the largest
    of them, which the sum of all absolute products is not below. 0 on the CPU, which has no such
    sums.
    """
    steps = -(-a.shape[-1] // PRODUCTS_AT_ONCE)
    share = steps * (PRODUCTS_AT_ONCE + 2) * 2.0**-BITS if a.is_cuda else 0.0
    return share * (a.abs() @ b.abs().t())


def use_hopper_sums(patch: pytest.MonkeyPatch) -> None:
    """Have the reference backend add up FP8 products as Hopper does; others stay exact."""
    exact = gemm._float32_gemm

    def product(desc: GemmDesc, a: Operand, b: Operand, bias: torch.Tensor | None) -> torch.Tensor:
        run = exact if desc.a is None or desc.b is None else hopper_product
        return run(desc, a, b, bias)

    patch.setattr(gemm, "_float32_gemm", product)


def hopper_product(
    desc: GemmDesc, a: Operand, b: Operand, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``a @ b.T + bias`` in float32; in place of the reference backend's product."""
    assert desc.a is not None
    assert desc.b is not None
    left, right = _decoded(desc.a, a), _decoded(desc.b, b)  # [m, k], [n, k]
    is_scaled_in_blocks = desc.a.block[1] == PRODUCTS_IN_FLOAT32
    if desc.fast_accumulation and not is_scaled_in_blocks:
        product = _sum(left, right).float()
    else:
        product = left.new_zeros(left.shape[0], right.shape[0], dtype=torch.float32)
        for start in range(0, left.shape[1], PRODUCTS_IN_FLOAT32):
            end = start + PRODUCTS_IN_FLOAT32
            part = _sum(left[:, start:end], right[:, start:end]).float()
            if is_scaled_in_blocks:
                number = start // PRODUCTS_IN_FLOAT32
                part *= _scales(desc.a, a, number)[:, None] * _scales(desc.b, b, number)
            product += part
    if not is_scaled_in_blocks:
        assert a.scale_inv is not None
        assert b.scale_inv is not None
        product *= a.scale_inv.reshape(()) * b.scale_inv.reshape(())
    return product if bias is None else product + bias.float()


def _decoded(spec: OperandSpec, operand: Operand) -> torch.Tensor:
    return by_name(spec.format).decode(operand.data).double()


def _scales(spec: OperandSpec, operand: Operand, number: int) -> torch.Tensor:
    """Return the scale of each row in a block of columns."""
    assert operand.scale_inv is not None
    rows = operand.scale_inv[:, number]
    return rows.repeat_interleave(spec.block[0])[: operand.data.shape[0]]


def _sum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the sums ``[m, n]`` of the products of ``left [m, k]`` and ``right [n, k]``.

    Rows of ``left`` by parts, whose products a processor's cache holds.
    """
    rows = max(1, PRODUCTS_IN_CACHE // (PRODUCTS_AT_ONCE * right.shape[0]))
    return torch.cat([_sum_of_rows(part, right) for part in left.split(rows)])


def _sum_of_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    total = left.new_zeros(left.shape[0], right.shape[0])
    powers = [_power(x) for x in (left, right)]
    for start in range(0, left.shape[1], PRODUCTS_AT_ONCE):
        a, b, power_a, power_b = (
            x[:, start : start + PRODUCTS_AT_ONCE].t() for x in (left, right, *powers)
        )
        # The largest power of two among the terms, 0 where all of them are; products are exact.
        largest = torch.maximum((power_a[:, :, None] * power_b[:, None]).amax(0), _power(total))
        per_step = torch.where(largest > 0, 2.0**BITS / largest, 0.0)
        terms = (a[:, :, None] * b[:, None]).mul_(per_step).trunc_().sum(0)
        total = terms.add_((total * per_step).trunc_()).mul_(largest * 2.0**-BITS)
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp(torch.ldexp(mantissa, _BITS_AND_ONE).trunc(), exponent - BITS - 1)
    return total


_BITS_AND_ONE = torch.tensor(BITS + 1)


def _power(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two not above abs(x); 0 for 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - 1).masked_fill_(mantissa == 0, 0.0)
