"""The line at a model's first step says what ran, not what was planned."""

from __future__ import annotations

import logging
import pickle
import sys

import pytest
import torch
from torch import nn

import fp8core
from fp8core import recipe
from fp8core.dispatch import settings
from fp8core.modules.models import prepare
from tests import forked
from tests.dispatch import toys


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="fp8core")
    return caplog


def model() -> nn.ModuleDict:
    class Model(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self["head"](self["b"](self["a"](x)))
            return made

    return Model({"a": nn.Linear(32, 32), "b": nn.Linear(32, 64), "head": nn.Linear(64, 32)})


def first_steps(lines: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (record.levelname, record.getMessage())
        for record in lines.records
        if "first step" in record.getMessage()
    ]


def test_it_is_said_once_with_layers_flops_recipe_and_backend(
    lines: pytest.LogCaptureFixture,
) -> None:
    own = model()
    fp8core.convert(own, "mxfp8")
    assert not first_steps(lines)
    for _ in range(3):
        own(torch.randn(32, 32))
    # 32 x 32 and 32 x 64 of these and the head's 64 x 32
    assert first_steps(lines) == [
        (
            "INFO",
            f"Model, first step: 2 of 3 linear layers ({(32 + 64) / (32 + 64 + 64):.1%} of their "
            f"FLOPs a token) ran in low precision; MXFP8BlockScaling on reference; "
            f"in high precision: head",
        )
    ]
    assert not own._forward_hooks


def test_forwards_of_several_threads_say_it_once(lines: pytest.LogCaptureFixture) -> None:
    own = model()
    fp8core.convert(own, "mxfp8")
    (hook,) = own._forward_hooks.values()  # which torch has read before another thread calls it
    own(torch.randn(32, 32))
    hook(own, (), None)
    assert len(first_steps(lines)) == 1


def test_it_tells_what_ran_not_what_was_planned(lines: pytest.LogCaptureFixture) -> None:
    own = model()
    fp8core.convert(own, "mxfp8")
    with fp8core.autocast(recipe=recipe.PerLayer({"a": recipe.NVFP4BlockScaling()})):
        own(torch.randn(32, 32))
    ((level, line),) = first_steps(lines)
    assert level == "INFO"
    assert "1 of 3" in line
    assert "NVFP4BlockScaling on reference; in high precision: b, head" in line


def test_recipes_by_layer_are_counted(lines: pytest.LogCaptureFixture) -> None:
    own = model()
    mixed = recipe.PerLayer({"a": recipe.NVFP4BlockScaling()}, default=recipe.MXFP8BlockScaling())
    fp8core.convert(own, mixed)
    own(torch.randn(32, 32))
    ((_, line),) = first_steps(lines)
    assert "1 in NVFP4BlockScaling on reference; 1 in MXFP8BlockScaling on reference" in line


def test_nothing_in_low_precision_is_a_warning(lines: pytest.LogCaptureFixture) -> None:
    own = model()
    fp8core.convert(own)
    own(torch.randn(32, 32))
    ((level, line),) = first_steps(lines)
    assert level == "WARNING"
    assert "0 of 3" in line
    assert "no recipe is active: enter fp8core.autocast, or convert with a recipe" in line


@pytest.mark.parametrize("name", ["mxfp8", None])
@pytest.mark.parametrize("is_around_the_model", [True, False])
def test_an_autocast_that_switches_it_off_is_information(
    name: str | None, is_around_the_model: bool, lines: pytest.LogCaptureFixture
) -> None:
    own = model()
    fp8core.convert(own, name)
    if is_around_the_model:
        with fp8core.autocast(enabled=False):
            own(torch.randn(32, 32))
    else:
        for layer in own.values():
            layer.forward = fp8core.autocast(enabled=False)(layer.forward)
        own(torch.randn(32, 32))
    ((level, line),) = first_steps(lines)
    if name is None and not is_around_the_model:  # nothing shows that there was an autocast
        assert level == "WARNING"
        return
    assert level == "INFO"
    assert "0 of 3" in line
    assert line.endswith("; fp8core.autocast(enabled=False) switched it off")


def test_a_recipe_by_layer_that_leaves_all_is_not_called_inactive(
    lines: pytest.LogCaptureFixture,
) -> None:
    own = model()
    fp8core.convert(own, recipe.PerLayer({"typo": recipe.MXFP8BlockScaling()}))
    own(torch.randn(32, 32))
    ((level, line),) = first_steps(lines)
    assert level == "WARNING"
    assert line.endswith("; the active recipe leaves all of them in high precision")


def test_layers_that_were_not_called_are_named(lines: pytest.LogCaptureFixture) -> None:
    own = model()
    own["never"] = nn.Linear(8, 8)
    fp8core.convert(own, "current")
    own(torch.randn(32, 32))
    assert "not called, or in a compiled graph: never" in first_steps(lines)[0][1]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_layers_in_compiled_blocks_are_not_warned_of(lines: pytest.LogCaptureFixture) -> None:
    own = model()
    fp8core.convert(own, "mxfp8")
    for block in ("a", "b"):
        own[block].compile(backend="aot_eager")
    with torch.no_grad():
        own(torch.randn(32, 32))
    torch._dynamo.reset()
    ((level, line),) = first_steps(lines)
    assert level == "INFO"
    assert line.endswith("in high precision: head; not called, or in a compiled graph: a, b")


def test_layers_that_no_graph_holds_and_nobody_calls_are_warned_of(
    lines: pytest.LogCaptureFixture,
) -> None:
    own = model()
    fp8core.convert(own, "mxfp8")
    own.forward = own["head"].forward
    with torch.no_grad():
        own(torch.randn(32, 64))
    assert [level for level, _ in first_steps(lines)] == ["WARNING"]


def test_a_substituted_backend_is_in_the_line(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with toys.isolation():
        toys.register(toys.backend("picky", refuse=lambda desc: "not in the mood"))
        monkeypatch.setenv("FP8CORE_OP_BACKEND", "quantize=picky")
        own = model()
        fp8core.convert(own, "current")
        own(torch.randn(32, 32))
    ((_, line),) = first_steps(lines)
    assert "substituted: " in line
    assert "picky" in line


def test_a_prepared_model_says_it_too_but_warns_of_nothing(
    lines: pytest.LogCaptureFixture,
) -> None:
    own = fp8core.prepare(nn.Sequential(fp8core.Linear(32, 32)))
    own(torch.randn(32, 32))
    ((level, line),) = first_steps(lines)
    assert level == "INFO"
    assert "0 of 1" in line
    fp8core.prepare(own)
    with fp8core.autocast(recipe=recipe.MXFP8BlockScaling()):
        own(torch.randn(32, 32))
    assert "1 of 1" in first_steps(lines)[1][1]
    assert not own._forward_hooks


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_in_a_graph_each_kind_of_layer_says_so_when_it_is_captured(
    lines: pytest.LogCaptureFixture,
) -> None:
    own = nn.Sequential(nn.Linear(32, 96), nn.Linear(96, 32), nn.Linear(32, 96))
    fast = torch.compile(own, fullgraph=True, backend="aot_eager")
    fp8core.convert(fast, "mxfp8")
    for _ in range(2):
        fast(torch.randn(32, 32))
    assert not first_steps(lines)
    said = [r.getMessage() for r in lines.records if "captured" in r.getMessage()]
    assert said == [
        f"ConvertedLinear{sizes}, in a captured graph: MXFP8BlockScaling on reference"
        for sizes in ("(32, 96)", "(96, 32)")
    ]
    torch._dynamo.reset()


def test_unconvert_before_the_first_step_says_nothing(lines: pytest.LogCaptureFixture) -> None:
    own = model()
    fp8core.convert(own, "mxfp8")
    fp8core.unconvert(own)
    own(torch.randn(32, 32))
    assert not first_steps(lines)


@pytest.mark.parametrize("first", ["switched off", "switched off inside", "outside"])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_first_forward_in_high_precision_does_not_use_up_the_line(
    first: str, is_prepared: bool, lines: pytest.LogCaptureFixture
) -> None:
    own = model()
    fp8core.convert(own, None)
    if is_prepared:
        fp8core.prepare(own)
    whole, inside = own.forward, fp8core.autocast(enabled=False)
    for _ in range(2):
        if first == "switched off":
            with fp8core.autocast(enabled=False):
                own(torch.randn(32, 32))
        else:
            own.forward = inside(whole) if first == "switched off inside" else whole
            own(torch.randn(32, 32))
    own.forward = whole
    ((_, line),) = first_steps(lines)
    assert "0 of 3" in line
    for _ in range(2):
        with fp8core.autocast(recipe=recipe.MXFP8BlockScaling()):
            own(torch.randn(32, 32))
    _, (level, line) = first_steps(lines)
    assert level == "INFO"
    assert "2 of 3 linear layers (60.0% of their FLOPs a token) ran in low precision" in line
    assert not own._forward_hooks


def test_a_recipe_that_leaves_all_in_high_precision_is_a_step(
    lines: pytest.LogCaptureFixture,
) -> None:
    own = model()
    fp8core.convert(own, None)
    for _ in range(2):
        with fp8core.autocast(recipe=recipe.PerLayer({})):
            own(torch.randn(32, 32))
    assert len(first_steps(lines)) == 1
    assert not own._forward_hooks


@pytest.mark.parametrize("name", ["_warn", "_inform", "_wait"])
def test_a_hook_of_an_earlier_version_loads_and_is_silenced(name: str) -> None:
    hook = pickle.loads(f"cfp8core.modules.first_step\n{name}\n.".encode())
    model = torch.nn.Sequential(fp8core.Linear(16, 16))
    model.register_forward_hook(hook)
    prepare.silence(model)
    assert not model._forward_hooks


PROGRAM = """
import os, sys, torch, fp8core
{setup}
model = torch.nn.Sequential(torch.nn.Linear(32, 32))
fp8core.convert(model, "current")
for _ in range(2):
    model(torch.ones(32, 32))
"""
LINE = "Sequential, first step: 1 of 1 linear layers (100.0% of their FLOPs a token) ran in low "
LINE += "precision; Float8CurrentScaling on reference"


@pytest.mark.parametrize(
    ("setup", "environment", "expected"),
    [
        ("", {}, [LINE]),
        ("", {"FP8CORE_FIRST_STEP": "1"}, [LINE]),
        ("", {"FP8CORE_FIRST_STEP": "0"}, []),
        ("import logging; logging.basicConfig(level='WARNING')", {}, []),
        ("import logging; logging.basicConfig(level='INFO')", {}, [f"INFO:fp8core:{LINE}"]),
        ("import logging; logging.getLogger('fp8core').setLevel('ERROR')", {}, []),
    ],
)
def test_a_program_without_logging_sees_the_line_once(
    setup: str,
    environment: dict[str, str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "cuda,ascend")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = forked.run([sys.executable, "-c", PROGRAM.format(setup=setup)])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "first step" in line]
    assert lines == expected


def test_rank_0_alone_says_it_and_every_rank_warns(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for name in ("mxfp8", None):
            own = model()
            fp8core.convert(own, name)
            own(torch.randn(32, 32))
    assert [level for level, _ in first_steps(lines)] == ["INFO", "WARNING", "WARNING"]


def test_a_bad_value_of_the_variable_is_refused() -> None:
    assert settings.tells_first_step({})
    with pytest.raises(fp8core.RecipeError, match="FP8CORE_FIRST_STEP='no': expected 0 or 1"):
        settings.tells_first_step({"FP8CORE_FIRST_STEP": "no"})
