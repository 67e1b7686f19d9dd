"""Parts of a weight as one tensor: the memory of the parts while they lie in one buffer, and the
values and gradients of torch.cat always."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fp8core
from fp8core import Linear, cpu_offload, recipe
from fp8core.parameter import joined
from fp8core.tensors.requantized import is_of_parameter

SIZES = {"q": 16, "k": 32, "v": 16}


@pytest.fixture(autouse=True)
def join_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_MIN_BYTES", 0)


def make(dtype: torch.dtype = torch.bfloat16) -> Linear:
    torch.manual_seed(0)
    layer = Linear(32, 64, parameters_split=SIZES, params_dtype=dtype, device="cpu")
    for part in SIZES:
        torch.nn.init.normal_(getattr(layer, f"{part}_bias"))
    return layer


def weights(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [getattr(layer, f"{part}_weight") for part in SIZES]


def is_view(layer: Linear) -> bool:
    """Say whether the layer computes with the memory of its parameters."""
    weight = layer.link_params()[0]
    return weight.data_ptr() == weights(layer)[0].data_ptr()


def reloaded(layer: Linear) -> Linear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded: Linear = torch.load(file, weights_only=False)
    return loaded


def with_one_replaced(layer: Linear) -> Linear:
    layer.k_weight = torch.nn.Parameter(layer.k_weight.detach().clone())
    return layer


def with_data_exchanged(layer: Linear) -> Linear:
    layer.q_weight.data, layer.v_weight.data = layer.v_weight.data, layer.q_weight.data
    return layer


def with_a_transposed_part(layer: Linear) -> Linear:
    layer.v_weight.data = torch.randn(32, 16).to(layer.v_weight.dtype).t()
    return layer


def with_an_alias(layer: Linear) -> Linear:
    """Put a parameter in the same memory, whose writes do not count as writes to the others."""
    layer.k_weight = torch.nn.Parameter(layer.k_weight.data)
    return layer


APART: dict[str, Callable[[Linear], Linear]] = {
    "deepcopy": copy.deepcopy,
    "pickle": reloaded,
    "to another dtype": lambda layer: layer.to(torch.float16),
    "a part replaced": with_one_replaced,
    "an alias": with_an_alias,
    "parts exchanged": with_data_exchanged,
    "a transposed part": with_a_transposed_part,
}
TOGETHER: dict[str, Callable[[Linear], Linear]] = {
    "as made": lambda layer: layer,
    "to where it is": lambda layer: layer.to("cpu"),
    "loaded": lambda layer: (layer.load_state_dict(make().state_dict()), layer)[1],
    "frozen": lambda layer: layer.requires_grad_(False),
}


def test_parts_are_used_where_they_lie() -> None:
    for change in TOGETHER.values():
        assert is_view(change(make()))
    assert [one.shape[0] for one in weights(make())] == [*SIZES.values()]
    assert is_of_parameter(make().link_params()[0])  # which requantize_weights saves


def test_few_bytes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not is_view(make())
    large = Linear(1024, 768, parameters_split=dict.fromkeys(SIZES, 256), device="cpu")
    weight, bias = large.link_params()
    assert weight.data_ptr() == large.q_weight.data_ptr()
    assert bias.data_ptr() != large.q_bias.data_ptr()


@pytest.mark.parametrize("change", APART)
def test_parts_that_are_apart_are_copied(change: str) -> None:
    layer = APART[change](make())
    assert not is_view(layer)
    assert torch.equal(layer.link_params()[0], torch.cat(weights(layer)))


@pytest.mark.parametrize("name", [None, "current", "delayed"])
@pytest.mark.parametrize("change", [*TOGETHER, *APART])
def test_a_split_layer_computes_as_one_with_a_copy(change: str, name: str | None) -> None:
    layer = {**TOGETHER, **APART}[change](make())
    whole = Linear(32, 64, params_dtype=layer.q_weight.dtype, device="cpu")
    with torch.no_grad():
        whole.weight.copy_(torch.cat(weights(layer)))
        whole.bias.copy_(torch.cat([getattr(layer, f"{part}_bias") for part in SIZES]))
    x, found = torch.randn(8, 32, dtype=layer.q_weight.dtype), []
    for one in (layer, whole):
        leaf = x.clone().requires_grad_()
        for _ in range(3):  # remembered, repeated
            with fp8core.autocast(
                enabled=name is not None, recipe=recipe.by_name(name) if name else None
            ):
                y = one(leaf)
            y.backward(torch.ones_like(y))
        found.append([y, leaf.grad])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
    if change != "frozen":
        grads = [part.grad for part in weights(layer)]
        assert torch.equal(torch.cat(grads), whole.weight.grad)


def test_a_write_to_any_part_between_forward_and_backward_is_seen() -> None:
    for part in SIZES:
        layer = make()
        layer.requires_grad_(False)
        x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
        getattr(layer, f"{part}_weight").zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_kept_weight_is_not_used_after_a_write_to_a_part() -> None:
    layer, x = make(), torch.randn(8, 32, dtype=torch.bfloat16)
    with fp8core.autocast(recipe=recipe.by_name("current")):
        layer(x, is_first_microbatch=True)
        layer(x, is_first_microbatch=False)
        with torch.no_grad():
            layer.v_weight.mul_(2)
        with pytest.raises(fp8core.OperandError):
            layer(x, is_first_microbatch=False)


@pytest.mark.parametrize("name", [None, "current"])
def test_an_offload_leaves_the_parts_where_they_are(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_offload, "MIN_ELEMENTS", 64)
    layer, sizes = make(), []
    for one in (layer, copy.deepcopy(layer)):
        context, sync, manual = fp8core.get_cpu_offload_context(
            True, model_layers=1, manual_synchronization=True
        )
        x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
        given = None if name is None else recipe.by_name(name)
        with context, fp8core.autocast(enabled=given is not None, recipe=given):
            y = one(x)
        sync(y)
        manual.start_offload_layer(0)
        sizes.append(manual.get_offloaded_total_size_mb() * 2**20)
    assert sizes[0] == sizes[1] > 0  # weights stay, copied or not


def test_second_derivatives_are_those_of_a_copy() -> None:
    found = []
    for layer in (make(torch.float32), copy.deepcopy(make(torch.float32))):
        x = torch.linspace(-1, 1, 8 * 32).view(8, 32).requires_grad_()
        grads = torch.autograd.grad(layer(x).pow(3).sum(), weights(layer), create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
        found.append(torch.autograd.grad(penalty, [x, *weights(layer)]))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, by jvp
def test_transforms_and_captures_take_a_copy() -> None:
    layer, x = make(torch.float32), torch.randn(8, 32)
    params = dict(layer.named_parameters())
    tangents = {name: torch.ones_like(one) for name, one in params.items()}

    def call(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(layer, params, (x,))

    _, tangent = torch.func.jvp(call, (params,), (tangents,))
    assert torch.allclose(tangent, x.sum(1, keepdim=True) + 1, atol=1e-5)
    traced = make_fx(layer)(x)
    with torch.no_grad():
        layer.k_weight.data = torch.zeros(32, 32)
        assert torch.equal(traced(x), layer(x))


def test_parts_in_one_buffer_are_stored_one_by_one(tmp_path: Path) -> None:
    layer = make()
    safetensors.torch.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "layer.safetensors")
    for part, weight in zip(SIZES, weights(layer), strict=True):
        assert torch.equal(loaded[f"{part}_weight"], weight)
