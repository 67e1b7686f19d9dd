"""DotProductAttention on CUDA: the kernel that runs it, graphs, compilation, FP8, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import DotProductAttention, UnsupportedError, autocast, recipe, use_backend
from tests.backends.cuda.cuda_cases import DEVICE
from tests.backends.cuda.test_attention import bound, desc_of

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]
HEADS, GROUPS, SIZE = 8, 2, 64
FP8 = {
    "current": lambda: recipe.Float8CurrentScaling(fp8_dpa=True),
    "delayed": lambda: recipe.DelayedScaling(fp8_dpa=True, amax_history_len=4),
    "mha": lambda: recipe.DelayedScaling(fp8_mha=True, amax_history_len=4),
}


@pytest.fixture(autouse=True)
def frontend() -> None:
    """Skip where cuDNN's frontend is not installed."""
    bound(desc_of("padding"))


def tokens(
    length: int = 256, batch: int = 2, heads: int = HEADS, seed: int = 0
) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [
        torch.randn(
            length, batch, count, SIZE, device=DEVICE, dtype=torch.bfloat16
        ).requires_grad_()
        for count in (heads, GROUPS, GROUPS)
    ]


def layer(**options: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, SIZE, GROUPS, **options)


def gradients(call: Callable[..., torch.Tensor], qkv: list[torch.Tensor]) -> list[torch.Tensor]:
    out = call(*qkv)
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, qkv, grad)
    return [out.detach(), *grads]  # no graph lives on, with nodes of the stream it began on


def sqnr(x: torch.Tensor, want: torch.Tensor) -> float:
    noise = (x.float() - want.float()).square().sum()
    return float(10 * torch.log10(want.float().square().sum() / noise))


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "cuDNN's attention, by torch"),
        ({"attention_dropout": 0.1}, "cuDNN's attention, by its frontend"),
        ({"window_size": (7, 0)}, "cuDNN's attention, by its frontend"),
    ],
)
def test_explain_names_each_kernel(options: dict[str, Any], kernel: str) -> None:
    lines = fp8core.explain(layer(**options), "current", device=DEVICE, dtype=torch.bfloat16).lines
    forward = next(line for line in lines if line.desc.op == "attention")
    assert forward.kernel == kernel
    assert len(forward.other_kernels) == 2
    assert "cuDNN's FP8 attention, by its frontend: nothing is quantized" in str(forward)


@pytest.mark.parametrize("options", [{}, {"window_size": (31, 0)}, {"softmax_type": "off-by-one"}])
def test_compiled_attention_equals_eager(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    attend, qkv = layer(**options), tokens()
    want = gradients(attend, qkv)
    got = gradients(torch.compile(attend, fullgraph=True), qkv)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
    assert torch.equal(got[0], want[0])


def test_compiled_attention_drops_other_weights_each_time() -> None:
    torch._dynamo.reset()
    qkv = tokens()
    compiled = torch.compile(layer(attention_dropout=0.5), fullgraph=True)
    outs = []
    for _ in range(4):
        outs.append(gradients(compiled, qkv)[0].clone())
    assert not any(torch.equal(one, outs[-1]) for one in outs[:-1])


@pytest.mark.parametrize("options", [{}, {"attention_dropout": 0.5}, {"window_size": (31, 0)}])
def test_a_graph_of_forward_and_backward(options: dict[str, Any]) -> None:
    """Replays compute anew; with dropout each drops other weights, and backward drops the same."""
    attend, qkv = layer(**options), tokens()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients(attend, qkv)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gradients(attend, qkv)
    outs = []
    for _ in range(3):
        graph.replay()
        outs.append(results[0].clone())
    is_dropping = "attention_dropout" in options
    assert torch.equal(outs[0], outs[1]) != is_dropping
    assert torch.equal(outs[1], outs[2]) != is_dropping
    if not is_dropping:
        assert torch.equal(outs[0], gradients(attend, qkv)[0])
    # The result is linear in the values: of weights that backward drops alike, the products of the
    # values with their gradients are that of the result with its own.
    out, grad_v = results[0].double(), results[3].double()
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(torch.bfloat16)
    forward, backward = (out * grad.double()).sum(), (qkv[2].detach().double() * grad_v).sum()
    size = (out * grad.double()).norm()
    assert abs(float(forward - backward)) <= 2**-4 * float(size)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_graphed_callables_train(dropout: float) -> None:
    qkv = tokens()
    graphed = torch.cuda.make_graphed_callables(
        layer(attention_dropout=dropout), tuple(x.detach().requires_grad_() for x in qkv)
    )
    first, second = (gradients(graphed, qkv)[0].clone() for _ in range(2))
    assert torch.equal(first, second) == (dropout == 0)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask_type": "no_mask"},
        {"attn_mask_type": "no_mask", "window_size": (63, 3), "bottom_right_diagonal": False},
    ],
    ids=str,
)
def test_fp8_attention_runs_natively(name: str, options: dict[str, Any]) -> None:
    attend, qkv = layer(**options), tokens()
    want = gradients(layer(**options), qkv)

    def call(*given: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=FP8[name]()):
            out: torch.Tensor = attend(*given)
        return out

    for _ in range(3):  # the first step of delayed scaling uses scale 1
        got = gradients(call, qkv)
    # As on the reference backend, tests/modules/test_attention_fp8.py.
    for one, other in zip(got, want, strict=True):
        assert sqnr(one, other) > 21


def test_fp8_attention_is_that_of_the_reference() -> None:
    qkv = tokens()
    outs = []
    for backend in ("cuda", "reference"):
        with use_backend(backend), autocast(recipe=FP8["current"]()):
            outs.append(gradients(layer(), qkv))
    for one, other in zip(*outs, strict=True):
        assert sqnr(one, other) > 24  # weights may be rounded before or after they are divided


def test_fp8_attention_is_captured() -> None:
    attend, qkv = layer(), tokens()

    def call(*given: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=FP8["current"]()):
            out: torch.Tensor = attend(*given)
        return out

    want = gradients(call, qkv)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradients(call, qkv)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gradients(call, qkv)
    graph.replay()
    assert torch.equal(results[0], want[0])


def test_fp8_attention_compiles() -> None:
    torch._dynamo.reset()
    attend, qkv = layer(), tokens()
    compiled = torch.compile(attend, fullgraph=True)
    outs = []
    for call in (attend, compiled):
        with autocast(recipe=FP8["current"]()):
            outs.append(call(*qkv))
    assert torch.equal(*outs)


def test_a_large_fallback_is_refused_by_name() -> None:
    """ALiBi, which cuDNN lacks, by the reference: 1 x 8 x 9000 x 9000 logits are 2.4 GiB."""
    x = torch.randn(9000, 1, HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
    attend = DotProductAttention(HEADS, SIZE)
    with pytest.raises(UnsupportedError, match="takes none") as caught:
        attend(x, x, x, core_attention_bias_type="alibi")
    assert "2.4 GiB" in str(caught.value)
    small = x[:64]
    out = attend(small, small, small, core_attention_bias_type="alibi")
    assert bool(out.isfinite().all())
    with use_backend("reference"):
        out = attend(x[:8200], x[:8200], x[:8200], core_attention_bias_type="alibi")
    assert bool(out.isfinite().all())
