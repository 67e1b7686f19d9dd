"""What laws make of declared bounds, given sizes, noise, a plug-in's format and missing memory.

A backend that differs by design is held to the bounds that it declares, and must say why.
Stochastic rounding is judged in distribution: any generator will do, any bias will not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    ACTIVATIONS,
    GATED,
    ActivationDesc,
    DequantizeDesc,
    GemmDesc,
    Numerics,
    OpDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core.chain import request
from fp8core.chain import run as chain
from fp8core.chain.activation import activation_shape
from fp8core.conformance.catalogue import CatalogueEntry, catalogue
from fp8core.conformance.checks import LAWS, checks
from fp8core.conformance.compare import Broken
from fp8core.conformance.laws import gemm as gemm_laws
from fp8core.conformance.laws import quantize as quantize_laws
from fp8core.conformance.laws.memory import no_operand_without_memory_reaches_it
from fp8core.conformance.subject import Size, Subject, find
from fp8core_backends.reference import rounding
from fp8core_backends.reference.backend import ReferenceBackend
from fp8core_backends.reference.gemm import gemm
from fp8core_backends.reference.quantize import quantize
from tests.conformance.broken import Sound, operands
from tests.dispatch import toys

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


DESC = next(entry.desc for entry in catalogue() if entry.label == "nvfp4.grad_output.bfloat16")

Noise = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
PLAIN = rounding._noise


class Noisy(ReferenceBackend):
    """Rounds by other noise than the reference."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounding, "_noise", self._noise)
            return quantize(desc, x, *groups, **given)


def noisy(noise: Noise) -> Subject:
    return Subject("noisy", Noisy(noise), torch.device("cpu"), ReferenceBackend())


def test_another_generator_holds() -> None:
    other = noisy(lambda x, rng, dim: PLAIN(x, rng * 7919 + 5, dim))
    worst = quantize_laws.stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(other, DESC)
    assert worst is not None
    assert 0 < worst < 0.7


@pytest.mark.parametrize(
    "noise",
    [
        lambda x, rng, dim: torch.full(x.shape, 0.5),
        lambda x, rng, dim: torch.ones(x.shape),
        lambda x, rng, dim: PLAIN(x, rng, dim) * 0.9,
        lambda x, rng, dim: PLAIN(x, rng, dim) ** 1.4,
    ],
    ids=["to the nearest", "towards zero", "a tenth too often up", "skewed"],
)
def test_biased_rounding_is_broken(noise: Noise) -> None:
    with pytest.raises(Broken, match="mean of the elements"):
        quantize_laws.stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(noisy(noise), DESC)


@pytest.mark.parametrize("ignored", [0, 1], ids=["seed", "offset"])
def test_rounding_that_ignores_its_rng_is_broken(ignored: int) -> None:
    def noise(x: torch.Tensor, rng: torch.Tensor, dim: int) -> torch.Tensor:
        own = rng.clone()
        own[ignored] = 0
        return PLAIN(x, own, dim)

    with pytest.raises(Broken, match=r"gives the codes of \(7, 9\)"):
        quantize_laws.stochastic_rounding_follows_seed_and_offset(noisy(noise), DESC)


def test_rounding_that_draws_from_torchs_generator_is_broken() -> None:
    drawing = noisy(lambda x, rng, dim: torch.rand(x.shape))
    with pytest.raises(Broken):
        quantize_laws.stochastic_rounding_repeats_with_the_same_rng(drawing, DESC)


ODD: dict[str, tuple[str, str, Size]] = {
    "quantize": ("current.input.bfloat16", "quantize_codes_equal_the_reference", (11, 13)),
    "amax": ("delayed.input.bfloat16.amax", "amax_is_exact", (11, 13)),
    "dequantize": ("current.input.bfloat16.rowwise", "dequantize_rounds_once", (11, 13)),
    "norm": ("rmsnorm.bfloat16.bfloat16", "norm_is_within_the_bound", (11, 13)),
    "norm_backward": (
        "rmsnorm.bfloat16.bfloat16.backward",
        "norm_backward_is_within_the_bound",
        (11, 13),
    ),
    "activation": ("gelu.bfloat16.bfloat16", "activation_is_within_the_bound", (11, 13)),
    "activation_backward": (
        "gelu.bfloat16.bfloat16.backward",
        "activation_backward_is_within_the_bound",
        (11, 13),
    ),
    "column_sums": ("column_sums.bfloat16", "column_sums_are_within_the_bound", (11, 13)),
    "add_norm": ("rmsnorm.bfloat16.bfloat16.add", "add_norm_equals_its_unfused_pair", (11, 13)),
    "activation_quantize": (
        "current.gelu.bfloat16",
        "fused_equals_its_unfused_pair",
        (11, 13),
    ),
    "rotary": ("rotary.sbhd.bfloat16", "rotary_is_within_the_bound", (11, 3, 2, 14, 6)),
    "gemm": ("current.fprop.bfloat16.bfloat16", "gemm_product_is_within_the_bound", (11, 13, 32)),
    "route": ("route.mask", "route_equals_the_reference", (11, 13)),
    "dispatch_rows": ("dispatch_rows.bfloat16", "dispatch_copies_the_rows", (11, 13)),
    "cross_entropy": ("cross_entropy.bfloat16", "cross_entropy_is_within_the_bound", (11, 13)),
}
"""By operation: a descriptor of it, a law, and a size that the kit itself does not try."""


class Recording(Sound):
    """Takes down the shapes of what its operations take first."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)

        def record(first: Any, *rest: Any, **keywords: Any) -> Any:
            x = first.data if isinstance(first, Operand) else first
            self.shapes.add(tuple(x.shape))
            return run(first, *rest, **keywords)

        return record


@pytest.mark.parametrize("op", ODD)
def test_a_law_tries_the_given_sizes(op: str) -> None:
    label, law, size = ODD[op]
    entries = [entry for entry in catalogue() if entry.label == label]
    shape = {"gemm": (11, 32), "rotary": (11, 3, 2, 14)}.get(op, size)
    tried = []
    for sizes in ({}, {"quantize" if op == "amax" else op: [size]}):
        backend = Recording()
        subject = Subject("recording", backend, CPU, ReferenceBackend(), sizes=sizes)
        (check,) = checks(subject, [LAWS[law]], entries)
        assert check.op == op
        check.run()
        tried.append(shape in backend.shapes)
    assert tried == [False, True]


F64 = torch.float64
LARGE = 1e30


def test_law_is_about_activations_that_grow_faster_than_their_input() -> None:
    for name in ACTIVATIONS:
        desc = ActivationDesc(name, F64, F64, activation_shape(name).params)
        x = torch.full((1, 2 if name in GATED else 1), LARGE, dtype=F64)
        y = ReferenceBackend().bind(desc, torch.device("cpu"))(x)
        law = LAWS["activation_overflows_to_infinity"]
        assert law.applies(desc) == bool(y.abs().max() > 2 * LARGE), name


SPEC = OperandSpec("toy8", (1, 0), toys.TOY8.max)
DESCS = (
    QuantizeDesc(torch.bfloat16, SPEC, SPEC),
    DequantizeDesc(SPEC, torch.bfloat16),
    GemmDesc(SPEC, SPEC, torch.bfloat16),
)


@pytest.mark.usefixtures("isolated")
def test_sound_backend_of_a_format_of_256_finite_codes_passes() -> None:
    toys.register(own_formats=[toys.TOY8])
    laws = [law for law in LAWS.values() if law.ops]  # of operations, not of the whole backend
    subject = Subject("sound", ReferenceBackend(), toys.CPU, ReferenceBackend())
    for check in checks(subject, laws, [CatalogueEntry(desc.op, desc) for desc in DESCS]):
        check.run()


def test_the_law_holds() -> None:
    no_operand_without_memory_reaches_it(find("reference"))


def test_an_unmade_negation_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "as_readable", lambda x, *_: x)
    with pytest.raises(Broken, match="without memory"):
        no_operand_without_memory_reaches_it(find("reference"))


@pytest.mark.parametrize("door", ["_unwrap", "unwrap"])
def test_doors_left_open_are_a_breach(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized tensor is decoded where a chain begins, and again before it would be cast."""

    def open_door(*arguments: Any) -> Any:
        return arguments[1:3] if door == "_unwrap" else arguments[0]

    monkeypatch.setattr(chain, door, open_door)
    no_operand_without_memory_reaches_it(find("reference"))
    monkeypatch.setattr(request, "QuantizedTensor", type("NoTensor", (), {}))
    with pytest.raises(Broken, match="without memory"):
        no_operand_without_memory_reaches_it(find("reference"))
