"""A Transformer layer as one chain on a device: recorded whole, with the bits of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.chain import series
from fp8core.chain.repeated import Repeated
from fp8core.modules.composition import Composition
from tests import ways
from tests.device import let_go_of_backward_passes

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    # A gradient is accumulated on the stream of its first step.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
NAMES = ("delayed", "current", "block")
SEQUENCES, LENGTH, HIDDEN, FFN, HEADS, STEPS = 2, 128, 512, 1024, 8, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "rmsnorm swiglu": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "layernorm gelu bias": {},
    "interleaved": {"qkv_weight_interleaved": True},
    "groups": {"num_gqa_groups": 2},
    "sequence first": {"attn_input_format": "sbhd"},
    "no mask": {"self_attn_mask_type": "no_mask"},
    "window": {"window_size": (31, 0)},
}


@contextmanager
def one_by_one() -> Iterator[None]:
    """Have layers run by themselves, and their programs each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Composition, "run", ways.one_by_one)
        patch.setattr(series, "Repeated", lambda program, *others: program)
        yield


def make(**options: Any) -> fp8core.TransformerLayer:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
        "attn_input_format": "bshd",
        "params_dtype": torch.bfloat16,
        "device": "cuda",
    }
    return fp8core.TransformerLayer(HIDDEN, FFN, HEADS, **given | options)


def inputs(seed: int, length: int = LENGTH) -> torch.Tensor:
    torch.manual_seed(100 + seed)
    x = torch.randn(SEQUENCES, length, HIDDEN, dtype=torch.bfloat16, device="cuda")
    return (x * 2.0 ** (seed % 3)).requires_grad_()


def step(layer: Any, name: str, x: torch.Tensor, **given: Any) -> list[torch.Tensor]:
    """Return the output, all gradients, and the layer's delayed scales afterwards."""
    x = x.detach().requires_grad_()
    with fp8core.autocast(recipe=recipe.by_name(name)):
        y = layer(x, **given)
    torch.manual_seed(7)
    grads = torch.autograd.grad(y, (x, *layer.parameters()), torch.randn_like(y) / 16)
    return [y.detach(), *grads, *(one.clone() for one in layer.buffers())]


def recorded(layer: Any) -> list[tuple[bool, bool]]:
    """Return for each chain and number of rows whether forward and backward are recorded."""
    chains = [links for links, _ in layer._chain._chains.values()]
    programs = [one for chain in chains for one in chain._programs.values()]
    return [one.is_recorded for one in programs if isinstance(one, Repeated)]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        as_bytes = (t.contiguous().view(torch.uint8) for t in (one, other))
        assert torch.equal(*as_bytes), number


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_repeated_layer_has_the_bits_of_its_layers(option: str, name: str) -> None:
    layer, judge = make(**OPTIONS[option]), make(**OPTIONS[option])
    for seed in range(STEPS):
        with one_by_one():
            expected = step(judge, name, inputs(seed))
        assert_same(step(layer, name, inputs(seed)), expected)
    assert recorded(layer) == [(True, True)]
    assert not judge._chain._chains


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["rmsnorm swiglu", "interleaved", "groups", "sequence first"])
def test_a_repeated_rotation_has_the_bits_of_its_layers(option: str, name: str) -> None:
    layer, judge = make(**OPTIONS[option]), make(**OPTIONS[option])
    table = fp8core.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH).cuda()
    for seed in range(STEPS):
        angles = table * (1 + seed % 2)
        with one_by_one():
            expected = step(judge, name, inputs(seed), rotary_pos_emb=angles)
        assert_same(step(layer, name, inputs(seed), rotary_pos_emb=angles), expected)
    assert recorded(layer) == [(True, True)]


def test_sizes_and_modes_change_between_repeats() -> None:
    layer, judge = make(), make()
    for seed, length in enumerate((128, 128, 128, 64, 128, 64, 64, 64, 128)):
        with one_by_one():
            expected = step(judge, "delayed", inputs(seed, length))
        assert_same(step(layer, "delayed", inputs(seed, length)), expected)
    for one in (layer, judge):
        one.eval()
    with torch.no_grad(), fp8core.autocast(recipe=recipe.by_name("delayed")):
        for seed in range(4):
            with one_by_one():
                expected = judge(inputs(seed))
            assert torch.equal(layer(inputs(seed)), expected)
    assert recorded(layer)[:2] == [(True, True)] * 2


def test_a_repeat_runs_on_the_stream_that_is_current() -> None:
    layer, judge = make(), make()
    for seed in range(4):
        expected = step(judge, "current", inputs(seed))
        if seed < 3:
            step(layer, "current", inputs(seed))
    x = inputs(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)  # what is launched elsewhere reads zeros
        ours = step(layer, "current", torch.zeros_like(x).copy_(x))
        torch.cuda.current_stream().synchronize()
    assert_same(ours, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_a_repeated_step_equals_it(name: str) -> None:
    layer, static = make(), inputs(0)
    grad = torch.randn_like(static) / 16

    def run() -> torch.Tensor:
        static.grad = None
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y: torch.Tensor = layer(static)
        torch.autograd.backward(y, grad)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    captured = static.grad
    assert captured is not None
    state = {key: value.clone() for key, value in layer.state_dict().items() if value is not None}
    graph.replay()
    replayed = [y.clone(), captured.clone()]
    layer.load_state_dict(state, strict=False)
    again = run()
    assert static.grad is not None
    if name != "delayed":  # whose scales are a step further
        assert_same([again.detach(), static.grad], replayed)
    assert all(bool(one.isfinite().all()) for one in replayed)


def test_a_repeat_takes_no_more_memory_than_the_layers() -> None:
    peaks = []
    for is_judge in (False, True):
        layer, x = make(), inputs(0, length=1024)
        for _ in range(4):
            _run(layer, x, is_judge)
        let_go_of_backward_passes(x.device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _run(layer, x, is_judge)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    scratch, output = 4 << 20, 2 * SEQUENCES * 1024 * HIDDEN
    assert peaks[0] <= peaks[1] + 2 * scratch + output


def _run(layer: Any, x: torch.Tensor, is_judge: bool) -> None:
    if is_judge:
        with one_by_one():
            step(layer, "delayed", x)
    else:
        step(layer, "delayed", x)
