"""Passes of modules that are captured and replayed, with graphs that compute again instead."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, UnsupportedError, autocast, ops, recipe, use_backend
from fp8core.context import timeline
from fp8core.context.autocast import is_switched_off, request
from fp8core.context.capture import Graph, Pass, Schedule, passes_of
from fp8core.modules.models import graphs
from tests.device import DEVICE


class Again(Graph):
    """A stand-in for a CUDA graph, whose replay computes again into the memory of the capture."""

    def __init__(self) -> None:
        self.function: Callable[[], Any] = list
        self.result: Any = None

    def record(self, function: Callable[[], Any], pool: Any) -> Any:
        log.append((pool, "capture"))
        self.function = function
        self.result = function()
        return self.result

    def replay(self) -> None:
        with torch.enable_grad():
            for static, new in zip(leaves(self.result), leaves(self.function()), strict=True):
                static.data.copy_(new)

    def reset(self) -> None:
        log.append("reset")


log: list[Any] = []


def leaves(result: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(result) if one is not None]


def recorded(
    module: torch.nn.Module, args: tuple[Any, ...], hooks: Any = None, **kwargs: torch.Tensor
) -> Pass:
    one = PassAgain(module, args, kwargs, hooks or {}, Again)
    for pool in (None, None, "pool"):
        one.run_forward(pool)
        one.run_backward(pool, allow_unused=False)
    return one


replaying: list[bool] = []


class PassAgain(Pass):
    """A pass whose replays compute again, with the forwards of the capture."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args[:4], Again)

    def run_forward(self, pool: Any = None) -> None:
        super().run_forward(pool)
        if pool is None:
            return
        captured = [(module, module.forward) for module in self.module.modules()]
        forward = self._graphs[0]
        compute = forward.function  # type: ignore[attr-defined]  # Again's

        def function() -> Any:
            before = [vars(module).get("forward") for module, _ in captured]
            replaying.append(True)
            try:
                for module, run in captured:
                    module.forward = run
                return compute()
            finally:
                replaying.pop()
                for (module, _), run in zip(captured, before, strict=True):
                    del module.forward
                    if run is not None:
                        module.forward = run

        forward.function = function  # type: ignore[attr-defined]  # likewise

    def run_backward(self, pool: Any = None, **kwargs: Any) -> None:
        super().run_backward(pool, **kwargs)
        forward, backward = self._graphs

        def grads() -> Any:  # of a forward that is computed again, as its replay does
            outputs = leaves(forward.function())  # type: ignore[attr-defined]  # likewise
            given = [grad for grad in self._grad_outputs if grad is not None]
            return self._grads_of(outputs, given, allow_unused=False, retain=False)

        backward.function = grads  # type: ignore[attr-defined]  # likewise


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


VIEWS = {
    "transposed": torch.Tensor.t,
    "one row": lambda x: x[:1].expand(4, 4),
    "later": lambda x: x.flatten()[1:].unfold(0, 4, 3),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_another_view_of_the_memory_of_the_sample_is_read_as_it_is(view: Any) -> None:
    module, x = torch.nn.Linear(4, 4), torch.randn(4, 4)
    captured = recorded(module, (x,))
    want = module(view(x).clone())
    torch.testing.assert_close(captured.run((view(x),), {}, clones=True), want)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_another_view_of_the_memory_of_a_gradient_is_read_as_it_is(view: Any) -> None:
    module, x = torch.nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
    captured = recorded(module, (x,))
    captured.run((x,), {}, clones=True)
    (memory,) = captured._grad_outputs
    memory.copy_(torch.randn(4, 4))
    want = view(memory).clone() @ module.weight
    (found, *_) = captured.replay_backward([view(memory)], clones=True)
    torch.testing.assert_close(found, want)


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


# --- the callables ---
@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """make_graphed_callables on a device whose graphs compute again."""
    if DEVICE.type == "cuda":
        pytest.skip("stands in for CUDA's graphs, which tests/backends/cuda/test_graphs.py takes")
    monkeypatch.setattr(graphs, "_check_devices", lambda modules: None)
    monkeypatch.setattr(graphs, "Pass", PassAgain)
    taking = graphs._taking

    def taking_again(keywords: Any, forward: Any) -> Any:
        """The argument of a replay is that of the capture."""
        plain, captured = (taking(k, forward) for k in (keywords, {"is_first_microbatch": False}))
        run = functools.wraps(forward)
        return run(lambda *args, **kw: (captured if replaying else plain)(*args, **kw))

    monkeypatch.setattr(graphs, "_taking", taking_again)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    log.clear()


def sample(width: int = 16) -> tuple[torch.Tensor]:
    return (torch.randn(4, width, requires_grad=True),)


@pytest.mark.usefixtures("again")
def test_hooks_run_in_the_order_of_the_capture() -> None:
    """All modules forward, then all backward, in each of the runs that warm up."""
    seen: list[str] = []
    names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    hooks = [
        {name: {0: lambda module, at=at, name=name: seen.append(f"{name} {at}")} for name in names}
        for at in range(2)
    ]
    layers = [fp8core.Linear(16, 16) for _ in range(2)]
    fp8core.make_graphed_callables(
        layers,
        (sample(), sample()),
        num_warmup_iters=2,
        pre_warmup_hook=lambda: seen.append("before"),
        post_warmup_hook=lambda: seen.append("after"),
        capture_time_hooks=hooks,  # type: ignore[arg-type]  # lambdas with defaults
    )
    forwards = [f"{name} {at}" for at in (0, 1) for name in names[:2]]
    backwards = [f"{name} {at}" for at in (1, 0) for name in names[2:]]
    run = [*forwards, *backwards]
    assert seen == ["before", *run, *run, "after", *run]


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("name", ["rowwise", "current", "block"])
def test_without_an_autocast_stored_weights_run_their_recipe(name: str) -> None:
    model, x = (
        torch.nn.Sequential(fp8core.Linear(128, 128, params_dtype=torch.bfloat16)),
        sample(128)[0],
    )
    fp8core.quantize_(model.eval(), name)
    x = x.detach().bfloat16()
    with torch.no_grad():
        want = model(x)
        with autocast(enabled=False):
            high = model(x)
        for enabled, expected in ((None, want), (False, high)):
            fp8core.make_graphed_callables(model, (x,), enabled=enabled)
            assert torch.equal(model(x), expected)
            model.reset()
    assert not torch.equal(want, high)
    for option, value in (("recipe", name), ("calibrating", True)):
        with pytest.raises(OperandError, match=f"without an autocast, which {option} would be of"):
            fp8core.make_graphed_callables(model, (x,), enabled=[None], **{option: value})


@pytest.mark.usefixtures("again")
def test_an_autocast_around_a_capture_does_not_count() -> None:
    seen: list[bool] = []

    class Noting(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            seen.append(is_switched_off())
            return super().forward(x)

    model = Noting(fp8core.Linear(128, 128))
    for enabled in (None, True, False):
        with autocast(enabled=enabled is False):
            fp8core.make_graphed_callables(model, sample(128), enabled=enabled)
        assert {*seen} == {enabled is False}
        seen.clear()
        model.reset()


@pytest.mark.usefixtures("again")
def test_a_recipe_is_that_of_the_modules_with_an_autocast() -> None:
    modules = [fp8core.Linear(128, 128) for _ in range(2)]
    x, block = sample(128)[0].detach(), recipe.Float8BlockScaling()
    with torch.no_grad():
        want = [modules[0](x)]
        with autocast(recipe=block):
            want += [modules[1](x)]
        enabled = [None, True]
        made = fp8core.make_graphed_callables(modules, ((x,), (x,)), enabled=enabled, recipe=block)
        assert all(map(torch.equal, [one(x) for one in made], want))


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("before", ["the class's", "its own"])
def test_reset_frees_the_graphs_until_the_module_is_captured_again(before: str) -> None:
    layer, x = ops.Sequential(ops.Linear(16, 16)), sample()[0]
    if before == "its own":
        layer.forward = layer.forward
    with autocast(recipe="current"):
        want = layer(x)
    for _ in range(3):
        run = fp8core.make_graphed_callables(layer, sample(), recipe="current")
        assert run is layer
        with pytest.raises(OperandError, match="Sequential is captured already"):
            fp8core.make_graphed_callables(torch.nn.Sequential(layer), sample())
        pending = layer(x)
        assert torch.equal(pending, want)
        assert copy.deepcopy(layer)(x).shape == want.shape
        log.clear()
        layer.reset()
        layer.reset()
        assert log == ["reset"] * 2
        for late in (lambda: layer(x), pending.sum().backward):
            with pytest.raises(OperandError, match=r"reset\(\) has freed the graph"):
                late()
    assert torch.equal(layer.eval()(x), want)  # as before a reset
    outer = fp8core.make_graphed_callables(torch.nn.Sequential(layer), sample(), recipe="current")
    assert torch.equal(outer(x), want)
    assert ("forward" in vars(layer)) is (before == "its own")
    assert "reset" not in vars(layer)


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("modules", [torch.relu, [torch.relu], None, [fp8core.Linear]])
def test_what_is_no_module_is_refused(modules: Any) -> None:
    with pytest.raises(OperandError, match="into the forward of one, whose"):
        fp8core.make_graphed_callables(modules, sample())


@pytest.mark.usefixtures("again")
def test_functions_of_an_order_have_reset() -> None:
    runs = fp8core.make_graphed_callables(
        (fp8core.Linear(16, 16),), (sample(), sample()), _order=[1, 1, -1, -1], enabled=False
    )
    assert len(runs) == 2
    runs[0].reset()
    with pytest.raises(OperandError, match=r"Linear in a graph: reset\(\) has freed the graph"):
        runs[0](*sample())
    assert runs[1](*sample()).shape == (4, 16)


class Pair(torch.nn.Module):
    """A container whose forward does not take what its layers take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(fp8core.Linear(16, 16), torch.nn.GELU())
        self.second = ops.Sequential(ops.Linear(16, 16), torch.nn.Tanh(), ops.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x))
        return made


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("order", [None, [1, 1, -1, -1]])
def test_cached_weights_reach_the_layers_inside_of_containers(order: Any) -> None:
    torch.manual_seed(0)
    model = Pair()
    eager, x = copy.deepcopy(model), sample()[0]
    run = fp8core.make_graphed_callables(
        model if order is None else (model,),
        sample() if order is None else (sample(), sample()),
        recipe="current",
        cache_quantized_params=True,
        _order=order,
    )
    run = run if order is None else run[0]
    with autocast(recipe="current"):
        want = eager(x)
    assert torch.equal(run(x, is_first_microbatch=True), want)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(2)  # which torch does not count
    assert torch.equal(run(x, is_first_microbatch=False), want)  # biases are zeros
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.mul_(2)
    with autocast(recipe="current"):
        want, before = eager(x), want
    assert not torch.equal(before, want)
    assert torch.equal(run(x, is_first_microbatch=True), want)
    with pytest.raises(OperandError, match="is_first_microbatch=None; expected True or False"):
        run(x)
    model.eval()
    assert torch.equal(run(x, is_first_microbatch=False), want)
    assert torch.equal(run(x), want)
    assert not any("forward" in vars(inner) for inner in list(model.modules())[1:])


@pytest.mark.usefixtures("again")
def test_each_module_may_be_enabled_by_itself() -> None:
    low, high = layers = [fp8core.Linear(16, 16) for _ in range(2)]
    x = sample()[0]
    with autocast(recipe="current"):
        want = low(x)
    plain = high(x)
    fp8core.make_graphed_callables(
        layers, (sample(), sample()), recipe="current", enabled=(True, False)
    )
    assert torch.equal(low(x), want)
    assert torch.equal(high(x), plain)
    for bad in ((True,), (True, 1), 1, "ab"):
        with pytest.raises(
            OperandError, match="expected a bool, None, or one of them for each of 2"
        ):
            fp8core.make_graphed_callables(
                [fp8core.Linear(16, 16) for _ in range(2)],
                (sample(), sample()),
                enabled=bad,  # type: ignore[arg-type]
            )


# --- memory that later passes take ---
@pytest.mark.usefixtures("again")
def test_passes_that_are_over_leave_their_inputs_to_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    borrowed: list[torch.Tensor] = []
    passes: list[Pass] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        borrowed.append(tensor)
        return tensor.detach()

    class Noted(PassAgain):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            passes.append(self)

    monkeypatch.setattr(Graph, "borrowed", staticmethod(note))
    monkeypatch.setattr(graphs, "Pass", Noted)
    torch.manual_seed(0)
    chunks = [fp8core.Linear(16, 16), fp8core.Linear(16, 16)]
    order = [1, 1, 2, -2, -1, 1, 2, -2, -1, 2, -2, -1]
    samples = tuple(sample() for _ in range(6))
    want = [torch.randn(4, 16) for _ in range(3)]
    runs = fp8core.make_graphed_callables(
        chunks, samples, enabled=False, _order=order, _reuse_graph_input_output_buffers=True
    )
    memory = [run._inputs[0].data_ptr() for run in passes]
    # Microbatch 2 of chunk 1 begins when microbatch 0 is over; those of chunk 2 never overlap.
    assert memory[2] == memory[0] or memory[2] == memory[3]
    assert memory[0] != memory[1]
    assert len({*memory}) == 3
    assert len({run._grad_outputs[0].data_ptr() for run in passes}) == 1  # type: ignore[union-attr]
    # Outputs of six passes, and gradients of an input and two parameters of all but the last.
    assert len(borrowed) == 6 + 3 * 5
    middle: dict[int, torch.Tensor] = {}
    leaf: dict[int, torch.Tensor] = {}
    done = {number: 0 for number in (1, 2, -1, -2)}
    for step in order:
        at, done[step] = done[step], done[step] + 1
        if step == 1:
            leaf[at] = want[at].clone().requires_grad_()
            middle[at] = runs[at](leaf[at])
        elif step == 2:
            middle[at] = runs[3 + at](middle[at])
        elif step == -2:  # and -1 behind it
            middle[at].square().sum().backward()
            x = want[at].clone().requires_grad_()
            chunks[1](chunks[0](x)).square().sum().backward()
            torch.testing.assert_close(leaf[at].grad, x.grad)


@pytest.mark.usefixtures("again")
def test_memory_is_shared_among_alike_inputs_alone_and_only_in_an_order() -> None:
    wide, narrow = fp8core.Linear(32, 16), fp8core.Linear(16, 32)
    runs = fp8core.make_graphed_callables(
        (wide, narrow),
        (sample(32), sample(16)),
        enabled=False,
        _order=[1, 2, -2, -1],
        _reuse_graph_input_output_buffers=True,
    )
    assert runs[1](runs[0](*sample(32))).shape == (4, 32)
    with pytest.raises(OperandError, match="needs _order, which says when a pass is over"):
        fp8core.make_graphed_callables(wide, sample(32), _reuse_graph_input_output_buffers=True)


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
    group: Any = torch.nn.Identity()  # stands for one
    request(CURRENT, None, weakref.ref(group))  # as after an autocast that reduces over a group
    layer, x = fp8core.Linear(32, 16), torch.randn(32, 32)
    outside = layer(x)
    with autocast(recipe=CURRENT):
        want = layer(x)
    compiled = torch.compile(run, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(layer, x), want)
    assert torch.equal(layer(x), outside)
    assert timeline._thread.history is None or timeline._thread.history.entered is None
