"""``from_pretrained(..., quantization_config=Fp8CoreConfig(...))`` of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8core
from fp8core import RecipeError
from fp8core.huggingface import Fp8CoreConfig
from fp8core.recipe import DelayedScaling, LayerRole, PerLayer, Recipe

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = torch.arange(3, 35).reshape(2, 16)
DELAYED = DelayedScaling(amax_history_len=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama in high precision."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def load(folder: Path, *given: Any, **named: Any) -> Any:
    config = Fp8CoreConfig(*given, **named)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(TOKENS).logits
    return result


def train(model: Any, steps: int) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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


def test_generation_runs(saved: Path) -> None:
    tokens = load(saved, "mxfp8").generate(TOKENS, max_new_tokens=4, min_new_tokens=4)
    assert tokens.shape == (2, 20)


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
