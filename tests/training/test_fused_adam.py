"""FusedAdam beside torch's AdamW and Adam, in every way to hold values and state."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from fp8core.optimizers import FusedAdam, FusedSGD, fused_adam
from tests.device import DEVICE
from tests.pairs import turns
from tests.refusals import unrefused

BF16 = torch.bfloat16
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((7, 5), (33,), (2, 3, 4))
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_gradients(params: list[torch.nn.Parameter], step: int, dtype: Any = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator).to(BF16)
        param.grad = grad.to(dtype or param.dtype)


def trained(kind: Any, params: list[Any], steps: int = 4, **options: Any) -> Any:
    optimizer = kind(params, **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_torch(decoupled: bool, weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    options = OPTIONS | {"weight_decay": weight_decay}
    trained(FusedAdam, ours, adam_w_mode=decoupled, **options)
    trained(torch.optim.AdamW if decoupled else torch.optim.Adam, theirs, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_averages_without_correction() -> None:
    (param,) = params = parameters()[:1]
    before = param.detach().clone()
    give_gradients(params, 0)
    optimizer = FusedAdam(params, lr=0.5, betas=(0.9, 0.99), eps=0.0, bias_correction=False)
    optimizer.step()
    g = param.grad
    update = 0.1 * g / (0.01 * g * g).sqrt()
    torch.testing.assert_close(param.detach(), before - 0.5 * update)


@pytest.mark.parametrize("remainders", [False, True])
def test_masters_are_stepped_in_float32(remainders: bool) -> None:
    ours, theirs = parameters(BF16), [torch.nn.Parameter(p.float()) for p in parameters(BF16)]
    optimizer = trained(
        FusedAdam, ours, master_weights=True, store_param_remainders=remainders, **OPTIONS
    )
    trained(torch.optim.AdamW, theirs, **OPTIONS)
    for param, other in zip(ours, theirs, strict=True):
        master = optimizer.get_unscaled_state(param, "master_param")
        if remainders:
            assert master.dtype == torch.int16
            bits = (param.detach().view(torch.int16).int() << 16) + master.int()
            master = bits.view(torch.float32)
        torch.testing.assert_close(master, other.detach(), rtol=1e-5, atol=1e-6)
        difference = (param.detach().float() - master).abs()
        assert bool((difference <= master.abs() * 2.0**-8).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
def test_averages_of_fewer_bits_are_near(dtype: torch.dtype) -> None:
    ours, theirs = parameters(), parameters()
    trained(FusedAdam, ours, exp_avg_dtype=dtype, **OPTIONS)
    trained(torch.optim.AdamW, theirs, **OPTIONS)
    near = {torch.float16: 1e-4, torch.bfloat16: 2e-3, torch.uint8: 2e-2}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=near)


def test_both_averages_in_bfloat16() -> None:
    params = parameters()
    dtypes = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
    optimizer = trained(FusedAdam, params, **dtypes, **OPTIONS)
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype == BF16
    assert optimizer.get_unscaled_state(params[0], "exp_avg").dtype == torch.float32


def test_float16_masters_have_a_scale() -> None:
    ours, theirs = parameters(BF16), [torch.nn.Parameter(p.float()) for p in parameters(BF16)]
    options = {"master_weights": True, "master_weight_dtype": torch.float16}
    optimizer = trained(FusedAdam, ours, **options, **OPTIONS)
    trained(torch.optim.AdamW, theirs, **OPTIONS)
    for param, other in zip(ours, theirs, strict=True):
        master = optimizer.get_unscaled_state(param, "master_param")
        torch.testing.assert_close(master, other.detach(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"])
def test_quantized_parameters_are_written_from_their_masters(name: str, keeps: bool) -> None:
    chosen = getattr(recipe, name)()
    torch.manual_seed(1)
    with fp8core.quantized_model_init(recipe=chosen, preserve_high_precision_init_val=keeps):
        layer = fp8core.Linear(64, 64, bias=False, params_dtype=BF16, device=DEVICE)
    kept = layer.weight.get_high_precision_init_val()
    initial = (
        layer.weight.dequantize(torch.float32) if kept is None else kept.to(DEVICE, torch.float32)
    )
    optimizer = FusedAdam(layer.parameters(), master_weights=True, **OPTIONS)
    other = torch.nn.Parameter(initial.clone())
    judge = torch.optim.AdamW([other], **OPTIONS)
    for step in range(3):
        with fp8core.autocast(recipe=chosen):
            y = layer(torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(BF16))
        y.float().square().mean().backward()
        other.grad = layer.weight.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        judge.step()
    master = optimizer.get_unscaled_state(layer.weight, "master_param")
    torch.testing.assert_close(master, other.detach(), rtol=1e-5, atol=1e-6)
    again = layer.weight.detach().clone()
    again.copy_(master)
    assert torch.equal(again.dequantize(), layer.weight.dequantize())


def test_gradients_of_another_dtype_by_decoupled_grad() -> None:
    ours, theirs = parameters(BF16), parameters(BF16)
    optimizer = FusedAdam(ours, use_decoupled_grad=True, **OPTIONS)
    give_gradients(theirs, 0)
    for param, other in zip(ours, theirs, strict=True):
        param.decoupled_grad = other.grad.float()
    optimizer.step()
    FusedAdam(theirs, **OPTIONS).step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.decoupled_grad.any() for param in ours)
    optimizer.zero_grad()
    assert all(param.decoupled_grad is None for param in ours)


def test_groups_have_options_and_steps_of_their_own() -> None:
    ours, theirs = parameters(), parameters()
    results = []
    for params, kind in ((ours, FusedAdam), (theirs, torch.optim.AdamW)):
        groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "weight_decay": 0.0}]
        results.append(trained(kind, params, 0, **OPTIONS))
        optimizer = kind(groups, **OPTIONS)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_capturable_counts_on_the_device() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = trained(FusedAdam, ours, capturable=True, **OPTIONS)
    trained(FusedAdam, theirs, **OPTIONS)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    step = optimizer.param_groups[0]["step"]
    assert (step.dtype, step.tolist()) == (torch.int32, [4])


def test_capturable_leaves_out_a_step_with_inf() -> None:
    params = parameters()
    optimizer = FusedAdam(params, capturable=True, **OPTIONS)
    before = [param.detach().clone() for param in params]
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
    give_gradients(params, 0)
    params[0].grad[0, 0] = torch.inf
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, params, strict=True))
    assert optimizer.param_groups[0]["step"].tolist() == [0]
    give_gradients(params, 1)
    scaled = [param.grad.clone() for param in params]
    for param in params:
        param.grad.mul_(scaler.get_scale())
    scaler.step(optimizer)
    other = parameters()
    for param, grad in zip(other, scaled, strict=True):
        param.grad = grad
    FusedAdam(other, **OPTIONS).step()
    torch.testing.assert_close(params, other, rtol=1e-5, atol=1e-6)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masters": {"master_weights": True},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "few bits": {
        "master_weights": True,
        "master_weight_dtype": torch.float16,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.float16,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_state_is_saved_and_loaded(name: str, tmp_path: Any) -> None:
    options = VARIANTS[name] | OPTIONS
    ours = parameters(BF16)
    optimizer = trained(FusedAdam, ours, 2, **options)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    again = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    other = FusedAdam(again, **options)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for params, stepper in ((ours, optimizer), (again, other)):
        give_gradients(params, 9)
        stepper.step()
    torch.testing.assert_close(again, ours, rtol=0, atol=0)
    assert other.param_groups[0]["step"] == 3


def test_values_saved_are_float32() -> None:
    optimizer = trained(FusedAdam, parameters(), 1, exp_avg_dtype=torch.uint8, **OPTIONS)
    state = optimizer.state_dict()["state"][0]
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_closure_and_parameters_without_gradient() -> None:
    params = parameters()
    before = params[2].detach().clone()

    def closure() -> torch.Tensor:
        loss = params[0].square().sum() + params[1].square().sum()
        loss.backward()
        return loss

    loss = FusedAdam(params, **OPTIONS).step(closure)
    assert loss.requires_grad
    assert torch.equal(params[2].detach(), before)


def test_nan_reaches_its_element_alone() -> None:
    params = parameters(BF16)
    give_gradients(params, 0)
    params[0].grad[2, 1] = torch.nan
    FusedAdam(params, master_weights=True, store_param_remainders=True, **OPTIONS).step()
    assert params[0].isnan().nonzero().tolist() == [[2, 1]]
    assert all(param.isfinite().all() for param in params[1:])


def test_empty_and_strided_parameters() -> None:
    wide = torch.nn.Parameter(torch.randn(5, 7).t())
    params = [torch.nn.Parameter(torch.empty(0, 3)), wide]
    other = torch.nn.Parameter(wide.detach().contiguous())
    for param in (*params, other):
        param.grad = torch.ones(param.shape)
    FusedAdam(params, **OPTIONS).step()
    FusedAdam([other], **OPTIONS).step()
    assert torch.equal(wide.detach(), other.detach())


ERRORS: dict[str, Any] = {
    "amsgrad=True is not offered": lambda: FusedAdam(parameters(), amsgrad=True),
    "exp_avg_dtype=torch.int8": lambda: FusedAdam(parameters(), exp_avg_dtype=torch.int8),
    "master_weight_dtype=torch.bfloat16": lambda: FusedAdam(
        parameters(), master_weights=True, master_weight_dtype=BF16
    ),
    "not both float32 or both bfloat16": lambda: FusedAdam(
        parameters(), capturable=True, exp_avg_dtype=BF16
    ),
    "store_param_remainders=True is not offered": lambda: FusedAdam(
        parameters(), capturable=True, master_weights=True, store_param_remainders=True
    ),
    "FusedAdam(lr=-1": lambda: FusedAdam(parameters(), lr=-1.0),
    "FusedAdam(betas=(1.0, 0.9))": lambda: FusedAdam(parameters(), betas=(1.0, 0.9)),
    "FusedAdam(betas=(0.9, 0.99, 0.999))": lambda: FusedAdam(
        parameters(), betas=(0.9, 0.99, 0.999)
    ),
    "a parameter of torch.float64": lambda: FusedAdam(parameters(torch.float64)),
}


def test_what_is_not_offered_is_named() -> None:
    table = {words: (call, Fp8CoreError, re.escape(words)) for words, call in ERRORS.items()}
    assert unrefused(table) == {}


def test_quantized_parameters_need_masters() -> None:
    with fp8core.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        layer = fp8core.Linear(64, 64, params_dtype=BF16, device=DEVICE)
    with pytest.raises(UnsupportedError, match="set master_weights=True"):
        FusedAdam(layer.parameters())


def test_masters_in_another_form_are_not_loaded() -> None:
    saved = trained(FusedAdam, parameters(BF16), 1, master_weights=True, **OPTIONS).state_dict()
    other = FusedAdam(parameters(BF16), master_weights=True, store_param_remainders=True, **OPTIONS)
    with pytest.raises(OperandError, match=r"master_param is torch\.float32.*expected integers"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_remainders_of_another_kind_are_not_loaded(dtype: torch.dtype) -> None:
    options = {"master_weights": True, "store_param_remainders": True}
    saved = trained(FusedAdam, parameters(BF16), 1, **options).state_dict()
    saved["state"][0]["master_param"] = saved["state"][0]["master_param"].to(dtype)
    other = FusedAdam(parameters(BF16), **options)
    with pytest.raises(OperandError, match=rf"master_param is {dtype} .*expected integers"):
        other.load_state_dict(saved)
    assert not other.state


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedSGD])
def test_groups_without_an_option_are_not_loaded(optimizer: Any) -> None:
    saved = trained(optimizer, parameters(), 1, lr=0.1).state_dict()
    del saved["param_groups"][0]["lr"]
    other = optimizer(parameters(), lr=0.5)
    with pytest.raises(OperandError, match=r"param_groups lacks lr; it has "):
        other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("optimizer", "lr"), turns([FusedAdam, FusedSGD], [None, -1.0, "0.1", float("nan")])
)
def test_groups_whose_option_is_no_number_are_refused(optimizer: Any, lr: Any) -> None:
    ours = optimizer(parameters(), lr=0.5)
    saved = trained(optimizer, parameters(), 1, lr=0.1).state_dict()
    saved["param_groups"][0]["lr"] = lr
    words = rf"{optimizer.__name__}\(lr={lr!r}\): expected a number, 0 or above"
    for refused in (
        lambda: optimizer(parameters(), lr=lr),
        lambda: ours.add_param_group({"params": parameters(), "lr": lr}),
        lambda: ours.load_state_dict(saved),
    ):
        with pytest.raises(OperandError, match=words):
            refused()
    assert [group["lr"] for group in ours.param_groups] == [0.5]


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_added_parameters_that_cannot_be_stepped_are_refused(kind: Any, dtype: torch.dtype) -> None:
    ours = kind(parameters(), lr=0.5)
    param = torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
    with pytest.raises(OperandError, match=f"a parameter of {dtype}"):
        ours.add_param_group({"params": [param]})
    assert len(ours.param_groups) == 1


@pytest.mark.parametrize("saves", [False, True])
def test_a_state_with_masters_on_one_side_alone_is_not_loaded(saves: bool) -> None:
    saved = trained(FusedAdam, parameters(BF16), 1, master_weights=saves).state_dict()
    other = FusedAdam(parameters(BF16), master_weights=not saves)
    with pytest.raises(OperandError, match=f"here it has .* with master_weights={not saves}"):
        other.load_state_dict(saved)
    assert not other.state


def test_a_state_that_a_hook_renames_is_loaded_before_later_hooks() -> None:
    optimizer = trained(FusedAdam, parameters(BF16), 1, master_weights=True)
    stored = optimizer.state_dict()
    for state in stored["state"].values():
        state["master"] = state.pop("master_param")
    other, seen = FusedAdam(parameters(BF16), master_weights=True), []

    def rename(_: Any, given: dict[str, Any]) -> None:
        for state in given["state"].values():
            state["master_param"] = state.pop("master")

    other.register_load_state_dict_pre_hook(rename)
    other.register_load_state_dict_post_hook(lambda one: seen.append(len(one.state)))
    other.load_state_dict(stored)
    assert seen == [len(stored["state"])]
    torch.testing.assert_close(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_state_of_another_optimizer_is_not_loaded() -> None:
    saved = trained(torch.optim.AdamW, parameters(), 1).state_dict()
    with pytest.raises(OperandError, match=r"has the states .*'step'"):
        FusedAdam(parameters()).load_state_dict(saved)


def test_masters_of_float32_parameters_are_left_out() -> None:
    optimizer = trained(FusedAdam, parameters(), 1)
    saved = optimizer.state_dict()
    for number, param in enumerate(parameters()):
        saved["state"][number]["master_param"] = param.detach()
    optimizer.load_state_dict(saved)
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_remainders_are_saved_in_a_dtype_that_collectives_take() -> None:
    options = {"master_weights": True, "store_param_remainders": True}
    optimizer = trained(FusedAdam, parameters(BF16), 1, **options)
    saved = optimizer.state_dict()["state"][0]["master_param"]
    assert saved.dtype == torch.int32
    held = optimizer.get_unscaled_state(optimizer.param_groups[0]["params"][0], "master_param")
    assert torch.equal(saved, held)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_a_refused_gradient_leaves_every_parameter_unstepped(kind: Any) -> None:
    first, second = parameters()[:2]
    optimizer = kind([{"params": [first]}, {"params": [second]}], lr=0.1)
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second).to_sparse()
    before = first.detach().clone()
    with pytest.raises(OperandError, match=rf"^{kind.__name__}: .* is sparse"):
        optimizer.step()
    assert torch.equal(first, before)
    assert "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_a_copy_of_the_optimizer_steps_as_the_optimizer(kind: Any) -> None:
    params = parameters(BF16)
    own = {"master_weights": True} if kind is FusedAdam else {"momentum": 0.9}
    optimizer = trained(kind, params, lr=0.1, weight_decay=0.1, **own)
    other = copy.deepcopy(optimizer)
    copies = other.param_groups[0]["params"]
    give_gradients(params, 9)
    give_gradients(copies, 9)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_a_parameter_without_dimensions_has_scaled_averages(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = FusedAdam([param], lr=0.1, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    param.grad = torch.tensor(3.0)
    optimizer.step()
    assert param.item() == pytest.approx(1.9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_averages_too_small_for_a_scale_stay_finite(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=0.1, exp_avg_sq_dtype=dtype)
    for _ in range(3):
        param.grad = torch.tensor([1e-19, 1e-18, 0.0, 3e-18])  # squares below float32's normal ones
        optimizer.step()
    assert bool(param.isfinite().all())


def test_an_added_group_has_its_rate_where_its_parameters_are() -> None:
    optimizer = FusedAdam(parameters(), capturable=True)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert torch.equal(optimizer.param_groups[1]["lr"], torch.tensor(0.5))


def test_a_state_of_another_model_is_refused_before_any_is_loaded() -> None:
    params = parameters()
    optimizer = trained(FusedAdam, params)
    stored = optimizer.state_dict()
    stored["state"][2]["exp_avg"] = torch.ones(3)
    held = optimizer.state[params[0]]["exp_avg"].clone()
    with pytest.raises(OperandError, match=r"exp_avg is \[3\]"):
        optimizer.load_state_dict(stored)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], held)


def test_parameters_of_several_devices_are_stepped_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []

    def bound(kind: Any, values: Any, x: torch.Tensor) -> Any:
        def run(grads: list[torch.Tensor], *lists: Any, **keywords: Any) -> None:
            devices.append((x.device.type, {grad.device.type for grad in grads}))

        return run

    monkeypatch.setattr(fused_adam, "bound", bound)
    params = [torch.nn.Parameter(torch.ones(2, device=where)) for where in ("cpu", "meta")]
    for param in params:
        param.grad = torch.ones_like(param)
    FusedAdam(params).step()
    assert devices == [("cpu", {"cpu"}), ("meta", {"meta"})]


@pytest.mark.parametrize("remainders", [False, True])
def test_a_scalar_parameter_is_stepped_as_a_vector_of_one(remainders: bool) -> None:
    params = [torch.tensor(1.5), torch.tensor([1.5])]
    params = [torch.nn.Parameter(one.to(torch.bfloat16)) for one in params]
    optimizer = FusedAdam(params, lr=1e-2, master_weights=True, store_param_remainders=remainders)
    for _ in range(3):
        for one in params:
            one.grad = torch.full_like(one, 0.25)
        optimizer.step()
    assert float(params[0].detach()) == float(params[1].detach()) < 1.5
    masters = [optimizer.state[one]["master_param"] for one in params]
    assert masters[0].item() == masters[1].item()
