"""Tables, CSV, TensorBoard and plots say what the rows say; missing packages are named."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fp8core as te
from fp8core import formats, monitoring, recipe
from fp8core.monitoring import Monitor, Row, rows
from tests import device
from tests.inspection import models
from tests.pairs import turns
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def watch() -> Monitor:
    model = torch.nn.Sequential(te.Linear(32, 64), te.LayerNormMLP(64, 96))
    with te.monitor(model) as made:
        for _ in range(2):
            with te.autocast(recipe=recipe.MXFP8BlockScaling()):
                model(torch.randn(32, 32)).sum().backward()
            made.step()
    return made


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for module in (rows, monitoring):
        find = module.find_spec
        monkeypatch.setattr(
            module, "find_spec", lambda name, find=find: None if name == package else find(name)
        )


@pytest.mark.parametrize("has_rich", [True, False])
def test_table_shows_every_operand(
    watch: Monitor, has_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_rich:
        without(monkeypatch, "rich")
    table = watch.table()
    assert ("│" in table) == has_rich
    assert "step 1" in table.splitlines()[0]
    lines = [line for line in table.splitlines() if "reference" in line]
    latest = [row for row in watch.rows if row.step == 1]
    assert len(lines) == len(latest)
    for line, row in zip(lines, latest, strict=True):
        assert f"{row.layer} " in line
        assert f"{row.role} {row.orientation}" in line
        assert f"{row.sqnr_db:.4g}" in line
    assert "step 0" in watch.table(0).splitlines()[0]


def test_csv_reads_back(watch: Monitor, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    watch.to_csv(path)
    with path.open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    types = {field.name: kinds[str(field.type)] for field in dataclasses.fields(Row)}
    made = [Row(**{name: types[name](text) for name, text in line.items()}) for line in read]
    assert list(map(str, made)) == list(map(str, watch.rows))


def test_tensorboard_reads_the_scalars_back(watch: Monitor, tmp_path: Path) -> None:
    watch.to_tensorboard(tmp_path)
    read = EventAccumulator(str(tmp_path)).Reload()
    events = read.Scalars("sqnr_db/1[0]/input.columnwise")
    want = [row for row in watch.rows if row.key == ("1[0]", "input", "columnwise")]
    assert [event.step for event in events] == [row.step for row in want] == [0, 1]
    assert [event.value for event in events] == pytest.approx([row.sqnr_db for row in want])
    finite = {
        f"{name}/{row.layer}/{row.role}.{row.orientation}"
        for row in watch.rows
        for name in rows.STATISTICS
        if math.isfinite(getattr(row, name))
    }
    assert set(read.Tags()["scalars"]) == finite


def test_statistics_are_the_fields_that_are_numbers() -> None:
    assert "sqnr_db" in rows.STATISTICS
    assert "scale_log2_std" in rows.STATISTICS
    assert not {"layer", "casts"} & set(rows.STATISTICS)


def test_plots_are_pictures(watch: Monitor, tmp_path: Path) -> None:
    watch.plot(tmp_path / "sqnr.png")
    watch.plot_exponents(tmp_path / "exponents.png", "0", "weight")
    watch.plot_scales(tmp_path / "scales.png", "0", "input", "columnwise")
    pictures = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert len(set(pictures)) == 3
    assert all(data.startswith(b"\x89PNG") for data in pictures)


def test_plot_of_what_was_not_cast_is_refused(watch: Monitor, tmp_path: Path) -> None:
    with pytest.raises(te.OperandError, match=r"no layer '1\[2\]'"):
        watch.plot_exponents(tmp_path / "x.png", "1[2]", "weight")
    model = models.make("linear")
    with te.monitor(model) as other:
        model(torch.randn(4, 32).to(models.BF16))
    with pytest.raises(te.OperandError, match="no scales to draw"):
        other.plot_scales(tmp_path / "x.png", "Linear", "input")
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect the axes of the pictures that are drawn meanwhile."""
    figures: list[Any] = []
    plain = Figure.savefig

    def save(figure: Any, *args: Any, **options: Any) -> None:
        figures.append(figure)
        plain(figure, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield figures


def test_a_plot_of_many_layers_names_the_worst(
    watch: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = next(row for row in watch.rows if math.isfinite(row.sqnr_db))
    rows_of_many = [
        dataclasses.replace(template, layer=f"layers.{at}", step=step, sqnr_db=60.0 - at)
        for at in range(84)
        for step in range(2)
    ]
    monkeypatch.setattr(watch, "rows", rows_of_many)
    with drawn(monkeypatch) as figures:
        watch.plot(tmp_path / "many.png")
    (legend,) = figures[0].legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [f"layers.{at}" for at in range(83, 75, -1)] + ["76 other layers"]
    colors = [line.get_color() for line in figures[0].axes[0].lines]
    assert colors.count("0.8") == 76
    legend_height = legend.get_window_extent().height
    assert legend_height < figures[0].bbox.height


def test_the_histogram_marks_the_range_of_the_format(
    watch: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = watch.row("0", "weight")
    with drawn(monkeypatch) as figures:
        watch.plot_exponents(tmp_path / "exponents.png", "0", "weight")
        watch.plot_scales(tmp_path / "scales.png", "0", "input", "columnwise")
    span = figures[0].axes[0].patches[0]
    spec = formats.by_name(row.format.partition(" ")[0])
    least = min(value for value in spec.values if value > 0)
    edges = [math.floor(math.log2(value / row.scale_median)) for value in (least, spec.max)]
    assert [span.get_x() + 0.5, span.get_x() + span.get_width() - 0.5] == edges
    assert figures[0].axes[0].get_legend().get_texts()[0].get_text().startswith("range of e4m3")
    blocks = figures[1].axes[0]
    ticks = [*blocks.get_xticks(), *blocks.get_yticks()]
    assert all(tick == round(tick) for tick in ticks)


def test_an_empty_plot_is_refused(tmp_path: Path) -> None:
    model = models.make("linear")
    with te.monitor(model) as watch:
        with pytest.raises(te.OperandError, match=r"plot: nothing to draw: no step was observed"):
            watch.plot(tmp_path / "x.png")
        model(torch.randn(4, 32).to(models.BF16))
        watch.step()
        with pytest.raises(te.OperandError, match=r"none of the \d+ rows has a finite SQNR"):
            watch.plot(tmp_path / "x.png")
        with te.autocast(recipe="current"):
            model(torch.zeros(4, 32).to(models.BF16))
    with pytest.raises(te.OperandError, match=r"input .* has no values but zeros, NaN and inf"):
        watch.plot_exponents(tmp_path / "x.png", "Linear", "input")
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(
    watch: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "matplotlib")
    with pytest.raises(te.UnsupportedError, match=r"needs matplotlib, (?s:.*)fp8core\[monitor\]"):
        watch.plot(tmp_path / "x.png")
    without(monkeypatch, "tensorboard")
    with pytest.raises(te.UnsupportedError, match=r"needs tensorboard, (?s:.*)fp8core\[monitor\]"):
        watch.to_tensorboard(tmp_path)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")


def test_example_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    (tmp_path / "monitoring.py").write_text(code, encoding="utf-8")
    options = ("-W", "error")
    printed = device.run_program(tmp_path / "monitoring.py", options=options, folder=tmp_path)
    assert "step 2" in printed


def test_page_defines_every_statistic_of_a_row() -> None:
    told = {"step", "layer", "role", "orientation", "format", "backend", "gemm", "gemm_backend"}
    told |= {"blocks"}  # the denominator of zero_block_share
    fields = {field.name for field in dataclasses.fields(Row)} - told
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, flags=re.MULTILINE)
    assert fields <= {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


ROWS = 24


def rows_of(parts: list[torch.Tensor], *, is_distributed: bool, layers: int = 1) -> list[Row]:
    """Run ``parts`` as microbatches of one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(te.Linear(32, 32) for _ in range(layers)))
    with te.monitor(model) as watch:
        for part in parts:
            with te.autocast(recipe=recipe.MXFP8BlockScaling()):
                y = model(part.clone().requires_grad_())
            y.backward(part)
        watch.step()
    return watch.rows_over_ranks() if is_distributed else watch.rows


def batch() -> list[torch.Tensor]:
    x = torch.randn(2 * ROWS, 32, generator=torch.Generator().manual_seed(5))
    x[0], x[ROWS + 1] = 0.0, 1e-4
    x[ROWS + 2, 3] = float("nan")
    return list(x.split(ROWS))


def work(rank: int) -> dict[str, Any]:
    """Run as ``rank`` of two."""
    rows = rows_of([batch()[rank]], is_distributed=True)
    try:
        rows_of([batch()[rank]], is_distributed=True, layers=1 + rank)
        refused = ""
    except te.OperandError as error:
        refused = str(error)
    return {"rows": [dataclasses.asdict(row) for row in rows], "refused": refused}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("gloo"))


def test_rows_over_ranks_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    want = {tuple(row.key): row for row in rows_of(batch(), is_distributed=False)}
    for rank in ranks:
        got = {(row["layer"], row["role"], row["orientation"]): row for row in rank["rows"]}
        assert set(got) == set(want)
        for key, row in got.items():
            # Each rank casts the weight; one process casts it once for both microbatches.
            one = {name: str(value) for name, value in dataclasses.asdict(want[key]).items()}
            own = {name: str(value) for name, value in row.items()}
            left_out = (
                {"casts", "elements", "blocks", "sqnr_db"} if key[1] == "weight" else {"sqnr_db"}
            )
            assert {n: v for n, v in own.items() if n not in left_out} == {
                n: v for n, v in one.items() if n not in left_out
            }
            assert row["sqnr_db"] == pytest.approx(want[key].sqnr_db, rel=1e-12)
    assert ranks[0] == ranks[1]


def test_ranks_that_ran_other_layers_are_refused_together(ranks: list[dict[str, Any]]) -> None:
    assert all("different operands, [6, 12]" in rank["refused"] for rank in ranks)


def test_without_a_process_group_it_is_refused() -> None:
    with pytest.raises(te.OperandError, match="init_process_group"):
        rows_of(batch(), is_distributed=True)


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
