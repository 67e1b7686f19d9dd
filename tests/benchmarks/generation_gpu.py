"""Generation, token by token: layers of fp8core with a cache, against Hugging Face's in bfloat16.

    python -m tests.benchmarks.generation_gpu [--batch 1 4 64 --layers 8 --tokens 512]
    python -m tests.benchmarks.generation_gpu --batch 1 --profile "own bf16"
    python -m tests.benchmarks.generation_gpu --room 7552 --only "hf dynamic" "own bf16"

Decoder layers of Llama 8B: hidden 4096, feed-forward 14336, 32 heads in 8 groups, RMSNorm, SwiGLU,
rotary embedding, bfloat16. Each contestant takes a prompt and generates on: ``own bf16`` and ``own
stored`` are TransformerLayers, the second with weights stored in FP8 under current scaling; ``hf
dynamic`` and ``hf static`` are LlamaDecoderLayers of transformers with either of its caches, in
eager mode; ``converted`` are those with the dynamic cache, converted, within ``frozen_weights``.
Without transformers a layer written here on torch's SDPA and a cache of full length, ``torch``,
takes the place of all three that need it.

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
import contextlib
import cProfile
import importlib.util
import inspect
import pstats
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

import fp8core
from fp8core import recipe
from fp8core_backends.cuda.attention_plans import Graphs
from tests.benchmarks.measuring.device import CUDA, HOST, Device, versions
from tests.benchmarks.measuring.turns import orders

HEAD = 128
STEPS_A_TURN = 16
SHOWN = 25
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


class Contestant(Protocol):
    """A stack of layers that generates: each call takes the next tokens ``[b, s, hidden]``."""

    def begin(self, batch: int) -> None:
        """Forget the generation before."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Own:
    """TransformerLayers, in high precision or with weights stored as a recipe has them."""

    def __init__(
        self, sizes: Sizes, device: torch.device, chosen: Any = None, layout: str = "bshd"
    ) -> None:
        self.sizes, self.device, self.layout, self.recipe = sizes, device, layout, chosen
        is_stored = chosen is not None
        with fp8core.quantized_model_init(enabled=is_stored, recipe=chosen):
            self.layers = [
                fp8core.TransformerLayer(
                    sizes.hidden,
                    sizes.ffn,
                    sizes.heads,
                    num_gqa_groups=sizes.groups,
                    kv_channels=sizes.head,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    normalization="RMSNorm",
                    activation="swiglu",
                    bias=False,
                    fuse_qkv_params=True,
                    qkv_weight_interleaved=False,
                    attn_input_format=layout,
                    layer_number=at + 1,
                    params_dtype=torch.bfloat16,
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
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama as llama

        self.sizes, self.device, self.is_static = sizes, device, is_static
        self.config = LlamaConfig(
            vocab_size=32,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.ffn,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.groups,
            head_dim=sizes.head,
            max_position_embeddings=sizes.capacity,
            attn_implementation="sdpa",
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


class TorchLayer(torch.nn.Module):
    """A decoder layer on torch's operators, its cache at full length."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        columns = (sizes.heads + 2 * sizes.groups) * sizes.head
        self.norm1 = torch.nn.RMSNorm(sizes.hidden)
        self.qkv = torch.nn.Linear(sizes.hidden, columns, bias=False)
        self.proj = torch.nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)
        self.norm2 = torch.nn.RMSNorm(sizes.hidden)
        self.gate_up = torch.nn.Linear(sizes.hidden, 2 * sizes.ffn, bias=False)
        self.down = torch.nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, caches: torch.Tensor, done: int, angles: torch.Tensor
    ) -> torch.Tensor:
        """Return the output; ``caches [2, b, groups, capacity, head]``, ``angles [2, s, head]``."""
        sizes, end = self.sizes, done + x.shape[1]
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, sizes.head)).transpose(1, 2)
        q, k, v = heads.split([sizes.heads, sizes.groups, sizes.groups], 1)
        q, k = _rotated(q, angles), _rotated(k, angles)
        caches[0, :, :, done:end], caches[1, :, :, done:end] = k, v
        y = torch.nn.functional.scaled_dot_product_attention(
            *(q, caches[0, :, :, :end], caches[1, :, :, :end]),
            is_causal=x.shape[1] > 1,
            enable_gqa=True,
        )
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        total: torch.Tensor = x + self.down(torch.nn.functional.silu(gate) * up)
        return total


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * angles[0] + torch.cat((-second, first), -1) * angles[1]


class Torch:
    """Decoder layers on torch's operators."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        with torch.device(device):
            layers = [TorchLayer(sizes) for _ in range(sizes.layers)]
        self.layers = torch.nn.ModuleList(layers).to(torch.bfloat16).eval()
        angles = fp8core.RotaryPositionEmbedding(sizes.head)(sizes.capacity).flatten(1).to(device)
        self.angles = torch.stack((angles.cos(), angles.sin())).to(torch.bfloat16)

    def begin(self, batch: int) -> None:
        """Make a cache."""
        sizes, self.done = self.sizes, 0
        shape = (sizes.layers, 2, batch, sizes.groups, sizes.capacity, sizes.head)
        self.caches = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the next tokens."""
        angles = self.angles[:, self.done : self.done + x.shape[1]]
        for layer, caches in zip(self.layers, self.caches, strict=True):
            x = layer(x, caches, self.done, angles)
        self.done += x.shape[1]
        return x


def has_transformers() -> bool:
    """Whether Hugging Face's layers can be made."""
    return importlib.util.find_spec("transformers") is not None


def makers(sizes: Sizes, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return what makes each contestant."""

    def converted(make: Callable[[], Any]) -> Any:
        made = make()
        fp8core.convert(made.layers, recipe.Float8CurrentScaling())
        return made

    if has_transformers():

        def dynamic() -> HuggingFace:
            return HuggingFace(sizes, device)

        theirs: dict[str, Callable[[], Any]] = {
            "hf dynamic": dynamic,
            "hf static": lambda: HuggingFace(sizes, device, is_static=True),
        }
        plain: Callable[[], Any] = dynamic
    else:
        plain = lambda: Torch(sizes, device)  # noqa: E731  as the others
        theirs = {"torch": plain}
    return {
        **theirs,
        "own bf16": lambda: Own(sizes, device),
        "own stored": lambda: Own(sizes, device, recipe.Float8CurrentScaling()),
        "converted": lambda: converted(plain),
    }


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


@contextlib.contextmanager
def frozen(contestants: dict[str, Any]) -> Iterator[None]:
    """Keep the quantized weights of what was converted."""
    with contextlib.ExitStack() as stack:
        if "converted" in contestants:
            stack.enter_context(fp8core.frozen_weights(contestants["converted"].layers))
        yield


def profile(bench: Bench, contestant: Any, batch: int, steps: int) -> str:
    """Return where steps of a contestant spend the host's time, and the device's kernels."""
    token, synchronize = bench.tokens(batch, 1), bench.device.clock.synchronize
    contestant.begin(batch)
    contestant(bench.tokens(batch, bench.sizes.prompt))
    for _ in range(4):
        contestant(token)
    synchronize()
    host = cProfile.Profile()
    host.enable()
    for _ in range(steps):
        contestant(token)
    host.disable()
    synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device is CUDA:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as traced:
        for _ in range(steps):
            contestant(token)
        synchronize()
    stats = pstats.Stats(host)
    print(f"{steps} steps; functions of the host:")
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(SHOWN)
    column = "self_cuda_time_total" if bench.device is CUDA else "self_cpu_time_total"
    table: str = traced.key_averages().table(sort_by=column, row_limit=SHOWN)
    return table


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in zip(Sizes._fields, Sizes(), strict=True):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 64])
    parser.add_argument("--only", nargs="*", help="contestants; all of them if left out")
    parser.add_argument("--serving", type=int, default=256, help="steps of the serving mix")
    parser.add_argument("--profile", metavar="NAME")
    parser.add_argument("--cpu", action="store_true", help="try it out; the figures mean nothing")
    asked = parser.parse_args()
    sizes = Sizes(*(getattr(asked, name) for name in Sizes._fields))
    device = HOST if asked.cpu else CUDA
    bench, where = Bench(sizes, device), device.torch_device
    torch.manual_seed(0)
    print(versions(), sizes, sep="\n")
    print("Hugging Face's layers" if has_transformers() else "no transformers: torch's operators")
    all_makers = makers(sizes, where)
    if asked.profile is not None:
        made = {asked.profile: all_makers[asked.profile]()}
        with torch.no_grad(), frozen(made):
            for batch in asked.batch:
                print(f"{asked.profile}, batch {batch}")
                print(profile(bench, made[asked.profile], batch, min(32, sizes.tokens // 4)))
        return
    chosen = [name for name in all_makers if asked.only is None or name in asked.only]
    contestants = {name: all_makers[name]() for name in chosen}
    with torch.no_grad(), frozen(contestants):
        for batch in asked.batch:
            print(f"batch {batch}, {sizes.prompt} tokens before, {sizes.tokens} generated:")
            times = bench.generate(contestants, batch)
            theirs = [name for name in times if name.startswith(("hf", "torch"))]
            medians = [statistics.median(times[name].steps) for name in theirs]
            base = min(medians, default=None)
            for name, one in times.items():
                print(" ", one.line(name, sizes.layers, base), flush=True)
    del contestants
    serving = {
        name: Own(sizes, where, chosen_recipe, layout="thd")
        for name, chosen_recipe in (
            ("own bf16", None),
            ("own stored", recipe.Float8CurrentScaling()),
        )
        if name in chosen
    }
    if asked.serving and serving:
        print(f"serving mix, up to {SERVED} sequences, the last three quarters of {asked.serving}:")
        with torch.no_grad():
            found = bench.serve(serving, serving_schedule(sizes, asked.serving))
        for name, one in found.items():
            print(" ", one.line(name, sizes.layers), flush=True)


if __name__ == "__main__":
    main()
