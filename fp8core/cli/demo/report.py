"""The output of the demo: heading, progress, table, loss curves as PNG, results as JSON.

rich and matplotlib are optional (``pip install "fp8core[demo]"``), so only functions import them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from fp8core.cli.demo.train import BASELINE, RunResult, TrainSettings
from fp8core.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

# Okabe and Ito's palette, which most colour-blind readers can tell apart; bf16 is black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d31", "#7f7f7f")
SPEED_SECONDS = 60.0
"""The time that is left follows from the speed of the last seconds, which spans several runs."""
SMOOTHED_FRACTION = 0.04
"""One point of a curve is the mean over this share of all steps."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that all runs of one demo share: device, versions, text and settings."""

    device: str
    backend: str
    fp8core: str
    torch: str
    threads: int
    text: str
    text_bytes: int
    parameters: int
    settings: TrainSettings


def require_packages() -> None:
    """Import rich and matplotlib, so that a missing one is known before anything is trained.

    Raises:
        UnsupportedError: one of them is not installed.
    """
    missing = []
    for package in ("rich", "matplotlib"):
        try:
            import_module(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise UnsupportedError(
            f"the demo needs {' and '.join(missing)}, not installed here.\n"
            f'  Install with: pip install "fp8core[demo]"'
        )


def heading(facts: Facts) -> list[str]:
    """Return the lines that name the device, the text and the model."""
    settings = facts.settings
    step_bytes = settings.batch_size * settings.model.context
    return [
        f"device {facts.device}, backend {facts.backend}, torch {facts.torch}, "
        f"{facts.threads} CPU thread(s)",
        f"text: {facts.text}, {facts.text_bytes:,} bytes",
        f"model: {facts.parameters:,} parameters; {settings.steps} steps of {step_bytes:,} bytes",
    ]


def distance(run: RunResult, baseline: RunResult) -> float:
    """Return the held-out loss relative to that of ``baseline``, minus 1; NaN if one diverged."""
    return run.heldout_loss / baseline.heldout_loss - 1


@contextmanager
def progress(
    console: Console, num_runs: int, num_steps: int
) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """Show a bar for all runs and one per run, each with the time that is left.

    They are shown on a terminal only, as they would fill any other output. The context yields a
    function that starts the bar of a run, given its name, and returns a function to call with the
    training loss after each step.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left  {task.fields[loss]}"),
    )
    with Progress(
        *columns,
        console=console,
        disable=not console.file.isatty(),
        speed_estimate_period=SPEED_SECONDS,
    ) as bars:
        total = bars.add_task("all runs", total=num_runs * num_steps, loss="")

        def start(name: str) -> Callable[[float], None]:
            num_started = len(bars.task_ids) - 1
            bars.update(total, completed=num_started * num_steps)  # a diverged run ended early
            task = bars.add_task(name, total=num_steps, loss="")

            def on_step(loss: float) -> None:
                bars.update(task, advance=1, loss=f"loss {loss:.3f}")
                bars.update(total, advance=1)

            return on_step

        yield start


def summary(run: RunResult) -> str:
    """Return one line on how a run ended."""
    speed = f"{run.tokens_per_s:,.0f} tokens/s"
    if run.diverged:
        return f"diverged at step {run.steps}, {speed}"
    return f"held-out loss {run.heldout_loss:.4f} after {run.steps} steps, {speed}"


def print_table(console: Console, runs: Sequence[RunResult], skipped: Mapping[str, str]) -> None:
    """Print a row for each run, bf16 first, and for each ``skipped`` recipe, with the reasons."""
    from rich.table import Table

    table = Table()
    table.add_column("recipe")
    columns = ("held-out loss\n(nats/byte)", "distance\nfrom bf16", "training\ntokens/s")
    for heading in (*columns, "held for\nbackward"):
        table.add_column(heading, justify="right")
    for run in runs:
        loss, apart = f"{run.heldout_loss:.4f}", f"{100 * distance(run, runs[0]):+.2f} %"
        if run.diverged:
            loss, apart = "diverged", f"at step {run.steps}"
        elif run.recipe == BASELINE or runs[0].diverged:
            apart = "-"
        held = f"{run.held_bytes / 2**20:.1f} MiB ({run.held_bytes / runs[0].held_bytes:.2f})"
        table.add_row(run.recipe, loss, apart, f"{run.tokens_per_s:,.0f}", held)
    for name in skipped:
        table.add_row(name, "not supported", "-", "-", "-")
    console.print(table)
    for name, reason in skipped.items():
        console.print(f"{name} was not run: {reason}", soft_wrap=True)


def print_samples(console: Console, runs: Sequence[RunResult], prompt: bytes) -> None:
    """Print the text that each trained model drew after ``prompt``."""
    for run in runs:
        if run.sample:
            heading = f"{run.recipe} continues {_text(prompt)!r}:"
            console.print(heading, _text(run.sample), "", sep="\n", soft_wrap=True)


def _text(drawn: bytes) -> str:
    """Return bytes as text, with escapes for those that are none."""
    return drawn.decode("utf-8", errors="backslashreplace")


def results(
    runs: Sequence[RunResult], skipped: Mapping[str, str], facts: Facts
) -> dict[str, object]:
    """Return the content of the JSON file: ``facts``, then ``runs`` and ``skipped``.

    Losses are in nats per byte, ``distance_from_bf16`` is a fraction (0.01 is 1 %); a number that
    is not finite is null.
    """
    return {
        **asdict(facts),
        "runs": [
            {
                "recipe": run.recipe,
                "heldout_loss": _finite(run.heldout_loss),
                "distance_from_bf16": _finite(distance(run, runs[0])),
                "tokens_per_s": run.tokens_per_s,
                "steps": run.steps,
                "held_bytes": run.held_bytes,
                "diverged": run.diverged,
                "losses": [_finite(loss) for loss in run.losses],
                "sample": _text(run.sample),
            }
            for run in runs
        ],
        "skipped": [{"recipe": name, "reason": reason} for name, reason in skipped.items()],
    }


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write ``content`` as JSON text, with a newline at its end."""
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def draw_curves(path: Path, runs: Sequence[RunResult], title: str) -> None:
    """Draw a PNG: training loss of every run, and its difference from bf16, which runs first.

    All runs train on the same batches, so that a difference comes from the precision alone. Both
    curves are trailing means over ``SMOOTHED_FRACTION`` of the steps; a diverged run ends early.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    width = max(1, round(SMOOTHED_FRACTION * len(runs[0].losses)))
    baseline = _trailing_mean(runs[0].losses, width)
    colours = cycle(COLOURS)
    for run in runs:
        is_baseline = run is runs[0]
        colour = "black" if is_baseline else next(colours)
        smooth = _trailing_mean(run.losses, width)
        held_out = "diverged" if run.diverged else f"{run.heldout_loss:.4f}"
        _draw(left, smooth, colour, f"{run.recipe} ({held_out})")
        if not is_baseline:
            pairs = zip(smooth, baseline, strict=False)
            apart = [100 * (loss / base - 1) for loss, base in pairs]
            _draw(right, apart, colour, run.recipe)
    right.axhline(0, color="black", linewidth=1)
    left.set(title="training loss", xlabel="step", ylabel="nats per byte")
    left.legend(title="recipe (held-out loss)", frameon=False)
    right.set(title="training loss relative to bf16", xlabel="step", ylabel="%")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120, format="png")


def _draw(axes: Axes, values: Sequence[float], colour: str, label: str) -> None:
    """Draw the values over steps 1, 2, ...; a single value as a dot."""
    marker = "o" if len(values) == 1 else ""
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, color=colour, label=label, marker=marker, linewidth=1.3, alpha=0.9)


def _trailing_mean(values: Sequence[float], width: int) -> list[float]:
    """Average each finite value with up to ``width - 1`` before it.

    >>> _trailing_mean([1.0, 3.0, 5.0, math.nan], 2)
    [1.0, 2.0, 4.0]
    """
    finite = [value for value in values if math.isfinite(value)]
    windows = (finite[max(0, end - width) : end] for end in range(1, len(finite) + 1))
    return [sum(window) / len(window) for window in windows]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
