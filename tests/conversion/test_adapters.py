"""Low-rank adapters in a model: their factors are left alone, what they adapt is converted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8core
from fp8core import ConversionReport


def names(report: ConversionReport) -> list[str]:
    return [entry.name for entry in report.converted]


def reasons(report: ConversionReport) -> dict[str, str]:
    return {entry.name: entry.reason for entry in report.skipped}


class Adapted(nn.Module):
    """A linear layer with low-rank factors beside it, with PEFT's names."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 64)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 64, bias=False)})
        self.encoder = nn.ModuleList([nn.Linear(rank, rank)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, up = self.lora_A["default"], self.lora_B["default"]
        return self.base_layer(x) + up(self.encoder[0](down(x)))


FACTOR = "low-rank factor of an adapter; convert it with a filter that names it"


def test_factors_of_adapters_are_left_and_the_report_says_so() -> None:
    own = nn.ModuleDict({"q_proj": Adapted(), "o_proj": Adapted(rank=64)})
    report = fp8core.convert(own, "mxfp8")
    assert names(report) == ["q_proj.base_layer", "o_proj.base_layer"]
    factors = ("lora_A.default", "lora_B.default", "encoder.0")
    wanted = {f"{part}.{name}": FACTOR for part in own for name in factors}
    assert reasons(report) == wanted
    assert FACTOR in str(report)


def test_factors_of_adapters_are_left_in_the_adapted_layer_itself() -> None:
    assert names(fp8core.convert(Adapted(), "mxfp8")) == ["base_layer"]


@pytest.mark.parametrize("word", ["lora_a", "lora_down", "LoRA_B", "vision_lora_A", "lora"])
def test_a_word_of_the_path_says_adapter(word: str) -> None:
    own = nn.ModuleDict({"fc": nn.Linear(32, 32), word: nn.Linear(32, 32)})
    assert reasons(fp8core.convert(own, "mxfp8")) == {word: FACTOR}


@pytest.mark.parametrize("word", ["explorations", "floral", "loras", "lora_model"])
def test_a_word_that_only_contains_it_says_nothing(word: str) -> None:
    own = nn.ModuleDict({word: nn.Linear(32, 32)})
    assert names(fp8core.convert(own, "mxfp8")) == [word]


def test_a_model_called_lora_is_converted() -> None:
    own = nn.ModuleDict({"lora": nn.ModuleDict({"block": nn.Sequential(nn.Linear(32, 32))})})
    assert names(fp8core.convert(own, "mxfp8")) == ["lora.block.0"]


def test_a_filter_can_have_the_factors_of_adapters() -> None:
    own = nn.ModuleDict({"q_proj": Adapted()})
    assert names(fp8core.convert(own, "mxfp8", filter="lora_A")) == ["q_proj.lora_A.default"]


def test_an_adapted_head_is_left_too() -> None:
    own = nn.ModuleDict({"fc": nn.Linear(32, 32), "lm_head": Adapted()})
    report = fp8core.convert(own, "mxfp8")
    assert names(report) == ["fc"]
    assert reasons(report)["lm_head.base_layer"].startswith("output head")


def test_an_adapted_model_trains() -> None:
    own = nn.Sequential(Adapted())
    fp8core.convert(own, "mxfp8")
    own(torch.randn(32, 32)).sum().backward()
    assert all(own.grad.isfinite().all() for own in own.parameters())
