"""The backend by compute capability: one table for builds, declarations, docs and doctor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

Capability = tuple[int, int]


class Tier(NamedTuple):
    """GPUs of one compute capability.

    Attributes:
        cards: some of them.
        architecture: how nvcc spells the code of fp8core's kernels for them; empty: there is none,
            and torch's kernels and the reference backend compute.
        modes: what a scale covers of operands whose products there are, as the native library
            names it.
        is_hopper: whether there are kernels of Hopper's instructions, and attention is declared.
        shares_memory: whether a block has the 227 KiB of shared memory that products of few rows in
            high precision need; else their weights are decoded first.
        proof: whether it has run on such a GPU.
    """

    cards: str
    architecture: str = ""
    modes: frozenset[str] = frozenset()
    is_hopper: bool = False
    shares_memory: bool = False
    proof: str = "not run"


_TENSOR = frozenset({"tensor"})
_FLOATS = frozenset({"row", "vec128", "block128"})
_BYTES = _TENSOR | {"mx32", "nv16"}

TIERS: dict[Capability, Tier] = {
    (8, 0): Tier("A100", "80"),
    (8, 6): Tier("RTX 3090, A10", "80"),
    (8, 9): Tier("L40S, RTX 4090", "89", _TENSOR),
    (9, 0): Tier("H100, H200", "90a", _TENSOR | _FLOATS, True, True, "run"),
    (10, 0): Tier("B200", "100f", _BYTES, shares_memory=True),
    (10, 3): Tier("B300", "100f", _BYTES, shares_memory=True),
    (12, 0): Tier("RTX 5090", "120", _TENSOR),
}
"""The tiers. "100f" is code for the whole family of 10.0, without instructions of one member; code
for 8.0 runs on 8.6, and has all that those have in common."""

PRODUCTS = {
    "tensor": "one scale a tensor",
    "row": "float32 scales of rows",
    "vec128": "float32 scales of blocks",
    "block128": "float32 scales of blocks",
    "mx32": "MX block scales",
    "nv16": "NVFP4",
}
"""Products, in words, by what a scale covers."""


FIRST_CUDA = dict.fromkeys(_BYTES, (12, 8)) | dict.fromkeys(_FLOATS, (12, 9))
"""The CUDA whose cuBLASLt first has a product, by what a scale covers.

Source: cuBLAS's release notes; before 12.8 what a scale covers was no attribute.
"""


def cuda_of_torch() -> tuple[int, int] | None:
    """Return the version of CUDA whose libraries torch brings, None for a torch without CUDA."""
    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def tier_of(capability: Capability) -> Tier:
    """Return the tier of a compute capability; of an unlisted one, what torch has there."""
    unlisted = Tier("", modes=_TENSOR if capability >= (8, 9) else frozenset())
    return TIERS.get(capability, unlisted)


def tier_at(device: torch.device) -> Tier:
    """Return the tier of a CUDA device, without touching it."""
    return tier_of(torch.cuda.get_device_capability(device))


def products_problem(modes: Iterable[str | None], device: torch.device) -> str | None:
    """Say which compute capability, or which CUDA, products of operands with scales of ``modes``
    need; None if they are there."""
    tier, cuda = tier_at(device), cuda_of_torch()
    for mode in modes:
        if mode is not None and mode not in tier.modes:
            have = [text(capability) for capability, entry in TIERS.items() if mode in entry.modes]
            return f"{PRODUCTS[mode]}: products need compute capability {' or '.join(have)}"
        if mode is not None and cuda is not None and cuda < FIRST_CUDA[mode]:
            first = text(FIRST_CUDA[mode])
            return f"{PRODUCTS[mode]}: products need CUDA {first}, torch uses {text(cuda)}"
    return None


def text(capability: Capability) -> str:
    """Return ``"9.0"``."""
    return f"{capability[0]}.{capability[1]}"


def facts(tier: Tier) -> tuple[str, str, str]:
    """Return who computes on GPUs of ``tier``, which products it has, and whether that has run."""
    kernels = "fp8core's kernels" if tier.architecture else "torch's kernels and `reference`"
    words = dict.fromkeys(words for mode, words in PRODUCTS.items() if mode in tier.modes)
    products = ", ".join(words) or "none; by `reference` where it is named"
    return kernels, products, tier.proof


def table() -> Iterator[str]:
    """Yield the lines of the table, as docs/cuda.md has it."""
    yield "| compute capability | such as | computed by | products in low precision | on hardware |"
    yield "|---|---|---|---|---|"
    for capability, tier in TIERS.items():
        yield f"| {' | '.join((text(capability), tier.cards, *facts(tier)))} |"


def status() -> str:
    """Say of each device what its tier is."""
    lines = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        kernels, products, proof = facts(tier_of(capability))
        lines.append(
            f"cuda:{index} {text(capability)}: {kernels}; products with {products}; {proof}"
        )
    return "; ".join(lines)
