"""A small GPT over bytes: its text, its network, and its training in bf16 or under a recipe.

The matrix products of its block take the precision of the active recipe. Embeddings, attention
itself, the last norm and the output head are never quantized, as is usual in practice.
"""

from __future__ import annotations

import copy
import math
import statistics
import sysconfig
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8core as te
from fp8core.errors import OperandError
from fp8core.inspection.on_meta import autograd_bytes
from fp8core.recipe import Recipe

SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
MAX_STDLIB_BYTES = 4_000_000
HELDOUT_EVERY = 10  # one file in this many is held out; of one text, the last 1 / HELDOUT_EVERY
EMBEDDED_BYTES = 3  # the embedding of a position is the sum of those of so many last bytes
ROTARY_BASE = 1000.0  # the longest wavelength over 2 pi, in bytes: far beyond the context
OUTER_FACTOR = 3.0  # embeddings and head, which have no quantized GEMM, learn so much faster
TEMPERATURE = 0.7  # logits of drawn text are divided by it: below 1, likely bytes are likelier


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that are equal for all runs, so that only the precision differs.

    ``context`` is in bytes, one token each. With a short warmup runs that differ by rounding alone
    end further apart. ``threads`` is 1, as threads of so small a model wait for each other.
    """

    steps: int = 120
    batch_size: int = 8
    learning_rate: float = 1.5e-3
    warmup_fraction: float = 0.5
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    num_heldout_windows: int = 256
    threads: int = 1
    seed: int = 0
    sample_bytes: int = 0
    d_model: int = 128
    num_heads: int = 4
    context: int = 64


class Corpus(NamedTuple):
    """A text in two disjoint parts, ``train [bytes]`` and ``heldout [bytes]``, uint8 on the CPU."""

    train: Tensor
    heldout: Tensor
    source: str


def split_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return training and held-out files: every ``HELDOUT_EVERY``-th file is held out."""
    train = [path for index, path in enumerate(paths, start=1) if index % HELDOUT_EVERY]
    return train, list(paths[HELDOUT_EVERY - 1 :: HELDOUT_EVERY])


def minimum_part(context: int) -> int:
    """Return the fewest bytes of a part: 8 windows and their targets."""
    return 8 * context + 1


def load_stdlib(context: int) -> Corpus:
    """Read the sources of Python's standard library without its tests, modules before packages.

    Raises:
        OperandError: there is too little source for ``context``; some distributions ship none.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(folder) for path in folder.rglob("*.py")]
    paths = [path for path in paths if not SKIPPED_FOLDERS.intersection(path.parts[:-1])]
    paths.sort(key=lambda path: (len(path.parts) > 1, path.as_posix()))
    ends = accumulate((folder / path).stat().st_size for path in paths)
    paths = [path for path, end in zip(paths, ends, strict=True) if end <= MAX_STDLIB_BYTES]
    files = split_files(paths)
    train, heldout = (b"".join((folder / path).read_bytes() for path in part) for part in files)
    if min(len(train), len(heldout)) < (least := minimum_part(context)):
        raise OperandError(
            f"the Python standard library in {folder} has {len(train)} bytes of source to train on "
            f"and {len(heldout)} held out; each needs {least} at least.\n"
            f"  Train on another text: --text FILE."
        )
    source = f"Python's standard library, {len(paths)} files, {len(files[1])} of them held out"
    return Corpus(_as_tensor(train), _as_tensor(heldout), source)


def load_text(path: Path, context: int) -> Corpus:
    """Read one file, of any kind; its last tenth is held out.

    Raises:
        OperandError: the file cannot be read, or is too small for windows of ``context`` bytes.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OperandError(
            f"--text {path}: cannot read it: {error.strerror or error}.\n"
            f"  Give a file of text, or leave --text out to use Python's standard library."
        ) from None
    if len(data) < (least := HELDOUT_EVERY * minimum_part(context)):
        raise OperandError(
            f"--text {path}: it has {len(data)} bytes, and at least {least} are needed, "
            f"since its last tenth is held out."
        )
    train, heldout = _as_tensor(data).tensor_split([len(data) - len(data) // HELDOUT_EVERY])
    return Corpus(train, heldout, f"{path}, its last tenth held out")


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class ByteGPT(nn.Module):
    """A GPT over bytes of one block; its weights follow from the seed alone, on any device.

    Embeddings are normal with deviation 1, matrices ``1 / sqrt(d_model)``, those that write into
    the residual stream divided by ``sqrt(2)`` (Radford et al. 2019, GPT-2, sec. 2.3); biases are 0
    and norms the identity. The head is 0, so that the first loss is exactly ln 256.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__()
        width, heads = settings.d_model, settings.num_heads
        self.embeddings = nn.ModuleList(nn.Embedding(256, width) for _ in range(EMBEDDED_BYTES))
        self.block = te.TransformerLayer(
            width,
            4 * width,
            heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            attn_input_format="bshd",
        )
        self.rotary = te.RotaryPositionEmbedding(width // heads, rotary_base=ROTARY_BASE)
        self.norm = nn.LayerNorm(width)
        self.head = te.Linear(width, 256, bias=False)
        te.prepare(self)
        self.to(device)
        self._fill(1 / math.sqrt(width), torch.Generator().manual_seed(settings.seed))

    @torch.no_grad()
    def _fill(self, deviation: float, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if "layer_norm_" in name or name.startswith("norm."):
                continue
            if name.startswith("embeddings"):
                scale = 1.0
            elif name.endswith(("proj.weight", "fc2_weight")):
                scale = deviation / math.sqrt(2)
            else:
                scale = 0.0 if name.endswith("bias") or name == "head.weight" else deviation
            if scale:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * scale)
            else:
                parameter.zero_()

    def forward(self, tokens: Tensor, cache: te.InferenceParams | None = None) -> Tensor:
        """Return logits ``[batch, context, 256]`` of the byte after each of ``tokens``, int64.

        Positions before the first count as byte 0. With a ``cache``, whose step is begun, only the
        positions that it does not hold yet are computed and returned.
        """
        context = tokens.shape[1]
        stream = self.embeddings[0](tokens)
        for distance, embedding in enumerate(self.embeddings[1:], start=1):
            stream = stream + embedding(functional.pad(tokens, (distance, 0))[:, :context])
        if cache is not None:
            stream = stream[:, int(cache.get_seqlens_pre_step()[0]) :]
        stream = self.block(stream, rotary_pos_emb=self.rotary(context), inference_params=cache)
        with te.autocast(enabled=False):
            logits: Tensor = self.head(self.norm(stream))
        return logits


@torch.no_grad()
def continue_text(model: ByteGPT, settings: Settings, prompt: Tensor, num_bytes: int) -> bytes:
    """Return what ``model`` draws after ``prompt [bytes]`` uint8, in the caller's precision.

    Keys and values are cached. When they fill the context, the last half of it begins anew.
    """
    device = next(model.parameters()).device
    is_cast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if is_cast else torch.float32
    context, heads = settings.context, settings.num_heads
    cache = te.InferenceParams(1, context, heads, settings.d_model // heads, dtype)
    generator = torch.Generator().manual_seed(settings.seed)
    text = prompt.to(torch.int64)[-context:]
    end = len(text) + num_bytes
    start, num_cached = 0, 0
    while len(text) < end:
        if len(text) - start > context:
            start, num_cached = len(text) - context // 2, 0
            cache.reset()
        window = text[start:]
        cache.pre_step(OrderedDict({0: len(window) - num_cached}))
        logits = model(window[None].to(device), cache)[0, -1]
        num_cached = len(window)
        odds = torch.softmax(logits.float().cpu() / TEMPERATURE, dim=-1)
        text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)])
    return bytes(text[end - num_bytes :].tolist())


class RunResult(NamedTuple):
    """The result of one run, of which a loss that is not finite is the end; in nats per byte.

    ``tokens_per_s`` is the speed of the median step, and ``held_bytes`` the memory of what a step
    keeps from forward to backward, without the parameters.
    """

    recipe: str
    heldout_loss: float
    tokens_per_s: float
    losses: tuple[float, ...]
    held_bytes: int
    sample: bytes

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite, in training or on held-out text."""
        return not math.isfinite(self.heldout_loss)


def learning_rate_at(step: int, settings: Settings) -> float:
    """Return the rate of a step, counted from 0: linear warmup, then half a cosine to 0."""
    warmup = max(1, round(settings.steps * settings.warmup_fraction))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / (settings.steps - warmup)
    return settings.learning_rate * (1 + math.cos(math.pi * done)) / 2


class Training(NamedTuple):
    """The text, settings and device that all runs share; a recipe of None stands for bf16."""

    corpus: Corpus
    settings: Settings
    device: torch.device

    @property
    def prompt(self) -> Tensor:
        """The beginning of the held-out text that samples continue: half a context, uint8."""
        return self.corpus.heldout[: self.settings.context // 2]

    def run(
        self, name: str, recipe: Recipe | None, on_step: Callable[[float], None] = lambda loss: None
    ) -> RunResult:
        """Train a fresh model and evaluate it; ``on_step`` is called with each training loss.

        The seed fixes weights, batches and stochastic rounding, and so the result.
        """
        settings = self.settings
        torch.manual_seed(settings.seed)
        model = ByteGPT(settings, self.device)
        optimizer = self._optimizer(model)
        copied = copy.deepcopy(model)  # whose state may change
        with torch.random.fork_rng(devices=[]):
            first = next(self._batches())
            held = autograd_bytes(lambda: self._loss(copied, recipe, first), copied.parameters())
        losses: list[float] = []
        seconds: list[float] = []
        for step, windows in enumerate(self._batches()):
            for group in optimizer.param_groups:
                group["lr"] = group["factor"] * learning_rate_at(step, settings)
            start = time.perf_counter()
            loss = self._loss(model, recipe, windows)
            losses.append(loss.item())
            if math.isfinite(losses[-1]):
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            on_step(losses[-1])
            if not math.isfinite(losses[-1]):
                break
        heldout, sample = math.nan, b""
        if math.isfinite(losses[-1]):
            heldout = self._heldout_loss(model, recipe)
            with self._precision(recipe):
                sample = continue_text(model, settings, self.prompt, settings.sample_bytes)
        speed = settings.batch_size * settings.context / statistics.median(seconds)
        return RunResult(name, heldout, speed, tuple(losses), held, sample)

    def _optimizer(self, model: ByteGPT) -> torch.optim.Optimizer:
        groups = [
            {
                "params": [parameter],
                "weight_decay": self.settings.weight_decay if parameter.dim() > 1 else 0.0,
                "factor": OUTER_FACTOR if name.startswith(("embeddings", "head")) else 1.0,
            }
            for name, parameter in model.named_parameters()
        ]
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=(0.9, 0.95))

    def _batches(self) -> Iterator[Tensor]:
        """Yield random windows of the training text for each step, the same in every run."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        size, end = (self.settings.batch_size,), len(self.corpus.train) - self.settings.context
        for _ in range(self.settings.steps):
            yield self._windows(self.corpus.train, torch.randint(end, size, generator=generator))

    def _windows(self, text: Tensor, starts: Tensor) -> Tensor:
        """Return ``[starts, context + 1]`` int64: inputs, and as targets one byte further."""
        return text[starts[:, None] + torch.arange(self.settings.context + 1)].long()

    @contextmanager
    def _precision(self, recipe: Recipe | None) -> Iterator[None]:
        """Compute in bf16 from float32 parameters, the library's layers under ``recipe``."""
        bf16 = torch.autocast(self.device.type, dtype=torch.bfloat16)
        with bf16, te.autocast(enabled=recipe is not None, recipe=recipe):
            yield

    def _loss(self, model: ByteGPT, recipe: Recipe | None, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy, float32, in the precision of the run."""
        windows = windows.to(self.device)
        with self._precision(recipe):
            logits = model(windows[:, :-1].contiguous()).flatten(0, 1)
            return functional.cross_entropy(logits.float(), windows[:, 1:].flatten())

    @torch.no_grad()
    def _heldout_loss(self, model: ByteGPT, recipe: Recipe | None) -> float:
        """Return the loss on windows that are spread evenly and do not overlap."""
        context, text = self.settings.context, self.corpus.heldout
        fitting = (len(text) - 1) // context
        count = min(self.settings.num_heldout_windows, fitting)
        windows = self._windows(text, torch.arange(count) * fitting // count * context)
        batches = torch.split(windows, self.settings.batch_size)
        return sum(self._loss(model, recipe, part).item() * len(part) for part in batches) / count
