"""Tallies as rows: one line for each operand of each linear in each observed step."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from fp8core.errors import OperandError
from fp8core.inspection.monitoring.record import (
    CastKey,
    GemmCount,
    GemmKey,
    StepRecord,
    Tally,
)
from fp8core.reporting import columns


def over_ranks(record: StepRecord, group: dist.ProcessGroup | None) -> StepRecord:
    """Return the combined record of all ranks, as :meth:`Monitor.rows_over_ranks` describes."""
    records: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(records, record, group)
    keys = record.tallies.keys(), record.gemms.keys()
    if any((of_rank.tallies.keys(), of_rank.gemms.keys()) != keys for of_rank in records):
        counts = [len(of_rank.tallies) for of_rank in records]
        raise OperandError(
            f"the ranks observed different operands, {counts} of them by rank. Reduce over the "
            f"ranks that run the same layers, and pass their group."
        )
    total = StepRecord(formats=dict(record.formats))
    for of_rank in records:
        for key in sorted(record.tallies):
            total.tallies.setdefault(key, Tally()).add(of_rank.tallies[key])
        for gemm in sorted(record.gemms):
            count = total.gemms.setdefault(gemm, GemmCount(record.gemms[gemm].backend))
            count.quantized += of_rank.gemms[gemm].quantized
            count.high_precision += of_rank.gemms[gemm].high_precision
    return total


_GEMMS = {
    ("input", "rowwise"): "fprop",
    ("weight", "rowwise"): "fprop",
    ("grad_output", "rowwise"): "dgrad",
    ("weight", "columnwise"): "dgrad",
    ("grad_output", "columnwise"): "wgrad",
    ("input", "columnwise"): "wgrad",
}
"""Which GEMM reads an operand."""


@dataclass(frozen=True, slots=True)
class Row:
    """The statistics of one operand in one step, which ``record.py`` defines.

    ``layer`` is the layer's path in the model, with the linear's index if it has several. ``gemm``
    is the GEMM that reads the operand; it ran ``quantized_gemms`` times with quantized operands and
    ``high_precision_gemms`` times without, on ``gemm_backend``. ``backend`` quantized the operand;
    it is empty in high precision. ``format`` is the operand's spec, or the dtype of high precision.
    ``casts`` counts tensors: one a microbatch, or one a group. Shares are fractions, ratios are in
    dB; NaN stands for statistics that are not defined, such as scales in high precision.
    """

    step: int
    layer: str
    role: str
    orientation: str
    format: str
    backend: str
    casts: int
    elements: int
    nan: int
    inf: int
    amax: float
    underflow_share: float
    saturation_share: float
    sqnr_db: float
    worst_row_sqnr_db: float
    scale_min: float
    scale_median: float
    scale_max: float
    scale_log2_std: float
    blocks: int
    zero_block_share: float
    gemm: str
    gemm_backend: str
    quantized_gemms: int
    high_precision_gemms: int

    @property
    def key(self) -> CastKey:
        """Layer, role and orientation of the operand."""
        return CastKey(self.layer, self.role, self.orientation)


STATISTICS = tuple(field.name for field in dataclasses.fields(Row) if field.type == "float")
"""The names of the statistics that are floating-point numbers, which TensorBoard plots."""


def rows_of(step: int, record: StepRecord) -> list[Row]:
    """Return the rows of a step's record, in the order of each operand's first cast."""
    rows = []
    for key, tally in record.tallies.items():
        gemm = _GEMMS[key.role, key.orientation]
        count = record.gemms.get(GemmKey(key.layer, gemm), GemmCount(""))
        format, backend = record.formats[key]
        least, median, largest, deviation = tally.scale_spread()
        rows.append(
            Row(
                step,
                *key,
                format=format,
                backend=backend,
                casts=tally.casts,
                elements=tally.elements,
                nan=tally.nan,
                inf=tally.inf,
                amax=tally.amax,
                underflow_share=tally.share(tally.underflow),
                saturation_share=tally.share(tally.saturated),
                sqnr_db=tally.sqnr_db,
                worst_row_sqnr_db=tally.worst_row,
                scale_min=least,
                scale_median=median,
                scale_max=largest,
                scale_log2_std=deviation,
                blocks=tally.blocks,
                zero_block_share=tally.zero_block_share,
                gemm=gemm,
                gemm_backend=count.backend,
                quantized_gemms=count.quantized,
                high_precision_gemms=count.high_precision,
            )
        )
    return rows


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "layer": lambda row: row.layer,
    "tensor": lambda row: f"{row.role} {row.orientation}",
    "format": lambda row: row.format,
    "backend": lambda row: row.backend or row.gemm_backend,
    "amax": lambda row: _number(row.amax),
    "scale": lambda row: _number(row.scale_median),
    "log2 std": lambda row: _number(row.scale_log2_std),
    "underflow": lambda row: _percent(row.underflow_share),
    "saturated": lambda row: _percent(row.saturation_share),
    "SQNR dB": lambda row: _number(row.sqnr_db),
    "worst row": lambda row: _number(row.worst_row_sqnr_db),
    "zero blocks": lambda row: _percent(row.zero_block_share),
    "NaN/inf": lambda row: str(row.nan + row.inf),
    "GEMMs": lambda row: f"{row.gemm} {row.quantized_gemms}+{row.high_precision_gemms}",
}


def table_of(
    rows: Sequence[Row], leave_out: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the lines of a table of ``rows``."""
    columns = {name: text for name, text in _COLUMNS.items() if name not in leave_out}
    return list(columns), [[text(row) for text in columns.values()] for row in rows]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.3g} %"


def render(title: str, heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as text: by rich if it is installed, else in plain columns."""
    if find_spec("rich") is None:
        return "\n".join([title, *columns([heading, *lines])])
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for name in heading:
        table.add_column(name)
    for line in lines:  # as Text, since rich would read the "[0]" of "mlp[0]" as markup
        table.add_row(*map(Text, line))
    widths = [max(map(len, column)) for column in zip(heading, *lines, strict=True)]
    console = Console(file=io.StringIO(), width=sum(widths) + 3 * len(widths) + 1)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")
