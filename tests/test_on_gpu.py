"""``python -m tests --gpu`` chooses parts, limits their time, and makes rows of what they did."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import on_gpu
from tests.on_gpu import PARTS, ROOT, Outcome, Part, counted, main, run

TOY = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null")
LIMIT_S = 1.0
JUNIT = """<testsuites><testsuite name="pytest" tests="6" failures="1" errors="1" skipped="3">
<testcase name="a" time="0.1"/>
<testcase classname="tests.a" name="b"><failure message="assert 1 == 2">text</failure></testcase>
<testcase classname="tests.a" name="c"><error message="of a fixture">text</error></testcase>
<testcase name="d"><skipped type="pytest.skip" message="needs 2 GPUs">d.py:1</skipped></testcase>
<testcase name="e"><skipped type="pytest.skip" message="needs 2 GPUs">e.py:1</skipped></testcase>
<testcase name="f"><skipped type="pytest.skip" message="MX | NV">f.py:1</skipped></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has what the parts need, where the backend is compiled and two parts run."""
    monkeypatch.setattr(on_gpu, "why_not_here", lambda: None)
    monkeypatch.setattr(on_gpu.torch.cuda, "get_device_name", lambda: "Toy GPU")
    monkeypatch.setattr(on_gpu, "BUILD", ("-c", ""))
    sound, broken = Part("", ("-c", "")), Part("", ("-c", "print('why'); raise SystemExit(3)"))
    monkeypatch.setattr(on_gpu, "PARTS", {"doctor": sound, "kit": broken})


def test_unknown_part_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["doctors"])
    assert e.value.code == 2
    assert f"no part 'doctors'; the parts are {', '.join(PARTS)}" in capsys.readouterr().err


def test_machine_without_a_gpu_is_told_what_would_work() -> None:
    command = [sys.executable, "-m", "tests", "--gpu", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "finds no CUDA device" in done.stderr
    assert "`python -m tests` runs every check that needs no GPU" in done.stderr


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(on_gpu, "_is_installed", lambda module: module != "xdist")
    assert str(on_gpu.why_not_here()).startswith("xdist not installed")


@pytest.mark.parametrize(
    ("chosen", "status", "rows"),
    [
        (["doctor"], 0, ["| doctor | 1 | 0 | 0 |"]),
        (["kit"], 1, ["| kit | 0 | ended with status 3 | 0 |"]),
        ([], 1, ["| doctor | 1 |", "| kit | 0 |"]),
    ],
)
def test_chosen_parts_run_and_decide_the_status(
    chosen: list[str],
    status: int,
    rows: list[str],
    with_a_gpu: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*chosen, "--logs", str(tmp_path)]) == status
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert all(line.startswith(row) for line, row in zip(printed[1:], rows, strict=True))
    assert all("| Toy GPU, torch " in line for line in printed[1:])


def test_part_that_failed_shows_what_it_said(
    with_a_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["kit", "--logs", str(tmp_path)])
    assert "why\n\nkit: FAILED" in capsys.readouterr().out


@pytest.fixture
def reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: when a process has written it, the process's limit of time is over."""
    file = tmp_path / "reached"

    class Process(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            while timeout == LIMIT_S and self.poll() is None:
                if file.exists():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.02)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    return file


def test_part_and_what_it_started_end_at_the_limit(tmp_path: Path, reached: Path) -> None:
    child = f"import os, pathlib, time; p = pathlib.Path({str(reached)!r})\n"
    child += "q = p.with_name('new'); q.write_text(str(os.getpid())); q.rename(p); time.sleep(600)"
    code = "import subprocess, sys, time\n"
    code += f"subprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)"
    outcome = run(Part("", ("-c", code)), "slow", tmp_path, LIMIT_S)
    assert outcome.ending == "stopped after 1 s"
    assert not outcome.is_success
    assert "| stopped after 1 s |" in outcome.row("slow", "", "")
    end = time.monotonic() + 60
    while is_running(int(reached.read_text())):  # killed, and not yet gone
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(number: int) -> bool:
    """Whether a process runs; one that was killed and that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_tests_that_ran_before_the_limit_are_counted(
    handler: Any, tmp_path: Path, reached: Path
) -> None:
    tests = "import pathlib, time\ndef test_a(): pass\ndef test_b(): assert 0\n"
    tests += f"def test_c(): pathlib.Path({str(reached)!r}).touch(); time.sleep(600)\n"
    (tmp_path / "test_toy.py").write_text(tests)
    part, before = Part("", (*TOY, str(tmp_path / "test_toy.py"))), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, handler)
    try:
        outcome = run(part, "toy", tmp_path, LIMIT_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.passed, outcome.failed) == (1, 1)
    assert "| 1 | 1, stopped after 1 s | 0 |" in outcome.row("toy", "", "")


def test_files_that_begin_the_suite_are_there(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert [name for name in conftest.LONG if not (ROOT / "tests" / name).is_file()] == []


def test_part_without_time_is_not_run(tmp_path: Path) -> None:
    outcome = run(Part("", ("-c", "raise SystemExit(1)")), "late", tmp_path, 0.0)
    assert outcome.ending == "not run: no time was left"
    assert not list(tmp_path.iterdir())


def test_counts_and_reasons_are_those_of_the_junit_file(tmp_path: Path) -> None:
    (tmp_path / "part.xml").write_text(JUNIT)
    passed, failed, skipped = counted(tmp_path / "part.xml")
    assert (passed, failed, skipped) == (1, 2, {"needs 2 GPUs": 2, "MX | NV": 1})
    row = Outcome(passed, failed, skipped, 12.6).row("layers", "H100", "abc1234")
    assert row == "| layers | 1 | 2 | 2: needs 2 GPUs; 1: MX / NV | 13 s | H100 | abc1234 |"
    assert row.count("|") == on_gpu.HEAD.splitlines()[0].count("|")


def test_row_names_the_reasons_of_most_skips() -> None:
    skipped = {f"reason {number}": 20 - number for number in range(10)}
    row = Outcome(1, 0, skipped, 1.0).row("kit", "", "")
    assert "20: reason 0; " in row
    assert "13: reason 7; 23: 2 other reasons |" in row


def test_failures_are_named_with_what_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part.xml").write_text(JUNIT)
    on_gpu.show("part", tmp_path)
    assert capsys.readouterr().out == "tests.a::b: assert 1 == 2\ntests.a::c: of a fixture\n"
    monkeypatch.setattr(on_gpu, "SHOWN_FAILURES", 1)
    on_gpu.show("part", tmp_path)
    assert capsys.readouterr().out.endswith(f"and 1 more, in {tmp_path / 'part.xml'}\n")


def test_run_of_pytest_is_counted_by_test(tmp_path: Path) -> None:
    tests = "import os, pytest\ndef test_a(): assert os.environ['TEST_DEVICE'] == 'cuda'\n"
    tests += "def test_b(): assert 0\ndef test_c(): pytest.skip('for a reason')\n"
    (tmp_path / "test_toy.py").write_text(tests)
    part = Part("", (*TOY, str(tmp_path / "test_toy.py")), places_tensors=True)
    outcome = run(part, "toy", tmp_path, 120.0)
    assert (outcome.passed, outcome.failed, outcome.ending) == (1, 1, "")
    assert list(outcome.skipped.items()) == [("for a reason", 1)]


@pytest.mark.parametrize(
    ("body", "ending"),
    [("x = 1", "ended with status 5"), ("def test_a(): pytest.skip('x')", "no test passed")],
)
def test_part_of_which_nothing_passed_is_a_failure(body: str, ending: str, tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(f"import pytest\n{body}\n")
    outcome = run(Part("", (*TOY, str(tmp_path))), "none", tmp_path, 120.0)
    assert outcome.ending == ending
    assert not outcome.is_success
