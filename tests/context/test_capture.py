"""Passes of modules that are captured and replayed, with graphs that compute again instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, UnsupportedError, autocast, recipe, use_backend
from fp8core.context import timeline
from fp8core.context.capture import Graph, Pass, Schedule, passes_of
from fp8core.modules.models import graphs


class Again(Graph):
    """A stand-in for a CUDA graph, whose replay computes again into the memory of the capture."""

    made: list[Again]

    def __init__(self) -> None:
        self.function: Callable[[], Any] = list
        self.result: Any = None
        type(self).made.append(self)

    def record(self, function: Callable[[], Any], pool: Any) -> Any:
        log.append((pool, "capture"))
        self.function = function
        self.result = function()
        return self.result

    def replay(self) -> None:
        with torch.enable_grad():
            for static, new in zip(leaves(self.result), leaves(self.function()), strict=True):
                static.data.copy_(new)


log: list[Any] = []


def leaves(result: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(result) if one is not None]


def recorded(
    module: torch.nn.Module, args: tuple[Any, ...], hooks: Any = None, **kwargs: torch.Tensor
) -> Pass:
    Again.made = []
    one = Pass(module, args, kwargs, hooks or {}, Again)
    forward, backward = Again.made
    one.warm_up(2, allow_unused=False, extra=[{}])
    one.record_forward("pool", {})
    one.record_backward("pool", allow_unused=False, retain=True)

    def grads() -> Any:  # of a forward that is computed again, as its replay does
        outputs = leaves(forward.function())
        given = [grad for grad in one._grad_outputs if grad is not None]
        return one._grads_of(outputs, given, allow_unused=False, retain=False)

    backward.function = grads
    return one


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = fp8core.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.inner(x)
        return {"sum": y + scale, "constant": scale.detach() * 2}


@pytest.mark.parametrize("clones", [False, True])
def test_a_replay_computes_for_other_inputs(clones: bool) -> None:
    torch.manual_seed(0)
    module = Two()
    sample = (torch.randn(4, 16, requires_grad=True),)
    one = recorded(module, sample, scale=torch.randn(16, requires_grad=True))
    for seed in range(3):
        torch.manual_seed(seed)
        x, scale = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
        module.zero_grad()
        y = one.run((x,), {"scale": scale}, clones=clones)
        want = module(x, scale=scale)
        assert torch.equal(y["sum"], want["sum"])
        assert torch.equal(y["constant"], want["constant"])
        y["sum"].square().sum().backward()
        got = [x.grad, scale.grad, module.inner.weight.grad, module.inner.bias.grad]
        expected = torch.autograd.grad(
            want["sum"].square().sum(), [x, scale, module.inner.weight, module.inner.bias]
        )
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_gradients_of_parameters_are_copies_if_asked() -> None:
    module = fp8core.Linear(16, 16)
    one = recorded(module, (torch.randn(4, 16),))
    for clones in (False, True):
        one.replay_forward([torch.randn(4, 16)])
        grads = one.replay_backward([torch.ones(4, 16)], clones=clones)
        again = one.replay_backward([torch.zeros(4, 16)], clones=clones)
        assert grads[0] is None
        assert torch.equal(grads[1], again[1]) is not clones  # type: ignore[arg-type]


BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "shape": ((torch.zeros(5, 16),), r"an input is torch.float32 \[5, 16\]"),
    "dtype": ((torch.zeros(4, 16, dtype=torch.bfloat16),), "torch.bfloat16"),
    "gradient": ((torch.zeros(4, 16, requires_grad=True),), "requires_grad=True; the sample"),
    "count": ((torch.zeros(4, 16), torch.zeros(4, 16)), "the sample had"),
}


@pytest.mark.parametrize("name", BAD)
def test_inputs_unlike_the_sample_are_refused(name: str) -> None:
    one = recorded(fp8core.Linear(16, 16), (torch.randn(4, 16),))
    args, message = BAD[name]
    with pytest.raises(OperandError, match=message):
        one.run(args, {}, clones=True)


def test_a_sample_holds_tensors_alone() -> None:
    with pytest.raises(OperandError, match="a sample of Linear holds bool"):
        Pass(fp8core.Linear(16, 16), (torch.zeros(1, 16), True), {}, {}, Again)


def test_hooks_run_at_capture_and_not_at_replay() -> None:
    seen: list[str] = []

    def hook(name: str) -> Callable[[torch.nn.Module], None]:
        return lambda module: seen.append(f"{name} of {type(module).__name__}")

    names = ["forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"]
    one = recorded(
        fp8core.Linear(16, 16), (torch.zeros(4, 16),), {name: {0: hook(name)} for name in names}
    )
    assert seen == [f"{name} of Linear" for name in names] * 3  # twice to warm up
    one.run((torch.zeros(4, 16),), {}, clones=True)
    assert len(seen) == 12


def test_a_hook_that_returns_a_value_is_refused() -> None:
    with pytest.raises(OperandError, match="returned a value"):
        recorded(fp8core.Linear(16, 16), (torch.zeros(4, 16),), {"forward_hooks": {0: id}})


# --- the order ---
def test_one_batch_goes_forward_and_back() -> None:
    schedule = Schedule.of([1, 2, -2, -1], 2, 2, None)
    assert passes_of(schedule) == [(0, 0, True), (1, 1, True), (1, 1, False), (0, 0, False)]


def test_a_pipeline_interleaves_microbatches_and_chunks() -> None:
    schedule = Schedule.of([1, 1, 2, -2, 2, -1, -2, -1], 3, 6, [1, 2])
    forward = [(module, sample) for module, sample, is_forward in passes_of(schedule) if is_forward]
    backward = [(m, sample) for m, sample, is_forward in passes_of(schedule) if not is_forward]
    assert forward == [(0, 0), (0, 1), (1, 2), (2, 3), (1, 4), (2, 5)]
    assert backward == [(2, 3), (1, 2), (0, 0), (2, 5), (1, 4), (0, 1)]


def test_an_order_that_does_not_fit_is_refused() -> None:
    for order, modules, samples, sizes in (
        ([], 1, 1, None),
        ([1, 0, -1], 1, 1, None),
        ([1, -1, -0.5], 1, 1, None),
        ([-1, 1], 1, 1, None),
        ([1, 1, -1], 1, 2, None),
        ([1, 2, -2], 2, 2, None),
        ([1, -1], 2, 2, [1]),
        ([1, -1], 2, 2, [1, 1]),
        ([1, -1], 2, 3, None),
        ([1, 1, -1, -1], 2, 2, None),
    ):
        with pytest.raises(OperandError, match=r"make_graphed_callables\(_order="):
            Schedule.of(order, modules, samples, sizes)


# --- weights that are quantized outside of the graph ---
@pytest.mark.parametrize(("name", "features"), [("current", 32), ("mxfp8", 50)])
def test_weights_for_graphs_keep_their_memory(name: str, features: int) -> None:
    layer, x = fp8core.Linear(features, 32), torch.randn(32, features)
    (store,) = graphs._stores(layer)
    store.is_for_graphs = True
    with autocast(recipe=name):
        layer(x, is_first_microbatch=True)
        (kept,) = store.microbatches.values()
        codes = kept.operands.rowwise.data
        before = codes.clone()
        with torch.no_grad():
            layer.weight.mul_(torch.linspace(-3, 3, features))
        store.refresh()
        again = layer(x, is_first_microbatch=False)
        layer(x, is_first_microbatch=True)
        plain = layer(x)
    (kept,) = store.microbatches.values()
    assert kept.operands.rowwise.data.data_ptr() == codes.data_ptr()
    assert not torch.equal(codes, before)
    assert torch.equal(again, plain)


def test_weights_that_nothing_can_quantize_again_are_refused() -> None:
    layer, x = fp8core.Linear(32, 32), torch.randn(32, 32)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight")
    (store,) = graphs._stores(layer)
    store.is_for_graphs = True
    with (
        autocast(recipe="mxfp8"),
        pytest.raises(UnsupportedError, match="cache_quantized_params with a weight"),
    ):
        layer(x, is_first_microbatch=True)


def test_a_call_says_which_microbatch_it_is() -> None:
    layer = fp8core.Linear(16, 16)
    one = recorded(layer, (torch.zeros(4, 16),))
    forward = graphs._forward(one, [], True, True)
    assert forward(torch.zeros(4, 16), is_first_microbatch=True).shape == (4, 16)
    with pytest.raises(OperandError, match="is_first_microbatch=None; expected True or False"):
        forward(torch.zeros(4, 16))
    layer.eval()
    assert forward(torch.zeros(5, 16)).shape == (5, 16)  # runs the module


CURRENT = recipe.by_name("current")
Run = Callable[[fp8core.Linear, torch.Tensor], torch.Tensor]


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def inside(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    with autocast(recipe=CURRENT):
        torch._dynamo.graph_break()
        made: torch.Tensor = layer(x)
    return made


def before(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    context = autocast(recipe=CURRENT)
    torch._dynamo.graph_break()
    with context:
        made: torch.Tensor = layer(x)
    return made


def between(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    with autocast(recipe=CURRENT):
        layer(x)
        torch._dynamo.graph_break()
        made: torch.Tensor = layer(x)
    return made


def nested(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    with autocast(enabled=False), use_backend("reference"):
        torch._dynamo.graph_break()
        with autocast(recipe=CURRENT):
            torch._dynamo.graph_break()
            made: torch.Tensor = layer(x)
    return made


@autocast(recipe=CURRENT)
def decorated(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    made: torch.Tensor = layer(x)
    return made


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("run", [inside, before, between, nested, decorated])
def test_an_autocast_around_a_graph_break_holds(run: Run) -> None:
    layer, x = fp8core.Linear(32, 16), torch.randn(32, 32)
    outside = layer(x)
    with autocast(recipe=CURRENT):
        want = layer(x)
    compiled = torch.compile(run, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(layer, x), want)
    assert torch.equal(layer(x), outside)
    assert timeline._thread.history is None or timeline._thread.history.entered is None
