"""Linear and GroupedLinear against Transformer Engine on an H200: tests/golden/linears_seed0.npz.

Outputs and gradients within 2e-3 relative Frobenius error: sums in float32 meet the files at about
1.1e-3, as Hopper's tensor cores keep fewer bits of a sum and bfloat16 then rounds. With those sums
(tests/hopper_gemm.py) all are equal bit for bit, and delayed state in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from fp8core import GroupedLinear, Linear, autocast, recipe
from tests.hopper_gemm import use_hopper_sums
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

BOUND = 2e-3
STEPS = 5
RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "delayed_e4m3_recent_margin": recipe.DelayedScaling(
        fp8_format=recipe.Format.E4M3, amax_history_len=3, amax_compute_algo="most_recent", margin=1
    ),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
DELAYED = [name for name in RECIPES if name.startswith("delayed")]


class Golden:
    """The file's arrays as tensors."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __getitem__(self, key: str) -> torch.Tensor:
        array = self.arrays[key]
        tensor = torch.from_numpy(array.copy())
        return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


@pytest.fixture(scope="module")
def linears(golden: Callable[[str], dict[str, np.ndarray]]) -> Golden:
    return Golden(golden("linears_seed0"))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative Frobenius error; 0 where both are zero."""
    difference = (got.float() - want.float()).norm()
    return 0.0 if difference == 0 else (difference / want.float().norm()).item()


def run_linear(golden: Golden, name: str, steps: int) -> Iterator[tuple[Linear, int, list[float]]]:
    """Yield the layer, the step, and the errors of its y and gradients, after each step."""
    chosen = RECIPES[name]
    layer = Linear(256, 128, params_dtype=torch.bfloat16)
    layer.load_state_dict({key: golden[f"params/linear/{key}"] for key in ("weight", "bias")})
    for step in range(steps):
        x = golden[f"inputs/linear/step{step}/x"].requires_grad_()
        layer.zero_grad()
        with autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x)
        y.backward(golden[f"inputs/linear/step{step}/grad_output"])
        found = {
            "y": y,
            "grad_input": x.grad,
            "grad/weight": layer.weight.grad,
            "grad/bias": layer.bias.grad,
        }
        prefix = f"{name}/linear/step{step}"
        yield layer, step, [error(got, golden[f"{prefix}/{key}"]) for key, got in found.items()]


@pytest.mark.parametrize("name", RECIPES)
def test_linear_is_within_the_bound(name: str, linears: Golden) -> None:
    for _, _, errors in run_linear(linears, name, 1):
        assert max(errors) < BOUND


@pytest.mark.parametrize("name", DELAYED)
def test_five_delayed_steps_are_within_the_bound(name: str, linears: Golden) -> None:
    for _, step, errors in run_linear(linears, name, STEPS):
        assert max(errors) < BOUND, f"step {step}"


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_with_the_sums_of_hopper_a_linear_is_theirs_bit_for_bit(
    name: str, linears: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hopper_sums(monkeypatch)
    for _, step, errors in run_linear(linears, name, STEPS if name in DELAYED else 1):
        assert errors == [0.0] * 4, f"step {step}"


@pytest.mark.parametrize("buffer", ["scale", "amax_history"])
@pytest.mark.parametrize("way", ["fwd", "bwd"])
@pytest.mark.parametrize("name", DELAYED)
def test_five_delayed_steps_leave_the_state_bit_for_bit(
    name: str, way: str, buffer: str, linears: Golden
) -> None:
    for layer, step, _ in run_linear(linears, name, STEPS):
        want = linears[f"{name}/linear/step{step}/scaling_{way}/{buffer}"]
        got = getattr(layer, f"{buffer}_{way}")
        assert got.dtype == torch.float32
        assert torch.equal(got, want), f"step {step}: {got} instead of {want}"


@pytest.mark.parametrize("name", RECIPES)
def test_the_bias_gradient_is_exact(name: str, linears: Golden) -> None:
    for _, _, errors in run_linear(linears, name, 1):
        assert errors[-1] == 0.0


@pytest.mark.parametrize(("name", "as_tensor"), turns(RECIPES, [False, True]))
def test_grouped_linear_is_within_the_bound(name: str, as_tensor: bool, linears: Golden) -> None:
    chosen = RECIPES[name]
    layer = GroupedLinear(4, 256, 128, bias=False, params_dtype=torch.bfloat16)
    names = [f"weight{group}" for group in range(4)]
    layer.load_state_dict({key: linears[f"params/grouped_linear/{key}"] for key in names})
    x = linears["inputs/grouped_linear/step0/x"].requires_grad_()
    splits = linears[f"{name}/grouped_linear/m_splits"]
    assert 0 in splits  # a group is empty
    with autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, splits if as_tensor else splits.tolist())
    y.backward(linears["inputs/grouped_linear/step0/grad_output"])
    found = {"y": y, "grad_input": x.grad}
    found |= {f"grad/{key}": getattr(layer, key).grad for key in names}
    prefix = f"{name}/grouped_linear/step0"
    errors = {key: error(got, linears[f"{prefix}/{key}"]) for key, got in found.items()}
    assert max(errors.values()) < BOUND, errors
