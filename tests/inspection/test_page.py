"""docs/monitoring.md: its example runs as written, and its table lists the fields of a row."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from fp8core.monitoring import Row
from tests import device

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")


def test_example_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "monitoring.py").write_text(code, encoding="utf-8")
    options = ("-W", "error")
    printed = device.run_program(tmp_path / "monitoring.py", options=options, folder=tmp_path)
    assert "step 2" in printed


def test_page_defines_every_statistic_of_a_row() -> None:
    told = {"step", "layer", "role", "orientation", "format", "backend", "gemm", "gemm_backend"}
    told |= {"blocks"}  # the denominator of zero_block_share
    fields = {field.name for field in dataclasses.fields(Row)} - told
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, flags=re.MULTILINE)
    assert fields <= {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
