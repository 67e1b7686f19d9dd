"""A monitor changes no bit while it is open, and nothing at all when it is closed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.backend_api import OPTIONAL_OPS
from fp8core.modules.calls.base import LowPrecisionModule
from tests.chain import fused_toy
from tests.inspection import models
from tests.pairs import turns


@pytest.mark.parametrize(
    ("layer", "name"),
    turns(["mlp", "gated_mlp", "sequential"], ["current", "mxfp8", "delayed"]),
)
def test_fused_operations_give_way_and_the_bits_stay(layer: str, name: str) -> None:
    chosen = recipe.by_name(name)
    with fused_toy.installed(*OPTIONAL_OPS):
        want = models.train(models.make(layer), chosen, rows=64)
    with fused_toy.installed(*OPTIONAL_OPS) as calls:
        model = models.make(layer)
        with te.monitor(model) as watch:
            got = models.train(model, chosen, rows=64, after=watch.step)
        assert not any(calls[op] for op in OPTIONAL_OPS if op != "add_norm")
        models.train(model, chosen, rows=64)
        assert any(calls[op] for op in OPTIONAL_OPS if op != "add_norm")
    assert models.same(got, want)


@pytest.mark.parametrize(
    ("layer", "name", "checkpoints"),
    [
        *turns(["linear", "grouped", "gated_mlp"], recipe.names(), [False, True]),
        *turns(["gated_mlp"], ["delayed", "nvfp4"], [True, False]),
    ],
)
def test_checkpoints_and_weights_quantized_again_have_the_same_bits_and_rows(
    layer: str, name: str, checkpoints: bool
) -> None:
    """Backward casts them columnwise, where they are recorded; rows and features are padded."""

    def run(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = te.checkpoint(models.call, layer, x)
        return made

    found, rows = [models.train(models.make(layer), recipe.by_name(name))], []
    for requantizes in (False, True):
        chosen = dataclasses.replace(recipe.by_name(name), requantize_weights=requantizes)
        model = models.make(layer)
        with te.monitor(model) as watch:
            call = run if checkpoints else models.call
            found.append(models.train(model, chosen, after=watch.step, run=call))
        rows.append(sorted(map(repr, watch.rows)))
    assert models.same(found[1], found[0])
    assert models.same(found[2], found[0])
    assert rows[1] == rows[0]


def test_calibration_records_the_same() -> None:
    def calibrate(model: torch.nn.Module) -> list[torch.Tensor]:
        with te.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):
            y = model(torch.linspace(-3, 3, 64).reshape(2, 32).to(models.BF16))
        return [y, *model.state_dict().values()]

    want = calibrate(models.make("linear"))
    model = models.make("linear")
    with te.monitor(model):
        got = calibrate(model)
    assert models.same(got, want)


def _bound(model: torch.nn.Module) -> Any:
    (layer,) = [own for own in model.modules() if isinstance(own, LowPrecisionModule)]
    return layer._bindings.last


@pytest.mark.parametrize("layer", ["linear", "mlp", "grouped"])
def test_closed_monitor_leaves_the_very_objects_that_ran_before(layer: str) -> None:
    model, chosen = models.make(layer), recipe.MXFP8BlockScaling()
    models.train(model, chosen, steps=1)
    before = _bound(model)
    with te.monitor(model) as watch:
        models.train(model, chosen, steps=1, after=watch.step)
        assert _bound(model) is not before
    assert _bound(model) is before
    models.train(model, chosen, steps=1)
    assert _bound(model) is before


def test_step_that_is_not_observed_runs_the_very_objects_that_ran_before() -> None:
    model, chosen = models.make("linear"), recipe.MXFP8BlockScaling()
    models.train(model, chosen, steps=1)
    before, seen = _bound(model), []
    with te.monitor(model, every=3) as watch:

        def after() -> None:
            seen.append(_bound(model) is before)
            watch.step()

        models.train(model, chosen, steps=4, after=after)
    assert seen == [False, True, True, False]


def test_unmonitored_and_closed_run_the_same_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(model: torch.nn.Module) -> list[str]:
        called: list[str] = []

        def note(frame: Any, event: str, argument: object) -> None:
            if event == "call" and "fp8core" in frame.f_code.co_filename:
                called.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

        x = torch.randn(models.ROWS, 32).to(models.BF16)
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            for _ in range(3):  # binds, and keeps the weights
                models.call(model, x)
            sys.setprofile(note)
            try:
                models.call(model, x)
            finally:
                sys.setprofile(None)
        return called

    plain, watched = models.make("mlp"), models.make("mlp")
    with te.monitor(watched):
        during = profile(watched)
    assert profile(watched) == profile(plain)
    assert len(during) > len(profile(plain))


def test_weights_that_were_kept_stay_kept() -> None:
    model, chosen = models.make("linear"), recipe.Float8CurrentScaling()
    x = torch.randn(models.ROWS, 32).to(models.BF16)
    with te.autocast(recipe=chosen):
        want = model(x, is_first_microbatch=True)
        with te.monitor(model) as watch:
            got = model(x, is_first_microbatch=False)
            watch.step()
        again = model(x, is_first_microbatch=False)
    assert torch.equal(got, want)
    assert torch.equal(again, want)
    # Not cast in this step, but used in it: seen once.
    assert watch.row("Linear", "weight").casts == 1


def test_a_copy_of_a_monitored_layer_is_not_monitored() -> None:
    model = models.make("linear")
    with te.monitor(model) as watch:
        copied = copy.deepcopy(model)
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            copied(torch.randn(2, 32).to(models.BF16))
        assert not watch._recorder.current.tallies
        te.monitor(copied).close()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float32).to(models.BF16),
        lambda model: model.load_state_dict(model.state_dict()),
        te.prepare,
    ],
    ids=["to", "load_state_dict", "prepare"],
)
def test_what_unbinds_a_layer_does_not_end_the_monitor(
    change: Callable[[torch.nn.Module], object],
) -> None:
    model = models.make("linear")
    x = torch.randn(2, 32).to(models.BF16)
    with te.monitor(model) as watch:
        change(model)
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            model(x)
    assert watch.row("Linear", "input").casts == 1
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        model(x)
    assert model._bindings.watch is None


def test_an_exception_in_the_body_closes() -> None:
    model = models.make("linear")
    with contextlib.suppress(KeyError), te.monitor(model):
        raise KeyError
    assert model._bindings.watch is None
    te.monitor(model).close()


def test_recompute_is_refused_after_a_monitor_as_it_is_without() -> None:
    model = models.make("linear")
    x = torch.randn(2, 32).to(models.BF16).requires_grad_()
    with te.monitor(model), te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    with pytest.raises(te.UnsupportedError, match="outside the autocast it ran in"):
        y.sum().backward()
