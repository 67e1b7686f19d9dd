"""Every native entry that enqueues a kernel is called by a group of the sanitizer's cases."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.backend_api import Recording
from tests.backends.cuda import cuda_cases, test_training
from tests.backends.cuda.sanitize import __main__ as command
from tests.backends.cuda.sanitize import groups, training
from tests.backends.cuda.sanitize.groups import (
    BINDINGS,
    GROUPS,
    ON_HOST,
    TOOLS,
    Group,
    counted,
    entries,
    entries_in,
    table,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cuda.md"
COVERED = {entry for group in GROUPS.values() for entry in group.entries}
BINDING = """
void register_toy(py::module_& module) {
  py::enum_<Kind>(module, "Kind").value("a", Kind::kA);
  py::class_<ToyDesc, std::shared_ptr<ToyDesc>>(module, "Toy")
      .def(py::init<int, std::vector<int>>())
      .def_property_readonly("size", &ToyDesc::size)
      .def("__call__", recorded<&toy>)
      .def("backward",
           [](const ToyDesc& toy, int at) { return toy.at(at); });
  module.def("toy_pair", recorded<&toy_pair>);
  py::class_<Other>(module, "Other").def("run", &other);
}
"""


def library() -> types.SimpleNamespace:
    """What has the entries of the native library; each returns its arguments."""
    found = types.SimpleNamespace()
    for entry in entries():
        owner, _, method = entry.rpartition(".")
        if owner and not hasattr(found, owner):
            setattr(found, owner, type(owner, (), {}))
        function = (lambda self, *given: given) if owner else (lambda *given: given)
        setattr(getattr(found, owner) if owner else found, method, function)
    return found


def test_entries_are_read_from_the_bindings() -> None:
    assert entries_in(BINDING) == {"Toy.__call__", "Toy.backward", "toy_pair", "Other.run"}


def test_every_definition_of_the_bindings_is_read() -> None:
    for file in BINDINGS.glob("*.cpp"):
        text = file.read_text("utf-8")
        definitions = text.count(".def(") - text.count(".def(py::init")
        assert len(entries_in(text)) == definitions, file.name


def test_every_entry_is_in_a_group_or_enqueues_nothing() -> None:
    assert entries() - COVERED - ON_HOST == set(), (
        "give them a group of cases in sanitize/groups.py"
    )
    assert (COVERED | ON_HOST) - entries() == set(), "no such entries"
    assert set() == COVERED & ON_HOST


def test_every_group_runs_under_a_tool_and_says_why_not_under_others() -> None:
    for name, group in GROUPS.items():
        assert group.left_out.keys() < TOOLS.keys(), name
        assert all(group.left_out.values()), name


def test_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text("utf-8"), (
        "paste what `python -m tests.backends.cuda.sanitize --table` prints into docs/cuda.md"
    )


def test_calls_of_entries_are_counted() -> None:
    native = library()
    calls = counted(native)
    assert native.arrange_scales(1, 2) == (1, 2)
    quantize = native.Quantize()
    assert quantize(3) == (3,)
    assert quantize.and_sum() == ()
    assert calls == {"arrange_scales": 1, "Quantize.__call__": 1, "Quantize.and_sum": 1}


class Recorder:
    """Runs again what it recorded."""

    problem = None

    def __init__(self, index: int | None, library: object) -> None:
        self.index = index

    def record(
        self, run: Callable[..., Any], leading: Any, saved: Any, constants: Any
    ) -> Recording:
        return Recording(run(), lambda tensors, saved=None: run(*tensors))


CASES = ("cross_entropy", "permutation", "router", "steps", "attention", "replays")


@pytest.mark.parametrize("name", CASES)
def test_cases_are_calls_that_the_reference_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (training, test_training):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
        monkeypatch.setattr(module, "backend", lambda name: cuda_cases.backend("reference"))
    monkeypatch.setattr(training, "Recorder", Recorder)
    monkeypatch.setattr(training.native, "load", lambda: None)
    GROUPS[name].run()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The native library's stand-in, where waiting for the device does nothing."""
    native = library()
    monkeypatch.setattr(command.native, "load", lambda: native)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return native


def test_group_that_calls_no_entry_of_its_own_is_an_error(
    toy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8CORE_CACHE_DIR", "")
    scales = Group(lambda: toy.arrange_scales(), ("arrange_scales",))
    monkeypatch.setitem(groups.GROUPS, "scales", scales)
    monkeypatch.setitem(groups.GROUPS, "norms", Group(lambda: None, ("Norm.backward",)))
    with pytest.raises(RuntimeError, match=r"norms called no Norm\.backward"):
        command.run_cases(["scales", "norms"])
    assert capsys.readouterr().out == "scales ran\n"


@pytest.mark.parametrize(
    ("status", "text", "is_right"),
    [
        (0, "norms ran\ngemm ran\nERROR SUMMARY: 0 errors", True),
        (9, "norms ran\ngemm ran\nERROR SUMMARY: 1 errors", False),
        (0, "norms ran\nERROR SUMMARY: 0 errors", False),
    ],
)
def test_tool_that_found_an_error_or_ran_less_has_failed(
    status: int, text: str, is_right: bool
) -> None:
    assert command.judge("memcheck", status, ["norms", "gemm"], text) is is_right


class Process:
    """A tool that runs until it is terminated, which the user asks for while it is waited for."""

    def __init__(self) -> None:
        self.is_terminated = False

    def terminate(self) -> None:
        self.is_terminated = True

    def wait(self) -> int:
        if not self.is_terminated:
            raise KeyboardInterrupt
        return -15


def test_interrupted_tools_say_what_they_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(sanitizer: str, tool: str, names: list[str], path: Path) -> Process:
        path.write_text("norms ran\n")
        return Process()

    monkeypatch.setattr(command, "start", start)
    monkeypatch.setattr(command.native, "load", lambda: None)
    monkeypatch.setattr(command.shutil, "which", lambda *given, **named: "compute-sanitizer")
    options = ["--groups", "norms", "rotary", "--logs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["sanitize", *options])
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert [f"{tool}: status -15, norms ran;" in printed for tool in TOOLS] == [True] * len(TOOLS)
