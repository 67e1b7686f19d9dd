"""Megatron-core's GPT with its Transformer Engine spec, unmodified, trains on fp8core.

Skipped without megatron-core (``pip install --no-deps megatron-core==0.16.1 einops``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.megatron_gpt import CONFIGURATIONS, RESUMED

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    "delayed": "TEDelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
# Other layers, weights or optimizers.
OTHER_MODELS = {
    *("qk_layernorm", "swiglu_rmsnorm", "fp8_param", "sequence_parallel", "activation"),
    "window_and_groups",
}
# Configurations of the same model: their losses are compared with those of bf16.
SAME_MODEL = {
    name: "moe_bf16" if name.startswith("moe") else "bf16"
    for name, configuration in CONFIGURATIONS.items()
    if name not in OTHER_MODELS
}
ON_TWO_RANKS = ("bf16", "delayed", "mxfp8", "sequence_parallel", "recompute_delayed")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


def run(folder: Path, world_size: int, names: list[str]) -> list[dict[str, Any]]:
    """The results of each rank, which run the configurations ``names`` one after the other."""
    outputs = [folder / f"rank{rank}.txt" for rank in range(world_size)]
    words = [sys.executable, "-m", "tests.integrations.megatron_gpt", str(folder)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as stream:
            processes.append(
                subprocess.Popen(
                    [*words, str(rank), str(world_size), *names],
                    cwd=ROOT,
                    stdout=stream,
                    stderr=stream,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                )
            )
    try:
        statuses = [process.wait(400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(statuses), "\n".join(output.read_text(errors="replace") for output in outputs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [name for name in CONFIGURATIONS if name != "sequence_parallel"]
    return run(tmp_path_factory.mktemp("alone"), 1, names)[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("ranks"), 2, list(ON_TWO_RANKS))


def test_megatron_has_found_transformer_engine(alone: dict[str, Any]) -> None:
    assert all(alone["claims"].values()), alone["claims"]


def recipe_of(name: str) -> str:
    configuration = CONFIGURATIONS[name]
    if "fp4" in configuration:
        return "NVFP4BlockScaling"
    return RECIPES.get(configuration.get("fp8_recipe", ""), "high precision")


def test_each_configuration_trains_in_its_recipe(alone: dict[str, Any]) -> None:
    for name in CONFIGURATIONS.keys() - {"sequence_parallel"}:
        result = alone[name]
        losses = result["losses"]
        assert losses[0] == pytest.approx(4.88, abs=0.05), name  # log(128), and a little
        assert losses[-1] < losses[0] - 0.5, name
        expected = f"{recipe_of(name)} on reference"
        for layer, ran in result["ran"].items():
            if name == "operations" and ".mlp." in layer:
                continue  # operations compute with its weights
            is_high = name == "first_last_bf16" and layer.startswith("decoder.layers.0.")
            assert ran.startswith("high precision" if is_high else expected), (name, layer)
        assert len(result["ran"]) >= 8, name
        if name != "activation":
            assert any(key.endswith("linear_qkv.weight") for key in result["sharded"]), name


def test_losses_are_near_those_of_bf16(alone: dict[str, Any]) -> None:
    """Within 0.3 of 4.9 after four steps of a large learning rate, 0.02 before any."""
    for name, other in SAME_MODEL.items():
        plain, losses = alone[other]["losses"], alone[name]["losses"]
        assert losses[0] == pytest.approx(plain[0], abs=0.02), name
        assert losses == pytest.approx(plain, abs=0.3), name


def test_recomputing_changes_no_loss(alone: dict[str, Any]) -> None:
    for name in ("delayed", "mxfp8"):
        assert alone[f"recompute_{name}"]["losses"] == alone[name]["losses"]


def test_a_wgrad_in_high_precision_changes_the_losses(alone: dict[str, Any]) -> None:
    off, on = alone["fp8_wgrad_off"]["losses"], alone["delayed"]["losses"]
    assert off[0] == on[0]
    assert off[1:] != on[1:]


def test_fp8_param_stores_weights_quantized(alone: dict[str, Any]) -> None:
    assert alone["fp8_param"]["quantized"] == 8
    assert alone["tensorwise"]["quantized"] == 0


def test_grouped_experts_have_a_sharded_state_dict(alone: dict[str, Any]) -> None:
    keys = [key for key in alone["moe_grouped"]["sharded"] if "experts" in key]
    assert any("_extra_state" in key for key in keys)
    assert any("weight" in key for key in keys)


@pytest.mark.parametrize("name", RESUMED)
def test_a_new_model_resumes_with_the_delayed_scales(alone: dict[str, Any], name: str) -> None:
    resumed = alone[name]["resumed"]
    experts = 2 if "moe" in name else 1
    buffers = 4 * 2 * (2 + 2 * experts)  # of each of two layers: attention, and the MLPs
    assert resumed["scales"] == (buffers if name != "moe_grouped_delayed" else 4 * 2 * 4)
    assert resumed["differ"] == []
    assert resumed["losses"][0] == resumed["losses"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_train_as_one(
    alone: dict[str, Any], ranks: list[dict[str, Any]], name: str
) -> None:
    first, second = (result[name]["losses"] for result in ranks)
    assert first == second
    single = alone["mxfp8" if name == "sequence_parallel" else name]["losses"]
    assert first[0] == pytest.approx(single[0], abs=0.01)
    assert first == pytest.approx(single, abs=0.3)
    assert {ran.partition(" on ")[0] for ran in ranks[0][name]["ran"].values()} == {recipe_of(name)}
