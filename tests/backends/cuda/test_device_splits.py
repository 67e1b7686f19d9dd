"""GroupedLinear with sizes on the device: like a list of them, without waiting, in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, autocast, recipe
from tests.backends.cuda.cuda_cases import nothing_waits

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

NAMES = ("delayed", "current", "block", "rowwise")
SIZES = ([33, 0, 95, 1], [0, 129, 0, 0], [10, 10, 10, 99])


def make(features: int = 256, **more: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(4, features, 272, params_dtype=torch.bfloat16, device="cuda", **more)


def tensors(rows: int, features: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = ((rows, features), (rows, 272))
    x, grad = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    return x.requires_grad_(), grad


def step(layer: GroupedLinear, x: torch.Tensor, grad: torch.Tensor, splits: Any, name: str) -> Any:
    layer.zero_grad()
    x.grad = None
    with autocast(recipe=recipe.by_name(name)):
        y = layer(x, splits)
    return gradients(layer, x, y, grad)


def gradients(layer: GroupedLinear, x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor) -> Any:
    y.backward(grad)
    return [y.detach().clone(), x.grad.clone(), *(own.grad.clone() for own in layer.parameters())]


def alike(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        # Both round sums of the same codes to bfloat16, which they take in another order.
        size = other.float().square().mean().sqrt().item()
        torch.testing.assert_close(
            one.float(), other.float(), rtol=2.0**-7, atol=2.0**-7 * size + 1e-30, msg=str(number)
        )


@pytest.mark.parametrize("features", [256, 250], ids=["even", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_sizes_on_the_device_give_what_a_list_gives(name: str, features: int) -> None:
    layer, other = make(features), make(features)
    for seed, sizes in enumerate(SIZES):  # delayed scales move from step to step
        x, grad = tensors(sum(sizes), features, seed)
        want = step(other, x, grad, sizes, name)
        got = step(layer, x, grad, torch.tensor(sizes, device="cuda", dtype=torch.int32), name)
        alike(got, want)
    for one, two in zip(layer.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_nothing(name: str) -> None:
    layer, (x, grad) = make(), tensors(129, 256)
    splits = torch.tensor(SIZES[0], device="cuda")
    step(layer, x, grad, splits, name)  # builds and binds
    with nothing_waits():
        made = step(layer, x, grad, splits, name)
    assert all(one.isfinite().all() for one in made)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_takes_the_sizes_of_each_replay(name: str) -> None:
    layer, other = make(), make()
    x, grad = tensors(140, 256)  # more rows than any group needs
    splits = torch.tensor(SIZES[0], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(layer, x, grad, splits, name)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(layer, x, grad, splits, name)
    layer.reset_delayed_state()
    for seed, sizes in enumerate(SIZES):
        fresh, fresh_grad = tensors(140, 256, seed)
        with torch.no_grad():
            x.copy_(fresh)
            grad.copy_(fresh_grad)
            splits.copy_(torch.tensor(sizes))
        graph.replay()
        if name == "delayed":
            continue  # its scales go on from the capture, those of eager steps begin anew
        want = step(other, fresh, fresh_grad, torch.tensor(sizes, device="cuda"), name)
        assert all(torch.equal(one, two) for one, two in zip(made, want, strict=True))
        assert not made[0][sum(sizes) :].any()
    assert all(one.isfinite().all() for one in made)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_added_to_main_grad(name: str) -> None:
    layer, plain = make(fuse_wgrad_accumulation=True), make()
    x, grad = tensors(129, 256)
    splits = torch.tensor(SIZES[0], device="cuda")
    weights = [getattr(layer, f"weight{group}") for group in range(4)]
    for own in weights:
        own.main_grad = torch.ones_like(own, dtype=torch.float32)
    x.grad = None
    with autocast(recipe=recipe.by_name(name)):
        layer(x, splits).backward(grad)
    step(plain, x, grad, splits, name)
    want = [getattr(plain, f"weight{group}").grad for group in range(4)]
    for group, own in enumerate(weights):
        torch.testing.assert_close(own.main_grad - 1, want[group].float(), rtol=1e-2, atol=1e-4)
    assert torch.equal(weights[1].main_grad, torch.ones_like(weights[1].main_grad))  # no rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_high_precision_waits_for_nothing_and_gives_what_a_list_gives(
    dtype: torch.dtype, bias: bool
) -> None:
    layer = make(bias=bias).to(dtype)
    for sizes in SIZES:
        x, grad = (tensor.detach().to(dtype) for tensor in tensors(129, 256))
        x.requires_grad_()
        want = plain_step(layer, x, grad, sizes)
        splits = torch.tensor(sizes, device="cuda")
        plain_step(layer, x, grad, splits)  # binds
        with nothing_waits():
            got = plain_step(layer, x, grad, splits)
        alike(got, want)


def plain_step(layer: GroupedLinear, x: torch.Tensor, grad: torch.Tensor, splits: Any) -> Any:
    layer.zero_grad()
    x.grad = None
    return gradients(layer, x, layer(x, splits), grad)
