"""The command ``fp8core doctor``: text and JSON, exit statuses, and backends that crash or hang."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fp8core
from fp8core.doctor import report as doctor
from fp8core.doctor.findings import here
from tests.doctor import SHORT

Command = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("isolated")


@pytest.fixture
def command(cli: Command, forking_doctor: None) -> Command:
    """The same, whose processes are forks with a short self-test."""
    return cli


def as_json(report: doctor.Report) -> object:
    return json.loads(json.dumps(dataclasses.asdict(report)))


@pytest.mark.slow  # the whole self-test, of which those of the forks are a part
def test_command_prints_the_report_as_json(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # The command's own process sees what is installed, also a plug-in that brings recipes.
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "ascend")
    status, out, _ = cli("doctor", "--json")
    assert (status, json.loads(out)) == (0, as_json(doctor.examine(here)))


def test_a_plugin_that_does_not_exist_is_bad_usage(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_nowhere")
    status, _, errors = command("doctor")
    assert status == 2
    assert "FP8CORE_PLUGINS names 'toy_nowhere'" in errors


@pytest.mark.parametrize("runs", ["command", pytest.param("cli", marks=pytest.mark.slow)])
def test_command_prints_every_part_of_the_report(
    runs: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "json")
    monkeypatch.setenv("FP8CORE_STRCT", "1")
    status, out, _ = request.getfixturevalue(runs)("doctor")
    assert status == 0
    for part in (
        f"torch {torch.__version__}",
        "devices: cpu ",
        " * reference    ok  [cpu/meta, any other device on request]",
        "FAIL: implements no hook; hooks are ",
        "formats: e2m1, e4m3, e5m2, e8m0",
        "recipes: delayed, current, mxfp8, block, nvfp4, rowwise",
        "   FP8CORE_PLUGINS=json",
        "notes\n   FP8CORE_STRCT is set",
    ):
        assert part in out
    assert "\x1b" not in out  # no colours


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["text", "json"])
def test_command_fails_when_what_is_asked_for_cannot_be_used(
    option: tuple[str, ...], command: Command
) -> None:
    status, out, _ = command("doctor", "cuda:99", *option)
    assert status == 1
    head = "" if option else r"problems\n   "
    assert re.search(rf"{head}(torch finds no cuda device here|there is no cuda:99)", out)
    assert option or "gemm" in out.partition("by its declarations")[2]


@pytest.mark.parametrize(
    ("name", "option"), [("FP8CORE_BACKEND", ()), ("FP8CORE_OP_BACKEND", ("--json",))]
)
def test_wrong_name_of_a_backend_in_the_environment_is_bad_usage(
    name: str, option: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "refrence" if name == "FP8CORE_BACKEND" else "gemm=refrence")
    status, out, _ = command("doctor", *option)
    assert status == 2
    assert "Did you mean 'reference'?" in " ".join(out.split())  # the text may break there


def test_command_fails_with_the_reason_when_a_setting_is_invalid(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_STRICT", "perhaps")
    status, _, err = command("doctor")
    assert (status, err) == (2, "fp8core doctor: FP8CORE_STRICT='perhaps': expected 0 or 1.\n")


COMMANDS = ": build, conformance, demo, doctor, explain, run, selftest, tune"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), f"expected a command{COMMANDS}"),
        (("doctr",), f"commands{COMMANDS}. Did you mean 'doctor'?"),
        (("doctor", "--jsn"), "--jsn"),
        (("doctor", "cudaa"), "Did you mean 'cuda'?"),
    ],
    ids=str,
)
def test_bad_usage_exits_with_2_and_what_would_work(
    arguments: tuple[str, ...],
    words: str,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        command(*arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_version_is_that_of_the_package(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"fp8core {fp8core.__version__}\n"


PLUGIN = """
import os, signal, sys, time
from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core_backends.reference.backend import ReferenceBackend

def crash():
    print("about to crash")
    os.kill(os.getpid(), signal.SIGSEGV)

def hang():
    time.sleep(600)

def leave():
    os._exit(0)

class Backend(ReferenceBackend):
    def bind(self, desc, device):
        run = super().bind(desc, device)
        def wild(*args, **kwargs):
            {act}()
            return run(*args, **kwargs)
        return wild if desc.op == "{op}" else run

def made():
    {act}()

if "{when}" == "load":
    {act}()

@hookimpl
def fp8core_doctor(report):
    if "{when}" == "hook":
        {act}()

@hookimpl
def fp8core_register_backends(register):
    fields = {{"priority": {priority}, "api_version": API_VERSION}}
    register(BackendSpec("wild", ("cpu",), "toy_wild:{factory}", **fields))
"""


@pytest.fixture
def wild(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``wild(act, op=, factory=, priority=, when=)`` installs a backend with one misdeed."""

    def install(act: str, **where: object) -> None:
        fields = {"op": "", "factory": "Backend", "priority": -1, "when": ""} | where
        (tmp_path / "toy_wild.py").write_text(PLUGIN.format(act=act, **fields))
        paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("FP8CORE_PLUGINS", "toy_wild")

    return install


def failures(out: str) -> dict[str, str | None]:
    """Why each operation of the backend ``wild`` failed."""
    found = json.loads(out)["selftests"]
    return {own["op"]: own["failure"] for own in found if own["backend"] == "wild"}


def test_backend_that_crashes_fails_that_operation_alone(
    command: Command, wild: Callable[..., None]
) -> None:
    wild("crash", op="gemm")
    status, out, _ = command("doctor", "--json")
    assert status == 0  # nobody asks for it
    found = failures(out)
    assert set(found) == {*SHORT}
    assert {op for op, failure in found.items() if failure} == {"gemm"}
    assert str(found["gemm"]).startswith("killed by SIGSEGV: about to crash")


def test_backend_that_hangs_is_ended_and_the_rest_not_run(
    command: Command, wild: Callable[..., None]
) -> None:
    wild("hang", op="gemm", priority=1)
    status, out, _ = command("doctor", "--json", "--deadline", "10")
    assert status == 1  # it is the selected one
    found = failures(out)
    assert found["gemm"] == "no progress for 10 s, ended"
    assert found["amax"] is None
    assert found["norm"] == "not run, after gemm hung"


@pytest.mark.parametrize(
    ("act", "reason"),
    [("crash", "killed by SIGSEGV"), ("leave", "exited with status 0")],
)
def test_backend_that_ends_the_process_when_imported_cannot_be_used(
    act: str, reason: str, command: Command, wild: Callable[..., None]
) -> None:
    wild(act, factory="made", priority=1)
    status, out, _ = command("doctor")
    assert status == 0  # the reference is selected instead
    assert f"wild         its probe and import: {reason}" in out
    assert " * reference    ok" in out


def test_plugin_that_crashes_when_loaded_is_a_row_with_the_signal(
    command: Command, wild: Callable[..., None]
) -> None:
    wild("crash", when="load")
    status, out, _ = command("doctor")
    assert status == 0
    assert "toy_wild     FAIL: while it was loaded: killed by SIGSEGV: about to crash" in out
    assert " * reference    ok" in out
    assert out.count("ok  ") > 10  # the self-test of the reference


def test_hook_that_crashes_is_a_note_and_its_backend_is_tested(
    command: Command, wild: Callable[..., None]
) -> None:
    wild("crash", when="hook")
    status, out, _ = command("doctor", "--json")
    assert status == 0
    (note,) = json.loads(out)["notes"]
    assert note.startswith("plug-in toy_wild: its fp8core_doctor: killed by SIGSEGV")
    assert set(failures(out).values()) == {None}


CHATTY = """
print("printed by a plug-in")
from fp8core.backend_api import hookimpl

@hookimpl
def fp8core_doctor(report):
    print("printed by a hook")
    report("half a character \\ud800", "\\x1b[2J")
"""


def test_what_a_plugin_prints_and_says_spoils_no_report(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_chatty.py").write_text(CHATTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_chatty")
    status, out, errors = command("doctor", "--json")
    assert status == 0
    assert json.loads(out)["notes"] == ["half a character \\ud800: \\x1b[2J"]
    assert "printed by a plug-in" in errors
