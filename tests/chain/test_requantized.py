"""``requantize_weights=True``: the same bits, and no codes of a weight from forward to backward."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core import Linear, OperandError, autocast, plan, recipe
from fp8core.backend_api import OperandSpec
from fp8core.chain.linear.program import LinearLink
from fp8core.modules.calls.bind import bind
from fp8core.tensors.saving import RequantizedWeight
from tests.device import DEVICE
from tests.inspection import models
from tests.inspection.models import make
from tests.pairs import turns

BF16 = torch.bfloat16
NAMES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")
E4M3 = OperandSpec("e4m3", (0, 0), 448.0)


def both_ways(chosen: Any) -> tuple[Any, Any]:
    """Return a recipe that holds weights' codes, and one that quantizes weights again."""
    held = dataclasses.replace(chosen, holding="fastest")
    return held, dataclasses.replace(held, requantize_weights=True)


def recipes(name: str) -> tuple[Any, Any]:
    if name == "delayed":
        return both_ways(recipe.DelayedScaling(amax_history_len=2))
    return both_ways(recipe.by_name(name))


CURRENT = recipes("current")[1]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """Yield the list to which autograd adds each tensor that it saves."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def bytes_held(saved: list[torch.Tensor], *modules: nn.Module) -> int:
    """Return the bytes of the distinct storages of ``saved``, without those of parameters."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
    for module in modules:
        for parameter in module.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@contextmanager
def counted_requantizations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Yield a list to which each weight that backward takes adds whether it was quantized again."""
    found: list[bool] = []
    requantize = RequantizedWeight.requantize

    def counted(self: Any, saved: Any) -> Any:
        operand = requantize(self, saved)
        found.append(operand[0] is not saved[0])
        return operand

    with monkeypatch.context() as patch:
        patch.setattr(RequantizedWeight, "requantize", counted)
        yield found


def values(seed: int = 5, columns: int = 32) -> torch.Tensor:
    own = torch.randn(32, columns, generator=torch.Generator().manual_seed(seed))
    return own.requires_grad_()


def layer(**options: Any) -> Linear:
    torch.manual_seed(1)
    return Linear(32, 48, **options)


def forward(own: nn.Module, x: torch.Tensor, chosen: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(11)  # of stochastic rounding
    with autocast(recipe=chosen):
        y: torch.Tensor = own(x, **options)
    return y


def step(own: nn.Module, chosen: Any, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return what forward and backward give, and the layer's buffers after both."""
    x = values() if x is None else x
    y = forward(own, x, chosen)
    y.square().sum().backward()
    grads = [parameter.grad for parameter in own.parameters() if parameter.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *grads, *own.buffers()]


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
        fp8core.clear_found_inf(own)
        found.append([*step(own, one), *step(own, one)])
        found[-1].append(own._bindings.nonfinite[DEVICE])
    assert_same(*found)


def test_a_weight_quantized_columnwise_alone_is_counted_in_forward() -> None:
    _, again = both_ways(CUSTOM["weight columnwise alone"]())
    own = layer()
    fp8core.clear_found_inf(own)
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
        fp8core.clear_found_inf(own)
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


@pytest.mark.parametrize("columns", [32, 30])
def test_the_amax_of_a_weight_is_computed_once(columns: int) -> None:
    held, again = recipes("current")
    own, x = Linear(columns, 48), values(columns=columns)
    want = step(own, held, x)
    with autocast(recipe=again):
        quantizer: Any = bind(own, x.device, x.dtype).linears[0].weight  # type: ignore[attr-defined]
    by_amax, counted = quantizer._by_amax, []

    def amax(weight: torch.Tensor) -> torch.Tensor:
        counted.append(weight)
        return by_amax.amax(weight)

    quantizer._by_amax = by_amax._replace(amax=amax)
    own.zero_grad()
    x.grad = None
    assert_same(step(own, again, x), want)
    assert [one is own.weight for one in counted] == [True]


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
            return plan.LinearPlan(*gemms, remade=("weight",) if self.requantizes else ())

    results = [step(layer(), Own(given)) for given in (None, False, True)]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize(
    "wrong", [{"remade": ("weights",)}, {"remade": "least"}, {"nonfinite": ""}]
)
def test_a_plan_of_a_user_s_own_with_an_unknown_value_is_refused(wrong: dict[str, Any]) -> None:
    class Own(recipe.Recipe):
        def plan(self, role: plan.LayerRole, dtype: torch.dtype) -> plan.LinearPlan:
            return dataclasses.replace(CURRENT.plan(role, dtype), **wrong)

    ((name, value),) = wrong.items()
    with pytest.raises(fp8core.RecipeError, match=re.escape(f"LinearPlan({name}={value!r})")):
        step(layer(), Own())


@pytest.mark.parametrize(("kind", "name"), turns(models.LAYERS, NAMES))
def test_no_codes_of_a_weight_are_held(kind: str, name: str) -> None:
    held, again = recipes(name)
    sizes = []
    for chosen in (held, again):
        own = make(kind)
        torch.manual_seed(2)
        x = torch.randn(models.ROWS, 32, dtype=BF16, requires_grad=True)
        with saved_tensors() as saved, autocast(recipe=chosen):
            models.call(own, x)
        sizes.append(bytes_held(saved, own))
    weights = [one for one in make(kind).parameters() if one.dim() == 2]
    codes = sum(one.numel() for one in weights) // (2 if name == "nvfp4" else 1)
    assert sizes[0] - sizes[1] >= codes - 4 * len(weights)  # each has a copy of its delayed scale


def test_a_weight_that_dgrad_does_not_need_is_not_saved() -> None:
    own = layer()
    with saved_tensors() as saved:
        forward(own, values().detach(), CURRENT)
    assert [tuple(one.shape) for one in saved] == [(32, 32), (1, 1)]


def test_inference_saves_nothing() -> None:
    for guard in [torch.no_grad, torch.inference_mode]:
        own = layer()
        with saved_tensors() as saved, guard():
            y = forward(own, values(), CURRENT)
        assert saved == [], guard
        assert not y.requires_grad, guard


def test_under_torch_autocast_the_parameter_itself_is_saved() -> None:
    """It is quantized from its own dtype: nothing is converted."""
    found = []
    for chosen in recipes("current"):
        own, x = layer(), values()
        with saved_tensors() as saved, torch.autocast(DEVICE.type, BF16):
            y = forward(own, x, chosen)
        assert any(one is own.weight for one in saved) == chosen.requantize_weights
        y.sum().backward()
        found.append([y.detach(), x.grad, own.weight.grad])
    assert_same(*found)


def split() -> nn.Module:
    return Linear(32, 48, parameters_split=("query", "key"))


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(Linear(32, 48))


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("of", [split, normed])
def test_a_weight_that_forward_computes_is_held_as_codes(
    of: Callable[[], nn.Module], is_trained: bool
) -> None:
    """It is larger than its codes, and nobody else would hold it."""
    found, sizes = [], []
    for chosen in recipes("current"):
        torch.manual_seed(1)
        own, x = of().requires_grad_(is_trained), values()
        with saved_tensors() as saved:
            y = forward(own, x, chosen)
        sizes.append(bytes_held(saved, own))
        y.sum().backward()
        found.append([y.detach(), x.grad])
    assert_same(*found)
    assert sizes[0] == sizes[1]


def test_backward_frees_the_codes_after_dgrad() -> None:
    own, x = layer(), values()
    with autocast(recipe=CURRENT):
        bound = bind(own, x.device, x.dtype)
    link = bound.linears[0]
    codes: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def dgrad(dy: Any, weight: Any) -> Any:
        codes.append(weakref.ref(weight.data))
        return link.dgrad(dy, weight)

    def wgrad(*arguments: Any) -> Any:
        alive.append(codes[0]() is not None)
        return link.wgrad(*arguments)

    assert isinstance(link, LinearLink)
    watched = dataclasses.replace(link, dgrad=dgrad, wgrad=wgrad, _programs={})
    fp8core.chain.run.run((watched,), x, own.link_params()).sum().backward()
    assert alive == [False]


def test_a_retained_graph_gives_the_same_twice() -> None:
    own, x = layer(), values()
    y = forward(own, x, CURRENT).sum()
    first = torch.autograd.grad(y, (x, own.weight), retain_graph=True)
    assert_same(list(torch.autograd.grad(y, (x, own.weight))), list(first))


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_kept_operands_of_microbatches_are_not_made_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, again = recipes(name)

    def run(chosen: Any) -> list[torch.Tensor]:
        own, x, found = layer(), values(), []
        outputs = [forward(own, x, chosen, is_first_microbatch=at == 0) for at in range(3)]
        for y in outputs:
            y.square().sum().backward()
            found += [x.grad.clone(), own.weight.grad.clone()]  # type: ignore[union-attr]
        return [*found, *own.buffers()]

    with counted_requantizations(monkeypatch) as made:
        assert_same(run(again), run(held))
    assert made == [False] * 3


def test_kept_operands_of_frozen_weights_are_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, x = layer(), values()
    want = step(layer(), recipes("current")[0])
    with counted_requantizations(monkeypatch) as made, fp8core.frozen_weights(own):
        assert_same(step(own, CURRENT, x), want)
    assert made == [False]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_frozen_weights_under_delayed_scaling_may_be_recomputed(use_reentrant: bool) -> None:
    """Forward records an amax, so it keeps nothing; nor does its recompute, which records none."""
    held, again = recipes("delayed")
    found = []
    for chosen in (held, again):
        own = layer()
        with fp8core.frozen_weights(own):
            for seed in range(3):
                x = values(seed)
                with autocast(recipe=chosen):
                    y = fp8core.checkpoint(own, x, use_reentrant=use_reentrant)
                y.square().sum().backward()
                found.append([y.detach(), x.grad, *own.buffers()])
    for mine, theirs in zip(found[3:], found[:3], strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_a_weight_stored_quantized_is_its_own_operand(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, again = recipes(name)
    found = []
    with counted_requantizations(monkeypatch) as made:
        for chosen in (held, again):
            torch.manual_seed(1)
            with fp8core.quantized_model_init(recipe=chosen):
                own = Linear(32, 64)
            found.append(step(own, chosen))
    assert_same(*found)
    assert made == [False]


def test_groups_may_mix_stored_and_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    with counted_requantizations(monkeypatch) as made:
        for chosen in recipes("current"):
            torch.manual_seed(1)
            with fp8core.quantized_model_init(recipe=chosen):
                own = fp8core.GroupedLinear(2, 32, 64, bias=False)
            own.weight1 = nn.Parameter(own.weight1.dequantize())
            x = values()
            with autocast(recipe=chosen):
                y = own(x, [20, 12])
            y.square().sum().backward()
            found.append([y.detach(), x.grad, own.weight0.grad, own.weight1.grad])
    assert_same(*found)
    assert made == [False, True]


def test_a_weight_of_inference_mode_is_held_as_codes() -> None:
    """autograd does not save such a tensor."""
    own = layer(bias=False)
    with torch.inference_mode():
        own.weight = nn.Parameter(own.weight.detach().clone(), requires_grad=False)
    x = values()
    forward(own, x, CURRENT).sum().backward()
    want = values()
    forward(layer(bias=False), want, CURRENT).sum().backward()
    assert x.grad is not None
    assert want.grad is not None
    assert torch.equal(x.grad, want.grad)


def test_a_recompute_outside_of_the_frozen_weights_of_its_forward_is_refused() -> None:
    """Forward saved the codes that the scope keeps, the recompute would save the weight."""
    own = layer()
    with fp8core.frozen_weights(own), autocast(recipe=CURRENT):
        y = fp8core.checkpoint(own, values(), use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"saved during|metadata"):
        y.sum().backward()


def test_a_step_of_the_optimizer_before_backward_is_refused() -> None:
    for kind, name in turns(models.LAYERS, ["delayed", "current", "nvfp4"]):
        own, (_, again) = make(kind), recipes(name)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for parameter in own.parameters():
            parameter.grad = torch.ones_like(parameter)
        x = torch.randn(models.ROWS, 32, dtype=BF16, requires_grad=True)
        with autocast(recipe=again):
            y = models.call(own, x)
        optimizer.step()
        with pytest.raises(OperandError, match=r"\(32, .*written in place .*requantize_weights"):
            y.sum().backward()


def test_a_step_on_a_flat_parameter_is_refused() -> None:
    own, flat = layer(bias=False), nn.Parameter(torch.randn(48 * 32))
    del own._parameters["weight"]
    own.weight = flat.view(48, 32)
    x = values()
    with saved_tensors() as saved:
        y = forward(own, x, CURRENT)
    assert any(one.untyped_storage().data_ptr() == flat.data_ptr() for one in saved)
    y.sum().backward()
    assert flat.grad is not None
    own.weight = flat.view(48, 32)
    y = forward(own, x, CURRENT)
    with torch.no_grad():
        flat.mul_(2)
    with pytest.raises(OperandError, match="written in place"):
        y.sum().backward()


def test_memory_that_is_freed_and_filled_again_before_backward_gives_the_same() -> None:
    """As FSDP gathers a sharded parameter for each use of it."""
    want = step(layer(), CURRENT)
    own, x = layer(), values()
    y = forward(own, x, CURRENT)
    value, storage = own.weight.detach().clone(), own.weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(value.nbytes)
    own.weight.data.copy_(value)
    y.square().sum().backward()
    assert_same([y.detach(), x.grad, own.weight.grad], want[:3])  # type: ignore[list-item]


def test_memory_that_is_still_freed_in_backward_is_refused_by_name() -> None:
    own = layer()
    y = forward(own, values(), CURRENT)
    storage, size = own.weight.untyped_storage(), own.weight.nbytes
    storage.resize_(0)
    try:
        with pytest.raises(OperandError, match=r"Linear\(32, 48\).* no memory.*freed"):
            y.sum().backward()
    finally:
        storage.resize_(size)


OTHER_DATA = {
    "dtype": lambda weight: weight.to(BF16),
    "shape": lambda weight: weight[:24].clone(),
}


def test_other_data_than_in_forward_is_refused_by_name() -> None:
    for what in OTHER_DATA:
        own = layer()
        y = forward(own, values(), CURRENT)
        with torch.no_grad():
            own.weight.data = OTHER_DATA[what](own.weight)
        with pytest.raises(
            OperandError, match=r"Linear\(32, 48\): in backward the weight is .*forward had"
        ):
            y.sum().backward()


def test_a_negation_that_data_got_since_forward_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel reads the memory, in which the sign is missing."""
    want = step(layer(), CURRENT)
    own, x, given = layer(), values(), []
    y = forward(own, x, CURRENT)
    weight = own.weight.detach().clone()
    own.weight.data = torch.complex(torch.zeros_like(weight), -weight).conj().imag
    assert own.weight.is_neg()
    requantize = RequantizedWeight.requantize

    def seen(self: Any, saved: Any) -> Any:
        given.append(saved[0].is_neg())
        return requantize(self, saved)

    monkeypatch.setattr(RequantizedWeight, "requantize", seen)
    y.square().sum().backward()
    assert given == [False]
    assert_same([y.detach(), x.grad, own.weight.grad], want[:3])  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of one rank; torch's
@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_layers_under_fully_shard_give_the_same(name: str, reshards: bool) -> None:
    mesh = init_device_mesh(DEVICE.type, (1,))

    def trained(chosen: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model: Any = nn.Sequential(Linear(32, 64), Linear(64, 32))
        for part in model:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshards)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for seed in range(3):
            x = values(seed)
            with saved_tensors() as saved:
                y = forward(model, x, chosen)
            y.square().mean().backward()
            floats = [one for one in saved if one.dtype == torch.float32 and one.numel() == 2048]
            assert len(floats) == 2 * chosen.requantize_weights
            found += [y.detach(), x.grad]
            found += [one.grad.full_tensor() for one in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    held, again = recipes(name)
    assert_same(trained(again), trained(held))
