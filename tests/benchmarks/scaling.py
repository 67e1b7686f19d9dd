"""A step of an 8B model on many GPUs, computed from measured parts: ``python -m
tests.benchmarks.scaling``.

Nothing is measured here. Times of layers, of the optimizer and of collectives are those of
docs/measured.md, sizes follow from the model, links are options such as ``--net-gbs 45``. First the
same sum for what two GPUs were measured to do, then the steps of machines that were not.

A step of a rank: each layer computes, gathers its weights twice, and adds up its gradients; what of
the three is not hidden takes time, and so do FSDP's copies. Then the head, the loss and Adam.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.benchmarks.measuring import markdown

__all__ = ["CHECKS", "LAYOUTS", "Links", "Model", "Step", "check_rows", "rows", "step_of"]

BF16, CODES = 2.0, 1.0
"""Bytes an element."""
RECIPES = ("bf16", "delayed", "current", "block")
WEIGHTS = {"bf16": BF16, "delayed": CODES, "current": CODES, "block": CODES + 4 / 128**2}
"""Bytes that a gather moves for an element of a weight."""


@dataclass(frozen=True, slots=True)
class Links:
    """What connects GPUs, and what one of them does beside a collective."""

    host_gbs: float = 230.0
    """Out of a GPU within a host, GB/s: all-gathers of NCCL over two H200, 227 to 243 (of 16,384 x
    8,192 codes behind no product; a run of which docs/measured.md has no record)."""
    net_gbs: float = 50.0
    """Out of a GPU to other hosts, GB/s: one ConnectX-7 of 400 Gb/s a GPU, its limit (DGX H100
    User Guide, network modules); nobody reaches it."""
    gpus_a_host: int = 8
    base_us: float = 8.4
    host_step_us: float = 3.4
    net_step_us: float = 14.0
    """Latencies of a collective, and of each step of its ring within a host and between hosts (NCCL
    2.28.7, src/graph/tuning.cc, protocol Simple; a tree's step between hosts has the same)."""
    copy_tbs: float = 4.1
    """A copy in the memory of a GPU (docs/measured.md, layers)."""
    share: float = 0.89
    """What products lose of the time that a collective moves bytes at the rate of a host: a product
    of 444 us takes 585 beside a gather, and 603 in front of one (docs/measured.md)."""
    waiting_share: float = 0.25
    """The same of the time that it waits for the network. Not measured: NCCL's kernels occupy up to
    32 of 132 multiprocessors."""

    def ring(self, num_bytes: float, ranks: int) -> Moving:
        """Return a gather, or a sum by parts, of the ``num_bytes`` of all ``ranks``."""
        if ranks == 1:
            return Moving(0.0, 0.0)
        hosts = math.ceil(ranks / self.gpus_a_host)
        between = hosts if hosts > 1 else 0
        latency_us = self.base_us + between * self.net_step_us
        latency_us += (ranks - 1 - between) * self.host_step_us
        moving_us = num_bytes * (1 - 1 / ranks) / self.host_gbs / 1e3
        net_us = num_bytes * (1 - 1 / hosts) / (self.gpus_a_host * self.net_gbs) / 1e3
        return self._lost(latency_us + max(moving_us, net_us), moving_us)

    def all_reduce(self, num_bytes: float, hosts: int) -> Moving:
        """Return a sum of ``num_bytes`` by one GPU of each host, by the faster of ring and tree."""
        if hosts == 1:
            return Moving(0.0, 0.0)
        steps = 2 * min(hosts - 1, math.ceil(math.log2(hosts)))
        net_us = 2 * num_bytes * (1 - 1 / hosts) / self.net_gbs / 1e3
        return self._lost(self.base_us + steps * self.net_step_us + net_us, 0.0)

    def _lost(self, us: float, moving_us: float) -> Moving:
        return Moving(us, self.share * moving_us + self.waiting_share * (us - moving_us))

    def copied_us(self, num_bytes: float) -> float:
        """Return the time of reading and writing ``num_bytes``."""
        return 2 * num_bytes / self.copy_tbs / 1e6


class Moving(NamedTuple):
    """A collective: its time, and how much of it products beside it lose."""

    us: float
    lost_us: float


@dataclass(frozen=True, slots=True)
class Model:
    """A stack of layers on one GPU, as it was measured: microseconds by recipe.

    ``weights`` are the elements of a layer, ``layer_us`` its forward and backward, ``rest_us`` what
    a step does besides, ``rest_weights`` the elements that are gathered in bfloat16 around the
    layers. ``adam_ps`` is a step of Adam, picoseconds a parameter of a rank.
    """

    layers: int
    weights: int
    layer_us: Mapping[str, float]
    rest_us: float = 0.0
    rest_weights: int = 0
    adam_ps: float = 3226e6 / 504e6
    """FusedAdam with masters in remainders (docs/measured.md: 3,226 us for 504 M)."""

    @property
    def parameters(self) -> int:
        """The elements of all parameters."""
        return self.layers * self.weights + self.rest_weights


class Layout(NamedTuple):
    """``shards`` ranks hold the parts of a model, ``replicas`` such groups the same ones."""

    shards: int
    replicas: int = 1


class Step(NamedTuple):
    """The parts of a step of a rank, microseconds."""

    computed: float
    exposed: float
    copied: float
    optimizer: float

    @property
    def us(self) -> float:
        """The whole step."""
        return sum(self)


def _exposed(compute_us: float, moving: Sequence[Moving]) -> float:
    """Return how much longer than its products a part of a step takes."""
    lost_us = sum(each.lost_us for each in moving)
    return max(lost_us, sum(each.us for each in moving) - compute_us)


def step_of(model: Model, recipe: str, layout: Layout, links: Links) -> Step:
    """Return the step of a rank under ``fully_shard``, in low precision with ``gather_quantized``.

    A layer's weights are gathered in forward and in backward, gradients are added up in bfloat16.
    """
    exposed = copied = 0.0
    kinds = [(model.layers, model.weights, WEIGHTS[recipe], model.layer_us[recipe])]
    if model.rest_weights:
        kinds.append((1, model.rest_weights, BF16, 0.0))
    for count, elements, weight_bytes, layer_us in kinds:
        gathered, summed = elements * weight_bytes, elements * BF16
        gather = links.ring(gathered, layout.shards)
        scatter = links.ring(summed, layout.shards)
        reduce = links.all_reduce(summed / layout.shards, layout.replicas)
        is_layer = layer_us > 0  # what is around the layers stays gathered until backward
        forward = _exposed(layer_us / 3, [gather])
        backward = _exposed(layer_us * 2 / 3, [gather, scatter, reduce] if is_layer else [scatter])
        exposed += count * (forward + backward)
        if layout.shards > 1:
            parts = 1 + 1 / layout.shards
            times = 2 if is_layer else 1
            copied += count * links.copied_us((times * gathered + summed) * parts)
    computed = model.layers * model.layer_us[recipe] + model.rest_us
    optimizer = model.parameters / layout.shards * model.adam_ps / 1e6
    return Step(computed, exposed, copied, optimizer)


# What two GPUs did: four LayerNormMLPs of 8B shapes, 4,096 tokens a rank, AdamW(foreach=True) of
# bfloat16 parameters, which reads and writes 40 bytes of each. docs/measured.md, "Layers over two
# GPUs"; a layer has half the time of 8,192 tokens there.
_HIDDEN, _FFN = 4096, 14336
_FOREACH_PS = 40 / 4.1
MLPS = Model(
    4,
    3 * _HIDDEN * _FFN,
    {"bf16": 13325 / 2, "current": 7839 / 2, "block": 9585 / 2},
    adam_ps=_FOREACH_PS,
)
CHECKS: Mapping[str, float] = {"bf16": 38102, "current": 29041, "block": 31100}
"""The measured step, us; of bf16 that of torch's layers, compiled."""

TOKENS = 8192
"""Of a rank: two sequences of 4,096."""
_VOCABULARY = 128256
_HEAD_US = 6 * TOKENS * _HIDDEN * _VOCABULARY / 719e6
"""Three products in bfloat16 at 719 TFLOP/s, those of 16,384 x 4,096 x 14,336, without
a record."""
_LOSS_US = TOKENS / 4096 * 819
LLAMA_8B = Model(
    32,
    _HIDDEN * (_HIDDEN + 2 * 1024 + _HIDDEN) + 3 * _HIDDEN * _FFN,
    {"bf16": 18468, "delayed": 11805, "current": 12492, "block": 14398},
    rest_us=_HEAD_US + _LOSS_US,
    rest_weights=2 * _VOCABULARY * _HIDDEN,
)
LAYOUTS: Mapping[str, Layout] = {
    "8, sharded": Layout(8),
    "64, sharded": Layout(64),
    "64, 8 shards in 8 replicas": Layout(8, 8),
    "1,024, sharded": Layout(1024),
    "1,024, 8 shards in 128 replicas": Layout(8, 128),
    "1,024, 64 shards in 16 replicas": Layout(64, 16),
}

CHECK_COLUMNS = ("two GPUs", "computed ms", "measured ms", "computed over measured")
COLUMNS = ("GPUs, layout", *(f"{recipe}: ms, exposed, tokens/s" for recipe in RECIPES))
COLUMNS += ("current over bf16",)


def check_rows(links: Links) -> list[tuple[str, ...]]:
    """Return a row for each step that two GPUs were measured to take."""
    found = []
    for recipe, measured in CHECKS.items():
        us = step_of(MLPS, recipe, Layout(2), links).us
        cells = (f"{us / 1e3:.1f}", f"{measured / 1e3:.1f}", f"{us / measured:.2f}")
        found.append((recipe, *cells))
    return found


def rows(links: Links) -> list[tuple[str, ...]]:
    """Return a row for each layout: by recipe the step and what of it is exposed, in ms, and the
    tokens a second of a GPU."""
    found = []
    for name, layout in LAYOUTS.items():
        steps = {recipe: step_of(LLAMA_8B, recipe, layout, links) for recipe in RECIPES}
        cells = [
            f"{step.us / 1e3:.0f}, {step.exposed / 1e3:.0f}, {TOKENS / step.us * 1e6:,.0f}"
            for step in steps.values()
        ]
        found.append((name, *cells, f"{steps['current'].us / steps['bf16'].us:.2f}"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in dataclasses.fields(Links):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    links = Links(**vars(parser.parse_args(arguments)))
    print(*markdown.head(CHECK_COLUMNS), *map(markdown.line, check_rows(links)), sep="\n")
    print()
    print(*markdown.head(COLUMNS), *map(markdown.line, rows(links)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
