"""Values of codes under any scales, bit for bit; test_sizes.py has the values of casts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import formats
from fp8core.backend_api import DequantizeDesc, Operand, OperandError, OperandSpec
from fp8core.conformance.compare import same_bits
from fp8core_backends.cuda import dequantize
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, EMPTY, backend, put_on_the_host, spec

RECIPES = ("delayed", "current", "rowwise", "vector", "square")
MX, FP4 = spec("mx"), spec("fp4")
BYTE_SCALED = (
    *(MX, spec("mx", "e5m2"), spec("mx square"), FP4, spec("fp4 square"), spec("fp4 transformed")),
)


on_device = pytest.mark.needs_accelerator("cuda")


def check(own: OperandSpec, operand: Operand, dtype: torch.dtype) -> None:
    desc = DequantizeDesc(own, dtype)
    ours, theirs = (backend(name).bind(desc, DEVICE)(operand) for name in ("cuda", "reference"))
    name = f"{desc} of {list(operand.data.shape)}, {operand.data.stride()}"
    same_bits(name, ours, theirs)


def random_operand(own: OperandSpec, rows: int, k: int) -> Operand:
    """Return all codes in turn, under scales of every kind: also 0, inf, NaN and subnormal ones."""
    packed = 8 // formats.by_name(own.format).bits
    data = torch.arange(rows * k // packed, device=DEVICE).to(torch.uint8).reshape(rows, -1)
    counts = [
        -(-size // step) if step else 1 for size, step in zip((rows, k), own.block, strict=True)
    ]
    whole = None
    if own.scale_format == "float32":
        scales = torch.randn(counts, device=DEVICE).mul_(40).exp2_()
        specials = torch.tensor((0.0, torch.inf, torch.nan, 1e-45, 3e38, 1e-39), device=DEVICE)
        scales.view(-1)[: len(specials)] = specials[: scales.numel()]
    else:
        scales = torch.arange(counts[0] * counts[1], device=DEVICE).to(torch.uint8).reshape(counts)
    if own.scale_format == "e4m3":
        whole = torch.full((1, 1), 0.37, device=DEVICE)
    return Operand(data, scales, whole)


@on_device
@pytest.mark.parametrize("own", [*map(spec, RECIPES), *BYTE_SCALED], ids=str)
def test_every_code_under_every_scale_equals_the_reference(own: OperandSpec) -> None:
    sizes = ((256, 256), (300, 322), (1, 4096), (4096, 2))
    for (rows, k), dtype in itertools.product(sizes, DTYPES):
        check(own, random_operand(own, rows, k), dtype)


class Recorder:
    """Stands for the native library; takes down what it is bound with and called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.bound: tuple[Any, ...] = ()
        names = ("e4m3", "e5m2", "e2m1", "bfloat16", "float16", "float32")
        self.ElementType = type("ElementType", (), {"__members__": {one: one for one in names}})
        names = ("float32", "e8m0", "e4m3")
        self.ScaleFormat = type("ScaleFormat", (), {"__members__": {one: one for one in names}})

    def Dequantize(self, *bound: Any) -> Callable[..., None]:
        self.bound = bound
        return lambda arguments, stream: self.calls.append(arguments)


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Callable[[OperandSpec], tuple[Recorder, Any]]:
    """Bind on the CPU, for a library that takes down its arguments."""
    put_on_the_host(monkeypatch, dequantize)

    def bound(own: OperandSpec) -> tuple[Recorder, Any]:
        native = Recorder()
        desc = DequantizeDesc(own, torch.bfloat16)
        return native, dequantize.Dequantize(desc, torch.device("cuda", 0), native)

    return bound


def test_library_is_bound_with_formats_and_blocks(bind: Any) -> None:
    assert bind(FP4)[0].bound == ("e2m1", "bfloat16", "e4m3", 1, 16, 0)
    assert bind(spec("rowwise", "e5m2"))[0].bound == ("e5m2", "bfloat16", "float32", 1, 0, 0)


def test_codes_and_scales_are_read_where_they_are(bind: Any) -> None:
    native, run = bind(spec("vector"))
    data = torch.zeros(6, 300, dtype=torch.uint8)[:, 4:264]
    scales = torch.ones(3, 8).t()[:6]
    x = run(Operand(data, scales))
    sizes = (6, 260, 300, scales.data_ptr(), 1, 8, 0)
    assert native.calls == [(data.data_ptr(), *sizes, x.data_ptr())]
    assert (x.shape, x.dtype, x.is_contiguous()) == ((6, 260), torch.bfloat16, True)


def test_operand_without_elements_calls_nothing(bind: Any) -> None:
    native, run = bind(spec("current"))
    for shape in EMPTY:
        x = run(Operand(torch.zeros(shape, dtype=torch.uint8), torch.ones(1, 1)))
        assert (x.shape, native.calls) == (shape, [])


WRONG: dict[str, tuple[OperandSpec, tuple[Any, ...]]] = {
    "too few scales": (spec("vector"), (torch.ones(6, 2), None)),
    "scales of another orientation": (spec("vector"), (torch.ones(3, 6), None)),
    "no scales": (spec("current"), (None, None)),
    "scales of another dtype": (spec("current"), (torch.ones(1, 1).double(), None)),
    "bytes for float32": (MX, (torch.ones(6, 9), None)),
    "a second scale": (spec("current"), (torch.ones(1, 1), torch.ones(1, 1))),
    "no second scale": (FP4, (torch.zeros(6, 33, dtype=torch.uint8), None)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_scales_that_do_not_go_with_the_codes_are_refused(bind: Any, wrong: str) -> None:
    own, scales = WRONG[wrong]
    native, run = bind(own)
    data = torch.zeros(6, 264, dtype=torch.uint8)
    with pytest.raises(OperandError, match=r"expected uint8 codes, .* scale_inv \["):
        run(Operand(data, *scales))
    assert native.calls == []
