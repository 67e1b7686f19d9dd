"""``fp8core demo``: its arguments, the order of its work, and its exit status."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import fp8core as te
from fp8core.cli.demo import report
from fp8core.cli.demo.data import Corpus, load_stdlib, load_text
from fp8core.cli.demo.model import ByteGPT
from fp8core.cli.demo.train import (
    BASELINE,
    RunResult,
    TrainSettings,
    prompt_of,
    train_run,
    try_one_step,
)
from fp8core.dispatch import policy, select
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe import Recipe, by_name, names

if TYPE_CHECKING:
    from rich.console import Console

FOLDER = Path("fp8core-demo")
PICTURE_NAME = "loss_curves.png"
RESULTS_NAME = "results.json"


@dataclass(frozen=True, slots=True)
class Request:
    """The user's choices; None means the default that ``fp8core demo --help`` names."""

    recipes: Sequence[str] | None = None
    text: Path | None = None
    backend: str | None = None
    folder: Path = FOLDER
    json_file: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fp8core demo``."""
    settings = TrainSettings()
    step_bytes = settings.batch_size * settings.model.context
    add = parser.add_argument
    add(
        "--recipe",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"train in these recipes, and in {BASELINE} for comparison (default: in every recipe)",
    )
    add(
        "--steps",
        type=_at_least_one,
        default=settings.steps,
        metavar="N",
        help=f"training steps of a run, {step_bytes} bytes each (default: %(default)s)",
    )
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to train on (default: the source files of Python's standard library)",
    )
    add(
        "--sample",
        type=_at_least_one,
        default=settings.sample_bytes,
        metavar="BYTES",
        help="draw text of this length from each trained model (default: none)",
    )
    add("--backend", metavar="NAME", help="backend to run on (default: the best usable one)")
    add(
        "--out",
        type=Path,
        default=FOLDER,
        metavar="DIR",
        help=f"folder for {PICTURE_NAME} and {RESULTS_NAME} (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help=f"file for the results (default: {RESULTS_NAME})")


def run(args: argparse.Namespace) -> int:
    """Run the demo; return its exit status: 0, or 1 if a run diverged.

    Raises:
        Fp8CoreError: see :func:`demo`.
    """
    request = Request(args.recipe, args.text, args.backend, args.out, args.json)
    return demo(request, TrainSettings(steps=args.steps, sample_bytes=args.sample))


def demo(request: Request, settings: TrainSettings) -> int:
    """Train in bf16 and in every requested recipe; print and store the results.

    A recipe that this machine cannot run is an error if the user named it; otherwise it is reported
    and left out. Returns 0, or 1 if a run diverged.

    Raises:
        RecipeError: a requested recipe or backend is unknown.
        UnsupportedError: rich or matplotlib is missing; or a recipe that the user named cannot run
            here, or none of all can.
        OperandError: the text cannot be used, or the results cannot be written.
    """
    asked = request.recipes if request.recipes is not None else names()
    recipes = {name: by_name(name) for name in asked if name != BASELINE}
    report.require_packages()
    context = settings.model.context
    corpus = load_text(request.text, context) if request.text else load_stdlib(context)
    picture = request.folder / PICTURE_NAME
    json_file = request.json_file or request.folder / RESULTS_NAME
    for path in (picture, json_file):
        _prepare_file(path)
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    with te.use_backend(request.backend), _threads(settings.threads):
        device = select.default_device(policy.current())
        skipped = _try_all(recipes, corpus, settings, device, named=request.recipes is not None)
        recipes = {name: recipe for name, recipe in recipes.items() if name not in skipped}
        facts = _facts(recipes, corpus, settings, device)
        heading = report.heading(facts)
        console.print(*heading, sep="\n", soft_wrap=True)
        runs = _train_all(console, recipes, corpus, settings, device)
    report.print_table(console, runs, skipped)
    if settings.sample_bytes:
        report.print_samples(console, runs, bytes(prompt_of(corpus, settings).tolist()))
    if device.type == "cpu":
        console.print("A CPU emulates the recipes: its tokens/s say nothing about FP8 hardware.")
    try:
        report.draw_curves(picture, runs, title="\n".join(heading[1:]))
        report.write_json(json_file, report.results(runs, skipped, facts))
    except OSError as error:
        raise OperandError(f"the results cannot be written: {error}.") from None
    console.print(f"loss curves: {picture}\nresults: {json_file}", soft_wrap=True)
    return 1 if any(one.diverged for one in runs) else 0


@contextmanager
def _threads(count: int) -> Iterator[None]:
    outer = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(outer)


def _at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return value


def _prepare_file(path: Path) -> None:
    """Create the folder of ``path``, and check before training that ``path`` can be written.

    Raises:
        OperandError: the folder cannot be created, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OperandError(f"cannot create the folder {path.parent}: {reason}.") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        fault = "it is a folder" if path.is_dir() else "no permission"
        raise OperandError(f"cannot write {path}: {fault}.")


def _try_all(
    recipes: Mapping[str, Recipe],
    corpus: Corpus,
    settings: TrainSettings,
    device: torch.device,
    *,
    named: bool,
) -> dict[str, str]:
    """Try each recipe; return those that cannot run here, with the reason.

    Raises:
        UnsupportedError: a recipe that the user ``named`` cannot run; or none can.
    """
    reasons: dict[str, str] = {}
    try_one_step(None, corpus, settings, device)
    for name, recipe in recipes.items():
        try:
            try_one_step(recipe, corpus, settings, device)
        except UnsupportedError as error:
            reasons[name] = str(error)
            if named or len(reasons) == len(recipes):
                raise
    return reasons


def _facts(
    recipes: Mapping[str, Recipe], corpus: Corpus, settings: TrainSettings, device: torch.device
) -> report.Facts:
    model = ByteGPT(settings.model, seed=settings.seed, device=device)
    backends = {
        line.choice.backend
        for recipe in recipes.values()
        for line in te.explain(model, recipe, dtype=torch.bfloat16).lines
        if line.choice is not None
    }
    return report.Facts(
        device=str(device),
        backend=", ".join(sorted(backends)) or select.selected_spec(policy.current()).name,
        fp8core=te.__version__,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        text=corpus.source,
        text_bytes=corpus.num_bytes,
        parameters=model.num_parameters(),
        settings=settings,
    )


def _train_all(
    console: Console,
    recipes: Mapping[str, Recipe],
    corpus: Corpus,
    settings: TrainSettings,
    device: torch.device,
) -> list[RunResult]:
    """Train in bf16, then in each recipe; print how each ended if there is no progress bar."""
    runs = []
    all_recipes = {BASELINE: None, **recipes}
    with report.progress(console, len(all_recipes), settings.steps) as start:
        for name, recipe in all_recipes.items():
            on_step = start(name)
            runs.append(train_run(name, recipe, corpus, settings, device, on_step=on_step))
            if not console.file.isatty():
                console.print(f"{name}: {report.summary(runs[-1])}")
    return runs
