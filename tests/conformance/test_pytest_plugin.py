"""``pytest --fp8core-backend=NAME``: what it loads, runs and refuses, and expected failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8core.conformance.collection import Expected, complaints, matching, read_expected
from fp8core.errors import OperandError
from tests import forked

LOADED = """
import sys
import pytest
status = pytest.main(["-q", "-c", "pytest.ini", "."])
print(status, [name for name in ("fp8core_pytest", "fp8core", "torch") if name in sys.modules])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of somebody else's, whose own configuration names a test that fails."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = own\nfilterwarnings = error\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "test_own.py").write_text("def test_own(): assert False\n")
    (tmp_path / "test_good.py").write_text("def test_good(): pass\n")
    return tmp_path


# In place of each check: what torch does in a law's thread on CUDA, with the threads of the check.
SEEN = """
import warnings
import torch
from fp8core.conformance.checks import Check

torch.set_num_threads(3)

def run(check):
    warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context! Attempting ...")
    print(f"threads: {torch.get_num_threads()}")

Check.run = run

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"threads afterwards: {torch.get_num_threads()}")
"""


def clean() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("FP8CORE_")}


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return forked.run(command, cwd=folder, env=clean())


def test_plugin_imports_neither_torch_nor_fp8core_until_its_option_is_used(project: Path) -> None:
    (project / "own" / "test_own.py").unlink()
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=project,
        env=clean(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "0 ['fp8core_pytest']", done.stdout + done.stderr


def test_option_alone_runs_the_kit_alone(project: Path) -> None:
    done = pytest_in(project, "--fp8core-backend=reference", "-k", "law7_something or test_own")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert "fp8core conformance: reference on cpu" in done.stdout


def test_paths_are_run_besides_the_kit_whose_checks_have_one_thread(project: Path) -> None:
    (project / "conftest.py").write_text(SEEN)
    words = ("-s", "--fp8core-backend=reference", "-k", "law7_something or good")
    done = pytest_in(project, *words, "test_good.py")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert "threads: 1\n" in done.stdout
    assert "threads afterwards: 3\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fp8core-backend=referense"], "Did you mean 'reference'?"),
        (["--fp8core-strict", "--fp8core-device=cpu"], "Give --fp8core-backend=NAME."),
    ],
    ids=["unknown backend", "no backend"],
)
def test_wrong_use_is_a_usage_error(arguments: list[str], message: str, project: Path) -> None:
    done = pytest_in(project, *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr


TEXT = """
# a comment alone
law4_gemm_adds_the_bias/*  # the kernel has no epilogue

law1_*/mxfp8.input.[x]  #
law9_nothing/*  # never
"""


@pytest.fixture
def expected(tmp_path: Path) -> list[Expected]:
    path = tmp_path / "expected.txt"
    path.write_text(TEXT, encoding="utf-8")
    return read_expected(path)


def test_lines_are_patterns_and_reasons(expected: list[Expected]) -> None:
    assert [(one.pattern, one.reason, one.line) for one in expected] == [
        ("law4_gemm_adds_the_bias/*", "the kernel has no epilogue", 3),
        ("law1_*/mxfp8.input.[x]", "", 5),
        ("law9_nothing/*", "never", 6),
    ]


def test_star_matches_anything_and_the_rest_itself(expected: list[Expected]) -> None:
    assert matching(expected, "law4_gemm_adds_the_bias/plain.fprop.float32") is expected[0]
    assert matching(expected, "law1_codes/mxfp8.input.[x]") is expected[1]
    assert matching(expected, "law1_codes/mxfp8.input.x") is None
    assert matching(expected, "law4_gemm_adds_the_biass/plain") is None


def test_line_without_a_reason_and_line_without_a_match_are_complaints(
    expected: list[Expected],
) -> None:
    found = complaints(expected, ["law4_gemm_adds_the_bias/a", "law1_codes/mxfp8.input.[x]"])
    assert found == [
        "line 5: 'law1_*/mxfp8.input.[x]' gives no reason, after a '#'",
        "line 6: 'law9_nothing/*' matches no check",
    ]


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OperandError, match=r"expected failures.*nowhere\.txt"):
        read_expected(tmp_path / "nowhere.txt")
