"""Permutation, router, cross entropy and steps on CUDA: sizes and conditions beyond the kit's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core.backend_api import (
    AdamDesc,
    CombineBackwardDesc,
    CombineDesc,
    DispatchDesc,
    OperandError,
    RouteDesc,
    RouterDesc,
    UnsupportedError,
)
from fp8core.optimizers import FusedSGD
from fp8core.router import fused_topk_with_score_function
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, backend, nothing_waits
from tests.pairs import pairs, turns

pytestmark = pytest.mark.needs_accelerator("cuda")
BF16 = torch.bfloat16


def run(desc: Any, *given: Any, **named: Any) -> Any:
    return backend("cuda").bind(desc, DEVICE)(*given, **named)


def judged(desc: Any, *given: Any, **named: Any) -> Any:
    """The reference's result on the device."""
    return backend("reference").bind(desc, DEVICE)(*given, **named)


def mask(tokens: int, experts: int, topk: int) -> torch.Tensor:
    scores = torch.rand(tokens, experts, device=DEVICE)
    return torch.zeros_like(scores).scatter(1, scores.topk(topk, 1).indices, 1).bool()


@pytest.mark.parametrize(
    ("size", "dtype"), turns([(4096, 4096), (1000, 1001), (4097, 7168)], DTYPES), ids=str
)
def test_rows_there_and_back(size: tuple[int, int], dtype: torch.dtype) -> None:
    tokens, hidden = size
    routing = mask(tokens, 64, 8)
    index, sources = run(RouteDesc(torch.bool, "mask"), routing, tokens * 8)
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    y, none = run(DispatchDesc(dtype), x, index, sources)
    assert none is None
    assert torch.equal(y, x[(sources // 64).long()])
    weights = torch.rand(tokens, 64, device=DEVICE) * routing
    total, _ = run(CombineDesc(dtype), y, index, weights=weights)
    expected = x.double() * weights.double().sum(1, keepdim=True)
    bound = (2.0**-20 + torch.finfo(dtype).eps) * expected.abs() + 2.0**-20
    assert bool(((total.double() - expected).abs() <= bound).all())
    grad = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    grad_y, grad_weights = run(CombineBackwardDesc(dtype), grad, y, index, sources, weights)
    flat = weights.flatten()[sources.long()][:, None]
    torch.testing.assert_close(grad_y, (grad[(sources // 64).long()].float() * flat).to(dtype))
    products = (grad.double() * x.double()).sum(1, keepdim=True) * routing
    scale = (grad.double() * x.double()).abs().sum(1, keepdim=True)
    assert bool(((grad_weights.double() - products).abs() <= scale * 2.0**-18).all())


def test_rows_beyond_2_31_elements() -> None:
    rows, hidden = 270_000, 8192
    x = torch.randn(rows, hidden, device=DEVICE, dtype=BF16)
    order = torch.randperm(rows, device=DEVICE, dtype=torch.int32)
    index, sources = run(RouteDesc(torch.int32, "rows"), order[:, None], rows)
    y, _ = run(DispatchDesc(BF16), x, index, sources)
    assert torch.equal(y[order[-1]], x[-1])
    assert torch.equal(y[-1], x[int(sources[-1])])
    back, _ = run(CombineDesc(BF16), y, index)
    assert torch.equal(back[-1000:], x[-1000:])
    del back, x
    torch.cuda.empty_cache()


def test_more_experts_than_the_kernels_take_are_named() -> None:
    x = torch.randn(2, 1025, device=DEVICE)
    with pytest.raises(UnsupportedError, match="router='reference'"):
        run(RouterDesc(torch.float32, 2, "softmax"), x)
    with pytest.raises(UnsupportedError, match="route='reference'"):
        run(RouteDesc(torch.bool, "mask"), torch.ones(2, 2049, device=DEVICE).bool(), 4)


def test_tensors_that_do_not_fit_are_named() -> None:
    x = torch.randn(4, 8, device=DEVICE)
    index = torch.zeros(4, 1, device=DEVICE, dtype=torch.int32)
    with pytest.raises(OperandError, match="sources"):
        run(DispatchDesc(torch.float32), x, index, index[:, 0].long())
    with pytest.raises(OperandError, match="4 tokens, and an index of 3"):
        run(DispatchDesc(torch.float32), x, index[:3], index[:, 0])
    step = AdamDesc(BF16, BF16)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    lists = [[x.to(BF16)], [x.to(BF16)], [x], [x[:2]], []]
    with pytest.raises(OperandError, match="expected the same shape"):
        run(step, *lists, **numbers)
    with pytest.raises(OperandError, match=r"expected 1 of torch\.float32"):
        run(step, [x.to(BF16)], [x.to(BF16)], [x], [], [], **numbers)


def test_a_step_counts_as_a_write() -> None:
    lists = [[torch.ones(5, device=DEVICE)] for _ in range(4)]
    before = [group[0]._version for group in lists]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    run(AdamDesc(torch.float32, torch.float32), *lists, [], **numbers)
    after = [group[0]._version for group in lists]
    assert after[0] == before[0]
    assert all(later > earlier for later, earlier in zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_descent_steps_as_on_the_cpu(dtype: torch.dtype) -> None:
    """By torch's fused kernel, which takes tensors of the same strides alone."""
    values = [
        torch.randn(129, 65).to(dtype),
        torch.randn(33).to(dtype),
        torch.empty(0, dtype=dtype),
    ]
    grads = [torch.randn(value.shape).to(dtype) for value in values]
    results = []
    for device in (DEVICE, torch.device("cpu")):
        params = [torch.nn.Parameter(value.to(device, copy=True)) for value in values]
        params[0] = torch.nn.Parameter(values[0].to(device).t().contiguous().t())
        optimizer = FusedSGD(params, 0.1, 0.9, 0.5, weight_decay=0.01)
        for step in range(3):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.to(device) if step or param is not params[1] else None
            before = params[0]._version
            optimizer.step()
            assert params[0]._version > before
        results.append([param.detach().cpu().float() for param in params])
    bound = 1e-5 if dtype == torch.float32 else 0.03  # on CPU, 16 bits are rounded between
    torch.testing.assert_close(*results, rtol=bound, atol=bound)


def layer(x: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Everything at once, by the public functions."""
    probs, routing = fused_topk_with_score_function(logits, 4, False, 4, 2, 2.5, "sigmoid", None)
    rows, permuted, row_id_map = fp8core.moe_permute_with_probs(
        x, probs.float(), routing, x.shape[0] * 4
    )
    y = fp8core.moe_unpermute(rows * permuted[:, None].to(x.dtype), row_id_map, probs)
    return fp8core.parallel_cross_entropy(y[None], target, 0.1, reduce_loss=True)


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 1024, generator=generator)
    logits = torch.randn(512, 32, generator=generator)
    target = torch.randint(0, 1024, (1, 512), generator=generator)
    return [x.to(DEVICE, BF16), logits.to(DEVICE, BF16), target.to(DEVICE)]


def test_nothing_waits_and_a_graph_records_it() -> None:
    x, logits, target = leaves()
    x.requires_grad_()
    logits.requires_grad_()

    def step() -> torch.Tensor:
        loss = layer(x, logits, target)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            x.grad = logits.grad = None
            eager = step()
        x.grad = logits.grad = None
        with nothing_waits():
            eager = step()
    torch.cuda.current_stream().wait_stream(stream)
    want = [eager.detach().clone(), x.grad.clone(), logits.grad.clone()]
    x.grad = logits.grad = None
    del eager  # with it the gradients' accumulators, which belong to the stream they began on
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step()
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip((loss, x.grad, logits.grad), want, strict=True):
        assert torch.equal(ours, theirs)


# torch 2.11's compiler looks at an autograd function that is given as an instance, and warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_in_one_graph() -> None:
    x, logits, target = leaves()
    x.requires_grad_()
    logits.requires_grad_()
    loss = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, logits, target)
    loss.backward()
    got = [loss, x.grad, logits.grad]
    x.grad = logits.grad = None
    expected = layer(x, logits, target)
    expected.backward()
    for ours, theirs in zip(got, (expected, x.grad, logits.grad), strict=True):
        assert torch.equal(ours, theirs)


def strange_route(kind: str, tokens: int, slots: int, rows: int) -> list[torch.Tensor]:
    """An index and sources that do not belong together."""
    highs = {"wild": (rows + 3, tokens * slots + 3), "one row": (1, 1)}[kind]
    sizes = ((tokens, slots), (rows,))
    pairs = zip(highs, sizes, strict=True)
    low = {"wild": -3, "one row": 0}[kind]
    found = [torch.randint(low, high, size, device=DEVICE).int() for high, size in pairs]
    if kind == "wild":
        for one in found:
            one.view(-1)[0], one.view(-1)[-1] = 2**31 - 1, -(2**31)
    return found


@pytest.mark.parametrize(
    ("kind", "slots", "hidden", "dtype"),
    pairs(["wild", "one row"], [2, 33, 300], [7, 64, 1000, 2056, 4104, 10000], DTYPES),
    ids=str,
)
def test_rows_of_any_numbers(kind: str, slots: int, hidden: int, dtype: torch.dtype) -> None:
    tokens, rows = 65, 300
    index, sources = strange_route(kind, tokens, slots, rows)
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    probs = torch.rand(tokens, slots, device=DEVICE).round()
    for desc in (DispatchDesc(dtype), DispatchDesc(dtype, skips_improbable=True)):
        ours, theirs = (how(desc, x, index, sources, probs=probs) for how in (run, judged))
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    y = torch.randn(rows, hidden, device=DEVICE).to(dtype)
    weights = torch.rand(tokens, slots, device=DEVICE)
    values = torch.randn(rows, device=DEVICE)
    ours, theirs = (
        how(CombineDesc(dtype), y, index, weights=weights, row_values=values)
        for how in (run, judged)
    )
    largest = float(theirs[0].float().abs().max())
    tolerance = {"rtol": max(torch.finfo(dtype).eps, 2.0**-18)}  # a step of the dtype
    torch.testing.assert_close(ours[0], theirs[0], atol=largest * 2.0**-18, **tolerance)
    assert torch.equal(ours[1], theirs[1])
    ours, theirs = (
        how(CombineBackwardDesc(dtype), x, y, index, sources, weights) for how in (run, judged)
    )
    torch.testing.assert_close(ours[0], theirs[0], atol=2.0**-20, **tolerance)
    torch.testing.assert_close(ours[1], theirs[1], rtol=2.0**-16, atol=hidden * 2.0**-18)


def test_rows_of_no_tokens_have_probability_0() -> None:
    index = torch.empty(0, 4, device=DEVICE, dtype=torch.int32)
    sources = torch.full((3000,), -1, device=DEVICE, dtype=torch.int32)
    torch.full((3000,), torch.nan, device=DEVICE)  # what new memory may hold
    probs = torch.empty(0, 4, device=DEVICE)
    y, permuted = run(DispatchDesc(BF16), probs[:, :0].to(BF16), index, sources, probs=probs)
    assert y.shape == (3000, 0)
    assert not bool(permuted.any())


def test_numbers_and_dtypes_that_do_not_fit_are_named() -> None:
    x = torch.randn(4, 8, device=DEVICE)
    index = torch.zeros(4, 2, device=DEVICE, dtype=torch.int32)
    with pytest.raises(OperandError, match="two dimensions"):
        run(CombineDesc(torch.float32), x[0], index)
    with pytest.raises(OperandError, match="expected floats of 16, 32 or 64 bits"):
        run(DispatchDesc(torch.float32), x, index, index[:, 0].contiguous(), probs=index)
    bias = torch.ones(8, device=DEVICE).int()
    with pytest.raises(OperandError, match=r"expected floats \[8\]"):
        run(RouterDesc(torch.float32, 2, "sigmoid"), x, expert_bias=bias)
    numbers = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with pytest.raises(OperandError, match="expected one element"):
        run(AdamDesc(x.dtype, x.dtype), *[[x]] * 4, [], lr=torch.ones(2), **numbers)
