"""Tables of memory-bound operations, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.benchmarks.layers_gpu.cases import HIGH, RECIPES
from tests.benchmarks.measuring.intervals import Estimate, geometric_mean, median_interval, ratios
from tests.benchmarks.measuring.markdown import head, line
from tests.benchmarks.measuring.records import Record
from tests.benchmarks.pointwise_gpu.contestants import PEERS
from tests.benchmarks.pointwise_gpu.operations import OPERATIONS

__all__ = ["ALL_RECIPES", "COPY", "Row", "markdown", "rows"]

COPY = "copy"
OURS = f"fp8core {HIGH}"
ALL_RECIPES = (*RECIPES, "mxfp8", "nvfp4")
"""Those of the layers, and those whose products this chip has not."""
CAST_RECIPES = tuple(name for name in ALL_RECIPES if name != HIGH)


class Row(NamedTuple):
    """An operation at a shape, of one run.

    ``us`` are medians by contestant, ``share`` the rate of ideal bytes over the copy's rate in the
    same turns, ``peers`` fp8core's time without a recipe over each peer's.
    """

    operation: str
    shape: str
    is_resident: bool
    us: dict[str, float]
    gb_per_s: dict[str, float]
    share: dict[str, Estimate]
    peers: dict[str, Estimate]
    refused: dict[str, str]

    @property
    def best(self) -> tuple[str, Estimate] | None:
        """The peer that leaves fp8core the greatest ratio, and that ratio."""
        return max(self.peers.items(), key=lambda pair: pair[1].median) if self.peers else None


def rows(records: Sequence[Record]) -> Iterator[Row]:
    """Yield a row for each operation and shape, of the last run that measured it, in order."""
    last = {
        (one["operation"], one["shape"]): one for one in records if one["measure"] == "pointwise"
    }
    names = list(OPERATIONS)
    for key in sorted(last, key=lambda key: (names.index(key[0]), _size(key[1]))):
        yield _row(last[key])


def _size(shape: str) -> tuple[int, int]:
    row, column = map(int, shape.split("x"))
    return column, row


def _row(record: Record) -> Row:
    us, ideal = record["us"], record["bytes"]
    medians = {name: statistics.median(times) for name, times in us.items()}
    copy = us[COPY]
    shares, peers = {}, {}
    for name, times in us.items():
        relative = ideal[name] / ideal[COPY]
        shares[name] = median_interval([relative * one for one in ratios(copy, times)])
    for peer in PEERS:
        if OURS in us and peer in us:
            peers[peer] = median_interval(ratios(us[OURS], us[peer]))
    return Row(
        record["operation"],
        record["shape"],
        record["is_resident"],
        medians,
        {name: ideal[name] / time / 1e3 for name, time in medians.items()},
        shares,
        peers,
        record["refused"],
    )


def bars_table(found: Sequence[Row]) -> str:
    """Return what the shapes beyond the cache are held against, and the worst of them."""
    large = [row for row in found if not row.is_resident]
    peers = {_key(row): row.best[1] for row in large if row.best is not None}
    plain = {_key(row): row.share[OURS] for row in large if OURS in row.share}
    casts = {
        f"{_key(row)} {recipe}": row.share[f"fp8core {recipe}"]
        for row in large
        for recipe in CAST_RECIPES
        if f"fp8core {recipe}" in row.share
    }
    lines = head(("bar", "limit", "kept", "worst", "its value", "geometric mean"))
    for name, values, limit, is_most in (
        ("bf16: time / best peer", peers, 1.0, True),
        ("goal: bf16: time / best peer", peers, 0.95, True),
        ("goal: bf16: rate / copy", plain, 0.9, False),
        ("with a cast: rate / copy", casts, 0.8, False),
        ("goal: with a cast: rate / copy", casts, 0.85, False),
    ):
        if not values:
            lines.append(line((name, f"{limit:.2f}", "not run", "", "", "")))
            continue
        kept = sum(one.low <= limit if is_most else one.high >= limit for one in values.values())
        medians = {key: one.median for key, one in values.items()}
        worst = (max if is_most else min)(medians, key=medians.__getitem__)
        mean = geometric_mean(list(medians.values()))
        texts = (f"{kept} of {len(values)}", worst, f"{medians[worst]:.3f}", f"{mean:.3f}")
        lines.append(line((name, f"{limit:.2f}", *texts)))
    return "\n".join(lines)


def _key(row: Row) -> str:
    return f"{row.operation} {row.shape}"


def plain_table(found: Sequence[Row]) -> str:
    """Return operations in bfloat16 against the peers; an interval above 1 is bold."""
    columns = ("fp8core us", "GB/s", "of copy", *(f"{peer} us" for peer in PEERS))
    lines = head(("operation", "shape", *columns, "over the best peer"))
    for row in found:
        if not {OURS, *PEERS} & row.us.keys():
            continue
        own = [f"{row.us[OURS]:.1f}", f"{row.gb_per_s[OURS]:.0f}"] if OURS in row.us else ["", ""]
        own.append(_share(row, OURS))
        others = [f"{row.us[peer]:.1f}" if peer in row.us else "" for peer in PEERS]
        lines.append(line((row.operation, _shape(row), *own, *others, _best(row))))
    return "\n".join(lines)


def cast_table(found: Sequence[Row]) -> str:
    """Return operations that cast, or undo a cast: microseconds and the share of copy."""
    lines = head(("operation", "shape", *CAST_RECIPES))
    for row in found:
        names = [f"fp8core {recipe}" for recipe in CAST_RECIPES]
        if not set(names) & row.us.keys():
            continue
        texts = [
            f"{row.us[name]:.1f} {_share(row, name)}" if name in row.us else "" for name in names
        ]
        lines.append(line((row.operation, _shape(row), *texts)))
    return "\n".join(lines)


def refused_table(found: Sequence[Row]) -> str:
    """Return what does not run, and why, once for all shapes that share the reason."""
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for row in found:
        for name, reason in row.refused.items():
            shapes.setdefault((row.operation, name, reason), []).append(row.shape)
    lines = head(("operation", "contestant", "does not run", "shapes"))
    lines += [line((*key, ", ".join(own))) for key, own in shapes.items()]
    return "\n".join(lines)


def _shape(row: Row) -> str:
    return f"{row.shape} in L2" if row.is_resident else row.shape


def _share(row: Row, name: str) -> str:
    if name not in row.share:
        return ""
    return row.share[name].text(2)


def _best(row: Row) -> str:
    if row.best is None:
        return ""
    peer, ratio = row.best
    text = f"{ratio.text()} {peer}"
    return f"**{text}**" if ratio.low > 1 else text


def markdown(records: Sequence[Record]) -> str:
    """Return all tables."""
    found = list(rows(records))
    return "\n\n".join(
        table(found) for table in (bars_table, plain_table, cast_table, refused_table)
    )
