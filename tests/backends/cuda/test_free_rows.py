"""Any number of rows: products that take steps of them compute the rest, and nothing is padded."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8core
from fp8core import recipe
from fp8core.backend_api import (
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core.dispatch import table
from fp8core.tensors.storage import split
from fp8core_backends.cuda import autotune, gemm, memory
from fp8core_backends.cuda.backend import CudaBackend
from fp8core_backends.cuda.grouped import bind_grouped_gemm
from fp8core_backends.cuda.layout import empty_codes, empty_scales, with_rows
from fp8core_backends.reference.backend import ReferenceBackend
from tests.backends.cuda.cuda_cases import spec
from tests.benchmarks import host_path

BF16, CPU = torch.bfloat16, torch.device("cpu")
N, K = 48, 272
PARTS = GemmDesc(spec("vector"), spec("square"), BF16, part=True)


@pytest.fixture(autouse=True)
def memory_of_devices() -> Iterator[None]:
    """Fail a test that leaves an allocator of its own: kernels of later ones would write there."""
    before = memory._empty_here
    yield
    assert memory._empty_here is before


def on_cpu(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory that is full of ones: NaN as codes, and as scales."""
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    return tensor.fill_(torch.nan if dtype.is_floating_point else 255)


class Product:
    """Stands for cuBLASLt's product of a native descriptor: it reads and writes at addresses."""

    takes_bias = True

    def __init__(self, desc: tuple[Any, ...], *_: object) -> None:
        self.m, self.n, self.k, self.a, self.b, *_rest = desc
        out, has_bias, _, self.accumulates = desc[5:9]
        self.pitch = desc[11]
        self.out_dtype = (BF16, torch.float32)[out - 1]
        if (self.m % 4 and self.a[1] == 0) or (has_bias and not self.takes_bias):
            raise ValueError("cuBLASLt has no algorithm")

    def workspace_bytes(self, candidate: int) -> int:
        return 0

    def run(self, candidate: int, addresses: tuple[int, ...], stream: int) -> None:
        """Multiply operands with scales of vectors or of squares."""
        a, a_scale, b, b_scale, bias, d = addresses
        m, n, k = self.m, self.n, self.k
        assert (k, k) == (self.a[3], self.b[3])  # codes without gaps
        values_a = at(a, torch.float8_e4m3fn, (m, k)).float() * scales(self.a[1], a_scale, m, k)
        values_b = at(b, torch.float8_e4m3fn, (n, k)).float() * scales(self.b[1], b_scale, n, k)
        product = values_a @ values_b.t()
        if bias:
            product += at(bias, BF16, (n,)).float()
        result = at(d, self.out_dtype, ((m - 1) * self.pitch + n,)).as_strided(
            (m, n), (self.pitch, 1)
        )
        result.copy_(product + result if self.accumulates else product)


def at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of contiguous memory at ``address``."""
    size = dtype.itemsize * torch.Size(shape).numel()
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def scales(mode: int, address: int, rows: int, k: int) -> torch.Tensor:
    """Return the scale of each element of an operand, as cuBLASLt reads it."""
    blocks = -(-k // 128)
    if mode == 0:  # vectors
        whole = at(address, torch.float32, (blocks, -(-rows // 4) * 4)).t()
        return whole.repeat_interleave(128, 1)[:rows, :k]
    squares = at(address, torch.float32, (-(-rows // 128), -(-blocks // 4) * 4))
    return squares.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :k]


class Native:
    """The part of the native library that a product is described to."""

    Gemm = Product

    ElementType = SimpleNamespace(__members__={"e4m3": 0, "bfloat16": 1, "float32": 2})
    ScaleMode = SimpleNamespace(__members__={"vec128": 0, "block128": 1})

    def OperandDesc(self, *fields: object) -> tuple[object, ...]:
        return fields

    def GemmDesc(self, *fields: object) -> tuple[object, ...]:
        return fields

    def Transpose(self, index: int) -> None:
        """Nothing here is transposed."""


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    return bound(monkeypatch)


def bound(monkeypatch: pytest.MonkeyPatch, accumulate: bool = False) -> Any:
    monkeypatch.setattr(gemm, "raw_stream", lambda index: 0)
    monkeypatch.setattr(memory, "_empty_here", on_cpu)
    monkeypatch.setattr(memory, "_current_device", lambda: 0)
    monkeypatch.setattr(autotune, "choose", lambda *arguments: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    desc = GemmDesc(spec("vector"), spec("square"), BF16, accumulate=accumulate)
    return gemm.LowPrecisionGemm(desc, torch.device("cuda", 0), Native())


def cast(own: OperandSpec, x: torch.Tensor) -> Operand:
    operand = ReferenceBackend().bind(QuantizeDesc(x.dtype, own, None), CPU)(x).rowwise
    assert operand is not None
    return operand


def in_place_of_the_cast(operand: Operand) -> Operand:
    """Return ``operand`` in memory as the backend's casts allocate it."""
    rows, k = operand.data.shape
    codes, (scale_inv, _) = (
        empty_codes("vec128", rows, k, on_cpu, k),
        empty_scales("vec128", rows, k, on_cpu),
    )
    return Operand(codes.copy_(operand.data), scale_inv.copy_(operand.scale_inv))


def weight() -> Operand:
    operand, (scale_inv, _) = (
        cast(spec("square"), torch.randn(N, K).to(BF16)),
        empty_scales("block128", N, K, on_cpu),
    )
    return Operand(operand.data, scale_inv.copy_(operand.scale_inv))


def test_a_product_names_the_kernel_for_few_rows_if_that_may_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = [bound(monkeypatch, accumulate).kernel for accumulate in (False, True)]
    assert ["multiply_few_rows" in kernel for kernel in kernels] == [True, False]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("layout", [in_place_of_the_cast, lambda operand: operand])
def test_ragged_rows_have_the_bits_of_the_same_rows_among_others(
    layout: Callable[[Operand], Operand], rows: int, product: Any
) -> None:
    x, b, bias = torch.randn(20, K).to(BF16), weight(), torch.randn(N).to(BF16)
    whole, part = cast(spec("vector"), x), layout(cast(spec("vector"), x[:rows]))
    assert torch.equal(product(part, b), product(whole, b)[:rows])
    wanted = product(whole, b, bias=bias)[:rows]
    assert torch.equal(product(part, b, bias=bias), wanted)
    around = torch.zeros(rows + 4, N, dtype=BF16)
    product(part, b, bias=bias, out=around[:rows])
    assert torch.equal(around[:rows], wanted)
    assert not around[rows:].any()


def test_results_may_be_columns_of_a_wider_tensor(product: Any) -> None:
    a, b = cast(spec("vector"), torch.randn(8, K).to(BF16)), weight()
    around = torch.zeros(8, 3 * N, dtype=BF16)
    result = product(a, b, out=around[:, N : 2 * N])
    assert result.data_ptr() == around[:, N:].data_ptr()
    assert torch.equal(around[:, N : 2 * N], product(a, b))
    assert not around[:, :N].any()
    assert not around[:, 2 * N :].any()
    odd = torch.zeros(8, 3 * N + 1, dtype=BF16)  # rows that cuBLASLt cannot address
    assert torch.equal(product(a, b, out=odd[:, N : 2 * N]), product(a, b))


def test_ragged_groups_have_the_bits_of_products_of_their_own(
    product: Callable[..., torch.Tensor],
) -> None:
    bounds = [0, 1, 1, 22, 38, 45]
    x = torch.randn(bounds[-1], K) * torch.arange(1, bounds[-1] + 1)[:, None]
    operand, weights = cast(PARTS.a, x), [weight() for _ in bounds[1:]]
    biases = [torch.randn(N).to(BF16) for _ in weights]
    desc = GroupedGemmDesc(PARTS.a, PARTS.b, BF16)
    run = bind_grouped_gemm(desc, product)
    for bias in (None, biases):
        found = run(operand, weights, torch.tensor(bounds), bias=bias)
        assert found.shape == (bounds[-1], N)
        for group, (start, end) in enumerate(itertools.pairwise(bounds)):
            alone = cast(PARTS.a, x[start:end])
            of_group = None if bias is None else bias[group]
            assert torch.equal(product(alone, weights[group], bias=of_group), found[start:end])


def test_ragged_groups_under_squares_have_the_bits_of_products_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = [0, 1, 1, 130, 200, 311]
    own, of_weights = spec("square"), spec("vector")
    x = torch.randn(bounds[-1], K) * torch.arange(1, bounds[-1] + 1)[:, None]
    parts = [cast(own, x[start:end]) for start, end in itertools.pairwise(bounds)]
    operand = Operand(*(torch.cat(part) for part in list(zip(*parts, strict=True))[:2]))
    weights = [cast(of_weights, torch.randn(N, K).to(BF16)) for _ in parts]
    bound(monkeypatch)
    dense = gemm.LowPrecisionGemm(
        GemmDesc(own, of_weights, BF16), torch.device("cuda", 0), Native()
    )
    run = bind_grouped_gemm(GroupedGemmDesc(own, of_weights, BF16), dense)
    found = run(operand, weights, torch.tensor(bounds))
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        assert torch.equal(dense(parts[group], weights[group]), found[start:end])


def test_groups_have_plans_of_sixteens_of_rows(product: Callable[..., torch.Tensor]) -> None:
    operand, weights = cast(PARTS.a, torch.randn(300, K)), [weight() for _ in range(5)]
    run = bind_grouped_gemm(GroupedGemmDesc(PARTS.a, PARTS.b, BF16), product)
    run(operand, weights, torch.tensor([0, 66, 145, 145, 220, 300]))
    assert {key[0] for key in product._plans} == {80}
    run(operand, weights, torch.tensor([0, 3, 3, 3, 220, 300]))
    assert {key[0] for key in product._plans} == {4, 80, 224}


def test_codes_with_gaps_are_multiplied_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    described = []
    run = bound(monkeypatch)
    monkeypatch.setattr(Product, "run", lambda self, *_: described.append((self.a[3], self.b[3])))
    for shape in ((8, K), (8, 2 * K)):
        codes = [torch.zeros(rows, shape[1], dtype=torch.uint8) for rows in (shape[0], N)]
        scales = torch.ones(8, 3), weight().scale_inv
        run(*(Operand(data[:, :K], scale) for data, scale in zip(codes, scales, strict=True)))
    assert described == [(K, K), (2 * K, 2 * K)]


def test_a_bias_without_an_algorithm_is_added_after_the_product(
    product: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLASLt 13.1 has none on an H200 for one row whose scales are vectors."""
    x, b, bias = cast(spec("vector"), torch.randn(4, K).to(BF16)), weight(), torch.randn(N).to(BF16)
    wanted = product(x, b, bias=bias)
    monkeypatch.setattr(Product, "takes_bias", False)
    other = bound(monkeypatch)
    for _ in range(2):
        assert torch.equal(other(x, b, bias=bias), wanted)
    monkeypatch.setattr(Native, "Gemm", None)  # described once: what has none is remembered
    assert torch.equal(other(x, b, bias=bias), wanted)


def test_a_part_whose_bias_is_added_after_warns_of_other_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, part = bound(monkeypatch), gemm.ProductInParts(PARTS, torch.device("cuda", 0), Native())
    monkeypatch.setattr(autotune, "takes_the_first", lambda: True)
    monkeypatch.setattr(Product, "takes_bias", False)
    x, b, bias = cast(spec("vector"), torch.randn(4, K).to(BF16)), weight(), torch.randn(N).to(BF16)
    out = torch.empty(4, N, dtype=BF16)
    with caplog.at_level("WARNING"):
        whole(x, b, bias=bias)
        assert "other bits" not in caplog.text
        monkeypatch.setattr(autotune, "same_algorithm", lambda *arguments: 0)
        part(8, x, b, bias=bias, out=out)
    assert "may have other bits than the whole" in caplog.text
    assert torch.equal(out, whole(x, b, bias=bias))


def test_ragged_rows_are_added_to_a_sum(product: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, b = torch.randn(5, K).to(BF16), weight()
    part = in_place_of_the_cast(cast(spec("vector"), x))
    around = torch.ones(8, N, dtype=BF16)
    returned = bound(monkeypatch, accumulate=True)(part, b, out=around[:5])
    assert returned.data_ptr() == around.data_ptr()
    torch.testing.assert_close(around[:5], product(part, b) + 1, rtol=2**-7, atol=2**-7)
    assert torch.equal(around[5:], torch.ones(3, N, dtype=BF16))


def test_a_part_of_ragged_rows_has_the_bits_of_the_whole(
    product: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = gemm.ProductInParts(PARTS, torch.device("cuda", 0), Native())
    monkeypatch.setattr(autotune, "takes_the_first", lambda: True)
    monkeypatch.setattr(autotune, "same_algorithm", lambda *arguments: 0)
    x, b = torch.randn(18, K).to(BF16), weight()
    out = torch.empty(18, N, dtype=BF16)
    for start, end in ((0, 7), (7, 18)):
        part = cast(spec("vector"), x[start:end])
        multiply(18, part, b, out=out[start:end])
    assert torch.equal(out, product(cast(spec("vector"), x), b))


def test_only_memory_that_ends_too_soon_is_copied() -> None:
    codes = empty_codes("vec128", 5, K, on_cpu, K)
    assert with_rows(codes, 8, (K, 1), on_cpu).data_ptr() == codes.data_ptr()
    scale_inv, pitch = empty_scales("vec128", 5, K, on_cpu)
    assert with_rows(scale_inv, 8, (1, pitch), on_cpu).data_ptr() == scale_inv.data_ptr()
    copied = with_rows(torch.ones(5, K), 8, (K, 1), on_cpu)
    assert copied.shape == (8, K)
    assert torch.equal(copied[:5], torch.ones(5, K))


@pytest.mark.parametrize("names", ["delayed delayed", "rowwise rowwise", "vector square"])
def test_fp8_products_take_any_rows_forward(names: str) -> None:
    a, b = map(spec, names.split())
    assert CudaBackend().alignment(GemmDesc(a, b, BF16)).m == 1


RECIPES = ("delayed", "current", "rowwise", "block")
FEATURES = 8192
CODES = FEATURES * FEATURES  # bytes; twice what a product may take as workspace


class Pads(TorchDispatchMode):
    """Takes down the operators of torch that pad values or codes, and how many elements their
    results have. Scales, a 128th of them and in float32, are copied into a product's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.elements: list[int] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_memory = "pad" in func.name() or "new_empty" in func.name()  # for a padded copy
        if is_memory and result.dtype != torch.float32:
            self.found.append(func.name())
            self.elements.append(result.numel())
            self.dtypes.add(result.dtype)
        return result


def allocated(run: Callable[[], object]) -> int:
    """Return the bytes of all that ``run`` allocates on the device, freed or not."""
    name = "allocated_bytes.all.allocated"
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()[name]
    run()
    return int(torch.cuda.memory_stats()[name] - before)


def stored(name: str, **options: Any) -> fp8core.Linear:
    with fp8core.quantized_model_init(recipe=recipe.by_name(name)):
        return fp8core.Linear(FEATURES, FEATURES, params_dtype=BF16, device="cuda", **options)


@pytest.fixture
def sizes() -> Iterator[list[int]]:
    """Run layers of the CPU on the CUDA backend, whose native calls do nothing; yield the numbers
    of elements of all that the backend allocates."""
    found: list[int] = []
    with ExitStack() as stack:
        host_path.without_a_device(stack)
        allocate = memory._empty_here
        assert allocate is not None

        def noting(
            size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
        ) -> torch.Tensor:
            found.append(torch.Size(size).numel())
            return allocate(size, stride, dtype)

        # Undone before what the stack replaced: monkeypatch would put the CPU's memory back last.
        stack.enter_context(patch.object(memory, "_empty_here", noting))
        table.forget()  # what an earlier test has bound allocates as it did
        yield found
    table.forget()


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_a_forward_are_not_padded_on_the_host(
    name: str, rows: int, sizes: list[int]
) -> None:
    chosen = recipe.by_name(name)
    with fp8core.quantized_model_init(recipe=chosen):
        layer = fp8core.Linear(256, 512, bias=False, params_dtype=BF16)
    x = torch.randn(rows, 1, 256, dtype=BF16)
    with Pads() as pads, torch.no_grad(), fp8core.autocast(recipe=chosen):
        for _ in range(3):
            sizes.clear()
            y = layer(x)
            assert sizes
            assert max(sizes) <= 16 * 512
    assert not pads.found
    assert y.shape == (rows, 1, 512)


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_pads_the_codes_of_its_rows_alone_on_the_host(name: str, sizes: list[int]) -> None:
    """The gradient of the weight contracts rows, whose number has to be a multiple of 16."""
    layer = fp8core.Linear(256, 512, bias=False, params_dtype=BF16)
    x = torch.randn(3, 256, dtype=BF16, requires_grad=True)
    with Pads() as pads, fp8core.autocast(recipe=recipe.by_name(name)):
        y = layer(x)
    assert not pads.found
    with Pads() as pads:
        y.backward(torch.ones_like(y))
    assert sorted(pads.elements) == [16 * 256, 16 * 512]
    assert pads.dtypes == {torch.uint8}
    assert layer.weight.grad is not None


@pytest.mark.parametrize("features", [(256, 500), (250, 512)])
@pytest.mark.parametrize("name", RECIPES)
def test_odd_features_of_a_stored_weight_are_not_padded_on_the_host(
    name: str, features: tuple[int, int], sizes: list[int]
) -> None:
    chosen = recipe.by_name(name)
    with fp8core.quantized_model_init(recipe=chosen):
        layer = fp8core.Linear(*features, bias=False, params_dtype=BF16).requires_grad_(False)
    x = torch.randn(16, features[0], dtype=BF16, requires_grad=True)
    with fp8core.autocast(recipe=chosen):
        for _ in range(3):
            with Pads() as pads:
                y = layer(x)
                y.backward(torch.ones_like(y))
            assert all(count <= 16 * 512 for count in pads.elements)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("shape", [(FEATURES, FEATURES + 1), (FEATURES - 7, FEATURES)])
@pytest.mark.parametrize("name", RECIPES)
def test_a_stored_weight_of_odd_features_is_copied_in_no_call(
    name: str, shape: tuple[int, int]
) -> None:
    k, n = shape
    with fp8core.quantized_model_init(recipe=recipe.by_name(name)):
        layer = fp8core.Linear(k, n, bias=False, params_dtype=BF16, device="cuda")
    layer.requires_grad_(False)
    x = torch.randn(16, k, dtype=BF16, device="cuda").requires_grad_()
    dy = torch.randn(16, n, dtype=BF16, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layer(x)
        return y, torch.autograd.grad(y, x, dy)[0]

    weight = layer.weight
    codes = [None if part is None else part.contiguous().clone() for part in weight.parts]
    small = fp8core.QuantizedTensor(*split(codes), weight.plan, weight.dtype)
    results, sizes = [], []
    for used in (weight, torch.nn.Parameter(small, requires_grad=False)):
        layer.weight = used
        for _ in range(3):
            pair = step()
        results.append(pair)
        sizes.append(allocated(step))
    assert sizes[0] < sizes[1] - CODES  # of both orientations
    if name != "delayed":  # whose scales follow from the calls before
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_token_through_stored_weights_allocates_no_other_weight(name: str, bias: bool) -> None:
    layer = stored(name, bias=bias)
    x = torch.ones(1, 1, FEATURES, dtype=BF16, device="cuda")  # exact at any scale

    def call() -> torch.Tensor:
        with torch.no_grad(), fp8core.autocast(recipe=recipe.by_name(name)):
            y: torch.Tensor = layer(x)
        return y

    with Pads() as pads:
        first = call()
    assert not pads.found
    for _ in range(4):  # the second is recorded, the third repeated
        assert allocated(call) < CODES
    torch.testing.assert_close(call(), first, rtol=2**-7, atol=2**-7)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("name", RECIPES)
def test_ragged_rows_are_the_same_rows_among_others_on_a_device(name: str, rows: int) -> None:
    layer = fp8core.Linear(512, 256, params_dtype=BF16, device="cuda")
    x = torch.randn(32, 512, dtype=BF16, device="cuda")
    x[0, 0] = x.abs().amax() + 1  # the amax of the first row is that of the tensor

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), fp8core.autocast(recipe=recipe.by_name(name)):
            y: torch.Tensor = layer(x)
        return y

    whole = [call(x) for _ in range(3)][-1]  # the scale of delayed scaling is set by the first
    for _ in range(4):
        torch.testing.assert_close(call(x[:rows]), whole[:rows], rtol=2**-7, atol=2**-7)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("name", RECIPES)
def test_ragged_rows_with_gradients_leave_the_weight_alone(name: str, rows: int) -> None:
    layer = stored(name, bias=False).requires_grad_(False)

    def step(rows: int) -> None:
        x = torch.randn(rows, FEATURES, dtype=BF16, device="cuda", requires_grad=True)
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layer(x)
        torch.autograd.grad(y, x, torch.ones_like(y))

    with Pads() as pads:
        step(rows)
    assert not pads.found
    for _ in range(3):
        # That of whole steps may turn the weight's codes, or cast them again.
        assert allocated(lambda: step(rows)) - allocated(lambda: step(32)) < CODES


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_of_ragged_rows_are_those_of_rows_with_zeros_on_a_device(
    name: str, rows: int
) -> None:
    layers = [fp8core.Linear(512, 256, params_dtype=BF16, device="cuda") for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())

    def step(layer: fp8core.Linear, x: torch.Tensor, dy: torch.Tensor) -> tuple[Any, ...]:
        layer.zero_grad()
        x = x.clone().requires_grad_()
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layer(x)
        y.backward(dy)
        return y.detach()[:rows], x.grad[:rows], layer.weight.grad, layer.bias.grad

    for _ in range(4):  # the second is recorded, the third repeated
        x, dy = torch.zeros(32, 512, dtype=BF16), torch.zeros(32, 256, dtype=BF16)
        x[:rows], dy[:rows] = torch.randn(rows, 512), torch.randn(rows, 256)
        x, dy = x.cuda(), dy.cuda()
        ragged, whole = step(layers[0], x[:rows], dy[:rows]), step(layers[1], x, dy)
        for ours, theirs in zip(ragged, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", RECIPES)
def test_groups_of_ragged_rows_are_linears_of_their_own(name: str) -> None:
    splits = [1, 0, 5, 17]
    grouped = fp8core.GroupedLinear(4, 512, 256, params_dtype=BF16, device="cuda")
    x = torch.randn(sum(splits), 512, dtype=BF16, device="cuda")
    if name in ("delayed", "current"):  # one scale for all groups
        x = x.sign()
    chosen = recipe.by_name(name)
    with torch.no_grad(), Pads() as pads, fp8core.autocast(recipe=chosen):
        y = grouped(x, splits)
    assert not pads.found
    for group, (part, found) in enumerate(zip(x.split(splits), y.split(splits), strict=True)):
        alone = fp8core.Linear(512, 256, params_dtype=BF16, device="cuda")
        with torch.no_grad():
            alone.weight.copy_(getattr(grouped, f"weight{group}"))
            alone.bias.copy_(getattr(grouped, f"bias{group}"))
            with fp8core.autocast(recipe=chosen):
                torch.testing.assert_close(alone(part), found, rtol=2**-7, atol=2**-7)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_of_ragged_groups_is_that_of_groups_with_zeros_on_a_device(name: str) -> None:
    splits, step = [1, 0, 5, 17, 40, 33], 32
    layers = [fp8core.GroupedLinear(6, 512, 256, params_dtype=BF16, device="cuda") for _ in "ab"]
    layers[1].load_state_dict(layers[0].state_dict())
    pad, unpad = fp8core.Fp8Padding(6, step), fp8core.Fp8Unpadding(6, step)
    for _ in range(3):
        x = torch.randn(sum(splits), 512, dtype=BF16, device="cuda")
        dy = torch.randn(sum(splits), 256, dtype=BF16, device="cuda")
        found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layers[0](found, splits)
            expected = unpad(layers[1](*pad(wanted, splits)), splits)
        with Pads() as pads:
            y.backward(dy)
        assert not pads.found
        expected.backward(dy)
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=2**-7, atol=2**-7)
        for ours, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=2**-7, atol=2**-6)
        for layer in layers:
            layer.zero_grad()


@pytest.mark.needs_accelerator("cuda")
def test_a_captured_graph_has_the_sizes_of_its_capture() -> None:
    desc = QuantizeDesc(BF16, spec("vector"), spec("vector"), True, padded=32)
    run, bounds = CudaBackend().bind(desc, torch.device("cuda")), torch.tensor([0, 5, 5, 40, 64])
    x = torch.randn(64, 272, dtype=BF16, device="cuda")
    expected = run(x, bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, bounds)
    del bounds
    graph.replay()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.data, theirs.data)
        assert torch.equal(ours.scale_inv, theirs.scale_inv)
