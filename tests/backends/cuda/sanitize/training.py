"""Calls of the loss, routes, router, steps and attention, and of recorded calls repeated."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import (
    ActivationDesc,
    AdamDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DispatchDesc,
    NormDesc,
    QuantizeDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
)
from fp8core_backends.cuda import native
from fp8core_backends.cuda.recorder import Recorder
from tests.backends.cuda import test_repeated
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, backend, spec
from tests.backends.cuda.test_training import strange_route

F32, BF16 = torch.float32, torch.bfloat16


def cross_entropy() -> None:
    """Losses and gradients of rows read in vectors and one by one, ignored rows among them."""
    sizes = (1, 7, 1000, 4097, 33000)
    for dtype, classes, smoothing in itertools.product(DTYPES, sizes, (0.0, 0.1)):
        whole = torch.randn(5, classes + 1).to(dtype).to(DEVICE)
        target = torch.randint(0, classes, (5,))
        target[1] = -100
        target = target.to(DEVICE)
        forward = backend("cuda").bind(CrossEntropyDesc(dtype, smoothing), DEVICE)
        backward = backend("cuda").bind(CrossEntropyBackwardDesc(dtype, smoothing), DEVICE)
        for x in (whole[:, :classes].contiguous(), whole[:, 1:]):
            _, *sums = forward(x, target)
            for grad in (torch.randn(5).to(DEVICE), torch.ones(1).to(DEVICE).expand(5)):
                backward(grad, x, target, *sums)


def permutation() -> None:
    """Routes from masks and rows; rows sent along them and along numbers that fit nothing."""
    cases = ((1, 1), (33, 8), (257, 33), (2049, 32), (16385, 9), (65, 300))
    for (tokens, experts), dtype in itertools.product(cases, (torch.bool, torch.int32)):
        mask = torch.rand(tokens, experts) < 0.3
        used = int(mask.sum())
        route = backend("cuda").bind(RouteDesc(dtype, "mask"), DEVICE)
        for rows in (used, used // 2, used + 100):
            route(mask.to(dtype).to(DEVICE), rows)
        for integer in (torch.int32, torch.int64):
            order = torch.randperm(tokens * experts).view(tokens, experts) - 3  # negative: no row
            route = backend("cuda").bind(RouteDesc(integer, "rows"), DEVICE)
            route(order.to(integer).to(DEVICE), tokens * experts)
    tokens, rows = 65, 130
    for dtype, hidden, slots in itertools.product(DTYPES, (1, 7, 64, 1000, 4104), (2, 33)):
        mask = (torch.rand(tokens, slots) < 0.5).to(DEVICE)
        sound = backend("cuda").bind(RouteDesc(torch.bool, "mask"), DEVICE)(mask, rows)
        for index, sources in (sound, strange_route("wild", tokens, slots, rows)):
            x = torch.randn(tokens, hidden + 1).to(dtype).to(DEVICE)
            probs = torch.rand(tokens, slots).round().to(DEVICE)
            for skips, tensor in itertools.product((False, True), (x[:, :-1].clone(), x[:, 1:])):
                send = backend("cuda").bind(DispatchDesc(dtype, skips), DEVICE)
                send(tensor, index, sources)
                send(tensor, index, sources, probs=probs)
            y = torch.randn(rows, hidden).to(dtype).to(DEVICE)
            weights = torch.rand(tokens, slots).to(DEVICE)
            combine = backend("cuda").bind(CombineDesc(dtype), DEVICE)
            combine(y, index)
            combine(y, index, weights=weights, row_values=torch.randn(rows).to(DEVICE))
            backward = backend("cuda").bind(CombineBackwardDesc(dtype), DEVICE)
            backward(x[:, 1:], y, index, sources, weights)


def router() -> None:
    """Every score function, groups of experts, and the probabilities of all; both ways."""
    options: tuple[dict[str, Any], ...] = (
        {"topk": 2, "score_function": "softmax"},
        {"topk": 2, "score_function": "softmax", "pre_softmax": True},
        {"topk": 4, "score_function": "sigmoid", "scaling_factor": 2.5},
        {"topk": 4, "score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
        {"topk": 2, "score_function": "sqrtsoftplus"},
        {"topk": 2, "score_function": "softmax", "of_all": True},
    )
    sizes = ((1, 8), (5, 32), (70, 64), (3, 1024))
    for dtype, chosen, (tokens, experts) in itertools.product(DTYPES, options, sizes):
        whole = torch.randn(tokens, experts + 1).to(dtype).to(DEVICE)
        biases = [None]
        if chosen["score_function"] != "softmax":
            biases += [torch.randn(experts).to(kind).to(DEVICE) for kind in DTYPES]
        forward = backend("cuda").bind(RouterDesc(dtype, **chosen), DEVICE)
        backward = backend("cuda").bind(RouterBackwardDesc(dtype, **chosen), DEVICE)
        for logits, bias in itertools.product((whole[:, :-1].contiguous(), whole[:, 1:]), biases):
            probs, chosen_experts, scores = forward(logits, expert_bias=bias)
            backward(
                torch.randn(tokens, experts).to(probs.dtype).to(DEVICE), chosen_experts, scores
            )


def steps() -> None:
    """Adam with every kind of master, numbers on the host and on the device."""
    shapes = ((), (1,), (3, 5), (127, 129), (16385,))
    for dtype, grad_dtype in itertools.product(DTYPES, DTYPES):
        masters = ("none", "float32", *(("remainder",) if dtype == BF16 else ()))
        for state, master in itertools.product((F32, BF16), masters):
            _adam(shapes, AdamDesc(dtype, grad_dtype, state, master))
    _adam(((7, 9),) * 100, AdamDesc(BF16, F32, F32, "float32"))  # more than one launch takes


def _tensors(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return numbers that are no less than 0, as averages of squares are."""
    return [torch.rand(shape).to(dtype).to(DEVICE) for shape in shapes]


def _adam(shapes: tuple[tuple[int, ...], ...], desc: AdamDesc) -> None:
    dtypes = [desc.grad_dtype, desc.dtype, desc.state_dtype, desc.state_dtype]
    lists = [_tensors(shapes, dtype) for dtype in dtypes]
    copies = {"none": None, "float32": F32, "remainder": torch.int16}[desc.master]
    lists.append([] if copies is None else _tensors(shapes, copies))
    run = backend("cuda").bind(desc, DEVICE)
    keywords = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    run(*lists, **keywords, lr=1e-3, step=1)
    on_device = {"lr": torch.full((1,), 1e-3), "step": torch.ones(1, dtype=torch.int32)}
    on_device |= {"inv_scale": torch.ones(1), "found_inf": torch.zeros(1)}
    run(*lists, **keywords, **{name: one.to(DEVICE) for name, one in on_device.items()})


def attention() -> None:
    """Attention in bfloat16 and FP8, both ways: by torch, by cuDNN's frontend, with dropout."""
    options: tuple[dict[str, Any], ...] = ({}, {"window_size": (31, 0)}, {"attention_dropout": 0.1})
    recipes = (
        None,
        recipe.Float8CurrentScaling(fp8_dpa=True),
        recipe.DelayedScaling(fp8_dpa=True, amax_history_len=4),
    )
    for chosen, own in itertools.product(options, recipes):
        if own is not None and chosen:
            continue  # cuDNN's FP8 attention has no window for heads of 64, and no dropout
        attend = fp8core.DotProductAttention(4, 64, 2, **chosen)
        q, k, v = (
            torch.randn(128, 2, heads, 64).bfloat16().to(DEVICE).requires_grad_()
            for heads in (4, 2, 2)
        )
        for _ in range(2):
            with fp8core.autocast(enabled=own is not None, recipe=own):
                out = attend(q, k, v)
            out.backward(torch.randn(out.shape).to(out))


def replays() -> None:
    """Repeat a recorded norm, activation and cast, on the tensors of the recording and others."""
    for name in ("delayed", "current", "vector"):
        own, given = spec(name), {}
        if own.delayed:
            given = {"scale": torch.ones(1).to(DEVICE), "amax_out": torch.zeros(1).to(DEVICE)}
        norm = backend("cuda").bind(NormDesc("rmsnorm", BF16, BF16, 1e-5), DEVICE)
        activation = backend("cuda").bind(ActivationDesc("gelu", BF16, BF16), DEVICE)
        cast = backend("cuda").bind(QuantizeDesc(BF16, own, own), DEVICE)
        x, weight = (torch.randn(*size, 256).bfloat16().to(DEVICE) for size in ((130,), ()))

        def run(
            x: torch.Tensor = x,
            weight: torch.Tensor = weight,
            calls: tuple[Any, ...] = (norm, activation, cast),
            given: dict[str, torch.Tensor] = given,
        ) -> list[torch.Tensor]:
            normalize, activate, quantize = calls
            y, _, rstd = normalize(x, weight)
            codes = quantize(activate(y), **given)
            return [rstd, codes.rowwise.data, codes.columnwise.data]

        recorder = Recorder(DEVICE.index, native.load())
        constants = list(given.values())
        repeat = recorder.record(run, (x, weight), (), constants).repeat
        if repeat is None or repeat((x, weight)) is None:
            raise RuntimeError(f"{name}: nothing was repeated: {recorder.problem}")
        for _ in range(3):
            repeat((torch.randn(130, 256).bfloat16().to(DEVICE), weight))


def repeated_layers() -> None:
    """Repeat the recorded forward and backward of an MLP, products included."""
    for name in ("delayed", "block"):
        layer = test_repeated.make("mlp swiglu")
        for seed in range(4):
            test_repeated.step(layer, name, test_repeated.inputs(seed))
        if test_repeated.recorded(layer) != [(True, True)]:
            raise RuntimeError(f"{name}: the steps of {layer} were not recorded")
