"""Time the casts with byte scales on a GPU, beside a copy and the casts with float32 scales.

    python -m tests.benchmarks.casts_gpu [--sizes 8192x4096 8192x8192]

A CUDA graph holds 8 casts of 4 tensors in turn, which together exceed the L2 cache; the contestants
take turns, 9 rounds. GB/s are ideal bytes, each byte of x read once and each of codes and scales
written once, over the median; NVFP4 has to read x twice. ``copy`` reads and writes x, with torch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from fp8core import recipe
from fp8core.backend_api import QuantizeDesc
from fp8core.dispatch import plugins
from fp8core.recipe.plan import LayerRole

CASTS, TENSORS, ROUNDS, REPLAYS = 8, 4, 9, 4
DEVICE = torch.device("cuda", 0)


def contestants() -> dict[str, QuantizeDesc]:
    """Return the casts of a layer's tensors, by recipe and tensor."""
    found = {}
    for name, tensors in (
        ("block", ("input",)),
        ("mxfp8", ("input",)),
        ("nvfp4", ("input", "weight", "grad_output")),
    ):
        plan = recipe.by_name(name).plan(LayerRole("linear"), torch.bfloat16)
        for tensor in tensors:
            desc = QuantizeDesc(torch.bfloat16, *getattr(plan, tensor))
            found[f"{name} {tensor}"] = desc
            if name != "block":
                for what, half in zip(("rowwise", "columnwise"), desc.halves(), strict=True):
                    found[f"{name} {tensor} {what}"] = half
    return found


def captured(run: Callable[[torch.Tensor], object], xs: list[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """Return a graph of CASTS calls."""
    for x in xs:
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CASTS):
            run(xs[call % len(xs)])
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of one of the graph's calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (CASTS * REPLAYS)


def written(operands: object) -> int:
    """Return the bytes of codes and scales."""
    parts = [part for one in operands if one is not None for part in one if part is not None]
    return sum(part.numel() * part.element_size() for part in parts)


def main() -> None:
    """Print a line for each size and contestant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=["8192x4096", "8192x8192"])
    args = parser.parse_args()
    registry = plugins.load()
    backend = registry.instance(registry.backends["cuda"])
    print(torch.cuda.get_device_name(), torch.__version__)
    for size in args.sizes:
        rows, cols = map(int, size.split("x"))
        xs = [torch.randn(rows, cols, device=DEVICE).bfloat16() for _ in range(TENSORS)]
        source = xs[0].numel() * 2
        graphs = {"copy": captured(torch.clone, xs)}
        ideal = {"copy": 2 * source}
        for name, desc in contestants().items():
            bound = backend.bind(desc, DEVICE)
            halves = (desc.rowwise, desc.columnwise)
            is_random = any(half is not None and half.stochastic for half in halves)
            given = {"rng": torch.tensor([7, 9])} if is_random else {}
            graphs[name] = captured(lambda x, bound=bound, given=given: bound(x, **given), xs)
            ideal[name] = source + written(bound(xs[0], **given))
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                times[name].append(microseconds(graph))
        copy = ideal["copy"] / statistics.median(times["copy"])
        for name, own in times.items():
            middle = statistics.median(own)
            rate = ideal[name] / middle
            print(
                f"{size} {name:28} {middle:7.1f} us ({min(own):.1f}-{max(own):.1f}) "
                f"{rate / 1e3:6.0f} GB/s {rate / copy:5.2f} of copy"
            )


if __name__ == "__main__":
    main()
