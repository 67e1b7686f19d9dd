"""A backend's fused operations are picked up with no change in a layer, and change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import (
    LayerNormLinear,
    LayerNormMLP,
    UnsupportedError,
    autocast,
    clear_found_inf,
    ops,
    recipe,
)
from fp8core.backend_api import OPTIONAL_OPS, FusedDesc
from tests.chain import fused_toy
from tests.pairs import pairs

BF16 = torch.bfloat16
QUANTIZING = [name for name in OPTIONAL_OPS if name != "add_norm"]
Make = Callable[[], torch.nn.Module]


def filled(layer: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer


def gelu() -> torch.nn.Module:
    return filled(LayerNormMLP(32, 64, params_dtype=BF16))


def swiglu() -> torch.nn.Module:
    own = {"normalization": "RMSNorm", "activation": "swiglu"}
    return filled(LayerNormMLP(32, 64, params_dtype=BF16, **own))


def linear_norm() -> torch.nn.Module:
    torch.set_default_dtype(BF16)
    try:
        return filled(ops.Sequential(ops.Linear(32, 64), ops.LayerNorm(64), ops.Linear(64, 32)))
    finally:
        torch.set_default_dtype(torch.float32)


MODELS = {"gelu": gelu, "swiglu": swiglu, "linear_norm": linear_norm}


def train(
    make: Make, name: str | None, rows: int = 96, steps: int = 1, *, counts: bool = False
) -> list[torch.Tensor]:
    """Return the output, the gradients and the delayed state of ``steps`` steps; with ``counts``
    how many NaN and inf the layer's casts met, too."""
    layer = make()
    if counts:
        clear_found_inf(layer)
    chosen = None if name is None else recipe.by_name(name)
    found: list[torch.Tensor] = []
    torch.manual_seed(2)
    for step in range(steps):
        x = (torch.randn(rows, 32) * (step + 1)).to(BF16).requires_grad_()
        layer.zero_grad()
        with autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x)
        y.backward(torch.randn(y.shape).to(BF16))
        grads = [own.grad for own in (x, *layer.parameters())]
        found += [y.detach(), *(grad.clone() for grad in grads), *layer.state_dict().values()]
    if counts:
        found += layer._bindings.nonfinite.values()
    return [value.clone() for value in found]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def unfused(run: Callable[..., list[torch.Tensor]], *arguments: Any, **options: Any) -> Any:
    """Return what ``run`` does where the toy backend offers no fusion."""
    with fused_toy.installed():
        return run(*arguments, **options)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", recipe.names())
def test_fused_equals_unfused_bit_for_bit(name: str, model: str) -> None:
    steps = 3 if name == "delayed" else 1
    want = unfused(train, MODELS[model], name, steps=steps)
    with fused_toy.installed(*QUANTIZING):
        assert same(train(MODELS[model], name, steps=steps), want)


def test_a_layer_uses_each_fusion_once() -> None:
    for name in recipe.names():
        with fused_toy.installed(*QUANTIZING) as calls:
            train(gelu, name)
        wanted = {"norm_quantize": 1, "activation_quantize": 1, "activation_backward_quantize": 1}
        assert {op: calls[op] for op in wanted} == wanted, name
        assert not calls["norm"] + calls["activation"] + calls["activation_backward"], name


@pytest.mark.parametrize("name", recipe.names())
def test_a_fusion_that_does_not_count_is_used_where_nobody_asked(name: str) -> None:
    def overflowing() -> torch.nn.Module:
        layer = gelu()
        with torch.no_grad():
            layer.layer_norm_weight[3] = torch.inf
            layer.fc2_weight[0, :5] = torch.nan
        return layer

    forward = ("norm_quantize", "activation_quantize")
    fused = dict.fromkeys((*forward, "activation_backward_quantize"), 1)
    for make in (gelu, overflowing):
        want = unfused(train, make, name, counts=True)
        assert want[-1][0] > 0 or make is gelu
        for variants, counts in (((), False), ((), True), (("counted",), True)):
            with fused_toy.installed(*QUANTIZING, variants=variants) as calls:
                got = train(make, name, counts=counts)
            is_fused = bool(variants) or not counts
            assert {op: calls[op] for op in fused} == (
                fused if is_fused else dict.fromkeys(fused, 0)
            )
            assert bits(got) == bits(want[: len(got)]), (variants, counts)


def bits(values: list[torch.Tensor]) -> list[bytes]:
    """Return the bytes of each tensor: NaN is equal to itself."""
    return [value.contiguous().view(torch.uint8).numpy().tobytes() for value in values]


def test_a_norm_behind_a_linear_uses_its_fused_backward() -> None:
    with fused_toy.installed(*QUANTIZING) as calls:
        train(linear_norm, "current")
    assert (calls["norm_backward_quantize"], calls["norm_backward"]) == (1, 0)


def test_one_that_is_not_offered_runs_as_the_pair() -> None:
    for left_out in QUANTIZING:
        model = linear_norm if left_out == "norm_backward_quantize" else gelu
        with fused_toy.installed(*(op for op in QUANTIZING if op != left_out)) as calls:
            train(model, "current")
        assert calls[left_out.removesuffix("_quantize")] == 1, left_out


def test_a_layernorm_linear_uses_the_fused_norm() -> None:
    with fused_toy.installed("norm_quantize") as calls:
        train(lambda: filled(LayerNormLinear(32, 16, params_dtype=BF16)), "current")
    assert (calls["norm_quantize"], calls["norm"]) == (1, 0)


def test_a_forward_fusion_is_used_without_column_sums() -> None:
    for name in recipe.names():
        want = unfused(train, gelu, name)
        forward = {"norm_quantize", "activation_quantize"}
        with fused_toy.installed(*forward, refuse=lambda desc: desc.quantize.sums) as calls:
            assert same(train(gelu, name), want), name
        assert {op: calls[op] for op in forward} == dict.fromkeys(forward, 1), name


@pytest.mark.parametrize("op", ["norm_quantize", "activation_quantize"])
def test_a_forward_fusion_is_not_asked_for_the_columnwise_half_alone(op: str) -> None:
    def refuse(desc: FusedDesc) -> bool:
        return desc.quantize.rowwise is None

    with fused_toy.installed(op, refuse=refuse) as calls:
        train(gelu, "current")
    assert calls[op] == 1


def test_a_backward_fusion_without_column_sums_is_used_before_a_linear_without_bias() -> None:
    def model(bias: bool) -> torch.nn.Module:
        linears = ops.Linear(32, 64, bias=bias), ops.Linear(64, 32)
        return filled(ops.Sequential(linears[0], ops.GELU(), linears[1]))

    counts = []
    for bias in (True, False):
        with fused_toy.installed(*QUANTIZING, refuse=lambda desc: desc.quantize.sums) as calls:
            train(lambda bias=bias: model(bias).to(BF16), "current")  # type: ignore[misc]
        counts.append(calls["activation_backward_quantize"])
    assert counts == [0, 1]


def test_a_returned_norm_is_not_fused() -> None:
    layer = LayerNormLinear(32, 16, return_layernorm_output=True)
    with fused_toy.installed(*QUANTIZING) as calls, autocast(recipe=recipe.by_name("current")):
        layer(torch.randn(32, 32))
    assert (calls["norm_quantize"], calls["norm"]) == (0, 1)


def test_high_precision_is_not_fused() -> None:
    with fused_toy.installed(*QUANTIZING) as calls:
        train(gelu, None)
    assert not any(calls[op] for op in QUANTIZING)


def test_calibration_is_not_fused() -> None:
    layer = gelu()
    with (
        fused_toy.installed(*QUANTIZING) as calls,
        autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()),
    ):
        layer(torch.randn(8, 32, dtype=BF16))
    assert not any(calls[op] for op in QUANTIZING)


def test_rows_that_need_padding_are_not_fused() -> None:
    for name in ["mxfp8", "nvfp4"]:
        want = unfused(train, gelu, name, rows=17)
        with fused_toy.installed(*QUANTIZING) as calls:
            assert same(train(gelu, name, rows=17), want), name
        assert not any(calls[op] for op in QUANTIZING), name


def test_a_linear_with_frozen_weight_gets_the_rowwise_gradient_alone() -> None:
    def frozen() -> torch.nn.Module:
        layer = gelu()
        layer.fc1_weight.requires_grad_(False)
        return layer

    def run() -> list[torch.Tensor]:
        layer, x = frozen(), torch.ones(96, 32, dtype=BF16, requires_grad=True)
        with autocast(recipe=recipe.by_name("current")):
            layer(x).sum().backward()
        return [own.grad for own in (x, *layer.parameters()) if own.grad is not None]

    want = unfused(run)
    with fused_toy.installed(*QUANTIZING):
        assert same(run(), want)


SPOILT = {
    "swapped": (fused_toy.swapped, "rowwise operand"),
    "missing": (fused_toy.without_columnwise, "lacks the columnwise"),
    "transposed": (fused_toy.transposed_rowwise, "rowwise operand"),
}


@pytest.mark.parametrize(("fault", "name", "op"), pairs(SPOILT, ["current", "nvfp4"], QUANTIZING))
def test_debug_catches_a_wrong_orientation(
    fault: str, name: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_DEBUG", "1")
    spoil, message = SPOILT[fault]
    model = linear_norm if op == "norm_backward_quantize" else gelu
    with (
        fused_toy.installed(op, spoil=spoil),
        pytest.raises(UnsupportedError, match=message),
    ):
        train(model, name)


def test_debug_catches_an_orientation_that_was_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8CORE_DEBUG", "1")
    with (
        fused_toy.installed("norm_quantize", spoil=fused_toy.with_unasked),
        torch.no_grad(),
        autocast(recipe=recipe.by_name("current")),
        pytest.raises(UnsupportedError, match="columnwise operand unasked"),
    ):
        gelu()(torch.randn(96, 32, dtype=BF16))


@pytest.mark.parametrize("name", recipe.names())
def test_debug_lets_right_results_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = unfused(train, gelu, name)
    monkeypatch.setenv("FP8CORE_DEBUG", "1")
    with fused_toy.installed(*QUANTIZING):
        assert same(train(gelu, name), want)


def residual() -> ops.Sequential:
    return filled(ops.Sequential(ops.AddExtraInput(), ops.LayerNorm(32), ops.Linear(32, 16)))


def add(name: str | None, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    layer = residual()
    torch.manual_seed(2)
    x = torch.randn(4, 8, 32, requires_grad=True)
    other = torch.randn(4, 8, 32, dtype=dtype, requires_grad=True)
    with autocast(enabled=name is not None, recipe=recipe.by_name(name or "current")):
        y = layer(x, other)
    y.square().sum().backward()
    grads = [own.grad for own in (x, other, *layer.parameters())]
    return [y.detach(), *grads]


def test_add_norm_is_used_and_changes_no_bit() -> None:
    for name in [None, *recipe.names()]:
        want = unfused(add, name)
        with fused_toy.installed("add_norm") as calls:
            assert same(add(name), want), name
        assert (calls["add_norm"], calls["norm"]) == (1, 0), name


def test_the_fused_norm_goes_before_add_norm() -> None:
    with fused_toy.installed("add_norm", "norm_quantize") as calls:
        add("current")
    assert (calls["norm_quantize"], calls["add_norm"]) == (1, 0)


def test_a_residual_of_another_dtype_is_added_before_the_norm() -> None:
    want = unfused(add, "current", BF16)
    with fused_toy.installed("add_norm") as calls:
        assert same(add("current", BF16), want)
    assert (calls["add_norm"], calls["norm"]) == (0, 1)
