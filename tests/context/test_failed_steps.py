"""Delayed scaling after a failure: what an autocast or backward pass that raised leaves behind.

Compared with runs in which the failure did not take place.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core import LayerNormMLP, Linear, UnsupportedError, autocast, recipe, use_backend
from fp8core.context.autocast import active, request
from fp8core.tensors import scaling
from tests.device import let_go_of_backward_passes

DELAYED = recipe.DelayedScaling(amax_history_len=4)
E5M2_MAX = 57344.0


def filled(value: float) -> torch.Tensor:
    return torch.full((4, 8), value)


def forward(layer: Linear, x: torch.Tensor, **fields: Any) -> torch.Tensor:
    """Run ``x`` through ``layer`` in an autocast; ``fields`` change the recipe."""
    chosen = recipe.DelayedScaling(**{"amax_history_len": 4, **fields})
    with autocast(recipe=chosen):
        y: torch.Tensor = layer(x)
    return y


def fail_after_forward(layer: Linear, x: torch.Tensor) -> None:
    """Run ``layer`` in an autocast that raises after it."""

    @autocast(recipe=DELAYED)
    def run() -> None:
        layer(x)
        raise KeyError

    with pytest.raises(KeyError):
        run()


def test_an_exception_forgets_the_amaxes() -> None:
    layer = Linear(32, 16)
    fail_after_forward(layer, torch.randn(4, 32))
    assert not layer.amax_history_fwd.any()
    assert torch.equal(layer.scale_fwd, torch.ones(3))


def test_training_goes_on_after_an_exception_as_if_the_step_had_not_been() -> None:
    torch.manual_seed(1)
    steps = [torch.randn(4, 32) for _ in range(2)]
    interrupted, smooth = Linear(32, 16), Linear(32, 16)
    smooth.load_state_dict(interrupted.state_dict())
    for x in steps:
        fail_after_forward(interrupted, x * 100)
        for layer in (interrupted, smooth):
            with autocast(recipe=DELAYED):
                layer(x)
    assert torch.equal(interrupted.scale_fwd, smooth.scale_fwd)
    assert torch.equal(interrupted.amax_history_fwd, smooth.amax_history_fwd)


def run_nested(layer: Linear, *inner: float | None, before: float = 2.0) -> None:
    """Run ``before`` in an autocast, and each of ``inner`` in one within it that raises where the
    value is negative."""
    with autocast(recipe=DELAYED):
        if before:
            layer(torch.full((4, 32), before))
        for value in inner:
            with contextlib.suppress(KeyError), autocast(recipe=DELAYED):
                layer(torch.full((4, 32), abs(value)))
                if value < 0:
                    raise KeyError


NESTED = {
    "alone": ((-1e6,), 0.0),
    "touched before by the outer": ((-1e6,), 2.0),
    "touched before by another inner": ((3.0, -1e6), 0.0),
    "touched afterwards": ((-1e6, 3.0), 2.0),
    "failing twice": ((-1e6, 3.0, -1e5), 2.0),
    "with a smaller amax than the outer's": ((-1.0,), 2.0),
}


@pytest.mark.parametrize("case", NESTED)
def test_an_inner_autocast_that_raises_leaves_the_state_of_a_run_without_it(case: str) -> None:
    inner, before = NESTED[case]
    failing, smooth = Linear(32, 16), Linear(32, 16)
    smooth.load_state_dict(failing.state_dict())
    run_nested(failing, *inner, before=before)
    run_nested(smooth, *(value for value in inner if value > 0), before=before)
    for layer in (failing, smooth):  # the weight's amax too is recorded as if nothing had been
        run_nested(layer, before=2.0)
    for name, buffer in smooth.named_buffers():
        assert torch.equal(getattr(failing, name), buffer), name


def test_an_autocast_in_an_autocast_that_raised_forgets_its_amaxes() -> None:
    layer = Linear(32, 16)
    with autocast(recipe=DELAYED):
        layer(torch.full((4, 32), 2.0))
        with contextlib.suppress(KeyError), autocast(recipe=DELAYED):
            with autocast(recipe=DELAYED):
                layer(torch.full((4, 32), 1e6))
            raise KeyError
        assert layer.amax_history_fwd[0, 0] == 2.0
    assert layer.scale_fwd[0] == 448.0 / 2.0


@pytest.mark.parametrize("is_another_recipe", [False, True])
def test_an_inner_autocast_with_states_of_its_own_leaves_the_outer_s_amaxes(
    is_another_recipe: bool,
) -> None:
    layer = Linear(32, 16)
    inner = recipe.DelayedScaling(amax_history_len=4, margin=1) if is_another_recipe else DELAYED
    with autocast(recipe=DELAYED):
        layer(torch.full((4, 32), 2.0))
        with contextlib.suppress(KeyError), autocast(recipe=inner), use_backend("reference"):
            layer(torch.full((4, 32), 1e6))
            raise KeyError
    assert layer.scale_fwd[0] == 224.0


def test_an_inner_autocast_that_raises_forgets_no_other_layer() -> None:
    first, second = Linear(32, 16), Linear(32, 16)
    with autocast(recipe=DELAYED):
        first(torch.full((4, 32), 2.0))
        with contextlib.suppress(KeyError), autocast(recipe=DELAYED):
            second(torch.full((4, 32), 1e6))
            raise KeyError
    assert first.scale_fwd[0] == 224.0
    assert second.scale_fwd.tolist() == [1.0, 1.0, 1.0]


def test_an_update_that_raises_leaves_no_amax() -> None:
    def fail(history: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    layer = Linear(32, 16)
    failing = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=fail)
    with pytest.raises(ArithmeticError), autocast(recipe=failing):
        layer(torch.full((4, 32), 1e6))
    assert not layer.amax_history_fwd.any()
    assert active() == request()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError


def fail_in_backward(layer: Linear) -> None:
    x = filled(1.0).requires_grad_()
    y = forward(layer, Failing.apply(x))
    with pytest.raises(KeyError):
        (7 * y.sum()).backward()


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    layer = Linear(8, 8)
    fail_in_backward(layer)
    let_go_of_backward_passes()
    assert layer.scale_bwd.tolist() == [1.0, 1.0]
    assert not layer.amax_history_bwd.any()
    gc.collect()
    assert not scaling._in_backward


def test_a_backward_that_raises_does_not_count_in_the_next() -> None:
    layer = Linear(8, 8)
    fail_in_backward(layer)
    forward(layer, filled(1.0)).sum().backward()
    assert layer.amax_history_bwd[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert layer.scale_bwd[0] == E5M2_MAX


def test_an_amax_that_arrives_late_from_a_failed_backward_does_not_count() -> None:
    layer = Linear(8, 8)
    fail_in_backward(layer)
    layer.amax_history_bwd[0] = 7.0  # as a kernel does that was still running on another stream
    forward(layer, filled(1.0)).sum().backward()
    assert layer.amax_history_bwd[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_backward_that_raises_forgets_no_pass_before_it(error: type[BaseException]) -> None:
    layer, x = Linear(8, 8), filled(1.0).requires_grad_()

    def fail(grad: torch.Tensor) -> None:
        raise error

    forward(layer, x).sum().backward()
    x.register_hook(fail)
    y = forward(layer, x).sum()
    for _ in range(2):
        with pytest.raises(error):
            (9 * y).backward(retain_graph=True)
    forward(layer, filled(1.0)).mul(2).sum().backward()
    assert layer.amax_history_bwd[:, 0].tolist() == [0.0, 0.0, 1.0, 2.0]


def test_an_update_after_backward_that_raises_leaves_no_amax() -> None:
    def fail(history: torch.Tensor) -> torch.Tensor:
        if history.shape[1] == 2:  # slots of the way back
            raise ArithmeticError
        return history.amax(0)

    layer = Linear(8, 8)
    y = forward(layer, filled(1.0), amax_compute_algo=fail)
    with pytest.raises(ArithmeticError) as caught:
        y.sum().backward()
    assert caught.tb is not None  # a traceback keeps what its frames hold
    assert not layer.amax_history_bwd.any()


class Nested(torch.autograd.Function):
    """Runs another backward pass in backward, which may raise, and goes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        (ctx.loss,) = losses  # in a list, so that it is no input
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with contextlib.suppress(KeyError):
            ctx.loss.backward()
        return grad, None


@pytest.mark.parametrize(("fails", "amax"), [(True, 2.0), (False, 9.0)])
def test_a_pass_within_a_pass_that_raises_leaves_the_outer_s_amaxes(
    fails: bool, amax: float
) -> None:
    layer, x = Linear(8, 8), filled(1.0).requires_grad_()
    inner = forward(layer, Failing.apply(x) if fails else x)
    y = forward(layer, Nested.apply(x, [9 * inner.sum()]))
    (2 * y.sum()).backward()
    assert layer.amax_history_bwd[:, 0].tolist() == [0.0, 0.0, 0.0, amax]


def test_a_pass_that_raises_after_one_of_another_thread_ended_leaves_no_amax() -> None:
    layer = Linear(8, 8)
    ran, ended = threading.Event(), threading.Event()

    def first() -> None:
        x = filled(1.0).requires_grad_()
        x.register_hook(lambda grad: (ran.set(), ended.wait(30), [][0]))
        with pytest.raises(IndexError):
            (9 * forward(layer, x).sum()).backward()

    def second() -> None:
        assert ran.wait(30)
        forward(layer, filled(1.0)).sum().backward()
        ended.set()

    threads = [threading.Thread(target=one) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not layer.amax_history_bwd[0].any()


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: Linear(32, 32),
    "mlp": lambda: LayerNormMLP(32, 64),
    "padded": lambda: Linear(30, 32),
}


class NoMemory(TorchDispatchMode):
    """Lets ``count`` matrix products run, and finds no memory for the next."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.count -= 1
            if self.count < 0:
                raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


def run_out_of_memory(
    layer: torch.nn.Module, x: torch.Tensor, count: int, *, retains: bool
) -> torch.Tensor:
    """Run a backward pass that ends at the product after ``count``; return what it began with."""
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        y: torch.Tensor = layer(x)
    with pytest.raises(torch.OutOfMemoryError), NoMemory(count):
        y.backward(torch.ones_like(y), retain_graph=retains)
    return y


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_backward_out_of_memory_says_why_it_cannot_be_called_again(kind: str, count: int) -> None:
    layer = LAYERS[kind]()
    x = torch.randn(32, next(layer.parameters()).shape[-1], requires_grad=True)
    y = run_out_of_memory(layer, x, count, retains=False)
    with pytest.raises(UnsupportedError, match=r"second time.*forward again, or .*retain_graph"):
        y.backward(torch.ones_like(y))
    assert x.grad is None


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_backward_out_of_memory_over_a_retained_graph_can_be_called_again(
    kind: str, count: int
) -> None:
    layer = LAYERS[kind]()
    x = torch.randn(32, next(layer.parameters()).shape[-1], requires_grad=True)
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        y = layer(x)
    want = torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))
    y = run_out_of_memory(layer, x, count, retains=True)
    got = torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_a_second_backward_says_what_works() -> None:
    y = forward(Linear(8, 8), filled(1.0)).sum()
    y.backward()
    with pytest.raises(UnsupportedError, match=r"second time.*input was \[4, 8\].*retain_graph"):
        y.backward()


def test_an_error_of_a_hook_that_unpacks_is_not_taken_for_a_second_backward() -> None:
    def fail(packed: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    layer = Linear(8, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
        y = forward(layer, filled(1.0))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            y.sum().backward()
