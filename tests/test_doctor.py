"""``fp8core doctor``: what is installed, what can be used and why not, what is set."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator

import pytest
import torch

import fp8core
from fp8core import doctor
from fp8core.dispatch import plugins
from tests.dispatch import toys


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    with toys.isolation():
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``command("doctor", ...)`` returns the exit status, what was printed, and the errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = importlib.import_module("fp8core.__main__").main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def backend(report: doctor.Report, name: str) -> dict[str, object]:
    (found,) = [entry for entry in report.backends if entry["name"] == name]
    return found


def test_versions_hold_what_a_bug_report_needs() -> None:
    versions = doctor.examine().versions
    assert versions["fp8core"] == fp8core.__version__
    assert versions["torch"] == torch.__version__
    assert versions.keys() >= {"python", "platform", "pluggy", "numpy"}


def test_devices_begin_with_the_cpu() -> None:
    assert doctor.examine().devices[0].startswith("cpu ")


def test_healthy_installation_has_no_problem() -> None:
    report = doctor.examine()
    assert (report.selected, report.problems, report.notes) == ("reference", [], [])


def test_backend_is_listed_with_what_it_declares() -> None:
    toys.register(toys.backend("toy", device_types=("cuda", "cpu"), priority=7))
    assert backend(doctor.examine(), "toy") == {
        "name": "toy",
        "device_types": ["cuda", "cpu"],
        "portable": False,
        "priority": 7,
        "api_version": ".".join(map(str, fp8core.backend_api.API_VERSION)),
        "unusable": None,
    }


def test_backends_are_listed_by_priority() -> None:
    toys.register(toys.backend("low", priority=-1), toys.backend("high", priority=9))
    names = [entry["name"] for entry in doctor.examine().backends]
    assert names == ["high", "reference", "low"]


def test_backend_that_cannot_be_used_has_its_reason() -> None:
    toys.register(toys.backend("toy", probe=lambda: "there is no driver"))
    assert backend(doctor.examine(), "toy")["unusable"] == "there is no driver"


def test_backend_that_nobody_asks_for_is_no_problem() -> None:
    toys.register(toys.backend("toy", probe=lambda: "there is no driver"))
    assert doctor.examine().problems == []


def test_broken_plugin_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_nowhere")
    assert doctor.examine().plugins[-1] == {
        "name": "toy_nowhere",
        "source": "FP8CORE_PLUGINS=toy_nowhere",
        "reason": "ModuleNotFoundError: No module named 'toy_nowhere'",
    }


def test_formats_and_recipes_of_plugins_are_listed() -> None:
    plugins.register(toys.whole_plugin(), "toy")
    report = doctor.examine()
    assert "toy8" in report.formats
    assert "toy_rowwise" in report.recipes


@pytest.mark.parametrize(
    ("variable", "value"), [("FP8CORE_BACKEND", "toy"), ("FP8CORE_OP_BACKEND", "gemm=toy")]
)
def test_backend_that_is_asked_for_and_cannot_be_used_is_a_problem(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.register(toys.backend("toy", probe=lambda: "there is no driver"))
    monkeypatch.setenv(variable, value)
    (problem,) = doctor.examine().problems
    assert "'toy' is selected" in problem
    assert "there is no driver" in problem


@pytest.mark.parametrize(
    ("variable", "value"),
    [("FP8CORE_BACKEND", "refrence"), ("FP8CORE_OP_BACKEND", "gemm=refrence")],
)
def test_unknown_backend_that_is_asked_for_is_a_problem(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    (problem,) = doctor.examine().problems
    assert problem.startswith(variable)
    assert "Did you mean 'reference'?" in problem


def test_broken_plugin_that_is_asked_for_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_nowhere")
    monkeypatch.setenv("FP8CORE_BACKEND", "toy_nowhere")
    (problem,) = doctor.examine().problems
    assert "No module named 'toy_nowhere'" in problem


def test_no_usable_backend_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "reference")
    report = doctor.examine()
    assert report.selected is None
    assert len(report.problems) == 1


def test_policy_counts() -> None:
    toys.register(toys.backend("toy", priority=-1))
    with fp8core.use_backend("toy"):
        assert doctor.examine().selected == "toy"


def test_environment_lists_what_is_set_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    toys.register(toys.backend("toy", environment=("FP8CORE_TOY_TILES",)))
    monkeypatch.setenv("FP8CORE_STRICT", "0")
    monkeypatch.setenv("FP8CORE_TOY_TILES", "4")
    assert doctor.examine().environment == {"FP8CORE_STRICT": "0", "FP8CORE_TOY_TILES": "4"}


def test_unknown_variable_is_a_note_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_STRCT", "1")
    (note,) = doctor.examine().notes
    assert note == "FP8CORE_STRCT is set, but nothing reads it. Did you mean 'FP8CORE_STRICT'?"


def test_unknown_name_in_disable_plugins_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "toy")
    (note,) = doctor.examine().notes
    assert note.startswith("FP8CORE_DISABLE_PLUGINS names 'toy', but no plug-in")


def test_plugin_may_add_lines() -> None:
    def report_driver(report: Callable[[str, str], None]) -> None:
        report("driver", "12.9")

    toys.register(fp8core_doctor=report_driver)
    assert doctor.examine().notes == ["driver: 12.9"]


def test_plugin_whose_hook_fails_is_a_note_and_the_others_are_heard() -> None:
    def fail(report: Callable[[str, str], None]) -> None:
        raise OSError("no driver")

    def report_driver(report: Callable[[str, str], None]) -> None:
        report("driver", "12.9")

    plugins.register(toys.plugin(fp8core_doctor=fail), "bad")
    plugins.register(toys.plugin(fp8core_doctor=report_driver), "good")
    assert doctor.examine().notes == [
        "plug-in bad: its fp8core_doctor failed: OSError: no driver",
        "driver: 12.9",
    ]


def test_command_prints_the_report_as_json(command: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = command("doctor", "--json")
    assert (status, json.loads(out)) == (0, dataclasses.asdict(doctor.examine()))


def test_command_prints_every_part_of_the_report(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_nowhere")
    monkeypatch.setenv("FP8CORE_STRCT", "1")
    status, out, _ = command("doctor")
    assert status == 0
    for part in (
        f"torch {torch.__version__}",
        "devices: cpu ",
        " * reference    ok  [cpu/meta, any other device on request]",
        "FAIL: ModuleNotFoundError: No module named 'toy_nowhere'  [FP8CORE_PLUGINS=toy_nowhere]",
        "formats: e2m1, e4m3, e5m2, e8m0",
        "recipes: delayed, current, mxfp8, block, nvfp4, rowwise",
        "   FP8CORE_PLUGINS=toy_nowhere",
        "notes\n   FP8CORE_STRCT is set",
    ):
        assert part in out


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["text", "json"])
def test_command_fails_when_what_is_asked_for_cannot_be_used(
    option: tuple[str, ...],
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8CORE_BACKEND", "refrence")
    status, out, _ = command("doctor", *option)
    assert status == 1
    assert "Did you mean 'reference'?" in out


def test_command_fails_with_the_reason_when_a_setting_is_invalid(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_STRICT", "perhaps")
    status, _, err = command("doctor")
    assert (status, err) == (1, "fp8core doctor: FP8CORE_STRICT='perhaps': expected 0 or 1.\n")


@pytest.mark.parametrize("arguments", [(), ("doctr",), ("doctor", "--jsn")], ids=" ".join)
def test_bad_usage_exits_with_2(
    arguments: tuple[str, ...], command: Callable[..., tuple[int, str, str]]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command(*arguments)
    assert caught.value.code == 2
