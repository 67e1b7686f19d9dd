"""The gradient of an activation in chunks: bit for bit the call, and the peak of an MLP's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import FusedDesc, Operand, Quantized
from fp8core.conformance.laws.quantize import ReadOnce, joined
from fp8core_backends.cuda import fused_chunked, quantize_chunked
from tests.backends.cuda.cuda_cases import DEVICE, backend, differs, same_bits, spec
from tests.backends.cuda.test_activation import fused, given
from tests.backends.cuda.test_repeated import assert_equal, recorded, without_recordings
from tests.pairs import pairs

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    # A gradient is accumulated on the stream of its first step.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
RECIPES = ("delayed", "vector")
MIB = 2**20
HIDDEN, FFN, ROWS = 256, 512, 400


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused_chunked, quantize_chunked):
        monkeypatch.setattr(module, "CHUNK_ROWS", 128)
        monkeypatch.setattr(module, "LEAST_SAVED", 1)


def chunked(desc: FusedDesc) -> FusedDesc:
    return replace(desc, quantize=replace(desc.quantize, chunked=True))


def in_chunks(desc: FusedDesc) -> Callable[..., Any]:
    return backend("cuda").bind(chunked(desc), DEVICE)


def check(desc: Any, tensors: list[torch.Tensor], *, is_computed: bool) -> None:
    own = desc.quantize.rowwise
    ours, theirs = (given(own, nonfinite_out=torch.full((1,), 7, device=DEVICE)) for _ in range(2))
    run, (grad, x) = backend("cuda").bind(desc, DEVICE), tensors
    made, *sums = in_chunks(desc)(ReadOnce(grad) if is_computed else grad, x, **ours)
    assert isinstance(made.rowwise, Operand) == (len(x) <= 128)
    if not isinstance(made.rowwise, Operand):
        made = Quantized(joined(own, made.rowwise, len(x)), made.columnwise)
    expected, *totals = run(*tensors, **theirs)
    text = f"{desc} of {[list(one.shape) for one in tensors]}"
    assert differs(made.rowwise, expected.rowwise) is None, f"rowwise {text}"
    assert differs(made.columnwise, expected.columnwise) is None, f"columnwise {text}"
    for name, one in ours.items():
        assert same_bits(one, theirs[name]), f"{name} {one} for {theirs[name]}: {text}"
    for one, other in zip(sums, totals, strict=True):
        assert same_bits(one, other), f"column sums {text}"


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_a_wider_tensor(recipe: str) -> None:
    wide = torch.randn(300, 1088, device=DEVICE).bfloat16()
    desc = fused("gelu", spec(recipe), torch.bfloat16, backward=True, sums=True)
    grad = torch.randn(300, 1024, device=DEVICE).bfloat16()
    check(desc, [wide[:, 8:1032], wide[:, 64:]], is_computed=False)
    check(desc, [grad, wide[:, 64:]], is_computed=True)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_kernel_does_not_read_is_computed_at_once(recipe: str) -> None:
    own = spec(recipe)
    desc = fused("gelu", own, torch.bfloat16, backward=True)
    run = backend("cuda").bind(desc, DEVICE)
    x = torch.randn(300, 1025, device=DEVICE).bfloat16()
    for tensors in ((x, x), (x[:, 1:], x[:, 1:]), (x.t().contiguous().t(), x)):
        made, want = (call(*tensors, **given(own))[0] for call in (in_chunks(desc), run))
        for one, other in zip(made, want, strict=True):
            assert differs(one, other) is None
        lazy = in_chunks(desc)(ReadOnce(tensors[0].contiguous()), tensors[1], **given(own))[0]
        assert isinstance(lazy.rowwise, Operand)


@pytest.mark.parametrize("recipe", ["current", "rowwise", "mx"])
def test_scales_that_follow_from_all_rows_have_no_chunks(recipe: str) -> None:
    desc = fused("gelu", spec(recipe), torch.bfloat16, backward=True)
    assert "no chunks of" in backend("cuda").unsupported(chunked(desc), DEVICE)


def mlp(activation: str, hidden: int = HIDDEN, ffn: int = FFN, **options: Any) -> Any:
    torch.manual_seed(1)
    return fp8core.LayerNormMLP(
        hidden, ffn, activation=activation, params_dtype=torch.bfloat16, device=DEVICE, **options
    )


def step(layer: Any, name: str, seed: int, rows: int = ROWS) -> list[torch.Tensor]:
    torch.manual_seed(10 + seed)
    hidden = layer.layer_norm_weight.shape[0]
    x = torch.randn(rows, hidden, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    with fp8core.autocast(recipe=recipe.by_name(name)):
        y = layer(x)
    grads = torch.autograd.grad(y, (x, *layer.parameters()), torch.randn_like(y))
    return [y.detach(), *grads, *(one.clone() for one in layer.buffers())]


@pytest.mark.parametrize(
    ("name", "activation", "bias"), pairs(["delayed", "block"], ["gelu", "swiglu"], [False, True])
)
def test_steps_have_the_bits_of_whole_tensors(
    name: str, activation: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One algorithm for a product and its parts, as for one in every process."""
    monkeypatch.setenv("FP8CORE_AUTOTUNE", "0")
    found = []
    for rows in (128, 2**20):
        for module in (fused_chunked, quantize_chunked):
            monkeypatch.setattr(module, "CHUNK_ROWS", rows)
            monkeypatch.setattr(module, "LEAST_SAVED", 1)
        layer = mlp(activation, bias=bias)
        found.append([one for seed in range(4) for one in step(layer, name, seed)])
    assert_equal(*found, name)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_repeated_steps_have_the_program_s_bits(name: str, activation: str) -> None:
    layer = mlp(activation, bias=True)
    ours = [step(layer, name, seed) for seed in range(5)]
    assert recorded(layer) == [(True, True)]
    with without_recordings():
        layer = mlp(activation, bias=True)
        theirs = [step(layer, name, seed) for seed in range(5)]
    for seed, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_equal(one, other, seed)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_replays_of_a_graph_equal_eager_steps(name: str) -> None:
    layers = [mlp("gelu", bias=False) for _ in range(2)]
    sample = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    chosen = recipe.by_name(name)
    graphed = fp8core.make_graphed_callables(layers[1], (sample,), recipe=chosen)
    for seed in range(3):
        found = []
        for layer in (layers[0], graphed):
            torch.manual_seed(seed)
            x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
            dy = torch.randn_like(x)
            if layer is graphed:
                y = layer(x)
            else:
                with fp8core.autocast(recipe=chosen):
                    y = layer(x)
            y.backward(dy)
            grads = [own.grad.clone() for own in layer.parameters()]
            found.append([y.detach().clone(), x.grad.clone(), *grads])
            layer.zero_grad()
        assert_equal(*found, seed)


@pytest.mark.parametrize(("hidden", "ffn"), [(2048, 8192), (4096, 14336)])
def test_the_peak_of_a_large_step(hidden: int, ffn: int) -> None:
    """While the gradient of the activation is computed: its input, its columnwise codes, and of
    all else that has as many columns a chunk."""
    rows = 8192
    layer = mlp("gelu", hidden, ffn, bias=False)
    for seed in range(4):  # the last one is repeated
        results: Any = step(layer, "delayed", seed, rows)
        del results
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    step(layer, "delayed", 4, rows)
    found = torch.cuda.max_memory_allocated() - before
    weight, narrow, wide = hidden * ffn, rows * hidden, rows * ffn
    chunk = fused_chunked.CHUNK_ROWS * ffn
    given = 3 * 2 * narrow  # x, y and the gradient of y
    # Codes of the norm's result, of the gradient of y, and of two weights; of fc2 the gradient.
    others = 2 * narrow + 2 * weight + 2 * weight
    most = given + others + 2 * wide + wide + 2 * chunk + chunk + 2 * narrow
    assert found <= most + 34 * MIB, (found / MIB, most / MIB)  # cuBLASLt's workspace
    assert recorded(layer) == [(True, True)]
