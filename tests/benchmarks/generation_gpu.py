"""Prefill and decode with Llama 8B's layers: bf16, torchao, Transformer Engine and fp8core.

    python -m tests.benchmarks.generation_gpu [--kinds decode --batch 1 16 --before 128]
    python -m tests.benchmarks.generation_gpu --only "hf bf16" "hf rowwise" --ways eager graph

8 layers of hidden 4096, feed-forward 14336, 32 heads in 8 groups of size 128, an embedding and a
head of 32768 tokens, bfloat16. ``hf`` are LlamaForCausalLM of transformers with a static cache: as
it is, quantized by ``fp8core.quantize_`` under a recipe (``wo``: weights alone), or by torchao's
``quantize_``. ``own`` and ``te`` are TransformerLayers of fp8core and of Transformer Engine with
their ``InferenceParams``, stored ones made without gradients; behind a comma, how these keep keys
and values. Heads stay in bfloat16.

A prefill is a forward of ``batch x tokens`` without a cache, whose last tokens have logits. A
decode step is one token of each sequence behind ``before`` others. ``eager`` and ``graph`` are
device time of a step among others like it; ``host`` is the time to enqueue it; ``compiled`` that of
``torch.compile(mode="reduce-overhead")``, which is given up after ``--limit`` seconds. In a graph
of ``own`` and ``te`` all steps have the length of the first. Contestants of a cell take turns in a
shuffled order. Tables have medians, tokens a second, the weights' GiB, and the ratio to ``hf bf16``
in the same way, with its 95 % interval.

``--cpu`` tries the program out; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import os
import signal
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import fp8core
from fp8core import recipe
from tests.benchmarks.layers_gpu.transformer import use_cudnn_of_torch
from tests.benchmarks.measuring.contest import Contest, Unavailable
from tests.benchmarks.measuring.device import CUDA, HOST, Device, versions
from tests.benchmarks.measuring.intervals import median_interval, ratios
from tests.benchmarks.measuring.libraries import (
    decoder_layer,
    layers_of,
    llama_config,
    recipe_of,
    under_recipe,
)
from tests.benchmarks.measuring.markdown import head, line
from tests.benchmarks.measuring.turns import Stop

BF16 = torch.bfloat16
ROOM = 512
"""Tokens that a cache of own layers has room for behind those before; then it is filled again."""
AT_ONCE = 2**16
"""Tokens that a cache is filled with at once."""
BASE = "hf bf16"
PAGE = 64
CACHES: dict[str, dict[str, Any]] = {
    "pages": {"is_paged": True, "page_size": PAGE},
    "cache in FP8": {"storage_format": "e4m3"},
    "pages in FP8": {"is_paged": True, "page_size": PAGE, "storage_format": "e4m3"},
}
"""Arguments of caches that keep keys and values in another way than in rows of bfloat16."""
WAYS = ("eager", "graph", "host", "compiled")


class Sizes(NamedTuple):
    """Of the decoder."""

    layers: int = 8
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head: int = 128
    vocabulary: int = 32768


class Cell(NamedTuple):
    """A forward of ``batch x tokens`` behind ``before`` tokens; a prefill where these are 0."""

    batch: int
    tokens: int
    before: int = 0

    def __str__(self) -> str:
        behind = f"decode, batch {self.batch}, {self.before} tokens before"
        return behind if self.before else f"prefill, {self.batch} x {self.tokens}"


PREFILLS = (Cell(1, 2048), Cell(4, 2048), Cell(1, 8192))


class Step(NamedTuple):
    """A step of a cell: ``call`` computes, behind ``advance``, which a graph leaves out."""

    call: Callable[[], Any]
    advance: Callable[[], object] = lambda: None

    def eager(self) -> Any:
        self.advance()
        return self.call()


def rewinding(step: Callable[[], Any], rewind: Callable[[], object]) -> Callable[[], Any]:
    """Return ``step``, before which ``rewind`` is called after as many steps as there is room."""
    done = itertools.count()

    def run() -> Any:
        if next(done) % ROOM == ROOM - 1:
            rewind()
        return step()

    return run


class HuggingFace:
    """A LlamaForCausalLM of transformers with a static cache, changed by ``change`` in place."""

    def __init__(
        self, sizes: Sizes, device: torch.device, change: Callable[[Any], object] | None = None
    ) -> None:
        from transformers import LlamaForCausalLM

        self.device = device
        self.config = llama_config(
            sizes,
            vocab_size=sizes.vocabulary,
            head_dim=sizes.head,
            max_position_embeddings=16384,
        )
        with device:
            self.model = LlamaForCausalLM(self.config).to(BF16).eval()
        if change is not None:
            change(self.model)
        named = inspect.signature(type(self.model.model).forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"

    def step(self, cell: Cell) -> Step:
        """Return the step of a cell."""
        from transformers import StaticCache

        tokens = torch.zeros(cell.batch, cell.tokens, dtype=torch.long, device=self.device)
        if not cell.before:
            return Step(lambda: self.model(tokens, use_cache=False, logits_to_keep=1).logits)
        capacity = cell.before + 8
        cache = StaticCache(config=self.config, max_cache_len=capacity)
        keys = torch.arange(capacity, device=self.device)
        options = {
            self.cache_name: cache,
            "attention_mask": (keys <= cell.before)[None, None, None].expand(cell.batch, 1, 1, -1),
            "position_ids": torch.full((1, 1), cell.before, device=self.device),
            "use_cache": True,
        }

        def call() -> Any:
            logits = self.model(tokens, **options).logits
            torch._foreach_sub_(lengths, cell.tokens)  # back to the same place, in graphs too
            return logits

        lengths: list[torch.Tensor] = []
        self.model(tokens, **options)  # which gives the cache its memory
        lengths += [layer.cumulative_length.fill_(cell.before) for layer in cache.layers]
        return Step(call)


class Own:
    """TransformerLayers of fp8core or of Transformer Engine between an embedding and a head, with
    weights stored as recipe ``stored`` has them, or in bfloat16; ``cache`` are more arguments of
    the cache of keys and values."""

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        library: str = "fp8core",
        stored: str = "bf16",
        cache: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.cache = cache
        te, self.library, self.stored, self.device = layers_of(library), library, stored, device
        self.sizes, self.te, is_stored = sizes, te, stored != "bf16"
        with te.quantized_model_init(
            enabled=is_stored, recipe=recipe_of(library, stored) if is_stored else None
        ):
            self.layers = torch.nn.ModuleList(
                decoder_layer(
                    library,
                    sizes,
                    kv_channels=sizes.head,
                    attn_input_format="bshd",
                    self_attn_mask_type="padding_causal",
                    layer_number=at + 1,
                    device=device,
                )
                for at in range(sizes.layers)
            ).eval()
        with device:
            embedding = torch.nn.Embedding(sizes.vocabulary, sizes.hidden)
            end = torch.nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
            parts = {"embedding": embedding, "norm": torch.nn.RMSNorm(sizes.hidden), "head": end}
            self.model = torch.nn.ModuleDict({**parts, "layers": self.layers}).to(BF16)

    def step(self, cell: Cell) -> Step:
        """Return the step of a cell."""
        tokens = torch.zeros(cell.batch, cell.tokens, dtype=torch.long, device=self.device)
        capacity = cell.before + (ROOM + 8 if cell.before else cell.tokens)
        capacity += -capacity % PAGE
        options: dict[str, Any] = {"self_attn_mask_type": "causal"}
        angles = self.te.RotaryPositionEmbedding(self.sizes.head)(capacity).to(self.device)
        if not cell.before:
            return Step(partial(self._logits, tokens, rotary_pos_emb=angles, **options))
        cache = self.te.InferenceParams(
            *(cell.batch, capacity, self.sizes.groups, self.sizes.head, BF16), **self.cache
        )
        options = {"self_attn_mask_type": "padding_causal", "inference_params": cache}

        def bring(count: int) -> None:
            cache.pre_step(OrderedDict.fromkeys(range(cell.batch), count))

        def rewind() -> None:
            cache.reset()
            left = cell.before
            while left:
                count = min(left, AT_ONCE // cell.batch)
                bring(count)
                self._logits(tokens.expand(-1, count), rotary_pos_emb=angles, **options)
                left -= count

        for number in range(len(self.layers)):
            cache.allocate_memory(number + 1)
        rewind()
        call = partial(self._logits, tokens, rotary_pos_emb=angles, **options)
        return Step(call, rewinding(partial(bring, 1), rewind))

    def _logits(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, **options)
            return x

        run = under_recipe(self.library, self.stored, forward)
        x = run(self.model["embedding"](tokens))
        logits: torch.Tensor = self.model["head"](self.model["norm"](x[:, -1:]))
        return logits


def by_torchao(model: Any, *, weights_alone: bool) -> None:
    """Quantize the linears of ``model`` by torchao, but for the head."""
    from torchao import quantization as ao

    kinds = ao.Float8WeightOnlyConfig, ao.Float8DynamicActivationFloat8WeightConfig
    config = kinds[0]() if weights_alone else kinds[1](granularity=ao.PerRow())

    def is_chosen(module: torch.nn.Module, path: str) -> bool:
        return isinstance(module, torch.nn.Linear) and "lm_head" not in path

    ao.quantize_(model, config, filter_fn=is_chosen)


def stored_by(chosen: Any) -> Callable[..., HuggingFace]:
    """Return what makes Hugging Face's model, stored by a recipe of fp8core."""
    return partial(HuggingFace, change=lambda model: fp8core.quantize_(model, chosen))


MAKERS: dict[str, Callable[..., Any]] = {
    BASE: HuggingFace,
    **{f"hf {name}": stored_by(name) for name in ("current", "rowwise", "block")},
    "hf wo rowwise": stored_by(recipe.WeightOnly("rowwise")),
    "torchao rowwise": partial(HuggingFace, change=partial(by_torchao, weights_alone=False)),
    "torchao wo": partial(HuggingFace, change=partial(by_torchao, weights_alone=True)),
    **{
        f"own {name}": partial(Own, stored=name)
        for name in ("bf16", "current", "delayed", "rowwise")
    },
    **{f"own bf16, {name}": partial(Own, cache=cache) for name, cache in CACHES.items()},
    **{
        f"te {name}": partial(Own, library="te", stored=name)
        for name in ("bf16", "current", "delayed")
    },
}
PEERS = ("torchao", "te")


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise Unavailable in the block after ``seconds``."""

    def give_up(*_: object) -> None:
        raise Unavailable(f"took more than {seconds} s to compile")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Bench:
    """Takes the times of cells."""

    def __init__(self, sizes: Sizes, device: Device, stop: Stop, limit: int) -> None:
        self.device, self.stop, self.limit = device, stop, limit
        self.sizes, self.contest = sizes, Contest(device)
        self.gib: dict[str, float] = {}

    def enter(self, name: str) -> Any:
        """Return the contestant ``name``, None if it does not run."""
        with torch.no_grad():
            make = partial(MAKERS[name], self.sizes, self.device.torch_device)
            contestant = self.contest.enter(name, make)
        if contestant is not None:
            parameters = contestant.model.parameters()
            self.gib[name] = sum(bytes_of(parameter) for parameter in parameters) / 2**30
        return contestant

    def measure(self, cell: Cell, contestants: dict[str, Any], ways: list[str]) -> None:
        """Measure a cell, and print its table."""
        steps = {
            name: self.contest.enter(f"{name}, {cell}", partial(contestant.step, cell))
            for name, contestant in contestants.items()
        }
        taking = {name: step for name, step in steps.items() if step is not None}
        print(f"{cell}:", flush=True)
        us: dict[str, dict[str, list[float]]] = {}
        for way in ways:
            calls = {}
            for name, step in taking.items():
                label = f"{name}, {cell}, {way}"
                call = self.contest.enter(label, partial(self._call, way, step))
                if call is not None:
                    calls[name] = self.contest.guarded(label, call)
            measure = {"compiled": "graph"}.get(way, way)
            us[way] = self.contest.take(measure, calls, self.stop) if calls else {}
        print("\n".join(self._table(cell, us)), flush=True)

    def _call(self, way: str, step: Step) -> Callable[[], object]:
        """Return the call of a step that is timed."""
        if way in ("eager", "host"):
            step.eager()
            return step.eager
        if way == "graph":
            step.advance()
            return self.contest.capture([step.call], 1)
        compiled = torch.compile(step.call, mode="reduce-overhead", dynamic=False)

        def run() -> Any:
            step.advance()
            torch.compiler.cudagraph_mark_step_begin()
            return compiled()

        with limited(self.limit):
            for _ in range(3):
                run()
        return run

    def _table(self, cell: Cell, us: dict[str, dict[str, list[float]]]) -> Iterator[str]:
        """Yield the lines of a cell's table."""
        names = dict.fromkeys(name for times in us.values() for name in times)
        titles = [f"{way} ms | tokens/s | to {BASE}" if way != "host" else "host ms" for way in us]
        yield from head(["contestant", "GiB", *" | ".join(titles).split(" | ")])
        for name in names:
            row = [name, f"{self.gib[name]:.2f}"]
            for way, times in us.items():
                row += self._entries(cell, way, name, times)
            yield line(row)

    def _entries(self, cell: Cell, way: str, name: str, times: dict[str, list[float]]) -> list[str]:
        """Return what a table says of a contestant and a way to run it."""
        if not times.get(name):
            return ["-"] * (1 if way == "host" else 3)
        ms = statistics.median(times[name]) / 1e3
        if way == "host":
            return [f"{ms:.3f}"]
        ratio = "-"
        if times.get(BASE):
            interval = median_interval(ratios(times[name], times[BASE]))
            ratio = f"{interval.median:.3f} ({interval.low:.3f} to {interval.high:.3f})"
        return [f"{ms:.3f}", f"{cell.batch * cell.tokens / ms * 1e3:,.0f}", ratio]


def bytes_of(parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter: of a quantized one, those of what it consists of."""
    if isinstance(parameter, fp8core.QuantizedTensor) or not hasattr(
        parameter, "__tensor_flatten__"
    ):
        return parameter.nbytes
    names, _ = parameter.__tensor_flatten__()
    return sum(bytes_of(getattr(parameter, name)) for name in names)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, size in zip(Sizes._fields, Sizes(), strict=True):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--kinds", nargs="+", choices=("prefill", "decode"), default=["decode"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="of decode")
    parser.add_argument("--before", type=int, nargs="+", default=[128], help="tokens, of decode")
    parser.add_argument("--only", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:3]))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way, in each cell")
    parser.add_argument("--limit", type=int, default=120, help="seconds of a compilation")
    parser.add_argument("--cpu", action="store_true", help="try it out; the figures mean nothing")
    chosen = parser.parse_args()
    sizes = Sizes(*(getattr(chosen, name) for name in Sizes._fields))
    device = HOST if chosen.cpu else CUDA
    use_cudnn_of_torch(os.environ)
    cells = list(PREFILLS) if "prefill" in chosen.kinds else []
    if chosen.cpu:
        cells = [cell._replace(tokens=16) for cell in cells[:1]]
    if "decode" in chosen.kinds:
        decodes = itertools.product(chosen.before, chosen.batch)
        cells += [Cell(batch, 1, before) for before, batch in decodes]
    bench = Bench(sizes, device, Stop(chosen.seconds, fewest=3), chosen.limit)
    print(versions("transformers", "torchao", "transformer_engine"), sizes, sep="\n")
    entered = {name: bench.enter(name) for name in chosen.only}
    contestants = {name: entrant for name, entrant in entered.items() if entrant is not None}
    with torch.no_grad():
        for cell in cells:
            bench.measure(cell, contestants, chosen.ways)
    print(bench.contest.conditions())


if __name__ == "__main__":
    main()
