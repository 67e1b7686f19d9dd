"""Ways in which other libraries silently train in another precision than was asked for.

Each was seen in one of the frameworks that wrap low-precision layers; here each is an error or a
line that a user sees. All nine can occur here, so all nine are tested; the parts that belong to
those frameworks alone, such as a configuration file whose keys are read and dropped, are tested as
the argument that they would become.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import fp8core
from fp8core import RecipeError, recipe
from fp8core.__main__ import main
from fp8core.errors import PluginError, UnsupportedError
from tests.dispatch import toys

E4M3_MAX = 448.0


def test_1_an_argument_equal_to_somebodys_default_is_dropped() -> None:
    """Accelerate drops what equals its own default, so that the recipe's other default counts."""
    for algorithm in ("max", "most_recent"):
        chosen = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)
        own = nn.Linear(32, 32)
        fp8core.convert(own, chosen)
        for factor in (8.0, 1.0):
            own(torch.full((4, 32), factor))
        want = {"max": 8.0, "most_recent": 1.0}[algorithm]
        assert own.scale_fwd[0] == E4M3_MAX / want


@pytest.mark.parametrize("name", ["amax_history_length", "amax_compute_algorithm"])
def test_2_a_misspelt_setting_is_ignored(name: str) -> None:
    """Accelerate's own wizard writes keys that are not read; the history is then 1024 long."""
    with pytest.raises(RecipeError, match=f"no argument '{name}'.*Did you mean"):
        recipe.DelayedScaling(**{name: 16})
    own = nn.Linear(32, 32)
    fp8core.convert(own, recipe.DelayedScaling(amax_history_len=16))
    own(torch.randn(4, 32))
    assert own.amax_history_fwd.shape[0] == 16


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (recipe.DelayedScaling, "override_linear_precision"),
        (recipe.DelayedScaling, "fp8_wgrad"),
        (recipe.MXFP8BlockScaling, "bogus_kwarg"),
    ],
)
def test_3_an_unknown_setting_is_ignored(kind: type[recipe.Recipe], name: str) -> None:
    """Transformer Engine 2 drops arguments that it does not know."""
    with pytest.raises(RecipeError, match=f"has no argument '{name}'"):
        kind(**{name: False})


@pytest.mark.parametrize("chosen", recipe.names())
def test_4_an_odd_size_ends_the_conversion(chosen: str) -> None:
    """Accelerate returns at the first layer that 16 does not divide; its siblings stay."""
    own = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10), nn.Linear(10, 32), nn.LayerNorm(32))
    report = fp8core.convert(own, chosen)
    assert [entry.name for entry in report.converted] == ["0", "1", "2", "3"]
    own(torch.randn(7, 32)).sum().backward()
    for layer in own[:3]:
        choice = layer._bindings.last[1].linears[0].choices["fprop"]
        assert choice.desc.low_precision


def test_5_the_optimizer_holds_the_parameters_of_before() -> None:
    """Lightning converts after the optimizer was made, and the loss never moves."""
    own = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
    fp8core.convert(own, "current")
    x, losses = torch.randn(16, 32), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (own(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


def test_6_low_precision_was_asked_for_and_nothing_makes_it_active(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Megatron without Transformer Engine takes ``fp8="hybrid"`` and computes in bf16."""
    own = nn.Sequential(nn.Linear(32, 32))
    report = fp8core.convert(own)
    assert "layers use low precision only inside an autocast" in str(report)
    own(torch.randn(4, 32))
    (record,) = [r for r in caplog.records if "first step" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert "0 of 1 linear layers" in record.getMessage()
    assert "no recipe is active" in record.getMessage()


def test_7_the_backend_cannot_run_it_and_another_does() -> None:
    """LLaMA-Factory and others: the library that was asked for is not used, or bf16 is."""
    x = torch.randn(4, 32)
    with toys.isolation():
        toys.register(toys.backend("asked", refuse=lambda desc: "has no such kernel"))
        own = nn.Linear(32, 32)
        fp8core.convert(own, "mxfp8")
        with (
            fp8core.use_backend("asked"),
            pytest.raises(UnsupportedError, match="asked: has no such kernel"),
        ):
            own(x)
        with pytest.raises(RecipeError, match="Did you mean 'asked'"):
            fp8core.use_backend("askd")
        own(x)
        assert own._bindings.last[1].linears[0].choices["fprop"].backend == "reference"


@pytest.mark.usefixtures("forking_doctor")
def test_8_a_plug_in_fails_to_load_and_the_native_path_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformer Engine warns about a plug-in that does not load, and goes on without it."""
    with toys.isolation():
        monkeypatch.setenv("FP8CORE_PLUGINS", "json")
        monkeypatch.setenv("FP8CORE_BACKEND", "json")
        own = nn.Linear(32, 32)
        fp8core.convert(own, "mxfp8")
        with pytest.raises(PluginError, match="implements no hook"):
            own(torch.randn(4, 32))
        main(["doctor"])
        assert "FAIL: implements no hook" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_9_microbatches_keep_the_last_amax_alone(algorithm: str) -> None:
    """With gradient accumulation the scale of a step follows its last microbatch."""
    chosen = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)
    own = nn.Sequential(nn.Linear(32, 32))
    report = fp8core.convert(own, chosen)
    with fp8core.autocast(recipe=chosen):
        for factor in (1.0, 8.0, 0.5):
            own(torch.full((4, 32), factor)).sum().backward()
    assert own[0].scale_fwd[0] == E4M3_MAX / 8
    # One forward after the other: the window has them all, and who has no window is told.
    is_told = any("put the microbatches of a step into one autocast" in n for n in report.notes)
    assert is_told == (algorithm == "most_recent")
    if algorithm == "max":
        for factor in (0.25, 16.0, 0.5):
            own(torch.full((4, 32), factor)).sum().backward()
        assert own[0].scale_fwd[0] == E4M3_MAX / 16
