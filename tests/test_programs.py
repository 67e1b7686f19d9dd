"""Programs as users write them run to their ends: each asserts what its user wants to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import device

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
FRAMEWORKS = {
    "accelerated": "accelerate",
    "export": "onnxruntime",
    "load_checkpoint": "safetensors",
    "lora": "peft",
    "monitored": "matplotlib",
}
"""What a program imports beside torch; it runs with the warnings of that."""
MOST_LINES = 40


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_sees_what_it_expects(program: Path, tmp_path: Path) -> None:
    framework = FRAMEWORKS.get(program.stem)
    if framework:
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    options = () if framework else ("-W", "error")
    device.run_program(program, options=options, folder=tmp_path)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_short(program: Path) -> None:
    assert len(program.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
