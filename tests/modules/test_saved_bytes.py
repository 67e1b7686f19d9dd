"""What a LayerNormMLP keeps between forward and backward, by recipe."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import LayerNormMLP, autocast, recipe, use_backend
from fp8core.backend_api import OPTIONAL_OPS, OpDesc
from fp8core_backends.reference.backend import ReferenceBackend
from tests.dispatch import toys
from tests.pairs import turns

ROWS, HIDDEN, FFN = 128, 128, 256
FP8 = [name for name in recipe.names() if name != "nvfp4"]
BF16_BYTES, FP8_BYTES, SCALE_BYTES = 2, 1, 4


def saved_bytes(name: str | None, **arguments: object) -> int:
    """Return the bytes of the distinct storages that autograd saves, parameters left out."""
    layer = LayerNormMLP(HIDDEN, FFN, params_dtype=torch.bfloat16, **arguments)
    x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    chosen = None if name is None else recipe.by_name(name)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast(enabled=chosen is not None, recipe=chosen),
    ):
        y = layer(x)
    assert y.requires_grad
    for parameter in layer.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


INPUT = ROWS * HIDDEN * BF16_BYTES
STATISTICS = ROWS * 4
ACTIVATION_INPUT = ROWS * FFN * BF16_BYTES


def test_bf16_keeps_both_linears_inputs() -> None:
    linears = (ROWS * HIDDEN + ROWS * FFN) * BF16_BYTES
    want = INPUT + STATISTICS + ACTIVATION_INPUT + linears
    assert saved_bytes(None, normalization="RMSNorm") == want


def test_current_scaling_keeps_one_byte_an_element_and_one_scale_a_tensor() -> None:
    inputs = (ROWS * HIDDEN + ROWS * FFN) * FP8_BYTES + 2 * SCALE_BYTES
    weights = 2 * HIDDEN * FFN * FP8_BYTES + 2 * SCALE_BYTES
    want = INPUT + STATISTICS + ACTIVATION_INPUT + inputs + weights
    assert saved_bytes("current", normalization="RMSNorm") == want


def test_block_scaling_keeps_one_scale_a_block() -> None:
    # inputs: one scale for 128 rows of a column; weights: one for 128 x 128
    inputs = (ROWS * HIDDEN + ROWS * FFN) * FP8_BYTES
    inputs += (HIDDEN + FFN) * (ROWS // 128) * SCALE_BYTES
    weights = 2 * HIDDEN * FFN * FP8_BYTES + 2 * (HIDDEN // 128) * (FFN // 128) * SCALE_BYTES
    want = INPUT + STATISTICS + ACTIVATION_INPUT + inputs + weights
    assert saved_bytes("block", normalization="RMSNorm") == want


def test_activations_in_fp8_take_less_than_in_bf16() -> None:
    """Weights, kept from one microbatch to the next, are taken off: they do not grow with rows."""
    for name, activation in turns(FP8, ["gelu", "swiglu"]):
        inner = 2 * FFN if activation == "swiglu" else FFN
        weights = (inner * HIDDEN + FFN * HIDDEN) * FP8_BYTES
        in_fp8 = saved_bytes(name, activation=activation) - weights
        assert in_fp8 < saved_bytes(None, activation=activation), (name, activation)


@pytest.mark.parametrize("name", [None, *recipe.names()])
def test_frozen_layers_save_nothing(name: str | None) -> None:
    layer = LayerNormMLP(HIDDEN, FFN).requires_grad_(False)
    saved: list[torch.Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        autocast(enabled=name is not None, recipe=recipe.by_name(name or "current")),
    ):
        layer(torch.zeros(32, HIDDEN))
    assert saved == []


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

    def without_fusions(desc: OpDesc) -> str | None:
        return f"fuses no {desc.op}" if desc.op in OPTIONAL_OPS else None

    with toys.isolation():
        toys.register(toys.backend("toy", bind=bind, refuse=without_fusions))
        layer = LayerNormMLP(HIDDEN, FFN, bias=False, params_dtype=torch.bfloat16)
        x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        with use_backend("toy"), autocast(recipe=recipe.Float8CurrentScaling()):
            y = layer(x)
        assert y.grad_fn is not None
        saved = [one for one in y.grad_fn.saved_tensors if one is not None]  # type: ignore[attr-defined]
        (own,) = (one for one in saved if one.shape == (ROWS, FFN) and one.dtype == x.dtype)
        held.append(weakref.ref(own))
        del own, saved
        y.sum().backward(retain_graph=retains)
    at = [name for name, _ in steps].index("activation_backward")
    assert steps[at] == ("activation_backward", True)
    assert steps[at + 1] == ("quantize", retains)
