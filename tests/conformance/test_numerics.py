"""A backend that differs by design is held to the bounds that it declares, and must say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.backend_api import GemmDesc, Numerics, OpDesc, Operand, Quantized, QuantizeDesc
from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.checks import LAWS
from fp8core.conformance.compare import Broken
from fp8core.conformance.laws import gemm as gemm_laws
from fp8core.conformance.laws import quantize as quantize_laws
from fp8core.conformance.subject import Subject
from fp8core_backends.reference.backend import ReferenceBackend
from fp8core_backends.reference.gemm import gemm
from fp8core_backends.reference.quantize import quantize
from tests.conformance.broken import operands

CPU = torch.device("cpu")
BY_LABEL = {entry.label: entry.desc for entry in catalogue()}
PRODUCT = BY_LABEL["current.fprop.float32.float32"]
CAST = BY_LABEL["current.input.float32"]
SUM_ERROR = 2.0**-10


class Coarse(ReferenceBackend):
    """Products off by up to 2^-10 of their terms, codes by one step, scales by 4 ulps."""

    def __init__(self, declared: Numerics) -> None:
        self._declared = declared

    def numerics(self, desc: OpDesc, device: torch.device) -> Numerics:
        return self._declared

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> torch.Tensor:
        return gemm(desc, a, b, **given) * (1 + SUM_ERROR * 0.9)

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        def coarse(one: Operand) -> Operand:
            is_even = (one.data > 1) & (one.data < 0x7E) & (one.data % 2 == 0)
            shifted = torch.where(is_even, one.data - 1, one.data)
            scale = (one.scale_inv.view(torch.int32) + 4).view(torch.float32)
            return one._replace(data=shifted, scale_inv=scale)

        return operands(quantize(desc, x, *groups, **given), coarse)


def subject(**declared: Any) -> Subject:
    return Subject("coarse", Coarse(Numerics(**declared)), CPU, ReferenceBackend())


def test_product_beyond_the_default_bound_is_broken() -> None:
    with pytest.raises(Broken, match=r"worst error is .* of the bound"):
        gemm_laws.gemm_product_is_within_the_bound(subject(), PRODUCT)


def test_product_within_the_declared_bound_holds() -> None:
    held = subject(source="a test", sum_error=SUM_ERROR)
    worst = gemm_laws.gemm_product_is_within_the_bound(held, PRODUCT)
    assert worst is not None
    assert 0.1 < worst <= 1


def test_product_beyond_the_declared_bound_is_broken() -> None:
    tight = subject(source="a test", sum_error=SUM_ERROR / 4)
    with pytest.raises(Broken):
        gemm_laws.gemm_product_is_within_the_bound(tight, PRODUCT)


def test_codes_within_the_declared_steps_hold() -> None:
    held = subject(source="a test", code_steps=1)
    assert quantize_laws.quantize_codes_equal_the_reference(held, CAST) == 1


def test_codes_off_without_a_declaration_are_broken() -> None:
    with pytest.raises(Broken, match="rowwise data"):
        quantize_laws.quantize_codes_equal_the_reference(subject(), CAST)


def test_scales_within_the_declared_ulps_hold() -> None:
    held = subject(source="a test", scale_ulps=4)
    assert quantize_laws.quantize_scales_equal_the_reference(held, CAST) == 1


def test_scales_beyond_the_declared_ulps_are_broken() -> None:
    with pytest.raises(Broken, match="ulps"):
        quantize_laws.quantize_scales_equal_the_reference(
            subject(source="a test", scale_ulps=3), CAST
        )


@pytest.mark.parametrize(
    ("declared", "message"),
    [({"code_steps": 1}, "no source"), ({"source": "x", "sum_error": torch.inf}, "no bound")],
    ids=["no source", "inf"],
)
def test_declaration_without_a_source_or_a_bound_is_broken(
    declared: dict[str, Any], message: str
) -> None:
    with pytest.raises(Broken, match=message):
        LAWS["declared_bounds_name_their_source"].test(subject(**declared), CAST)


BLOCKS = BY_LABEL["block.input.float32"]
FROM_HUNDREDTH = {"source": "a test", "amax_range": (0.01, 1e30)}


class OtherEdges(ReferenceBackend):
    """Blocks of small values, of zeros and of inf have scales and codes of their own."""

    smallest = 0.01
    code_of_zero = 0

    def numerics(self, desc: OpDesc, device: torch.device) -> Numerics:
        return Numerics(**FROM_HUNDREDTH)

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        def other(spec: Any, values: torch.Tensor, one: Operand) -> Operand:
            cols = spec.block[1]
            amax = torch.nn.functional.pad(values.abs(), (0, -values.shape[1] % cols))
            amax = amax.unflatten(1, (-1, cols)).amax(2)
            is_other = ~((amax >= self.smallest) & amax.isfinite())
            scale = one.scale_inv.masked_fill(is_other, 123.0)
            spread = is_other.repeat_interleave(cols, 1)[:, : values.shape[1]]
            codes = torch.where(values == 0, self.code_of_zero, 3).to(torch.uint8)
            return Operand(torch.where(spread, codes, one.data), scale)

        assert desc.columnwise is None
        plain = quantize(desc, x, *groups, **given)
        return Quantized(other(desc.rowwise, x, plain.rowwise), None) if x.numel() else plain


def edges(backend: OtherEdges) -> float | None:
    held = Subject("edges", backend, CPU, ReferenceBackend())
    cast = QuantizeDesc(torch.float32, BLOCKS.rowwise, None)
    worst = quantize_laws.quantize_scales_equal_the_reference(held, cast)
    return max(worst, quantize_laws.quantize_codes_equal_the_reference(held, cast))


def test_blocks_beyond_the_declared_range_are_the_device_s() -> None:
    assert edges(OtherEdges()) == 0


def test_blocks_within_the_declared_range_are_held_to_the_bounds() -> None:
    backend = OtherEdges()
    backend.smallest = 0.1
    with pytest.raises(Broken, match="rowwise scale_inv"):
        edges(backend)


def test_blocks_of_zeros_give_zeros_beyond_the_declared_range() -> None:
    backend = OtherEdges()
    backend.code_of_zero = 3
    with pytest.raises(Broken, match="blocks of zeros"):
        edges(backend)


def test_empty_range_of_amaxes_is_no_declaration() -> None:
    with pytest.raises(Broken, match="empty range"):
        LAWS["declared_bounds_name_their_source"].test(
            subject(source="x", amax_range=(1.0, 0.5)), CAST
        )
