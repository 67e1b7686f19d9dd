"""Optimizers on low-precision parameters: through masters, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.recipe import Recipe
from tests.device import DEVICE

RECIPES: dict[str, Recipe] = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
Maker = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
STEPS = 40


def model(used: Recipe | None) -> torch.nn.Module:
    torch.manual_seed(0)
    with fp8core.quantized_model_init(used is not None, used, True):
        return torch.nn.Sequential(
            fp8core.Linear(32, 64, params_dtype=torch.bfloat16),
            torch.nn.GELU(),
            fp8core.Linear(64, 32, params_dtype=torch.bfloat16),
        )


def loss_of(net: torch.nn.Module, used: Recipe) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(32, 32, generator=generator).bfloat16()
    target = torch.tanh(x.float() + x.float().roll(1, 1))
    with fp8core.autocast(recipe=used):
        y = net(x)
    return torch.nn.functional.mse_loss(y.float(), target)


AT_ONCE: dict[str, Maker] = {
    "sgd_foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adam_foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "adagrad_foreach": lambda params: torch.optim.Adagrad(params, foreach=True),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_an_optimizer_that_steps_all_at_once_is_refused_and_writes_nothing(name: str) -> None:
    net = model(RECIPES["current"])
    weights = [own for own in net.parameters() if isinstance(own, fp8core.QuantizedTensor)]
    before = [part.clone() for weight in weights for part in weight.tensors()]
    loss_of(net, RECIPES["current"]).backward()
    with pytest.raises(fp8core.UnsupportedError, match="MasterWeights"):
        AT_ONCE[name](net.parameters()).step()
    after = [part for weight in weights for part in weight.tensors()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


ONE_BY_ONE: dict[str, Maker] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_an_optimizer_on_the_parameters_lowers_the_loss(name: str) -> None:
    net, used = model(RECIPES["current"]), RECIPES["current"]
    optimizer = ONE_BY_ONE[name](net.parameters())
    first = loss_of(net, used)
    for _ in range(STEPS):
        loss_of(net, used).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_of(net, used) < 0.9 * first


def test_stepping_the_parameters_themselves_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with fp8core.quantized_model_init(recipe=recipe.Float8CurrentScaling(use_power_2_scales=True)):
        net = fp8core.Linear(16, 16)
    net.weight.grad = torch.ones(16, 16)
    torch.optim.SGD([net.weight], lr=0.1).step()
    assert "MasterWeights" in caplog.text


def test_optimizer_state_is_plain() -> None:
    net = model(RECIPES["current"])
    optimizer = torch.optim.AdamW(net.parameters())
    loss_of(net, RECIPES["current"]).backward()
    optimizer.step()
    kinds = {type(one) for state in optimizer.state.values() for one in state.values()}
    assert kinds == {torch.Tensor}


def test_a_master_starts_as_the_initial_value_and_takes_it() -> None:
    net = model(RECIPES["current"])
    kept = net[0].weight.get_high_precision_init_val()
    masters = dict(fp8core.MasterWeights(net).named_parameters())
    assert torch.equal(masters["0.weight"].cpu(), kept.float())
    assert net[0].weight.get_high_precision_init_val() is None


def test_without_an_initial_value_a_master_starts_as_the_parameter() -> None:
    net = model(RECIPES["current"])
    net[0].weight.clear_high_precision_init_val()
    masters = dict(fp8core.MasterWeights(net).named_parameters())
    assert torch.equal(masters["0.weight"], net[0].weight.dequantize(torch.float32))


def test_float32_parameters_are_their_own_masters() -> None:
    net = torch.nn.Linear(4, 4)
    assert [*map(id, fp8core.MasterWeights(net).parameters())] == [*map(id, net.parameters())]


def test_masters_of_another_model_are_refused() -> None:
    with pytest.raises(fp8core.OperandError, match=r"unexpected \['x'\]"):
        fp8core.MasterWeights(torch.nn.Linear(2, 2)).load_state_dict({"x": torch.zeros(1)})


def test_attaching_an_optimizer_of_the_parameters_is_refused() -> None:
    net = model(RECIPES["current"])
    masters = fp8core.MasterWeights(net)
    with pytest.raises(fp8core.OperandError, match=r"of masters\.parameters"):
        masters.attach(torch.optim.SGD(net.parameters()))


def test_two_optimizers_step_their_own_masters() -> None:
    net, used = model(RECIPES["current"]), RECIPES["current"]
    masters = fp8core.MasterWeights(net)
    named = dict(masters.named_parameters())
    for part in ("0.", "2."):
        own = [master for name, master in named.items() if name.startswith(part)]
        optimizer = torch.optim.SGD(own, lr=1.0)
        masters.attach(optimizer)
        before = {name: master.detach().clone() for name, master in named.items()}
        loss_of(net, used).backward()
        optimizer.step()
        moved = {name for name in named if not torch.equal(before[name], named[name])}
        assert moved == {name for name in named if name.startswith(part)}


def bf16_layer(**more: Any) -> tuple[fp8core.Linear, fp8core.MasterWeights]:
    torch.manual_seed(0)
    layer = fp8core.Linear(32, 32, params_dtype=torch.bfloat16, **more)
    return layer, fp8core.MasterWeights(layer)


def test_zero_grad_throws_away_what_nobody_has_collected() -> None:
    layer, masters = bf16_layer()
    optimizer = torch.optim.SGD(masters.parameters(), lr=1.0)
    masters.attach(optimizer)
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    layer(x * float("inf")).sum().backward()
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
    assert layer.weight.isfinite().all()


def test_a_scaler_unscales_what_was_collected() -> None:
    moved = []
    for scale in (1.0, 1024.0):
        layer, masters = bf16_layer()
        optimizer = torch.optim.SGD(masters.parameters(), lr=1.0)
        masters.attach(optimizer)
        before = [own.clone() for own in masters.parameters()]
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=scale)
        loss = layer(torch.ones(8, 32, dtype=torch.bfloat16)).float().square().mean()
        scaler.scale(loss).backward()
        masters.collect_grads()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        moved.append([own - old for own, old in zip(masters.parameters(), before, strict=True)])
    assert all(map(torch.equal, *moved))


AMP_STEPS, OVERFLOWS = 7, 3  # the step whose loss is infinite
Record = list[Any]


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE.type, init_scale=2.0**16, growth_interval=2)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def amp_loss(
    forward: Callable[[torch.Tensor], torch.Tensor], step: int, dtype: Any
) -> torch.Tensor:
    loss = forward(batch(step, dtype)).float().square().mean()
    return loss * math.inf if step == OVERFLOWS else loss


def amp_step(
    optimizer: torch.optim.Optimizer, scale: torch.amp.GradScaler, clipped: Any
) -> list[float]:
    """The recipe of torch's documentation, from unscale_ to update; the norm, and the scale."""
    scale.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(clipped, 0.02).item()
    scale.step(optimizer)
    scale.update()
    return [norm if math.isfinite(norm) else -1.0, scale.get_scale()]


def plain_model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 64)]
    return torch.nn.Sequential(*layers).to(dtype)


def train_in_float32(dtype: torch.dtype) -> Record:
    """Float32 leaves, cast to ``dtype`` by autograd itself in every forward."""
    net = plain_model(dtype)
    leaves = {name: own.detach().float().requires_grad_() for name, own in net.named_parameters()}

    def forward(x: torch.Tensor) -> torch.Tensor:
        cast = {name: leaf.to(dtype) for name, leaf in leaves.items()}
        found: torch.Tensor = torch.func.functional_call(net, cast, x)
        return found

    optimizer, scale, record = torch.optim.AdamW(leaves.values(), lr=1e-2), scaler(), []
    for step in range(AMP_STEPS):
        scale.scale(amp_loss(forward, step, dtype)).backward()
        told = amp_step(optimizer, scale, leaves.values())
        optimizer.zero_grad()
        record.append((told, [leaf.detach().clone() for leaf in leaves.values()]))
    return record


def train_with_masters(dtype: torch.dtype, clips: str, zeroes: str) -> Record:
    net = plain_model(dtype)
    masters = fp8core.MasterWeights(net)
    optimizer, scale, record = torch.optim.AdamW(masters.parameters(), lr=1e-2), scaler(), []
    masters.attach(optimizer)
    for step in range(AMP_STEPS):
        before = [own.detach().clone() for own in net.parameters()]
        scale.scale(amp_loss(net, step, dtype)).backward()
        told = amp_step(optimizer, scale, (net if clips == "model" else masters).parameters())
        if zeroes == "model":
            net.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=zeroes == "optimizer")
        stepped = [master.detach().clone() for master in masters.parameters()]
        record.append((told, stepped))
        for own, master, was in zip(net.parameters(), stepped, before, strict=True):
            assert torch.equal(own, was if step == OVERFLOWS else master.to(dtype))
    return record


def equal(one: Record, other: Record) -> Iterator[bool]:
    for (told, values), (expected, wanted) in zip(one, other, strict=True):
        yield told == expected and all(map(torch.equal, values, wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clips", ["model", "masters"])
@pytest.mark.parametrize("zeroes", ["model", "optimizer", "optimizer, to zeros"])
def test_amp_steps_masters_bit_for_bit_as_float32(
    dtype: torch.dtype, clips: str, zeroes: str
) -> None:
    found = train_with_masters(dtype, clips, zeroes)
    assert list(equal(found, train_in_float32(dtype))) == [True] * AMP_STEPS


def test_the_oracle_clips_overflows_and_grows() -> None:
    told = [told for told, _ in train_in_float32(torch.bfloat16)]
    assert [norm > 0.02 for norm, _ in told].count(True) >= 3
    assert told[OVERFLOWS] == [-1.0, told[OVERFLOWS - 1][1] / 2]
    assert told[1][1] == 2.0**17


def train_layers(name: str, is_stored: bool) -> Record:
    """With weights stored quantized and masters, or in float32 and quantized in every forward."""
    used = recipe.by_name(name)
    torch.manual_seed(0)
    with fp8core.quantized_model_init(is_stored, used, True):
        net = torch.nn.Sequential(
            fp8core.Linear(64, 128, params_dtype=torch.float32),
            torch.nn.GELU(),
            fp8core.Linear(128, 64, params_dtype=torch.float32),
        )
    masters = fp8core.MasterWeights(net)
    optimizer, scale, record = torch.optim.AdamW(masters.parameters(), lr=1e-2), scaler(), []
    masters.attach(optimizer)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with fp8core.autocast(recipe=used):
            found: torch.Tensor = net(x)
        return found

    for step in range(AMP_STEPS):
        scale.scale(amp_loss(forward, step, torch.float32)).backward()
        told = amp_step(optimizer, scale, net.parameters())
        optimizer.zero_grad()
        record.append((told, [master.detach().clone() for master in masters.parameters()]))
    return record


@pytest.mark.parametrize("name", recipe.names())
def test_every_storage_trains_under_amp_as_float32_weights(name: str) -> None:
    found, expected = train_layers(name, True), train_layers(name, False)
    if name != "delayed":
        assert list(equal(found, expected)) == [True] * AMP_STEPS
    else:  # its weight scale follows one step behind in float32
        for (told, _), (wanted, _) in zip(found, expected, strict=True):
            assert told == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflowed_moves_nothing(fused: bool) -> None:
    # A fused optimizer is called all the same, and looks itself for what the scaler found.
    net = plain_model(torch.bfloat16)
    masters = fp8core.MasterWeights(net)
    optimizer, scale = torch.optim.AdamW(masters.parameters(), fused=fused), scaler()
    masters.attach(optimizer)
    before = [own.detach().clone() for own in (*masters.parameters(), *net.parameters())]
    scale.scale(amp_loss(net, OVERFLOWS, torch.bfloat16)).backward()
    scale.step(optimizer)
    scale.update()
    after = [*masters.parameters(), *net.parameters()]
    assert all(map(torch.equal, before, after))
    assert scale.get_scale() == 2.0**15


def test_an_overflow_that_a_cast_hides_is_skipped_under_a_watch() -> None:
    used = recipe.Float8CurrentScaling()
    torch.manual_seed(0)
    with fp8core.quantized_model_init(True, used, True):
        net = fp8core.Linear(64, 64, bias=False, params_dtype=torch.bfloat16)
    masters = fp8core.MasterWeights(net)
    optimizer, scale = torch.optim.AdamW(masters.parameters()), scaler()
    masters.attach(optimizer)
    fp8core.watch_grad_scaler(scale, net)
    (master,) = masters.parameters()

    def forward(x: torch.Tensor) -> torch.Tensor:
        with fp8core.autocast(recipe=used):
            found: torch.Tensor = net(x)
        return found

    for step in (OVERFLOWS, 0):
        before = master.detach().clone()
        scale.scale(amp_loss(forward, step, torch.bfloat16)).backward()
        grad = master.grad
        assert grad is not None
        assert grad.isfinite().all()
        amp_step(optimizer, scale, net.parameters())
        optimizer.zero_grad()
        assert torch.equal(before, master) == (step == OVERFLOWS)


def test_microbatches_add_up_in_float32_after_collect_grads() -> None:
    dtype = torch.bfloat16
    net, other = plain_model(dtype), plain_model(dtype)
    masters = fp8core.MasterWeights(net)
    sums = [torch.zeros(own.shape) for own in other.parameters()]
    for step in range(3):
        amp_loss(net, step, dtype).backward()
        masters.collect_grads()
        grads = torch.autograd.grad(amp_loss(other, step, dtype), tuple(other.parameters()))
        for sum_, grad in zip(sums, grads, strict=True):
            sum_ += grad
    found = [master.grad for master in masters.parameters()]
    assert all(torch.equal(*pair) for pair in zip(found, sums, strict=True))
