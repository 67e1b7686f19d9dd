"""Results of every operation are the same bits whatever torch's global switches say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fp8core.backend_api import GemmDesc
from fp8core.conformance.calls import OpCall
from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.laws import arguments
from fp8core.conformance.subject import Subject, find
from fp8core.torch_ops.private import pytree
from fp8core_backends.reference.products import product


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def assigned(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn
SWITCHES: dict[str, Callable[[], Any]] = {
    "float32_matmul_precision=high": lambda: precision("high"),
    "float32_matmul_precision=medium": lambda: precision("medium"),
    "allow_tf32": lambda: assigned(CUDA, "allow_tf32", True),
    "allow_bf16_reduced": lambda: assigned(CUDA, "allow_bf16_reduced_precision_reduction", False),
    "allow_fp16_reduced": lambda: assigned(CUDA, "allow_fp16_reduced_precision_reduction", False),
    "fp32_precision": lambda: assigned(torch.backends, "fp32_precision", "tf32"),
    "mkldnn.matmul.fp32_precision": lambda: assigned(CPU.matmul, "fp32_precision", "bf16"),
    "default_dtype": default_dtype,
    "default_device": default_device,
    "deterministic": deterministic,
}


@functools.cache
def subject() -> Subject:
    return find("reference", "cpu")


@functools.cache
def calls() -> list[tuple[OpCall, Any]]:
    """Return a call of each kind of operation, in low and in high precision, with its results.

    A product without quantized operands is torch's own, and obeys.
    """
    kinds: dict[Any, OpCall] = {}
    for entry in catalogue():
        desc = entry.desc
        if isinstance(desc, GemmDesc) and not desc.low_precision:
            continue
        kind = type(desc), getattr(desc, "low_precision", None), getattr(desc, "kind", None)
        if kind not in kinds and subject().refuses(desc) is None:
            kinds[kind] = arguments(subject(), desc)
    return [(call, bits(call)) for call in kinds.values()]


def bits(call: OpCall) -> list[bytes]:
    """Return the bytes of the results of a call, and of its arguments afterwards."""
    call = call.again()
    leaves = pytree.tree_leaves((call.run(subject()), call.arguments, call.keywords))
    flat = [x.contiguous().view(-1) for x in leaves if isinstance(x, torch.Tensor)]
    return [x.view(torch.uint8).numpy().tobytes() for x in flat]


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_no_bit(switch: str) -> None:
    cases = calls()
    with SWITCHES[switch]():
        for call, expected in cases:
            assert bits(call) == expected, call.desc


def test_sums_of_float32_products_are_rounded_once() -> None:
    """No switch of torch concerns float64, whatever a processor makes of those for float32."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 33, 700), torch.randn(3, 700, 17)
    assert torch.equal(product(a, b), torch.einsum("bmk,bkn->bmn", a.double(), b.double()).float())
