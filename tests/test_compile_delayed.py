"""Delayed scaling in compiled graphs: results, scales and histories are those of eager."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import fp8core as te
from fp8core import recipe
from fp8core.context.scopes import _thread
from fp8core.modules.state.in_graph import _layer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # torch's own
]

DELAYED = recipe.DelayedScaling(amax_history_len=4)
STEPS = 3
Call = Callable[[torch.Tensor], torch.Tensor]
Calls = TypeVar("Calls")
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(64, 64),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 64, normalization="RMSNorm"),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 96, activation="swiglu"),
    "Sequential": lambda: te.ops.Sequential(
        te.ops.RMSNorm(64), te.ops.Linear(64, 96), te.ops.GELU(), te.ops.Linear(96, 64)
    ),
    "TransformerLayer": lambda: te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd"
    ),
}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).relu())
        return y


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Any:
    return torch.compile(function, fullgraph=True, backend=backend)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def x_of(step: int) -> torch.Tensor:
    """Values that grow from step to step, as scales have to follow."""
    return torch.randn(2, 16, 64).mul_(step + 1).requires_grad_()


def state_of(model: torch.nn.Module) -> list[torch.Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [x.clone() for x in (*grads, *model.buffers()) if x is not None]


def run(
    model: torch.nn.Module, call: Calls, step: Callable[[Calls, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Everything that some steps leave."""
    torch.manual_seed(1)
    results = []
    for number in range(STEPS):
        model.zero_grad()
        x = x_of(number)
        loss = step(call, x)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert x.grad is not None
        results += [loss.detach(), x.grad, *state_of(model)]
    return results


def in_autocast(call: Call, x: torch.Tensor) -> torch.Tensor:
    with te.autocast(recipe=DELAYED):
        return call(x).square().mean()


def alone(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call(x).square().mean()


def assert_same(
    model: torch.nn.Module,
    step: Callable[[Call, torch.Tensor], torch.Tensor] = in_autocast,
    backend: str = "aot_eager",
    wrap: Callable[[torch.nn.Module], Call] = lambda model: model,
) -> None:
    other = copy.deepcopy(model)
    want = run(model, wrap(model), step)
    got = run(other, compiled(wrap(other), backend), step)
    assert len(want) == len(got)
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True] * len(want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_equal_those_of_eager(name: str, backend: str) -> None:
    if backend == "inductor" and name == "TransformerLayer":
        pytest.skip("its graph takes long, and has no other operators")
    assert_same(LAYERS[name](), backend=backend)
    assert graphs() == 1


def test_grouped_layer_and_weights_quantized_again() -> None:
    assert_same(te.GroupedLinear(2, 64, 64), wrap=lambda model: lambda x: model(x, [1, 31]))
    again = recipe.DelayedScaling(amax_history_len=4, requantize_weights=True)

    def step(call: Call, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=again):
            y = call(x)
        with te.autocast(recipe=again):  # the scale of the first forward is no longer there
            return y.mean() + call(x * 2).square().mean()

    assert_same(te.LayerNormMLP(64, 96), step)


def test_two_forwards_before_their_backwards() -> None:
    def step(call: Call, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=DELAYED):
            first, second = call(x).square().mean(), call(x * 3).mean()
        first.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return second

    assert_same(te.LayerNormLinear(64, 64), step)
    assert_same(te.Linear(64, 64), lambda call, x: in_autocast(lambda y: call(call(y)), x))


@pytest.mark.parametrize("is_first", [False, True])
def test_eager_calls_beside_compiled_ones(is_first: bool) -> None:
    model = te.LayerNormLinear(64, 64)
    other = copy.deepcopy(model)

    def step(calls: tuple[Call, Call], x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=DELAYED):
            y, z, last = calls[is_first](x), calls[not is_first](2 * x), calls[1](3 * x)
        with pytest.raises(ValueError, match="stop"):
            calls[1](stopped(x)).sum().backward()  # whose amaxes are forgotten
        (y + z).square().mean().backward()  # type: ignore[no-untyped-call]  # torch's
        return last.mean()

    want = run(model, (model, model), step)
    got = run(other, (other, compiled(other)), step)
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True] * len(want)


def test_layers_of_one_shape_share_a_graph() -> None:
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    te.convert(model, DELAYED)
    te.prepare(model, DELAYED)
    other = copy.deepcopy(model)
    for block in other:
        block.compile(fullgraph=True, backend="aot_eager")
    want, got = run(model, model, alone), run(other, other, alone)
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True] * len(want)
    assert graphs() == 1


def test_layers_of_other_threads_come_and_go() -> None:
    def layer() -> te.Linear:
        created = te.Linear(16, 16)
        te.prepare(created, DELAYED)
        return created

    layers, interval = [layer() for _ in range(60)], sys.getswitchinterval()

    def find(number: int) -> bool:
        created = [layer() for _ in range(number % 2)]
        return all(_layer_of(x.amax_history_fwd) is x for x in (*layers, *created))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(find, range(800)))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_converted_model_ends_its_steps_in_the_graph(backend: str) -> None:
    model = torch.nn.Sequential(Block(), Block())
    te.convert(model, DELAYED)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert_same(model, alone, backend)
    assert graphs() == 1
    layer = model[0].up  # outside of the model each of its layers has steps of its own
    assert_same(layer, alone, backend)


def test_a_chain_of_several_layers_notes_their_states_by_one_operator() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    te.convert(model, DELAYED)
    te.prepare(model)
    layer, x = model.model.layers[0], torch.randn(1, 16, 64, requires_grad=True)
    places = {"position_ids": torch.arange(16)[None], "attention_mask": None}
    places["position_embeddings"] = model.model.rotary_emb(x, places["position_ids"])
    noted: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        ops = torch.ops.fp8core
        operators = ops.delayed_scale.default, ops.scale_in_step.default
        used = [x for node in graph.graph.nodes for x in (node.target, *node.args[1:2])]
        noted.append(len([x for x in used if x in operators]))
        return make_boxed_func(graph.forward)

    call = torch.compile(layer, backend=aot_autograd(fw_compiler=count), fullgraph=True)
    call(x, **places).sum().backward()
    # Of attention's linears of one input, and of those behind attention: forward, and backward.
    assert noted == [2, 2]


@torch.compiler.disable
def uncompiled(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = module(x)
    return y


class Broken(Block):
    """Of which torch.compile makes two graphs, or none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return uncompiled(self.down, self.up(x).relu())


class Uncompiled(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return uncompiled(self.down, uncompiled(self.up, x))


def stopped(x: torch.Tensor) -> torch.Tensor:
    """``x``, the backward of which raises."""

    def stop(grad: torch.Tensor) -> None:
        raise ValueError("stop")

    y = x.clone()
    y.register_hook(stop)
    return y


@torch.library.custom_op("fp8core_test::stop", mutates_args=())
def stop(x: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Raise in the middle of a graph, if it ``stops``."""
    if stops:
        raise ValueError("stop")
    return x.clone()


stop.register_fake(lambda x, stops: torch.empty_like(x))
stop.register_autograd(lambda ctx, grad: (grad, None))


class Stopped(Block):
    def forward(self, x: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # in a test
        y: torch.Tensor = self.down(stop(self.up(x), stops))
        return y


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_failed_graph_forgets_its_amaxes(is_eager: bool) -> None:
    """The next step of the thread does, or a state dict, as Python runs nothing at the failure."""
    model, other = te.Linear(64, 64), te.Linear(64, 64)
    other.load_state_dict(model.state_dict())

    def call(layer: torch.nn.Module, x: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe="delayed"):
            y: torch.Tensor = layer(stop(layer(x), stops))
        return y

    fast, stops, last = compiled(call), torch.tensor(True), x_of(0)
    for x in (x_of(0), x_of(1)):
        assert torch.equal(fast(model, x, ~stops), call(other, x, ~stops))
    with pytest.raises(ValueError, match="stop"):
        fast(model, x_of(50), stops)
    run_again = call if is_eager else fast
    assert torch.equal(run_again(model, last, ~stops), call(other, last, ~stops))
    with pytest.raises(ValueError, match="stop"):
        fast(model, x_of(50), stops)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("kind", [Block, Broken, Uncompiled])
def test_a_converted_model_whose_hooks_are_graphs_of_their_own(kind: type[Block]) -> None:
    """torch.compile of a module traces its forward and its hooks apart, not so the lambda."""
    model = kind()
    te.convert(model, DELAYED)
    other = copy.deepcopy(model)
    want = run(model, model, alone)
    got = run(other, torch.compile(other, backend="aot_eager"), alone)
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True] * len(want)


def test_a_converted_model_that_fails_forgets_its_amaxes() -> None:
    model = Stopped()
    te.convert(model, DELAYED)
    fast = compiled(model)
    run(model, lambda x: fast(x, torch.tensor(False)), alone)
    state = state_of(model)
    with pytest.raises(ValueError, match="stop"):
        fast(x_of(50), torch.tensor(True))
    assert all(map(torch.equal, state_of(model), state))


def test_a_step_of_a_graph_ends_where_torch_compile_gave_up() -> None:
    model = Broken()
    te.convert(model, DELAYED)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model)(x_of(0))
    assert not _thread.scopes


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_autocasts_inside_the_graph(backend: str) -> None:
    def wrap(model: torch.nn.Module) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(recipe="delayed"):
                with te.autocast(recipe="delayed"):  # whose exit updates nothing
                    y = model(x)
                y = model(y)
            with te.autocast(recipe="delayed"):
                z: torch.Tensor = model(y)
            return z

        return call

    def step(call: Call, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe="delayed"):  # which ends the step
            return call(x).square().mean()

    assert_same(te.Linear(64, 64), alone, backend, wrap)
    assert_same(te.Linear(64, 64), step, backend, wrap)


def test_evaluation_changes_no_state() -> None:
    model = te.LayerNormMLP(64, 96)
    run(model, model, in_autocast)
    state = state_of(model)
    fast, x = compiled(model), x_of(0)
    with torch.no_grad(), te.autocast(recipe=DELAYED):
        assert torch.equal(fast(x), model(x))
    assert all(map(torch.equal, state_of(model), state))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_has_the_scales(strict: bool) -> None:
    model = te.LayerNormMLP(64, 96)
    run(model, model, in_autocast)
    state, x = state_of(model), x_of(5)
    with te.autocast(recipe=DELAYED):
        program = torch.export.export(model.eval(), (x_of(0),), strict=strict)
        with torch.no_grad():
            assert torch.equal(program.module()(x), model(x))
    assert all(map(torch.equal, state_of(model), state))


def test_a_layer_without_scales_is_not_exported() -> None:
    model = te.LayerNormMLP(64, 96).eval()
    with (
        te.autocast(recipe=DELAYED),
        pytest.raises(
            te.UnsupportedError, match="not offered in an exported program of a layer that"
        ),
    ):
        torch.export.export(model, (x_of(0),), strict=False)
    run(model, model, in_autocast)  # is as before


def test_state_that_is_replaced_is_found() -> None:
    model = te.Linear(64, 64)
    other = copy.deepcopy(model)
    fast = compiled(other)
    want, got = run(model, model, in_autocast), run(other, fast, in_autocast)
    for layer in (model, other):
        layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    want += run(model, model, in_autocast)
    got += run(other, fast, in_autocast)
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True] * len(want)


def test_a_failed_pass_forgets_its_amaxes() -> None:
    model = te.Linear(64, 64)
    fast = compiled(model)
    run(model, fast, in_autocast)
    state = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(RuntimeError, match="size"), te.autocast(recipe=DELAYED):
        fast(x_of(50)).view(7)
    with te.autocast(recipe=DELAYED):
        y = fast(stopped(x_of(1)))
    after_forward = [buffer.clone() for buffer in model.buffers()]
    assert torch.equal(state[2], after_forward[2])  # backward's scales wait for their pass
    with pytest.raises(ValueError, match="stop"):
        y.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert all(map(torch.equal, model.buffers(), after_forward))


def test_a_recompute_says_why_not() -> None:
    model = te.Linear(64, 64)
    fast = compiled(model)

    def call(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=DELAYED):
            y: torch.Tensor = fast(x)
        return y

    y = torch.utils.checkpoint.checkpoint(call, x_of(0), use_reentrant=False)
    with pytest.raises(te.UnsupportedError, match="recomputed in backward"):
        y.sum().backward()


def test_a_state_of_another_recipe_says_why_not() -> None:
    model = te.Linear(64, 64)
    run(model, model, in_autocast)
    model.load_state_dict(model.state_dict())
    other = recipe.DelayedScaling(amax_history_len=8)
    with te.autocast(recipe=other), pytest.raises(te.RecipeError, match="history"):
        compiled(model)(x_of(0))
