"""Attention alone, forward, and forward and backward, beside torch's cuDNN path, on one GPU.

    python -m tests.benchmarks.attention_gpu --out results --seconds 120
    python -m tests.benchmarks.attention_gpu --case 8B --contestant "torch cudnn" "fp8core bf16"
    python -m tests.benchmarks.attention_gpu --merge results

Contestants share one set of tensors in one process and take turns in short slices, in a shuffled
order, as measuring/turns.py says: captured in CUDA graphs (``graph``: device time, ``graph
forward``: of forward alone), eagerly (``eager``), and to enqueue a step (``host``, of the tiny size
alone). The bar is torch's operator for cuDNN's attention; ratios are within turns. fp8core's
recipes quantize in forward, with backward in bfloat16. A contestant that is not installed or raises
is named, and the others go on. Each result is compared with float32 first.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8core
from fp8core import recipe
from tests.benchmarks.measuring import records, turns
from tests.benchmarks.measuring.command import parser_of
from tests.benchmarks.measuring.contest import Contest
from tests.benchmarks.measuring.device import CUDA, Device
from tests.benchmarks.measuring.intervals import median_interval, ratios
from tests.benchmarks.measuring.libraries import layers_of
from tests.benchmarks.measuring.markdown import head, line

MEASURES = ("graph", "graph forward", "eager", "host")
MOST_ERROR = 0.08
"""Relative Frobenius error of a right result: e4m3 leaves 24 dB."""
CUDNN, OURS = "torch cudnn", "fp8core bf16"

Step = Callable[[], object]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """Attention of ``batch`` sequences of ``length`` tokens, in bfloat16 and ``sbhd``.

    ``is_causal``: with a causal mask, as long as keys are, in which half of the products count.
    """

    name: str
    batch: int
    length: int
    heads: int
    groups: int
    head_dim: int
    is_causal: bool = True

    @property
    def flops(self) -> float:
        """Return those of the two products of forward; backward has five."""
        whole = 4 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.is_causal else whole

    @property
    def scale(self) -> float:
        """Return what multiplies the logits."""
        return float(self.head_dim**-0.5)


CASES = {
    case.name: case
    for case in (
        Case("tiny", 1, 256, 8, 8, 64),
        Case("1.3B", 4, 2048, 16, 16, 128),
        Case("8B", 4, 2048, 32, 8, 128),
        Case("8B 4k", 2, 4096, 32, 8, 128),
        Case("8B 8k", 1, 8192, 32, 8, 128),
        Case("70B", 4, 2048, 64, 8, 128),
        Case("no mask", 32, 1024, 32, 8, 128, is_causal=False),
    )
}
"""The sizes of layers_gpu with 8192 tokens, longer sequences, and the layer of Transformer Engine's
published figures."""


class Tensors(NamedTuple):
    """Queries, keys and values ``[s, b, heads, d]``, which require gradients, and the gradient of
    the result ``[s, b, heads * d]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor


def tensors(case: Case, device: torch.device) -> Tensors:
    """Return normal values; the gradient is small, as in training."""
    torch.manual_seed(0)
    size = (case.length, case.batch)
    kind = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (
        torch.randn(*size, heads, case.head_dim, **kind).requires_grad_()
        for heads in (case.heads, case.groups, case.groups)
    )
    return Tensors(q, k, v, 1e-2 * torch.randn(*size, case.heads * case.head_dim, **kind))


def exact(case: Case, inputs: Tensors) -> torch.Tensor:
    """Return the result of the first head of the first sequence ``[s, d]``, in float32."""
    q, k, v = (x.detach()[:, 0, 0].float() for x in inputs[:3])
    logits = case.scale * q @ k.mT
    if case.is_causal:
        later = torch.ones(logits.shape, dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    return logits.softmax(-1) @ v


def torch_attention(case: Case, kind: SDPBackend) -> Forward:
    """Return torch's attention by one of its kernels, of views ``[b, heads, s, d]``."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        views = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        with sdpa_kernel([kind]):
            out = torch.nn.functional.scaled_dot_product_attention(
                *views,
                is_causal=case.is_causal,
                scale=case.scale,
                enable_gqa=case.groups != case.heads,
            )
        return out.permute(2, 0, 1, 3).flatten(2)

    return forward


def of_library(library: str, case: Case) -> Forward:
    """Return the layer of fp8core or of Transformer Engine, in bfloat16."""
    forward: Forward = layers_of(library).DotProductAttention(
        case.heads,
        case.head_dim,
        num_gqa_groups=case.groups,
        attention_dropout=0.0,
        attn_mask_type="causal" if case.is_causal else "no_mask",
        softmax_scale=case.scale,
    )
    return forward


def in_fp8(case: Case, kind: Callable[..., recipe.Recipe]) -> Forward:
    """Return fp8core's layer under a recipe that quantizes its operands."""
    layer = of_library("fp8core", case)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with fp8core.autocast(recipe=kind(fp8_dpa=True)):
            return layer(q, k, v)

    return forward


CONTESTANTS: dict[str, Callable[[Case], Forward]] = {
    CUDNN: lambda case: torch_attention(case, SDPBackend.CUDNN_ATTENTION),
    "torch flash": lambda case: torch_attention(case, SDPBackend.FLASH_ATTENTION),
    "te bf16": functools.partial(of_library, "te"),
    OURS: functools.partial(of_library, "fp8core"),
    "fp8core current": lambda case: in_fp8(case, recipe.Float8CurrentScaling),
    "fp8core delayed": lambda case: in_fp8(case, recipe.DelayedScaling),
}


def main(arguments: Sequence[str] | None = None, device: Device = CUDA) -> None:
    """Measure, or print what was measured."""
    parser = parser_of(
        "attention_gpu", __doc__, case=CASES, contestant=CONTESTANTS, measure=MEASURES
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--turn-seconds", type=float, default=2.0, help="most of a measure")
    args = parser.parse_args(arguments)
    deadline = time.time() + args.seconds
    for name in () if args.merge else args.case:
        if time.time() >= deadline:
            print("the time is up", flush=True)
            break
        run = records.Run(args.out, "attention", {"case": name, "flops": CASES[name].flops})
        measure(run, CASES[name], args.contestant, args.measure, args.turn_seconds, device)
    print(table(records.read(*(args.merge or [args.out]))))


def measure(
    run: records.Run,
    case: Case,
    contestants: Sequence[str],
    measures: Sequence[str],
    seconds: float,
    device: Device,
) -> None:
    """Write a record of each measure: the time of a step of each contestant in each turn, us."""
    inputs, contest = tensors(case, device.torch_device), Contest(device)
    print(case.name, flush=True)
    forwards: dict[str, Forward] = {}
    errors: dict[str, float] = {}

    def entered(name: str) -> Forward:
        forward = CONTESTANTS[name](case)
        errors[name] = _error(forward, case, inputs)
        step(forward, inputs)()
        return forward

    for name in contestants:
        forward = contest.enter(name, functools.partial(entered, name))
        if forward is not None:
            forwards[name] = forward
    for name, value in errors.items():
        if value > MOST_ERROR:
            print(f"{case.name}: {name} IS WRONG: its error is {value:.3g}", flush=True)
    stop = turns.Stop(seconds, tuple((name, CUDNN) for name in forwards if name != CUDNN))
    for kind in measures:
        if kind == "host" and case.name != "tiny":
            continue
        make = _forward_alone if kind == "graph forward" else step
        calls: turns.Calls = {name: make(own, inputs) for name, own in forwards.items()}
        if kind.startswith("graph"):
            captured = {name: device.capture(own) for name, own in calls.items()}
            calls = {name: own for name, own in captured.items() if own is not None}
        us = contest.take(kind.split()[0], calls, stop)
        conditions = contest.conditions("nvidia-cudnn-frontend", "transformer-engine")
        run.write(kind, errors=errors, us=us, refused=contest.refused, **conditions)


def step(forward: Forward, inputs: Tensors) -> Step:
    """Return forward and backward."""

    def run() -> object:
        out = forward(*inputs[:3])
        return torch.autograd.grad(out, inputs[:3], inputs.grad)

    return run


def _forward_alone(forward: Forward, inputs: Tensors) -> Step:
    return lambda: forward(*inputs[:3])


def _error(forward: Forward, case: Case, inputs: Tensors) -> float:
    """Return the relative Frobenius error of the first head of the first sequence."""
    want = exact(case, inputs)
    got = forward(*inputs[:3]).detach()[:, 0, : case.head_dim].float()
    return float((got - want).norm() / want.norm())


def table(found: Sequence[records.Record]) -> str:
    """Return times, rates and ratios to torch's cuDNN path, with their 95 % intervals."""
    lines = head(("case", "measure", "contestant", "us", "TFLOP/s", "of torch cudnn", "error"))
    for record in found:
        us: dict[str, list[float]] = record["us"]
        for name, values in us.items():
            if not values:
                continue
            median = median_interval(values).median
            passes = 1.0 if record["measure"] == "graph forward" else 3.5
            rate = passes * record["flops"] / median / 1e6
            share = ""
            if us.get(CUDNN):
                share = median_interval(ratios(values, us[CUDNN])).text(2)
            error = record["errors"].get(name)
            cells: tuple[Any, ...] = (record["case"], record["measure"], name, f"{median:.1f}")
            known = "" if error is None else f"{error:.4f}"
            lines.append(line((*cells, f"{rate:.0f}", share, known)))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
