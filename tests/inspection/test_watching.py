"""What a monitor takes down: which operands, how often, in which step, and what it refuses."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

import fp8core as te
from fp8core import ops, recipe
from fp8core.inspection.monitoring import observe
from tests.device import BACKEND
from tests.inspection import models
from tests.inspection.models import CURRENT, step


def plain_linear(rows: int = 4, columns: int = 4) -> te.Linear:
    layer = te.Linear(columns, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(rows, columns))
    return layer


def test_each_operand_of_the_three_gemms_has_a_row() -> None:
    model = torch.nn.Sequential(te.Linear(32, 64), te.LayerNormMLP(64, 96))
    x = torch.randn(16, 32, requires_grad=True)
    with te.monitor(model) as watch:
        step(model, x)
        watch.step()
    names = {"0", "1[0]", "1[1]"}
    roles = {"input", "weight", "grad_output"}
    wanted = {(n, r, o) for n in names for r in roles for o in ("rowwise", "columnwise")}
    assert {tuple(row.key) for row in watch.rows} == wanted
    assert {row.casts for row in watch.rows} == {1}
    assert {row.backend for row in watch.rows} == {BACKEND}
    assert watch.gemm_counts() == {"quantized": 9, "high_precision": 0}
    row = watch.row("1[1]", "grad_output", "columnwise")
    assert (row.gemm, row.quantized_gemms, row.format) == ("wgrad", 1, "e5m2 block=(0,0)")


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_an_input_that_is_saved_as_it_came_has_the_same_rows(name: str) -> None:
    """Its columnwise operand is cast in backward. 21 rows are padded."""
    found = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = te.Linear(32, 48, save_original_input=saves)
        x = torch.randn(21, 32, requires_grad=True)
        with te.monitor(model) as watch:
            step(model, x, recipe.by_name(name))
            watch.step()
        found.append((sorted(map(repr, watch.rows)), watch.gemm_counts()))
    assert found[0] == found[1]


def test_figures_of_a_layer_are_exact() -> None:
    layer = plain_linear()
    # amax 448: scale 1. The halves of the least e4m3 are lost: 2 of 4 nonzero values.
    x = torch.tensor([[448.0, 16.0, 2.0**-10, -(2.0**-10)], [0.0, 0.0, 0.0, 0.0]])
    with te.monitor(layer) as watch, te.autocast(recipe=CURRENT):
        layer(x)
    row = watch.row("Linear", "input")
    assert (row.elements, row.amax, row.scale_median) == (8, 448.0, 1.0)
    assert (row.underflow_share, row.saturation_share) == (0.5, 0.0)
    assert row.sqnr_db == 10 * math.log10((448**2 + 16**2 + 2.0**-19) / 2.0**-19)
    assert watch.row("Linear", "weight").sqnr_db == math.inf


def test_delayed_scale_saturates_and_is_located() -> None:
    model = torch.nn.Sequential(plain_linear(), plain_linear())
    delayed = recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)
    x = torch.ones(2, 4, requires_grad=True)
    with te.monitor(model) as watch:
        step(model, x, delayed)
        watch.step()
        assert watch.first_saturation is None
        step(model, torch.tensor([[1.0, 1.0, 1.0, 2.0]]), delayed)  # the scale is that of amax 1
        watch.step()
    assert watch.row("0", "input", step=1).saturation_share == 0.25
    assert watch.row("0", "input", step=0).saturation_share == 0.0
    found = watch.first_saturation
    assert found is not None
    assert (found.step, found.layer, found.tensor, found.count) == (1, "0", "input", 1)
    assert "step 1: 1 values of input (rowwise) of '0' were clipped" in str(found)


def test_microbatches_of_a_step_add_up() -> None:
    layer = plain_linear()
    first = torch.tensor([[448.0, 2.0**-10, 0.0, 1.0]])
    second = torch.tensor([[896.0, 0.0, 0.0, 0.0]])
    with te.monitor(layer) as watch:
        for x in (first, second):
            step(layer, x)
        watch.step()
    row = watch.row("Linear", "input")
    assert (row.casts, row.elements, row.amax) == (2, 8, 896.0)
    assert row.underflow_share == 1 / 4
    assert (row.scale_min, row.scale_median, row.scale_max) == (0.5, 0.5, 1.0)
    assert row.scale_log2_std == 0.5
    assert row.quantized_gemms == 2
    assert watch.row("Linear", "weight").casts == 2


def test_groups_are_tensors_of_their_own() -> None:
    layer = te.GroupedLinear(3, 32, 16, bias=False)
    x = torch.full((12, 32), 448.0)
    x[:4] *= 2
    with te.monitor(layer) as watch, te.autocast(recipe=CURRENT):
        layer(x, [4, 0, 8]).sum().backward()
    for orientation in ("rowwise", "columnwise"):
        row = watch.row("GroupedLinear", "input", orientation)
        assert (row.casts, row.elements, row.blocks) == (3, 12 * 32, 2)
        assert (row.scale_min, row.scale_max) == (0.5, 1.0)
    assert watch.row("GroupedLinear", "weight").casts == 3


def test_padding_is_not_counted() -> None:
    layer = te.Linear(40, 24, bias=False)
    x = torch.randn(5, 40, requires_grad=True)
    with te.monitor(layer) as watch:
        step(layer, x, recipe.MXFP8BlockScaling())
    for orientation, blocks in (("rowwise", 5 * 2), ("columnwise", 40 * 1)):
        row = watch.row("Linear", "input", orientation)
        assert (row.elements, row.blocks, row.zero_block_share) == (5 * 40, blocks, 0.0)
    assert watch.row("Linear", "weight").elements == 24 * 40
    assert watch.row("Linear", "grad_output", "columnwise").elements == 5 * 24


def test_transformed_operand_is_measured_in_the_space_of_its_cast() -> None:
    layer = te.Linear(32, 32, bias=False)
    # One token in 16 is nonzero: transformed, all 16 are, with a quarter of the magnitude.
    x = torch.zeros(16, 32)
    x[3] = 4.0
    with te.monitor(layer) as watch:
        step(layer, x, recipe.NVFP4BlockScaling())
    plain, turned = (watch.row("Linear", "input", o) for o in ("rowwise", "columnwise"))
    assert (plain.amax, plain.zero_block_share) == (4.0, 15 / 16)
    assert (turned.amax, turned.zero_block_share, turned.elements) == (1.0, 0.0, 16 * 32)
    assert turned.sqnr_db > 30  # untransformed values would be far from what was cast


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("by_torch", [True, False])
def test_recompute_is_not_counted_twice(by_torch: bool, use_reentrant: bool) -> None:
    def run(model: torch.nn.Module, x: torch.Tensor, is_checkpointed: bool) -> Counter[Any]:
        def inner(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(recipe=CURRENT):
                y: torch.Tensor = model(x)
            return y

        function = torch.utils.checkpoint.checkpoint if by_torch else te.checkpoint
        with te.monitor(model) as watch:
            for _ in range(2):
                y = function(inner, x, use_reentrant=use_reentrant) if is_checkpointed else inner(x)
                y.sum().backward()
        counts: Counter[Any] = Counter({row.key: row.casts for row in watch.rows})
        for row in watch.rows:
            counts[row.layer, row.gemm] = row.quantized_gemms
        return counts

    x = torch.randn(16, 32, requires_grad=True)
    model = torch.nn.Sequential(te.Linear(32, 64), te.LayerNormMLP(64, 96))
    assert run(model, x, True) == run(model, x, False)


def test_high_precision_has_rows_without_scales() -> None:
    model = models.make("linear")
    with te.monitor(model) as watch:
        step(model, torch.randn(4, 32).to(models.BF16), None)
    row = watch.row("Linear", "input")
    assert (row.format, row.backend, row.gemm_backend) == ("bfloat16", "", BACKEND)
    assert (row.quantized_gemms, row.high_precision_gemms) == (0, 1)
    assert row.sqnr_db == math.inf
    assert math.isnan(row.scale_median)
    assert watch.gemm_counts() == {"quantized": 0, "high_precision": 2}


def test_layers_left_out_by_a_recipe_count_as_high_precision() -> None:
    model = te.prepare(torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)))
    mixed = recipe.PerLayer({"1": None}, default=CURRENT)
    with te.monitor(model) as watch:
        step(model, torch.randn(4, 32), mixed)
    assert watch.gemm_counts() == {"quantized": 2, "high_precision": 3}


def test_weight_stored_in_low_precision_has_scales_and_nothing_to_compare() -> None:
    with te.quantized_model_init(recipe=CURRENT):
        layer = te.Linear(32, 32)
    with te.monitor(layer) as watch:
        for _ in range(2):
            step(layer, torch.randn(4, 32))
    row = watch.row("Linear", "weight")
    assert row.casts == 1
    assert row.amax > 0
    assert not math.isnan(row.scale_median)
    assert math.isnan(row.sqnr_db)
    assert math.isnan(row.underflow_share)


# --- steps


def test_late_backward_of_an_observed_step_is_not_taken_for_the_next() -> None:
    model = models.make("linear")
    x = torch.randn(4, 32).to(models.BF16)
    with te.monitor(model, every=2) as watch:
        with te.autocast(recipe=CURRENT):
            y = model(x)
        watch.step()
        y.sum().backward()
        watch.step()
        step(model, x)
        watch.step()
    assert Counter(row.role for row in watch.rows if row.step == 0) == {"input": 2, "weight": 1}
    assert {row.step for row in watch.rows} == {0, 2}


def test_closing_files_the_unfinished_step_and_may_be_repeated() -> None:
    model = models.make("linear")
    watch = te.monitor(model)
    step(model, torch.randn(4, 32).to(models.BF16))
    assert not watch.rows
    watch.close()
    rows = list(watch.rows)
    assert rows
    watch.close()
    assert watch.rows == rows


def test_step_in_which_nothing_ran_is_refused_and_changes_nothing() -> None:
    model = models.make("linear")
    with te.monitor(model) as watch:
        with pytest.raises(te.OperandError, match="step 0, in which none of the 1 monitored"):
            watch.step()
        step(model, torch.randn(4, 32).to(models.BF16))
        watch.step()
        assert {row.step for row in watch.rows} == {0}
    with pytest.raises(te.OperandError, match="closed"):
        watch.step()


# --- names


def test_what_never_ran_is_an_error_that_says_so() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    with te.monitor(model) as watch:
        with pytest.raises(te.OperandError, match="nothing was observed yet"):
            watch.row("0", "input")
        with pytest.raises(te.OperandError, match="no step was observed yet"):
            watch.table()
        with te.autocast(recipe=CURRENT), torch.no_grad():
            model[0](torch.randn(4, 32))
        watch.step()
    with pytest.raises(te.OperandError, match="no layer '1' was observed; observed: 0"):
        watch.row("1", "input")
    with pytest.raises(te.OperandError, match=r"no role 'wieght' .* Did you mean 'weight'\?"):
        watch.row("0", "wieght")
    with pytest.raises(te.OperandError, match="no orientation 'columnwise'"):
        watch.row("0", "input", "columnwise")
    with pytest.raises(te.OperandError, match=r"table\(step=3\): observed steps: \[0\]"):
        watch.table(3)


def test_chain_is_named_by_its_path_and_linear() -> None:
    model = torch.nn.ModuleDict(
        {
            "block": ops.Sequential(
                ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)
            )
        }
    )
    with te.monitor(model) as watch, te.autocast(recipe=CURRENT):
        model["block"](torch.randn(4, 32))
    assert {row.layer for row in watch.rows} == {"block[0]", "block[1]"}


# --- what is refused


def test_model_without_layers_is_refused() -> None:
    with pytest.raises(te.OperandError, match="Sequential holds no fp8core layer with a GEMM"):
        te.monitor(torch.nn.Sequential(torch.nn.Linear(4, 4), te.LayerNorm(4)))
    with pytest.raises(te.OperandError, match=r"fp8core\.convert\(model, recipe\)"):
        te.monitor(torch.nn.Linear(4, 4))
    with pytest.raises(te.OperandError, match="expected a model"):
        te.monitor("model")  # type: ignore[arg-type]  # what is tested


def test_second_monitor_is_refused_until_the_first_closes() -> None:
    model = torch.nn.Sequential(te.Linear(4, 4))
    with (
        te.monitor(model, every=5),
        pytest.raises(te.OperandError, match="'0' of this model is monitored already"),
    ):
        te.monitor(model)
    te.monitor(model).close()


@pytest.mark.parametrize("steps", [0, 1], ids=["observed step", "other step"])
def test_conversion_of_a_watched_layer_waits_for_the_monitor(steps: int) -> None:
    x = torch.randn(2, 4)
    own, inner = torch.nn.Sequential(torch.nn.Linear(4, 4)), te.Linear(4, 4)
    te.convert(own, "mxfp8")
    outer = torch.nn.Sequential(inner, torch.nn.Linear(4, 4))
    with te.monitor(own, every=2) as one, te.monitor(inner, every=2) as other:
        for _ in range(steps):
            for module, watch in ((own, one), (inner, other)):
                module(x)
                watch.step()
        with pytest.raises(te.OperandError, match=r"unconvert\(Sequential\): .* watches '0'"):
            te.unconvert(own)
        with pytest.raises(te.OperandError, match=r"convert\(Sequential\).*Close the monitor"):
            te.convert(outer, "mxfp8")
        assert type(outer[1]) is torch.nn.Linear
        own(x)
    assert "input" in {row.role for row in one.rows}
    te.unconvert(own)
    assert type(own[0]) is torch.nn.Linear
    te.convert(outer, "mxfp8")


def test_close_ends_all_of_it_when_one_layer_raises() -> None:
    model = torch.nn.Sequential(te.Linear(4, 4), te.Linear(4, 4), te.Linear(4, 4))
    watch = te.monitor(model)
    model(torch.randn(2, 4))
    bindings = vars(model[1]).pop("_bindings")
    with pytest.raises(AttributeError):
        watch.close()
    vars(model[1])["_bindings"] = bindings.fresh()
    model[1].set_watch(None)
    assert all(layer._bindings.watch is None for layer in model)
    assert len(watch.rows) > 0
    te.monitor(model).close()


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_that_means_nothing_is_refused(every: Any) -> None:
    with pytest.raises(te.RecipeError, match="every="):
        te.monitor(te.Linear(4, 4), every=every)


def test_unknown_reaction_is_refused_with_the_nearest() -> None:
    with pytest.raises(te.RecipeError, match=r"Did you mean 'raise'\?"):
        te.monitor(te.Linear(4, 4), on_nonfinite="raises")


def test_layer_on_meta_is_refused_when_it_runs() -> None:
    layer = te.Linear(4, 4, device="meta")
    with te.monitor(layer), pytest.raises(te.UnsupportedError, match="meta"):
        layer(torch.ones(2, 4, device="meta"))


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
class TestCompiled:
    def test_compiled_model_is_refused(self) -> None:
        layer = te.Linear(32, 32)
        with pytest.raises(te.UnsupportedError, match="is compiled by torch"):
            te.monitor(torch.compile(layer))  # type: ignore[arg-type]  # it is a module
        with pytest.raises(te.UnsupportedError, match="is compiled by torch"):
            te.monitor(torch.nn.Sequential(torch.compile(layer)))  # type: ignore[arg-type]

    def test_model_compiled_in_place_is_refused(self) -> None:
        layer = te.Linear(32, 32)
        layer.compile(backend="eager")
        with pytest.raises(te.UnsupportedError, match="is compiled by torch"):
            te.monitor(layer)

    def test_compiled_function_around_a_monitored_layer_raises(self) -> None:
        layer = te.Linear(32, 32)
        x = torch.randn(4, 32)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = layer(x)
            return made

        want = function(x)
        with te.monitor(layer), pytest.raises(te.UnsupportedError, match="monitored layer cannot"):
            function(x)
        assert torch.equal(function(x), want)

    def test_export_of_a_monitored_layer_raises(self) -> None:
        layer = te.Linear(32, 32)
        with te.monitor(layer), pytest.raises(te.UnsupportedError, match="monitored layer cannot"):
            torch.export.export(layer, (torch.randn(4, 32),))


def test_transform_that_only_a_plug_in_knows_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observe, "TRANSFORMS", {})
    layer = te.Linear(32, 32)
    with te.monitor(layer) as watch:
        step(layer, torch.randn(16, 32), recipe.NVFP4BlockScaling())
    plain, turned = (watch.row("Linear", "input", o) for o in ("rowwise", "columnwise"))
    assert math.isfinite(plain.sqnr_db)
    assert math.isnan(turned.sqnr_db)
    assert turned.scale_median > 0
