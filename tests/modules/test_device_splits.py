"""GroupedLinear with sizes that stay on the device, here played by the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, OperandError, UnsupportedError, autocast, monitor, recipe
from fp8core.modules.layers import grouped_linear
from tests.device import DEVICE
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

NAMES = ["delayed", "current", "block", "rowwise"]
SIZES = ([5, 0, 3], [0, 0, 8], [1, 1, 6], [130, 0, 70])


@pytest.fixture(autouse=True)
def _device_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_linear, "_stays_on_device", lambda sizes: True)


def step(layer: GroupedLinear, x: torch.Tensor, splits: Any, name: str | None) -> list[Any]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with autocast(enabled=name is not None, recipe=recipe.by_name(name) if name else None):
        y = layer(x, splits)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    return [y.detach(), x.grad, *(own.grad for own in layer.parameters())]


@pytest.mark.parametrize(("sizes", "name"), turns(SIZES, [None, *NAMES]), ids=str)
def test_sizes_on_the_device_give_what_a_list_gives(sizes: list[int], name: str | None) -> None:
    layer, x = GroupedLinear(3, 144, 32), torch.randn(sum(sizes), 144)
    want = step(layer, x, sizes, name)
    layer.reset_delayed_state()
    got = step(layer, x, torch.tensor(sizes), name)
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_rows_beyond_the_groups_are_zeros_and_change_nothing(name: str) -> None:
    layer, x = GroupedLinear(3, 144, 32), torch.randn(12, 144)
    x[8:] = float("nan")
    got = step(layer, x, torch.tensor([5, 0, 3]), name)
    layer.reset_delayed_state()
    want = step(layer, x[:8], torch.tensor([5, 0, 3]), name)
    assert not got[0][8:].any()
    assert not got[1][8:].any()
    assert torch.equal(got[0][:8], want[0])


def test_sizes_that_do_not_fit_are_cut_off() -> None:
    for sizes in [[5, 0, 4], [100, 100, 100], [-3, 5, 3], [2**62, 2**62, 2**62]]:
        layer, x = GroupedLinear(3, 144, 32), torch.randn(8, 144)
        ends = torch.tensor(sizes).clamp(0, 8).cumsum(0).clamp(max=8)
        cut = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        got = step(layer, x, torch.tensor(sizes), "block")
        want = step(layer, x, cut, "block")
        assert all(torch.equal(mine, its) for mine, its in zip(got, want, strict=True))


def test_no_row_at_all_gives_zero_gradients() -> None:
    layer = GroupedLinear(3, 144, 32)
    made = step(layer, torch.randn(0, 144), torch.tensor([0, 0, 0]), "block")
    assert made[0].shape == (0, 32)
    assert not any(grad.any() for grad in made[2:])


def test_a_tensor_that_holds_no_sizes_is_refused() -> None:
    for sizes in [
        torch.tensor([5, 3]),
        torch.tensor([5.0, 0.0, 3.0]),
        torch.tensor([True, False, True]),
    ]:
        with pytest.raises(OperandError, match=r"expected an integer tensor \[3\]"):
            GroupedLinear(3, 32, 16)(torch.randn(8, 32), sizes)


def test_sizes_on_another_device_are_refused() -> None:
    sizes = torch.empty(3, dtype=torch.int64, device="meta")
    with pytest.raises(OperandError, match=f"m_splits is on meta, the input on {DEVICE}"):
        GroupedLinear(3, 32, 16)(torch.randn(8, 32), sizes)


def test_rows_that_a_recipe_has_to_pad_are_refused() -> None:
    layer = GroupedLinear(3, 32, 32, params_dtype=torch.bfloat16)
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    with (
        autocast(recipe=recipe.by_name("mxfp8")),
        pytest.raises(UnsupportedError, match="only the device knows cannot be padded"),
    ):
        layer(x, torch.tensor([5, 0, 3]))


def test_a_monitored_layer_refuses_them() -> None:
    layer = GroupedLinear(3, 32, 16)
    with monitor(layer), pytest.raises(UnsupportedError, match="a monitor has to read m_splits"):
        layer(torch.randn(8, 32), torch.tensor([5, 0, 3]))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_added_to_main_grad(name: str) -> None:
    layer, x = GroupedLinear(3, 144, 32, fuse_wgrad_accumulation=True), torch.randn(8, 144)
    plain = GroupedLinear(3, 144, 32)
    plain.load_state_dict(layer.state_dict())
    for weight in layer.parameters():
        weight.main_grad = torch.ones_like(weight)
    step(layer, x, torch.tensor([5, 0, 3]), name)
    step(plain, x, torch.tensor([5, 0, 3]), name)
    for group in range(3):
        found, grad = (
            getattr(layer, f"weight{group}").main_grad,
            getattr(plain, f"weight{group}").grad,
        )
        torch.testing.assert_close(found, grad + 1, rtol=1e-6, atol=1e-5)
