"""The converter and the override of torchtitan, on its models' configs and modules."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import fp8core
from fp8core import OperandError, RecipeError
from fp8core.recipe import DelayedScaling
from fp8core.recipe.data import as_data
from tests.ranks import run_ranks

# It imports triton, which machines without a GPU often lack.
pytest.importorskip("triton", reason="triton is not installed, which torchtitan imports")
pytest.importorskip("torchtitan.models.common", reason="torchtitan is not installed")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.decoder_sharding import colwise_config, rowwise_config
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import model_registry

from fp8core.torchtitan import Fp8CoreConverter, Fp8CoreLinear

INIT = {"weight": partial(nn.init.normal_, std=0.1), "bias": nn.init.zeros_}


def feed_forward() -> Any:
    sizes = {"w1": (32, 64), "w2": (64, 32), "w3": (32, 64)}
    return FeedForward.Config(
        **{
            name: Linear.Config(in_features=k, out_features=n, bias=True, param_init=INIT)
            for name, (k, n) in sizes.items()
        }
    )


def built(config: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    model.init_states()
    return model


def converted(recipe: Any, **named: Any) -> Any:
    return built(Fp8CoreConverter.Config(recipe=recipe, **named).build().convert(feed_forward()))


def train(model: Any, steps: int = 4) -> list[float]:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_converted_config_builds_a_model_that_trains_as_a_converted_model() -> None:
    """The same weights as torchtitan's linear gets, and the same losses as ``fp8core.convert``."""
    model = converted("mxfp8")
    plain = built(feed_forward())
    assert model.state_dict().keys() == plain.state_dict().keys()
    other = nn.ModuleDict(
        {
            name: nn.Linear(*reversed(getattr(plain, name).weight.shape))
            for name in ("w1", "w2", "w3")
        }
    )
    other.load_state_dict(plain.state_dict())
    fp8core.convert(other, "mxfp8")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = nn.functional.silu(self.parts["w1"](x)) * self.parts["w3"](x)
            result: torch.Tensor = self.parts["w2"](gate)
            return result

    losses = train(model)
    assert losses == train(Model())
    assert losses[-1] < losses[0]


def test_delayed_scaling_trains() -> None:
    losses = train(converted(as_data(DelayedScaling(amax_history_len=4))))
    assert losses[-1] < losses[0]


def test_delayed_scales_are_updated_with_each_call() -> None:
    model = converted(as_data(DelayedScaling(amax_history_len=4)))
    x = torch.randn(32, 32)
    model(x).sum().backward()
    assert model.w1.scale_fwd[0].item() == pytest.approx(448 / x.abs().max().item())


def test_a_checkpoint_has_the_delayed_scales_before_a_step() -> None:
    """A distributed one loads what the model has then, and says nothing of the rest."""
    model = converted(as_data(DelayedScaling(amax_history_len=4)))
    keys = model.state_dict().keys()
    assert {f"{name}.scale_fwd" for name in ("w1", "w2", "w3")} <= keys
    assert torch.equal(model.w1.scale_fwd, torch.ones(3))
    model(torch.randn(32, 32)).sum().backward()
    assert model.state_dict().keys() == keys


def test_llama_is_converted_but_its_head() -> None:
    converter = Fp8CoreConverter.Config(recipe="mxfp8")
    config = model_registry("debugmodel", converters=[converter]).model
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert sum(kind is Fp8CoreLinear for kind in kinds.values()) == 6 * 5
    assert kinds["lm_head"] is Linear
    assert model.layers["0"].attention.wo.name == "layers.0.attention.wo"


def test_the_override_replaces_the_layers_of_blocks() -> None:
    config = model_registry("debugmodel").model
    entry = ("fp8core.torchtitan.fp8core_linear", {"recipe": "current"})
    lines = apply_overrides(OverrideConfig(imports=[entry]), config)
    assert len(lines) == 6 * 5
    found = {fqn: one for fqn, one, _, _ in config.traverse(Linear.Config)}
    ours = {fqn for fqn, one in found.items() if isinstance(one, Fp8CoreLinear.Config)}
    assert len(ours) == 6 * 5
    assert found.keys() - ours == {"lm_head"}
    assert {found[fqn].recipe for fqn in ours} == {"current"}


def test_patterns_choose_the_layers() -> None:
    model = converted("mxfp8", filter_fqns=["w2"])
    assert type(model.w2) is Linear
    assert type(model.w1) is Fp8CoreLinear
    model = converted("mxfp8", fqns=["w2"])
    assert type(model.w2) is Fp8CoreLinear
    assert type(model.w1) is Linear


def test_a_config_is_written_as_json() -> None:
    config = Fp8CoreConverter.Config(recipe=as_data(DelayedScaling(amax_history_len=4)))
    written = json.loads(json.dumps(config.to_dict()))
    assert written["recipe"] == {"recipe": "DelayedScaling", "amax_history_len": 4}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "mxpf8"}, "Did you mean 'mxfp8'"),
        ({"recipe": None}, "expected a recipe"),
        ({"fqns": ["w4"]}, r"filter='w4'.*no layer has that in its path"),
        ({"filter_fqns": ["w4"]}, r"skip='w4'.*no layer has that in its path"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Fp8CoreConverter.Config(**given).build().convert(feed_forward())


# What the ranks of tensor parallelism get: few distinct numbers, whose products are exact.
ROWS = torch.arange(32 * 64).reshape(32, 64).remainder(17).sub(8).div(64)
WEIGHTS = {
    name: torch.arange(n * k).reshape(n, k).remainder(period).sub(period // 2).div(64)
    for name, (n, k), period in (("w1", (128, 64), 11), ("w2", (64, 128), 13), ("w3", (128, 64), 7))
}


def multiply(w1: Any, w2: Any, w3: Any, x: torch.Tensor) -> Any:
    """A feed-forward without an exponential, whose bits would depend on more than the numbers."""
    return w2(w1(x) * w3(x))


def layers(backend: str, recipe: str) -> tuple[dict[str, Any], Any, Any]:
    """This rank's linears, spread over all ranks as torchtitan spreads them, the context in which
    it runs them, and the sizes of its meshes."""
    parallel_dims.device_type = "cpu"  # of a machine without accelerator it says cuda
    sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "world_size": 2}
    dims = ParallelDims(**sizes, spmd_backend=backend)
    dims.build_mesh()
    set_spmd_backend(backend)
    built: dict[str, Any] = {}
    for name, weight in WEIGHTS.items():
        n, k = weight.shape
        sharding = rowwise_config() if name == "w2" else colwise_config()
        config = Fp8CoreLinear.Config(
            in_features=k, out_features=n, recipe=recipe, sharding_config=sharding, name=name
        )
        built[name] = config.build()
        with torch.no_grad():
            built[name].weight.copy_(weight)
        built[name].parallelize(dims)
    return built, get_spmd_context(parallel_dims=dims), dims


def tensor_parallel(rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {
        f"{backend} {recipe}": of_this_rank(backend, recipe)
        for backend in ("spmd_types", "partial_dtensor")
        for recipe in ("mxfp8", "current")
    }
    built, context, dims = layers("partial_dtensor", "mxfp8")
    with context(), pytest.raises(OperandError) as refused:
        built["w2"](DTensor.from_local(torch.ones(32, 128), dims.get_mesh("tp"), (Replicate(),)))
    seen["layout"] = str(refused.value)
    config = Fp8CoreLinear.Config(
        in_features=64, out_features=64, bias=True, sharding_config=rowwise_config(), name="w2"
    )
    with pytest.raises(OperandError) as refused:
        config.build().parallelize(dims)
    seen["bias"] = str(refused.value)
    return seen


def of_this_rank(backend: str, recipe: str) -> dict[str, Any]:
    built, context, dims = layers(backend, recipe)
    x: Any = ROWS.clone().requires_grad_()
    with context():
        given = x
        if backend == "partial_dtensor":
            mesh = dims.get_mesh("tp")
            given = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
        y = multiply(**built, x=given)
        whole = y if backend == "spmd_types" else y.full_tensor()
        whole.square().sum().backward()
    # Clones, as collectives return tensors that wait for the values.
    return {
        "y": whole.detach().clone(),
        "x": x.grad.clone(),
        "grads": {name: local(one.weight.grad).clone() for name, one in built.items()},
        "text": repr(built["w2"]),
    }


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts_in_one_process(recipe: str) -> tuple[torch.Tensor, list[dict[str, Any]], torch.Tensor]:
    """The sum of what two parts of the layers return, their gradients, and that of the input."""
    inputs = [ROWS.clone().requires_grad_() for _ in range(2)]
    parts = []
    for rank in range(2):
        part = nn.ModuleDict()
        for name, weight in WEIGHTS.items():
            mine = weight.chunk(2, dim=1 if name == "w2" else 0)[rank]
            part[name] = nn.Linear(mine.shape[1], mine.shape[0], bias=False)
            with torch.no_grad():
                part[name].weight.copy_(mine)
        fp8core.convert(part, recipe)
        parts.append(part)
    one, other = (
        multiply(**dict(part.items()), x=x) for part, x in zip(parts, inputs, strict=True)
    )
    y = one + other
    y.square().sum().backward()
    grads = [{name: one.weight.grad for name, one in part.items()} for part in parts]
    return y.detach(), grads, sum(x.grad for x in inputs)  # type: ignore[return-value, misc]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(tensor_parallel, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("backend", ["spmd_types", "partial_dtensor"])
@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test_tensor_parallel_ranks_compute_their_parts(
    ranks: list[Any], backend: str, recipe: str
) -> None:
    y, grads, x = parts_in_one_process(recipe)
    for rank, results in enumerate(ranks):
        seen = results[f"{backend} {recipe}"]
        assert "in_features=64, out_features=64" in seen["text"]
        assert torch.equal(seen["y"], y)
        for name, grad in grads[rank].items():
            assert torch.equal(seen["grads"][name], grad), name
        if backend == "partial_dtensor":  # torchtitan sums it elsewhere under spmd_types
            assert torch.equal(seen["x"], x)


def test_layouts_of_which_no_rank_has_a_part_are_refused(ranks: list[Any]) -> None:
    assert all("the input lies as (Replicate(),)" in seen["layout"] for seen in ranks)
    assert all("would add. Leave the layer out by filter_fqns" in seen["bias"] for seen in ranks)
