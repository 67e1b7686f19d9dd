"""What happens around single steps: repetitions, failures, threads, checkpoints, other layouts."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable

import pytest
import torch

import fp8core as te
from fp8core_backends.ascend.operators import casts, products
from tests.backends.ascend.npu.layers import RECIPES, error

BF16 = torch.bfloat16
QUANTIZED = [name for name in RECIPES if name != "none"]
STATEFUL = ["delayed", "hif8-delayed"]
X = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()

Run = Callable[[torch.nn.Module, str], list[torch.Tensor]]


def linear(device: str) -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(128, 256, params_dtype=BF16, device="cpu").to(device)


def step(layer: torch.nn.Module, name: str, x: torch.Tensor = X) -> list[torch.Tensor]:
    """Return the output and the gradients of one step, on the CPU."""
    layer.zero_grad()
    inputs = x.detach().to(next(layer.parameters()).device).requires_grad_()
    with te.autocast(recipe=RECIPES[name]):
        output = layer(inputs)
    output.backward(torch.ones_like(output) / 8)
    grads = [parameter.grad for parameter in layer.parameters()]
    return [one.detach().cpu() for one in (output, inputs.grad, *grads) if one is not None]


def near(name: str, run: Run) -> None:
    """Require that a run on the device is as near to the one on the CPU as casts allow."""
    bound = 0.1 if "hif8" in name else 0.05
    for expected, found in zip(run(linear("cpu"), "cpu"), run(linear("npu"), "npu"), strict=True):
        assert error(found.cpu().float(), expected.float()) < bound


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_are_cast_once_for_several_microbatches(name: str) -> None:
    def run(layer: torch.nn.Module, device: str) -> list[torch.Tensor]:
        results = []
        for at in range(3):
            x = (X * (at + 1)).to(device).detach().requires_grad_()
            with te.autocast(recipe=RECIPES[name]):
                output = layer(x, is_first_microbatch=at == 0)
            output.float().sum().backward()
            results += [output.detach(), x.grad]
        return [*results, layer.weight.grad]

    near(name, run)


@pytest.mark.parametrize("name", QUANTIZED)
def test_recomputed_layer_gives_the_bits_of_a_stored_one(name: str) -> None:
    layer = linear("npu")
    plain = step(copy.deepcopy(layer), name)
    x = X.npu().requires_grad_()
    with te.autocast(recipe=RECIPES[name]):
        output = te.checkpoint(layer, x)
    output.backward(torch.ones_like(output) / 8)
    grads = [parameter.grad for parameter in layer.parameters()]
    assert same([one.detach().cpu() for one in (output, x.grad, *grads)], plain)


@pytest.mark.parametrize("name", QUANTIZED)
def test_checkpoint_goes_on_on_either_device(name: str) -> None:
    layer = linear("npu")
    for _ in range(3):
        step(layer, name)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    expected = step(layer, name)
    for device in ("npu", "cpu"):
        file.seek(0)
        other = te.Linear(128, 256, params_dtype=BF16, device=device)
        other.load_state_dict(torch.load(file, map_location=device, weights_only=False))
        found = step(other, name)
        if device == "npu":
            assert same(found, expected)
        assert error(found[0].float(), expected[0].float()) < 0.08


@pytest.mark.parametrize("name", [*STATEFUL, "current", "mxfp8"])
@pytest.mark.parametrize("operator", ["quant_matmul", "cast"])
def test_step_that_fails_changes_nothing_of_the_next(
    name: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, other = linear("npu"), linear("npu")
    assert same(step(layer, name), step(other, name))
    calls = {"current": "dynamic_quant", "mxfp8": "mx_quant_both"}
    module, failing = products, operator
    if operator == "cast":
        module, failing = casts, calls.get(name, "quant_max")

    def fails(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(module, failing, fails)
        with pytest.raises(RuntimeError, match="the device is lost"):
            step(layer, name)
    assert same(step(layer, name), step(other, name))


@pytest.mark.parametrize("name", ["delayed", "hif8", "block", "mxfp8"])
def test_layers_run_in_several_threads(name: str) -> None:
    layers = [linear("npu") for _ in range(4)]
    expected = step(copy.deepcopy(layers[0]), name)
    results: list[list[torch.Tensor]] = []

    def run(layer: torch.nn.Module) -> None:
        results.append(step(layer, name))

    threads = [threading.Thread(target=run, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(layers)
    assert all(same(found, expected) for found in results)


def laid_out(name: str) -> torch.Tensor:
    wide = torch.zeros(64, 256, dtype=BF16, device="npu")
    match name:
        case "transposed":
            return X.t().contiguous().npu().t()
        case "columns of a wider tensor":
            wide[:, ::2] = X.npu()
            return wide[:, ::2]
        case "one row repeated":
            return X[:1].npu().expand(64, 128)
        case "sequences":
            return X.npu().view(4, 16, 128)
    return X.npu()[:0]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(
    "layout",
    ["transposed", "columns of a wider tensor", "one row repeated", "sequences", "no rows"],
)
def test_input_of_any_layout_gives_the_bits_of_a_contiguous_one(layout: str, name: str) -> None:
    x, layer = laid_out(layout), linear("npu")
    expected = step(copy.deepcopy(layer), name, x.cpu().contiguous())
    assert same(step(layer, name, x), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_nan_in_a_row_stays_in_its_row(name: str) -> None:
    x, layer = X.clone(), linear("npu")
    x[3, 5] = torch.nan
    output = step(layer, name, x)[0]
    is_nan = output.isnan().any(1)
    assert is_nan.nonzero().flatten().tolist() == [3]
    assert all(one.isfinite().all() for one in step(layer, name))
