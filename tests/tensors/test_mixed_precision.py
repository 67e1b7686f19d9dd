"""Masters under a GradScaler and a clipper, step by step against training in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from tests.device import DEVICE

STEPS, OVERFLOWS = 7, 3  # the step whose loss is infinite
Record = list[Any]


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE.type, init_scale=2.0**16, growth_interval=2)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(forward: Callable[[torch.Tensor], torch.Tensor], step: int, dtype: Any) -> torch.Tensor:
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
    for step in range(STEPS):
        scale.scale(loss_of(forward, step, dtype)).backward()
        told = amp_step(optimizer, scale, leaves.values())
        optimizer.zero_grad()
        record.append((told, [leaf.detach().clone() for leaf in leaves.values()]))
    return record


def train_with_masters(dtype: torch.dtype, clips: str, zeroes: str) -> Record:
    net = plain_model(dtype)
    masters = fp8core.MasterWeights(net)
    optimizer, scale, record = torch.optim.AdamW(masters.parameters(), lr=1e-2), scaler(), []
    masters.attach(optimizer)
    for step in range(STEPS):
        before = [own.detach().clone() for own in net.parameters()]
        scale.scale(loss_of(net, step, dtype)).backward()
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
    assert list(equal(found, train_in_float32(dtype))) == [True] * STEPS


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

    for step in range(STEPS):
        scale.scale(loss_of(forward, step, torch.float32)).backward()
        told = amp_step(optimizer, scale, net.parameters())
        optimizer.zero_grad()
        record.append((told, [master.detach().clone() for master in masters.parameters()]))
    return record


@pytest.mark.parametrize("name", recipe.names())
def test_every_storage_trains_under_amp_as_float32_weights(name: str) -> None:
    found, expected = train_layers(name, True), train_layers(name, False)
    if name != "delayed":
        assert list(equal(found, expected)) == [True] * STEPS
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
    scale.scale(loss_of(net, OVERFLOWS, torch.bfloat16)).backward()
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
        scale.scale(loss_of(forward, step, torch.bfloat16)).backward()
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
        loss_of(net, step, dtype).backward()
        masters.collect_grads()
        grads = torch.autograd.grad(loss_of(other, step, dtype), tuple(other.parameters()))
        for sum_, grad in zip(sums, grads, strict=True):
            sum_ += grad
    found = [master.grad for master in masters.parameters()]
    assert all(torch.equal(*pair) for pair in zip(found, sums, strict=True))
