"""No library and no compiler: torch's own kernels multiply, which is said; the rest is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs_accelerator("cuda")

PROGRAM = """
import json, logging, sys
import torch, fp8core
from fp8core import recipe

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines, report = [], {}
logging.getLogger("fp8core").addHandler(Lines())
logging.getLogger("fp8core").propagate = False

def train(name):
    torch.manual_seed(0)
    layer = fp8core.Linear(128, 64, params_dtype=torch.bfloat16, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0)
    x = torch.randn(256, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    wanted = x.detach() @ torch.randn(128, 64, dtype=torch.bfloat16, device="cuda") * 0.1
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layer(x)
        loss = (y.float() - wanted.float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert x.grad.isfinite().all()
    return losses, layer

for name in sys.argv[1:]:
    lines.clear()
    try:
        losses, layer = train(name)
        said = str(fp8core.explain(layer, recipe.by_name(name)))
        report[name] = {"losses": losses, "lines": list(lines), "explained": said}
    except fp8core.UnsupportedError as error:
        report[name] = {"refused": str(error)}
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a process without a library and without the right to build one reports."""
    cache: Path = tmp_path_factory.mktemp("empty")
    environment = {**os.environ, "FP8CORE_BUILD": "0", "FP8CORE_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROGRAM, "delayed", "current", "block", "rowwise"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(cache.iterdir())
    made: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return made


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_tensorwise_recipes_train(name: str, report: dict[str, dict[str, Any]]) -> None:
    losses = report[name]["losses"]
    assert losses[-1] < 0.2 * losses[0], losses


def test_what_computes_instead_is_logged_once(report: dict[str, dict[str, Any]]) -> None:
    lines = report["delayed"]["lines"]
    instead = [line for line in lines if "runs on reference" in line]
    assert any(line.startswith("quantize on cuda:0 runs on reference") for line in instead), lines
    assert len(instead) == len(set(instead))


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_explain_names_torch_s_kernel(name: str, report: dict[str, dict[str, Any]]) -> None:
    assert "torch._scaled_mm" in report[name]["explained"]
    assert "FP8CORE_BUILD=0 forbids building it" in report[name]["explained"]


@pytest.mark.parametrize("name", ["block", "rowwise"])
def test_other_recipes_are_refused_with_the_reason(
    name: str, report: dict[str, dict[str, Any]]
) -> None:
    refused = report[name]["refused"]
    assert "other recipes need the native library" in refused
    assert "FP8CORE_BUILD=0 forbids building it" in refused
