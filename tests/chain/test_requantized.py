"""``requantize_weights=True``: the same bits, whatever a weight and its recipe are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from fp8core import Linear, autocast, plan, recipe
from fp8core.backend_api import OperandSpec
from tests.chain.requantizing import (
    CURRENT,
    E4M3,
    NAMES,
    assert_same,
    both_ways,
    forward,
    layer,
    recipes,
    step,
    values,
)
from tests.device import DEVICE
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


def test_padded_features_are_the_same() -> None:
    for name in NAMES:
        held, again = (
            step(Linear(50, 70), one, values(columns=50))
            for one in recipes(name)
            if torch.manual_seed(1)
        )
        assert_same(again, held)


def test_a_scale_that_moves_before_backward_is_that_of_forward() -> None:
    """Three forwards in flight, each at a scale of its own, and another scale in backward."""

    def grads(chosen: Any) -> list[torch.Tensor]:
        own, outputs, found = layer(), [], []
        step(own, chosen)  # which creates the scales
        inputs = [values(seed) for seed in range(3)]
        for power, x in enumerate(inputs):
            own.scale_fwd.fill_(3.0 * 2**power)
            outputs.append(forward(own, x, chosen))
        own.scale_fwd.fill_(1e-3)
        for x, y in zip(inputs, outputs, strict=True):
            y.sum().backward()
            found += [x.grad, *own.buffers()]
        return found

    held, again = recipes("delayed")
    assert_same(grads(again), grads(held))


CUSTOM: dict[str, Callable[[], Any]] = {
    "columnwise in high precision": lambda: recipe.Float8CurrentScaling(
        backward_override="high_precision"
    ),
    "weight rowwise alone": lambda: recipe.CustomRecipe(
        lambda role: plan.TensorPlan(E4M3, None if role.tensor_type == "weight" else E4M3)
    ),
    "weight columnwise alone": lambda: recipe.CustomRecipe(
        lambda role: plan.TensorPlan(None if role.tensor_type == "weight" else E4M3, E4M3)
    ),
    "a format each way": lambda: recipe.CustomRecipe(
        lambda role: plan.TensorPlan(E4M3, OperandSpec("e5m2", (1, 0), 57344.0))
    ),
    "delayed by a factory": lambda: recipe.CustomRecipe(
        lambda role: recipe.DelayedScalingRequest(amax_history_len=2)
    ),
    "delayed by fields": lambda: recipe.CustomRecipe(amax_history_len=2, margin=1),
    "by layer": lambda: recipe.PerLayer({}, default=CURRENT),
}


@pytest.mark.parametrize("kind", CUSTOM)
def test_plans_of_any_kind_are_the_same(kind: str) -> None:
    chosen = CUSTOM[kind]()
    held, again = (
        (recipe.Float8CurrentScaling(), chosen) if kind == "by layer" else both_ways(chosen)
    )
    found = []
    for one in (held, again):
        own = layer()
        found.append([*step(own, one), *step(own, one)])
        found[-1].append(own._bindings.nonfinite[DEVICE])
    assert_same(*found)


def test_a_weight_quantized_columnwise_alone_is_counted_in_forward() -> None:
    _, again = both_ways(CUSTOM["weight columnwise alone"]())
    own = layer()
    with torch.no_grad():
        own.weight[0, :3] = torch.inf
    y = forward(own, values(), again)
    y.backward(torch.ones_like(y))
    assert own._bindings.nonfinite[DEVICE].tolist() == [3, 0]


@pytest.mark.parametrize(("name", "nonfinite"), turns(NAMES, ["saturate", "propagate"]))
def test_nan_and_inf_are_treated_alike_and_counted_once(name: str, nonfinite: str) -> None:
    found = []
    for chosen in recipes(name):
        own = layer(bias=False)
        with torch.no_grad():
            own.weight[0, :3] = torch.inf
        x = values()
        y = forward(own, x, dataclasses.replace(chosen, nonfinite=nonfinite))
        y.backward(torch.ones_like(y))
        assert own._bindings.nonfinite[DEVICE].tolist() == [3, 0]
        assert x.grad is not None
        found.append([y.detach(), x.grad])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        assert nonfinite == "saturate" or bool(mine.isnan().all())


def test_backward_records_no_amax() -> None:
    own, (_, again) = layer(), recipes("delayed")
    y = forward(own, values(), again)
    own.amax_history_fwd.zero_()
    y.sum().backward()
    assert not own.amax_history_fwd.any()


def test_calibration_is_the_same() -> None:
    found = []
    for chosen in recipes("delayed"):
        own, x = layer(), values()
        with autocast(enabled=False, calibrating=True, recipe=chosen):
            y = own(x)
        y.sum().backward()
        found.append([y.detach(), x.grad, own.weight.grad, *own.buffers()])
    assert_same(*found)


def test_a_plan_of_a_user_s_own_may_leave_it_out() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Own(recipe.Recipe):
        requantizes: bool | None = None

        def plan(self, role: plan.LayerRole, dtype: torch.dtype) -> plan.LinearPlan:
            gemms = [plan.GemmPlan(E4M3, E4M3)] * 3
            if self.requantizes is None:
                return plan.LinearPlan(*gemms)
            return plan.LinearPlan(*gemms, requantize_weights=self.requantizes)

    results = [step(layer(), Own(given)) for given in (None, False, True)]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_a_copy_of_the_layer_trains_alike() -> None:
    own = layer()
    step(own, CURRENT)
    own.zero_grad()
    assert_same(step(copy.deepcopy(own), CURRENT), step(own, CURRENT))
