"""Stochastic rounding keeps the mean; the Hadamard transform is what its definition says."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8core import formats
from fp8core.backend_api import (
    AttentionDesc,
    DequantizeDesc,
    OperandSpec,
    QuantizeDesc,
    hadamard16,
    operand_spec,
)
from fp8core_backends.reference import attention, rounding
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Rows of a delayed-like scale of 1: target and amax are both 6.
STOCHASTIC = OperandSpec("e2m1", (0, 0), 6.0, stochastic=True)
NVFP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3", stochastic=True)
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]  # numerics.md 3.5, RHT


def quantize(spec: OperandSpec, x: torch.Tensor, *rng: int, columnwise: bool = False) -> Any:
    desc = QuantizeDesc(x.dtype, None if columnwise else spec, spec if columnwise else None)
    made = ReferenceBackend().bind(desc, CPU)(x, rng=torch.tensor(rng))
    return made.columnwise if columnwise else made.rowwise


def rounded(x: torch.Tensor, seed: int, offset: int = 0) -> torch.Tensor:
    """Values after stochastic rounding of ``x [rows, k]`` whose amax is 6, so with scale 1."""
    operand = quantize(STOCHASTIC, x, seed, offset)
    assert operand.scale_inv.tolist() == [[1.0]]
    return ReferenceBackend().bind(DequantizeDesc(STOCHASTIC), CPU)(operand)


def off_grid() -> torch.Tensor:
    """One row: a value in the middle and near each end of every interval, both signs, and 6."""
    points = [
        low + (high - low) * part
        for low, high in itertools.pairwise(GRID)
        for part in (0.03, 0.25, 0.5, 0.9)
    ]
    return torch.tensor([*points, *(-point for point in points), 6.0, -6.0])


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The grid values below and above each |x|."""
    grid = torch.tensor(GRID)
    above = torch.bucketize(x.abs(), grid)
    return grid[(above - 1).clamp(min=0)], grid[above]


def test_mean_over_seeds_converges_to_the_value() -> None:
    # A rounding takes two values a step apart, so Hoeffding bounds the mean of n of them:
    # P(|mean - x| >= t) <= 2 exp(-2 n t^2 / step^2). For all values together to fail with less
    # than 1e-9: t = step sqrt(ln(2 values / 1e-9) / (2 n)), here 1 % of a step.
    repeats, num_seeds = 512, 250
    x = off_grid()
    total = torch.zeros(len(x), dtype=torch.float64)
    for seed in range(num_seeds):
        total += rounded(x.expand(repeats, -1), seed).double().sum(0)
    low, high = neighbours(x)
    samples = repeats * num_seeds
    bound = (high - low) * math.sqrt(math.log(2 * len(x) / 1e-9) / (2 * samples))
    error = (total / samples - x.double()).abs()
    assert bool((error <= bound).all()), f"worst error is {(error / bound).max()} of the bound"


def test_rounds_to_a_neighbour_on_the_grid() -> None:
    x = off_grid().expand(50, -1)
    low, high = neighbours(x)
    made = rounded(x, 1)
    assert bool(((made.abs() == low) | (made.abs() == high)).all())
    assert torch.equal(made.signbit(), x.signbit())


def test_value_on_the_grid_is_unchanged() -> None:
    x = torch.tensor([*GRID, *(-value for value in GRID)])
    for seed in range(20):
        made = rounded(x.expand(40, -1), seed)
        assert torch.equal(made, x.expand(40, -1))


@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-24], ids=["least", "most"])
def test_value_on_the_grid_is_unchanged_by_extreme_noise(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The noise lies within (0, 1); 3 + (1 - 2^-24) is 4 in float32.
    monkeypatch.setattr(rounding, "_noise", lambda x, *_: torch.full(x.shape, noise))
    x = torch.tensor([*GRID, *(-value for value in GRID)]).reshape(2, 8)
    assert torch.equal(rounded(x, 0), x)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_generator_gives_the_known_answers(
    counter: list[int], key: tuple[int, int], expected: str
) -> None:
    # Source: Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds.
    words = rounding._philox([torch.tensor([counter[0]]), *counter[1:]], key)
    assert " ".join(f"{int(word):08x}" for word in words) == expected


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [(1, 1), (3, 6), (8, 5), (32, 48)])
def test_noise_of_an_element_is_that_of_its_block_s_word(size: tuple[int, int], dim: int) -> None:
    seed, offset = -3, 2**40 + 5
    rows, k = size
    noise = rounding._noise(
        torch.empty(size if dim == 1 else size[::-1]), torch.tensor([seed, offset]), dim
    )
    noise = noise if dim == 1 else noise.t()
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    for row in range(rows):
        for i in range(k):
            counter = row // 2 * -(-k // 4) + i // 4
            upper = (offset & 0xFFFFFFFF, (offset >> 32) * 2 + dim)
            words = rounding._philox([torch.tensor([counter]), 0, *upper], key)
            word = int(words[2 * (row % 2) + i % 4 // 2])
            expected = ((word >> 16 * (i % 2) & 0xFFFF) + 0.5) / 65536
            assert float(noise[row, i]) == expected


class Kind(torch.Tensor):
    """A user's subclass, with values."""


def test_a_seed_that_is_a_subclass_of_tensor_is_read() -> None:
    x, rng = torch.rand(6, 16), torch.tensor([3, 5])
    dropping = AttentionDesc(torch.float32, "bshd", 1, 1, 16, 16, 1.0, dropout=0.5)
    for chosen in (partial(rounding._noise, x, dim=1), partial(attention._drop, dropping, x)):
        assert torch.equal(chosen(rng=rng.as_subclass(Kind)), chosen(rng=rng))


def test_saturates() -> None:
    x = torch.tensor([[6.01, -7.9, 8.0, 1e30, -math.inf, math.inf]])
    codes = formats.by_name("e2m1").encode(rounding.stochastically(x, torch.tensor([0, 0]), 1))
    assert codes.tolist() == [[7, 15, 7, 7, 15, 7]]


def test_nan_becomes_the_largest_value() -> None:
    x = torch.tensor([[math.nan, 1.0]])
    codes = formats.by_name("e2m1").encode(rounding.stochastically(x, torch.tensor([0, 0]), 1))
    assert codes.tolist() == [[7, 2]]


def test_orientations_are_rounded_independently() -> None:
    x = torch.randn(32, 48)
    square = replace(NVFP4, block=(16, 16))  # so that both orientations have the same scales
    row, column = (quantize(square, x, 7, 9, columnwise=one) for one in (False, True))
    assert torch.equal(row.scale_inv, column.scale_inv.t())
    assert not torch.equal(rounding.unpack(row.data), rounding.unpack(column.data).t())


def test_scales_are_those_of_rounding_to_the_nearest() -> None:
    x = torch.randn(32, 64)
    nearest = replace(NVFP4, stochastic=False)
    expected = ReferenceBackend().bind(QuantizeDesc(x.dtype, nearest, None), CPU)(x).rowwise
    made = quantize(NVFP4, x, 7, 9)
    assert torch.equal(made.scale_inv, expected.scale_inv)
    assert torch.equal(made.global_scale_inv, expected.global_scale_inv)


# --- Hadamard transform ---


def hadamard_by_definition(x: list[float]) -> list[float]:
    """``y_j = sum_i sign_i x_i (-1)^popcount(i & j) / 4``: Sylvester's matrix, in Python floats."""
    return [
        sum(SIGNS[i] * x[i] * (-1) ** (i & j).bit_count() for i in range(16)) / 4 for j in range(16)
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_hadamard_equals_its_definition(dim: int) -> None:
    # Integers below 2^7 are bfloat16 numbers and their sums are exact: no order of sums matters.
    x = torch.randint(-127, 128, (48, 32)).float()
    lines = (x.t() if dim == 0 else x).reshape(-1, 16)
    expected = torch.tensor([hadamard_by_definition(line.tolist()) for line in lines])
    expected = expected.reshape((32, 48) if dim == 0 else (48, 32)).to(torch.bfloat16)
    made = hadamard16(x, dim)
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, expected.t() if dim == 0 else expected)


def test_hadamard_is_orthogonal() -> None:
    # Rows of H diag(signs) / 4 have entries +-1/4, exact in bfloat16: so are their products.
    matrix = hadamard16(torch.eye(16), 1).double()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))


def hadamard_divided_last(x: torch.Tensor) -> torch.Tensor:
    """The transform along the rows with sums of unscaled values: overflows where it need not."""
    parts = list((x.float().reshape(-1, 16) * torch.tensor(SIGNS)).unbind(1))
    for half in (1, 2, 4, 8):
        for first in range(16):
            if not first & half:
                one, other = parts[first], parts[first | half]
                parts[first], parts[first | half] = one + other, one - other
    return (torch.stack(parts, 1) / 4).reshape(x.shape).to(torch.bfloat16)


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.nan, x).to(torch.bfloat16).view(torch.int16)


def every_scale(rows: int, seed: int) -> torch.Tensor:
    """bfloat16 ``[rows, 16]``: bit patterns at random, each row around an exponent of its own."""
    generator = torch.Generator().manual_seed(seed)
    around = torch.randint(0, 255, (rows, 1), generator=generator)
    spread = torch.randint(-6, 7, (rows, 16), generator=generator)
    exponent = (around + spread).clamp(0, 255)
    rest = torch.randint(0, 256, (rows, 16), generator=generator)
    patterns = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    return patterns.to(torch.int16).view(torch.bfloat16)


def hadamard_cases() -> dict[str, torch.Tensor]:
    tiny = torch.arange(0, 0x200, dtype=torch.int16).view(torch.bfloat16)
    signs = torch.randint(0, 2, (4096, 16), generator=torch.Generator().manual_seed(1)) * 2 - 1
    pick = torch.randint(0, 0x200, (4096, 16), generator=torch.Generator().manual_seed(2))
    codes = torch.randint(-(2**15), 2**15, (20000, 16), generator=torch.Generator().manual_seed(3))
    return {
        "around every exponent": every_scale(60000, 4),
        "any bits": codes.to(torch.int16).view(torch.bfloat16),
        "subnormals": tiny[pick] * signs.bfloat16(),
        "zeros": torch.tensor([0.0, -0.0]).bfloat16()[pick % 2],
    }


@pytest.mark.parametrize("case", hadamard_cases())
def test_hadamard_has_the_bits_of_sums_divided_last_unless_those_overflow(case: str) -> None:
    x = hadamard_cases()[case]
    made, expected = hadamard16(x, 1), hadamard_divided_last(x)
    finite = x.double().nan_to_num(0.0, 0.0, 0.0)
    fits = finite.abs().sum(1) < torch.finfo(torch.float32).max
    assert fits.sum() > len(x) * 0.5
    assert torch.equal(bits(made[fits]), bits(expected[fits]))


def test_hadamard_overflows_only_where_the_result_does() -> None:
    largest = torch.finfo(torch.bfloat16).max
    generator = torch.Generator().manual_seed(5)
    x = (torch.rand(4096, 16, generator=generator) * 2 - 1) * largest
    x[:2048] = x[:2048].sign() * largest
    x = x.bfloat16()
    values = [hadamard_by_definition(line.tolist()) for line in x.double()]
    expected = torch.tensor(values, dtype=torch.float64)
    made = hadamard16(x, 1).double()
    clearly = expected.abs() > 1.01 * largest
    fits = expected.abs() < 0.99 * largest
    assert clearly.any()
    assert torch.equal(made[clearly], expected[clearly].sign() * torch.inf)
    assert bool(((made - expected)[fits].abs() <= largest * 2.0**-8).all())
    assert bool((expected[fits].abs() > largest / 4).any())


def test_hadamard_rounds_its_input_to_bfloat16_first() -> None:
    x = torch.randn(16, 16)
    assert torch.equal(hadamard16(x, 1), hadamard16(x.bfloat16(), 1))


def test_hadamard_under_a_fake_mode_leaves_no_fake_tensor_behind() -> None:
    operand_spec._signs.cache_clear()
    with FakeTensorMode():
        hadamard16(torch.ones(16, 16), 1)
    assert hadamard16(torch.ones(16, 16), 1).sum() == 16 * 4


# --- packing ---


@pytest.mark.parametrize("dim", [0, 1])
def test_unpack_undoes_pack(dim: int) -> None:
    codes = torch.randint(0, 16, (6, 10), dtype=torch.uint8)
    packed = rounding.pack(codes, dim)
    assert packed.shape == ((3, 10) if dim == 0 else (6, 5))
    unpacked = rounding.unpack(packed.t() if dim == 0 else packed)
    assert torch.equal(unpacked, codes.t() if dim == 0 else codes)
