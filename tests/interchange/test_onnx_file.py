"""Models as ONNX files, run by onnxruntime, against fp8core's forward."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import fp8core as te
from fp8core import OperandError, RecipeError, UnsupportedError, recipe
from fp8core.export import operands, to_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# torch's own, about the containers that it copies.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]

CURRENT, MX = recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()
RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    "current": CURRENT,
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": MX,
    "nvfp4": recipe.NVFP4BlockScaling(),
}
# A sum in another order differs by about 2^-20 of itself, and codes' boundaries lie 2^-4 apart, so
# that fewer than one value in 10^4 falls on another side of one, by a step of 2^-3 of it.
BOUND = 2.0**-3 * 1e-2


@pytest.fixture(autouse=True, scope="module")
def one_table_of_translations() -> Iterator[None]:
    """torch builds its own anew for every file, for a second, and to_onnx adds none to it."""
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        build = functools.cache(registry.from_torchlib)
        patch.setattr(registry, "from_torchlib", staticmethod(build))
        yield


def run(path: Path, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Run one session of the file for each of ``inputs`` in a row."""
    session = onnxruntime.InferenceSession(str(path))
    names = [one.name for one in session.get_inputs()]
    given = [dict(zip(names, map(torch.Tensor.numpy, one), strict=True)) for one in inputs]
    return [[torch.from_numpy(result) for result in session.run(None, one)] for one in given]


def bits_of(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copies of all parameters and buffers, the codes and scales of those that are quantized."""
    held: dict[str, list[torch.Tensor]] = {}
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        tensor: Any = one.detach()
        parts = [tensor]
        if isinstance(tensor, te.QuantizedTensor):
            parts = [getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]]
        held[name] = [part.clone().contiguous().reshape(-1).view(torch.uint8) for part in parts]
    return held


def is_as_before(model: torch.nn.Module, before: Mapping[str, Sequence[torch.Tensor]]) -> bool:
    after = bits_of(model)
    return after.keys() == before.keys() and all(
        torch.equal(*pair)
        for name, parts in before.items()
        for pair in zip(parts, after[name], strict=True)
    )


def distances(
    path: Path, model: torch.nn.Module, inputs: Sequence[Sequence[torch.Tensor]], chosen: Any = None
) -> list[list[float]]:
    """How far the results of a file, run for each of ``inputs`` in a row, are from the model's."""
    scope = contextlib.nullcontext() if chosen is None else te.autocast(recipe=chosen)
    with torch.no_grad(), te.use_backend("reference"), scope:
        wants = [model(*one) for one in inputs]
    wants = [[want] if isinstance(want, torch.Tensor) else want for want in wants]
    results = run(path, inputs)
    return [
        [distance(*pair) for pair in zip(one, want, strict=True)]
        for one, want in zip(results, wants, strict=True)
    ]


def distance(result: torch.Tensor, want: torch.Tensor) -> float:
    assert result.shape == want.shape
    return float((result - want).norm() / want.norm())


class Each(torch.nn.Module):
    """The results of several modules for one input, each under its recipe."""

    def __init__(
        self, parts: Mapping[str, torch.nn.Module], recipes: Mapping[str, recipe.Recipe | None]
    ) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict(parts)
        self.recipes = dict(recipes)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for name, part in self.parts.items():
            chosen = self.recipes[name]
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                results.append(part(x))
        return results


class Called(torch.nn.Module):
    """A module that is called with more than ``x``."""

    def __init__(self, module: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.call(self.module, x)
        return result


def written(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Writes to views of values, and to one of a value that depends on a parameter alone."""
    weight, y = module.weight.t() * 1, x * 2
    weight[:2], y[:, 0] = 0, 0
    y[1:3].add_(1)
    return y @ weight


def undrawn(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Operators that draw in training alone, and the data of a parameter and of a value."""
    heads, y = x.reshape(1, 4, 8, 64), functional.dropout(x * 3, 0.5, False)
    y.data.mul_(2)
    kept = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.0)
    return y @ module.weight.data.t() + kept.reshape(32, 64)[:, :48]


def routed(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Tokens to the best of eight experts and back; many scores are equal."""
    logits = x[:, :8].round()
    top = functools.partial(te.router.fused_topk_with_score_function, expert_bias=None)
    probs, chosen = top(logits, 2, True, None, None, None, "softmax")
    other, _ = top(logits, 2, False, 4, 2, 1.5, "sigmoid")
    rows, places = te.moe_permute(x, chosen.int(), num_out_tokens=2 * len(x), map_type="mask")
    y = te.moe_unpermute(rows * 2, places, merging_probs=probs, map_type="mask")
    return torch.cat((y, other), dim=1)


def decoded(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A decoder layer with a window, then what it looked at."""
    hidden = x.reshape(8, 4, 64)
    result: torch.Tensor = module(hidden, encoder_output=hidden[:5] * 2)
    return result


def packed(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Sequences whose lengths depend on the input."""
    first = 5 + (x[:1, 0] > 0).int()
    ends = torch.cat((torch.zeros_like(first), first, torch.full_like(first, len(x))))
    keywords = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    result: torch.Tensor = module(x, **keywords, max_seqlen_q=32, max_seqlen_kv=32)
    return result


def grouped(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x[:, :40].contiguous(), [4, 0, 28])
    return result


def half(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(x.to(torch.bfloat16)).to(torch.float32)
    return result


def layers() -> Each:
    """Every layer for an input ``[rows, 64]``, and linears of every recipe."""
    torch.manual_seed(0)
    linears: dict[str, torch.nn.Module] = {f"linear_{name}": te.Linear(64, 48) for name in RECIPES}
    with te.quantized_model_init(recipe=MX):
        quantized = te.Linear(64, 64)
    converted = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    te.convert(converted, filter=lambda module, name: True, recipe=CURRENT)
    with te.quantized_model_init(recipe=CURRENT):
        odd = te.GroupedLinear(3, 40, 48)
    decoder = te.TransformerLayer(
        64,
        96,
        4,
        layer_type="decoder",
        window_size=(3, 0),
        softcap=5.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    attention = te.MultiheadAttention(
        64,
        4,
        num_gqa_groups=2,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        qk_norm_type="RMSNorm",
        softmax_type="learnable",
        attention_dropout=0.0,
    )
    other = te.LayerNormLinear(64, 48, params_dtype=torch.bfloat16)
    parts = {
        "norm": te.LayerNorm(64),
        "rms_norm": te.RMSNorm(64, zero_centered_gamma=True),
        "layernorm_linear": te.LayerNormLinear(64, 48, normalization="RMSNorm"),
        "layernorm_mlp": te.LayerNormMLP(64, 96, activation="swiglu"),
        "sequential": te.ops.Sequential(te.ops.Linear(64, 48), te.ops.GELU()),
        "quantized": quantized,
        "converted": converted,
        "bfloat16_layer": Called(other, half),
        "bfloat16_mlp": Called(te.LayerNormMLP(64, 96, params_dtype=torch.bfloat16), half),
        "grouped_mxfp8": Called(te.GroupedLinear(3, 40, 48), grouped),
        "grouped_nvfp4": Called(te.GroupedLinear(3, 40, 48), grouped),
        "grouped_quantized": Called(odd, grouped),
        "writes_to_views": Called(torch.nn.Linear(64, 48), written),
        "undrawn": Called(torch.nn.Linear(64, 48), undrawn),
        "router": Called(torch.nn.Identity(), routed),
        "cross_attention": Called(decoder, decoded),
        "packed_attention": Called(attention, packed),
    }
    recipes: dict[str, recipe.Recipe | None] = dict.fromkeys(parts, CURRENT)
    recipes |= {"quantized": MX, "converted": None, "bfloat16_mlp": RECIPES["block"]}
    recipes |= {"grouped_mxfp8": MX, "grouped_nvfp4": RECIPES["nvfp4"], "packed_attention": MX}
    both = linears | parts
    return Each(both, {f"linear_{name}": one for name, one in RECIPES.items()} | recipes).eval()


class Compared:
    """A model, its files, and what both give for three inputs in a row; the files are written once.

    Each file holds eight layers: onnxscript looks through all nodes of a file for each of them.
    """

    def __init__(self, model: Each, folder: Path) -> None:
        self.model, names = model, list(model.parts)
        self.inputs = [(torch.randn(32, 64),) for _ in range(3)]
        with torch.no_grad(), te.use_backend("reference"):
            self.wants = [dict(zip(names, model(*one), strict=True)) for one in self.inputs]
        before, generator = bits_of(model), torch.get_rng_state()
        eights = [names[start : start + 8] for start in range(0, len(names), 8)]
        self.paths = [folder / f"{some[0]}.onnx" for some in eights]
        for some, path in zip(eights, self.paths, strict=True):
            part = Each({name: model.parts[name] for name in some}, model.recipes)
            to_onnx(part.eval(), (torch.ones(32, 64),), path)
        self.is_unchanged = is_as_before(model, before)
        self.draws_nothing = torch.equal(torch.get_rng_state(), generator)
        by_file = zip(*(run(path, self.inputs) for path in self.paths), strict=True)
        self.results = [dict(zip(names, chain(*one), strict=True)) for one in by_file]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return Compared(layers(), tmp_path_factory.mktemp("layers"))


def test_layers_equal_forward_for_inputs_in_a_row(compared: Compared) -> None:
    rows = list(zip(compared.results, compared.wants, strict=True))
    distances = {
        name: max(distance(results[name], wants[name]) for results, wants in rows)
        for name in compared.model.parts
    }
    assert {name: far for name, far in distances.items() if not far < BOUND} == {}


def test_a_linear_is_within_the_bound_of_its_sums(compared: Compared) -> None:
    for name in (f"linear_{name}" for name in RECIPES):
        layer: Any = compared.model.parts[name]
        for (x,), results, wants in zip(
            compared.inputs, compared.results, compared.wants, strict=True
        ):
            # A code is up to an eighth (e2m1: a quarter) above its value, in each operand.
            magnitudes = 1.25**2 * (x.abs() @ layer.weight.abs().t()) + layer.bias.abs()
            bound = 2 * 64 * 2.0**-24 * magnitudes + 2.0**-23 * wants[name].abs()
            assert bool(((results[name] - wants[name]).abs() <= bound).all()), name


def test_the_model_is_unchanged(compared: Compared) -> None:
    assert compared.is_unchanged


def test_no_random_numbers_are_drawn(compared: Compared) -> None:
    assert compared.draws_nothing


def test_weights_are_stored_as_codes_alone(compared: Compared) -> None:
    held = {one.name: one.data_type for one in onnx.load(compared.paths[0]).graph.initializer}
    weights = {name: kind for name, kind in held.items() if "linear_mxfp8.weight" in name}
    kinds = {name.rpartition("weight_")[2]: kind for name, kind in weights.items()}
    float8, float32 = onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT
    assert kinds == {"values": float8, "scale_inv": float32}


def test_inputs_are_quantized_by_nodes(compared: Compared) -> None:
    kinds = {node.op_type for node in onnx.load(compared.paths[0]).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear", "MatMul"} <= kinds


def test_one_file_takes_any_number_of_rows(tmp_path: Path) -> None:
    names, path = ("mxfp8", "nvfp4"), tmp_path / "linears.onnx"
    model = Each({name: te.Linear(64, 48) for name in names}, RECIPES).eval()
    rows = {0: torch.export.Dim("rows")}
    to_onnx(model, (torch.randn(32, 64),), path, dynamic_shapes=(rows,))
    inputs = [(torch.randn(count, 64),) for count in (5, 40, 32)]
    assert max(map(max, distances(path, model, inputs))) < BOUND


class Weighted(torch.nn.Module):
    """The sum of two inputs, one of them doubled."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 2 * y


def test_an_input_that_is_given_twice_is_two(tmp_path: Path) -> None:
    model, path, x = Weighted().eval(), tmp_path / "sum.onnx", torch.randn(4)
    to_onnx(model, (x, x), path)
    inputs = [(torch.randn(4), torch.randn(4)) for _ in range(3)]
    assert max(map(max, distances(path, model, inputs))) < BOUND


MIXED = recipe.PerLayer(
    {"*qkv": CURRENT, "*proj": RECIPES["nvfp4"], "*layernorm_mlp": MX}, default=RECIPES["block"]
)


class Model(torch.nn.Module):
    """A Transformer layer whose parts have several recipes, with rotary embedding, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = te.TransformerLayer(32, 64, 4, num_gqa_groups=2, activation="swiglu")
        self.rotary = te.RotaryPositionEmbedding(8)
        self.experts = te.GroupedLinear(3, 32, 48)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x, rotary_pos_emb=self.rotary(x.shape[0]))
        return y, self.experts(y.flatten(0, 1), [4, 0, 12])


def test_a_file_of_no_rows_returns_none(tmp_path: Path) -> None:
    both = Each(
        {"current": te.Linear(64, 48), "nvfp4": te.Linear(64, 48)},
        {"current": CURRENT, "nvfp4": RECIPES["nvfp4"]},
    ).eval()
    x = torch.randn(0, 64)
    to_onnx(both, (x,), tmp_path / "model.onnx")
    (results,) = run(tmp_path / "model.onnx", [(x,)])
    assert [result.shape for result in results] == [(0, 48), (0, 48)]


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], Any]:
    """How far the file of a model with a Transformer layer is from it, for inputs in a row, and
    its nodes."""
    torch.manual_seed(0)
    model, x = te.prepare(Model().eval()), torch.randn(8, 2, 32)
    path = tmp_path_factory.mktemp("transformer") / "model.onnx"
    to_onnx(model, (x,), path, MIXED)
    inputs = [(torch.randn(8, 2, 32),) for _ in range(3)]
    return distances(path, model, inputs, MIXED), onnx.load(path).graph.node


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1], ids=["transformer_layer", "grouped_linear"])
def test_a_transformer_model_equals_forward(transformer: Any, at: int) -> None:
    assert max(one[at] for one in transformer[0]) < BOUND


@pytest.mark.slow
def test_attention_multiplies_in_float32(transformer: Any) -> None:
    nodes = transformer[1]
    assert "MatMul" in {node.op_type for node in nodes}
    targets = {one.i for node in nodes if node.op_type == "Cast" for one in node.attribute}
    assert onnx.TensorProto.DOUBLE not in targets


# What is refused, by name


def refused(tmp_path: Path, model: torch.nn.Module, chosen: Any = None, **keywords: Any) -> None:
    path, before = tmp_path / "model.onnx", bits_of(model)
    try:
        to_onnx(model.eval(), (torch.randn(8, 64),), path, chosen, **keywords)
    finally:
        assert not path.exists()
        assert is_as_before(model, before)


class Writing(torch.nn.Module):
    """Writes a buffer, a parameter or its input when it runs."""

    def __init__(self, write: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.write = write
        self.layer = te.Linear(64, 64)
        with te.quantized_model_init(recipe=CURRENT):
            self.quantized = te.Linear(64, 64)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        result: torch.Tensor = self.layer(x) + self.quantized(x) + self.count[0]
        return result


WRITES: dict[str, tuple[str, Callable[[Any, torch.Tensor], object]]] = {
    "view": ("count", lambda model, x: model.count[0].add_(1)),
    "parameter": ("layer.weight", lambda model, x: model.layer.weight.t().mul_(2)),
    "quantized": ("quantized.weight", lambda model, x: model.quantized.weight.copy_(x.new_ones(1))),
    "input": ("x", lambda model, x: x[:1].zero_()),
    "data": ("count", lambda model, x: model.count.data.add_(1)),
    "parameter_data": ("layer.weight", lambda model, x: model.layer.weight.data.mul_(2)),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_model_that_writes_state_is_refused(tmp_path: Path, kind: str) -> None:
    name, write = WRITES[kind]
    with pytest.raises(UnsupportedError, match=rf"the model writes '{name}' when it runs"):
        refused(tmp_path, Writing(write))


def test_an_assignment_to_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"assigns to \.data of a tensor \[3\]"):
        refused(tmp_path, Writing(lambda model, x: setattr(model.count, "data", model.count + 1)))


SETS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "'calls' (0 before, 1 after)": lambda model, x: setattr(model, "calls", model.calls + 1),
    "'seen[0]' (absent before, 8 after)": lambda model, x: model.seen.append(len(x)),
    "'layer.is_ready' (absent before, True after)": (
        lambda model, x: setattr(model.layer, "is_ready", True)
    ),
}


@pytest.mark.parametrize("change", SETS)
def test_a_model_that_changes_a_number_is_refused(tmp_path: Path, change: str) -> None:
    model: Any = Writing(SETS[change])
    model.calls, model.seen = 0, []
    with pytest.raises(UnsupportedError, match=re.escape(f"forward changes {change}")):
        refused(tmp_path, model)
    assert (model.calls, hasattr(model.layer, "is_ready")) == (0, False)


def test_a_model_keeps_no_tensor_of_the_export(tmp_path: Path) -> None:
    model = Writing(lambda model, x: setattr(model, "last", x)).eval()
    with pytest.warns(UserWarning, match=r"self\.last was assigned during export"):
        to_onnx(model, (torch.randn(8, 64),), tmp_path / "model.onnx", CURRENT)
    assert not hasattr(model, "last")


DRAWS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "rand_like": lambda layer, x: layer(x + torch.rand_like(x)),
    "native_dropout": lambda layer, x: functional.dropout(layer(x), 0.5, training=True),
    "scaled_dot_product_attention": lambda layer, x: functional.scaled_dot_product_attention(
        x, layer(x), x, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_model_that_draws_random_numbers_is_refused(tmp_path: Path, name: str) -> None:
    model = torch.nn.Sequential(te.Linear(64, 64), Called(te.Linear(64, 64), DRAWS[name]))
    with pytest.raises(UnsupportedError, match=rf"to_onnx of '1': aten\.{name}\.default draws"):
        refused(tmp_path, model)


def test_a_kv_cache_is_refused(tmp_path: Path) -> None:
    cache = te.InferenceParams(2, 16, num_heads_kv=4, head_dim_k=16, dtype=torch.float32)
    cache.pre_step({"one": 4, "other": 4})
    layer = te.MultiheadAttention(64, 4, attention_dropout=0.0, layer_number=1)
    with pytest.raises(UnsupportedError, match="without inference_params"):
        refused(
            tmp_path,
            Called(layer, lambda one, x: one(x.reshape(4, 2, 64), inference_params=cache)),
        )
    assert not cache.cache_manager.cache


def test_delayed_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="delayed scaling is not offered"):
        refused(tmp_path, te.Linear(64, 64), recipe.DelayedScaling())


def test_a_format_that_onnx_lacks_is_refused(tmp_path: Path) -> None:
    spec = te.backend_api.OperandSpec("hif8", (0, 0), 32768.0)
    assert te.formats.by_name("hif8")
    text = operands.refusal_of(spec)
    assert text is not None
    assert "no type that holds hif8" in text


def test_counted_nonfinite_values_are_refused(tmp_path: Path) -> None:
    chosen = recipe.Float8CurrentScaling(nonfinite="propagate")
    with pytest.raises(UnsupportedError, match="propagate"):
        refused(tmp_path, te.Linear(64, 64), chosen)


def test_a_refused_layer_is_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(te.Linear(64, 64), te.Linear(64, 64))
    chosen = recipe.NVFP4BlockScaling(nvfp4_4over6="weights")
    with pytest.raises(UnsupportedError, match=r"to_onnx of '0': four_over_six"):
        refused(tmp_path, model, chosen)


def test_a_monitored_layer_is_refused(tmp_path: Path) -> None:
    model = te.Linear(64, 64)
    with te.monitor(model), pytest.raises(UnsupportedError, match="monitored"):
        refused(tmp_path, model, CURRENT)


def test_a_training_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperandError, match=r"model\.eval\(\)"):
        to_onnx(te.Linear(64, 64), (torch.randn(8, 64),), tmp_path / "model.onnx")


def test_a_model_elsewhere_is_refused(tmp_path: Path) -> None:
    layer = te.Linear(64, 64, device="meta").eval()
    with pytest.raises(OperandError, match=r"'weight' is on meta.*model\.cpu\(\)"):
        to_onnx(layer, (torch.randn(8, 64),), tmp_path / "model.onnx")


def test_an_opset_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="opset_version=19"):
        refused(tmp_path, te.Linear(64, 64), opset_version=19)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    absent = functools.partial(lambda name: None if name == "onnxscript" else real(name))
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(ImportError, match="pip install onnxscript"):
        refused(tmp_path, te.Linear(64, 64))


@pytest.mark.parametrize("chosen", ["current", "none"])
def test_a_file_that_torch_writes_within_onnx_export_is_that_of_to_onnx(
    chosen: str, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(te.Linear(32, 32), torch.nn.ReLU()).eval()
    x, recipe_of = torch.randn(4, 32), RECIPES[chosen]
    ours = to_onnx(model, (x,), tmp_path / "ours.onnx", recipe_of)
    before = torch.onnx.export
    with te.autocast(enabled=recipe_of is not None, recipe=recipe_of), te.onnx_export(enabled=True):
        theirs = torch.onnx.export(model, x, str(tmp_path / "theirs.onnx"), dynamo=True)
    assert torch.onnx.export is before
    assert theirs.model_proto.graph.node == ours.model_proto.graph.node
    both = [run(tmp_path / name, [[x]]) for name in ("ours.onnx", "theirs.onnx")]
    assert torch.equal(both[0][0][0], both[1][0][0])


def test_onnx_export_leaves_other_models_to_torch_and_refuses_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **options: calls.append(args))
    plain = torch.nn.Linear(4, 4)
    with te.onnx_export(enabled=True):
        torch.onnx.export(plain, (torch.ones(1, 4),), str(tmp_path / "x.onnx"))
        for options in ({"dynamo": False}, {"custom_translation_table": {}}):
            with pytest.raises(UnsupportedError, match=next(iter(options))):
                torch.onnx.export(te.Linear(32, 32), (torch.ones(1, 32),), "x.onnx", **options)
    with te.onnx_export():
        torch.onnx.export(plain, ())
    assert [call[0] for call in calls] == [plain, plain]
