"""A generation that grows, token by token: layers of fp8core with a cache, against Hugging Face's.

    python -m tests.benchmarks.growing_gpu [--batch 1 4 64 --layers 8 --tokens 512]
    python -m tests.benchmarks.growing_gpu --batch 1 --profile "own bf16"
    python -m tests.benchmarks.growing_gpu --room 7552 --only "hf dynamic" "own bf16"

Decoder layers of Llama 8B: hidden 4096, feed-forward 14336, 32 heads in 8 groups, RMSNorm, SwiGLU,
rotary embedding, bfloat16. Each contestant takes a prompt and generates on: ``own bf16`` and ``own
stored`` are TransformerLayers, the second with weights stored in FP8 under current scaling; ``hf
dynamic`` and ``hf static`` are LlamaDecoderLayers of transformers with either of its caches, in
eager mode; ``quantized`` are those with the dynamic cache, stored by ``fp8core.quantize_``. Without
transformers the three that need it are left out. A first generation of each is not timed: torch's
cuDNN attention builds a plan for each length that nobody had before, which whoever came first paid.

A step is one token of each sequence, through all layers, from an idle device until the device is
idle again, as a loop that samples waits for it; ``host`` is the part in which the host enqueues it.
Contestants take turns of a few steps in a shuffled order. ``--room`` is what caches of full length
have beyond the tokens of a generation: it says what attention pays for capacity. ``plans`` are
those of cuDNN's attention that fp8core built after the first token. Behind them the serving mix: in
packed layout (thd) sequences of random lengths come with a prompt and go, own layers alone.

``--profile NAME`` prints where a step of a contestant spends its time instead: functions of the
host, and kernels of the device. ``--cpu`` tries the program out; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import fp8core
from fp8core import recipe
from fp8core_backends.cuda.attention_plans import Graphs
from tests.benchmarks.measuring.contest import Contest
from tests.benchmarks.measuring.device import CUDA, HOST, Device, versions
from tests.benchmarks.measuring.libraries import decoder_layer, llama_config
from tests.benchmarks.measuring.profiles import kernels_of, print_functions, print_kernels
from tests.benchmarks.measuring.turns import orders

HEAD = 128
STEPS_A_TURN = 16
SERVED = 16  # sequences at once in the serving mix


class Sizes(NamedTuple):
    """Of the layers and of a generation; ``head`` is the size of a head."""

    layers: int = 8
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head: int = HEAD
    prompt: int = 128
    tokens: int = 512
    room: int = 0  # of a cache beyond these, which fp8core's attention is handed as well

    @property
    def capacity(self) -> int:
        """The tokens that a cache has room for, of a sequence."""
        return self.prompt + self.tokens + self.room


class Own:
    """TransformerLayers, in high precision or with weights stored as a recipe has them."""

    def __init__(
        self, sizes: Sizes, device: torch.device, chosen: Any = None, layout: str = "bshd"
    ) -> None:
        self.sizes, self.device, self.layout, self.recipe = sizes, device, layout, chosen
        is_stored = chosen is not None
        with fp8core.quantized_model_init(enabled=is_stored, recipe=chosen):
            self.layers = [
                decoder_layer(
                    "fp8core",
                    sizes,
                    kv_channels=sizes.head,
                    attn_input_format=layout,
                    layer_number=at + 1,
                    device=device,
                ).eval()
                for at in range(sizes.layers)
            ]
        self.angles = fp8core.RotaryPositionEmbedding(sizes.head)(sizes.capacity).to(device)

    def begin(self, batch: int) -> None:
        """Make a cache for ``batch`` sequences."""
        sizes = self.sizes
        self.cache = fp8core.InferenceParams(
            *(batch, sizes.capacity, sizes.groups, sizes.head, torch.bfloat16),
            qkv_format=self.layout,
            device=self.device,
        )

    def serve(self, counts: dict[int, int], x: torch.Tensor) -> torch.Tensor:
        """Bring ``counts`` tokens of each sequence; ``x`` in the layout."""
        self.cache.pre_step(OrderedDict(counts))
        with fp8core.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            for layer in self.layers:
                x = layer(
                    x,
                    self_attn_mask_type="padding_causal",
                    inference_params=self.cache,
                    rotary_pos_emb=self.angles,
                )
        return x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the same number of tokens of each sequence."""
        return self.serve(dict.fromkeys(range(x.shape[0]), x.shape[1]), x)


class HuggingFace:
    """LlamaDecoderLayers of transformers, with a cache that grows or one of full length."""

    def __init__(self, sizes: Sizes, device: torch.device, *, is_static: bool = False) -> None:
        from transformers.models.llama import modeling_llama as llama

        self.sizes, self.device, self.is_static = sizes, device, is_static
        self.config = llama_config(
            sizes, vocab_size=32, head_dim=sizes.head, max_position_embeddings=sizes.capacity
        )
        with torch.device(device):
            layers = [llama.LlamaDecoderLayer(self.config, at) for at in range(sizes.layers)]
            self.rotary = llama.LlamaRotaryEmbedding(self.config)
        self.layers = torch.nn.ModuleList(layers).to(torch.bfloat16).eval()
        named = inspect.signature(llama.LlamaDecoderLayer.forward).parameters
        self.name = "cache" if "cache" in named else "past_key_values"

    def begin(self, batch: int) -> None:
        """Make a cache."""
        from transformers import DynamicCache, StaticCache

        self.done, config = 0, self.config
        self.cache: Any = DynamicCache(config=config)
        if self.is_static:
            self.cache = StaticCache(config=config, max_cache_len=self.sizes.capacity)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the next tokens."""
        length = x.shape[1]
        at = torch.arange(self.done, self.done + length, device=self.device)
        mask = None
        if self.is_static:
            keys = torch.arange(self.sizes.capacity, device=self.device)
            mask = (keys <= at[:, None])[None, None]
        positions = at[None]
        given = {
            self.name: self.cache,
            "attention_mask": mask,
            "position_ids": positions,
            "position_embeddings": self.rotary(x, position_ids=positions),
            "use_cache": True,
        }
        for layer in self.layers:
            x = layer(x, **given)
        self.done += length
        return x


def quantized(sizes: Sizes, device: torch.device) -> HuggingFace:
    """Return Hugging Face's layers as fp8core stores them for inference."""
    contestant = HuggingFace(sizes, device)
    fp8core.quantize_(contestant.layers, recipe.Float8CurrentScaling())
    return contestant


Maker = Callable[..., Any]
MAKERS: dict[str, Maker] = {
    "hf dynamic": HuggingFace,
    "hf static": functools.partial(HuggingFace, is_static=True),
    "own bf16": Own,
    "own stored": functools.partial(Own, chosen=recipe.Float8CurrentScaling()),
    "quantized": quantized,
}


def contestants_of(
    names: Sequence[str], sizes: Sizes, device: Device
) -> dict[str, HuggingFace | Own]:
    """Return the contestants of ``names``; without transformers, those that need none."""
    contest, where = Contest(device), device.torch_device
    entered = {
        name: contest.enter(name, functools.partial(MAKERS[name], sizes, where)) for name in names
    }
    return {name: contestant for name, contestant in entered.items() if contestant is not None}


class Times(NamedTuple):
    """Of one contestant: ms of each step and of the host's part of it, and the plans built after
    the first token."""

    steps: list[float]
    host: list[float]
    plans: list[int]

    def line(self, name: str, layers: int, base: float | None = None) -> str:
        """Return what is printed; ``base`` is the median that this one's is compared with."""
        middle, slowest = statistics.median(self.steps), max(self.steps)
        text = (
            f"{name:12} step {middle:8.3f} ms ({middle / layers:6.3f} a layer), slowest "
            f"{slowest:8.3f} ({slowest / middle:5.2f} x), host {statistics.median(self.host):8.3f}"
            f", plans {sum(self.plans)}"
        )
        return text if base is None else f"{text}, {middle / base:5.3f} x the fastest of others"


class Bench:
    """Takes the times of steps on a device."""

    def __init__(self, sizes: Sizes, device: Device) -> None:
        self.sizes, self.device = sizes, device

    def tokens(self, *shape: int) -> torch.Tensor:
        """Return random tokens ``[*shape, hidden]``."""
        where = self.device.torch_device
        return torch.randn(*shape, self.sizes.hidden, device=where).to(torch.bfloat16)

    def time(self, times: Times, step: Callable[[], object]) -> None:
        """Add one step to ``times``."""
        clock, built = self.device.clock, Graphs.built
        clock.synchronize()
        start = clock.now()
        step()
        enqueued = clock.now()
        clock.synchronize()
        times.steps.append((clock.now() - start) * 1e3)
        times.host.append((enqueued - start) * 1e3)
        times.plans.append(Graphs.built - built)

    def generate(self, contestants: dict[str, Any], batch: int) -> dict[str, Times]:
        """Return the times of the tokens behind the first, in shuffled turns."""
        prompt, token = self.tokens(batch, self.sizes.prompt), self.tokens(batch, 1)
        for contestant in contestants.values():
            contestant.begin(batch)
            contestant(prompt)
            for _ in range(self.sizes.tokens):
                contestant(token)
        for contestant in contestants.values():
            contestant.begin(batch)
            contestant(prompt)
            contestant(token)
        times = {name: Times([], [], []) for name in contestants}
        shuffled, left = orders(list(contestants)), self.sizes.tokens - 1
        while left:
            count = min(STEPS_A_TURN, left)
            for name in next(shuffled):
                for _ in range(count):
                    self.time(times[name], lambda name=name: contestants[name](token))
            left -= count
        return times

    def serve(self, contestants: dict[str, Own], schedule: Sequence[dict[int, int]]) -> Any:
        """Return the times of the steps of ``schedule`` behind the first quarter, in turns."""
        inputs = [self.tokens(sum(counts.values())) for counts in schedule]
        times = {name: Times([], [], []) for name in contestants}
        for contestant in contestants.values():
            contestant.begin(SERVED)
        shuffled = orders(list(contestants))
        for begin in range(0, len(schedule), STEPS_A_TURN):
            for name in next(shuffled):
                for counts, x in list(zip(schedule, inputs, strict=True))[begin:][:STEPS_A_TURN]:
                    self.time(times[name], lambda n=name, c=counts, x=x: contestants[n].serve(c, x))
        first = len(schedule) // 4
        return {name: Times(*(part[first:] for part in one)) for name, one in times.items()}


def serving_schedule(sizes: Sizes, steps: int, seed: int = 0) -> list[dict[int, int]]:
    """Return the new tokens of each sequence, step by step: up to :data:`SERVED` at once, with
    prompts and lengths at random."""
    source, schedule = random.Random(seed), []
    left: dict[int, int] = {}
    fresh = 0
    for _ in range(steps):
        counts = dict.fromkeys((name for name, more in left.items() if more), 1)
        left = {name: left[name] - 1 for name in counts}
        if len(counts) < SERVED and (not counts or source.random() < 0.3):
            counts[fresh] = source.randint(1, sizes.prompt)
            left[fresh] = source.randint(1, sizes.tokens // 4)
            fresh += 1
        schedule.append(counts)
    return schedule


def profile(bench: Bench, name: str, contestant: Any, batch: int, steps: int) -> None:
    """Print where steps of a contestant spend the host's time, and the device's kernels."""
    token = bench.tokens(batch, 1)
    contestant.begin(batch)
    contestant(bench.tokens(batch, bench.sizes.prompt))
    print_functions(lambda: contestant(token), 2, steps)
    print_kernels(name, kernels_of(lambda: contestant(token), bench.device))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in zip(Sizes._fields, Sizes(), strict=True):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 64])
    parser.add_argument("--only", nargs="*", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--serving", type=int, default=256, help="steps of the serving mix")
    parser.add_argument("--profile", nargs=1, choices=list(MAKERS))
    parser.add_argument("--cpu", action="store_true", help="try it out; the figures mean nothing")
    asked = parser.parse_args()
    sizes = Sizes(*(getattr(asked, name) for name in Sizes._fields))
    device = HOST if asked.cpu else CUDA
    bench, where = Bench(sizes, device), device.torch_device
    torch.manual_seed(0)
    print(versions("transformers"), sizes, sep="\n")
    contestants = contestants_of(asked.profile or asked.only, sizes, device)
    if asked.profile is not None:
        with torch.no_grad():
            for batch, (name, one) in itertools.product(asked.batch, contestants.items()):
                print(f"{name}, batch {batch}")
                profile(bench, name, one, batch, min(32, sizes.tokens // 4))
        return
    with torch.no_grad():
        for batch in asked.batch:
            print(f"batch {batch}, {sizes.prompt} tokens before, {sizes.tokens} generated:")
            times = bench.generate(contestants, batch)
            theirs = [name for name in times if name.startswith("hf")]
            medians = [statistics.median(times[name].steps) for name in theirs]
            base = min(medians, default=None)
            for name, one in times.items():
                print(" ", one.line(name, sizes.layers, base), flush=True)
    names = [name for name in ("own bf16", "own stored") if name in contestants]
    contestants.clear()
    serving = {name: MAKERS[name](sizes, where, layout="thd") for name in names}
    if asked.serving and serving:
        print(f"serving mix, up to {SERVED} sequences, the last three quarters of {asked.serving}:")
        with torch.no_grad():
            found = bench.serve(serving, serving_schedule(sizes, asked.serving))
        for name, one in found.items():
            print(" ", one.line(name, sizes.layers), flush=True)


if __name__ == "__main__":
    main()
