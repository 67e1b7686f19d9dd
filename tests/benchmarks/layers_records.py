"""Jobs and records of the benchmark of layers, written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks.layers_gpu.cases import Case, Job
from tests.benchmarks.measuring import records

CASE = Case("mlp_swiglu", "8B")
TURNS = 12


def job_of(
    case: Case,
    recipes: tuple[str, ...],
    measures: tuple[str, ...],
    libraries: tuple[str, ...],
    out: Path | str,
    **fields: Any,
) -> Job:
    return Job(
        **case._asdict(),
        recipes=recipes,
        measures=measures,
        libraries=libraries,
        out=str(out),
        **fields,
    )


def turn_record(measure: str, case: Case = CASE, **us: float | list[float]) -> records.Record:
    """A record of 12 turns; underscores in names are spaces, a number is the time of every turn."""
    times = {
        name.replace("_", " "): [value] * TURNS if isinstance(value, float) else value
        for name, value in us.items()
    }
    return {"layer": case[0], "size": case[1], "measure": measure, "us": times}
