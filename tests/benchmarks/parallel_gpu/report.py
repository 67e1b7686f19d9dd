"""Tables of what was measured over several ranks, and the bars that they are held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from tests.benchmarks.measuring.intervals import median_interval, ratios
from tests.benchmarks.measuring.markdown import head, line
from tests.benchmarks.measuring.records import Record
from tests.benchmarks.parallel_gpu.cases import KINDS, RECIPES, SIZES
from tests.benchmarks.parallel_gpu.contestants import ALONE, COLLECTIVES

__all__ = ["tables"]

COLUMNS = ("layer", "contestant", "eager us", "over te", "over torchao", "over bf16")
MORE = ("exposed us", "of the collectives", "peak MiB", "peak over bf16", "collectives", "MB sent")


def tables(found: Sequence[Record]) -> str:
    """Return the tables of all kinds and sizes as Markdown."""
    lines = [*head((*COLUMNS, *MORE, "host us"))]
    for kind in KINDS:
        for size in SIZES:
            own = [one for one in found if (one["kind"], one["size"]) == (kind, size)]
            lines += [line(row) for row in _rows(f"{kind} {size}", own)]
    return "\n".join(lines)


def _rows(title: str, own: Sequence[Record]) -> Iterator[list[str]]:
    times = {m: _last(own, m) for m in ("eager", "host")}
    figures = {one["contestant"]: one for one in own if one["measure"] == "figures"}
    eager = times["eager"]
    for name in eager:
        values, figure = eager[name], figures.get(name, {})
        library, *rest = name.split()
        recipe = rest[0] if rest and rest[0] in RECIPES else ""
        high = next((n for n in ("torch bf16", "fp8core bf16", "te bf16") if n in eager), "")
        exposed = _difference(values, eager.get(f"{name} {ALONE}"))
        wire = eager.get(COLLECTIVES)
        yield [
            title,
            name,
            f"{median(values):.1f}",
            _ratio(values, eager.get(f"te {recipe}") if library == "fp8core" else None),
            _ratio(values, eager.get("torchao tensorwise") if library == "fp8core" else None),
            _ratio(values, eager.get(high) if name != high else None),
            "" if exposed is None else f"{exposed:.1f}",
            "" if exposed is None or wire is None else f"{exposed / median(wire):.2f}",
            f"{figure['peak_mib']:.0f}" if figure else "",
            _peak_over(figures, name, high),
            str(figure.get("collectives") or ""),
            f"{figure['bytes_sent'] / 1e6:.2f}" if figure.get("bytes_sent") else "",
            f"{median(times['host'][name]):.1f}" if name in times["host"] else "",
        ]


def _last(own: Sequence[Record], measure: str) -> dict[str, list[float]]:
    found = [one["us"] for one in own if one["measure"] == measure]
    return dict(found[-1]) if found else {}


def _ratio(values: Sequence[float], others: Sequence[float] | None) -> str:
    if others is None or not values:
        return ""
    return median_interval(ratios(values, others)).text(to=" to ")


def _difference(values: Sequence[float], others: Sequence[float] | None) -> float | None:
    if others is None:
        return None
    return median(value - other for value, other in zip(values, others, strict=True))


def _peak_over(figures: dict[str, Record], name: str, high: str) -> str:
    if name == high or name not in figures or high not in figures:
        return ""
    base = figures[high]["peak_mib"]
    return f"{figures[name]['peak_mib'] / base:.3f}" if base else ""
