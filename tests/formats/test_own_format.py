"""Formats of 6 bits, which the plug-in of docs/custom-recipes.md registers, and no file of the core
names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8core.backend_api import OperandSpec
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.errors import RecipeError
from fp8core.formats import FormatSpec, minifloat
from tests import forked

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "custom-recipes.md").read_text(encoding="utf-8")
(PLUGIN,) = re.findall(
    r"```python\n(from fp8core.backend_api import hookimpl\n.*?)```", PAGE, re.DOTALL
)
SPECS = {
    "e3m2": (minifloat("e3m2", 3, 2, specials="finite"), ml_dtypes.float6_e3m2fn),
    "e2m3": (minifloat("e2m3", 2, 3, specials="finite"), ml_dtypes.float6_e2m3fn),
}
TRAINING = """
import torch, fp8core
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
fp8core.convert(model, "mxfp6")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 32)
for step in range(30):
    loss = (model(x) - x.roll(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (0, 29):
        print(loss.item())
"""


@pytest.mark.parametrize("name", SPECS)
def test_values_and_roundings_are_those_of_ml_dtypes(name: str) -> None:
    spec, judge = SPECS[name]
    codes = torch.arange(64, dtype=torch.uint8, device="cpu")
    values = spec.decode(codes)
    theirs = np.arange(64, dtype=np.uint8).view(judge).astype(np.float32)
    assert np.array_equal(values.numpy(), theirs)
    assert torch.equal(spec.encode(values), codes)
    midpoints = (values[:-1] + values[1:]) / 2
    near = [
        midpoints,
        midpoints * (1 + 2.0**-20),
        midpoints * (1 - 2.0**-20),
        torch.randn(4096, device="cpu"),
    ]
    x = torch.cat(near).clamp(-spec.max, spec.max)
    rounded = x.numpy().astype(judge).astype(np.float32)
    assert np.array_equal(spec.decode(spec.encode(x)).numpy(), rounded)
    assert spec.decode(
        spec.encode(torch.tensor([1e9, -1e9, torch.inf], device="cpu"))
    ).tolist() == [*(spec.max, -spec.max, spec.max)]


def test_a_code_of_6_bits_has_a_byte() -> None:
    stored = [codes_per_byte(OperandSpec(name, (0, 0), 6.0)) for name in ("e2m1", "e4m3")]
    assert [stored, 8 // SPECS["e3m2"][0].bits] == [[2, 1], 1]
    assert torch.isnan(
        SPECS["e3m2"][0].decode(torch.tensor([64, 255], dtype=torch.uint8, device="cpu"))
    ).all()


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(RecipeError, match="bits=5 and 32 values; bits are 4, 6 or 8"):
        FormatSpec("e2m2", 5, tuple(map(float, range(32))), "even", None)


def test_the_plugin_of_the_page_is_ten_lines_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([line for line in PLUGIN.splitlines() if line.strip()]) == 10
    (tmp_path / "mxfp6.py").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FP8CORE_PLUGINS", "mxfp6")
    done = forked.run([sys.executable, "-c", TRAINING])
    assert done.returncode == 0, done.stderr
    first, last = map(float, done.stdout.split())
    assert last < first / 4
    assert "MXFP8BlockScaling on reference" in done.stderr


def test_no_file_of_the_core_names_them() -> None:
    named = re.compile(r"\b(e3m2|e2m3|mxfp6)\b", re.IGNORECASE)
    sources = [
        path for top in ("fp8core", "backends", "csrc") for path in (ROOT / top).rglob("*.*")
    ]
    texts = {
        p: p.read_text("utf-8") for p in sources if p.suffix in (".py", ".h", ".cpp", ".cuh", ".cu")
    }
    assert texts
    assert [path for path, text in texts.items() if named.search(text)] == []
