"""The benchmark of the host's time of a collective runs, and counts what a step calls."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.ranks import ROOT


def test_the_collectives_of_a_step_are_counted() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.host_of_collectives", "--rounds", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    us = json.loads(done.stdout)["us"]
    # Two sums, the input gathered twice, the gradient once, and two maxima; with blocks the
    # gradient is gathered in both orientations, and scales travel beside codes.
    counts = {name: of["collectives"] for name, of in us.items()}
    assert counts == {"delayed": 5 + 2, "current": 5 + 2, "block": 6 + 4}
    assert all(of["parallel"] > of["c10d"] > 0 for of in us.values())
