"""Models as ONNX files, run by onnxruntime, against fp8core's forward."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

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


def run(path: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(str(path))
    names = [one.name for one in session.get_inputs()]
    given = dict(zip(names, (one.numpy() for one in inputs), strict=True))
    return [torch.from_numpy(one) for one in session.run(None, given)]


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


def layers() -> Each:
    """Every layer for an input ``[rows, 64]``, and linears of every recipe."""
    torch.manual_seed(0)
    linears: dict[str, torch.nn.Module] = {f"linear_{name}": te.Linear(64, 48) for name in RECIPES}
    with te.quantized_model_init(recipe=MX):
        quantized = te.Linear(64, 64)
    converted = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    te.convert(converted, filter=lambda module, name: True, recipe=CURRENT)
    half = te.LayerNormLinear(64, 48, params_dtype=torch.bfloat16)
    parts = {
        "norm": te.LayerNorm(64),
        "rms_norm": te.RMSNorm(64, zero_centered_gamma=True),
        "layernorm_linear": te.LayerNormLinear(64, 48, normalization="RMSNorm"),
        "layernorm_mlp": te.LayerNormMLP(64, 96, activation="swiglu"),
        "sequential": te.ops.Sequential(te.ops.Linear(64, 48), te.ops.GELU()),
        "quantized": quantized,
        "converted": converted,
        "bfloat16_layer": Called(
            half, lambda layer, x: layer(x.to(torch.bfloat16)).to(torch.float32)
        ),
    }
    recipes = dict.fromkeys(parts, CURRENT) | {"quantized": MX, "converted": None}
    both = linears | parts
    return Each(both, {f"linear_{name}": one for name, one in RECIPES.items()} | recipes).eval()


LAYERS = [*(f"linear_{name}" for name in RECIPES), "norm", "rms_norm", "layernorm_linear"]
LAYERS += ["layernorm_mlp", "sequential", "quantized", "converted", "bfloat16_layer"]


class Compared:
    """A model, its file, and what both give for one input; the file is written once."""

    def __init__(self, model: Each, path: Path) -> None:
        self.model, self.path, self.x = model, path, torch.randn(32, 64)
        before = {name: one.clone() for name, one in model.state_dict().items()}
        to_onnx(model, (torch.randn(32, 64),), path)
        self.unchanged = all(
            torch.equal(te_value(one), te_value(before[name]))
            for name, one in model.state_dict().items()
        )
        with torch.no_grad(), te.use_backend("reference"):
            self.want = dict(zip(model.parts, model(self.x), strict=True))
        self.results = dict(zip(model.parts, run(path, self.x), strict=True))


def te_value(one: torch.Tensor) -> torch.Tensor:
    return one.dequantize() if isinstance(one, te.QuantizedTensor) else one


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    path = tmp_path_factory.mktemp("layers") / "layers.onnx"
    return Compared(layers(), path)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_forward(compared: Compared, name: str) -> None:
    assert distance(compared.results[name], compared.want[name]) < BOUND


@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_is_within_the_bound_of_its_sums(compared: Compared, name: str) -> None:
    layer: Any = compared.model.parts[f"linear_{name}"]
    # A code is up to an eighth (e2m1: a quarter) above its value, in each operand.
    magnitudes = 1.25**2 * (compared.x.abs() @ layer.weight.abs().t()) + layer.bias.abs()
    bound = 2 * 64 * 2.0**-24 * magnitudes + 2.0**-23 * compared.want[f"linear_{name}"].abs()
    result, want = compared.results[f"linear_{name}"], compared.want[f"linear_{name}"]
    assert bool(((result - want).abs() <= bound).all())


def test_the_model_is_unchanged(compared: Compared) -> None:
    assert compared.unchanged


def test_weights_are_stored_as_codes_alone(compared: Compared) -> None:
    held = {one.name: one.data_type for one in onnx.load(compared.path).graph.initializer}
    weights = {name: kind for name, kind in held.items() if "linear_mxfp8.weight" in name}
    kinds = {name.rpartition("weight_")[2]: kind for name, kind in weights.items()}
    float8, float32 = onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT
    assert kinds == {"values": float8, "scale_inv": float32}


def test_inputs_are_quantized_by_nodes(compared: Compared) -> None:
    kinds = {node.op_type for node in onnx.load(compared.path).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear", "MatMul"} <= kinds


def test_one_file_takes_any_number_of_rows(tmp_path: Path) -> None:
    model, path = te.Linear(64, 48).eval(), tmp_path / "linear.onnx"
    rows = {0: torch.export.Dim.DYNAMIC}
    to_onnx(model, (torch.randn(32, 64),), path, MX, dynamic_shapes=(rows,))
    for count in (5, 40):
        x = torch.randn(count, 64)
        with torch.no_grad(), te.use_backend("reference"), te.autocast(recipe=MX):
            want = model(x)
        assert distance(run(path, x)[0], want) < BOUND


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
    assert [result.shape for result in run(tmp_path / "model.onnx", x)] == [(0, 48), (0, 48)]


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sequence[Any], ...]:
    """What a model with a Transformer layer gives, in fp8core and in onnxruntime, and its nodes."""
    torch.manual_seed(0)
    model, x = te.prepare(Model().eval()), torch.randn(8, 2, 32)
    path = tmp_path_factory.mktemp("transformer") / "model.onnx"
    to_onnx(model, (torch.randn(8, 2, 32),), path, MIXED)
    with torch.no_grad(), te.use_backend("reference"), te.autocast(recipe=MIXED):
        return model(x), run(path, x), onnx.load(path).graph.node


@pytest.mark.parametrize("at", [0, 1], ids=["transformer_layer", "grouped_linear"])
def test_a_transformer_model_equals_forward(transformer: Any, at: int) -> None:
    want, results, _ = transformer
    assert distance(results[at], want[at]) < BOUND


def test_attention_multiplies_in_float32(transformer: Any) -> None:
    nodes = transformer[2]
    assert "MatMul" in {node.op_type for node in nodes}
    targets = {one.i for node in nodes if node.op_type == "Cast" for one in node.attribute}
    assert onnx.TensorProto.DOUBLE not in targets


# What is refused, by name


def refused(tmp_path: Path, model: torch.nn.Module, chosen: Any = None, **keywords: Any) -> None:
    path = tmp_path / "model.onnx"
    try:
        to_onnx(model.eval(), (torch.randn(8, 64),), path, chosen, **keywords)
    finally:
        assert not path.exists()


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
    with pytest.raises(OperandError, match=r"'weight' is on meta.*model\.cpu\(\)"):
        refused(tmp_path, te.Linear(64, 64, device="meta"))


def test_an_opset_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="opset_version=19"):
        refused(tmp_path, te.Linear(64, 64), opset_version=19)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    absent = functools.partial(lambda name: None if name == "onnxscript" else real(name))
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(ImportError, match="pip install onnxscript"):
        refused(tmp_path, te.Linear(64, 64))
