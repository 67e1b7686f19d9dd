"""``fp8core demo``: a small GPT trained in bf16 and in every recipe, as table, picture and JSON.

rich and matplotlib are optional (``pip install "fp8core[demo]"``), so only functions import them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fp8core as te
from fp8core.cli.byte_gpt import ByteGPT, RunResult, Settings, Training, load_stdlib, load_text
from fp8core.dispatch import policy, select
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe import Recipe, by_name, names

if TYPE_CHECKING:
    from rich.console import Console

BASELINE = "bf16"  # the run without a recipe, with which the others are compared
PICTURE, RESULTS = "loss_curves.png", "results.json"
# bf16 is black, the others Okabe and Ito's palette, which most colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d31", "#7f7f7f")
SPEED_SECONDS = 60.0  # the time that is left follows from the speed of so long, of several runs
SMOOTHED_FRACTION = 0.04  # a point of a curve is the mean over this share of all steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fp8core demo``."""
    settings = Settings()
    step_bytes = settings.batch_size * settings.context
    add = parser.add_argument
    text = f"train in these recipes, and in {BASELINE} for comparison (default: in every recipe)"
    add("--recipe", nargs="+", action="extend", metavar="NAME", help=text)
    text = f"training steps of a run, {step_bytes} bytes each (default: %(default)s)"
    add("--steps", type=_at_least_one, default=settings.steps, metavar="N", help=text)
    text = "text to train on (default: the source files of Python's standard library)"
    add("--text", type=Path, metavar="FILE", help=text)
    text = "draw text of this length from each trained model (default: none)"
    add("--sample", type=_at_least_one, default=0, metavar="BYTES", help=text)
    add("--backend", metavar="NAME", help="backend to run on (default: the best usable one)")
    text = f"folder for {PICTURE} and {RESULTS} (default: %(default)s)"
    add("--out", type=Path, default=Path("fp8core-demo"), metavar="DIR", help=text)
    add("--json", type=Path, metavar="FILE", help=f"file for the results (default: {RESULTS})")


def run(args: argparse.Namespace) -> int:
    """Train in bf16 and in every requested recipe; print and store the results.

    A recipe that this machine cannot run is an error if the user named it; otherwise it is reported
    and left out. Returns 0, or 1 if a run diverged.

    Raises:
        RecipeError: a requested recipe or backend is unknown.
        UnsupportedError: rich or matplotlib is missing; or a recipe that the user named cannot run
            here, or none of all can.
        OperandError: the text cannot be used, or the results cannot be written.
    """
    requested = names() if args.recipe is None else args.recipe
    recipes = {name: by_name(name) for name in requested if name != BASELINE}
    _require_packages()
    settings = Settings(steps=args.steps, sample_bytes=args.sample)
    load = load_stdlib if args.text is None else lambda context: load_text(args.text, context)
    corpus = load(settings.context)
    picture, json_file = args.out / PICTURE, args.json or args.out / RESULTS
    with _writing():
        for path in (picture, json_file):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with te.use_backend(args.backend):
            training = Training(corpus, settings, select.default_device(policy.current()))
            skipped = _try_all(training, recipes, named=args.recipe is not None)
            for name in skipped:
                del recipes[name]
            facts = _facts(training, recipes)
            heading = _heading(facts, settings)
            console.print(*heading, sep="\n", soft_wrap=True)
            runs = _train(console, training, recipes)
    finally:
        torch.set_num_threads(num_threads)
    print_table(console, runs, skipped)
    for result in (result for result in runs if result.sample):
        start = f"{result.recipe} continues {_text(bytes(training.prompt.tolist()))!r}:"
        console.print(start, _text(result.sample), "", sep="\n", soft_wrap=True)
    if training.device.type == "cpu":
        console.print("A CPU emulates the recipes: its tokens/s say nothing about FP8 hardware.")
    with _writing():
        draw_curves(picture, runs, title="\n".join(heading[1:]))
        content = json.dumps({**facts, **_results(runs, skipped)}, indent=1, allow_nan=False)
        json_file.write_text(content + "\n", encoding="utf-8")
    console.print(f"loss curves: {picture}\nresults: {json_file}", soft_wrap=True)
    return int(any(result.diverged for result in runs))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OperandError(f"the results cannot be written: {error}.") from None


def _require_packages() -> None:
    """Import rich and matplotlib, so that a missing one is known before anything is trained.

    Raises:
        UnsupportedError: one of them is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - only whether it is installed
        import rich  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"the demo needs {error.name}, not installed here.\n"
            f'  Install with: pip install "fp8core[demo]"'
        ) from None


def _try_all(training: Training, recipes: Mapping[str, Recipe], *, named: bool) -> dict[str, str]:
    """Train a throw-away model in bf16 and in each recipe for one step; kernels are built here too.

    Returns the recipes that cannot run here, with the reason.

    Raises:
        UnsupportedError: a recipe that the user ``named`` cannot run; or none can.
    """
    reasons: dict[str, str] = {}
    short = replace(training.settings, steps=1, num_heldout_windows=1, sample_bytes=0)
    training = training._replace(settings=short)
    training.run(BASELINE, None)
    for name, recipe in recipes.items():
        try:
            training.run(name, recipe)
        except UnsupportedError as error:
            reasons[name] = str(error)
            if named or len(reasons) == len(recipes):
                raise
    return reasons


def _facts(training: Training, recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Return what all runs share, as the JSON file begins: device, versions, text, settings."""
    corpus, settings, device = training
    model = ByteGPT(settings, device)
    reports = (te.explain(model, recipe, dtype=torch.bfloat16) for recipe in recipes.values())
    choices = (line.choice for report in reports for line in report.lines)
    backends = sorted({choice.backend for choice in choices if choice is not None})
    return {
        "device": str(device),
        "backend": ", ".join(backends) or select.selected_spec(policy.current()).name,
        "fp8core": te.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "text": corpus.source,
        "text_bytes": len(corpus.train) + len(corpus.heldout),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "settings": asdict(settings),
    }


def _heading(facts: Mapping[str, Any], settings: Settings) -> list[str]:
    """Return the lines that name the device, the text and the model."""
    device = "device {device}, backend {backend}, torch {torch}, {threads} CPU thread(s)"
    size = f"{settings.steps} steps of {settings.batch_size * settings.context:,} bytes"
    return [
        device.format_map(facts),
        "text: {text}, {text_bytes:,} bytes".format_map(facts),
        f"model: {facts['parameters']:,} parameters; {size}",
    ]


def _train(console: Console, training: Training, recipes: Mapping[str, Recipe]) -> list[RunResult]:
    """Train in bf16, then in each recipe; print how each ended if there is no progress bar."""
    runs = []
    with progress(console, len(recipes) + 1, training.settings.steps) as start:
        for name, recipe in {BASELINE: None, **recipes}.items():
            result = training.run(name, recipe, start(name))
            runs.append(result)
            if not console.file.isatty():
                num_steps, speed = len(result.losses), f"{result.tokens_per_s:,.0f} tokens/s"
                loss = f"held-out loss {result.heldout_loss:.4f} after {num_steps} steps"
                end = f"diverged at step {num_steps}" if result.diverged else loss
                console.print(f"{name}: {end}, {speed}")
    return runs


@contextmanager
def progress(
    console: Console, num_runs: int, num_steps: int
) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """Show a bar for all runs and one per run, each with the time that is left, on a terminal.

    The context yields a function that starts the bar of a run, given its name, and returns a
    function to call with the training loss after each step.
    """
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description:<10}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("left  {task.fields[loss]}"),
    )
    hidden = not console.file.isatty()
    with bars.Progress(
        *columns, console=console, disable=hidden, speed_estimate_period=SPEED_SECONDS
    ) as shown:
        total = shown.add_task("all runs", total=num_runs * num_steps, loss="")

        def start(name: str) -> Callable[[float], None]:
            num_started = len(shown.task_ids) - 1
            shown.update(total, completed=num_started * num_steps)  # a diverged run ended early
            task = shown.add_task(name, total=num_steps, loss="")

            def on_step(loss: float) -> None:
                shown.update(task, advance=1, loss=f"loss {loss:.3f}")
                shown.update(total, advance=1)

            return on_step

        yield start


def print_table(console: Console, runs: Sequence[RunResult], skipped: Mapping[str, str]) -> None:
    """Print a row for each run, bf16 first, and for each ``skipped`` recipe, with the reasons."""
    from rich.table import Table

    table = Table("recipe")
    columns = ("held-out loss\n(nats/byte)", "distance\nfrom bf16", "training\ntokens/s")
    for column in (*columns, "held for\nbackward"):
        table.add_column(column, justify="right")
    for result in runs:
        loss, apart = f"{result.heldout_loss:.4f}", f"{100 * _distance(result, runs[0]):+.2f} %"
        if result.diverged:
            loss, apart = "diverged", f"at step {len(result.losses)}"
        elif result is runs[0] or runs[0].diverged:
            apart = "-"
        share = result.held_bytes / runs[0].held_bytes
        memory = f"{result.held_bytes / 2**20:.1f} MiB ({share:.2f})"
        table.add_row(result.recipe, loss, apart, f"{result.tokens_per_s:,.0f}", memory)
    for name in skipped:
        table.add_row(name, "not supported", "-", "-", "-")
    console.print(table)
    for name, reason in skipped.items():
        console.print(f"{name} was not run: {reason}", soft_wrap=True)


def _distance(result: RunResult, baseline: RunResult) -> float:
    """Return the held-out loss relative to that of ``baseline``, minus 1; NaN if one diverged."""
    return result.heldout_loss / baseline.heldout_loss - 1


def _text(drawn: bytes) -> str:
    """Return bytes as text, with escapes for those that are none."""
    return drawn.decode("utf-8", errors="backslashreplace")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _results(runs: Sequence[RunResult], skipped: Mapping[str, str]) -> dict[str, object]:
    """Return ``runs`` and ``skipped`` of the JSON file, where a number that is not finite is null.

    Losses are in nats per byte, ``distance_from_bf16`` is a fraction (0.01 is 1 %).
    """
    rows = [
        {
            "recipe": result.recipe,
            "heldout_loss": _finite(result.heldout_loss),
            "distance_from_bf16": _finite(_distance(result, runs[0])),
            "tokens_per_s": result.tokens_per_s,
            "steps": len(result.losses),
            "held_bytes": result.held_bytes,
            "diverged": result.diverged,
            "losses": [_finite(loss) for loss in result.losses],
            "sample": _text(result.sample),
        }
        for result in runs
    ]
    reasons = [{"recipe": name, "reason": reason} for name, reason in skipped.items()]
    return {"runs": rows, "skipped": reasons}


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
    means = [_trailing_mean(result.losses, width) for result in runs]
    for result, mean, colour in zip(runs, means, chain(["black"], cycle(COLOURS)), strict=False):
        loss = "diverged" if result.diverged else f"{result.heldout_loss:.4f}"
        marker = "o" if len(mean) == 1 else ""  # one value has no line
        style = {"color": colour, "marker": marker, "linewidth": 1.3, "alpha": 0.9}
        steps = range(1, len(mean) + 1)
        left.plot(steps, mean, label=f"{result.recipe} ({loss})", **style)
        if result is not runs[0]:
            pairs = zip(mean, means[0], strict=False)
            apart = [100 * (loss / base - 1) for loss, base in pairs]
            right.plot(steps, apart, label=result.recipe, **style)
    right.axhline(0, color="black", linewidth=1)
    left.set(title="training loss", xlabel="step", ylabel="nats per byte")
    left.legend(title="recipe (held-out loss)", frameon=False)
    right.set(title="training loss relative to bf16", xlabel="step", ylabel="%")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120, format="png")


def _trailing_mean(values: Sequence[float], width: int) -> list[float]:
    """Average each finite value with up to ``width - 1`` before it."""
    finite = [value for value in values if math.isfinite(value)]
    windows = (finite[max(0, end - width) : end] for end in range(1, len(finite) + 1))
    return [sum(window) / len(window) for window in windows]
