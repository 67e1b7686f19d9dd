"""Law 4 for the steps of optimizers: within the bound, and none where one is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8core.backend_api import AdamDesc
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, OpCall, arguments, example
from fp8core.conformance.checks import law
from fp8core.conformance.compare import same_bits, same_tensors, ulp, within
from fp8core.conformance.subject import Subject, on_cpu

BETAS = {"beta1": 0.9, "beta2": 0.999}
LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs", "masters")
SHAPES = ((70, 130), (1,), (), (0, 5), (9,), (65537,), (3, 4, 5))


_SHAPES = ((7, 5), (33,), (0,), (2, 3, 4), (1030,))


@example(AdamDesc)
def _adam(subject: Subject, desc: AdamDesc, case: Case) -> OpCall:
    lists = step_lists(desc, case.seed)
    keywords = {
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-6,
        "weight_decay": 0.1,
        "step": 3,
        "inv_scale": 0.5,
    }
    return OpCall(desc, tuple(subject.here(lists)), keywords, frozenset({1, 2, 3, 4}))


def step_lists(
    desc: AdamDesc, seed: int, shapes: tuple[tuple[int, ...], ...] = _SHAPES
) -> list[list[torch.Tensor]]:
    """Return the lists of a step: gradients, parameters, the averages, and masters."""

    def draw(number: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            inputs.normal(shape, dtype, 100 * number + 10 * at + seed).clone()
            for at, shape in enumerate(shapes)
        ]

    grads, params = draw(1, desc.grad_dtype), draw(2, torch.float32)
    averages = draw(3, desc.state_dtype)
    squares = [tensor.abs() * 0.1 for tensor in draw(4, desc.state_dtype)]
    if desc.master == "none":
        return [grads, [param.to(desc.dtype) for param in params], averages, squares, []]
    if desc.master == "float32":
        return [grads, [param.to(desc.dtype) for param in params], averages, squares, params]
    bits = [param.view(torch.int32) for param in params]
    remainders = [bit_pattern.to(torch.int16) for bit_pattern in bits]
    upper = [
        ((bit_pattern - rest.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
        for bit_pattern, rest in zip(bits, remainders, strict=True)
    ]
    return [grads, upper, averages, squares, remainders]


@law(4, "adam", is_core=True)
def adam_steps_as_the_reference(subject: Subject, desc: AdamDesc) -> Iterator[float]:
    """Three steps of tensors of any size and number, with and without corrections and decay."""
    variants = (
        (0.0, True, 1.0, SHAPES),
        (0.1, True, 0.25, ((5,),) * 130),
        (0.1, False, 1.0, SHAPES),
    )
    for decay, corrects, scale, shapes in variants:
        ours = subject.here(step_lists(desc, 1, shapes))
        for step in (1, 2, 7):
            keywords = dict(lr=1e-2, eps=1e-8, weight_decay=decay, step=step, **BETAS)
            keywords |= {"bias_correction": corrects, "inv_scale": scale}
            theirs = on_cpu(ours)  # so that errors do not add up
            subject.run(desc, *ours, **keywords)
            subject.judging(desc)(*theirs, **keywords)
            yield from _lists_within(desc, ours, theirs)


def _lists_within(desc: AdamDesc, ours: Any, theirs: Any) -> Iterator[float]:
    results, expected = _end_to_end(ours), _end_to_end(theirs)
    for word in results:
        result, reference = results[word], expected[word]
        if word == "masters" and desc.master == "remainder":
            result = _joined(results["params"], result)
            reference = _joined(expected["params"], reference)
        want = reference.double()
        bound = 2.0**-19 * want.abs() + 1e-2 * 2.0**-18 + ulp(want, result.dtype)
        yield within(word, result, want, bound)


def _end_to_end(lists: Any) -> dict[str, torch.Tensor]:
    """Return the elements of all tensors of each list, on the CPU: one comparison for many."""
    named = zip(LISTS, on_cpu(lists), strict=True)
    return {
        word: torch.cat([tensor.reshape(-1) for tensor in some]) for word, some in named if some
    }


def _joined(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of upper bits ``param`` and lower ones ``remainder``."""
    upper, lower = on_cpu((param, remainder))
    bits: torch.Tensor = (upper.view(torch.int16).to(torch.int32) << 16) + lower.to(torch.int32)
    return bits.view(torch.float32)


@law(4, "adam", applies=lambda desc: desc.master != "none")
def adam_rounds_the_parameter_from_its_master(subject: Subject, desc: AdamDesc) -> None:
    """The parameter is the new master, rounded once; beside remainders halves away from 0."""
    lists = subject.here(step_lists(desc, 2, SHAPES))
    subject.run(desc, *lists, lr=0.1, eps=1e-8, weight_decay=0.0, step=1, **BETAS)
    _, params, _, _, masters = on_cpu(lists)
    for at, (param, master) in enumerate(zip(params, masters, strict=True)):
        if desc.master == "float32":
            same_bits(f"parameter {at}", param, master.to(desc.dtype))
            continue
        value = _joined(param, master)
        bits = value.view(torch.int32) + 0x8000
        rounded = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        same_bits(f"parameter {at}", param, rounded)


@law(4, "adam")
def adam_takes_its_numbers_from_the_device(subject: Subject, desc: AdamDesc) -> Iterator[float]:
    """lr, step and inv_scale as tensors give what the numbers give, also to a scalar parameter."""
    ours = subject.here(step_lists(desc, 3, ((70, 13), ())))
    theirs = on_cpu(ours)
    keywords: dict[str, Any] = dict(eps=1e-8, weight_decay=0.1, **BETAS)
    numbers = {"lr": torch.tensor([0.01]), "inv_scale": torch.tensor([0.5])}
    numbers["step"] = torch.tensor([4], dtype=torch.int32)
    subject.run(desc, *ours, **keywords, **subject.here(numbers))
    subject.judging(desc)(*theirs, lr=0.01, step=4, inv_scale=0.5, **keywords)
    yield from _lists_within(desc, ours, theirs)


@law(4, "adam")
def steps_stop_where_something_is_not_finite(subject: Subject, desc: AdamDesc) -> None:
    """Nothing is updated if found_inf is not 0; all is if it is 0."""
    call = arguments(subject, desc)
    for dtype in (torch.float32, torch.int32):
        stopped, before = call.again(), on_cpu(call.arguments)
        stopped.keywords["found_inf"] = subject.here(torch.ones(1, dtype=dtype))
        stopped.run(subject)
        same_tensors(f"a step that is stopped ({dtype})", stopped.arguments, before)
        going, plain = call.again(), call.again()
        going.keywords["found_inf"] = subject.here(torch.zeros(1, dtype=dtype))
        going.run(subject)
        plain.run(subject)
        same_tensors(f"a step that goes on ({dtype})", going.arguments, plain.arguments)


@law(4, "adam")
def steps_take_tensors_of_any_strides(subject: Subject, desc: AdamDesc) -> None:
    """Transposed tensors, with gaps and at odd addresses, are stepped as contiguous ones."""
    call = arguments(subject, desc)
    for view in (inputs.strided, inputs.shifted, inputs.transposed):
        spread = [[view(tensor) for tensor in group] for group in call.arguments]
        plain = call.again()
        plain.run(subject)
        subject.run(desc, *spread, **call.keywords)
        same_tensors(f"tensors that are {view.__name__}", spread, plain.arguments)
