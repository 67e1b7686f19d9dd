"""Compiled and exported layers compute what eager ones do, bit for bit, and are not recompiled."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import fp8core
import fp8core as te
from fp8core import backend_api, recipe
from fp8core.chain import run as chain
from fp8core.modules.layers import grouped_linear
from fp8core.torch_ops import operators
from tests import forked
from tests.chain import fused_toy
from tests.pairs import turns

# Raised inside torch.compile and torch.export themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]

BF16 = torch.bfloat16
CURRENT = recipe.Float8CurrentScaling()
MX = recipe.MXFP8BlockScaling()
NVFP4 = recipe.NVFP4BlockScaling()
RECIPES = {
    "high_precision": None,
    "current": CURRENT,
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": MX,
    "nvfp4": NVFP4,
    "nvfp4, weights quantized again": recipe.NVFP4BlockScaling(requantize_weights=True),
}
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(64, 48, params_dtype=BF16),
    "GroupedLinear": lambda: te.GroupedLinear(3, 64, 48, params_dtype=BF16),
    "LayerNorm": lambda: te.LayerNorm(64, params_dtype=BF16),
    "RMSNorm": lambda: te.RMSNorm(64, params_dtype=BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(
        64, 48, params_dtype=BF16, return_layernorm_output=True, return_bias=True
    ),
    "LayerNormMLP": lambda: te.LayerNormMLP(
        64, 32, params_dtype=BF16, normalization="RMSNorm", activation="swiglu"
    ),
}
SPLITS = [8, 0, 32]
on_torch_2_11 = pytest.mark.skipif(torch.__version__[:5] == "2.11.", reason="cannot rebuild them")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def caller(name: str, layer: torch.nn.Module) -> Callable[..., Any]:
    return (lambda x: layer(x, SPLITS)) if name == "GroupedLinear" else lambda x: layer(x)


def rand(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=BF16)


def results(
    call: Callable[..., Any], model: torch.nn.Module, x: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Everything that forward and backward give, and the generator's next number."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(7)
    made = call(x)
    outputs = made if isinstance(made, tuple) else (made,)
    sum(output.float().square().sum() for output in outputs if output.requires_grad).backward()  # type: ignore[union-attr]
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [*outputs, *(grad for grad in grads if grad is not None), torch.rand(1)]


def assert_same(
    call: Callable[..., Any], fast: Callable[..., Any], model: torch.nn.Module, x: torch.Tensor
) -> None:
    want, got = results(call, model, x), results(fast, model, x)
    assert len(want) == len(got)
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True] * len(want)


# tests/test_ways.py compiles Linear and LayerNormMLP in every recipe.
@pytest.mark.parametrize(
    ("recipe_name", "name"),
    [*turns([*RECIPES][:-1], LAYERS), ("block", "GroupedLinear"), ("nvfp4", "LayerNormLinear")],
)
def test_layer_equals_eager_without_recompiling(name: str, recipe_name: str) -> None:
    asked = RECIPES[recipe_name]
    layer = LAYERS[name]()
    call = caller(name, layer)
    fast = compiled(call)
    for _ in range(5):
        with te.autocast(enabled=asked is not None, recipe=asked):
            assert_same(call, fast, layer, rand(40, 64))
    assert graphs() == 1


@pytest.mark.parametrize(
    ("name", "recipe_name"),
    [
        *(("GroupedLinear", "block"), ("LayerNormMLP", "nvfp4, weights quantized again")),
        *(("LayerNormMLP", "nvfp4"), ("LayerNormLinear", "current")),
    ],
)
def test_inductor_equals_eager(name: str, recipe_name: str) -> None:
    layer = LAYERS[name]()
    call = caller(name, layer)
    fast = compiled(call, "inductor")
    for _ in range(2):
        with te.autocast(recipe=RECIPES[recipe_name]):
            assert_same(call, fast, layer, rand(40, 64))
    assert graphs() == 1


@pytest.mark.parametrize(
    ("name", "backend"),
    turns(["Linear", "GroupedLinear", "LayerNormMLP"], ["inductor", "aot_eager", "aot_eager"]),
)
def test_a_graph_saves_requantized_weights_instead_of_codes(name: str, backend: str) -> None:
    """Those that need no padding: torch holds the codes of what the graph computes."""
    layer, saved = LAYERS[name](), []
    fast = compiled(caller(name, layer), backend)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with (
        te.autocast(recipe=recipe.Float8CurrentScaling(requantize_weights=True)),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        fast(rand(40, 64).requires_grad_())
    weights = [own for own in layer.parameters() if own.dim() == 2]
    assert all(any(own is one for one in saved) for own in weights)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize(
    ("holding", "codes"),
    [("least", 0), ("balanced", 64 + 96), ("fastest", 64 + 96 + (192 * 64 + 64 * 96) // 32)],
)
@pytest.mark.parametrize("scaling", [recipe.Float8CurrentScaling, recipe.DelayedScaling])
def test_a_graph_saves_the_codes_that_the_recipe_holds(
    scaling: type[recipe.Recipe], holding: str, codes: int, backend: str
) -> None:
    """``codes`` are columns of 32 bytes: of both inputs, and of both weights."""
    asked = scaling(holding=holding)  # type: ignore[call-arg]  # of both
    layer = te.LayerNormMLP(64, 96, params_dtype=BF16, bias=False, activation="swiglu")
    saved: list[torch.Tensor] = []
    x, fast = rand(32, 64).requires_grad_(), compiled(layer, backend)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with te.autocast(recipe=asked), hooks:
        y = fast(x)
    held = [tensor.numel() for tensor in saved if tensor.dtype == torch.uint8]
    assert sum(held) == 32 * codes
    saved = [tensor for tensor in saved if tensor.dtype == BF16]
    rows = [tensor for tensor in saved if tensor.numel() >= x.numel() and tensor.shape[0] == 32]
    assert sum(tensor.shape[1] for tensor in rows) == 64 + 2 * 96  # the input, and fc1's output
    y.sum().backward()
    if scaling is not recipe.DelayedScaling:  # two calls of one layer differ under that
        with te.autocast(recipe=asked):
            assert_same(layer, fast, layer, x)


def test_recipe_and_policy_are_honoured_when_they_change() -> None:
    layer = te.Linear(64, 48, params_dtype=BF16)
    fast, x = compiled(layer), rand(32, 64)
    for asked in (CURRENT, MX, None) * 2:
        with te.autocast(enabled=asked is not None, recipe=asked):
            assert_same(layer, fast, layer, x)
    assert graphs() == 3
    with te.use_backend("reference"):
        assert_same(layer, fast, layer, x)
    assert graphs() == 4


def test_equal_recipe_made_anew_is_no_reason_to_recompile() -> None:
    layer = te.Linear(64, 48, params_dtype=BF16)
    fast = compiled(layer)
    for _ in range(3):
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            fast(rand(32, 64))
    assert graphs() == 1


def test_layers_of_one_shape_share_a_graph() -> None:
    with te.autocast(recipe=CURRENT):
        for layer in te.prepare(torch.nn.Sequential(*[te.Linear(64, 64) for _ in range(4)])):
            compiled(layer)(torch.randn(8, 64))
    assert graphs() == 1


def test_names_matter_where_the_recipe_reads_them() -> None:
    model = te.prepare(torch.nn.Sequential(*[te.Linear(64, 64, params_dtype=BF16) for _ in "ab"]))
    fast = compiled(model)
    with te.autocast(recipe=recipe.PerLayer({"0": CURRENT}, default=MX)):
        assert_same(model, fast, model, rand(32, 64))


@on_torch_2_11
@pytest.mark.parametrize("asked", [CURRENT, NVFP4, "mxfp8"], ids=["current", "nvfp4", "name"])
def test_autocast_inside_the_graph(asked: recipe.Recipe | str) -> None:
    first = te.LayerNormLinear(64, 64, params_dtype=BF16)
    model = torch.nn.Sequential(first, te.LayerNormMLP(64, 32, params_dtype=BF16), first)

    def step(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=asked):
            y = model[:2](x)
            with te.autocast(enabled=False):
                y = model[1](y)
        loss: torch.Tensor = first(y)
        return loss

    fast = compiled(step)
    for _ in range(2):
        assert_same(step, fast, model, rand(32, 64))
    assert graphs() == 1


@pytest.mark.parametrize("recipe_name", ["current", "mxfp8"])
def test_converted_model_equals_eager(recipe_name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 64))
    te.convert(model.to(BF16), recipe_name)
    fast = compiled(model)
    assert_same(model, fast, model, rand(32, 64))
    with te.autocast(enabled=False):
        assert_same(model, fast, model, rand(32, 64))


@on_torch_2_11
def test_torch_autocast_inside_and_outside() -> None:
    layer = te.LayerNormMLP(64, 32)
    x = torch.randn(16, 64)

    def step(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16), te.autocast(recipe=CURRENT):
            return layer(x)

    assert_same(step, compiled(step), layer, x)
    with torch.autocast("cpu", dtype=BF16), te.autocast(recipe=CURRENT):
        assert_same(layer, compiled(layer), layer, x)


def test_seeds_are_drawn_where_eager_draws_them() -> None:
    model = torch.nn.Sequential(*[te.Linear(64, 64, bias=False, params_dtype=BF16) for _ in "ab"])

    def step(x: torch.Tensor) -> Any:
        return model(model[0](x))

    fast, x = compiled(step, "inductor"), rand(32, 64)
    with te.autocast(recipe=NVFP4):
        assert_same(step, fast, model, x)
        after = []
        for call in (step, fast):
            torch.manual_seed(1)
            with torch.no_grad():
                call(x)
            after.append(torch.rand(1))
    assert torch.equal(*after)


def test_weight_is_quantized_anew_whatever_is_first_microbatch() -> None:
    layer = te.Linear(64, 48, params_dtype=BF16)
    fast, x = compiled(layer), rand(32, 64)
    with te.autocast(recipe=CURRENT):
        fast(x, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight.data.mul_(2)
        assert torch.equal(fast(x, is_first_microbatch=False), layer(x))


def test_unsupported_recipe_says_why() -> None:
    layer = te.Linear(64, 48, params_dtype=torch.float64)
    fast = compiled(layer)
    with te.autocast(recipe=CURRENT), pytest.raises(te.UnsupportedError, match="no backend runs"):
        fast(torch.randn(4, 64, dtype=torch.float64))


def test_tensor_of_splits_is_refused() -> None:
    layer = te.GroupedLinear(2, 64, 48, params_dtype=BF16)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="m_splits must be a list"):
        compiled(layer)(rand(8, 64), torch.tensor([4, 4]))


@pytest.mark.parametrize("name", ["rowwise", "block", "alone"])
def test_sizes_on_the_device_take_one_graph_for_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_linear, "stays_on_device", lambda sizes: True)
    layer = te.GroupedLinear(3, 64, 48, params_dtype=BF16)
    chosen = {**RECIPES, "alone": recipe.WeightOnly("block")}[name]
    graphs: list[object] = []
    products: list[Any] = []
    run_of = operators.GroupedProduct.run_of

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    def spy(self: Any, text: str, device: torch.device) -> Any:
        products.append(operators.decode(text).desc)
        return run_of(self, text, device)

    monkeypatch.setattr(operators.GroupedProduct, "run_of", spy)
    fast = torch.compile(layer, fullgraph=True, dynamic=False, backend=count)
    for sizes in ([5, 0, 3], [0, 0, 8], [1, 2, 3]):
        x, results = rand(8, 64), []
        for run in (fast, layer):
            mine = x.clone().requires_grad_()
            with te.autocast(recipe=chosen):
                y = run(mine, torch.tensor(sizes))
            y.square().sum().backward()
            results.append((y, mine.grad))
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
    assert len(graphs) == 1
    assert products
    assert all(product.offsets_on_device for product in products)


class Model(torch.nn.Module):
    def __init__(self, asked: recipe.Recipe) -> None:
        super().__init__()
        self.asked = asked
        self.body = torch.nn.Sequential(
            te.Linear(64, 64, params_dtype=BF16), te.LayerNormMLP(64, 32, params_dtype=BF16)
        )

    def forward(self, x: torch.Tensor) -> Any:
        with te.autocast(recipe=self.asked):
            return self.body(x)


RUN = """
import sys, torch, fp8core
x, want = torch.load(sys.argv[2])
sys.exit(0 if torch.equal(torch.export.load(sys.argv[1]).module()(x), want) else "differs")
"""


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11's
@pytest.mark.parametrize("asked", [CURRENT, MX, NVFP4], ids=["current", "mxfp8", "nvfp4"])
def test_exported_program_equals_eager(asked: recipe.Recipe, tmp_path: Path) -> None:
    model, x = Model(asked).eval(), rand(32, 64)
    path = tmp_path / "model.pt2"
    with torch.no_grad():
        want = model(x)
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), want)
        torch.export.save(program, path)
        assert torch.equal(torch.export.load(path).module()(x), want)
    if asked is CURRENT:  # another process: nothing but the file
        torch.save((x, want), tmp_path / "x.pt")
        command = [sys.executable, "-c", RUN, str(path), str(tmp_path / "x.pt")]
        ran = forked.run(command, timeout=300)
        assert ran.returncode == 0, ran.stderr


def test_export_with_requantized_weights_equals_eager() -> None:
    model, x = te.Linear(64, 64), torch.randn(4, 64)
    chosen = recipe.Float8CurrentScaling(requantize_weights=True)
    with te.autocast(recipe=chosen), torch.no_grad():
        want, program = model(x), torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), want)


def sequential(*more: torch.nn.Module) -> Any:
    return te.ops.Sequential(
        te.ops.Linear(64, 48, params_dtype=BF16),
        *more,
        te.ops.AddExtraInput(),
        te.ops.RMSNorm(48, params_dtype=BF16),
        te.ops.Sequential(te.ops.Linear(48, 64, params_dtype=BF16), te.ops.SwiGLU()),
        te.ops.Bias(32, dtype=BF16),
        te.ops.Quantize(),
    )


@pytest.mark.parametrize("recipe_name", ["current", "nvfp4"])
def test_sequential_with_dropout_equals_eager(recipe_name: str) -> None:
    asked, model = RECIPES[recipe_name], sequential(te.ops.Dropout(0.25))
    if recipe_name == "current":
        model = sequential(te.ops.Dropout(0.25), te.ops.Quantize(False, backward=True))
    residual = rand(32, 48)
    fast = compiled(lambda x: model(x, residual))
    for _ in range(2):
        with te.autocast(enabled=asked is not None, recipe=asked):
            assert_same(lambda x: model(x, residual), fast, model, rand(32, 64))
    assert graphs() == 1


def test_an_extra_output_equals_eager() -> None:
    norm, linear = te.ops.RMSNorm(64, params_dtype=BF16), te.ops.Linear(64, 32, params_dtype=BF16)
    model = te.ops.Sequential(te.ops.MakeExtraOutput(), norm, linear)
    with te.autocast(recipe=CURRENT):
        assert_same(model, compiled(model), model, rand(32, 64))


def test_fused_operations_equal_eager() -> None:
    with fused_toy.installed(*backend_api.OPTIONAL_OPS, variants=("counted",)) as calls:
        for model in (
            te.LayerNormMLP(64, 32, params_dtype=BF16, activation="swiglu"),
            torch.nn.Sequential(
                te.Linear(64, 64, params_dtype=BF16), te.LayerNormLinear(64, 64, params_dtype=BF16)
            ),
            te.ops.Sequential(
                te.ops.Linear(64, 64, params_dtype=BF16),
                te.ops.LayerNorm(64, params_dtype=BF16),
                te.ops.Linear(64, 64, params_dtype=BF16),
            ),
        ):
            with te.autocast(recipe=MX):
                assert_same(model, compiled(model), model, rand(32, 64))
        model = sequential()
        residual = rand(32, 48)

        def call(x: torch.Tensor) -> Any:
            return model(x, residual)

        assert_same(call, compiled(call), model, rand(32, 64))
    assert [op for op in backend_api.OPTIONAL_OPS if not calls[op]] == []


@pytest.mark.parametrize("recipe_name", ["high_precision", "current"])
def test_quantized_parameters_equal_eager(recipe_name: str) -> None:
    with te.quantized_model_init(recipe=CURRENT):
        layer = te.Linear(64, 48, params_dtype=BF16)
    asked, fast = RECIPES[recipe_name], compiled(layer)
    for _ in range(2):
        with te.autocast(enabled=asked is not None, recipe=asked):
            assert_same(layer, fast, layer, rand(32, 64))
        with torch.no_grad():
            layer.weight.copy_(rand(48, 64))
    assert graphs() == 1


def test_parametrized_weight_equals_eager() -> None:
    layer = te.Linear(64, 48, params_dtype=BF16)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with te.autocast(recipe=CURRENT):
        assert_same(layer, compiled(layer), layer, rand(32, 64))


def test_refused_sequential_has_the_columns_it_would_have() -> None:
    model, residual = sequential(), rand(32, 48)
    with (
        te.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()),
        pytest.raises(te.UnsupportedError, match="calibrating"),
    ):
        compiled(lambda x: model(x, residual) @ rand(32, 4))(rand(32, 64))


def test_compiled_model_in_a_checkpoint() -> None:
    model = te.LayerNormMLP(64, 32, params_dtype=BF16)
    fast = compiled(model)
    with te.autocast(recipe=NVFP4):
        assert_same(
            lambda x: te.checkpoint(model, x), lambda x: te.checkpoint(fast, x), model, rand(32, 64)
        )


def test_exported_sequential_equals_eager() -> None:
    model, x, residual = sequential(te.ops.Dropout(0.25)).eval(), rand(32, 64), rand(32, 48)
    with torch.no_grad(), te.autocast(recipe=CURRENT):
        program = torch.export.export(model, (x, residual))
        assert torch.equal(program.module()(x, residual), model(x, residual))


# --- any number of rows, and backward compiled by itself ---


DENSE = ("Linear", "LayerNormLinear", "LayerNormMLP")


def rows_of(rows: int) -> torch.Tensor:
    return rand(rows, 64).requires_grad_()


def output(made: Any) -> torch.Tensor:
    y: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return y


@pytest.mark.parametrize(
    ("kind", "name"), [*turns(DENSE, [None, "current", "current"]), ("LayerNormMLP", "block")]
)
def test_one_graph_serves_any_number_of_rows(kind: str, name: str | None) -> None:
    layer = LAYERS[kind]()
    fast = compiled(layer, dynamic=True)
    for rows in (33, 17, 200, 500):  # fewer and more than the layer has input features
        x = rows_of(rows)
        with te.autocast(enabled=name is not None, recipe=name):
            y, want = output(fast(x)), output(layer(x))
        assert torch.equal(y, want)
        y.sum().backward()
    assert graphs() == 1 or name == "block"  # whose blocks of rows are counted


@pytest.mark.parametrize(("kind", "chosen"), turns(DENSE, [recipe.Float8CurrentScaling(), None]))
def test_an_exported_program_takes_any_number_of_rows(
    kind: str, chosen: recipe.Recipe | None
) -> None:
    layer = LAYERS[kind]().eval()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        rows = torch.export.Dim("rows", min=2, max=4096)
        made = torch.export.export(layer, (rows_of(32).detach(),), dynamic_shapes=({0: rows},))
        for count in (8, 200):
            x = rows_of(count).detach()
            assert torch.equal(output(made.module()(x)), output(layer(x)))


def test_an_exported_program_pads_any_number_of_rows() -> None:
    layer = LAYERS["Linear"]().eval()
    with torch.no_grad(), te.autocast(recipe=recipe.MXFP8BlockScaling()):
        rows = ({0: torch.export.Dim("rows")},)
        program = torch.export.export(layer, (rows_of(32),), dynamic_shapes=rows)
        for count in (5, 64, 77):
            x = rows_of(count)
            assert torch.equal(program.module()(x), layer(x))


# torch's own, about a tensor that is no leaf: what one node of a layer hands to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", DENSE)
def test_backward_alone_compiles_to_one_graph(kind: str) -> None:
    layer = LAYERS[kind]()
    x = rows_of(32)
    output(layer(x)).sum().backward()
    want, x.grad = x.grad, None
    y = output(layer(x))
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        y.sum().backward()
    assert torch.equal(cast(torch.Tensor, x.grad), cast(torch.Tensor, want))


MODULES = [
    value
    for value in (getattr(fp8core, name) for name in fp8core.__all__)
    if isinstance(value, type) and issubclass(value, torch.nn.Module)
]


@pytest.mark.parametrize("layer", MODULES, ids=lambda layer: layer.__name__)
def test_forward_has_no_call_that_the_oldest_torch_cannot_trace(layer: Any) -> None:
    """Dynamo of torch 2.11 knows no ``locals()``; that of 2.13 does."""
    assert "locals" not in inspect.unwrap(layer.forward).__code__.co_names


def test_autocast_of_a_device_that_torch_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = SimpleNamespace(is_cuda=False, is_cpu=False, device=SimpleNamespace(type="mps"))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "mps")
    assert chain.is_under_torch_autocast(x)
