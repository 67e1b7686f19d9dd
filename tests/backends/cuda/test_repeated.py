"""Recorded runs of layers: the bits of the program that was recorded, whatever changes later.

A layer records its second call, so that the third is the first one to be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.chain import series
from fp8core.chain.repeated import Repeated
from fp8core_backends.cuda import recorder
from tests.device import let_go_of_backward_passes
from tests.pairs import pairs

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    # A gradient is accumulated on the stream of its first step.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
NAMES = ("delayed", "current", "block", "rowwise")
TOKENS, HIDDEN, FFN = 256, 384, 512
STEPS = 6

Layer = fp8core.Linear | fp8core.LayerNormLinear | fp8core.LayerNormMLP
LAYERS: dict[str, Callable[..., Layer]] = {
    "linear": lambda **options: fp8core.Linear(HIDDEN, FFN, bias=False, **options),
    "linear bias": lambda **options: fp8core.Linear(HIDDEN, FFN, bias=True, **options),
    "linear of parts": lambda **options: fp8core.Linear(
        HIDDEN, 3 * FFN, parameters_split=("query", "key", "value"), **options
    ),
    "norm_linear": lambda **options: fp8core.LayerNormLinear(
        HIDDEN, FFN, bias=False, normalization="RMSNorm", **options
    ),
    "norm_linear bias": lambda **options: fp8core.LayerNormLinear(HIDDEN, FFN, **options),
    "mlp swiglu": lambda **options: fp8core.LayerNormMLP(
        HIDDEN, FFN, bias=False, normalization="RMSNorm", activation="swiglu", **options
    ),
    "mlp gelu bias": lambda **options: fp8core.LayerNormMLP(
        HIDDEN, FFN, activation="gelu", **options
    ),
}


@contextmanager
def without_recordings() -> Iterator[None]:
    """Have layers that are bound within run their programs, each time."""

    def the_program(program: Any, *others: object) -> Any:
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "Repeated", the_program)
        yield


def make(kind: str, dtype: torch.dtype = torch.bfloat16) -> Layer:
    torch.manual_seed(0)
    return LAYERS[kind](params_dtype=dtype, device="cuda")


def inputs(seed: int, dtype: torch.dtype = torch.bfloat16, rows: int = TOKENS) -> torch.Tensor:
    torch.manual_seed(100 + seed)
    return torch.randn(rows, HIDDEN, dtype=dtype, device="cuda") * 2.0 ** (seed % 3)


def step(layer: Layer, name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, all gradients, and the layer's delayed scales and count afterwards."""
    x = x.detach().requires_grad_()
    layer._bindings.count()
    with fp8core.autocast(recipe=recipe.by_name(name)):
        y = layer(x)
    torch.manual_seed(7)
    grads = torch.autograd.grad(y, (x, *layer.parameters()), torch.randn_like(y) / 16)
    counts = [count.clone() for count in layer._bindings.nonfinite.values()]
    return [y.detach(), *grads, *(one.clone() for one in layer.buffers()), *counts]


def recorded(layer: Layer) -> list[tuple[bool, bool]]:
    """Return for each number of rows whether forward and backward are recorded."""
    (chain,) = layer._bindings.last[1].parts
    programs = chain._programs.values()
    return [one.is_recorded for one in programs if isinstance(one, Repeated)]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor], about: object) -> None:
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        as_bytes = (t.contiguous().view(torch.uint8) for t in (one, other))
        assert torch.equal(*as_bytes), (about, number)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"), pairs(NAMES, LAYERS, [torch.bfloat16, torch.float16]), ids=str
)
def test_repeated_steps_have_the_program_s_bits(name: str, kind: str, dtype: torch.dtype) -> None:
    given = [inputs(seed, dtype) for seed in range(STEPS)]
    given[-1][3, 5] = float("inf")  # is counted, and leaves delayed scales as they are
    layer = make(kind, dtype)
    ours = [step(layer, name, x) for x in given]
    assert recorded(layer) == [(True, True)]
    with without_recordings():
        layer = make(kind, dtype)
        theirs = [step(layer, name, x) for x in given]
        assert recorded(layer) == []
    for seed, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_equal(one, other, seed)


@pytest.mark.parametrize("name", NAMES)
def test_other_rows_strides_and_addresses_are_computed_as_before(name: str) -> None:
    plain = inputs(3)
    others = {
        "the same": plain,
        "rows": inputs(4, rows=144),
        "rows that are padded": inputs(4, rows=131),
        "columns of a wider tensor": torch.nn.functional.pad(plain, (0, 8))[:, :HIDDEN],
        "an odd address": torch.nn.functional.pad(plain.view(-1), (1, 0))[1:].view_as(plain),
        "three dimensions": plain.view(2, -1, HIDDEN),
        "the same again": plain,
    }
    results = []
    for records in (True, False):
        if records:
            results.append(_steps_of(name, others))
        else:
            with without_recordings():
                results.append(_steps_of(name, others))
    for about in others:
        assert_equal(results[0][about], results[1][about], about)


def _steps_of(name: str, others: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    layer = make("mlp swiglu")
    for seed in range(3):
        step(layer, name, inputs(seed))
    return {about: step(layer, name, x) for about, x in others.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_repeat_runs_on_the_stream_that_is_current(name: str) -> None:
    layer, x = make("mlp swiglu"), inputs(3)
    expected = [step(layer, name, inputs(seed)) for seed in (0, 1, 2, 3)][-1]
    layer = make("mlp swiglu")
    for seed in range(3):
        step(layer, name, inputs(seed))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)  # what is launched elsewhere reads zeros
        late = torch.zeros_like(x).copy_(x)
        ours = step(layer, name, late)
        torch.cuda.current_stream().synchronize()
    assert_equal(ours, expected, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_a_repeat_equals_it(name: str) -> None:
    layer, static = make("mlp swiglu"), inputs(0)
    with torch.no_grad(), fp8core.autocast(recipe=recipe.by_name(name)):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(static)
        static.copy_(inputs(5))
        graph.replay()
        assert torch.equal(y, layer(inputs(5)))
    assert recorded(layer) == [(True, False)]


@pytest.mark.parametrize(("name", "kind", "rows"), pairs(NAMES, LAYERS, [1, 5]))
def test_forwards_of_any_rows_are_repeated(name: str, kind: str, rows: int) -> None:
    def forwards(layer: Layer) -> list[torch.Tensor]:
        results = []
        with torch.no_grad(), fp8core.autocast(recipe=recipe.by_name(name)):
            for seed in range(STEPS):
                results.append(layer(inputs(seed, rows=rows)))
        return results

    layer = make(kind)
    ours = forwards(layer)
    assert recorded(layer) == [(True, False)]
    with without_recordings():
        assert_equal(ours, forwards(make(kind)), (name, kind, rows))


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_repeat_takes_no_more_memory_than_the_program_and_a_scratch(name: str) -> None:
    peaks = []
    for records in (True, False):
        if records:
            peaks.append(_peak(name))
        else:
            with without_recordings():
                peaks.append(_peak(name))
    assert peaks[0] <= peaks[1] + recorder._MOST_SCRATCH


def _peak(name: str) -> int:
    layer = fp8core.LayerNormMLP(
        1024, 4096, bias=False, params_dtype=torch.bfloat16, activation="swiglu", device="cuda"
    )
    x = torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda")
    for _ in range(4):
        step(layer, name, x)
    let_go_of_backward_passes(x.device)  # what a forward saves is counted by itself alone
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(layer, name, x)
    return torch.cuda.max_memory_allocated() - before
