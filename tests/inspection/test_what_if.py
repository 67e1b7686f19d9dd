"""A replay equals running the recipe; the suggestion is a recipe that runs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.monitoring import Monitor, Row
from tests.inspection import models
from tests.pairs import turns

NEAREST = recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
STATELESS: dict[str, str | recipe.Recipe] = {
    **{name: name for name in ("current", "mxfp8", "block", "rowwise")},
    "NVFP4BlockScaling": NEAREST,
}


def observe(model: torch.nn.Module, chosen: recipe.Recipe | None, **options: bool) -> Monitor:
    torch.manual_seed(3)
    x = torch.randn(models.ROWS, 32) * 10.0 ** torch.linspace(-3, 1, models.ROWS)[:, None]
    x = x.to(models.BF16).requires_grad_()
    with (
        te.monitor(model, **options) as watch,
        te.autocast(enabled=chosen is not None, recipe=chosen),
    ):
        y = models.call(model, x)
        y.backward(torch.randn(y.shape).to(models.BF16))
    return watch


def figures(row: Row) -> dict[str, object]:
    """Everything that a replay can know: the casts, but no GEMMs."""
    left_out = ("step", "gemm_backend", "quantized_gemms", "high_precision_gemms")
    made = {name: value for name, value in dataclasses.asdict(row).items() if name not in left_out}
    return {name: str(value) for name, value in made.items()}  # NaN equals itself


@pytest.mark.parametrize(
    ("observed", "label", "layer"),
    [
        *turns([None, "mxfp8", "current"], STATELESS, ["linear", "grouped"]),
        *turns([None], STATELESS, ["grouped", "linear"])[1:],
    ],
)
def test_replay_equals_what_the_recipe_does(observed: str | None, label: str, layer: str) -> None:
    given = STATELESS[label]
    chosen = given if isinstance(given, recipe.Recipe) else recipe.by_name(given)
    want = {row.key: figures(row) for row in observe(models.make(layer), chosen).rows}
    watch = observe(models.make(layer), None if observed is None else recipe.by_name(observed))
    got = {row.key: figures(row) for row in watch.what_if([given]).rows[label]}
    assert got == want


def test_delayed_is_replayed_with_the_scale_of_the_batch() -> None:
    watch = observe(models.make("linear"), None)
    delayed = recipe.DelayedScaling(margin=1)
    (row,) = [
        r
        for r in watch.what_if([delayed]).rows["DelayedScaling"]
        if r.key[1:] == ("input", "rowwise")
    ]
    amax = watch.row("Linear", "input").amax
    assert row.scale_median == pytest.approx(224.0 / amax, rel=1e-6)
    assert row.saturation_share == 0.0


def test_every_recipe_replays_on_every_layer() -> None:
    for layer in models.LAYERS:
        made = observe(models.make(layer), recipe.Float8CurrentScaling()).what_if(recipe.names())
        assert set(made.rows) == set(recipe.names())
        assert len({len(rows) for rows in made.rows.values()}) == 1, layer


def test_replay_runs_on_copies_of_the_tensors_that_were_cast() -> None:
    model = models.make("linear")
    watch = observe(model, recipe.Float8CurrentScaling())
    want = [figures(row) for row in watch.what_if(["mxfp8"]).rows["mxfp8"]]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(100.0)
    assert [figures(row) for row in watch.what_if(["mxfp8"]).rows["mxfp8"]] == want


def test_summary_orders_recipes_and_says_what_is_worst() -> None:
    made = observe(models.make("linear"), None).what_if(["current", "rowwise", "nvfp4"])
    summary = made.summary()
    assert [one.sqnr_db for one in summary] == sorted((s.sqnr_db for s in summary), reverse=True)
    assert summary[-1].recipe == "nvfp4"
    by_name = {one.recipe: one for one in summary}
    # Rows span four decades: one scale for all of them loses the smallest.
    assert by_name["current"].worst_row_sqnr_db < by_name["rowwise"].worst_row_sqnr_db - 6
    rows = made.rows["current"]
    assert by_name["current"].least_sqnr_db == min(row.sqnr_db for row in rows)
    mean = sum(10 ** (-row.sqnr_db / 10) for row in rows) / len(rows)
    assert by_name["current"].sqnr_db == -10 * math.log10(mean)
    table = made.table()
    assert all(name in table for name in ("all operands", "current", "rowwise", "nvfp4"))


def _model() -> torch.nn.Module:
    """Three layers; the one in the middle gets values that a tensorwise scale is bad at."""
    model = torch.nn.Sequential(*(te.Linear(32, 32, bias=False) for _ in range(3)))
    with torch.no_grad():
        model[1].weight[:, 0] = 1e6
    return te.prepare(model)


def test_suggestion_leaves_the_worst_layers_in_high_precision() -> None:
    model = _model()
    with te.monitor(model) as watch, te.autocast(recipe=recipe.Float8CurrentScaling()):
        model(torch.randn(16, 32)).sum().backward()
    made = watch.what_if([recipe.Float8CurrentScaling()])
    suggested = made.suggest("Float8CurrentScaling", 1)
    worst = made.worst("Float8CurrentScaling")
    assert [db for _, db in worst] == sorted(db for _, db in worst)
    assert suggested == recipe.PerLayer({worst[0][0]: None}, default=recipe.Float8CurrentScaling())
    with te.monitor(model) as watch, te.autocast(recipe=suggested):
        model(torch.randn(16, 32)).sum().backward()
    quiet = {row.layer for row in watch.rows if row.format == "float32"}
    assert quiet == {worst[0][0]}


def test_suggestion_of_a_layer_with_several_linears_names_the_layer() -> None:
    model = te.prepare(torch.nn.Sequential(te.LayerNormMLP(32, 64)))
    with te.monitor(model) as watch, te.autocast(recipe=recipe.Float8CurrentScaling()):
        model(torch.randn(16, 32)).sum().backward()
    suggested = watch.what_if("mxfp8").suggest("mxfp8")
    assert suggested == recipe.PerLayer({"0": None}, default=recipe.MXFP8BlockScaling())


def test_two_recipes_of_one_class_are_told_apart() -> None:
    watch = observe(models.make("linear"), None)
    made = watch.what_if(
        [recipe.Float8BlockScaling(), recipe.Float8BlockScaling(use_f32_scales=True)]
    )
    assert list(made.rows) == ["Float8BlockScaling", "Float8BlockScaling 2"]


@pytest.mark.parametrize("asked", ["nvfp4", "NVFP4BlockScaling"])
@pytest.mark.parametrize("given", ["nvfp4", "NVFP4BlockScaling", NEAREST], ids=str)
def test_suggestion_takes_the_name_and_the_class_name(
    given: str | recipe.Recipe, asked: str
) -> None:
    made = observe(models.make("linear"), None).what_if([given])
    wanted = recipe.by_name(given) if isinstance(given, str) else given
    assert made.suggest(asked).default == wanted
    assert made.worst(asked) == made.worst(next(iter(made.rows)))


def test_name_of_several_recipes_that_were_tried_is_refused() -> None:
    made = observe(models.make("linear"), None).what_if([recipe.NVFP4BlockScaling(), NEAREST])
    with pytest.raises(te.RecipeError, match="NVFP4BlockScaling, NVFP4BlockScaling 2; give one"):
        made.suggest("nvfp4")


def test_unknown_recipe_is_refused_with_the_nearest() -> None:
    watch = observe(models.make("linear"), None)
    with pytest.raises(te.RecipeError, match=r"Did you mean 'mxfp8'\?"):
        watch.what_if(["current", "mxpf8"])
    with pytest.raises(te.RecipeError, match="expected recipes"):
        watch.what_if([3])  # type: ignore[list-item]  # what is tested
    with pytest.raises(te.RecipeError, match="at least one"):
        watch.what_if([])
    made = watch.what_if(["current"])
    with pytest.raises(
        te.RecipeError, match=r"no recipe 'curent' was tried.*Did you mean 'current'"
    ):
        made.suggest("curent")
    for k in (0, 2, 1.5):
        with pytest.raises(te.OperandError, match="expected 1 to 1"):
            made.suggest("current", k)  # type: ignore[arg-type]  # what is tested


def test_without_kept_tensors_there_is_nothing_to_replay() -> None:
    watch = observe(models.make("linear"), None, keep_tensors=False)
    with pytest.raises(te.OperandError, match="keep_tensors=False"):
        watch.what_if(["mxfp8"])
    assert watch.rows


def test_only_the_latest_observed_step_is_kept() -> None:
    model = models.make("linear")
    with te.monitor(model) as watch:
        for size in (1.0, 7.0):
            with te.autocast(recipe=recipe.Float8CurrentScaling()):
                model(torch.full((4, 32), size).to(models.BF16))
            watch.step()
    rows = {row.key: row for row in watch.what_if(["mxfp8"]).rows["mxfp8"]}
    assert {key.role for key in rows} == {"input", "weight"}  # there was no backward
    assert {row.amax for key, row in rows.items() if key.role == "input"} == {7.0}
