"""Casts of some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import Operand, Quantized, QuantizeDesc
from fp8core_backends.cuda import quantize_chunked
from tests.backends.cuda.cuda_cases import (
    DEVICE,
    backend,
    differs,
    same_bits,
    spec,
    values,
)

pytestmark = pytest.mark.needs_accelerator("cuda")
MIB = 2**20


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_chunked, "CHUNK_ROWS", 128)
    monkeypatch.setattr(quantize_chunked, "LEAST_SAVED", 1)


def in_chunks(desc: QuantizeDesc) -> Callable[..., Any]:
    return backend("cuda").bind(replace(desc, chunked=True), DEVICE)


def given(name: str) -> dict[str, torch.Tensor]:
    if name != "delayed":
        return {}
    return {
        "scale": torch.full((1,), 3.7, device=DEVICE),
        "amax_out": torch.full((1,), 0.25, device=DEVICE),
    }


def joined(name: str, made: Any) -> Quantized:
    """Return the operands of all parts; rows have scales of their own under ``vector``."""
    if isinstance(made.rowwise, Operand):  # of a transposed tensor, which has to be copied
        return made
    data, scales = [], []
    for start, end, part in made.rowwise:
        assert part.data.shape[0] == end - start
        data.append(part.data.clone())
        scales.append(part.scale_inv.clone())
    scale_inv = torch.cat(scales) if name == "vector" else scales[-1]
    return Quantized(Operand(torch.cat(data), scale_inv), made.columnwise)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["delayed", "current", "vector"])
def test_parts_of_strided_tensors_equal_the_whole(name: str) -> None:
    desc = QuantizeDesc(torch.bfloat16, spec(name), spec(name))
    run, judge = in_chunks(desc), backend("reference").bind(desc, DEVICE)
    for shape in ((257, 130), (400, 264)):
        x = values("wide", shape, torch.bfloat16)
        for source in (torch.cat((x, x), 1)[:, : shape[1]], x.t().contiguous().t()):
            ours, theirs = given(name), given(name)
            made = joined(name, run(source, **ours))
            for one, other in zip(made, judge(x, **theirs), strict=True):
                assert differs(one, other) is None, shape
            if ours:
                assert same_bits(ours["amax_out"], theirs["amax_out"])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "vector"])
def test_columnwise_codes_lie_in_whole_vectors(name: str) -> None:
    """Whatever the number of rows, so that the kernels store 16 codes at once."""
    desc = QuantizeDesc(torch.bfloat16, spec(name), spec(name))
    x = values("wide", (257, 128), torch.bfloat16)
    casts = [backend("cuda").bind(desc, DEVICE)]
    if name != "rowwise":
        casts.append(in_chunks(desc))
    for codes in (cast(x, **given(name)).columnwise.data for cast in casts):
        assert (codes.shape, codes.stride(), codes.data_ptr() % 16) == ((128, 257), (272, 1), 0)


@pytest.mark.parametrize("name", ["rowwise", "square"])
def test_other_scales_have_no_parts(name: str) -> None:
    desc = QuantizeDesc(torch.bfloat16, spec(name), spec(name))
    assert "no chunks by" in backend("cuda").unsupported(replace(desc, chunked=True), DEVICE)


def test_a_small_gradient_is_quantized_at_once() -> None:
    own = spec("current")
    run = in_chunks(QuantizeDesc(torch.bfloat16, own, own))
    made = run(torch.randn(512, 512, dtype=torch.bfloat16, device=DEVICE))
    assert isinstance(made.rowwise, Operand)


def step(layer: torch.nn.Module, name: str, x: torch.Tensor, dy: torch.Tensor) -> Any:
    x.grad = None
    layer.zero_grad()
    with fp8core.autocast(recipe=recipe.by_name(name)):
        y = layer(x)
    y.backward(dy)
    return y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_a_layer_s_gradients(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fp8core.Linear(256, 384, bias=bias, params_dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(400, 256, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    dy = torch.randn(400, 384, dtype=torch.bfloat16, device=DEVICE)
    found = []
    for rows in (128, 2**20):
        monkeypatch.setattr(quantize_chunked, "CHUNK_ROWS", rows)
        monkeypatch.setattr(quantize_chunked, "LEAST_SAVED", 1)
        layer.reset_delayed_state()
        for _ in range(2):
            step(layer, name, x, dy)
        found.append([x.grad, *(own.grad.clone() for own in layer.parameters())])
    (chunked, *others), (whole, *same) = found
    # Another number of rows may be another algorithm, which adds up in another order.
    torch.testing.assert_close(chunked, whole, rtol=2**-7, atol=2**-7 * whole.abs().max().item())
    assert all(torch.equal(one, other) for one, other in zip(others, same, strict=True))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_replays_of_a_graph_equal_eager_steps(name: str) -> None:
    chosen, layers = recipe.by_name(name), []
    for _ in range(2):
        torch.manual_seed(0)
        made = fp8core.Linear(256, 384, bias=False, params_dtype=torch.bfloat16, device=DEVICE)
        layers.append(made)
    sample = torch.randn(400, 256, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    graphed = fp8core.make_graphed_callables(layers[1], (sample,), recipe=chosen)
    for seed in range(3):
        found = []
        for layer in (layers[0], graphed):
            torch.manual_seed(seed)
            x = torch.randn(400, 256, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
            dy = torch.randn(400, 384, dtype=torch.bfloat16, device=DEVICE)
            if layer is graphed:
                y = layer(x)
            else:
                with fp8core.autocast(recipe=chosen):
                    y = layer(x)
            y.backward(dy)
            found.append((y.detach().clone(), x.grad.clone(), layer.weight.grad.clone()))
            layer.weight.grad = None
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_the_peak_of_a_large_step(name: str) -> None:
    """Of codes, there are never more than the input's and the weight's for backward, the
    gradient's columnwise ones, and those of one part; the weight's go before grad_weight comes."""
    rows, k, n = 8192, 2048, 8192
    layer = fp8core.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    dy = torch.randn(rows, n, dtype=torch.bfloat16, device=DEVICE)
    step(layer, name, x, dy)
    x.grad = None
    layer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(layer, name, x, dy)
    found = torch.cuda.max_memory_allocated() - before
    y, saved, columnwise, part = (
        2 * rows * n,
        rows * k + n * k,
        rows * n,
        quantize_chunked.CHUNK_ROWS * n,
    )
    in_dgrad = y + saved + columnwise + part + 2 * rows * k
    in_wgrad = y + rows * k + columnwise + 2 * rows * k + 2 * n * k
    blocks = max(in_dgrad, in_wgrad) // 32 if name == "block" else 0  # scales, 4 bytes for 128
    assert found <= max(in_dgrad, in_wgrad) + blocks + 34 * MIB, found / MIB  # cuBLASLt's workspace
