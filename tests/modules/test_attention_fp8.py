"""DotProductAttention under recipes with fp8_dpa: its numerics, its state, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fp8core
from fp8core import DotProductAttention, RecipeError, UnsupportedError, autocast, recipe
from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core.plan import LayerRole
from fp8core_backends.reference.attention import attention, attention_backward
from tests.device import DEVICE

HEADS, GROUPS, SIZE = 4, 2, 32
E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
DESC = AttentionDesc(torch.float32, "sbhd", HEADS, GROUPS, SIZE, SIZE, SIZE**-0.5, (-1, 0))


def qkv(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Return q, k and v of three magnitudes, so that no slot is taken for another."""
    torch.manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS)
    return [
        (torch.randn(20, 2, n, SIZE) * (at + 1)).to(dtype).requires_grad_()
        for at, n in enumerate(heads)
    ]


def layer(**options: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, SIZE, GROUPS, **options)


def current(**options: Any) -> recipe.Recipe:
    return recipe.Float8CurrentScaling(fp8_dpa=True, **options)


def delayed(**options: Any) -> recipe.Recipe:
    return recipe.DelayedScaling(fp8_dpa=True, amax_history_len=4, **options)


def rounded(x: torch.Tensor, scale: torch.Tensor, fmt: tuple[torch.dtype, float]) -> torch.Tensor:
    """Return ``x`` cast by ``scale`` as torch casts, and back."""
    dtype, largest = fmt
    return (x * scale).clamp(-largest, largest).to(dtype).float() * (1 / scale)


def own_scale(x: torch.Tensor, fmt: tuple[torch.dtype, float]) -> torch.Tensor:
    return torch.tensor(fmt[1]) / x.detach().abs().max()


def sqnr(x: torch.Tensor, want: torch.Tensor) -> float:
    x, want = x.detach(), want.detach()
    noise = (x.float() - want.float()).square().sum()
    return float(10 * torch.log10(want.float().square().sum() / noise))


def amax(x: torch.Tensor) -> float:
    return float(x.detach().abs().max())


def test_forward_rounds_q_k_v_and_the_weights() -> None:
    q, k, v = qkv()
    with autocast(recipe=current(fp8_dpa_output="high_precision")):
        out = layer()(q, k, v)
    values = [rounded(x.detach(), own_scale(x, E4M3), E4M3) for x in (q, k, v)]
    # With an identity matrix for the values, the result of attention is its weights.
    eye = torch.eye(20).expand(2, GROUPS, 20, 20).permute(2, 0, 1, 3)
    wide = AttentionDesc(torch.float32, "sbhd", HEADS, GROUPS, SIZE, 20, SIZE**-0.5, (-1, 0))
    weights = attention(wide, *values[:2], eye)[0].permute(1, 2, 0, 3)
    weights = rounded(weights, torch.tensor(448.0), E4M3)
    heads = values[2].permute(1, 2, 0, 3).repeat_interleave(HEADS // GROUPS, 1)
    want = (weights @ heads).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chosen", [current, delayed])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_result_is_rounded_by_the_scale_of_the_values(chosen: Any, dropout: float) -> None:
    q, k, v = qkv()
    outs = []
    for output in ("high_precision", "fp8"):
        attend = layer(attention_dropout=dropout)
        for seed in (1, 2):  # the first step of delayed scaling uses scale 1
            torch.manual_seed(seed)
            with autocast(recipe=chosen(fp8_dpa_output=output)):
                out = attend(q, k, v)
        outs.append(out.detach())
    scale = (1 - dropout) * own_scale(v, E4M3)
    torch.testing.assert_close(outs[1], rounded(outs[0], scale, E4M3), rtol=1e-6, atol=1e-6)


def test_backward_is_that_of_the_dequantized_tensors() -> None:
    q, k, v = qkv()
    with autocast(recipe=current()):
        out = layer()(q, k, v)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, [q, k, v], grad)
    values = [rounded(x.detach(), own_scale(x, E4M3), E4M3) for x in (q, k, v)]
    stats = attention(DESC, *values)[1]
    in_heads = [x.detach().unflatten(-1, (HEADS, SIZE)) for x in (grad, out)]
    want = attention_backward(AttentionBackwardDesc(DESC), in_heads[0], *values, in_heads[1], stats)
    for got, expected in zip(grads, want[:3], strict=True):
        assert torch.equal(got, expected)


def test_backward_in_bf16_reads_the_logits_of_forward() -> None:
    """Gradients of steep rows are those of the codes, in float64, but for roundings to bf16.

    The reference makes two; a kernel of a GPU also multiplies weights and gradients of logits as
    bf16.

    Logits of standard deviation 10 turn a relative error of 2^-9 in q and k into one of 15 % in
    the gradients.
    """
    torch.manual_seed(0)
    size = (64, 2, HEADS, SIZE)
    q, k, v = ((torch.randn(size) * std).bfloat16().requires_grad_() for std in (3.2, 3.2, 1.0))
    grad = torch.randn(64, 2, HEADS * SIZE).bfloat16()
    with autocast(recipe=current()):
        out = DotProductAttention(HEADS, SIZE)(q, k, v)
    grads = torch.autograd.grad(out, [q, k, v], grad)
    exact = [
        rounded(x.detach().float(), own_scale(x.float(), E4M3), E4M3).double().requires_grad_()
        for x in (q, k, v)
    ]
    logits = torch.einsum("qbhd,kbhd->bhqk", *exact[:2]) * SIZE**-0.5
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
    weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
    want = torch.einsum("bhqk,kbhd->qbhd", weights, exact[2]).flatten(2)
    wanted = torch.autograd.grad(want, exact, grad.double())
    for got, expected in zip(grads, wanted, strict=True):
        roundings = 2 if DEVICE.type == "cpu" else 4
        assert (got - expected).norm() < roundings * 2.0**-9 * expected.norm()


@pytest.mark.parametrize("chosen", [current, delayed])
def test_quality(chosen: Any) -> None:
    q, k, v = qkv(torch.bfloat16)
    out = layer()(q, k, v)
    grad = torch.randn_like(out)
    want = [out, *torch.autograd.grad(out, [q, k, v], grad)]
    # Floors in dB. e4m3 rounds the weights and the values, and also q and k, whose products have a
    # standard deviation of 2 here: a relative error of 3% changes weights by 6%. Backward rounds
    # the dequantized q and k to bfloat16. In fp8, e5m2 rounds two gradients besides.
    for backward, floors in (("dequantized", (24, 23, 23, 26)), ("fp8", (24, 18, 18, 20))):
        attend = layer()
        for _ in range(2):  # the first step of delayed scaling uses scale 1
            with autocast(recipe=chosen(fp8_dpa_backward=backward)):
                out = attend(q, k, v)
            got = [out, *torch.autograd.grad(out, [q, k, v], grad)]
        for one, expected, floor in zip(got, want, floors, strict=True):
            assert sqnr(one, expected) > floor


def test_bf16_backward_overrides_the_recipe() -> None:
    q, k, v = qkv()
    grads = []
    for backward, call in (("fp8", {"bf16_backward": True}), ("dequantized", {}), ("fp8", {})):
        with autocast(recipe=current(fp8_dpa_backward=backward)):
            out = layer()(q, k, v, **call)
        grads.append(torch.autograd.grad(out.sum(), [q, k, v]))
    assert all(map(torch.equal, grads[0], grads[1]))
    assert not torch.equal(grads[0][0], grads[2][0])


def test_dropout_scales_what_is_rounded_and_recompute_repeats_it() -> None:
    q, k, v = qkv()
    attend, results = layer(attention_dropout=0.5), []
    for again in (False, True):
        torch.manual_seed(1)
        with autocast(recipe=current(fp8_dpa_backward="fp8")):
            out = attend(q, k, v, checkpoint_core_attention=again)
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v])])
    assert all(map(torch.equal, *results))


# Delayed scales


def step(attend: DotProductAttention, seed: int = 0, **options: Any) -> list[torch.Tensor]:
    tensors = qkv(seed=seed)
    with autocast(recipe=delayed(**options)):
        out = attend(*tensors)
    return list(torch.autograd.grad(3 * out.sum(), tensors))


def test_state_has_a_slot_for_each_tensor() -> None:
    attend = layer()
    step(attend, fp8_dpa_backward="fp8")
    shapes = {name: list(one.shape) for name, one in attend.named_buffers()}
    del shapes["delayed_meta"]
    assert shapes == {
        "scale_fwd": [5],
        "amax_history_fwd": [4, 5],
        "scale_bwd": [2],
        "amax_history_bwd": [4, 2],
    }


def test_scales_follow_the_amaxes() -> None:
    attend = layer()
    step(attend, fp8_dpa_backward="fp8")
    q, k, v, s, o = attend.scale_fwd.tolist()
    for scale, x in zip((q, k, v), qkv(), strict=True):
        assert scale == pytest.approx(448 / amax(x))
    assert s == pytest.approx(448.0)  # the first query of a causal mask sees one key
    assert o == 1.0
    grad, dp = attend.scale_bwd.tolist()
    assert grad == pytest.approx(57344 / 3)
    assert math.isfinite(dp)
    assert dp not in (0.0, 1.0)


def test_second_step_takes_the_scales_of_the_first() -> None:
    attend, (q, k, v) = layer(), qkv(seed=1)
    step(attend)
    scales = attend.scale_fwd.clone()
    with autocast(recipe=delayed()), torch.no_grad():
        out = attend(q, k, v)
    values = [rounded(x.detach(), s, E4M3) for x, s in zip((q, k, v), scales, strict=False)]
    want = attention(DESC, *values)[0].flatten(2)
    assert 28 < sqnr(out, want) < 40  # the weights alone are rounded besides


def test_evaluation_and_recompute_record_nothing_twice() -> None:
    one, other = layer(), layer()
    q, k, v = qkv()
    results = []
    for attend, again in ((one, False), (other, True)):
        for _ in range(2):
            with autocast(recipe=delayed(fp8_dpa_backward="fp8")):
                run = attend if not again else lambda *x: fp8core.checkpoint(other, *x)
                out = run(q, k, v)
            weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
            for x in (q, k, v):
                x.grad = None
            out.backward(weights)
        results.append([q.grad, k.grad, v.grad, *(b.clone() for b in attend.buffers())])
    assert all(map(torch.equal, *results))
    before = [buffer.clone() for buffer in one.buffers()]
    with autocast(recipe=delayed(fp8_dpa_backward="fp8")), torch.no_grad():
        one(2 * q, k, v)
    assert all(map(torch.equal, before, one.buffers()))


def test_state_is_saved_and_loaded() -> None:
    one, other = layer(), layer()
    step(one)
    other.load_state_dict(one.state_dict())
    assert all(map(torch.equal, step(one, 1), step(other, 1)))


def test_calibration_records_and_computes_in_high_precision() -> None:
    attend, (q, k, v) = layer(), qkv()
    with autocast(enabled=False, calibrating=True, recipe=delayed()):
        out = attend(q, k, v)
    assert torch.equal(out, layer()(q, k, v))
    assert attend.scale_fwd[:3].tolist() == [pytest.approx(448 / amax(x)) for x in (q, k, v)]


def test_prepare_creates_the_state() -> None:
    model = torch.nn.ModuleDict({"attention": layer()})
    fp8core.prepare(model, delayed())
    assert "attention.scale_fwd" in model.state_dict()


# Recipes and graphs


def test_recipe_without_attention_leaves_high_precision() -> None:
    for other in [
        recipe.DelayedScaling(),
        recipe.Float8CurrentScaling(),
        recipe.Float8BlockScaling(),
        recipe.MXFP8BlockScaling(),
        recipe.NVFP4BlockScaling(),
        recipe.PerLayer({LayerRole("attention"): None}, default="current"),
    ]:
        q, k, v = qkv()
        with autocast(recipe=other):
            out = layer()(q, k, v)
        assert torch.equal(out, layer()(q, k, v)), other


def test_attention_can_have_a_recipe_of_its_own() -> None:
    q, k, v = qkv()
    mixed = recipe.PerLayer({LayerRole("attention"): current()}, default="mxfp8")
    outs = []
    for chosen in (mixed, current()):
        with autocast(recipe=chosen):
            outs.append(layer()(q, k, v))
    assert torch.equal(*outs)


def test_fp8_mha_computes_what_fp8_dpa_computes() -> None:
    q, k, v = qkv()
    outs = []
    for chosen in (current(), recipe.Float8CurrentScaling(fp8_mha=True)):
        with autocast(recipe=chosen):
            outs.append(layer()(q, k, v))
    assert torch.equal(*outs)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_compiled_layer_equals_eager(dropout: float) -> None:
    torch._dynamo.reset()
    q, k, v = qkv()
    attend = layer(attention_dropout=dropout)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for run in (attend, compiled):
        torch.manual_seed(3)
        with autocast(recipe=current(fp8_dpa_backward="fp8")):
            out = run(q, k, v)
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v])])
    assert all(map(torch.equal, *results))


def test_delayed_scaling_in_a_graph_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer(), backend="aot_eager")
    with (
        pytest.raises(UnsupportedError, match="delayed scaling is not offered under"),
        autocast(recipe=delayed()),
    ):
        compiled(*qkv())


def test_nan_is_counted_and_propagates_where_the_recipe_says() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        q[0, 0, 0, 0] = torch.nan
    attend = layer()
    fp8core.clear_found_inf(attend)
    with autocast(recipe=current(nonfinite="propagate")):
        out = attend(q, k, v)
    assert out.isnan().all()
    assert fp8core.found_inf(attend) > 0


def test_second_derivative_is_refused() -> None:
    q, k, v = qkv()
    with autocast(recipe=current()):
        out = layer()(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        grad.sum().backward()


def test_explanation_names_the_low_precision_operations() -> None:
    said = str(fp8core.explain(layer(), delayed(fp8_dpa_backward="fp8")))
    assert "qkv=e4m3 block=(0,0) delayed, s=e4m3 block=(0,0) delayed" in said
    assert "grad_output=e5m2 block=(0,0) delayed, dp=e5m2 block=(0,0) delayed" in said
    assert "QuantizedTensor" not in said  # which is a matrix, and no tensor of heads


def test_repr_says_how_it_ran() -> None:
    for chosen, said in [
        (recipe.Float8CurrentScaling(), "last run: high precision"),
        (current(), "last run: Float8CurrentScaling"),
    ]:
        attend = layer()
        with autocast(recipe=chosen):
            attend(*qkv())
        assert said in repr(attend), (chosen, said)


def test_recipe_refuses() -> None:
    for kind, fields, error, message in [
        (recipe.Float8BlockScaling, {"fp8_dpa": True}, UnsupportedError, "Use DelayedScaling or"),
        (recipe.NVFP4BlockScaling, {"fp8_mha": True}, UnsupportedError, "Use DelayedScaling or"),
        (recipe.DelayedScaling, {"fp8_dpa_backward": "fp8"}, RecipeError, "needs fp8_dpa=True"),
        (
            recipe.Float8CurrentScaling,
            {"fp8_dpa_output": "high_precision"},
            RecipeError,
            "needs fp8_dpa=True",
        ),
        (
            recipe.DelayedScaling,
            {"fp8_dpa": True, "fp8_dpa_output": "bf16"},
            RecipeError,
            "fp8_dpa_output='bf16'.: expected one of",
        ),
        (
            recipe.DelayedScaling,
            {"fp8_dpa": True, "fp8_dpa_backward": "bf16"},
            RecipeError,
            "expected one of",
        ),
    ]:
        with pytest.raises(error, match=message):
            kind(**fields)


def test_float64_is_refused() -> None:
    tensors = [x.double() for x in qkv()]
    with (
        pytest.raises(UnsupportedError, match=r"no low precision from or to torch\.float64"),
        autocast(recipe=current()),
    ):
        layer()(*tensors)


@pytest.mark.parametrize("field", ["fp8_dpa", "fp8_mha"])
def test_attention_in_mxfp8_is_constructed_and_names_its_device_where_it_runs(field: str) -> None:
    chosen = recipe.MXFP8BlockScaling(**{field: True})
    assert eval(repr(chosen), vars(recipe)) == chosen
    attention = fp8core.DotProductAttention(2, 32)
    linear = fp8core.Linear(32, 32, params_dtype=torch.bfloat16)
    q = torch.randn(32, 1, 2, 32, dtype=torch.bfloat16, device=next(linear.parameters()).device)
    with fp8core.autocast(recipe=chosen):
        assert linear(q).shape == q.shape
        with pytest.raises(UnsupportedError, match=r"compute capability 10\.0 .*PerLayer"):
            attention(q, q, q)
