"""gemm and grouped_gemm of quantized and plain tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, QuantizedTensor, UnsupportedError, functional
from fp8core.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tests.device import DEVICE
from tests.hopper_gemm import cut_off
from tests.pairs import pairs, turns
from tests.refusals import unrefused

MAKERS: dict[str, Callable[[], Quantizer]] = {
    "current": lambda: Float8CurrentScalingQuantizer("e4m3", DEVICE),
    "block": lambda: Float8BlockQuantizer(
        "e4m3", rowwise=True, columnwise=True, block_scaling_dim=1
    ),
    "mxfp8": lambda: MXFP8Quantizer("e4m3"),
    "nvfp4": NVFP4Quantizer,
    "nvfp4_row": lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
}
KINDS = ("qq", "qp", "pq", "pp")  # quantized and plain operands
M, N, K = 64, 96, 128


@pytest.fixture(params=MAKERS)
def quantizer(request: pytest.FixtureRequest) -> Quantizer:
    return MAKERS[request.param]()


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def values_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The values that a product takes: rounded to the plain tensor's dtype if there is one."""
    quantized = all(isinstance(x, QuantizedTensor) for x in tensors)
    dtype = torch.float32 if quantized else torch.bfloat16
    return [functional.dequantize(x.detach(), dtype).double() for x in tensors]


def close(made: torch.Tensor, wanted: torch.Tensor, lost: torch.Tensor | float = 0.0) -> None:
    # Of the largest value: the result is rounded, and in gradients the values of one side as well.
    tolerance = {torch.bfloat16: 2**-7, torch.float32: 2**-16}[made.dtype]
    error = (made.double() - wanted).abs() - lost
    assert error.max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize(("name", "kinds", "dtype"), pairs(MAKERS, KINDS, [None, torch.float32]))
def test_the_product_is_that_of_the_values(
    name: str, kinds: str, dtype: torch.dtype | None
) -> None:
    quantizer = MAKERS[name]()
    a, b, bias = rand(2, M // 2, K), rand(N, K), rand(N)
    given = [quantizer(x) if kind == "q" else x for x, kind in zip((a, b), kinds, strict=True)]
    made = functional.gemm(*given, dtype, bias)
    assert (made.shape, made.dtype) == ((2, M // 2, N), dtype or torch.bfloat16)
    x, w = values_of(*given)
    close(made, x @ w.t() + bias.double(), cut_off(x, w) if kinds == "qq" else 0.0)


def test_two_quantized_tensors_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (MXFP8Quantizer("e4m3")(rand(*size)) for size in ((M, K), (N, K)))
    monkeypatch.setattr(QuantizedTensor, "dequantize", None)
    assert functional.gemm(a, b).shape == (M, N)


@pytest.mark.parametrize("sizes", [(5, 7, 32), (1, 1, 32), (0, 3, 32), (3, 0, 64)])
def test_any_number_of_rows(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    quantizer = MXFP8Quantizer("e4m3", columnwise=False)
    a, b = quantizer(rand(m, k)), quantizer(rand(n, k))
    assert functional.gemm(a, b).shape == (m, n)
    out = torch.ones(m, n)
    functional.gemm(a, b, out=out, accumulate=True)
    assert torch.equal(out, functional.gemm(a, b, torch.float32) + 1)


def test_out_is_written_and_accumulated(quantizer: Quantizer) -> None:
    a, b = quantizer(rand(M, K)), quantizer(rand(N, K))
    product, out = functional.gemm(a, b, torch.float32), torch.full((M, N), 7.0)
    assert functional.gemm(a, b, out=out) is out
    assert torch.equal(out, product)
    functional.gemm(a, b, out=out, accumulate=True)
    torch.testing.assert_close(out, 2 * product)


@pytest.mark.parametrize(("name", "kinds"), [*turns(MAKERS, KINDS), *turns(["block"], KINDS[2:])])
def test_gradients_are_those_of_the_values(name: str, kinds: str) -> None:
    quantizer = MAKERS[name]()
    a, b, bias = (x.requires_grad_() for x in (rand(2, M // 2, K), rand(N, K), rand(N)))
    given = [quantizer(x) if kind == "q" else x for x, kind in zip((a, b), kinds, strict=True)]
    grad = rand(2, M // 2, N)
    functional.gemm(*given, bias=bias).backward(grad)
    dy = grad.view(-1, N).double()
    x, w = (functional.dequantize(one.detach()).double() for one in given)
    close(a.grad.view(-1, K), dy @ w)
    close(b.grad, dy.t() @ x.view(-1, K))
    close(bias.grad, dy.sum(0))


@pytest.mark.parametrize("groups", [None, 1])
def test_backward_rounds_no_operand_before_it_multiplies(groups: int | None) -> None:
    # 1 + 2^-12 has no bfloat16, and in that dtype each of these gradients would be 0.
    fine, opposite = torch.tensor([1 + 2**-12, 1.0]), torch.tensor([1.0, -1.0])

    def gradients(dtype: torch.dtype, out: torch.dtype, given: list[torch.Tensor]) -> list[float]:
        a, b, grad = given
        a, b = (x.to(dtype, copy=True).requires_grad_() for x in (a, b))
        run = functional.gemm if groups is None else functional.grouped_gemm
        made = run(a, b, out) if groups is None else run(a, [b], [len(a)], out)
        made.backward(grad.to(out))
        return [a.grad.float().sum().item(), b.grad.float().sum().item()]

    one = torch.ones(1, 1)
    by_grad = [one, opposite[:, None], fine[None]]
    assert gradients(torch.bfloat16, torch.float32, by_grad)[0] == 2**-12
    by_b = [one, fine[:, None], opposite[None]]
    assert gradients(torch.float32, torch.bfloat16, by_b)[0] == 2**-12
    by_a = [fine[:, None], one, opposite[:, None]]
    assert gradients(torch.float32, torch.bfloat16, by_a)[1] == 2**-12


def test_backward_dequantizes_to_the_dtype_of_forward() -> None:
    b = Float8CurrentScalingQuantizer("e4m3", DEVICE)(rand(32, 32))
    a = rand(32, 32, dtype=torch.float32).requires_grad_()
    functional.gemm(a, b, torch.bfloat16).backward(torch.eye(32, dtype=torch.bfloat16))
    assert torch.equal(a.grad, b.dequantize(torch.float32))


def test_a_quantized_gradient_meets_columnwise_operands() -> None:
    quantizer = MXFP8Quantizer("e4m3")
    a, b = (quantizer(rand(*size)).detach().requires_grad_() for size in ((M, K), (N, K)))
    grad = quantizer(rand(M, N))
    functional.gemm(a, b).backward(grad)
    dy_row, dy_column = grad.operands
    spec = quantizer.plan.rowwise
    product = fp8core.dispatch.table.resolve(
        fp8core.backend_api.GemmDesc(spec, spec, torch.bfloat16), DEVICE
    ).run
    assert torch.equal(a.grad, product(dy_row, b.operands.columnwise))
    assert torch.equal(b.grad, product(dy_column, a.operands.columnwise))


def test_a_transformed_operand_meets_no_other() -> None:
    quantizer = NVFP4Quantizer(with_rht=True)
    a, b = (quantizer(rand(*size)).detach().requires_grad_() for size in ((M, K), (N, K)))
    grad = quantizer(rand(M, N))
    functional.gemm(a, b).backward(grad)
    close(a.grad, grad.dequantize() @ b.detach().dequantize())


@pytest.mark.parametrize("groups", [None, 2])
def test_a_penalty_on_gradients_is_refused(groups: int | None) -> None:
    """Also where the gradient that arrives is a constant, which torch would not notice."""
    a, b = rand(M, K).requires_grad_(), rand(N, K).requires_grad_()
    if groups is None:
        y = functional.gemm(a, b)
    else:
        y = functional.grouped_gemm(a, [b] * groups, [M - 1, 1])
    (grad,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        (y.sum() + grad.square().sum()).backward()


def test_writing_a_tensor_before_backward_is_an_error() -> None:
    a, b = rand(M, K).requires_grad_(), MXFP8Quantizer("e4m3")(rand(N, K))
    made = functional.gemm(a, b)
    b.zero_()
    with pytest.raises(RuntimeError, match="modified"):
        made.sum().backward()


def test_a_quantized_bias_is_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, bias = rand(M, K), rand(N, K), functional.quantize(rand(N), "current")
    assert torch.equal(
        functional.gemm(a, b, bias=bias), functional.gemm(a, b, None, bias.dequantize())
    )
    made = functional.grouped_gemm(a, [b], [M], None, [bias])
    assert torch.equal(made, functional.gemm(a, b, bias=bias))


def test_torch_autocast_changes_nothing() -> None:
    a, b = (MXFP8Quantizer("e4m3")(rand(*size)) for size in ((M, K), (N, K)))
    expected = functional.gemm(a, b, torch.float32)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(functional.gemm(a, b, torch.float32), expected)


def column_only() -> QuantizedTensor:
    return MXFP8Quantizer("e4m3", rowwise=False)(rand(32, 32))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "another k": (lambda: functional.gemm(rand(4, 8), rand(4, 9)), OperandError, "b is|b \\["),
    "three dimensions of b": (
        lambda: functional.gemm(rand(4, 8), rand(2, 4, 8)),
        OperandError,
        "expected a",
    ),
    "two dtypes": (
        lambda: functional.gemm(rand(4, 8), rand(4, 8, dtype=torch.float32)),
        OperandError,
        "Convert one",
    ),
    "integers": (lambda: functional.gemm(rand(4, 8).int(), rand(4, 8)), OperandError, "int32"),
    "no tensor": (lambda: functional.gemm(None, rand(4, 8)), OperandError, "NoneType"),  # type: ignore[arg-type]
    "a bias of another size": (
        lambda: functional.gemm(rand(4, 8), rand(4, 8), bias=rand(5)),
        OperandError,
        r"expected \[4\]",
    ),
    "another device": (
        lambda: functional.gemm(rand(4, 8), rand(4, 8).to("meta")),
        OperandError,
        "nothing is moved",
    ),
    "columnwise alone": (
        lambda: functional.gemm(rand(32, 32), column_only()),
        OperandError,
        "rowwise usage",
    ),
    "accumulate into nothing": (
        lambda: functional.gemm(rand(4, 8), rand(4, 8), accumulate=True),
        OperandError,
        "needs out",
    ),
    "out of another size": (
        lambda: functional.gemm(rand(4, 8), rand(4, 8), out=rand(4, 5)),
        OperandError,
        r"expected \[4, 4\]",
    ),
    "out of another dtype": (
        lambda: functional.gemm(rand(4, 8), rand(4, 8), torch.float32, out=rand(4, 4)),
        OperandError,
        "expected",
    ),
    "a quantized out": (
        lambda: functional.gemm(rand(32, 32), rand(32, 32), out=column_only()),
        OperandError,
        "update_quantized",
    ),
    "out with a gradient": (
        lambda: functional.gemm(rand(4, 8).requires_grad_(), rand(4, 8), out=rand(4, 4)),
        UnsupportedError,
        "no_grad",
    ),
    "a result in int": (
        lambda: functional.gemm(rand(4, 8), rand(4, 8), torch.int8),
        OperandError,
        "out_dtype",
    ),
    "splits beyond the rows": (
        lambda: functional.grouped_gemm(rand(4, 8), [rand(4, 8)] * 2, [2, 3]),
        OperandError,
        "add up to its rows",
    ),
    "a split too many": (
        lambda: functional.grouped_gemm(rand(4, 8), [rand(4, 8)] * 2, [2, 1, 1]),
        OperandError,
        "one size a group",
    ),
    "splits that are no integers": (
        lambda: functional.grouped_gemm(rand(4, 8), [rand(4, 8)] * 2, [2.5, 1.5]),
        OperandError,
        "expected integers",
    ),
    "groups stored in two ways": (
        lambda: functional.grouped_gemm(
            rand(32, 32), [MXFP8Quantizer("e4m3")(rand(32, 32)), rand(32, 32)], [16, 16]
        ),
        OperandError,
        "all stored as",
    ),
    "no groups": (lambda: functional.grouped_gemm(rand(4, 8), [], []), OperandError, "no group"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(OperandError, match="is nested"):
        functional.gemm(torch.nested.nested_tensor([rand(4, 8)]), rand(4, 8))


def test_what_does_not_fit_is_named() -> None:
    assert unrefused(REFUSED) == {}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [*turns(["current", "block", "mxfp8", "nvfp4"], KINDS), *turns(["mxfp8"], ["qq", "qp", "pp"])],
)
def test_grouped_products_and_gradients_are_those_of_each_group(name: str, kinds: str) -> None:
    splits, quantizer = [32, 0, 64, 32], MAKERS[name]()
    x = rand(sum(splits), K).requires_grad_()
    weights = [rand(N, K).requires_grad_() for _ in splits]
    biases = [rand(N).requires_grad_() for _ in splits]
    a: Any = quantizer(x) if kinds[0] == "q" else x
    bs: Any = [quantizer(w) if kinds[1] == "q" else w for w in weights]
    made = functional.grouped_gemm(a, bs, splits, torch.float32, biases)
    grad = rand(sum(splits), N, dtype=torch.float32)
    made.backward(grad)
    values, *matrices = values_of(a, *bs)
    parts = zip(made.split(splits), values.split(splits), grad.double().split(splits), strict=True)
    for group, (d, rows, dy) in enumerate(parts):
        if not len(d):
            assert not weights[group].grad.any()
            continue
        lost = cut_off(rows, matrices[group]) if kinds == "qq" else 0.0
        close(d, rows @ matrices[group].t() + biases[group].detach().double(), lost)
        close(x.grad.split(splits)[group], dy @ matrices[group])
        close(weights[group].grad, dy.t() @ rows)
        close(biases[group].grad, dy.sum(0))


def test_grouped_products_take_stacked_matrices_and_out() -> None:
    a, b, splits = rand(48, 64), rand(3, 32, 64), [16, 8, 24]
    expected = functional.grouped_gemm(a, list(b), splits, torch.float32)
    assert torch.equal(functional.grouped_gemm(a, b, splits, torch.float32), expected)
    out = torch.ones(48, 32)
    assert functional.grouped_gemm(a, b, splits, out=out, accumulate=True) is out
    assert torch.equal(out, expected + 1)


def test_square_blocks_of_several_groups_are_refused() -> None:
    quantizer = Float8BlockQuantizer("e4m3", rowwise=True, columnwise=False)
    with pytest.raises(UnsupportedError, match="several groups"):
        functional.grouped_gemm(
            quantizer(rand(128, 128)), [quantizer(rand(128, 128))] * 2, [64, 64]
        )
