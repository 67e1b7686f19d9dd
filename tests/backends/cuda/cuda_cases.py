"""Inputs and specs that the CUDA backend's tests share."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fp8core import formats
from fp8core.backend_api import ACTIVATIONS, GemmDesc, Operand, OperandSpec
from fp8core.conformance.subject import Subject, find
from fp8core.dispatch import plugins
from fp8core_backends.cuda import autotune

DEVICE = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

WITHOUT_KERNEL: frozenset[str] = frozenset()  # names of activations
KERNELS = tuple(name for name in ACTIVATIONS if name not in WITHOUT_KERNEL)

# Odd sizes, one row, one column, whole tiles, partial tiles, more columns than a tile has threads.
SHAPES = (
    *((1, 1), (1, 128), (128, 1), (3, 5), (16, 16), (127, 129), (128, 128), (130, 264)),
    *((256, 512), (8, 4096), (4096, 8), (1000, 1000), (33, 2048), (384, 640)),
)
EMPTY = ((0, 16), (16, 0), (0, 0))
# Of rows that are normalized. Cut vectors; chunks of 256, whole and cut; more warps than one; rows
# held in two and in four vectors a lane; rows that are read again.
NORM_COLUMNS = (
    *(1, 3, 8, 70, 256, 264, 768, 1000, 1024, 2048, 2304, 2305, 4096, 5120, 6144),
    *(8192, 8200, 12288, 13824, 16384, 16392, 20000, 32768, 32776, 40000),
)


def spec(name: str, element: str = "e4m3", power_of_two: bool = False) -> OperandSpec:
    """Return the spec of a recipe's operand, those with scales of bytes among them."""
    if name.startswith("fp4"):
        block = (16, 16) if name == "fp4 square" else (1, 16)
        transform = "hadamard16" if name == "fp4 transformed" else None
        return OperandSpec("e2m1", block, 6.0, scale_format="e4m3", transform=transform)
    largest = formats.by_name(element).max
    if name.startswith("mx"):
        block = (32, 32) if name == "mx square" else (1, 32)
        return OperandSpec(element, block, largest, scale_format="e8m0")
    blocks = {"delayed": (0, 0), "current": (0, 0), "rowwise": (1, 0)}
    blocks |= {"vector": (1, 128), "square": (128, 128)}
    return OperandSpec(
        element,
        blocks[name],
        largest,
        delayed=name == "delayed",
        power_of_two=power_of_two,
    )


@functools.cache
def backend(name: str) -> object:
    """Return the backend of a name, as dispatch makes it."""
    registry = plugins.load()
    return registry.instance(registry.backends[name])


@functools.cache
def subject() -> Subject:
    """Return the backend as the conformance kit's laws take it."""
    return find("cuda")


def products_of_few_rows(
    desc: GemmDesc, a: Operand, b: Operand, bias: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """Yield the product by each of the ways that fp8core's kernel for few rows proposes."""
    for at in itertools.count():
        ways: list[int] = []

        def choose(gemm: Any, *_: object, ways: list[int] = ways, at: int = at) -> int:
            names = [gemm.algorithm(index) for index in range(gemm.num_candidates)]
            ways += [i for i, name in enumerate(names) if name.startswith(b"fp8core few rows")]
            return ways[at]

        with patch.object(autotune, "choose", choose):
            yield backend("cuda").bind(desc, DEVICE)(a, b, bias=bias)
        assert ways, f"no product of few rows: {desc}"
        if at + 1 == len(ways):
            return


def put_on_the_host(patch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
    """Have modules of the backend allocate on the CPU, and call a library without a stream."""

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    stand_ins = {"raw_stream": lambda index: 0, "allocator": lambda index: empty}
    for module, (name, stand_in) in itertools.product(modules, stand_ins.items()):
        if hasattr(module, name):
            patch.setattr(module, name, stand_in)


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Raise a RuntimeError where torch waits for the device inside of this context."""
    with warnings.catch_warnings():
        # torch says once in a process that it does not see every such operation
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def values(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix of ``kind`` on the device: what a cast can get wrong."""
    x = torch.randn(shape, device=DEVICE)
    if kind == "wide":  # rows and columns of very different size
        rows = torch.linspace(-12, 12, shape[0], device=DEVICE).exp2()[:, None]
        x = x * rows * torch.linspace(-8, 8, shape[1], device=DEVICE).exp2()
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "zero blocks" and x.numel():
        x[: shape[0] // 2] = 0
        x[:, shape[1] // 2 :] = 0
    elif kind == "specials" and x.numel():
        flat = x.view(-1)
        specials = (float("inf"), float("-inf"), float("nan"), -0.0, 1e30, 1e-30)
        places = torch.linspace(0, flat.numel() - 1, len(specials), device=DEVICE).long()
        flat[places] = torch.tensor(specials, device=DEVICE)
    elif kind == "nan" and x.numel():
        x.view(-1)[0] = float("nan")
    elif kind == "tiny":
        x = x * torch.finfo(dtype).smallest_normal
    return x.to(dtype)


KINDS = ("normal", "wide", "zeros", "zero blocks", "specials", "nan", "tiny")


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Say whether two tensors hold the same bits, NaN and -0 included."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.is_floating_point():
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[ours.itemsize]
        ours, theirs = ours.contiguous().view(bits), theirs.contiguous().view(bits)
    return torch.equal(ours, theirs)


def differs(ours: Operand | None, theirs: Operand | None) -> str | None:
    """Say what of an operand differs from the reference's, or None."""
    if ours is None or theirs is None:
        return None if ours is theirs else "one orientation is missing"
    if not same_bits(ours.scale_inv, theirs.scale_inv):
        return f"scale_inv {ours.scale_inv.flatten()[:4]} for {theirs.scale_inv.flatten()[:4]}"
    wholes = [one.global_scale_inv for one in (ours, theirs)]
    if (wholes[0] is None) != (wholes[1] is None):
        return f"global_scale_inv {wholes[0]} for {wholes[1]}"
    if wholes[0] is not None and not same_bits(*wholes):
        return f"global_scale_inv {wholes[0].tolist()} for {wholes[1].tolist()}"
    if not same_bits(ours.data, theirs.data):
        at = (ours.data != theirs.data).nonzero()
        return f"{len(at)} of {ours.data.numel()} codes, the first at {at[0].tolist()}"
    return None
