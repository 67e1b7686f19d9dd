"""What layers save for backward on the host: the same gradients, less memory, in any order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import cpu_offload, recipe
from fp8core.cpu_offload import get_cpu_offload_context, mark_not_offload
from fp8core.errors import OperandError
from fp8core.tensors import saving
from tests.device import DEVICE
from tests.pairs import pairs

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_offload, "MIN_ELEMENTS", 64)


def torch_layers(count: int = 4) -> list[torch.nn.Module]:
    torch.manual_seed(1)
    return [
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        for _ in range(count)
    ]


def forward(layers: list[torch.nn.Module], x: torch.Tensor, context: Any, sync: Any) -> Any:
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)
    return x


def gradients(layers: list[torch.nn.Module], run: Callable[[torch.Tensor], Any]) -> list[Any]:
    dtype = next(layers[0].parameters()).dtype
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    x.requires_grad_()
    for layer in layers:
        layer.zero_grad()
    y = run(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]


def plainly(layers: list[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize(
    ("num_layers", "retains", "doubles"),
    pairs([0, 1, 2, 3, None], [False, True], [False, True]),
)
def test_gradients_are_the_same(num_layers: int | None, retains: bool, doubles: bool) -> None:
    layers = torch_layers()
    expected = gradients(layers, lambda x: plainly(layers, x))
    context, sync = get_cpu_offload_context(
        True, num_layers, 4, double_buffering=doubles, retain_pinned_cpu_buffers=retains
    )
    for _ in range(3):
        found = gradients(layers, lambda x: forward(layers, x, context, sync))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Watched(torch.autograd.Function):
    """Saves a tensor that only the graph holds."""

    seen: list[Any] = []  # noqa: RUF012  of one test

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        saved = x * 2
        Watched.seen.append(weakref.ref(saved.untyped_storage()))
        ctx.save_for_backward(saved)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        return grad * saved


def alive() -> list[bool]:
    gc.collect()
    return [one() is not None for one in Watched.seen]


@pytest.mark.parametrize(
    ("num_layers", "doubles", "expected"),
    [
        # Layer 0 is free when layer 2 begins, layer 1 when layer 3 does.
        (2, False, [[], [True], [False, True], [False, False, True]]),
        (3, True, [[], [True], [False, True], [False, False, True]]),
        (3, False, [[], [False], [False, False], [False, False, False]]),
        (2, True, [[], [True], [True, True], [False, True, True]]),
    ],
)
def test_memory_is_free_when_the_schedule_says_so(
    num_layers: int, doubles: bool, expected: list[list[bool]]
) -> None:
    Watched.seen = []
    context, sync = get_cpu_offload_context(True, num_layers, 4, double_buffering=doubles)
    x = torch.randn(16, 32, requires_grad=True)
    y = x
    lives = []
    for _ in range(4):
        with context:
            lives.append(alive())
            y = Watched.apply(y)
        y = sync(y)
    assert lives == expected
    # Nothing that is offloaded is left when backward begins, but for what it needs first.
    assert alive()[-1]
    y.sum().backward()
    torch.testing.assert_close(x.grad, 16 * x.detach() ** 4)
    del y
    assert not any(alive())


def test_a_graph_that_is_retained_runs_twice() -> None:
    context, sync = get_cpu_offload_context(True, 3, 4)
    layers = torch_layers()
    x = torch.randn(16, 32, requires_grad=True)
    y = forward(layers, x, context, sync).square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_two_forward_passes_before_their_backward() -> None:
    context, sync = get_cpu_offload_context(True, 2, 4)
    layers = torch_layers()
    xs = [torch.randn(16, 32, requires_grad=True) for _ in range(2)]
    losses = [forward(layers, x, context, sync).square().sum() for x in xs]
    for x, loss in reversed(list(zip(xs, losses, strict=True))):
        (grad,) = torch.autograd.grad(loss, x)
        again = x.detach().clone().requires_grad_()
        (want,) = torch.autograd.grad(plainly(layers, again).square().sum(), again)
        assert torch.equal(grad, want)


def test_manual_synchronization() -> None:
    Watched.seen = []
    context, sync, manual = get_cpu_offload_context(
        True, model_layers=3, manual_synchronization=True
    )
    x = torch.randn(16, 32, requires_grad=True)
    y = x
    for layer in range(3):
        with context:
            y = Watched.apply(y)
        y = sync(y)
        if layer != 1:
            manual.start_offload_layer(layer)
    for layer in range(3):
        manual.release_activation_forward_gpu_memory(layer)
    assert alive() == [False, True, False]  # layer 1 was not copied
    manual.start_reload_layer(2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach() ** 3)


def test_the_context_has_its_synchronizer() -> None:
    context, sync = get_cpu_offload_context(True, num_layers=1, model_layers=2)
    y = torch.randn(16, 32, requires_grad=True)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0
    for _ in range(2):
        with context:
            y = Watched.apply(y)
        y = sync(y)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 16 * 32 * 4 / 2**20
    y.sum().backward()
    manual, _, synchronizer = get_cpu_offload_context(
        True, model_layers=1, manual_synchronization=True
    )
    assert manual.offload_synchronizer is synchronizer


def test_parameters_and_marked_tensors_stay() -> None:
    layer = torch.nn.Linear(32, 32, bias=False)
    context, sync, manual = get_cpu_offload_context(
        True, model_layers=1, manual_synchronization=True
    )
    x = torch.randn(16, 32, requires_grad=True)
    mark_not_offload(x, None)
    with context:
        y = layer(x)
    sync(y)
    manual.start_offload_layer(0)
    assert manual.get_offloaded_total_size_mb() == 0
    other = torch.randn(16, 32, requires_grad=True)
    with context:
        y = layer(other)
    sync(y)
    manual.start_offload_layer(0)
    assert manual.get_offloaded_total_size_mb() == other.nbytes / 2**20


def test_a_tensor_that_two_nodes_save_is_copied_once() -> None:
    context, _, manual = get_cpu_offload_context(True, model_layers=1, manual_synchronization=True)
    x = torch.randn(16, 32, requires_grad=True)
    with context:
        y = x.sin() + x.cos()
    manual.start_offload_layer(0)
    assert manual.get_offloaded_total_size_mb() == x.nbytes / 2**20
    manual.release_activation_forward_gpu_memory(0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() - x.detach().sin())


def test_a_write_to_a_saved_tensor_is_noticed() -> None:
    context, sync = get_cpu_offload_context(True, 1, 2)
    x = torch.randn(16, 32, requires_grad=True)
    small = torch.randn(3, requires_grad=True)
    with context:
        y = x * 1.0
        z, w = y.sin(), (small * 1.0).sin()
    sync(z)
    with torch.no_grad():
        y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), context:
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    w.sum().backward()


def test_without_gradients_nothing_is_saved() -> None:
    context, sync = get_cpu_offload_context(True, 1, 2)
    with torch.no_grad():
        y = forward(torch_layers(2), torch.randn(16, 32), context, sync)
    assert not y.requires_grad
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0


def test_disabled_it_does_nothing() -> None:
    context, sync = get_cpu_offload_context()
    x = torch.randn(3)
    with context:
        assert sync(x) is x
    assert get_cpu_offload_context(manual_synchronization=True)[2] is None


def test_memory_of_the_host_is_kept() -> None:
    layers = torch_layers(2)
    context, sync = get_cpu_offload_context(True, 1, 2, retain_pinned_cpu_buffers=True)
    addresses = []
    for _ in range(2):
        gradients(layers, lambda x: forward(layers, x, context, sync))
        held = context.offload_synchronizer._buffers[0]
        addresses.append([one.data_ptr() for one in held])
    assert addresses[0] == addresses[1]
    assert addresses[0]


def test_the_context_is_entered_once_at_a_time() -> None:
    context, _ = get_cpu_offload_context(True, 1, 2)
    with context, pytest.raises(RuntimeError, match="was entered"), context:
        pass


ERRORS: dict[str, Any] = {
    "num_layers=4, model_layers=4): expected 0 to 3": {"num_layers": 4, "model_layers": 4},
    "num_layers=-1": {"num_layers": -1, "model_layers": 4},
    "model_layers=0": {"model_layers": 0},
    "something to offload": {"offload_activations": False},
    "expected manual_synchronization=True": {"offload_stream": object(), "model_layers": 2},
}


@pytest.mark.parametrize("words", ERRORS)
def test_what_does_not_fit_is_named(words: str) -> None:
    with pytest.raises(OperandError) as caught:
        get_cpu_offload_context(True, **ERRORS[words])
    assert words in str(caught.value)


def test_offload_of_weights_warns_and_does_nothing() -> None:
    with pytest.warns(DeprecationWarning, match="parameters stay"):
        context, _ = get_cpu_offload_context(
            True, 1, 2, offload_activations=False, offload_weights=True
        )
    assert not hasattr(context, "synchronizer")


def test_a_layer_that_did_not_run_is_named() -> None:
    *_, manual = get_cpu_offload_context(True, model_layers=2, manual_synchronization=True)
    with pytest.raises(OperandError, match="layer 0 of 0"):
        manual.start_offload_layer(0)


def test_a_forward_pass_that_fails_is_followed_by_a_whole_one() -> None:
    layers = torch_layers()
    expected = gradients(layers, lambda x: plainly(layers, x))
    context, sync = get_cpu_offload_context(True, 2, 4)

    def fail(x: torch.Tensor) -> None:
        raise ValueError("of the layer")

    with pytest.raises(ValueError, match="of the layer"):
        forward([layers[0], fail], torch.randn(16, 32, requires_grad=True), context, sync)
    found = gradients(layers, lambda x: forward(layers, x, context, sync))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert context.offload_synchronizer.current == 3
    assert [len(one.saved) > 0 for one in context.offload_synchronizer.layers] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("is_stored", [False, True])
def test_codes_of_weights_stay_on_the_device(is_stored: bool) -> None:
    chosen = recipe.MXFP8BlockScaling()
    with fp8core.quantized_model_init(enabled=is_stored, recipe=chosen):
        layers = [
            fp8core.Linear(64, 96, params_dtype=BF16, device=DEVICE, bias=False) for _ in range(2)
        ]
    context, sync = get_cpu_offload_context(True, 1, 2)
    x = torch.randn(128, 64, dtype=BF16, requires_grad=True)
    with fp8core.autocast(recipe=chosen):
        for layer in layers:  # each from the same input
            with context:
                y = layer(x)
            y = sync(y)
    held = context.offload_synchronizer.layers[0].saved
    shapes = {tuple(one._on_host.shape) for one in held if one._is_copied}
    assert (64, 128) in shapes  # the input's columnwise codes
    assert not shapes & {(64, 96), (96, 64)}
    y.sum().backward()


def test_what_was_noted_before_a_context_is_noted_after_it() -> None:
    context, _ = get_cpu_offload_context(True, 1, 2)
    with context:
        assert saving.is_noting()
    assert not saving.is_noting()
