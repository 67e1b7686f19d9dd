"""A training step of a whole decoder, fp8core's layers and converted models beside their peers.

    python -m tests.benchmarks.model_gpu --shape 8B --sequence 2048 8192
    python -m tests.benchmarks.model_gpu --shape 70B-pair --only "torchao tensorwise" "te delayed"
    python -m tests.benchmarks.model_gpu --cpu --shape tiny --tokens 32 --sequence 16  # a trial run

A step is embedding, layers (RMSNorm, causal attention with rotary positions, SwiGLU, no biases),
norm, head, cross entropy, backward and AdamW; parameters, gradients and averages are bfloat16.
All contestants take their steps in one process, in short turns in a shuffled order.

torch, torchao    torch's modules, query, key and value in one linear, gate and up in another;
                  torchao's are compiled, a layer at a time
te, fp8core       TransformerLayers under a recipe
hf, liger         LlamaForCausalLM of transformers; liger: with Liger's kernels, but its loss
converted         the same, changed by ``fp8core.convert``
compiled          a layer at a time by torch.compile
best              fp8core's best offer, with its own optimizer and cross entropy: TransformerLayers
                  under delayed scaling; the same with weights stored in FP8 and float32 masters; a
                  converted model under current scaling, compiled

Embedding, head, loss and optimizer are torch's, the same for all but the last kind. Contestants
share one memory: each parameter is a view of a tensor that all of them train, and so are the two
averages of its optimizer; gradients live within a step. ``best stored`` alone has its own. A
contestant enters by ``--losses`` steps on Python's sources, from the initial weights and averages
of 0, which are its losses; in turns tokens are random, and weights go from hand to hand.

ms      a step among others like it: median, least and most of the turns
MFU     model FLOP/s over the device's dense rate in bfloat16, which FP8 may exceed: 6 for each
        weight of a product and token, and causal attention
peak    what a step adds to the memory that is held between steps, MiB
held    what a contestant holds between steps beyond the shared memory, MiB; the first of a library
        has its workspaces
host    enqueueing a step on an idle device, ms

A contestant that is not installed or fails is a row with its error.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tests.benchmarks.layers_gpu.transformer import attention_by_cudnn, use_cudnn_of_torch
from tests.benchmarks.measuring.contest import MIB, Contest
from tests.benchmarks.measuring.device import CUDA, HOST, versions
from tests.benchmarks.measuring.turns import FEWEST_TURNS, Stop
from tests.benchmarks.model_gpu.contestants import CONTESTANTS, LOSSES, Bench, Contestant
from tests.benchmarks.model_gpu.report import Figures, losses_table, table
from tests.benchmarks.model_gpu.weights import SHAPES, Shared

__all__ = ["main"]

SEED = 0
BATCHES = 8
FEWEST_LOSSES = 3
"""The first step compiles, and delayed scales and algorithms are settled after the third."""
GRAPHS = 64
"""The most graphs of one function: each compiled contestant needs some of the same layer's."""


class Entrant(NamedTuple):
    """A contestant, the losses of its first steps, and MiB of a step and between steps."""

    contestant: Contestant
    losses: list[float]
    peak_mib: float
    held_mib: float


def text_batches(count: int, shape: tuple[int, int], device: torch.device) -> list[torch.Tensor]:
    """Return bytes of Python's standard library, ``count`` batches of rows of tokens."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    starts = torch.randint(len(text) - shape[1], (count, shape[0], 1))
    return list(text[starts + torch.arange(shape[1])].long().to(device))


def entered(bench: Bench, contest: Contest, name: str, texts: Sequence[torch.Tensor]) -> Entrant:
    """Make a contestant, take the losses of a step on each of ``texts``, and measure its memory."""
    bench.shared.reset()
    before = contest.allocated()
    contestant = CONTESTANTS[name](bench)
    losses = [contestant.step(text) for text in texts]
    between = contest.allocated()
    peak = contest.peak_mib(lambda: contestant.step(texts[0]), between)
    return Entrant(contestant, [loss.item() for loss in losses], peak, (between - before) / MIB)


def turns_of(
    bench: Bench, contest: Contest, entrants: dict[str, Entrant], count: int, tokens: int
) -> dict[str, dict[str, list[float]]]:
    """Return the times of steps on random tokens, by measure and contestant, us.

    Whatever raises in a turn leaves the contest.
    """
    rows = (tokens // bench.sequence, bench.sequence + 1)
    draw = functools.partial(torch.randint, bench.shared.shape.vocabulary, rows)
    batches = [draw(device=bench.device.torch_device) for _ in range(BATCHES)]
    bench.shared.reset()

    def step_of(contestant: Contestant) -> Callable[[], object]:
        source = itertools.cycle(batches)
        return lambda: contestant.step(next(source))

    calls = {
        name: contest.guarded(name, step_of(entrant.contestant))
        for name, entrant in entrants.items()
    }
    stop = Stop(0.0, fewest=count)
    return {measure: contest.take(measure, calls, stop) for measure in ("eager", "host")}


def measure(bench: Bench, names: Sequence[str], tokens: int, *, turns: int, losses: int) -> str:
    """Return the tables of the contestants of ``names``."""
    contest = Contest(bench.device)
    rows = (tokens // bench.sequence, bench.sequence + 1)
    torch.manual_seed(SEED)
    texts = text_batches(max(losses, FEWEST_LOSSES), rows, bench.device.torch_device)
    entrants = {}
    for name in names:
        print(f"  {name}", flush=True)
        entrant = contest.enter(name, functools.partial(entered, bench, contest, name, texts))
        if entrant is not None:
            entrants[name] = entrant
    times = turns_of(bench, contest, entrants, turns, tokens)
    entrants = {name: own for name, own in entrants.items() if name not in contest.refused}
    figures = {
        name: Figures(times["eager"][name], times["host"][name], own.peak_mib, own.held_mib)
        for name, own in entrants.items()
    }
    flops = bench.shared.shape.flops(tokens, bench.sequence)
    lines = table(figures, contest.refused, tokens, flops, versions()["device"])
    if entrants:
        lines += ["", *losses_table({name: own.losses for name, own in entrants.items()})]
    return "\n".join([*lines, f"chip: {contest.chip.summary()}"])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="8B")
    parser.add_argument("--layers", type=int, help="4; of 70B-pair 2")
    parser.add_argument("--sequence", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--loss", choices=list(LOSSES), default="compiled")
    parser.add_argument("--turns", type=int, default=FEWEST_TURNS)
    parser.add_argument("--losses", type=int, default=30)
    parser.add_argument("--cpu", action="store_true", help="try it out; the figures mean nothing")
    args = parser.parse_args(arguments)
    for sequence in args.sequence:
        if args.tokens % sequence:
            parser.error(f"--tokens {args.tokens} are no sequences of {sequence}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables of each length of sequences."""
    args = parsed(arguments)
    use_cudnn_of_torch(os.environ)
    device, shape = HOST if args.cpu else CUDA, SHAPES[args.shape]
    shape = shape._replace(layers=args.layers or shape.layers)
    print(versions("transformer_engine", "torchao", "transformers"), shape, flush=True)
    shared = Shared(shape, device.torch_device)
    names = [name for name in CONTESTANTS if name in args.only]
    for sequence in args.sequence:
        bench = Bench(shared, device, sequence, LOSSES[args.loss]())
        title = f"{args.shape}, {shape.layers} layers, {args.tokens} tokens in rows of {sequence}"
        print(title, flush=True)
        with (
            attention_by_cudnn(device.torch_device),
            # At the limit a function runs in eager mode, with no more than a line in a log.
            torch._dynamo.config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True),
        ):
            text = measure(bench, names, args.tokens, turns=args.turns, losses=args.losses)
        print(f"\n{title}, loss {args.loss}:\n\n{text}\n", flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
