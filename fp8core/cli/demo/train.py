"""Train the demo's model once, in bf16 or under one recipe, and measure it on held-out text."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8core as te
from fp8core.cli.demo.data import Corpus, heldout_windows, training_batches
from fp8core.cli.demo.model import ByteGPT, ModelConfig
from fp8core.cli.demo.sample import continue_text
from fp8core.recipe import Recipe

BASELINE = "bf16"
"""Name of the run without a recipe, with which the others are compared."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The settings of training, equal for all runs, so that only the precision differs.

    ``learning_rate`` is the highest rate of the blocks; embeddings and head, which have no
    quantized GEMM, learn ``outer_factor`` times as fast. With one rate for all, or a short warmup,
    runs that differ by rounding alone end further apart. ``threads`` is 1, as threads of so small
    a model wait for each other on a busy machine. ``sample_bytes`` are drawn from each trained
    model.
    """

    steps: int = 120
    batch_size: int = 8
    learning_rate: float = 1.5e-3
    outer_factor: float = 3.0
    warmup_fraction: float = 0.5
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    num_heldout_windows: int = 256
    threads: int = 1
    seed: int = 0
    sample_bytes: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run.

    ``losses`` are those of the training steps and ``heldout_loss`` is that on held-out text, in
    nats per byte; ``tokens_per_s`` is the speed of the median training step. ``steps`` counts the
    steps that ran: all, unless a loss was not finite; the run has ``diverged`` then, and its
    held-out loss is not finite either. ``held_bytes`` is the memory of the tensors that a step
    keeps from forward to backward, without the parameters. ``sample`` continues the first half
    context of the held-out text; it is empty if none was asked for, and after a divergence.
    """

    recipe: str
    heldout_loss: float
    tokens_per_s: float
    steps: int
    losses: tuple[float, ...]
    held_bytes: int
    sample: bytes = b""

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite, in training or on held-out text."""
        return not math.isfinite(self.heldout_loss)


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step, counted from 0: linear warmup, then half a cosine to 0.

    >>> settings = TrainSettings(steps=100, learning_rate=1.0, warmup_fraction=0.5)
    >>> [round(learning_rate_at(step, settings), 2) for step in (0, 24, 49, 75, 99)]
    [0.02, 0.5, 1.0, 0.5, 0.0]
    """
    warmup = max(1, round(settings.steps * settings.warmup_fraction))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / (settings.steps - warmup)
    return settings.learning_rate * (1 + math.cos(math.pi * done)) / 2


def try_one_step(
    recipe: Recipe | None, corpus: Corpus, settings: TrainSettings, device: torch.device
) -> None:
    """Train a throw-away model for one step, so that a recipe that cannot run raises here.

    Kernels and caches are also set up here, so that the first timed step is as fast as the others.
    """
    model, optimizer = _build(settings, device)
    input, target = next(_batches(corpus, settings))
    _step(model, optimizer, recipe, input.to(device), target.to(device), settings)


def train_run(
    name: str,
    recipe: Recipe | None,
    corpus: Corpus,
    settings: TrainSettings,
    device: torch.device,
    *,
    on_step: Callable[[float], None],
) -> RunResult:
    """Train a fresh model and evaluate it; the seed fixes weights, batches and so the result.

    Args:
        name: the name of the run in the result.
        recipe: the recipe of the linear layers of the blocks; None trains in bf16.
        corpus: text to train on, and text held out.
        settings: sizes, schedule and seed.
        device: the device to train on.
        on_step: called after each step with its training loss.
    """
    model, optimizer = _build(settings, device)
    held = _held_bytes(model, recipe, corpus, settings, device)
    losses: list[float] = []
    seconds: list[float] = []
    for step, (input, target) in enumerate(_batches(corpus, settings)):
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * learning_rate_at(step, settings)
        start = time.perf_counter()
        loss = _step(model, optimizer, recipe, input.to(device), target.to(device), settings)
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
        on_step(loss)
        if not math.isfinite(loss):
            break
    heldout_loss, text = math.nan, b""
    if math.isfinite(losses[-1]):
        heldout_loss = _heldout_loss(model, recipe, corpus, settings, device)
        text = _sample(model, recipe, corpus, settings, device)
    tokens = settings.batch_size * settings.model.context
    return RunResult(
        recipe=name,
        heldout_loss=heldout_loss,
        tokens_per_s=tokens / statistics.median(seconds),
        steps=len(losses),
        losses=tuple(losses),
        held_bytes=held,
        sample=text,
    )


def _held_bytes(
    model: ByteGPT,
    recipe: Recipe | None,
    corpus: Corpus,
    settings: TrainSettings,
    device: torch.device,
) -> int:
    """Return the bytes that one forward keeps for backward, each storage counted once.

    It runs on a copy of the model, so that the state of the run stays as it is.
    """
    model = copy.deepcopy(model)
    of_parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    input, target = (part.to(device) for part in next(_batches(corpus, settings)))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.random.fork_rng(devices=[]), hooks, _precision(recipe, device):
        loss = _loss(model, input, target)
    total = sum(held.values())
    del loss  # until here all saved tensors are alive, so that no address is used twice
    return total


@contextmanager
def _precision(recipe: Recipe | None, device: torch.device) -> Iterator[None]:
    """Compute in bf16 from float32 parameters, the library's layers under ``recipe`` if given."""
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        te.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        yield


def _build(settings: TrainSettings, device: torch.device) -> tuple[ByteGPT, torch.optim.Optimizer]:
    """Return a fresh model and its optimizer; the seed also fixes stochastic rounding."""
    torch.manual_seed(settings.seed)
    model = ByteGPT(settings.model, seed=settings.seed, device=device)
    groups = [
        {
            "params": [parameter],
            "weight_decay": settings.weight_decay if parameter.dim() > 1 else 0.0,
            "factor": settings.outer_factor if name.startswith(("embeddings", "head")) else 1.0,
        }
        for name, parameter in model.named_parameters()
    ]
    return model, torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))


def _batches(corpus: Corpus, settings: TrainSettings) -> Iterator[tuple[Tensor, Tensor]]:
    return training_batches(
        corpus.train,
        context=settings.model.context,
        batch_size=settings.batch_size,
        steps=settings.steps,
        seed=settings.seed,
    )


def _loss(model: ByteGPT, input: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy, float32; ``input`` and ``target`` ``[batch, context]``."""
    logits = model(input)
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _step(
    model: ByteGPT,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe | None,
    input: Tensor,
    target: Tensor,
    settings: TrainSettings,
) -> float:
    """Take one step and return its loss; a loss that is not finite changes nothing."""
    with _precision(recipe, input.device):
        loss = _loss(model, input, target)
    value = loss.item()
    if math.isfinite(value):
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return value


@torch.no_grad()
def _heldout_loss(
    model: ByteGPT,
    recipe: Recipe | None,
    corpus: Corpus,
    settings: TrainSettings,
    device: torch.device,
) -> float:
    """Return the loss on the held-out windows, computed in the precision of the run."""
    inputs, targets = heldout_windows(
        corpus.heldout,
        context=settings.model.context,
        num_windows=settings.num_heldout_windows,
    )
    total = 0.0
    batches = zip(
        torch.split(inputs, settings.batch_size),
        torch.split(targets, settings.batch_size),
        strict=True,
    )
    for input, target in batches:
        with _precision(recipe, device):
            loss = _loss(model, input.to(device), target.to(device))
        total += loss.item() * len(input)
    return total / len(inputs)


def prompt_of(corpus: Corpus, settings: TrainSettings) -> Tensor:
    """Return the beginning that samples continue: ``[context / 2]`` uint8, of the held-out text."""
    return corpus.heldout[: settings.model.context // 2]


def _sample(
    model: ByteGPT,
    recipe: Recipe | None,
    corpus: Corpus,
    settings: TrainSettings,
    device: torch.device,
) -> bytes:
    """Return what the trained model draws after the prompt, in the precision of the run."""
    if not settings.sample_bytes:
        return b""
    with _precision(recipe, device):
        return continue_text(
            model,
            settings.model,
            prompt_of(corpus, settings),
            settings.sample_bytes,
            seed=settings.seed,
        )
