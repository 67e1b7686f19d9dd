"""What happens around single steps: repetitions, failures, checkpoints."""

from __future__ import annotations

import io
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
