"""Accelerate and transformers' Trainer on converted models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import fp8core
from fp8core.huggingface import Fp8CoreConfig
from fp8core.recipe import DelayedScaling

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]

TOKENS = torch.arange(3, 35).reshape(2, 16)
DELAYED = DelayedScaling(amax_history_len=4)
RECIPES = pytest.mark.parametrize("recipe", ["mxfp8", DELAYED], ids=["mxfp8", "delayed"])


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


def trained(model: Any, folder: Path, **named: Any) -> tuple[Any, list[float]]:
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
    resume = named.pop("resume", None)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, list(Losses(trainer))


@RECIPES
def test_trainer_trains_a_converted_model(recipe: Any, tmp_path: Path) -> None:
    model = llama()
    fp8core.convert(model, recipe)
    _, losses = trained(model, tmp_path)
    assert losses[-1] < losses[0]
    assert "last run: " in repr(model.model.layers[0].mlp.up_proj)


def test_trainer_trains_a_model_loaded_by_a_config_as_a_converted_one(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=Fp8CoreConfig("mxfp8")
    )
    model = llama()
    fp8core.convert(model, "mxfp8")
    assert trained(loaded, tmp_path)[1] == trained(model, tmp_path)[1]


@RECIPES
def test_gradient_checkpointing_changes_no_loss(recipe: Any, tmp_path: Path) -> None:
    plain, checkpointed = llama(), llama()
    for model in (plain, checkpointed):
        fp8core.convert(model, recipe)
    want = trained(plain, tmp_path)[1]
    settings = {"use_reentrant": False}
    got = trained(
        checkpointed,
        tmp_path,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=settings,
    )[1]
    assert got == want


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
    arguments = TrainingArguments(
        str(tmp_path / "rest"),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(rest, arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    assert list(Losses(trainer)) == want


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
