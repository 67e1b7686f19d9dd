"""Layers in CUDA graphs: replays equal eager steps bit for bit."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import fp8core
from fp8core import UnsupportedError, recipe
from fp8core.context import capture

# Warming up and capturing run on a stream of their own.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")

NAMES = ("delayed", "current", "block", "rowwise")


def make(bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        fp8core.Linear(256, 384, bias=bias, params_dtype=torch.bfloat16, device="cuda"),
        torch.nn.GELU(),
        fp8core.Linear(384, 128, bias=bias, params_dtype=torch.bfloat16, device="cuda"),
    )


def step(model: torch.nn.Module, seed: int) -> list[torch.Tensor]:
    """Run forward, backward and an optimizer step; return what came of them."""
    torch.manual_seed(seed)
    x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.randn(64, 128, dtype=torch.bfloat16, device="cuda")
    y = model(x)
    y.backward(grad)
    grads = [own.grad.clone() for own in model.parameters()]
    with torch.no_grad():
        for own in model.parameters():
            own -= 1e-2 * own.grad
            own.grad = None
    return [y.detach().clone(), x.grad.clone(), *grads]


@pytest.mark.needs_accelerator("cuda")
def test_a_capture_leaves_delayed_scales_as_they_were() -> None:
    model = make()
    with fp8core.autocast(recipe=recipe.by_name("delayed")):
        model(torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")).sum().backward()
    model.zero_grad()
    before = copy.deepcopy(model.state_dict())
    sample = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    fp8core.make_graphed_callables(model, (sample,), recipe=recipe.by_name("delayed"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", NAMES)
def test_weights_quantized_outside_of_the_graph_serve_all_microbatches(name: str) -> None:
    chosen = recipe.by_name(name)
    eager, graphed = (
        fp8core.LayerNormMLP(256, 384, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    graphed.load_state_dict(eager.state_dict())
    sample = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = fp8core.make_graphed_callables(
        graphed, (sample,), recipe=chosen, cache_quantized_params=True
    )
    for seed in range(3):
        results = []
        for model in (graphed, eager):
            torch.manual_seed(seed)
            mine = []
            for first in (True, False, False):
                x = torch.randn_like(sample).requires_grad_()
                with fp8core.autocast(enabled=model is eager, recipe=chosen):
                    y = model(x, is_first_microbatch=first)
                y.square().sum().backward()
                mine += [y.detach().clone(), x.grad.clone()]
            mine += [own.grad.clone() for own in model.parameters()]
            with torch.no_grad():
                for own in model.parameters():
                    own -= 1e-3 * own.grad
                    own.grad = None
            results.append(mine)
        if name == "delayed" and seed:
            continue  # the graph rolls its history in each microbatch
        for number, (one, other) in enumerate(zip(*results, strict=True)):
            torch.testing.assert_close(one, other, msg=str((seed, number)))
    with pytest.raises(fp8core.OperandError, match="is_first_microbatch=None"):
        graphed(sample)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", ["current", "block"])
def test_a_pipeline_order_equals_eager_steps(name: str) -> None:
    chosen = recipe.by_name(name)
    eager, chunks = make(), make()
    parts = [chunks[0], torch.nn.Sequential(chunks[1], chunks[2])]

    def sample(width: int) -> tuple[torch.Tensor]:
        x = torch.randn(64, width, dtype=torch.bfloat16, device="cuda")
        return (x.requires_grad_(),)

    order = [1, 1, 2, -2, 2, -1, -2, -1]
    run = fp8core.make_graphed_callables(
        parts,
        tuple(sample(width) for width in (256, 256, 384, 384)),
        recipe=chosen,
        _order=order,
    )
    assert len(run) == 4
    torch.manual_seed(1)
    inputs = [sample(256)[0] for _ in range(2)]
    grads = [torch.randn(64, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    middle = [run[at](inputs[at]) for at in range(2)]
    ends = [middle[at].detach().requires_grad_() for at in range(2)]
    outputs = []
    for at in range(2):  # 2 -2, then 2 -1 -2
        y = run[2 + at](ends[at])
        outputs.append(y.detach().clone())
        if at:
            middle[0].backward(ends[0].grad)
        y.backward(grads[at])
    middle[1].backward(ends[1].grad)
    got = [*outputs, *(x.grad for x in inputs), *(own.grad for own in chunks.parameters())]
    theirs = []
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    for x, grad in zip(copies, grads, strict=True):
        with fp8core.autocast(recipe=chosen):
            y = eager(x)
        theirs.append(y.detach())
        y.backward(grad)
    want = [*theirs, *(x.grad for x in copies), *(own.grad for own in eager.parameters())]
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(one, other, msg=str(number))


def pipeline(reuses: bool) -> tuple[list[torch.Tensor], int]:
    """Train four microbatches on two chunks of four linears, one forward and one backward at a
    time; return losses and gradients, and the bytes that the capture holds."""
    torch.manual_seed(0)
    layers = [
        fp8core.Linear(512, 512, params_dtype=torch.bfloat16, device="cuda") for _ in range(8)
    ]

    def sample() -> tuple[torch.Tensor]:
        x = torch.randn(2048, 512, dtype=torch.bfloat16, device="cuda")
        return (x.requires_grad_(),)

    order = [1, 2, -2, -1] * 4
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    runs = fp8core.make_graphed_callables(
        layers,
        tuple(sample() for _ in range(32)),
        recipe="current",
        _order=order,
        _num_layers_per_chunk=[4, 4],
        _reuse_graph_input_output_buffers=reuses,
    )
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved() - before
    torch.manual_seed(1)
    results = []
    for _ in range(2):
        for microbatch in range(4):
            x = leaf = sample()[0]
            for chunk in range(2):
                for layer in range(4):
                    x = runs[16 * chunk + 4 * microbatch + layer](x)
            loss = x.float().square().mean()
            loss.backward()
            results += [loss.detach().clone(), leaf.grad.clone()]  # type: ignore[union-attr]
    results += [own.grad.clone() for layer in layers for own in layer.parameters()]  # type: ignore[union-attr]
    for run in runs:
        run.reset()
    return results, reserved


@pytest.mark.needs_accelerator("cuda")
def test_passes_that_are_over_leave_their_memory_and_change_no_bit() -> None:
    (plain, larger), (reused, smaller) = pipeline(reuses=False), pipeline(reuses=True)
    assert all(map(torch.equal, plain, reused))
    print(f"memory of the capture: {larger >> 20} MiB, reused {smaller >> 20} MiB")
    assert smaller < 0.7 * larger


@pytest.mark.needs_accelerator("cuda")
def test_memory_that_is_borrowed_is_not_held() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        x = torch.arange(24, device="cuda").to(dtype).view(4, 6)[1:, ::2]
        view = capture.Graph.borrowed(x)
        assert torch.equal(view, x)
        assert view.data_ptr() == x.data_ptr()
        x.zero_()
        assert not view.any()
    whole = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    before, view = torch.cuda.memory_allocated(), capture.Graph.borrowed(whole)
    del whole
    assert torch.cuda.memory_allocated() == before - (1 << 26)
    del view


@pytest.mark.needs_accelerator("cuda")
def test_reset_frees_the_memory_of_a_capture_and_the_module_is_captured_again() -> None:
    model = make()
    sample = torch.randn(1 << 14, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with fp8core.autocast(recipe="current"):
        want = model(sample).detach()
    for _ in range(2):
        fp8core.make_graphed_callables(model, (sample,), recipe="current")
        assert torch.equal(model(sample), want)
        with pytest.raises(fp8core.OperandError, match="is captured already"):
            fp8core.make_graphed_callables(model, (sample,))
        reserved = []
        for reset in (lambda: None, model.reset):
            reset()
            gc.collect()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[1] <= reserved[0] - (16 << 20)  # an output and two gradients at least
    with pytest.raises(fp8core.OperandError, match="has freed the graph"):
        model(sample)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", ["current", "block"])
def test_layers_of_containers_multiply_by_weights_of_the_first_microbatch(name: str) -> None:
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    graphed = torch.nn.Sequential(
        fp8core.LayerNormLinear(256, 256, **options),
        fp8core.ops.Sequential(
            fp8core.ops.Linear(256, 256, device="cuda", dtype=torch.bfloat16),
            fp8core.ops.GELU(),
            torch.nn.Tanh(),
            fp8core.Linear(256, 256, **options),
        ),
    )
    eager = copy.deepcopy(graphed)
    sample = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = fp8core.make_graphed_callables(
        graphed, (sample,), recipe=name, cache_quantized_params=True
    )
    for _ in range(2):
        for first in (True, False):
            x = torch.randn_like(sample).requires_grad_()
            y = graphed(x, is_first_microbatch=first)
            with fp8core.autocast(recipe=name):
                want = eager(x)
            assert torch.equal(y, want)
            y.sum().backward()
            want.sum().backward()
        with torch.no_grad():
            for mine, theirs in zip(graphed.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
                for own in (mine, theirs):
                    own -= 1e-2 * theirs.grad  # type: ignore[operator]
                    own.grad = None


@pytest.mark.needs_accelerator("cuda")
def test_microbatches_add_up_and_keywords_and_hooks_are_taken() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fp8core.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * scale  # type: ignore[no-any-return, operator]

    module, seen = Scaled(), []
    x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda")
    scale = torch.full((64,), 2.0, dtype=torch.bfloat16, device="cuda")
    run = fp8core.make_graphed_callables(
        module,
        (x,),
        sample_kwargs={"scale": scale},
        recipe="current",
        pre_warmup_hook=lambda: seen.append("before"),
        post_warmup_hook=lambda: seen.append("after"),
        capture_time_hooks=[{"forward_hooks": {0: lambda module: seen.append("forward")}}],
    )
    assert seen == ["before", "forward", "forward", "forward", "after", "forward"]
    totals = []
    for _ in range(2):
        run(x, scale=scale).sum().backward()
        totals.append(module.inner.weight.grad.clone())
    assert torch.equal(totals[1], 2 * totals[0])
    once, thrice = (run(x, scale=factor * scale).clone() for factor in (1, 4))
    assert torch.equal(thrice, 4 * once)


@pytest.mark.needs_accelerator("cuda")
def test_a_graph_that_is_garbage_does_not_end_a_capture() -> None:
    x = torch.ones(4, device="cuda")
    old, new = capture.Graph(), capture.Graph()
    old.record(lambda: x + 1, torch.cuda.graph_pool_handle())
    cycle = [old]
    cycle.append(cycle)
    threshold = gc.get_threshold()

    def collecting() -> torch.Tensor:
        gc.set_threshold(1)
        assert len([[] for _ in range(10_000)]) == 10_000  # objects that have the collector run
        return x + 2

    del old, cycle
    try:
        y = new.record(collecting, torch.cuda.graph_pool_handle())
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled()
    new.replay()
    assert torch.equal(y, x + 2)


@pytest.mark.needs_accelerator("cuda")
def test_a_kept_weight_in_a_graph_is_refused() -> None:
    layer = fp8core.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(16, 64, dtype=torch.bfloat16, device="cuda")
    with fp8core.autocast(recipe=recipe.by_name("current")), torch.no_grad():
        layer(x, is_first_microbatch=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UnsupportedError, match="of the capture"), torch.cuda.graph(graph):
            layer(x, is_first_microbatch=False)


@pytest.mark.needs_accelerator("cuda")
def test_a_graph_of_frozen_weights_is_refused_and_one_of_stored_weights_is_replayed() -> None:
    chosen = recipe.by_name("current")
    with fp8core.quantized_model_init(recipe=chosen):
        stored = fp8core.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
    layer = fp8core.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(16, 64, dtype=torch.bfloat16, device="cuda")
    with fp8core.autocast(recipe=chosen), torch.no_grad(), fp8core.frozen_weights(layer):
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UnsupportedError, match="frozen_weights"), torch.cuda.graph(graph):
            layer(x)
    with fp8core.autocast(recipe=chosen), torch.no_grad(), fp8core.frozen_weights(stored):
        want = stored(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = stored(x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)


def test_a_layer_that_is_not_on_cuda_is_refused() -> None:
    layer = fp8core.Linear(16, 16, device="cpu")
    with pytest.raises(UnsupportedError, match=r"no CUDA device|is on cpu"):
        fp8core.make_graphed_callables(layer, (torch.randn(4, 16),))


def test_no_modules_are_refused() -> None:
    with pytest.raises(fp8core.RecipeError, match="there are no modules"):
        fp8core.make_graphed_callables([], [])
