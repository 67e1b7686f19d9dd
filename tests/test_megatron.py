"""The provider of Megatron-core's modules, without Transformer Engine's name: see the program
``tests/megatron_provider.py``, which one process runs for all tests."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from typing import Any

import pytest

from tests import forked
from tests.megatron_provider import CONFIGURATIONS, REFUSED

if importlib.util.find_spec("megatron") is None or not importlib.util.find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.megatron_provider"]
    done = forked.run(command, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_megatron_has_no_transformer_engine(seen: Any) -> None:
    """Else its tests would say nothing of the provider alone."""
    assert seen["HAVE_TE"] is False


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_it_trains(seen: Any, name: str) -> None:
    losses = seen["losses"][name]
    assert losses[0] == pytest.approx(math.log(128), abs=0.3)  # random weights
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_low_precision_is_near_bf16_and_not_it(seen: Any, name: str) -> None:
    losses, bf16 = seen["losses"][name], seen["losses"]["bf16"]
    assert losses != bf16
    assert losses == pytest.approx(bf16, rel=0.02)


def test_every_linear_of_a_layer_ran_in_the_recipe(seen: Any) -> None:
    """A context of Megatron is an empty one without Transformer Engine, and silently so."""
    ours = [text for text in seen["ran"] if text.startswith("Fp8Core")]
    assert len(ours) == 2 * 4
    assert all("last run: DelayedScaling" in text for text in ours)


def test_a_delayed_scale_follows_the_largest_of_microbatches(seen: Any) -> None:
    scale, want = seen["scale"]
    assert scale == pytest.approx(want)


def test_scales_of_attention_follow_its_inputs(seen: Any) -> None:
    assert all(scale > 2 for scale in seen["attention"]["scales"])  # of q, k and v, all below 224


def test_a_distributed_checkpoint_has_the_delayed_scales_before_a_step(seen: Any) -> None:
    """It loads what the model has then; all else in it is left unread, in silence."""
    keys = seen["attention"]["before"]
    assert keys == seen["attention"]["after"]
    for part in ("self_attention.linear_qkv", "self_attention.core_attention", "mlp.linear_fc2"):
        assert f"decoder.layers.0.{part}.scale_fwd" in keys
        assert f"decoder.layers.0.{part}.amax_history_bwd" in keys


def test_a_loaded_model_computes_as_the_saved_one(seen: Any) -> None:
    assert seen["attention"]["is_resumed"]


def test_scales_that_follow_the_last_microbatch_alone_are_logged(seen: Any) -> None:
    (line,) = [line for line in seen["logged"] if "most_recent" in line]
    assert "fp8_amax_compute_algo='max'" in line


def test_a_layer_computes_what_torch_computes(seen: Any) -> None:
    assert seen["layer"] < 1e-5


def test_keys_of_a_checkpoint_are_megatrons(seen: Any) -> None:
    layer = "decoder.layers.0."
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    assert {f"{layer}{name}.weight" for name in linears} <= {*seen["keys"]}
    assert f"{layer}self_attention.linear_qkv.layer_norm_weight" in seen["keys"]


def test_experts_are_built_of_its_linears(seen: Any) -> None:
    assert seen["experts"] == ["Fp8CoreColumnParallelLinear"] * 4


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_effect_is_refused_by_name(seen: Any, name: str) -> None:
    refusal = seen["refused"][name]
    assert refusal.startswith("UnsupportedError: ")
    assert name in refusal
