"""``quantize_``: a model whose weights are stored in low precision, for inference."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations
from transformers import (
    CompileConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import fp8core
from fp8core import OperandError, QuantizedTensor, RecipeError, UnsupportedError, recipe
from fp8core.chain.repeated import Repeated
from fp8core.conversion import experts
from fp8core.modules.layers import grouped_linear
from fp8core.recipe import Recipe
from tests import recording_backend
from tests.conversion.hugging_face import SIZES, TOKENS, gpt2, llama, logits, train

torch.set_num_threads(1)

RECIPES: dict[str, Recipe] = {name: recipe.by_name(name) for name in recipe.names()}
RECIPES |= {
    f"weight_only_{name}": recipe.WeightOnly(name) for name in ("current", "rowwise", "block")
}
DYNAMIC = [name for name, chosen in RECIPES.items() if not chosen.delayed()]


def sequential(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128)]
    return nn.Sequential(*layers).to(dtype).eval()


def own() -> nn.Module:
    torch.manual_seed(0)
    layer = fp8core.TransformerLayer(
        128, 256, 4, fuse_qkv_params=True, params_dtype=torch.bfloat16, attn_input_format="bshd"
    )
    return layer.eval()


def stored_in(model: nn.Module) -> dict[str, QuantizedTensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "torch": (sequential, torch.randn(4, 128, dtype=torch.bfloat16)),
    "own": (own, torch.randn(2, 8, 128, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("kind", MODELS)
def test_it_computes_what_the_converted_model_computes(kind: str, name: str) -> None:
    make, x = MODELS[kind]
    plain, stored = make(), make()
    fp8core.convert(plain, RECIPES[name])
    report = fp8core.quantize_(stored, RECIPES[name])
    with torch.no_grad():
        expected = plain(x)
    result = stored(x)  # no parameter requires a gradient
    assert torch.equal(result, expected)
    assert not result.requires_grad
    weights = stored_in(stored)
    assert set(weights) == set(report.stored)
    assert len(weights) == {"torch": 2, "own": 4}[kind]
    for weight in weights.values():
        assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    before, after = report.num_bytes
    assert after == sum(parameter.nbytes for parameter in stored.parameters()) < 0.6 * before


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_llama_generates_as_the_converted_one(name: str) -> None:
    plain, stored = llama().eval(), llama().eval()
    fp8core.convert(plain, RECIPES[name])
    fp8core.quantize_(stored, RECIPES[name])
    assert torch.equal(logits(stored), logits(plain))
    options = {"attention_mask": torch.ones(1, 4), "max_new_tokens": 6, "do_sample": False}
    tokens = [model.generate(TOKENS[:1, :4], **options) for model in (plain, stored)]
    assert torch.equal(*tokens)


def test_memory_is_freed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]).eval()
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    cast = QuantizedTensor.of.__func__  # type: ignore[attr-defined]  # of a class method

    def counted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        alive.append(sum(weight() is not None for weight in weights))
        return cast(cls, *args, **kwargs)

    monkeypatch.setattr(QuantizedTensor, "of", classmethod(counted))
    fp8core.quantize_(model, "rowwise")
    assert alive == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("name", ["rowwise", "block", "mxfp8", "current"])
def test_a_gradient_through_a_layer_is_refused_by_name(name: str) -> None:
    model = sequential()
    fp8core.quantize_(model, RECIPES[name])
    with pytest.raises(OperandError, match=r"'0' .*stored for inference, in rows\s+alone"):
        model(torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True))


def test_gradients_go_through_weights_alone() -> None:
    """With those of the rounded weights in high precision."""
    model, x = sequential(), torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    fp8core.quantize_(model, RECIPES["weight_only_block"])
    plain = fp8core.unconvert(copy.deepcopy(model))
    factors = torch.randn(4, 128)
    grads = [torch.autograd.grad((each(x) * factors).sum(), x)[0] for each in (model, plain)]
    assert (grads[0] - grads[1]).abs().max() <= 2**-6 * grads[1].abs().max()


def test_unconvert_restores_classes_and_what_required_gradients() -> None:
    model, plain = sequential(), sequential()
    model[3].bias.requires_grad_(False)
    fp8core.quantize_(model, "block")
    stored = model[0].weight
    assert not any(parameter.requires_grad for parameter in model.parameters())
    fp8core.unconvert(model)
    assert type(model[0]) is nn.Linear
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, stored.dequantize())
    assert not any(isinstance(value, torch.Tensor) for value in vars(model[0].weight).values())
    differing = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert differing == ["3.bias"]
    assert torch.equal(model[3].weight, plain[3].weight)
    fp8core.quantize_(model, "block")
    assert torch.equal(model[0].weight.dequantize(), stored.dequantize())


@pytest.mark.parametrize("make", [llama, own])
def test_an_unconverted_model_trains_with_delayed_scales(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    attributes = [vars(module).keys() for module in make().modules()]
    fp8core.quantize_(model, "rowwise")
    fp8core.unconvert(model)
    assert [vars(module).keys() for module in model.modules()] == attributes
    fp8core.convert(model.train(), "delayed")
    x = TOKENS if make is llama else torch.randn(2, 8, 128, dtype=torch.bfloat16)
    for _ in range(2):
        y = model(x)
        (y if isinstance(y, torch.Tensor) else y.logits).sum().backward()
    scales = [scale for name, scale in model.named_buffers() if name.endswith("scale_fwd")]
    assert scales
    assert all(scale[0] != 1 for scale in scales)


def test_a_converted_model_is_stored_by_its_recipe() -> None:
    model, x = sequential(), torch.randn(4, 128, dtype=torch.bfloat16)
    fp8core.convert(model, "mxfp8")
    with torch.no_grad():
        expected = model(x)
    with pytest.raises(RecipeError, match=r"converted, with the recipe MXFP8BlockScaling\(\)"):
        fp8core.quantize_(model, "block")
    assert fp8core.quantize_(model).conversion is None
    assert torch.equal(model(x), expected)


def test_arguments_choose_weights_of_a_converted_model_too() -> None:
    model, other = llama().eval(), llama().eval()
    for each in (model, other):
        fp8core.convert(each, "rowwise")
    report = fp8core.quantize_(model, skip="mlp")
    assert len(report.stored) == 8
    assert not any("mlp" in name for name in report.stored)
    assert set(report.high_precision.values()) == {"named in skip"}
    report = fp8core.quantize_(other, filter=lambda module, path: path.endswith("q_proj"))
    assert len(report.stored) == 2
    assert set(report.high_precision.values()) == {"the filter leaves it out"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip": "mpl"}, r"convert\(skip='mpl'\): no layer has that.*Did you mean 'mlp'"),
        ({"filter": ["attn"]}, r"convert\(filter='attn'\): no layer has that"),
        ({"filter": 5}, "expected a function or patterns"),
        ({"skip": 5}, "expected patterns"),
        ({"fuse": False}, "fuse=False: the model is converted, model.layers.0, "),
        ({"rms_norms": False}, "rms_norms=False: the model is converted, model.layers.0.input"),
    ],
)
def test_arguments_that_a_converted_model_cannot_follow_are_refused(
    options: dict[str, Any], said: str
) -> None:
    model = llama().eval()
    fp8core.convert(model, "rowwise")
    with pytest.raises(RecipeError, match=f"(?s){said}"):
        fp8core.quantize_(model, **options)
    assert not stored_in(model)


def test_delayed_scales_of_training_are_used_and_stay() -> None:
    model, x = llama(), TOKENS
    fp8core.convert(model, "delayed")
    train(model, 3, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = logits(model)
    scales = {n: b.clone() for n, b in model.named_buffers() if n.endswith("scale_fwd")}
    fp8core.quantize_(model)
    # The weight's scale follows from its present amax, not from those of training.
    torch.testing.assert_close(logits(model), expected, rtol=0.05, atol=0.02)
    model(x)  # with gradients on
    assert scales
    assert all(torch.equal(model.get_buffer(name), scale) for name, scale in scales.items())


def test_delayed_scaling_without_scales_is_refused() -> None:
    model = sequential()
    with pytest.raises(RecipeError, match=r"'0' .* the layer has\s+none.*calibrating=True"):
        fp8core.quantize_(model, "delayed")
    assert type(model[0]) is nn.Linear


def test_scales_of_a_calibration_are_used() -> None:
    model, x = sequential(), torch.randn(4, 128, dtype=torch.bfloat16)
    chosen = recipe.DelayedScaling()
    fp8core.convert(model, chosen)
    with torch.no_grad(), fp8core.autocast(enabled=False, calibrating=True, recipe=chosen):
        model(x)
    fp8core.quantize_(model)
    assert (
        torch.nn.functional.cosine_similarity(model(x).float(), sequential()(x).float()).min()
        > 0.99
    )


def test_tied_weights_stay_and_are_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    report = fp8core.quantize_(model.eval(), "rowwise")
    assert report.stored == ("c.weight",)
    assert set(report.high_precision.values()) == {"several layers have this weight"}
    assert model["b"].weight is model["a"].weight
    assert "not stored: 2 weight (a.weight, b.weight): several layers" in str(report)


def test_a_tied_head_and_embeddings_stay() -> None:
    model = llama()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    report = fp8core.quantize_(model.eval(), "rowwise")
    assert len(report.stored) == 14
    assert type(model.lm_head.weight) is nn.Parameter


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_factors_of_adapters_stay_and_work() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config).eval()
    plain = copy.deepcopy(model)
    report = fp8core.quantize_(model, "rowwise")
    assert len(report.stored) == 14
    assert not any("lora" in name for name in report.stored)
    fp8core.convert(plain, "rowwise")
    assert torch.equal(logits(model), logits(plain))


def test_experts_are_stored_where_their_scales_are_their_own() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    plain, tensorwise = copy.deepcopy(model), copy.deepcopy(model)
    report = fp8core.quantize_(model, "rowwise")
    assert sum("experts" in name for name in report.stored) == 4
    fp8core.convert(plain, "rowwise")
    assert torch.equal(logits(model), logits(plain))
    left = fp8core.quantize_(tensorwise, "current").high_precision
    assert set(left.values()) == {"the scales of its experts would be others than by themselves"}


def mixture(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mixtral":
        sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
        return MixtralForCausalLM(MixtralConfig(**sizes)).bfloat16().eval()
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**SIZES, **sizes, head_dim=16)
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


def on_device(patch: pytest.MonkeyPatch) -> None:
    """Have the numbers of rows of experts be on a device that the host does not read."""
    for module in (grouped_linear, experts):
        patch.setattr(module, "stays_on_device", lambda sizes: True)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("chosen", [recipe.WeightOnly("rowwise"), "rowwise"], ids=["alone", "both"])
def test_experts_are_generated_with_by_numbers_on_the_device(
    kind: str, chosen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = mixture(kind), torch.arange(7)[None]
    assert sum("experts" in name for name in fp8core.quantize_(model, chosen).stored) == 4
    want = model.generate(tokens, max_new_tokens=6, do_sample=False)
    on_device(monkeypatch)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), want)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(tokens).logits, model(tokens).logits)


def test_experts_see_what_becomes_of_stored_weights() -> None:
    """Their parts are made once: of the memory that the weight has, which goes with it."""
    model = mixture("mixtral")
    fp8core.quantize_(model, recipe.WeightOnly("rowwise"))
    before = logits(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for one in (copied, pickled):
        assert torch.equal(logits(one), before)
        for layer in one.model.layers:
            layer.mlp.experts.down_proj.tensors()[1].zero_()  # the scales
        assert not torch.equal(logits(one), before)
    assert torch.equal(logits(model), before)
    copied.load_state_dict(model.state_dict())
    assert torch.equal(logits(copied), before)
    codes = weakref.ref(copied.model.layers[0].mlp.experts.down_proj.tensors()[0])
    copied.to("meta")
    gc.collect()
    assert codes() is None
    fp8core.unconvert(model)
    assert logits(model).isfinite().all()


def test_stored_experts_take_another_dtype_as_stored_linears_do() -> None:
    """Their codes stay: ``to`` changes the dtype in which they are decoded alone."""
    model = mixture("mixtral")
    fp8core.quantize_(model, "rowwise")
    before, stored = logits(model), model.model.layers[0].mlp.experts.down_proj
    codes = [part.clone() for part in stored.tensors()]
    assert logits(model.float()).dtype == stored.dtype == torch.float32
    assert torch.equal(logits(model.bfloat16()), before)
    assert model.model.layers[0].mlp.experts.down_proj is stored
    assert all(map(torch.equal, stored.tensors(), codes))


def test_a_stored_model_takes_another_dtype_whatever_a_trace_left_of_it() -> None:
    """Traces of torch.compile leave weak references to parameters in circles."""
    model = sequential()
    fp8core.quantize_(model, "rowwise")
    circle: dict[str, object] = {"weight": weakref.ref(model[0].weight)}
    circle["self"] = circle
    del circle
    assert model.float()[0].weight.dtype == torch.float32


@pytest.mark.parametrize("convert", [fp8core.quantize_, fp8core.convert])
def test_a_layer_adds_the_bias_that_it_has_by_now(convert: Callable[..., Any]) -> None:
    x, bias = torch.randn(4, 128, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
    for kinds in ((None, bias), (bias, None), (bias, None, 2 * bias)):
        model = sequential()[0]
        model.bias = None if kinds[0] is None else nn.Parameter(kinds[0].clone())
        convert(model, "rowwise")
        for kind in kinds:
            model.bias = None if kind is None else nn.Parameter(kind.clone(), requires_grad=False)
            fresh = sequential()[0]
            fresh.bias = model.bias
            convert(fresh, "rowwise")
            with torch.no_grad():
                for _ in range(3):
                    assert torch.equal(model(x), fresh(x))


def test_weights_that_are_no_parameters_stay_and_are_named() -> None:
    model = sequential()
    fp8core.convert(model, "rowwise")
    parametrizations.spectral_norm(model[2])
    report = fp8core.quantize_(model)
    assert report.stored == ("0.weight",)
    assert report.high_precision == {"2.weight": "computed by a parametrization"}


def test_the_transposed_weights_of_gpt2_are_refused_by_name() -> None:
    model = gpt2().eval()
    with pytest.raises(OperandError, match=r"no weight would be stored.*transposed weight"):
        fp8core.quantize_(model, "rowwise")
    assert type(model.transformer.h[0].attn.c_attn).__name__ == "Conv1D"


def test_sizes_that_blocks_do_not_divide_stay_and_are_named() -> None:
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48)).eval()
    report = fp8core.quantize_(model, "mxfp8")
    assert report.stored == ("1.weight",)  # blocks lie along its 64 columns
    assert "columns must be multiples of 32" in report.high_precision["0.weight"]


def test_what_a_recipe_leaves_in_high_precision_stays() -> None:
    mixed = recipe.PerLayer({"0": None}, default="rowwise")
    report = fp8core.quantize_(sequential(), mixed)
    assert report.stored == ("2.weight",)


def in_training(model: nn.Module) -> object:
    return model.train()


def with_gradients(model: nn.Module) -> object:
    return model(torch.randn(4, 128, dtype=torch.bfloat16)).sum().backward()


def on_meta(model: nn.Module) -> object:
    return model.to("meta")


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "training": (in_training, r"in training mode. Call model.eval\(\)"),
    "gradients": (with_gradients, "0.weight, 0.bias, .*have gradients"),
    "optimizer": (lambda m: torch.optim.AdamW(m.parameters()), ": AdamW steps '0.weight'"),
    "masters": (
        lambda m: torch.optim.SGD(fp8core.MasterWeights(m).parameters(), lr=0.1),
        ": SGD steps '0.weight'",
    ),
    "meta": (on_meta, "are on meta, without values"),
}


@pytest.mark.parametrize("state", REFUSED)
def test_a_model_in_training_is_refused(state: str) -> None:
    bring, said = REFUSED[state]
    model = sequential()
    alive = bring(model)
    with pytest.raises(OperandError, match=said):
        fp8core.quantize_(model, "rowwise")
    assert type(model[0]) is nn.Linear
    del alive


def test_an_optimizer_of_before_is_no_obstacle() -> None:
    model = sequential()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.circle = optimizer  # type: ignore[attr-defined]
    del optimizer
    assert len(fp8core.quantize_(model, "rowwise").stored) == 2


def test_a_recipe_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8core_backends.reference.backend import ReferenceBackend

    def unsupported(self: object, desc: Any, device: torch.device) -> str | None:
        return "no such product" if desc.op == "gemm" and desc.low_precision else None

    monkeypatch.setattr(ReferenceBackend, "unsupported", unsupported)
    model = sequential()
    fp8core.dispatch.table.forget()
    refused = pytest.raises(UnsupportedError, match="no such product")
    with fp8core.use_backend("reference"), refused:
        fp8core.quantize_(model, "rowwise")
    assert type(model[0]) is nn.Linear
    fp8core.dispatch.table.forget()


def test_an_interrupted_call_leaves_no_model_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole, x = sequential(), sequential(), torch.randn(4, 128, dtype=torch.bfloat16)
    fp8core.quantize_(whole, "rowwise")
    expected = whole(x)
    cast, calls = QuantizedTensor.of.__func__, []  # type: ignore[attr-defined]

    def interrupted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return cast(cls, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(QuantizedTensor, "of", classmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            fp8core.quantize_(model, "rowwise")
    for part in (model, model[0], model[2]):
        with pytest.raises(OperandError, match=r"quantize_\(Sequential\) was interrupted"):
            part(x)
    fp8core.quantize_(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_stored_and_undone_by_themselves(copied: Callable[[Any], Any]) -> None:
    model, x = sequential(), torch.randn(4, 128, dtype=torch.bfloat16)
    fp8core.quantize_(model, "block")
    another = copied(model)
    assert torch.equal(another(x), model(x))
    fp8core.unconvert(another)
    assert type(another[0].weight) is nn.Parameter
    assert isinstance(model[0].weight, QuantizedTensor)


def test_a_copy_of_a_layer_takes_no_other_layer_with_it() -> None:
    model = sequential()
    fp8core.quantize_(model, "block")
    twin = copy.deepcopy(model[0])
    assert len(pickle.dumps(twin)) < 1.5 * model[0].weight.numel()
    fp8core.unconvert(twin)
    assert torch.equal(twin.weight, model[0].weight.dequantize())
    assert twin.weight.requires_grad
    assert twin.bias.requires_grad


def test_a_part_is_undone_by_itself() -> None:
    model, x = sequential(), torch.randn(4, 128, dtype=torch.bfloat16)
    fp8core.quantize_(model, "block")
    fp8core.unconvert(model[0])
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[2].weight, QuantizedTensor)
    fp8core.unconvert(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model(x).requires_grad


def test_its_state_dict_loads_into_another_one(tmp_path: Path) -> None:
    model, another = sequential(), sequential()
    with torch.no_grad():
        model[0].weight.mul_(2)
    for each in (model, another):
        fp8core.quantize_(each, "rowwise")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    another.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    assert torch.equal(another(x), model(x))


def test_weights_of_quantized_model_init_drop_their_columns() -> None:
    with fp8core.quantized_model_init(recipe="rowwise"):
        model = own()
    x = torch.randn(2, 8, 128, dtype=torch.bfloat16)
    with torch.no_grad(), fp8core.autocast(recipe="rowwise"):
        expected = model(x)
    codes = {name: weight.stored[0].data for name, weight in stored_in(model).items()}
    before, after = fp8core.quantize_(model, "rowwise").num_bytes
    assert after < 0.6 * before
    assert all(w.stored[0].data is codes[name] for name, w in stored_in(model).items())
    assert torch.equal(model(x), expected)
    fp8core.unconvert(model)
    assert len(stored_in(model)) == 4
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_heads_and_what_is_skipped_of_own_layers_stay() -> None:
    layers = {
        "fc": fp8core.Linear(64, 64),
        "up": fp8core.Linear(64, 64),
        "head": fp8core.Linear(64, 64),
    }
    model = nn.ModuleDict(layers).eval()
    report = fp8core.quantize_(model, "rowwise", skip="up")
    assert report.stored == ("fc.weight",)
    assert report.high_precision["up.weight"] == "named in skip"
    assert report.high_precision["head.weight"].startswith("output head")


def test_codes_of_another_recipe_are_refused() -> None:
    with fp8core.quantized_model_init(recipe="rowwise"):
        model = own()
    with pytest.raises(RecipeError, match=r"is stored as .* already, and the recipe"):
        fp8core.quantize_(model, "block")


@pytest.mark.parametrize("name", ["rowwise", "block"])
def test_it_saves_files_that_load_into_a_stored_model(name: str, tmp_path: Path) -> None:
    model = llama().eval().to(torch.bfloat16)
    fp8core.quantize_(model, name)
    fp8core.huggingface.save_pretrained(model, tmp_path)
    another = llama().eval().to(torch.bfloat16)
    loaded = fp8core.huggingface.load_pretrained(tmp_path, another, native=True)
    report = fp8core.quantize_(another, loaded.recipe)
    assert len(report.stored) == 14
    for (path, ours), theirs in zip(
        stored_in(model).items(), stored_in(another).values(), strict=True
    ):
        assert torch.equal(ours.dequantize(), theirs.dequantize()), path
    assert torch.equal(logits(another), logits(model))
    at_once = llama().eval().to(torch.bfloat16)
    assert len(fp8core.huggingface.load_quantized(tmp_path, at_once).stored) == 14
    assert torch.equal(logits(at_once), logits(model))  # norms are converted as well


@pytest.mark.parametrize("name", ["current", "rowwise", "block", "nvfp4"])
def test_files_of_weights_alone_say_so(name: str, tmp_path: Path) -> None:
    model = sequential()
    fp8core.quantize_(model, recipe.WeightOnly(name))
    fp8core.huggingface.save_pretrained(model, tmp_path)
    another = sequential()
    with torch.no_grad():
        for parameter in another.parameters():
            parameter.zero_()
    report = fp8core.huggingface.load_quantized(tmp_path, another)
    assert report.recipe.startswith("WeightOnly(")
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    if name == "nvfp4":  # the scale of the tensor goes through a reciprocal
        torch.testing.assert_close(another(x), model(x), rtol=2**-6, atol=2**-6)
    else:
        assert torch.equal(another(x), model(x))


@pytest.mark.parametrize("name", ["current", "rowwise", "block"])
def test_a_step_with_stored_weights_is_recorded_and_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording_backend.install(monkeypatch)
    ours, theirs = sequential(), sequential()
    for model in (ours, theirs):
        fp8core.quantize_(model, name)
    with torch.no_grad():
        for at in range(6):
            x = torch.randn(16, 128, dtype=torch.bfloat16)
            with fp8core.use_backend(recording_backend.NAME):
                result = ours(x)
            assert torch.equal(result, theirs(x))
            if at == 3:  # other memory, and other values
                for model in (ours, theirs):
                    codes = model[0].weight.dequantize() * 2
                    stored = QuantizedTensor.of(codes, model[0].weight.plan)
                    model[0].weight = nn.Parameter(stored, requires_grad=False)
    for layer in (ours[0], ours[2]):
        (chain,) = layer._bindings.last[1].parts
        programs = [each for each in chain._programs.values() if isinstance(each, Repeated)]
        assert [each.is_recorded for each in programs] == [(True, False)]


@pytest.mark.parametrize("name", ["rowwise", "weight_only_block"])
def test_a_graph_of_torch_compile_reads_stored_weights(name: str) -> None:
    model, x = sequential(), torch.randn(4, 128, dtype=torch.bfloat16)
    fp8core.quantize_(model, RECIPES[name])
    expected = model(x)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("name", recipe.names())
def test_fake_tensors_are_trained_and_stored(name: str) -> None:
    """As where a tool asks for sizes alone; no value is read."""
    for mode in (FakeTensorMode(), contextlib.nullcontext()):  # in which nothing fake is left
        chosen = recipe.by_name(name)
        with mode:
            x = torch.randn(32, 64, dtype=torch.bfloat16)
            layer = fp8core.LayerNormMLP(64, 128, params_dtype=torch.bfloat16)
            attention = fp8core.DotProductAttention(2, 32, attention_dropout=0.1)
            with fp8core.autocast(recipe=chosen):
                y = attention(*[layer(x).view(32, 1, 2, 32)] * 3)
            y.sum().backward()
            model = nn.Sequential(nn.Linear(64, 128, dtype=torch.bfloat16)).eval()
            if name != "delayed":
                fp8core.quantize_(model, chosen)
            outputs = y, layer.fc1_weight.grad, model(x)
        kind = FakeTensor if isinstance(mode, FakeTensorMode) else torch.Tensor
        assert [type(output) for output in outputs] == [kind] * 3
        assert [output.shape for output in outputs] == [(32, 1, 64), (128, 64), (32, 128)]


def test_transformers_save_pretrained_is_refused_by_name(tmp_path: Path) -> None:
    model = llama().eval()
    fp8core.quantize_(model, "rowwise")
    with pytest.raises(OperandError, match=r"fp8core.huggingface.save_pretrained\(model"):
        model.save_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["rowwise", "weight_only_rowwise", "converted"])
def test_generation_with_a_static_cache_is_one_graph_for_all_tokens(kind: str) -> None:
    """As transformers compiles it on CUDA by itself, here without a code generator."""
    model = llama().to(torch.bfloat16).eval()
    if kind == "converted":
        fp8core.convert(model, "current")
    else:
        fp8core.quantize_(model, RECIPES[kind])
    compiled = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    for length in (9, 5):
        inputs = {"inputs": TOKENS[:, :length], "attention_mask": torch.ones(len(TOKENS), length)}
        options = {**inputs, "max_new_tokens": 8, "do_sample": False}
        options["cache_implementation"] = "static"
        tokens = model.generate(**options, compile_config=compiled)
        assert torch.equal(tokens, model.generate(**options, disable_compile=True))
        assert tokens.shape[1] == length + 8
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
