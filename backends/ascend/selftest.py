"""Questions that only an Ascend 950, or Huawei's simulator of it, can settle, with their answers.

Run by ``fp8core selftest ascend``. A question names what the backend and its documentation assume;
the answer is what the device does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import torch

from fp8core import formats
from fp8core.backend_api import Finding
from fp8core_backends.ascend import hif8, selftest_recipes
from fp8core_backends.ascend.operators import activations, casts, library, norms, products
from fp8core_backends.ascend.selftest_question import Question

_FORMATS = ("e4m3", "e5m2", "hif8")
_FAULTS = (RuntimeError, ValueError, TypeError, IndexError)
"""torch_npu's errors, those of CANN's operators included, and results of other shapes."""


def run() -> Iterator[Finding]:
    """Yield a finding for each question, also if the device refuses to answer it."""
    device = torch.device("npu:0")
    library.load()
    for question in itertools.chain(_questions(), selftest_recipes.questions()):
        try:
            expected, answer = question.ask(device)
        except _FAULTS as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield Finding(question.name, question.assumption, False, f"error: {first}")
            continue
        text = f"as assumed: {answer}" if expected == answer else f"{answer}, assumed {expected}"
        yield Finding(question.name, question.assumption, expected == answer, text)


def _questions() -> Iterator[Question]:
    for name in _FORMATS:
        yield Question(
            f"{name} overflow",
            "a cast beyond the range saturates, inf included",
            functools.partial(_casts, name, [1e9, -1e9, math.inf, -math.inf]),
        )
        yield Question(
            f"{name} NaN",
            "a NaN becomes the format's NaN",
            functools.partial(_casts, name, [math.nan]),
        )
        yield Question(
            f"{name} rounding",
            "midpoints and their neighbours round as in the reference",
            functools.partial(_midpoints, name),
        )
        yield Question(
            f"{name} zeros",
            "a tensor of zeros has the codes 0 and a finite scale",
            functools.partial(_zeros, name),
        )
        yield Question(
            f"{name} scale",
            "a scale is amax * (1 / target), each rounded to float32",
            functools.partial(_scale, name),
        )
    yield Question("amax ignores NaN", "the recorded amax of NaN and 3 is 3", _amax_of_nan)
    yield Question("MX exponents", "the exponent of amax / 448 is rounded up", _exponents)
    yield Question("HiFloat8 hybrid", "hybrid rounding is that of the codec", _hybrid)
    for name in _FORMATS:
        yield Question(
            f"{name} product",
            "a product of 4096 terms is within 2^-12 of the sum of magnitudes",
            functools.partial(_product, name),
        )
    yield Question("RMSNorm", "within two ulp of bfloat16 of float64", _rms_norm)
    yield Question("LayerNorm", "within two ulp of bfloat16 of float64", _layer_norm)
    yield Question("SwiGLU", "within two ulp of bfloat16 of float64", _swiglu)


def _codes_at_scale_1(device: torch.device, name: str, x: torch.Tensor) -> list[int]:
    """Return the codes of ``x [n]`` at scale 1."""
    unit = torch.ones(1, dtype=torch.float32, device="cpu").to(device)
    codes, _ = casts.quant_max(x.reshape(1, -1).to(device), unit, name)
    return [int(code) for code in codes.cpu().flatten()]


def _casts(name: str, x: list[float], device: torch.device) -> tuple[object, object]:
    values = torch.tensor(x, dtype=torch.float32, device="cpu")
    expected = formats.by_name(name).encode(values)
    return expected.tolist(), _codes_at_scale_1(device, name, values)


def _midpoints(name: str, device: torch.device) -> tuple[object, object]:
    spec = formats.by_name(name)
    ordered = sorted({value for value in spec.values if math.isfinite(value)})
    middle = torch.tensor(ordered, dtype=torch.float64, device="cpu").unfold(0, 2, 1).mean(-1)
    exact = middle.to(torch.float32)
    ends = (torch.full_like(exact, end) for end in (math.inf, -math.inf))
    x = torch.cat([exact, *(torch.nextafter(exact, end) for end in ends)])
    pairs = zip(spec.encode(x).tolist(), _codes_at_scale_1(device, name, x), strict=True)
    return 0, sum(expected != code for expected, code in pairs)


def _zeros(name: str, device: torch.device) -> tuple[object, object]:
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device="cpu").to(device)
    codes, scale = casts.dynamic_quant(x, name, _target(name), "pertensor")
    return (True, True), (bool((codes.cpu() == 0).all()), bool(scale.cpu().isfinite().all()))


def _target(name: str) -> float:
    return formats.by_name(name).target_fwd


def _scale(name: str, device: torch.device) -> tuple[object, object]:
    largest = torch.tensor([1.1, 3.3, 417.0], dtype=torch.bfloat16, device="cpu")
    scales = []
    for amax in largest:
        x = amax.repeat(2, 64).to(device)
        scales.append(casts.dynamic_quant(x, name, _target(name), "pertensor")[1].cpu().item())
    inverse = torch.ones(1, device="cpu") / torch.tensor([_target(name)], device="cpu")
    return (largest.float() * inverse).tolist(), scales


def _amax_of_nan(device: torch.device) -> tuple[object, object]:
    x = torch.tensor([[math.nan, -3.0, 1.0, 0.0]], dtype=torch.float32, device="cpu").to(device)
    unit = torch.ones(1, dtype=torch.float32, device="cpu").to(device)
    return 3.0, casts.quant_max(x, unit, "e4m3")[1].cpu().item()


def _exponents(device: torch.device) -> tuple[object, object]:
    """Amaxes at and next to the powers of two of the largest value."""
    amaxes = torch.tensor([448.0, 450.0, 446.0, 1.75, 1.7578125, 0.0], device="cpu")
    x = torch.zeros(amaxes.numel(), 64, device="cpu")
    x[:, 3] = amaxes
    codes = casts.mx_quant(x.to(torch.bfloat16).to(device), "e4m3", -1)[1].cpu()
    exact = amaxes.to(torch.bfloat16).float() / torch.full_like(amaxes, 448.0)
    expected = formats.by_name("e8m0").encode(exact, rounding="up")
    return expected.tolist(), codes[:, 0, 0].tolist()


def _hybrid(device: torch.device) -> tuple[object, object]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.exp2(torch.rand(4096, generator=generator, device="cpu") * 30 - 15)
    npu = library.load()
    unit = torch.ones(1, dtype=torch.float32, device="cpu").to(device)
    codes = npu.npu_quant_max(
        x.reshape(1, -1).to(device),
        unit,
        round_mode="hybrid",
        dst_dtype=npu.hifloat8,
        group_list=None,
    )[0]
    expected = hif8.encode(x, rounding="hybrid")
    return 0, int((codes.view(torch.uint8).cpu().flatten() != expected).sum())


def _product(name: str, device: torch.device) -> tuple[object, object]:
    generator = torch.Generator(device="cpu").manual_seed(1)
    spec = formats.by_name(name)
    codes = [
        spec.encode(torch.randn(size, 4096, generator=generator, device="cpu"))
        for size in (128, 96)
    ]
    unit = torch.ones(1, dtype=torch.float32, device="cpu").to(device)
    a, b = (part.to(device) for part in codes)
    result = (
        products.quant_matmul(a, b.t(), (unit, unit), (name, name), torch.float32).cpu().double()
    )
    exact_a, exact_b = (spec.decode(part).double() for part in codes)
    error = (result - exact_a @ exact_b.t()).abs() / (exact_a.abs() @ exact_b.abs().t())
    return True, bool(error.max() <= 2.0**-12)


def _near(result: torch.Tensor, exact: torch.Tensor) -> bool:
    bound = 2 * torch.finfo(torch.bfloat16).eps * exact.abs() + 1e-30
    return bool(((result.cpu().double() - exact).abs() <= bound).all())


def _values() -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(2)
    return torch.randn(64, 256, generator=generator, device="cpu").to(torch.bfloat16)


def _rms_norm(device: torch.device) -> tuple[object, object]:
    x, weight = _values(), _values()[0]
    y, _ = norms.rms_norm(x.to(device), weight.to(device), 1e-5)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    return True, _near(y, exact)


def _layer_norm(device: torch.device) -> tuple[object, object]:
    x, weight = _values(), _values()[0].float()
    y, *_ = norms.layer_norm(x.to(device), weight.to(device), None, 1e-5)
    wide = x.double() - x.double().mean(-1, keepdim=True)
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    return True, _near(y, exact)


def _swiglu(device: torch.device) -> tuple[object, object]:
    x = _values()
    a, b = x.double().chunk(2, -1)
    return True, _near(activations.swiglu(x.to(device)), a * torch.sigmoid(a) * b)
