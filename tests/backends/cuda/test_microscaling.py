"""Casts with byte scales and stochastic rounding, bit for bit; test_sizes.py has their sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import (
    GemmDesc,
    Operand,
    OperandError,
    OperandSpec,
    Quantized,
    QuantizeDesc,
    UnsupportedError,
)
from fp8core.conformance import inputs
from fp8core.conformance.subject import on_cpu
from fp8core_backends.cuda import native
from fp8core_backends.cuda.microscaling import TiledGemm
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, SHAPES, backend, differs, same_bits, spec
from tests.backends.reference import test_golden as golden_vectors

pytestmark = pytest.mark.needs_accelerator("cuda")
CPU = torch.device("cpu")

KINDS = (*inputs.KINDS, "grid", "zeros", "nan")
RNGS = ((7, 9), (2**62 + 12345, 2**33 + 1), (-1, 0))


MX, PLAIN = spec("mx"), spec("fp4")
TURNED = spec("fp4 transformed")
RANDOM = dataclasses.replace(PLAIN, stochastic=True)
SQUARE = spec("fp4 square")
FP4 = {
    "plain": (PLAIN, PLAIN),
    "input": (PLAIN, TURNED),
    "gradient": (RANDOM, dataclasses.replace(TURNED, stochastic=True)),
    "gradient without transform": (RANDOM, RANDOM),
    "weight": (SQUARE, SQUARE),
    "square, transformed": (SQUARE, dataclasses.replace(SQUARE, transform="hadamard16")),
    "square, stochastic": (dataclasses.replace(SQUARE, stochastic=True),) * 2,
    "blocks apart": (PLAIN, SQUARE),
    "target of 4": (
        dataclasses.replace(PLAIN, target=4.0),
        dataclasses.replace(RANDOM, target=4.0),
    ),
}


def values(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix on the CPU; "grid": e2m1's values and midpoints, each block with a 6."""
    rows, cols = shape
    if kind == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if kind == "nan":
        return torch.full(shape, float("nan"), dtype=dtype)
    if kind == "grid":
        x = torch.randint(-24, 25, shape, generator=torch.Generator().manual_seed(1)) / 4
        x[::16] = 6.0
        x[:, ::16] = -6.0
        return x.to(dtype)
    x = inputs.matrix(kind, rows, cols, dtype)
    return x.masked_fill(x.isnan(), float("nan"))  # of positive sign: a GPU keeps no other


def made_by(
    name: str, desc: QuantizeDesc, x: torch.Tensor, *offsets: torch.Tensor, rng: object = None
) -> Quantized:
    device = DEVICE if name == "cuda" else CPU
    given = {} if rng is None else {"rng": torch.tensor(rng)}
    return on_cpu(backend(name).bind(desc, device)(x, *offsets, **given))


def is_random(desc: QuantizeDesc) -> bool:
    return any(spec is not None and spec.stochastic for spec in (desc.rowwise, desc.columnwise))


def check(
    desc: QuantizeDesc, x: torch.Tensor, rng: object = (7, 9), on_device: object = None
) -> None:
    """Compare; ``on_device`` holds the values of ``x`` if those are to be read from elsewhere."""
    rng = rng if is_random(desc) else None
    given = x.to(DEVICE) if on_device is None else on_device
    before = given.clone()
    ours = made_by("cuda", desc, given, rng=rng)
    theirs = made_by("reference", desc, x, rng=rng)
    assert differs(ours.rowwise, theirs.rowwise) is None, f"rowwise {desc} {list(x.shape)}"
    assert differs(ours.columnwise, theirs.columnwise) is None, f"columnwise {desc} {list(x.shape)}"
    assert same_bits(given, before), "the input was written"


def fits(desc: QuantizeDesc, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape, enlarged where packed codes or the transform need it."""
    steps = [1, 1]
    for dim, own in ((1, desc.rowwise), (0, desc.columnwise)):
        if own is not None and own.format == "e2m1":
            steps[dim] = 16 if own.transform else 2
    return tuple(-(-size // step) * step for size, step in zip(shape, steps, strict=True))


def sizes(desc: QuantizeDesc) -> list[tuple[int, int]]:
    extra = ((32, 32), (96, 160), (5, 70), (260, 1030), (0, 32), (32, 0), (0, 0))
    return list(dict.fromkeys(fits(desc, shape) for shape in (*SHAPES, *extra)))


# --- MXFP8 ---


def test_mxfp8_rounds_scales_up_at_every_boundary() -> None:
    # Amaxes around 448 * 2^e: the quotient is a power of two, or its neighbour on either side.
    powers = torch.arange(-135, 120, dtype=torch.float64).exp2() * 448
    amaxes = powers.float()
    beside = [torch.nextafter(amaxes, torch.full_like(amaxes, end)) for end in (0.0, torch.inf)]
    tiny = torch.arange(1, 200).int().view(torch.float32)  # subnormal
    column = torch.cat((amaxes, *beside, tiny, torch.tensor([torch.finfo(torch.float32).max])))
    x = column[:, None] * torch.linspace(-1, 1, 32)
    check(QuantizeDesc(torch.float32, MX, None), x)
    check(QuantizeDesc(torch.float32, None, spec("mx", "e5m2")), x.t().contiguous())


# --- NVFP4 ---


STOCHASTIC = [name for name, specs in FP4.items() if any(one.stochastic for one in specs)]


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(STOCHASTIC, DTYPES)], ids=str)
def test_stochastic_rounding_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    desc = QuantizeDesc(dtype, *FP4[name])
    for shape in sizes(desc):
        for kind in KINDS:
            check(desc, values(kind, shape, dtype))
    for half in desc.halves() if dtype == torch.bfloat16 else ():
        for shape in sizes(half):
            check(half, values("decades", shape, dtype))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_follows_seed_and_offset(name: str) -> None:
    desc = QuantizeDesc(torch.bfloat16, *FP4[name])
    for rng, kind in itertools.product(RNGS, ("outlier", "grid", "decades")):
        check(desc, values(kind, (272, 528), torch.bfloat16), rng)


def test_nvfp4_makes_nan_of_either_sign_the_largest_value() -> None:
    x = torch.ones(32, 32)
    x[::3, ::5], x[1::3, ::4] = float("nan"), -torch.tensor(float("nan"))
    for name in ("plain", "gradient"):
        check(QuantizeDesc(torch.float32, *FP4[name]), x)


def test_nvfp4_refuses_what_it_cannot_pack() -> None:
    for desc, shape in (
        (QuantizeDesc(torch.bfloat16, PLAIN, None), (16, 17)),
        (QuantizeDesc(torch.bfloat16, None, PLAIN), (17, 16)),
        (QuantizeDesc(torch.bfloat16, None, TURNED), (24, 16)),
    ):
        with pytest.raises(OperandError, match="must be a multiple of"):
            made_by("cuda", desc, torch.ones(shape, dtype=torch.bfloat16, device=DEVICE))


# --- both ---

BOTH = {
    "mxfp8": (MX, MX),
    "mxfp8 square": (spec("mx square"),) * 2,
    "input": FP4["input"],
    "gradient": FP4["gradient"],
    "weight": FP4["weight"],
}


GOLDEN = [(family, name) for family, name in golden_vectors.CASES if family in ("mxfp8", "nvfp4")]


@pytest.mark.parametrize(("family", "name"), GOLDEN)
def test_golden_vectors_are_met(
    family: str,
    name: str,
    golden: Callable[[str], dict[str, np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def quantize(x: torch.Tensor, row: OperandSpec, column: OperandSpec) -> Quantized:
        return made_by("cuda", QuantizeDesc(x.dtype, row, column), x.to(DEVICE))

    monkeypatch.setattr(golden_vectors, "quantize", quantize)
    arrays = golden(golden_vectors.FILES[family])
    x = golden_vectors.as_input(arrays[f"x/{name}"])
    expected = golden_vectors.vectors(arrays, family, name)
    assert expected
    for key, array in expected.items():
        _, _, *words, what = key.split("/")
        made = golden_vectors.FAMILIES[family](x, words)[what]
        assert np.array_equal(made.contiguous().numpy(), array), key


# --- the GEMM's scales ---


def in_tiles(scales: torch.Tensor, rows: int, block_rows: int) -> list[int]:
    """Return cuBLASLt's bytes by the definition: tiles of 128 rows x 4 blocks, zeros beyond."""
    blocks = scales.shape[1]
    tile_columns = -(-blocks // 4)
    made = [0] * (-(-rows // 128) * tile_columns * 512)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * tile_columns + block // 4
            place = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            made[tile * 512 + place] = int(scales[row // block_rows, block])
    return made


@pytest.mark.parametrize("shapes", [((1, 1), (5, 3)), ((130, 9), (256, 8)), ((33, 5), (300, 1))])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 square", "plain", "weight"])
def test_scales_are_arranged_as_defined(name: str, shapes: tuple[tuple[int, int], ...]) -> None:
    specs = {"plain": (PLAIN, SQUARE)} | BOTH
    a_spec, b_spec = specs[name]
    run = TiledGemm(GemmDesc(a_spec, b_spec, torch.bfloat16), DEVICE, native.load())
    operands = []
    for own, (rows, blocks) in zip((a_spec, b_spec), shapes, strict=True):
        stored = -(-rows // own.block[0])
        scales = torch.randint(0, 256, (blocks, stored), dtype=torch.uint8, device=DEVICE).t()
        whole = torch.rand(1, 1, device=DEVICE) if own.format == "e2m1" else None
        block = own.block[1] // (2 if own.format == "e2m1" else 1)  # two codes a byte
        data = torch.zeros(rows, blocks * block, dtype=torch.uint8, device=DEVICE)
        operands.append(Operand(data, scales, whole))
    tiled = run._tiled(*operands)
    for operand, made, own in zip(operands, tiled, (a_spec, b_spec), strict=True):
        expected = in_tiles(operand.scale_inv.cpu(), operand.data.shape[0], own.block[0])
        assert made.scale_inv.tolist() == expected
        assert made.scale_inv.data_ptr() % 512 == 0
    if a_spec.format == "e2m1":
        length = tiled[0].scale_inv.numel()
        behind = torch.as_strided(tiled[0].scale_inv, (12,), (1,), length).view(torch.float32)
        product = operands[0].global_scale_inv * operands[1].global_scale_inv
        assert behind.tolist() == [product.item(), 0.0, 1.0]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_layer_on_hopper_is_refused_by_name(name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the products run on this chip")
    layer = fp8core.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
    with (
        pytest.raises(UnsupportedError, match=r"compute capability 10\.0"),
        fp8core.autocast(recipe=recipe.by_name(name)),
    ):
        layer(x)
