"""Layers on meta: which device a layer is made on, and how one on meta becomes real."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8core
from fp8core import ops
from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core.dispatch import plugins
from fp8core.modules.calls.base import LowPrecisionModule

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

LAYERS: dict[str, Callable[..., LowPrecisionModule]] = {
    "Linear": lambda **own: fp8core.Linear(32, 64, **own),
    "parts": lambda **own: fp8core.Linear(32, 64, parameters_split=["query", "key"], **own),
    "LayerNormLinear": lambda **own: fp8core.LayerNormLinear(32, 64, **own),
    "LayerNormMLP": lambda **own: fp8core.LayerNormMLP(32, 64, **own),
    "GroupedLinear": lambda **own: fp8core.GroupedLinear(2, 32, 64, **own),
    "LayerNorm": lambda **own: fp8core.LayerNorm(32, zero_centered_gamma=True, **own),
    "RMSNorm": lambda **own: fp8core.RMSNorm(32, **own),
    "Bias": lambda **own: ops.Bias(32, **own),
}


def devices(layer: torch.nn.Module) -> set[str]:
    return {parameter.device.type for parameter in layer.parameters()}


def filled(layer: LowPrecisionModule) -> dict[str, torch.Tensor]:
    """Return the parameters after a reset that draws from a known seed."""
    torch.manual_seed(5)
    layer.reset_parameters()
    return {name: own.detach() for name, own in layer.named_parameters()}


@pytest.mark.parametrize("kind", LAYERS)
def test_reset_parameters_makes_a_layer_on_meta_real(kind: str) -> None:
    layer = LAYERS[kind](device="meta")
    assert devices(layer) == {"meta"}
    found, wanted = filled(layer), filled(LAYERS[kind](device="cpu"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", LAYERS)
def test_defer_init_leaves_a_layer_on_meta(kind: str) -> None:
    layer = LAYERS[kind](device="meta")
    layer.reset_parameters(defer_init=True)
    assert devices(layer) == {"meta"}


def test_defer_init_leaves_values_as_they_are() -> None:
    layer = fp8core.Linear(8, 8)
    before = layer.weight.detach().clone()
    layer.reset_parameters(defer_init=True)
    assert torch.equal(layer.weight, before)


def test_a_subclass_may_reset_as_torch_s_layers_do() -> None:
    class Ones(fp8core.Linear):
        def reset_parameters(self) -> None:
            torch.nn.init.ones_(self.weight)

    assert bool((Ones(8, 8).weight == 1).all())


def test_a_parametrized_weight_stays_as_it_is() -> None:
    layer = fp8core.Linear(8, 8)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight")
    before = layer.weight.detach().clone()
    torch.nn.init.ones_(layer.bias)
    layer.reset_parameters()
    assert torch.equal(layer.weight, before)
    assert not layer.bias.any()


def test_a_layer_made_real_trains() -> None:
    layer = fp8core.Linear(32, 32, device="meta")
    layer.reset_parameters()
    with fp8core.autocast(recipe="delayed"):
        layer(torch.randn(4, 32)).sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_parameters_made_real_keep_what_was_set_on_them() -> None:
    layer = fp8core.Linear(8, 8, device="meta")
    layer.weight.requires_grad_(False)
    layer.weight.partition_dim = 1
    layer.reset_parameters()
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
    assert layer.weight.partition_dim == 1


def test_one_parameter_under_two_names_stays_one() -> None:
    layer = fp8core.GroupedLinear(2, 8, 8, device="meta")
    layer.weight1 = layer.weight0
    layer.reset_parameters()
    assert layer.weight1 is layer.weight0


def test_a_quantized_weight_is_made_real() -> None:
    with fp8core.quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
        layer = fp8core.Linear(96, 64, device="meta", params_dtype=torch.bfloat16)
    layer.reset_parameters()
    weight = layer.weight
    assert isinstance(weight, fp8core.QuantizedTensor)
    assert isinstance(weight, torch.nn.Parameter)
    assert devices(layer) == {"cpu"}
    again = fp8core.QuantizedTensor.quantize(weight.get_high_precision_init_val(), weight.plan)
    assert all(torch.equal(*p) for p in zip(again.tensors(), weight.tensors(), strict=True))


def test_a_converted_layer_stays_on_meta_as_torch_s() -> None:
    layer = torch.nn.Linear(8, 8, device="meta")
    fp8core.convert(layer, "mxfp8")
    layer.reset_parameters()
    assert devices(layer) == {"meta"}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[torch.distributed.DeviceMesh]:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


# torch warns that what a rank of a mesh on the CPU draws is not the shard of one global draw.
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_sharded_layer_on_meta_is_filled(
    mesh: torch.distributed.DeviceMesh, is_emptied: bool
) -> None:
    layer = fully_shard(fp8core.Linear(32, 32, device="meta"), mesh=mesh)
    if is_emptied:
        layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert isinstance(layer.weight, DTensor)
    with fp8core.autocast(recipe="current"):
        layer(torch.randn(4, 32)).sum().backward()
    assert 0 < layer.weight.full_tensor().std() < 1


# --- the default device ---


@pytest.fixture
def backend_on_meta() -> Iterator[str]:
    """A backend whose preferred device is meta."""

    class Plugin:
        @hookimpl
        def fp8core_register_backends(self, register: Callable[[BackendSpec], None]) -> None:
            factory = "fp8core_backends.reference.backend:ReferenceBackend"
            register(
                BackendSpec("on_meta", ("meta",), factory, priority=-1, api_version=API_VERSION)
            )

    plugins.register(Plugin(), "on_meta")
    yield "on_meta"
    plugins.reload()


def test_the_device_is_the_selected_backend_s(backend_on_meta: str) -> None:
    assert devices(fp8core.Linear(6, 4)) == {"cpu"}
    with fp8core.use_backend(backend_on_meta):
        assert devices(fp8core.Linear(6, 4)) == {"meta"}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_default_device_of_the_user_s_is_taken(kind: str) -> None:
    with torch.device("meta"):
        assert devices(LAYERS[kind]()) == {"meta"}


def test_set_default_device_is_taken() -> None:
    torch.set_default_device("meta")
    try:
        assert devices(fp8core.Linear(8, 8)) == {"meta"}
    finally:
        torch.set_default_device(None)
    assert devices(fp8core.Linear(8, 8)) == {"cpu"}


def test_a_device_that_is_given_comes_before_the_default_one() -> None:
    with torch.device("meta"):
        assert devices(fp8core.Linear(8, 8, device="cpu")) == {"cpu"}


def test_the_cpu_as_the_user_s_default_comes_before_the_backend_s_device(
    backend_on_meta: str,
) -> None:
    with fp8core.use_backend(backend_on_meta), torch.device("cpu"):
        assert devices(fp8core.Linear(8, 8)) == {"cpu"}


def test_nothing_is_made_real_where_meta_is_the_default() -> None:
    with torch.device("meta"):
        layer = fp8core.Linear(8, 8)
        layer.reset_parameters()
    assert devices(layer) == {"meta"}
    layer.reset_parameters()
    assert devices(layer) == {"cpu"}


def test_a_quantized_weight_is_made_on_the_default_device() -> None:
    with torch.device("meta"), fp8core.quantized_model_init(recipe="mxfp8"):
        layer = fp8core.Linear(96, 64)
    assert isinstance(layer.weight, fp8core.QuantizedTensor)
    assert devices(layer) == {"meta"}


@pytest.mark.parametrize("recipe", fp8core.recipe.names())
def test_a_layer_runs_where_another_device_is_the_default(recipe: str) -> None:
    layer, x = fp8core.LayerNormMLP(32, 32, device="cpu"), torch.randn(32, 32)
    with torch.device("meta"), fp8core.autocast(recipe=recipe):
        layer(x).sum().backward()
    assert layer.fc1_weight.grad.isfinite().all()
