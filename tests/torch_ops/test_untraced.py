"""Functions that torch.compile does not look into."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fp8core.torch_ops.capture import untraced


def test_it_passes_arguments_results_and_the_name() -> None:
    @untraced
    def divide(x: int, *, by: int) -> float:
        return x / by

    assert divide(1, by=2) == 0.5
    assert divide.__name__ == "divide"


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of torch, by Dynamo
def test_it_runs_in_each_call_of_what_was_compiled_and_outside_of_the_capture() -> None:
    seen: list[tuple[float, bool]] = []

    @untraced
    def see(x: torch.Tensor) -> torch.Tensor:
        seen.append((float(x.sum()), torch.compiler.is_compiling()))
        return x + 1

    def step(x: torch.Tensor) -> torch.Tensor:
        return see(x * 2) * 3

    compiled = torch.compile(step, backend="eager")
    for value in (1.0, 2.0):
        assert compiled(torch.full((2,), value)).tolist() == [6 * value + 3] * 2
    assert seen == [(4.0, False), (8.0, False)]


def test_importing_fp8core_does_not_import_the_compiler() -> None:
    code = "import sys, fp8core; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
