"""Norms, activations and column sums of the reference backend against torch in float64.

In float64 both sides take fewer than 64 roundings of intermediates below 512 (``|x| <= 8``, cubed),
so they differ by less than ``64 * 512 * 2^-53``. In float32 the same with 2^-24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from fp8core.backend_api import (
    ACTIVATIONS,
    ActivationBackwardDesc,
    ActivationDesc,
    ColumnSumsDesc,
    NormBackwardDesc,
    NormDesc,
)
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
BOUND_64 = 64 * 512 * 2.0**-53
BOUND_32 = 64 * 512 * 2.0**-24
CLAMPED = (1.5, 1.702, 1.0)
SIZES = [(1, 1), (3, 5), (7, 33), (0, 4)]

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "erfgelu": functional.gelu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "srelu": lambda x: functional.relu(x) ** 2,
    "silu": functional.silu,
}
GATES = {
    "geglu": FUNCTIONS["gelu"],
    "glu": torch.sigmoid,
    "qgeglu": FUNCTIONS["qgelu"],
    "reglu": FUNCTIONS["relu"],
    "sreglu": FUNCTIONS["srelu"],
    "swiglu": FUNCTIONS["silu"],
}


def judge(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return what Transformer Engine's activation ``name`` gives, in torch's own operations."""
    if name in FUNCTIONS:
        return FUNCTIONS[name](x)
    a, b = x.chunk(2, dim=-1)
    if name in GATES:
        return GATES[name](a) * b
    limit, alpha, offset = CLAMPED
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + offset)


def params(name: str) -> tuple[float, ...]:
    return CLAMPED if name == "clamped_swiglu" else ()


def columns(name: str, n: int) -> int:
    return n if name in FUNCTIONS else 2 * n


def bind(desc: Any) -> Callable[..., Any]:
    return ReferenceBackend().bind(desc, CPU)


def values(rows: int, n: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return (3 * torch.randn(rows, n, dtype=F64)).clamp(-8, 8).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> bool:
    return got.shape == want.shape and bool(((got.double() - want.double()).abs() <= bound).all())


def test_the_judge_knows_every_activation() -> None:
    assert {*FUNCTIONS, *GATES, "clamped_swiglu"} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_values_and_gradients(name: str) -> None:
    for rows, n in SIZES:
        x = values(rows, columns(name, n)).requires_grad_()
        grad = values(rows, n) / 8
        expected = judge(name, x)
        (want,) = torch.autograd.grad(expected, x, grad)
        x = x.detach()
        y = bind(ActivationDesc(name, F64, F64, params(name)))(x)
        assert close(y, expected, BOUND_64), (rows, n)
        got = bind(ActivationBackwardDesc(name, F64, F64, params(name)))(grad, x)
        assert close(got, want, BOUND_64), (rows, n)


SMOOTH = ("erfgelu", "gelu", "qgelu", "silu", "geglu", "qgeglu", "swiglu", "clamped_swiglu")


@pytest.mark.parametrize("name", SMOOTH)
def test_slopes_of_large_values_are_constant(name: str) -> None:
    x = torch.tensor([[size * sign for size in (1e4, 2e19, 3e38) for sign in (1, -1)]])
    slope = [0.0, 0.0] if name == "clamped_swiglu" else [1.0, 0.0]
    x = x if name in FUNCTIONS else torch.cat((x, torch.ones_like(x)), dim=-1)
    grad = bind(ActivationBackwardDesc(name, F32, F32, params(name)))(torch.ones(1, 6), x)
    assert grad[0, :6].tolist() == slope * 3


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_computes_in_float32_and_rounds_at_the_end_only(name: str) -> None:
    x, grad = values(5, columns(name, 9), BF16), values(5, 9, BF16)
    for make, given in ((ActivationDesc, (x,)), (ActivationBackwardDesc, (grad, x))):
        wide, narrow = (
            bind(make(name, BF16, dtype, params(name)))(*given) for dtype in (F32, BF16)
        )
        assert wide.dtype == F32
        assert torch.equal(narrow, wide.to(BF16)), make
        if make is ActivationDesc:
            assert close(wide, judge(name, x.double()), BOUND_32)


def norm_judge(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    gamma = weight + 1 if desc.zero_centered else weight
    if desc.kind == "layernorm":
        return functional.layer_norm(x, x.shape[-1:], gamma, bias, desc.eps)
    return functional.rms_norm(x, x.shape[-1:], gamma, desc.eps)


def norm_case(
    kind: str, rows: int, n: int, dtype: torch.dtype = F64
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    own = [values(1, n, dtype)[0] / 4 for _ in range(2 if kind == "layernorm" else 1)]
    return values(rows, n, dtype), own


KINDS = [(kind, centered) for kind in ("layernorm", "rmsnorm") for centered in (False, True)]
NORM_SIZES = [(3, 5), (7, 33), (0, 4)]


@pytest.mark.parametrize(("rows", "n"), NORM_SIZES)
@pytest.mark.parametrize(("kind", "centered"), KINDS)
def test_norm_values_and_gradients(kind: str, centered: bool, rows: int, n: int) -> None:
    desc = NormDesc(kind, F64, F64, 1e-3, centered)
    x, own = norm_case(kind, rows, n)
    grad = values(rows, n) / 8
    leaves = [one.requires_grad_() for one in (x, *own)]
    judged = norm_judge(desc, x, own[0], own[1] if len(own) > 1 else None)
    wanted = torch.autograd.grad(judged, leaves, grad)
    with torch.no_grad():
        y, mean, rstd = bind(desc)(*leaves)
        got = bind(NormBackwardDesc(desc))(grad, x, own[0], mean, rstd)
    assert close(y, judged, BOUND_64)
    assert (got[2] is None) == (kind == "rmsnorm")
    # rstd is at most 32 = eps^-1/2, and multiplies up to 7 rows' sums
    for one, want in zip(got, wanted, strict=False):
        assert close(one, want, 32 * 7 * BOUND_64)


@pytest.mark.parametrize(("kind", "centered"), KINDS)
def test_norm_rounds_to_bfloat16_at_the_end_only(kind: str, centered: bool) -> None:
    x, own = norm_case(kind, 5, 9, BF16)
    wide, *_ = bind(NormDesc(kind, BF16, F32, 1e-5, centered))(x, *own)
    narrow, *_ = bind(NormDesc(kind, BF16, BF16, 1e-5, centered))(x, *own)
    assert wide.dtype == F32
    assert torch.equal(narrow, wide.to(BF16))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_statistics_are_float32_rows(kind: str) -> None:
    x, own = norm_case(kind, 5, 9, BF16)
    _, mean, rstd = bind(NormDesc(kind, BF16, BF16, 1e-5))(x, *own)
    assert (rstd.dtype, rstd.shape) == (F32, (5,))
    assert mean is None if kind == "rmsnorm" else (mean.dtype, mean.shape) == (F32, (5,))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_of_a_zero_row_is_the_bias_and_has_finite_gradients(kind: str) -> None:
    _, own = norm_case(kind, 1, 8, F32)
    desc, x = NormDesc(kind, F32, F32, 1e-5), torch.zeros(2, 8)
    y, mean, rstd = bind(desc)(x, *own)
    want = own[1] if len(own) > 1 else torch.zeros(8)
    assert torch.equal(y, want.expand(2, 8))
    grads = bind(NormBackwardDesc(desc))(torch.ones(2, 8), x, own[0], mean, rstd)
    assert all(bool(grad.isfinite().all()) for grad in grads if grad is not None)


@pytest.mark.parametrize("make", [ActivationDesc, ActivationBackwardDesc])
@pytest.mark.parametrize(
    ("name", "params", "reason"),
    [
        ("gelu_tanh", (), "gelu_tanh"),
        ("swish", (), "swish"),
        ("clamped_swiglu", (), "clamped_swiglu takes"),
        ("clamped_swiglu", (7.0, 1.0), "clamped_swiglu takes"),
        ("gelu", (1.0,), "gelu takes"),
    ],
)
def test_an_unknown_activation_or_number_of_parameters_is_refused(
    name: str, params: tuple[float, ...], reason: str, make: Callable[..., Any]
) -> None:
    assert reason in (ReferenceBackend().unsupported(make(name, BF16, BF16, params), CPU) or "")


def test_an_unknown_norm_is_refused() -> None:
    desc = NormDesc("batchnorm", BF16, BF16, 1e-5)
    assert "batchnorm" in (ReferenceBackend().unsupported(desc, CPU) or "")


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, F64], ids=str)
def test_column_sums_are_torchs_in_float32_or_float64(dtype: torch.dtype) -> None:
    x = (torch.full((300, 70), 1e-17, dtype=F64) + torch.randn(300, 70)).to(dtype)
    wide = F64 if dtype == F64 else F32
    sums = bind(ColumnSumsDesc(dtype))(x)
    assert sums.dtype == wide
    assert torch.equal(sums, x.sum(0, dtype=wide))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_column_sums_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    assert "no column sums" in (ReferenceBackend().unsupported(ColumnSumsDesc(dtype), CPU) or "")
