"""``fp8core doctor``: what is installed, what can be used and why not, what is set."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import (
    OPS,
    OPTIONAL_OPS,
    BackendSpec,
    FusedDesc,
    GemmDesc,
    OpDesc,
    QuantizeDesc,
)
from fp8core.dispatch import plugins
from fp8core.doctor import findings
from fp8core.doctor import report as doctor
from fp8core.doctor.findings import Check, Findings, absent, here, records
from fp8core.doctor.report import WIDTH, render
from tests.chain import fused_toy
from tests.dispatch import toys

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("isolated")


def glance(name: str, device: torch.device | None) -> Findings:
    """Find out whether a backend can be used, and no more."""
    registry = plugins.load()
    return Findings(name, registry.unusable(registry.backends[name]))


def examine(device: torch.device | None = None) -> doctor.Report:
    return doctor.examine(glance, device)


def backend(report: doctor.Report, name: str) -> dict[str, object]:
    (found,) = [entry for entry in report.backends if entry["name"] == name]
    return found


def test_versions_hold_what_a_bug_report_needs() -> None:
    versions = examine().versions
    assert versions["fp8core"] == fp8core.__version__
    assert versions["torch"] == torch.__version__
    assert versions.keys() >= {"python", "platform", "pluggy", "numpy"}


def test_devices_begin_with_the_cpu() -> None:
    assert examine().devices[0].startswith("cpu ")


def test_healthy_installation_has_no_problem() -> None:
    report = examine()
    assert (report.selected, report.problems, report.notes) == ("reference", [], [])


def test_backend_is_listed_with_what_it_declares() -> None:
    toys.register(toys.backend("toy", device_types=("cuda", "cpu"), priority=7))
    assert backend(examine(), "toy") == {
        "name": "toy",
        "device_types": ["cuda", "cpu"],
        "portable": False,
        "priority": 7,
        "api_version": ".".join(map(str, fp8core.backend_api.API_VERSION)),
        "unusable": None,
        "device": None,
        "untested": None,
    }


def test_backends_are_listed_by_priority() -> None:
    toys.register(toys.backend("low", priority=-1), toys.backend("high", priority=9))
    names = [entry["name"] for entry in examine().backends]
    assert names == ["high", "reference", "low"]


def test_backend_that_cannot_be_used_has_its_reason_and_is_no_problem_unless_asked_for() -> None:
    toys.register(toys.backend("toy", probe=lambda: "there is no driver"))
    report = examine()
    assert backend(report, "toy")["unusable"] == "there is no driver"
    assert report.problems == []


def test_broken_plugin_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "json")
    row = examine().plugins[-1]
    assert (row["name"], row["source"]) == ("json", "FP8CORE_PLUGINS=json")
    assert row["reason"].startswith("implements no hook")


def test_formats_and_recipes_of_plugins_are_listed() -> None:
    plugins.register(toys.whole_plugin(), "toy")
    report = examine()
    assert "toy8" in report.formats
    assert "toy_rowwise" in report.recipes


@pytest.mark.parametrize("value", ["toy", "refrence", "json"])
@pytest.mark.parametrize("variable", ["FP8CORE_BACKEND", "FP8CORE_OP_BACKEND"])
def test_backend_that_is_asked_for_and_cannot_be_used_is_a_problem(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value == "json":
        monkeypatch.setenv("FP8CORE_PLUGINS", value)
    toys.register(toys.backend("toy", probe=lambda: "there is no driver"))
    monkeypatch.setenv(variable, value if variable == "FP8CORE_BACKEND" else f"gemm={value}")
    (problem,) = examine().problems
    words = {
        "toy": ("'toy' is selected", "there is no driver"),
        "refrence": (variable, "Did you mean 'reference'?"),
        "json": ("implements no hook",),
    }
    assert all(word in problem for word in words[value])


def test_no_usable_backend_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "reference")
    report = examine()
    assert report.selected is None
    assert len(report.problems) == 1


def test_policy_counts() -> None:
    toys.register(toys.backend("toy", priority=-1))
    with fp8core.use_backend("toy"):
        assert examine().selected == "toy"


def test_environment_lists_what_is_set_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    toys.register(toys.backend("toy", environment=("FP8CORE_TOY_TILES",)))
    monkeypatch.setenv("FP8CORE_STRICT", "0")
    monkeypatch.setenv("FP8CORE_TOY_TILES", "4")
    assert examine().environment == {"FP8CORE_STRICT": "0", "FP8CORE_TOY_TILES": "4"}


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        (
            "FP8CORE_STRCT",
            "1",
            "FP8CORE_STRCT is set, but nothing reads it. Did you mean 'FP8CORE_STRICT'?",
        ),
        (
            "FP8CORE_DISABLE_PLUGINS",
            "toy",
            "FP8CORE_DISABLE_PLUGINS names 'toy', but no plug-in",
        ),
    ],
)
def test_setting_that_changes_nothing_is_a_note(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    (note,) = examine().notes
    assert note.startswith(words)


def test_plugin_whose_hook_fails_is_a_note_and_the_others_are_heard() -> None:
    def fail(report: Callable[[str, str], None]) -> None:
        raise OSError("no driver")

    def report_driver(report: Callable[[str, str], None]) -> None:
        report("driver", "12.9")

    plugins.register(toys.plugin(fp8core_doctor=fail), "bad")
    plugins.register(toys.plugin(fp8core_doctor=report_driver), "good")
    assert examine().notes == [
        "plug-in bad: its fp8core_doctor failed: OSError: no driver",
        "driver: 12.9",
    ]


@pytest.mark.parametrize(
    ("failing", "problems"),
    [("reference", ["backend 'reference' is selected, but its self-test fails: amax"]), ("", [])],
)
def test_failed_self_test_counts_for_what_is_asked_for(failing: str, problems: list[str]) -> None:
    toys.register(toys.backend("toy", priority=-1))

    def examiner(name: str, device: torch.device | None) -> Findings:
        reason = "wrong" if name in (failing, "toy") else None
        return Findings(name, checks=[Check("amax", 1, 2.0, "", reason)])

    report = doctor.examine(examiner)
    assert report.problems == problems
    assert [own["failure"] for own in report.selftests if own["backend"] == "toy"] == ["wrong"]


def test_device_that_is_here_and_has_a_backend_is_no_problem() -> None:
    assert examine(CPU).problems == []


def test_device_that_is_not_here_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: None)
    assert examine(torch.device("cuda:0")).problems == ["torch finds no cuda device here"]


def test_device_whose_backends_cannot_be_used_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "reference")
    toys.register(
        toys.backend("toy", probe=lambda: "there is no driver"),
        toys.backend("other", device_types=("cuda",)),
    )
    assert examine(CPU).problems == ["no backend can be used on cpu; toy: there is no driver"]


def test_emulation_counts_on_a_device_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "reference")
    toys.register(toys.backend("toy", device_types=("cuda",), portable=True))
    assert examine(CPU).problems == [
        "no backend can be used on cpu; toy: emulates it; choose it with FP8CORE_BACKEND=toy"
    ]
    with fp8core.use_backend("toy"):
        assert examine(CPU).problems == []


def test_neighbours_are_listed_with_version_and_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine().neighbours == []
    monkeypatch.setitem(doctor.NEIGHBOURS, "pluggy", "stands for one")
    (found,) = examine().neighbours
    assert found == {
        "name": "pluggy",
        "version": examine().versions["pluggy"],
        "note": "stands for one",
    }


def test_long_reasons_are_broken_into_lines_and_kept_whole() -> None:
    words = [f"word{number}" for number in range(200)]
    reason = " ".join(words[:100]) + "\n" + " ".join(words[100:])
    toys.register(toys.backend("toy", probe=lambda: reason))
    with fp8core.use_backend("toy"):
        report = examine()
    text = render(dataclasses.replace(report, notes=[reason]))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert [word for word in text.split() if word.startswith("word")] == words * 3
    assert backend(report, "toy")["unusable"] == reason  # as JSON has it


def test_backend_is_asked_and_tested_on_its_own_device() -> None:
    found = here("reference", None)
    assert (found.device, found.untested, found.failed) == ("cpu", None, [])
    assert [own.op for own in found.checks] == list(OPS)
    for own in found.checks:
        assert own.cases > 0, own.op
        assert own.worst is not None, own.op
        assert 0 <= own.worst <= 1, own.op
    assert {cell.op for cell in found.cells} == {*OPS, *OPTIONAL_OPS}


def test_fusions_are_tested_where_they_are_offered() -> None:
    with fused_toy.installed("norm_quantize"):
        found = [one["check"] for one in records("fused_toy", None, done=OPS) if "check" in one]
    assert [own["op"] for own in found] == ["norm_quantize"]


def test_backend_that_cannot_be_used_is_not_asked() -> None:
    toys.register(toys.backend("toy", probe=lambda: "there is no driver"))
    found = here("toy", None)
    assert (found.unusable, found.cells, found.checks) == ("there is no driver", [], [])


def test_backend_of_another_device_is_asked_and_not_tested() -> None:
    toys.register(toys.backend("toy", device_types=("cuda",)))
    found = here("toy", torch.device("cpu"))
    assert found.untested == "it runs on cuda, not on cpu"
    assert found.cells
    assert found.checks == []


def test_nothing_is_tested_on_meta() -> None:
    found = here("reference", torch.device("meta"))
    assert found.untested == "meta tensors hold no values"
    assert found.checks == []


def test_accelerator_that_is_not_here_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: None)
    assert absent(torch.device("cpu")) is None
    assert absent(torch.device("cuda:1")) == "torch finds no cuda device here"


def test_accelerator_of_a_high_index_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: own)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert absent(torch.device("cuda:1")) is None
    reason = absent(torch.device("cuda:2"))
    assert reason == "there is no cuda:2: torch finds 2 cuda devices here"


with toys.isolation():
    RECIPES = recipe.names()  # those that no plug-in brings
SCALES_NEED_NO_AMAX = {("mxfp8", "amax"), ("block", "amax")}
PLACE, CUDA = torch.device("cpu"), torch.device("cuda:0")


def cells(spec: BackendSpec, device: torch.device) -> list[findings.Cell]:
    return findings.cells(spec, device, findings.needs_by_recipe())


def states(name: str, device: torch.device = PLACE) -> dict[tuple[str, str], str]:
    found = cells(plugins.load().backends[name], device)
    return {(cell.recipe, cell.op): cell.state for cell in found}


def test_reference_runs_every_recipe_on_the_cpu() -> None:
    found = states("reference")
    assert {cell: found[cell] for cell in itertools.product(RECIPES, OPS)} == {
        (name, op): "unused" if (name, op) in SCALES_NEED_NO_AMAX else "native"
        for name in RECIPES
        for op in OPS
    }


def test_high_precision_has_no_use_for_casts() -> None:
    assert states("reference")["none", "quantize"] == "unused"


def test_portable_backend_emulates_low_precision_elsewhere() -> None:
    found = states("reference", CUDA)
    assert found["mxfp8", "gemm"] == "emulated"
    assert found["none", "gemm"] == "native"


def test_cells_are_the_backends_answers() -> None:
    def refuse(desc: OpDesc) -> str | None:
        is_block = isinstance(desc, GemmDesc) and desc.a is not None and desc.a.block != (0, 0)
        return "no blocks here" if is_block else None

    toys.register(toys.backend("toy", refuse=refuse))
    found = states("toy")
    answers = {name: found[name, "gemm"] for name in recipe.names()}
    assert answers == {
        "delayed": "native",
        "current": "native",
        "mxfp8": "no",
        "block": "no",
        "nvfp4": "no",
        "rowwise": "no",
    }


def test_refusal_of_some_uses_names_them() -> None:
    def refuse(desc: OpDesc) -> str | None:
        is_rounded = isinstance(desc, QuantizeDesc) and desc.rowwise and desc.rowwise.stochastic
        return "rounds to the nearest alone" if is_rounded else None

    toys.register(toys.backend("toy", refuse=refuse))
    (cell,) = [
        cell
        for cell in cells(plugins.load().backends["toy"], PLACE)
        if (cell.recipe, cell.op) == ("nvfp4", "quantize")
    ]
    assert cell.state == "partly"
    assert cell.reasons == ("grad_output, grad_output of groups: rounds to the nearest alone",)
    assert findings.unanswered([cell]) == [f"quantize of nvfp4: {cell.reasons[0]}"]


def test_backend_of_another_device_runs_nothing() -> None:
    toys.register(toys.backend("toy", device_types=("cuda",)))
    assert set(states("toy").values()) == {"no", "unused"}


def test_table_has_a_row_for_each_operation_and_a_column_for_each_recipe() -> None:
    found = cells(plugins.load().backends["reference"], PLACE)
    table = findings.rows(found)
    assert table[0] == ["", "none", *recipe.names()]
    assert [row[0] for row in table[1:]] == list(OPS)  # fusions that nobody offers are left out


def test_fusions_that_are_offered_are_asked_as_layers_ask() -> None:
    def refuse(desc: OpDesc) -> str | None:
        return None if isinstance(desc, FusedDesc) else "fusions alone"

    toys.register(toys.backend("toy", refuse=refuse))
    found = cells(plugins.load().backends["toy"], PLACE)
    offered = {row[0] for row in findings.rows(found)} - {"", *OPS}
    assert offered == {
        "activation_backward_quantize",
        "activation_quantize",
        "norm_backward_quantize",
        "norm_quantize",
    }


def test_recipe_that_cannot_be_made_is_a_refusal_with_its_reason() -> None:
    def factory() -> object:
        raise OSError("no table")

    plugins.register(toys.plugin(recipes={"toy_recipe": factory}), "toy")
    assert states("reference")["toy_recipe", "gemm"] == "no"
