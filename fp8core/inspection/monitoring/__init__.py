"""Statistics of the casts in a model while it trains; :func:`fp8core.monitor` starts them."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed

from fp8core import formats
from fp8core.errors import (
    OperandError,
    RecipeError,
    UnsupportedError,
    checked_choice,
    did_you_mean,
)
from fp8core.inspection.monitoring.observe import LayerWatch
from fp8core.inspection.monitoring.record import (
    EXPONENTS,
    CastKey,
    NonFinite,
    Recorder,
    Saturation,
    StepRecord,
    Tally,
)
from fp8core.inspection.monitoring.rows import (
    STATISTICS,
    Row,
    over_ranks,
    render,
    rows_of,
    table_of,
)
from fp8core.inspection.monitoring.what_if import Summary, WhatIf, replay
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.models import inventory
from fp8core.recipe import Recipe
from fp8core.reporting import some
from fp8core.torch_ops.private import is_compiled

__all__ = ["Monitor", "NonFinite", "Row", "Saturation", "Summary", "WhatIf", "monitor"]
__dir__ = partial(sorted, __all__)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@contextlib.contextmanager
def drawing(path: str | Path, width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """Draw what is put on the axes to a PNG."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "a plot needs matplotlib, which is not installed.\n"
            '  Install with: pip install "fp8core[monitor]"; table() and to_csv() need nothing.'
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure, figure.subplots()
    figure.savefig(path, dpi=120, format="png")


def _count_on(*counted: Axis) -> None:
    """Have the axes show whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    for axis in counted:
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


_MOST_NAMED = 8
"""The lines that a plot names; more would leave a legend taller than the picture."""


def _points(line: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(line), list(line.values())


def _format_range(row: Row) -> tuple[str, int, int] | None:
    """Return the format of a row's operand, and the exponents of the least and of the largest value
    that it holds at the median scale; None in high precision."""
    name = row.format.partition(" ")[0]
    if name not in formats.names() or not row.scale_median > 0:
        return None
    spec = formats.by_name(name)
    values = (min(value for value in spec.values if value > 0), spec.max)
    least, largest = (math.floor(math.log2(value / row.scale_median)) for value in values)
    return name, least, largest


_ON_NONFINITE = ("record", "raise")


class Monitor:
    """Watches the layers of a model until it is closed; :func:`fp8core.monitor` returns it.

    A context manager. ``rows`` holds the rows of every observed step, for the tensors of this
    process alone. Results can be read while it is open, and after.
    """

    def __init__(
        self,
        layers: dict[str, LowPrecisionModule],
        recorder: Recorder,
        every: int,
    ) -> None:
        self.rows: list[Row] = []
        self._every = every
        self._recorder = recorder
        self._layers = layers
        self._watches = {
            path: LayerWatch(recorder, path, len(layer.linear_shapes()))
            for path, layer in layers.items()
        }
        self._latest = StepRecord()
        self._latest_step = 0
        self._is_open = True
        self._observe(True)

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        first = self.first_nonfinite
        bad = "" if first is None else f"; first NaN or inf: {first}"
        return (
            f"<Monitor of {some(list(self._layers))}: {state}, step {self._recorder.step}, "
            f"every={self._every}, {len(self.rows)} rows{bad}>"
        )

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first tensor with NaN or inf, before its cast or as the result of a GEMM."""
        return self._recorder.first_nonfinite

    @property
    def first_saturation(self) -> Saturation | None:
        """The first operand with values clipped to the format's maximum."""
        return self._recorder.first_saturation

    def step(self) -> None:
        """End a step: add its rows, and observe the next step or not, as ``every`` says.

        Call it once for each step of the optimizer. All passes since the call before belong to one
        step: the microbatches of a training step, or the batches of an evaluation. A weight that
        changes within a step is logged as a warning, once, since a call of step() is missing then.

        Raises:
            OperandError: the monitor is closed, or no monitored layer ran in a step that was
                observed; nothing changes then.
        """
        if not self._is_open:
            raise OperandError("step() of a monitor that is closed. Open a new one.")
        seen = self._recorder.current
        if self._recorder.is_on and not (seen.tallies or seen.gemms):
            raise OperandError(
                f"step() ends step {self._recorder.step}, in which none of the {len(self._layers)} "
                f"monitored layers ran. Call it after the forward and backward passes of a step."
            )
        self._file()
        self._recorder.step += 1
        self._observe(self._recorder.step % self._every == 0)

    def close(self) -> None:
        """Stop watching: the layers run as without a monitor. A second call does nothing.

        The rows of an unfinished step are added. Every layer can be monitored again, even if an
        error is raised meanwhile.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._recorder.is_on = False
        with contextlib.ExitStack() as stack:  # runs every callback, the last first
            stack.callback(inventory.release, self._layers.values())
            stack.callback(self._file)
            for layer in self._layers.values():
                stack.callback(LowPrecisionModule.set_watch, layer, None)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def row(
        self, layer: str, role: str, orientation: str = "rowwise", *, step: int | None = None
    ) -> Row:
        """Return the row of one operand, of the latest step that has one if ``step`` is None.

        Raises:
            OperandError: there is none; the message names the observed ones.
        """
        key = CastKey(layer, role, orientation)
        for row in reversed(self.rows):
            if row.key == key and step in (None, row.step):
                return row
        raise self._absent(key, [row.key for row in self.rows if step in (None, row.step)])

    def rows_over_ranks(self, group: torch.distributed.ProcessGroup | None = None) -> list[Row]:
        """Return the rows of the latest step over all ranks of ``group``; None is the default one.

        Counts and energies add up, the amax is the largest, the worst row the least, and scales are
        those of all blocks. Every rank of the group has to call it.

        Raises:
            OperandError: torch.distributed has no process group, or the ranks observed different
                operands.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise OperandError(
                "rows_over_ranks() needs torch.distributed.init_process_group(). The rows of this "
                "process alone are in rows."
            )
        return rows_of(self._latest_step, over_ranks(self._latest, group))

    def gemm_counts(self) -> dict[str, int]:
        """Return how many GEMMs ran in the latest step, ``quantized`` and ``high_precision``."""
        counts = self._latest.gemms.values()
        return {
            "quantized": sum(count.quantized for count in counts),
            "high_precision": sum(count.high_precision for count in counts),
        }

    def table(self, step: int | None = None) -> str:
        """Return the rows of a step, the latest one if None, as a table.

        Raises:
            OperandError: no step, or not that one, was observed.
        """
        steps = list(dict.fromkeys(row.step for row in self.rows))
        if not steps or step not in (None, *steps):
            observed = f"observed steps: {steps}" if steps else "no step was observed yet"
            raise OperandError(
                f"table(step={step!r}): {observed}. step() and close() end a step; with every="
                f"{self._every}, each step that {self._every} divides is observed."
            )
        shown = steps[-1] if step is None else step
        rows = [row for row in self.rows if row.step == shown]
        return render(f"step {shown}", *table_of(rows))

    def to_csv(self, path: str | Path) -> None:
        """Write all rows to ``path`` as CSV, one column for each field of :class:`Row`.

        Every number reads back exactly, NaN is ``nan``.
        """
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in dataclasses.fields(Row)])
            writer.writerows(map(dataclasses.astuple, self.rows))

    def to_tensorboard(self, log_dir: str | Path) -> None:
        """Write the finite statistics of all rows as scalars, ``statistic/layer/role.orientation``:
        TensorBoard shows a group of charts for each statistic.

        Raises:
            UnsupportedError: tensorboard is not installed.
        """
        if find_spec("tensorboard") is None:
            raise UnsupportedError(
                "to_tensorboard() needs tensorboard, which is not installed.\n"
                '  Install with: pip install "fp8core[monitor]"; to_csv() needs nothing.'
            )
        from torch.utils.tensorboard import SummaryWriter

        with contextlib.closing(SummaryWriter(log_dir)) as writer:
            for row in self.rows:
                for name in STATISTICS:
                    value = getattr(row, name)
                    if math.isfinite(value):
                        tag = f"{name}/{row.layer}/{row.role}.{row.orientation}"
                        writer.add_scalar(tag, value, row.step)

    def plot(self, path: str | Path) -> None:
        """Draw a PNG: the least SQNR of each layer's operands over the steps; infinite ones are
        left out. The layers with the least are named, the others grey.

        Raises:
            OperandError: no operand has a finite SQNR; nothing is drawn then.
            UnsupportedError: matplotlib is not installed.
        """
        lines: dict[str, dict[int, float]] = {}
        for row in self.rows:
            if math.isfinite(row.sqnr_db):
                line = lines.setdefault(row.layer, {})
                line[row.step] = min(row.sqnr_db, line.get(row.step, math.inf))
        if not lines:
            reason = "no step was observed yet; step() and close() end one"
            if self.rows:
                reason = f"none of the {len(self.rows)} rows has a finite SQNR"
            raise OperandError(f"plot: nothing to draw: {reason}.")
        ordered = sorted(lines, key=lambda layer: min(lines[layer].values()))
        named, rest = ordered[:_MOST_NAMED], ordered[_MOST_NAMED:]
        with drawing(path, 10, 5) as (figure, axes):
            for at, layer in enumerate(rest):
                label = f"{len(rest)} other layers" if at == 0 else None
                axes.plot(*_points(lines[layer]), color="0.8", linewidth=0.8, label=label)
            for layer in named:
                axes.plot(*_points(lines[layer]), marker="o", markersize=3, label=layer)
            axes.set(title="least SQNR of the layer's operands", xlabel="step", ylabel="dB")
            _count_on(axes.xaxis)
            axes.grid(alpha=0.3)
            handles, labels = axes.get_legend_handles_labels()
            in_order = sorted(
                zip(handles, labels, strict=True), key=lambda pair: pair[1] not in named
            )
            figure.legend(
                *zip(*in_order, strict=True),
                loc="outside right upper",
                frameon=False,
                fontsize="small",
            )

    def plot_exponents(
        self, path: str | Path, layer: str, role: str, orientation: str = "rowwise"
    ) -> None:
        """Draw a PNG: the count of a tensor's values in the latest observed step for each binary
        exponent, ``floor(log2 |x|)``; shaded is the range of its format at the median scale.

        Raises:
            OperandError: the tensor was not cast in that step, or has no values but zeros.
            UnsupportedError: matplotlib is not installed.
        """
        title, tally = self._tally(layer, role, orientation)
        counts: Sequence[int] = [] if tally.exponents is None else tally.exponents.tolist()
        bars = {e: count for e, count in zip(EXPONENTS, counts, strict=False) if count}
        if not bars:
            raise OperandError(f"plot_exponents: {title} has no values but zeros, NaN and inf.")
        span = _format_range(self.row(layer, role, orientation, step=self._latest_step))
        with drawing(path, 8, 4) as (_, axes):
            if span is not None:
                name, least, largest = span
                label = f"range of {name}, at the median scale"
                axes.axvspan(least - 0.5, largest + 0.5, color="C2", alpha=0.15, label=label)
                axes.legend(frameon=False, fontsize="small")
            axes.bar(list(bars), list(bars.values()), width=0.9)
            _count_on(axes.xaxis)
            axes.set(title=title, xlabel="floor(log2 |x|)", ylabel="values")

    def plot_scales(
        self, path: str | Path, layer: str, role: str, orientation: str = "rowwise"
    ) -> None:
        """Draw a PNG: ``log2 scale`` of each block in the first cast of a tensor in the latest
        step, as a heat map; zero blocks are white.

        Raises:
            OperandError: the tensor was not cast in that step, or has no scales.
            UnsupportedError: matplotlib is not installed.
        """
        title, tally = self._tally(layer, role, orientation)
        if tally.grid is None:
            raise OperandError(f"{title} has no scales to draw: it is in high precision, or empty.")
        with drawing(path, 8, 6) as (figure, axes):
            image = axes.imshow(tally.grid.numpy(), aspect="auto", interpolation="nearest")
            figure.colorbar(image, label="log2 scale")
            axes.set(title=title, xlabel="block along the contraction", ylabel="block of rows")
            _count_on(axes.xaxis, axes.yaxis)

    def what_if(self, recipes: str | Recipe | Sequence[str | Recipe]) -> WhatIf:
        """Cast the tensors of the latest observed step as other recipes would.

        ``recipes`` are Recipes or names of recipes. The tensors are those of the first microbatch,
        and only their casts are computed. A delayed scale is the one that the tensor's amax gives;
        stochastic rounding draws from a fixed seed.

        Raises:
            RecipeError: no recipe has that name.
            UnsupportedError: no backend supports a recipe's casts on a layer's device.
            OperandError: no tensors were kept.
        """
        return replay(self._recorder.saved, self._layers, recipes)

    def _observe(self, is_on: bool) -> None:
        self._recorder.is_on = is_on
        for path, layer in self._layers.items():
            layer.set_watch(self._watches[path] if is_on else None)

    def _file(self) -> None:
        record = self._recorder.take()
        if record.tallies or record.gemms:
            self._latest, self._latest_step = record, self._recorder.step
            self.rows += rows_of(self._recorder.step, record)

    def _tally(self, layer: str, role: str, orientation: str) -> tuple[str, Tally]:
        """Return a title, and the tally of an operand in the latest step."""
        key = CastKey(layer, role, orientation)
        if key not in self._latest.tallies:
            raise self._absent(key, list(self._latest.tallies))
        return f"{role} ({orientation}) of {layer}", self._latest.tallies[key]

    def _absent(self, absent: CastKey, keys: Sequence[CastKey]) -> OperandError:
        for part, name in zip(CastKey._fields, absent, strict=True):
            observed = list(dict.fromkeys(getattr(key, part) for key in keys))
            if keys and name not in observed:
                return OperandError(
                    f"no {part} {name!r} was observed; observed: {', '.join(observed)}."
                    f"{did_you_mean(name, observed)}"
                )
        if not keys:
            return OperandError(
                f"nothing was observed yet; {absent.role} ({absent.orientation}) of "
                f"{absent.layer!r} is there once step() or close() has ended a step that ran it."
            )
        return OperandError(
            f"{absent.role} ({absent.orientation}) of {absent.layer!r} was not cast in an observed "
            f"step, as no GEMM that reads it ran."
        )


def monitor(
    model: torch.nn.Module,
    *,
    every: int = 1,
    on_nonfinite: str = "record",
    keep_tensors: bool = True,
) -> Monitor:
    """Collect statistics of the casts in ``model``, until the returned monitor is closed.

    Every fp8core layer with a GEMM is watched: amax, scales, underflow, saturation and SQNR of each
    operand, the GEMMs that ran, and the first tensor with NaN or inf. Outputs, gradients and
    delayed scales are those of the model without a monitor, bit for bit; while it watches, a
    producer and its cast run as two operations, also if a backend has a fused one. ``close()``, or
    the end of a ``with`` block, ends it.

    Args:
        model: any module with fp8core layers.
        every: of the steps that ``step()`` ends, the first and every ``every``-th after it are
            observed. In the others the layers run as without a monitor.
        on_nonfinite: ``"record"`` goes on, ``"raise"`` raises NonFiniteError at a tensor with NaN
            or inf: before its cast, or after the GEMM that returned it.
        keep_tensors: keep a copy of each tensor of the latest observed step's first microbatch in
            the CPU's memory, which :meth:`~fp8core.monitoring.Monitor.what_if` needs.

    Raises:
        OperandError: ``model`` is no module, or has no fp8core layer with a GEMM; or one of its
            layers is monitored already.
        UnsupportedError: torch has compiled the model or a part of it.
        RecipeError: ``every`` or ``on_nonfinite`` is invalid.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise RecipeError(f"monitor(every={every!r}): expected a number of steps, 1 or more.")
    checked_choice("monitor", "on_nonfinite", on_nonfinite, _ON_NONFINITE, RecipeError)
    layers = watched_layers(model, "monitor")
    recorder = Recorder(raises=on_nonfinite == "raise", keeps=keep_tensors)
    inventory.claim(layers)
    try:
        return Monitor(layers, recorder, every)
    except BaseException:
        inventory.release(layers.values())
        raise


def watched_layers(model: torch.nn.Module, caller: str) -> dict[str, LowPrecisionModule]:
    """Return the layers to watch by their paths; a model of one layer by its name or class."""
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"{caller}({model!r}): expected a model.")
    layers: dict[str, LowPrecisionModule] = {}
    for path, module in model.named_modules():
        if is_compiled(module):
            raise UnsupportedError(
                f"{caller}: {path or 'the model'} ({type(module).__name__}) is compiled by torch, "
                f"and a graph hides the values before their casts. Pass the uncompiled model, "
                f"and run that one meanwhile."
            )
        if isinstance(module, LowPrecisionModule) and module.linear_shapes():
            layers[path or module.name or type(module).__name__] = module
    if not layers:
        raise OperandError(
            f"{caller}: {type(model).__name__} holds no fp8core layer with a GEMM. "
            f"fp8core.convert(model, recipe) converts torch's layers in place; or build the model "
            f"from fp8core.Linear and the other layers."
        )
    return layers
