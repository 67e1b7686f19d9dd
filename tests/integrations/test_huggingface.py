"""Models of transformers: quantized as they are loaded, with adapters of peft, in ``Trainer``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import fp8core
from fp8core import RecipeError
from fp8core.huggingface import Fp8CoreConfig
from fp8core.recipe import DelayedScaling, LayerRole, PerLayer, Recipe
from tests.conversion.hugging_face import gpt2, llama, logits, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]
DELAYED = DelayedScaling(amax_history_len=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama in high precision."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder)
    return folder


def load(folder: Path, *given: Any, **named: Any) -> Any:
    config = Fp8CoreConfig(*given, **named)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


@pytest.mark.parametrize("recipe", ["mxfp8", "current", "nvfp4", DELAYED], ids=str)
def test_a_loaded_model_computes_as_a_converted_one(saved: Path, recipe: Recipe | str) -> None:
    plain = LlamaForCausalLM.from_pretrained(saved)
    high = logits(plain)
    fp8core.convert(plain, recipe)
    torch.manual_seed(1)  # of stochastic rounding
    want = logits(plain)
    torch.manual_seed(1)
    got = logits(load(saved, recipe))
    assert torch.equal(got, want)
    assert not torch.equal(got, high)


def test_a_model_is_loaded_with_stored_weights(saved: Path, tmp_path: Path) -> None:
    model, converted = load(saved, "rowwise", stores_weights=True), load(saved, "rowwise")
    weights = [p for p in model.parameters() if isinstance(p, fp8core.QuantizedTensor)]
    assert len(weights) == 14
    assert torch.equal(logits(model), logits(converted))
    with pytest.raises(RecipeError, match="weights are stored in low precision"):
        model.save_pretrained(tmp_path)
    config = model.config.quantization_config
    assert Fp8CoreConfig.from_dict(config.to_dict()) == config
    assert not model.hf_quantizer.is_trainable
    assert type(model.dequantize().model.layers[0].mlp.up_proj) is nn.Linear


def test_a_loaded_model_trains_as_a_converted_one(saved: Path) -> None:
    plain = LlamaForCausalLM.from_pretrained(saved)
    fp8core.convert(plain, "mxfp8")
    losses = train(load(saved, "mxfp8"), 4)
    assert losses == train(plain, 4)
    assert losses[-1] < 0.8 * losses[0]


def test_the_report_is_an_attribute(saved: Path) -> None:
    report = load(saved, "mxfp8", skip=["down_proj"], rms_norms=True).fp8core_report
    assert len(report.converted) == 2 * 6 + 5
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert reasons["model.layers.0.mlp.down_proj"] == "named in skip"


def test_a_saved_model_is_loaded_in_its_recipe_and_with_its_scales(
    saved: Path, tmp_path: Path
) -> None:
    model = load(saved, DELAYED)
    train(model, 2)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)  # its config.json names the recipe
    want, got = model.state_dict(), again.state_dict()
    assert any(name.endswith("amax_history_fwd") for name in want)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert torch.equal(logits(again), logits(model))
    assert again.hf_quantizer.quantization_config == Fp8CoreConfig(DELAYED)


def test_a_dequantized_model_is_saved_as_one_that_never_was_quantized(
    saved: Path, tmp_path: Path
) -> None:
    model = load(saved, DELAYED)
    logits(model)
    model.dequantize().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not getattr(again, "is_quantized", False)
    assert torch.equal(logits(again), logits(LlamaForCausalLM.from_pretrained(saved)))


@pytest.mark.parametrize(
    "recipe",
    [
        "mxfp8",
        None,
        PerLayer({"*.down_proj": None, "*.up_proj": DELAYED}, default="mxfp8"),
        DelayedScaling(amax_history_len=4, fp8_format="e4m3"),
        fp8core.recipe.Float8CurrentScaling(
            fp8_gemm_fprop=fp8core.recipe.MMParams(use_split_accumulator=True)
        ),
    ],
    ids=str,
)
def test_a_config_survives_json(recipe: Recipe | str | None) -> None:
    config = Fp8CoreConfig(recipe, filter="mlp", skip=["up_proj"], modules_to_not_convert=["down"])
    written = json.loads(json.dumps(config.to_dict()))
    assert Fp8CoreConfig.from_dict(written) == config
    assert written["skip"] == ["up_proj", "down"]


def test_a_recipe_that_is_no_data_is_refused_by_save_pretrained(
    saved: Path, tmp_path: Path
) -> None:
    model = load(saved, PerLayer({LayerRole("linear"): "mxfp8"}))
    with pytest.raises(RecipeError, match=r"save_pretrained: .*cannot be written .*dequantize"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "mxpf8"}, "Did you mean 'mxfp8'"),
        ({"recipe": {"recipe": "DelayedScaling", "amax_len": 3}}, "has no field 'amax_len'"),
        ({"recipe": {"recipe": "Delayed"}}, "Did you mean 'DelayedScaling'"),
        ({"weight_block_size": [128, 128]}, "weight_block_size is not one of its arguments"),
        ({"skip": [3]}, "expected patterns of names"),
    ],
)
def test_a_config_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Fp8CoreConfig(**given)


def test_a_pattern_that_matches_nothing_fails_the_load(saved: Path) -> None:
    with pytest.raises(RecipeError, match=r"skip='dwn_proj'.*Did you mean 'down_proj'"):
        load(saved, "mxfp8", skip="dwn_proj")


def test_importing_the_package_imports_no_framework() -> None:
    code = (
        "import sys, fp8core.huggingface as own; print(dir(own));"
        "assert not {'transformers', 'safetensors'} & {*sys.modules}"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Fp8CoreConfig" in ran.stdout


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'Fp8CoreConfig'"):
        fp8core.huggingface.Fp8CoreConfg  # type: ignore[attr-defined]  # noqa: B018


peft = pytest.importorskip("peft", reason="peft is not installed")
# Of transformers' methods, which PEFT calls by their older names.
RECIPES = pytest.mark.parametrize("recipe", ["mxfp8", DELAYED], ids=["mxfp8", "delayed"])


def lora(*targets: str) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), lora_dropout=0.0)


def train_adapters(model: Any) -> list[float]:
    return train(model, 5, lr=2e-2)


@RECIPES
def test_adapters_of_a_converted_model_train_and_the_base_stays(recipe: Any) -> None:
    model = llama()
    fp8core.convert(model, recipe)
    adapted = peft.get_peft_model(model, lora("q_proj", "v_proj", "down_proj"))
    frozen = {n: p.detach().clone() for n, p in adapted.named_parameters() if not p.requires_grad}
    losses = train_adapters(adapted)
    assert losses[-1] < losses[0]
    assert frozen
    now = dict(adapted.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    base = model.model.layers[0].self_attn.q_proj.base_layer
    assert isinstance(base, fp8core.Linear)


def test_converted_after_as_before() -> None:
    first, second = llama(), llama()
    fp8core.convert(first, "mxfp8")
    torch.manual_seed(1)
    first = peft.get_peft_model(first, lora("q_proj", "v_proj"))
    torch.manual_seed(1)
    second = peft.get_peft_model(second, lora("q_proj", "v_proj"))
    fp8core.convert(second, "mxfp8")
    assert train_adapters(first) == train_adapters(second)


@pytest.mark.parametrize("is_native", [False, True], ids=["converted", "native"])
def test_merged_weights_are_the_base_and_the_product_of_the_factors(is_native: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind: Any = fp8core.Linear if is_native else nn.Linear
            self.fc = kind(32, 64, device="cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.fc(x)
            return result

    torch.manual_seed(0)
    model = Model()
    fp8core.convert(model, "mxfp8")
    adapted = own_layers(lora("fc"), model) if is_native else peft.get_peft_model(model, lora("fc"))
    layer, x = model.fc, torch.randn(32, 32)
    nn.init.normal_(layer.lora_B["default"].weight)
    base = layer.base_layer.weight.detach().clone()
    beside = adapted(x)
    layer.merge(safe_merge=True)
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.allclose(layer.base_layer.weight, base + 2 * product)
    merged = adapted(x)
    # Low precision of the sum, instead of the base alone: within the error of mxfp8.
    assert ((merged - beside).norm() / beside.norm()).item() < 0.05
    with fp8core.autocast(enabled=False):
        assert torch.allclose(merged_in_high_precision(model, x), adapted(x), atol=1e-5)
    layer.unmerge()
    assert torch.allclose(layer.base_layer.weight, base, atol=1e-6)
    assert type(layer.base_layer).__name__ == ("Linear" if is_native else "ConvertedLinear")


def merged_in_high_precision(model: Any, x: torch.Tensor) -> torch.Tensor:
    base = model.fc.base_layer
    return nn.functional.linear(x, base.weight, base.bias)


def own_layers(config: Any, model: nn.Module) -> Any:
    """Adapt fp8core's layers, which PEFT does not know by their class."""
    config._register_custom_module({fp8core.Linear: peft.tuners.lora.Linear})
    return peft.get_peft_model(model, config)


def test_merge_and_unload_gives_a_converted_model() -> None:
    model = llama()
    fp8core.convert(model, "mxfp8")
    adapted = peft.get_peft_model(model, lora("q_proj", "v_proj"))
    train_adapters(adapted)
    with fp8core.autocast(enabled=False):
        want = logits(adapted)
    merged = adapted.merge_and_unload()
    assert isinstance(merged.model.layers[0].self_attn.q_proj, fp8core.Linear)
    with fp8core.autocast(enabled=False):
        assert torch.allclose(logits(merged), want, atol=1e-5)
    keys = list(llama().state_dict())
    assert list(merged.state_dict()) == keys
    fp8core.unconvert(merged)
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear


def test_a_conv1d_of_gpt2_is_adapted_and_merged() -> None:
    model = gpt2()
    fp8core.convert(model, "mxfp8")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, config).eval()
    losses = train_adapters(adapted)
    assert losses[-1] < losses[0]
    with fp8core.autocast(enabled=False):
        want = logits(adapted)
        assert torch.allclose(logits(adapted.merge_and_unload()), want, atol=1e-5)


def test_adapters_are_saved_without_the_base_and_loaded(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    config = Fp8CoreConfig("mxfp8")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    adapted = peft.get_peft_model(base, lora("q_proj", "v_proj"))
    train_adapters(adapted)
    want = logits(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(again), want)


def test_adapters_on_a_model_loaded_by_a_config_train(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Fp8CoreConfig("current")
    )
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    losses = train_adapters(peft.get_peft_model(base, lora("q_proj", "v_proj")))
    assert losses[-1] < losses[0]


accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(16) * (index + 1)) % 61 + 3
        return {"input_ids": row, "labels": row}


class Losses:
    """A callback's log of losses."""

    def __init__(self, trainer: Trainer) -> None:
        self.entries = trainer.state.log_history

    def __iter__(self) -> Any:
        return (entry["loss"] for entry in self.entries if "loss" in entry)


def trained(
    model: Any, folder: Path, resume: Path | None = None, **named: Any
) -> tuple[Any, list[float]]:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    arguments = TrainingArguments(str(folder), **{**settings, **named})
    trainer = Trainer(model, arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer, list(Losses(trainer))


@RECIPES
def test_trainer_trains_a_converted_model(recipe: Any, tmp_path: Path) -> None:
    model = llama()
    fp8core.convert(model, recipe)
    _, losses = trained(model, tmp_path)
    assert losses[-1] < losses[0]
    assert "last run: " in repr(model.model.layers[0].mlp.up_proj)


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    """Of blocks along the features, so that rows of other microbatches change no scale."""
    whole, parts = llama(), llama()
    for model in (whole, parts):
        fp8core.convert(model, "mxfp8")
    data: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0}
    trained(whole, tmp_path, per_device_train_batch_size=4, **data)
    trained(parts, tmp_path, gradient_accumulation_steps=2, **data)
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3), name
    start = llama()
    moved = [
        not torch.equal(a, b) for a, b in zip(parts.parameters(), start.parameters(), strict=True)
    ]
    assert all(moved)


def test_trainer_resumes_with_the_delayed_scales(tmp_path: Path) -> None:
    whole, half, rest = llama(), llama(), llama()
    for model in (whole, half, rest):
        fp8core.convert(model, DELAYED)
        fp8core.prepare(model, DELAYED)  # so that a fresh model takes the scales of a checkpoint
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    want = trained(whole, tmp_path / "whole")[1]
    trained(half, tmp_path / "half", **saving)
    got = trained(rest, tmp_path / "rest", resume=tmp_path / "half" / "checkpoint-2")[1]
    assert got == want


def network() -> nn.Sequential:
    """Its second layer has a size that no block divides, among layers whose sizes blocks divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10), nn.Linear(10, 32), nn.LayerNorm(32))


@RECIPES
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_trains_a_model_converted_before_prepare(
    recipe: Any, mixed_precision: str, tmp_path: Path
) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    report = fp8core.convert(model, recipe)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    x = torch.randn(32, 32)
    for _ in range(6):
        loss = (model(x).float() - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    # Accelerate's own conversion ends at the first layer that 16 does not divide.
    assert [entry.name for entry in report.converted] == ["0", "1", "2", "3"]
    accelerator.save_state(str(tmp_path))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.backward(model(x).float().square().mean())
    optimizer.step()
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_accelerate_accumulates_over_microbatches() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    fp8core.convert(model, DELAYED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(32, 32)
    before = model[0].weight.detach().clone()
    for index, batch in enumerate((8 * x, x)):  # the last microbatch has the smaller amax
        with accelerator.accumulate(model):
            accelerator.backward((model(batch) - batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model[0].weight, before) == (index == 0)
    assert model[0].scale_fwd[0].item() == pytest.approx(448 / (8 * x).abs().max().item())


def test_the_config_of_a_saved_model_names_the_recipe(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=Fp8CoreConfig("current", rms_norms=True)
    )
    trainer, _ = trained(loaded, tmp_path / "run", max_steps=1)
    trainer.save_model(str(tmp_path / "saved"))
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["quantization_config"]["recipe"] == "current"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert isinstance(again.model.norm, fp8core.RMSNorm)
