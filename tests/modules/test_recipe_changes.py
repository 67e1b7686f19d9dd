"""A layer that computes by another kind of recipe than before says so, once."""

from __future__ import annotations

import pytest
import torch

import fp8core
from fp8core import recipe, reporting


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_logged", set())


def run(layer: fp8core.Linear, chosen: recipe.Recipe | None) -> None:
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        layer(torch.ones(32, 32)).sum().backward()


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    layer, other = fp8core.Linear(32, 32), fp8core.Linear(32, 32)
    for one in (layer, other):
        run(one, recipe.Float8CurrentScaling())
    assert "recipe changed" not in caplog.text
    for one in (layer, other, layer):
        run(one, recipe.MXFP8BlockScaling())
    assert caplog.text.count("recipe changed from Float8CurrentScaling to MXFP8BlockScaling") == 1


def test_high_precision_between_two_recipes_hides_no_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = fp8core.Linear(32, 32)
    for chosen in (recipe.Float8CurrentScaling(), None, recipe.MXFP8BlockScaling()):
        run(layer, chosen)
    assert "recipe changed" in caplog.text


def test_another_value_of_the_same_kind_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    layer = fp8core.Linear(32, 32)
    for power in (False, True):
        run(layer, recipe.Float8CurrentScaling(use_power_2_scales=power))
    assert "recipe changed" not in caplog.text


def test_the_layers_of_a_per_layer_recipe_keep_theirs(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(fp8core.Linear(32, 32), fp8core.Linear(32, 32))
    fp8core.prepare(model)
    for rules in ({"0": "mxfp8"}, {"0": "mxfp8", "1": "current"}):
        with fp8core.autocast(recipe=recipe.PerLayer(rules, default="current")):
            model(torch.ones(32, 32))
    assert "recipe changed" not in caplog.text


def test_a_layer_that_quantizes_nothing_has_no_recipe_to_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    norm, t = fp8core.RMSNorm(32), torch.ones(4, 1, 2, 32)
    angles = fp8core.RotaryPositionEmbedding(32)(4)
    for chosen in (recipe.Float8CurrentScaling(), recipe.DelayedScaling()):
        with fp8core.autocast(recipe=chosen):
            fp8core.apply_rotary_pos_emb(norm(t), angles)
    assert "recipe changed" not in caplog.text
