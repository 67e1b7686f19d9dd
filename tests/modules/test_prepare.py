"""``prepare(model, recipe)``: delayed state before its first use, so that a checkpoint finds it."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8core
from fp8core import RecipeError, autocast, ops, prepare, recipe
from tests.device import DEVICE
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

RECIPE = recipe.DelayedScaling(amax_history_len=4)
OTHER = recipe.DelayedScaling(amax_history_len=6)
SECOND_HIGH = recipe.PerLayer({"1": None}, default=RECIPE)
STATE = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd", "delayed_meta")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = fp8core.GroupedLinear(3, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x, [1, 0, len(x) - 1])
        return y


def converted() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    fp8core.convert(model, RECIPE)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linears": lambda: nn.Sequential(fp8core.Linear(32, 32), fp8core.Linear(32, 32, bias=False)),
    "mlp": lambda: nn.Sequential(fp8core.LayerNormMLP(32, 64), fp8core.RMSNorm(32)),
    "norm and linear": lambda: nn.Sequential(fp8core.LayerNormLinear(32, 32)),
    "one layer": lambda: fp8core.Linear(32, 32),
    "grouped": Experts,
    "chain": lambda: nn.Sequential(
        ops.Sequential(
            ops.RMSNorm(32), ops.Linear(32, 64), ops.Sequential(ops.SwiGLU(), ops.Linear(32, 32))
        )
    ),
    "converted": converted,
    "shared": lambda: nn.Sequential(*[fp8core.Linear(32, 32)] * 2),
}


def rows(seed: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int, chosen: recipe.Recipe = RECIPE) -> torch.Tensor:
    model.zero_grad()
    with autocast(recipe=chosen):
        y: torch.Tensor = model(rows(seed))
    y.square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-3)
    return y.detach()


def trained(kind: str, chosen: recipe.Recipe = RECIPE) -> nn.Module:
    model = prepare(MODELS[kind]())
    for seed in range(3):
        step(model, seed, chosen)
    return model


def through_a_distributed_checkpoint(saved: nn.Module, loaded: nn.Module, folder: Path) -> None:
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)


def same(found: nn.Module, wanted: nn.Module) -> bool:
    a, b = found.state_dict(), wanted.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("kind", MODELS)
def test_prepared_and_trained_models_have_the_same_state(kind: str) -> None:
    model, wanted = prepare(MODELS[kind](), RECIPE), trained(kind)
    found = {key: (own.shape, own.dtype) for key, own in model.state_dict().items()}
    assert found == {key: (own.shape, own.dtype) for key, own in wanted.state_dict().items()}
    meta = [key for key in found if key.endswith("delayed_meta")]
    assert meta
    state, other = model.state_dict(), wanted.state_dict()
    assert all(torch.equal(state[key], other[key]) for key in meta)


@pytest.mark.parametrize("kind", MODELS)
def test_training_of_a_prepared_model_has_the_bits_of_one_that_is_not(kind: str) -> None:
    model = MODELS[kind]()
    plain = copy.deepcopy(model)
    prepare(model, RECIPE)
    for seed in range(3):
        assert torch.equal(step(model, seed), step(plain, seed))
    assert same(model, plain)


@pytest.mark.parametrize("is_grouped", [False, True], ids=["no group", "gloo"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_fresh_model_gets_its_state_from_a_distributed_checkpoint(
    kind: str, is_grouped: bool, tmp_path: Path
) -> None:
    saved, loaded = trained(kind), prepare(MODELS[kind](), RECIPE)
    if is_grouped:
        store = torch.distributed.FileStore(str(tmp_path / "rendezvous"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        through_a_distributed_checkpoint(saved, loaded, tmp_path / "checkpoint")
    finally:
        if is_grouped:
            torch.distributed.destroy_process_group()
    assert same(loaded, saved)
    for seed in range(3):
        assert torch.equal(step(loaded, seed), step(saved, seed))
    assert same(loaded, saved)


def nested(rank: int, folder: str) -> dict[str, Any]:
    """Save a trained model as torch's guides do, and load it plainly into fresh ones."""
    torch.manual_seed(0)  # ranks train the same model
    found = {}
    for kind in ("linears", "converted"):
        saved, bare, prepared = trained(kind), MODELS[kind](), prepare(MODELS[kind](), RECIPE)
        dcp.save({"model": saved.state_dict()}, checkpoint_id=f"{folder}/{kind}")
        for model in (bare, prepared):
            dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/{kind}")
        weights = {name: own for name, own in saved.named_parameters()}
        has_weights = all(torch.equal(own, weights[name]) for name, own in bare.named_parameters())
        has_none = not any(key.endswith(STATE) for key in bare.state_dict())
        is_whole = same(prepared, saved)
        goes_on = torch.equal(step(prepared, 3), step(saved, 3)) and same(prepared, saved)
        found[kind] = [has_weights, has_none, is_whole, goes_on]
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_plain_load_gives_scales_to_a_prepared_model_and_weights_alone_to_another(
    count: int, tmp_path: Path
) -> None:
    wanted = dict.fromkeys(["linears", "converted"], [True] * 4)
    assert (
        run_ranks(nested, tmp_path, str(tmp_path / "saved"), world_size=count) == [wanted] * count
    )


def test_a_fresh_model_on_meta_gets_its_state_with_its_memory(tmp_path: Path) -> None:
    saved = trained("mlp")
    with torch.device("meta"):
        loaded = nn.Sequential(
            fp8core.LayerNormMLP(32, 64, device="meta"), fp8core.RMSNorm(32, device="meta")
        )
    prepare(loaded, RECIPE)
    assert {loaded[0].scale_fwd.device.type, loaded[0].delayed_meta.device.type} == {"meta"}
    loaded.to_empty(device=DEVICE)
    loaded[0].reset_parameters()
    through_a_distributed_checkpoint(saved, loaded, tmp_path)
    assert same(loaded, saved)


def test_layers_that_the_recipe_leaves_in_high_precision_get_none() -> None:
    model = prepare(MODELS["linears"](), SECOND_HIGH)
    assert set(model[0].state_dict()) == {"weight", "bias", *STATE}
    assert set(model[1].state_dict()) == {"weight"}


def test_operations_of_a_chain_get_none_of_their_own() -> None:
    model = prepare(MODELS["chain"](), RECIPE)
    assert {key.rpartition(".")[0] for key in model.state_dict() if "scale" in key} == {"0"}


@pytest.mark.parametrize("chosen", ["mxfp8", "current", None])
def test_a_recipe_without_state_makes_none(chosen: str | None) -> None:
    assert set(prepare(fp8core.Linear(32, 32), chosen).state_dict()) == {"weight", "bias"}


def test_a_recipe_goes_by_its_name() -> None:
    model = prepare(fp8core.Linear(32, 32), "delayed")
    assert len(model.amax_history_fwd) == recipe.DelayedScaling().amax_history_len


def test_an_unknown_recipe_changes_nothing() -> None:
    model = MODELS["linears"]()
    with pytest.raises(RecipeError, match=r"prepare\(recipe=...\): no recipe is called 'delaid'"):
        prepare(model, "delaid")
    assert model[0].name is None


def test_preparing_again_keeps_the_state() -> None:
    model = trained("linears")
    before = copy.deepcopy(model)
    assert same(prepare(model, RECIPE), before)


def test_preparing_for_another_recipe_starts_fresh(caplog: pytest.LogCaptureFixture) -> None:
    model = prepare(trained("linears"), OTHER)
    assert not model[0].amax_history_fwd.any()
    assert model[0].amax_history_fwd.shape == (6, 3)
    assert sum("starts fresh for" in line for line in caplog.messages) == 2


def test_a_checkpoint_s_state_for_another_recipe_is_refused_and_kept() -> None:
    saved, loaded = trained("linears"), MODELS["linears"]()
    loaded.load_state_dict(saved.state_dict())
    with pytest.raises(
        RecipeError, match=r"'0'.*state in the checkpoint is for .*the recipe needs"
    ):
        prepare(loaded, OTHER)
    assert same(loaded, saved)


def test_training_with_another_recipe_starts_fresh(caplog: pytest.LogCaptureFixture) -> None:
    model = prepare(MODELS["linears"](), OTHER)
    step(model, 0)
    assert model[0].amax_history_fwd.shape == (4, 3)
    assert "starts fresh for" in caplog.text


RESETS: dict[str, Callable[[nn.Module], object]] = {
    "reset_parameters": lambda layer: layer.reset_parameters(),
    "reset_delayed_state": lambda layer: layer.reset_delayed_state(),
    "a plain checkpoint": lambda layer: layer.load_state_dict(fp8core.Linear(32, 32).state_dict()),
    "meta and back": lambda layer: layer.to("meta").to_empty(device=DEVICE),
}


@pytest.mark.parametrize("reset", RESETS)
def test_a_prepared_layer_that_is_reset_has_fresh_state(reset: str) -> None:
    layer = prepare(fp8core.Linear(32, 32), RECIPE)
    step(layer, 0)
    RESETS[reset](layer)
    assert set(layer.state_dict()) == {"weight", "bias", *STATE}
    assert torch.equal(layer.scale_fwd, torch.ones(3))
    assert not layer.amax_history_fwd.any()
    assert not layer.amax_history_bwd.any()


def test_unconverting_takes_the_state_away() -> None:
    model = prepare(converted(), RECIPE)
    fp8core.unconvert(model)
    assert set(model[0].state_dict()) == {"weight", "bias"}
    assert not {"_prepared", "_is_fresh"} & set(vars(model[0]))


def test_a_prepared_model_can_be_copied_and_pickled() -> None:
    def largest(history: torch.Tensor) -> torch.Tensor:
        return history.amax(0)

    local = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=largest)
    model = prepare(MODELS["linears"](), local)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert same(other, model)


@pytest.mark.usefixtures("group_of_one")
def test_data_parallel_leaves_the_state_to_each_rank() -> None:
    model = prepare(MODELS["linears"](), RECIPE)
    wrapped: Any = DistributedDataParallel(model)
    assert not wrapped.modules_buffers


def test_a_converted_model_still_warns_if_nothing_ran_in_low_precision(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    fp8core.convert(model)
    prepare(model, RECIPE)(rows(0))
    assert any("no recipe is active" in one.message for one in caplog.records)


def test_a_fresh_layer_that_is_evaluated_first_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    for layer in (
        fp8core.Linear(32, 32, name="evaluated_first"),
        prepare(fp8core.Linear(32, 32, name="evaluated_first_prepared"), RECIPE),
    ):
        for _ in range(2):
            with torch.no_grad(), autocast(recipe=RECIPE):
                layer(rows(0))
        lines = [line for line in caplog.messages if f"'{layer.name}'" in line]
        assert len(lines) == 1
        assert "before the first training step" in lines[0]


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_fresh_model_that_is_evaluated_first_warns_in_one_line(
    caplog: pytest.LogCaptureFixture, is_converted: bool
) -> None:
    kind = nn.Linear if is_converted else fp8core.Linear
    model = nn.Sequential(*(kind(32, 32) for _ in range(5)))
    names = [f"of_a_model_{is_converted}_{at}" for at in range(5)]
    model = nn.Sequential(OrderedDict(zip(names, model, strict=True)))
    if is_converted:
        fp8core.convert(model, RECIPE)
    prepare(model, RECIPE)
    for _ in range(2):
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if not is_converted:
                stack.enter_context(autocast(recipe=RECIPE))
            model(rows(0))
    lines = [line for line in caplog.messages if "first training step" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"5 layers ('{names[0]}' ")
    assert " and 2 more): evaluated under delayed scaling before" in lines[0]


def test_no_other_evaluation_warns(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    saved = trained("one layer")
    loaded, calibrated = fp8core.Linear(32, 32), fp8core.Linear(32, 32)
    loaded.load_state_dict(saved.state_dict())
    with autocast(enabled=False, calibrating=True, recipe=RECIPE), torch.no_grad():
        calibrated(rows(0))
    in_place = prepare(fp8core.Linear(32, 32), RECIPE)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    dcp.load(in_place.state_dict(), checkpoint_id=tmp_path)
    for layer in (saved, loaded, calibrated, in_place):
        with torch.no_grad(), autocast(recipe=RECIPE):
            layer(rows(0))
    assert "first training step" not in caplog.text
