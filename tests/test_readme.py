"""The README's Python runs as written, and its two commands are what CI and a newcomer run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8core.dispatch.settings import VARIABLES

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_readme_has_python_examples() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_example_runs_in_a_fresh_interpreter(code: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("marker", ["demo-command", "test-command"])
def test_readme_marks_each_command_once(marker: str) -> None:
    assert len(re.findall(rf"<!-- {marker} -->\n```sh\n[^\n]+\n```", README)) == 1


def test_environment_page_lists_every_variable_with_its_meaning() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "environment.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(FP8CORE_\w+)` \| (.+) \|$", page, flags=re.MULTILINE))
    assert rows == dict(VARIABLES)
