"""What layers keep between forward and backward, by recipe and option, and what they free.

tests/test_ways.py compares the bits of layers that compute again what they do not keep.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import (
    GroupedLinear,
    LayerNormMLP,
    Linear,
    OperandError,
    clear_found_inf,
    found_inf,
    recipe,
    use_backend,
)
from fp8core.backend_api import OPTIONAL_OPS, OpDesc
from fp8core.recipe.plan import HOLDING
from fp8core_backends.reference.backend import ReferenceBackend
from tests.benchmarks import held_bytes
from tests.chain.test_requantized import bytes_held, saved_tensors
from tests.dispatch import toys
from tests.modules.layers import RECIPES, active, assert_same, step
from tests.pairs import turns

ROWS, HIDDEN, FFN = 128, 128, 256
BF16 = torch.bfloat16
FP8 = [name for name in recipe.names() if name != "nvfp4"]
BF16_BYTES, FP8_BYTES, SCALE_BYTES = 2, 1, 4


def saved_bytes(name: str, holding: str = "fastest", **arguments: object) -> int:
    """Return the bytes of the distinct storages that autograd saves, parameters left out."""
    layer = LayerNormMLP(HIDDEN, FFN, params_dtype=BF16, **arguments)
    x = torch.randn(ROWS, HIDDEN, dtype=BF16, requires_grad=True)
    with saved_tensors() as saved, active(holding_of(name, holding)):
        y = layer(x)
    assert y.requires_grad
    return bytes_held(saved, layer)


def holding_of(name: str, holding: str) -> Any:
    """Return the recipe of that name with what it holds."""
    chosen: Any = None if name == "none" else recipe.by_name(name)
    return chosen and dataclasses.replace(chosen, holding=holding)


BEFORE = ROWS * HIDDEN * BF16_BYTES + ROWS * 4 + ROWS * FFN * BF16_BYTES
"""Bytes of the input, the norm's statistics and the activation's input."""
CODES = (ROWS * HIDDEN + ROWS * FFN) * FP8_BYTES
WEIGHT_CODES = 2 * HIDDEN * FFN * FP8_BYTES


def test_bf16_keeps_both_linears_inputs() -> None:
    linears = (ROWS * HIDDEN + ROWS * FFN) * BF16_BYTES
    assert saved_bytes("none", normalization="RMSNorm") == BEFORE + linears


def test_current_scaling_keeps_one_byte_an_element_and_one_scale_a_tensor() -> None:
    want = BEFORE + CODES + WEIGHT_CODES + 4 * SCALE_BYTES
    assert saved_bytes("current", normalization="RMSNorm") == want


def test_block_scaling_keeps_one_scale_a_block() -> None:
    # inputs: one scale for 128 rows of a column; weights: one for 128 x 128
    scales = (HIDDEN + FFN) * (ROWS // 128) + 2 * (HIDDEN // 128) * (FFN // 128)
    want = BEFORE + CODES + WEIGHT_CODES + scales * SCALE_BYTES
    assert saved_bytes("block", normalization="RMSNorm") == want


def by_the_page(
    holding: str, rows: int, sizes: dict[str, tuple[int, int]], activation: int, attention: int = 0
) -> int:
    """Return the bytes that docs/low-precision.md counts for norms, linears of ``sizes`` by what is
    before them, an activation of so many columns, and ``attention``."""
    held = attention + 2 * rows * activation
    for source, (n, k) in sizes.items():
        is_norm = source.startswith("norm")
        held += is_norm * rows * (2 * k + 4)  # of an RMSNorm
        if holding == "fastest":
            held += n * k
        if holding != "least" or source == "input":
            held += rows * k
        held += 2 * SCALE_BYTES  # of each operand, or what its cast takes again
    return held


@pytest.mark.parametrize("holding", HOLDING)
def test_layers_hold_the_bytes_of_the_page(holding: str) -> None:
    gated = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
    sizes = {"norm": (2 * FFN, HIDDEN), "activation": (HIDDEN, FFN)}
    expected = by_the_page(holding, ROWS, sizes, 2 * FFN)
    assert saved_bytes("delayed", holding, **gated) == expected
    layer = Linear(held_bytes.HIDDEN, FFN, params_dtype=BF16)
    expected = by_the_page(holding, held_bytes.ROWS, {"input": (FFN, held_bytes.HIDDEN)}, 0)
    assert held_bytes.held(layer, holding_of("delayed", holding)) == expected


@pytest.mark.parametrize("holding", HOLDING)
def test_a_transformer_layer_holds_the_bytes_of_the_page(holding: str) -> None:
    rows, hidden, ffn = held_bytes.ROWS, held_bytes.HIDDEN, held_bytes.FFN_8B
    heads, kv = 8, hidden // 4
    layer = held_bytes.transformer_layer()
    sizes = {
        "norm": (hidden + 2 * kv, hidden),
        "attention": (hidden, hidden),
        "norm of the block": (2 * ffn, hidden),
        "activation": (hidden, ffn),
    }
    attention = rows * (2 * (hidden + 2 * kv) + 2 * hidden + 4 * heads)
    expected = by_the_page(holding, rows, sizes, 2 * ffn, attention)
    assert held_bytes.held(layer, holding_of("delayed", holding)) == expected


@pytest.mark.parametrize("name", FP8)
def test_a_norm_that_saves_nothing_makes_nothing_again(name: str) -> None:
    """Neither its input nor its parameters need gradients: the codes of its result are held."""
    results = []
    for holding in HOLDING:
        torch.manual_seed(1)
        layer = LayerNormMLP(HIDDEN, FFN)
        for parameter in (layer.layer_norm_weight, layer.layer_norm_bias):
            parameter.requires_grad_(False)
        x = torch.randn(ROWS, HIDDEN)
        with active(holding_of(name, holding)):
            y = layer(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in layer.parameters() if p.requires_grad)])
    for result in results[1:]:
        assert_same(result, results[0])


def test_activations_in_fp8_take_less_than_in_bf16() -> None:
    """Weights, kept from one microbatch to the next, are taken off: they do not grow with rows."""
    for name, activation in turns(FP8, ["gelu", "swiglu"]):
        inner = 2 * FFN if activation == "swiglu" else FFN
        weights = (inner * HIDDEN + FFN * HIDDEN) * FP8_BYTES
        in_fp8 = saved_bytes(name, activation=activation) - weights
        assert in_fp8 < saved_bytes("none", activation=activation), (name, activation)


@pytest.mark.parametrize("name", RECIPES)
def test_frozen_layers_save_nothing(name: str) -> None:
    layer = LayerNormMLP(HIDDEN, FFN).requires_grad_(False)
    with saved_tensors() as saved, active(name):
        layer(torch.zeros(32, HIDDEN))
    assert saved == []


def without_fusions(desc: OpDesc) -> str | None:
    return f"fuses no {desc.op}" if desc.op in OPTIONAL_OPS else None


@pytest.mark.parametrize("retains", [False, True])
def test_the_activation_s_input_is_freed_before_its_gradient_is_cast(retains: bool) -> None:
    """It is as large as the gradient, of which the cast makes two tensors of codes."""
    held: list[weakref.ref[torch.Tensor]] = []
    steps: list[tuple[str, bool]] = []

    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = ReferenceBackend().bind(desc, device)

        def watched(*given: Any, **named: Any) -> Any:
            steps.extend((desc.op, one() is not None) for one in held)
            return run(*given, **named)

        return watched

    with toys.isolation():
        toys.register(toys.backend("toy", bind=bind, refuse=without_fusions))
        layer = LayerNormMLP(HIDDEN, FFN, bias=False, params_dtype=BF16)
        x = torch.randn(ROWS, HIDDEN, dtype=BF16, requires_grad=True)
        with use_backend("toy"), active("current"):
            y = layer(x)
        assert y.grad_fn is not None
        saved = [one for one in y.grad_fn.saved_tensors if one is not None]  # type: ignore[attr-defined]
        plain = (one for one in saved if not isinstance(one, torch.nn.Parameter))
        (own,) = (one for one in plain if one.shape == (ROWS, FFN) and one.dtype == x.dtype)
        held.append(weakref.ref(own))
        del own, saved
        y.sum().backward(retain_graph=retains)
    at = [name for name, _ in steps].index("activation_backward")
    assert steps[at] == ("activation_backward", True)
    assert steps[at + 1] == ("quantize", retains)


# --- LayerNormMLP(checkpoint=True) ---


@pytest.mark.parametrize("name", ["none", "mxfp8"])
def test_a_checkpoint_holds_the_input_alone(name: str) -> None:
    layer, x = LayerNormMLP(48, 64, checkpoint=True), torch.randn(8, 48)
    with active(name), saved_tensors() as saved:
        layer(x)
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in saved if tensor.numel())


def test_a_checkpoint_s_evaluation_computes_once() -> None:
    layer, x = LayerNormMLP(48, 64, checkpoint=True), torch.randn(8, 48)
    with torch.no_grad():
        y = layer(x)
    assert not y.requires_grad
    assert torch.equal(y, layer(x))


# --- save_original_input: the input is held as it came, and cast again in backward ---

CHOSEN: dict[str, Any] = {
    **{name: name for name in ("delayed", "current", "mxfp8", "block", "rowwise", "none")},
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "dequantized": recipe.MXFP8BlockScaling(backward_override="dequantized"),
}


def saving_input(**options: Any) -> Linear:
    return Linear(64, 32, save_original_input=True, **options)


@pytest.mark.parametrize(("name", "splits"), turns(CHOSEN, [None, [7, 0, 33]]), ids=str)
def test_an_input_that_is_cast_again_has_the_same_codes(
    name: str, splits: list[int] | None
) -> None:
    layers: list[Any] = [
        Linear(50, 31, save_original_input=saves)
        if splits is None
        else GroupedLinear(3, 50, 31, save_original_input=saves)
        for saves in (False, True)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x, more = torch.randn(40, 50), () if splits is None else (splits,)
    assert_same(*(step(layer, x, CHOSEN[name], *more) for layer in layers))


def test_the_input_itself_is_held_and_no_copy_of_it() -> None:
    layer, x = saving_input(bias=False), torch.randn(4, 8, 64)
    with active("mxfp8"), saved_tensors() as saved:
        layer(x)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]


def test_a_write_to_the_input_is_noticed() -> None:
    layer, x = saving_input(), torch.randn(8, 64)
    with active("mxfp8"):
        y = layer(x)
    x.zero_()
    with pytest.raises(OperandError, match="was written in place since forward"):
        y.sum().backward()


def test_an_input_is_cast_again_by_the_delayed_scale_of_forward() -> None:
    found = []
    for saves in (False, True):
        torch.manual_seed(1)
        layer, x = Linear(64, 32, save_original_input=saves), torch.randn(8, 64)
        with active("delayed"):
            layer(x)
        with active("delayed"):
            y = layer(x)
        layer.scale_fwd.fill_(3.0)
        y.sum().backward()
        found.append(layer.weight.grad)
    assert torch.equal(*found)


def test_nan_of_an_input_that_is_cast_again_is_counted_once() -> None:
    layer, other, x = saving_input(), Linear(64, 32), torch.randn(32, 64)
    clear_found_inf(torch.nn.ModuleList((layer, other)))
    x[3, 5] = torch.nan
    with active("mxfp8"):
        y = layer(x)
    counted = found_inf(layer)
    y.sum().backward()
    with active("mxfp8"):
        other(x)
    assert torch.equal(counted, found_inf(other))
