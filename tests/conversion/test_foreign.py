"""Layers of transformers beside torch's: ``Conv1D``, 3-D weights of experts, norms of models."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.pytorch_utils import Conv1D

import fp8core
from fp8core import OperandError, UnsupportedError
from fp8core.conversion.layers import similar_norm
from fp8core.recipe import DelayedScaling, PerLayer
from tests.conversion.hugging_face import SIZES, TOKENS, gpt2, train
from tests.device import DEVICE

DELAYED = DelayedScaling(amax_history_len=4)


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def qwen3() -> Any:
    sizes = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))


def gpt_oss() -> Any:
    """Its weights are transposed, its gate and up rows alternate, and it has biases."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **sizes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


MODELS = [gpt2, mixtral, qwen3, gpt_oss]
EACH = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def results(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and gradients."""
    model.eval()
    model.zero_grad()
    output = model(TOKENS, labels=TOKENS)
    output.loss.backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return output.logits.detach(), grads


@EACH
def test_without_a_recipe_it_computes_as_before(make: Callable[[], Any]) -> None:
    model = make()
    logits, grads = results(model)
    fp8core.convert(model, rms_norms=True)
    got, got_grads = results(model)
    # Sums of a token's experts, and of rows in a gradient, may be added in another order.
    assert torch.allclose(got, logits, atol=1e-6)
    for a, b in zip(got_grads, grads, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@EACH
@pytest.mark.parametrize("recipe", ["mxfp8", DELAYED], ids=["mxfp8", "delayed"])
def test_an_optimizer_trains_it_and_unconvert_goes_back(
    make: Callable[[], Any], recipe: Any
) -> None:
    model = make()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    classes = [type(module) for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    fp8core.convert(model, recipe, rms_norms=True)
    state = [key for key in model.state_dict() if "scale_" not in key and "amax_" not in key]
    assert state == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    losses = train(model, 4)
    assert losses[-1] < losses[0]
    fp8core.unconvert(model)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == [set(one) for one in attributes]


def test_experts_compute_as_grouped_linear_layers() -> None:
    """Against fp8core.GroupedLinear, with the weights of the experts, bit for bit."""
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    fp8core.convert(model, "mxfp8")
    rows, split = torch.randn(64, 32), [16, 0, 40, 8]
    native = fp8core.GroupedLinear(4, 32, 96, bias=False, device=DEVICE)
    with torch.no_grad():
        for i in range(4):
            native.parameter(f"weight{i}").copy_(experts.gate_up_proj[i])  # type: ignore[union-attr]
    with fp8core.autocast(recipe="mxfp8"):
        want = native(rows, split)
    assert torch.equal(experts.gate_up_proj_linear(rows, split), want)
    with fp8core.autocast(enabled=False):
        assert not torch.equal(experts.gate_up_proj_linear(rows, split), want)


def test_a_conv1d_computes_as_a_linear_layer() -> None:
    layer, x = Conv1D(48, 32), torch.randn(16, 32, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    native = fp8core.Linear(32, 48, device=DEVICE)
    with torch.no_grad():
        native.weight.copy_(layer.weight.T)
        native.bias.copy_(layer.bias)
    fp8core.convert(layer, "mxfp8")
    assert isinstance(layer, Conv1D)
    with fp8core.autocast(recipe="mxfp8"):
        want = native(other)
    got = layer(x)
    assert torch.equal(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(layer.weight.grad, native.weight.grad.T)
    assert layer.weight.grad.shape == (32, 48)


def test_the_headline_counts_experts() -> None:
    report = fp8core.convert(mixtral(), "mxfp8", skip="layers.0.mlp.experts")
    first, _, third, *_ = str(report).splitlines()
    assert first.startswith("8 of 9 linear layers and 4 of 8 experts converted: ")
    assert "8 of 9 linear layers and 4 of 8 experts, " in third
    # A token goes through 2 experts of 3 matrices; q and o, k and v of half their size; the head.
    experts, block, head = 2 * 3 * 32 * 48, 3 * 32 * 32, 32 * 64
    assert report.flop_share == (2 * block + experts) / (2 * (block + experts) + head)


def test_a_recipe_of_layers_reaches_the_linears_of_experts() -> None:
    model = mixtral()
    recipe = PerLayer({"*.down_proj_linear": None, "*.gate_up_proj_linear": "mxfp8"})
    report = fp8core.convert(model, recipe)
    assert not any("matches no converted layer" in note for note in report.notes)
    entries = {entry.layer: entry.is_low_precision for entry in report.converted}
    assert entries["MixtralExperts"] is False  # one of its two linears is not
    model(TOKENS)
    experts = model.model.layers[0].mlp.experts
    assert "MXFP8BlockScaling" in repr(experts.gate_up_proj_linear)
    assert "MXFP8BlockScaling" not in repr(experts.down_proj_linear)


def test_experts_without_any_rows_get_zero_gradients() -> None:
    model = mixtral()
    fp8core.convert(model, "mxfp8")
    experts = model.model.layers[0].mlp.experts
    chosen, weights = torch.full((32, 2), 1), torch.full((32, 2), 0.5)
    experts(torch.randn(32, 32), chosen, weights).sum().backward()
    norms = experts.gate_up_proj.grad.flatten(1).norm(dim=1)
    assert (norms > 0).tolist() == [False, True, False, False]


def saved_and_loaded(model: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("make", [gpt2, mixtral], ids=["gpt2", "mixtral"])
@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_lives_by_itself(
    make: Callable[[], Any], copied: Callable[[nn.Module], Any]
) -> None:
    model = make().eval()
    fp8core.convert(model, DELAYED, rms_norms=True)
    train(model, 2)
    other = copied(model)
    with torch.no_grad():
        want = model(TOKENS).logits
        assert torch.equal(other(TOKENS).logits, want)
        for parameter in other.parameters():
            parameter.zero_()
        assert not other(TOKENS).logits.any()
        assert torch.equal(model(TOKENS).logits, want)
    fp8core.unconvert(other)


def test_experts_spread_over_ranks_are_refused_by_name() -> None:
    model = mixtral()
    fp8core.convert(model, "mxfp8")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(UnsupportedError, match=r"spreads over ranks .* skip"):
        model(TOKENS)


def test_a_monitor_sees_the_linears_of_experts() -> None:
    model = mixtral()
    fp8core.convert(model, "mxfp8")
    with fp8core.monitor(model) as watch:
        model(TOKENS, labels=TOKENS).loss.backward()
        watch.step()
        names = {row.layer for row in watch.rows}
    assert "model.layers.0.mlp.experts.down_proj_linear" in names


def test_experts_on_meta_are_converted_before_they_have_values() -> None:
    with torch.device("meta"):
        model = mixtral()
    fp8core.convert(model, "mxfp8", rms_norms=True)
    other = mixtral().eval()
    model.load_state_dict(other.state_dict(), assign=True)
    fp8core.convert(other, "mxfp8", rms_norms=True)
    experts, same = (one.model.layers[1].mlp.experts for one in (model, other))
    rows = torch.randn(8, 32)
    assert torch.equal(
        experts.down_proj_linear(rows.repeat(1, 2)[:, :48], [8, 0, 0, 0]),
        same.down_proj_linear(rows.repeat(1, 2)[:, :48], [8, 0, 0, 0]),
    )


# torch's compiler looks at `grad` of each input of a graph after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_they_compile() -> None:
    """A Conv1D and a norm whole; experts in several graphs, as the host reads their rows."""
    torch._dynamo.reset()
    whole = nn.Sequential(Conv1D(48, 32), LlamaForCausalLM(LlamaConfig(**SIZES)).model.norm)
    whole = nn.Sequential(whole[1], whole[0])
    fp8core.convert(whole, "mxfp8", rms_norms=True)
    x = torch.randn(32, 32)
    fast = torch.compile(whole, fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(x), whole(x))
    model = mixtral()
    fp8core.convert(model, "mxfp8")
    experts = model.model.layers[0].mlp.experts
    chosen, weights = torch.arange(64).view(32, 2) % 4, torch.full((32, 2), 0.5)
    fast = torch.compile(experts, backend="aot_eager")
    assert torch.equal(fast(x, chosen, weights), experts(x, chosen, weights))
    torch._dynamo.reset()


class TestNorms:
    def test_they_stay_where_they_are_left_out(self) -> None:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        report = fp8core.convert(model, "mxfp8", rms_norms=False)
        reasons = {e.reason for e in report.skipped if e.layer == "LlamaRMSNorm"}
        (reason,) = reasons
        assert "convert(rms_norms=True) compares it with RMSNorm" in reason

    def test_asked_for_they_are_fp8core_norms(self) -> None:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        kind, parameters = type(model.model.norm), list(model.parameters())
        fp8core.convert(model, "mxfp8", rms_norms=True)
        assert isinstance(model.model.norm, kind)
        assert isinstance(model.model.norm, fp8core.RMSNorm)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        native, x = fp8core.RMSNorm(32, 1e-6, device=DEVICE), torch.randn(4, 32)
        assert torch.equal(model.model.norm(x), native(x))

    def test_one_with_a_factor_of_one_plus_the_weight_is_told(self) -> None:
        sizes = {**SIZES, "head_dim": 8}
        model = GemmaForCausalLM(GemmaConfig(**sizes)).eval()
        for module in model.modules():
            if "Norm" in type(module).__name__:
                nn.init.normal_(module.weight, std=0.1)  # type: ignore[arg-type]
        want = model(TOKENS).logits
        fp8core.convert(model, rms_norms=True)
        assert model.model.norm.zero_centered_gamma
        assert torch.allclose(model(TOKENS).logits, want, atol=1e-5)

    def test_one_that_computes_otherwise_stays_with_the_reason(self) -> None:
        class MeanNorm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x / x.abs().mean(-1, keepdim=True).add(self.eps) * self.weight

        model = nn.Sequential(nn.Linear(32, 32), MeanNorm())
        report = fp8core.convert(model, "mxfp8", rms_norms=True)
        (entry,) = report.skipped
        assert entry.reason.endswith("and it computes otherwise")
        assert type(model[1]) is MeanNorm

    def test_eps_of_another_size_is_told(self) -> None:
        class Doubled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.rms_norm(x, (32,), self.weight, 2 * self.eps)

        assert similar_norm(Doubled()) is None

    def test_a_filter_that_names_one_says_what_converts_it(self) -> None:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        with pytest.raises(UnsupportedError, match="rms_norms=True"):
            fp8core.convert(model, "mxfp8", filter="input_layernorm", fuse=False)


def test_a_changed_conversion_is_not_undone() -> None:
    model = mixtral()
    fp8core.convert(model, "mxfp8")
    experts = model.model.layers[0].mlp.experts
    experts.forward = experts.forward
    with pytest.raises(OperandError, match=r"ConvertedMixtralExperts has its forward replaced"):
        fp8core.unconvert(model)
    del experts.forward
    fp8core.unconvert(model)


def test_an_eps_that_is_set_later_takes_effect_under_its_own_name() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(DEVICE)
    fp8core.convert(model, "current")
    norm, x = model.model.norm, torch.randn(4, SIZES["hidden_size"], device=DEVICE)
    for eps in (1e-6, 1.0):
        norm.variance_epsilon = eps
        torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps))
