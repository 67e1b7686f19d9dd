"""``fp8core demo``: a small GPT over bytes, trained in bf16 and in every recipe, as table, picture
and JSON.

The matrix products of its block take the precision of the active recipe. Embeddings, attention
itself, the last norm and the output head are never quantized, as is usual in practice. rich and
matplotlib are optional (``pip install "fp8core[demo]"``), so only functions import them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import fp8core as te
from fp8core.dispatch import policy, select
from fp8core.errors import OperandError, UnsupportedError
from fp8core.inspection.on_meta import autograd_bytes
from fp8core.recipe import Recipe, by_name, names

BASELINE = "bf16"  # the run without a recipe, with which the others are compared
PICTURE, RESULTS = "loss_curves.png", "results.json"
HEADING = """device {device}, backend {backend}, torch {torch}, {threads} CPU thread(s)
text: {text}, {text_bytes:,} bytes
model: {parameters:,} parameters; {settings[steps]} steps of {step_bytes:,} bytes"""
COLUMNS = ["held-out loss\n(nats/byte)", "distance\nfrom bf16", "training\ntokens/s"]
# bf16 is black, the others Okabe and Ito's palette, which most colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d31", "#7f7f7f")
SMOOTHED_FRACTION = 0.04  # a point of a curve is the mean over this share of all steps


Run: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that are equal for all runs, so that only the precision differs.

    ``context`` is in bytes, one token each. With a short warmup runs that differ by rounding alone
    end further apart. ``threads`` is 1, as threads of so small a model wait for each other. The
    parts that are never quantized learn three times as fast.
    """

    steps: int = 120
    batch_size: int = 8
    learning_rate: float = 1.5e-3
    warmup_fraction: float = 0.5
    max_grad_norm: float = 1.0
    num_heldout_windows: int = 256
    threads: int = 1
    seed: int = 0
    sample_bytes: int = 0
    d_model: int = 128
    num_heads: int = 4
    context: int = 64


def load(path: Path | None, context: int) -> tuple[Tensor, Tensor, str]:
    """Read a file, or the modules of Python's standard library; its last tenth is held out.

    Returns the parts to train on and held out, ``[bytes]`` uint8 on the CPU, and the text's name.

    Raises:
        OSError: the file cannot be read.
        OperandError: a part has less than 8 windows of ``context`` bytes and their targets; some
            distributions ship no sources of the library.
    """
    files = [path] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    name = str(path or f"Python's standard library, {len(files)} files")
    data = b"".join(file.read_bytes() for file in files)
    if len(data) < (least := 10 * (8 * context + 1)):
        raise OperandError(
            f"{name}: it has {len(data)} bytes, and {least} are needed, as a tenth is held out.\n"
            f"  Train on another text: --text FILE."
        )
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    train, heldout = text.tensor_split([len(text) - len(text) // 10])
    return train, heldout, f"{name}, the last tenth held out"


class ByteGPT(nn.Module):
    """A GPT over bytes of one block; its weights follow from torch's seed alone, on any device.

    The embedding of a position is the sum of those of its byte and the two before it. Matrices are
    normal with deviation ``1 / sqrt(d_model)``; the head is 0, so that the first loss is ln 256.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__()
        width, heads = settings.d_model, settings.num_heads
        self.embeddings = nn.ModuleList(nn.Embedding(256, width) for _ in range(3))
        self.block = te.TransformerLayer(
            width,
            4 * width,
            heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method=partial(nn.init.normal_, std=width**-0.5),
            fuse_qkv_params=True,
            attn_input_format="bshd",
        )
        self.rotary = te.RotaryPositionEmbedding(width // heads, rotary_base=1000.0)
        self.norm = nn.LayerNorm(width)
        self.head = te.Linear(width, 256, bias=False, init_method=nn.init.zeros_)
        te.prepare(self).to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, context, 256]`` of the byte after each of ``tokens``, int64.

        Positions before the first count as byte 0.
        """
        stream = self.embeddings[0](tokens)
        for distance in (1, 2):
            before = functional.pad(tokens, (distance, 0))[:, : tokens.shape[1]]
            stream = stream + self.embeddings[distance](before)
        stream = self.block(stream, rotary_pos_emb=self.rotary(tokens.shape[1]))
        with te.autocast(enabled=False):
            logits: Tensor = self.head(self.norm(stream))
        return logits


class Training(NamedTuple):
    """The text, settings and device that all runs share; a recipe of None stands for bf16."""

    text: Tensor
    heldout: Tensor
    source: str
    settings: Settings
    device: torch.device

    def run(self, name: str, recipe: Recipe | None) -> Run:
        """Train a fresh model, with a bar on a terminal, and evaluate it.

        Returns the run as in the JSON file: losses in nats per byte, of which one that is not
        finite ends the run; the speed of the median step; and the bytes that a step keeps from
        forward to backward, without the parameters. The seed fixes all but the speed.
        """
        from rich.progress import track

        settings, is_hidden = self.settings, not sys.stdout.isatty()
        model, losses, seconds = self.model(), list[float](), list[float]()
        steps = self.steps(model, recipe)
        for loss, took in track(steps, name, settings.steps, disable=is_hidden):
            losses.append(loss)
            seconds.append(took)
        diverged = not math.isfinite(heldout := self.heldout_loss(model, recipe))
        windows = next(self._batches())
        num_bytes = autograd_bytes(lambda: self._loss(model, recipe, windows), model.parameters())
        return {
            "recipe": name,
            "heldout_loss": heldout,
            "tokens_per_s": settings.batch_size * settings.context / statistics.median(seconds),
            "steps": len(losses),
            "held_bytes": num_bytes,
            "diverged": diverged,
            "losses": losses,
            "sample": "" if diverged else self.sample(model, recipe),
        }

    def model(self) -> ByteGPT:
        """Return a fresh model, whose weights follow from the seed."""
        torch.manual_seed(self.settings.seed)
        return ByteGPT(self.settings, self.device)

    def steps(self, model: ByteGPT, recipe: Recipe | None) -> Iterator[tuple[float, float]]:
        """Train ``model``; yield the loss and the seconds of each step, up to a loss that is not
        finite."""
        settings, rate = self.settings, self.settings.learning_rate
        outer = [*model.embeddings.parameters(), *model.norm.parameters(), model.head.weight]
        optimizer = torch.optim.AdamW(model.block.parameters(), rate, betas=(0.9, 0.95))
        optimizer.add_param_group({"params": outer, "lr": 3 * rate})
        rise = max(1.0, settings.steps * settings.warmup_fraction)
        fall = max(1.0, settings.steps - rise) / math.pi  # along half a cosine, to 0
        schedule = LambdaLR(
            optimizer,
            lambda at: min((at + 1) / rise, (1 + math.cos(max(0, at - rise) / fall)) / 2),
        )
        for windows in self._batches():
            start = time.perf_counter()
            loss = self._loss(model, recipe, windows)
            value = loss.item()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            yield value, time.perf_counter() - start
            if not math.isfinite(value):
                return

    def _batches(self) -> Iterator[Tensor]:
        """Yield ``[batch, context + 1]`` int64 for each step, random but the same in every run."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        windows = self.text.unfold(0, self.settings.context + 1, 1)
        size = (self.settings.batch_size,)
        for _ in range(self.settings.steps):
            first = torch.randint(len(windows), size, generator=generator, device="cpu")
            yield windows[first].long()

    def _logits(self, model: ByteGPT, recipe: Recipe | None, tokens: Tensor) -> Tensor:
        """Return float32 logits, computed in bf16, by the library's layers under ``recipe``."""
        bf16 = torch.autocast(self.device.type, dtype=torch.bfloat16)
        with bf16, te.autocast(enabled=recipe is not None, recipe=recipe):
            logits: Tensor = model(tokens.to(self.device))
        return logits.float()

    def _loss(self, model: ByteGPT, recipe: Recipe | None, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy of all bytes of ``windows`` but the first, float32."""
        logits = self._logits(model, recipe, windows[:, :-1].contiguous())
        targets = windows[:, 1:].to(self.device)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def heldout_loss(self, model: ByteGPT, recipe: Recipe | None) -> float:
        """Return the loss on windows that are spread evenly and do not overlap."""
        context = self.settings.context
        windows = self.heldout.unfold(0, context + 1, context)
        count = min(self.settings.num_heldout_windows, len(windows))
        windows = windows[torch.arange(count, device=windows.device) * len(windows) // count].long()
        parts = torch.split(windows, self.settings.batch_size)
        return sum(self._loss(model, recipe, part).item() * len(part) for part in parts) / count

    @torch.no_grad()
    def sample(self, model: ByteGPT, recipe: Recipe | None) -> str:
        """Return what ``model`` draws, byte by byte, after the beginning of the held-out text."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        context = self.settings.context
        text = self.heldout[: context // 2].long()
        for _ in range(self.settings.sample_bytes):
            logits = self._logits(model, recipe, text[None, -context:])[0, -1].cpu()
            odds = torch.softmax(logits / 0.7, dim=0)  # likely bytes become likelier
            text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)])
        return bytes(text[context // 2 :].tolist()).decode(errors="backslashreplace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fp8core demo``."""
    settings, add = Settings(), parser.add_argument
    step_bytes = settings.batch_size * settings.context
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


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


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
    recipes = {name: by_name(name) for name in args.recipe or names() if name != BASELINE}
    for package in ("matplotlib", "rich"):
        if find_spec(package) is None:
            remedy = 'Install with: pip install "fp8core[demo]"'
            raise UnsupportedError(f"the demo needs {package}, not installed here.\n  {remedy}")
    settings = Settings(steps=args.steps, sample_bytes=args.sample)
    picture, json_file = args.out / PICTURE, args.json or args.out / RESULTS
    try:
        text = load(args.text, settings.context)
        for path in (picture, json_file):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
    except OSError as error:
        remedy = "Give --text a file that can be read, and --out and --json places to write to."
        raise OperandError(f"{error}.\n  {remedy}") from None
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(settings.threads)
        stack.enter_context(te.use_backend(args.backend))
        training = Training(*text, settings, select.default_device(policy.current()))
        facts, refused = _explain(training, recipes)
        if refused and (args.recipe or len(refused) == len(recipes)):
            raise UnsupportedError("\n".join(refused.values()))
        heading = HEADING.format(**facts, step_bytes=settings.batch_size * settings.context)
        print(heading)
        runs = train(training, recipes, refused)
    for name, reason in refused.items():
        print(f"{name} was not run: {reason}")
    for each in (each for each in runs if each["sample"]):
        prompt = bytes(text[1][: settings.context // 2].tolist()).decode(errors="backslashreplace")
        print(f"{each['recipe']} continues {prompt!r}:\n{each['sample']}\n")
    if training.device.type == "cpu":
        print("A CPU emulates the recipes: its tokens/s say nothing about FP8 hardware.")
    draw_curves(picture, runs, heading.partition("\n")[2])
    skipped = [{"recipe": name, "reason": reason} for name, reason in refused.items()]
    content = json.dumps({**facts, "runs": runs, "skipped": skipped})
    finite = json.loads(content, parse_constant=lambda name: None)  # NaN becomes null
    json_file.write_text(json.dumps(finite, indent=1) + "\n", encoding="utf-8")
    print(f"loss curves: {picture}\nresults: {json_file}")
    return int(any(each["diverged"] for each in runs))


def _explain(
    training: Training, recipes: Mapping[str, Recipe]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what all runs share, as the JSON file begins; and why recipes cannot run here."""
    model = ByteGPT(training.settings, training.device)
    answers = {
        name: te.explain(model, recipe, dtype=torch.bfloat16) for name, recipe in recipes.items()
    }
    choices = [line.choice for answer in answers.values() for line in answer.lines]
    backends = sorted({choice.backend for choice in choices if choice is not None})
    facts = {
        "device": str(training.device),
        "backend": ", ".join(backends) or select.selected_spec(policy.current()).name,
        "fp8core": te.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "text": training.source,
        "text_bytes": len(training.text) + len(training.heldout),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "settings": asdict(training.settings),
    }
    return facts, {name: str(answer) for name, answer in answers.items() if answer.refused}


def train(training: Training, recipes: Mapping[str, Recipe], refused: Container[str]) -> list[Run]:
    """Train in bf16 and the recipes that are not ``refused``, each with a bar; print the table."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(
        "recipe", *(Column(column, justify="right") for column in [*COLUMNS, "held for\nbackward"])
    )
    runs: list[Run] = []
    for name, recipe in {BASELINE: None, **recipes}.items():
        if name in refused:
            table.add_row(name, "not supported", "-", "-", "-")
            continue
        runs.append(training.run(name, recipe))
        this, base = runs[-1], runs[0]
        this["distance_from_bf16"] = apart = this["heldout_loss"] / base["heldout_loss"] - 1
        cells = [f"{this['heldout_loss']:.4f}", f"{100 * apart:+.2f} %"]
        if this["diverged"]:
            cells = ["diverged", f"at step {this['steps']}"]
        elif this is base or base["diverged"]:
            cells[1] = "-"
        memory, share = this["held_bytes"] / 2**20, this["held_bytes"] / base["held_bytes"]
        cells += [f"{this['tokens_per_s']:,.0f}", f"{memory:.1f} MiB ({share:.2f})"]
        table.add_row(name, *cells)
    Console(highlight=False, markup=False).print(table)
    return runs


def draw_curves(path: Path, runs: Sequence[Run], title: str) -> None:
    """Draw a PNG: training loss of every run, and its difference from bf16, which runs first.

    All runs train on the same batches, so that a difference comes from the precision alone. Both
    curves are trailing means over ``SMOOTHED_FRACTION`` of the steps; a diverged run ends early.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = max(1, round(SMOOTHED_FRACTION * runs[0]["steps"]))
    means: list[list[float]] = []
    for each, colour in zip(runs, chain(["black"], cycle(COLOURS)), strict=False):
        losses, steps = each["losses"], range(1, each["steps"] + 1)
        means.append([statistics.fmean(losses[max(0, step - width) : step]) for step in steps])
        loss = "diverged" if each["diverged"] else f"{each['heldout_loss']:.4f}"
        marker = "o" if len(steps) == 1 else ""  # one value has no line
        style = {"color": colour, "marker": marker, "linewidth": 1.3, "alpha": 0.9}
        left.plot(steps, means[-1], label=f"{each['recipe']} ({loss})", **style)
        if each is not runs[0]:
            apart = [100 * (x / y - 1) for x, y in zip(means[-1], means[0], strict=False)]
            right.plot(steps[: len(apart)], apart, label=each["recipe"], **style)
    right.axhline(0, color="black", linewidth=1)
    left.set(title="training loss", xlabel="step", ylabel="nats per byte")
    left.legend(title="recipe (held-out loss)", frameon=False)
    right.set(title="training loss relative to bf16", xlabel="step", ylabel="%")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120, format="png")
