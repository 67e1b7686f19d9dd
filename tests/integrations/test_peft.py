"""PEFT's LoRA on converted layers and on fp8core's: training, merging and unmerging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import fp8core
from fp8core.huggingface import Fp8CoreConfig
from fp8core.recipe import DelayedScaling

peft = pytest.importorskip("peft", reason="peft is not installed")

# Of transformers' methods, which PEFT calls by their older names.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")

TOKENS = torch.arange(3, 35).reshape(2, 16)
RECIPES = pytest.mark.parametrize(
    "recipe", ["mxfp8", DelayedScaling(amax_history_len=4)], ids=["mxfp8", "delayed"]
)


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def lora(*targets: str) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), lora_dropout=0.0)


def train(model: Any, steps: int = 5) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return result


@RECIPES
def test_adapters_of_a_converted_model_train_and_the_base_stays(recipe: Any) -> None:
    model = llama()
    fp8core.convert(model, recipe)
    adapted = peft.get_peft_model(model, lora("q_proj", "v_proj", "down_proj"))
    frozen = {n: p.detach().clone() for n, p in adapted.named_parameters() if not p.requires_grad}
    losses = train(adapted)
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
    assert train(first) == train(second)


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
    train(adapted)
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
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=2, **ids))
    fp8core.convert(model, "mxfp8")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, config).eval()
    losses = train(adapted)
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
    train(adapted)
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
    losses = train(peft.get_peft_model(base, lora("q_proj", "v_proj")))
    assert losses[-1] < losses[0]
