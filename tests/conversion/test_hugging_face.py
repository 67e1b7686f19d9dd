"""A Llama of Hugging Face, tiny and random, in one line: training, generation, checkpointing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.pytorch_utils import Conv1D

import fp8core
from fp8core import OperandError, recipe
from tests.conversion.hugging_face import SIZES, TOKENS, gpt2, llama, train

# `activation_checkpointing_enable` is its name from transformers 5 on.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")


def test_the_report_names_every_layer_that_was_left() -> None:
    report = fp8core.convert(llama(), "mxfp8", fuse=False)
    assert len(report.converted) == 2 * 7
    assert not report.fused
    reasons = {entry.name: (entry.layer, entry.reason) for entry in report.skipped}
    assert reasons["lm_head"][1].startswith("output head")
    norms = [entry for entry in report.skipped if entry.layer == "LlamaRMSNorm"]
    assert len(norms) == 2 * 2 + 1
    assert all(entry.reason.startswith("class is not torch.nn.RMSNorm") for entry in norms)
    # q, k, v, o of 32 with two heads of 8 for k and v; gate, up, down; the head
    block, head = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48, 32 * 64
    assert report.flop_share == 2 * block / (2 * block + head)


@pytest.mark.parametrize("chosen", recipe.names())
def test_an_optimizer_made_before_trains_it(chosen: str) -> None:
    own = llama()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    fp8core.convert(own, chosen)
    losses = train(own, 6, optimizer)
    assert losses[-1] < 0.8 * losses[0]


def test_it_generates_as_it_scores() -> None:
    own = llama().eval()
    plain = copy.deepcopy(own)
    fp8core.convert(own, "mxfp8")
    made = own.generate(
        TOKENS[:1, :4], attention_mask=torch.ones(1, 4), max_new_tokens=4, do_sample=False
    )
    assert made.shape[1] > 4
    assert torch.equal(made[:, :4], TOKENS[:1, :4])
    with torch.no_grad():
        assert own(made[:, :-1]).logits[0, -1].argmax() == made[0, -1]
        assert not torch.equal(own(TOKENS).logits, plain(TOKENS).logits)


@pytest.mark.parametrize("chosen", ["mxfp8", "nvfp4", "delayed"])
def test_gradient_checkpointing_changes_nothing(chosen: str) -> None:
    trained = []
    for is_checkpointed in (False, True):
        own = llama().train()
        if is_checkpointed:
            own.gradient_checkpointing_enable({"use_reentrant": False})
        fp8core.convert(own, chosen)
        train(own, 3, torch.optim.SGD(own.parameters(), lr=0.1))
        trained.append(own.state_dict())
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_it_saves_as_a_plain_model_after_unconvert(tmp_path: Path) -> None:
    own = llama()
    fp8core.convert(own, "delayed")
    train(own, 2, torch.optim.SGD(own.parameters(), lr=0.1))
    fp8core.unconvert(own).save_pretrained(tmp_path)
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
    assert torch.equal(loaded(TOKENS).logits, own(TOKENS).logits)


def saved_with_its_state(folder: Path) -> Any:
    own = llama()
    fp8core.convert(own, "delayed")
    train(own, 2, torch.optim.SGD(own.parameters(), lr=0.1))
    own.save_pretrained(folder)
    return own


def test_saved_with_its_state_it_loads_as_a_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = saved_with_its_state(tmp_path)
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert (
        info["unexpected_keys"]
        == {name for name, _ in own.named_buffers()} & own.state_dict().keys()
    )
    assert all(
        torch.equal(value, own.get_parameter(name)) for name, value in loaded.named_parameters()
    )
    ignored = [r"\.(scale|amax_history)_(fwd|bwd)$", r"\.delayed_meta$"]  # as docs/converting.md
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", ignored)
    _, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]


def test_saved_with_its_state_it_goes_on_where_it_was(tmp_path: Path) -> None:
    own = saved_with_its_state(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).train()
    fp8core.convert(loaded, "delayed")
    loaded.load_state_dict(
        safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=False
    )
    for model in (own, loaded):
        train(model, 2, torch.optim.SGD(model.parameters(), lr=0.1))
    state = own.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def test_routers_that_are_no_linear_layers_are_in_the_report() -> None:
    own = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    report = fp8core.convert(own, "current")
    assert "MixtralTopKRouter" in {entry.layer for entry in report.skipped}
    assert any("do not count the weights of" in note for note in report.notes)


def test_a_model_without_linear_layers_is_refused_and_says_what_it_has() -> None:
    own = gpt2(layers=3)
    for module in own.modules():
        if type(module) is Conv1D:
            module.__class__ = type("Convolution", (Conv1D,), {})
    with pytest.raises(OperandError) as found:
        fp8core.convert(own, "mxfp8")
    first, head, *others = str(found.value).splitlines()
    assert first == "convert(GPT2LMHeadModel): no torch.nn.Linear is left to convert. Left out:"
    assert head.startswith("  1 Linear (lm_head): output head: its weight is that of the embedding")
    (convolutions,) = [line for line in others if "Convolution" in line]
    assert convolutions.startswith("  12 Convolution (transformer.h.0.attn.c_attn, ")
    assert convolutions.endswith(": class is neither torch.nn.Linear, LayerNorm nor RMSNorm")
    assert type(own.transformer.ln_f) is nn.LayerNorm
