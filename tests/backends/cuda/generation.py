"""Sequences that go through attention with a cache step by step, and come and go."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from fp8core import DotProductAttention, InferenceParams, use_backend

HEADS, GROUPS, SIZE, CAPACITY, PAGE = 4, 2, 64, 64, 4
LAYOUTS = ("sbhd", "bshd", "thd")
PAGES: dict[str, dict[str, Any]] = {
    "rows": {},
    "pages": {"is_paged": True, "page_size": PAGE},
}
CACHES: dict[str, dict[str, Any]] = {
    **PAGES,
    "codes": {"storage_format": "e4m3"},
    "pages of codes": {**PAGES["pages"], "storage_format": "e4m3"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (6, 0)},
    "sink": {"softmax_type": "off-by-one"},
    "no mask": {"attn_mask_type": "padding"},
}

STEPS: list[tuple[dict[str, int], str]] = [
    ({"a": 9, "b": 20, "c": 3}, ""),
    ({"a": 1, "b": 2, "c": 1}, "b"),
    ({"c": 1, "a": 1, "d": 2}, ""),  # b has ended, and rows have moved
    ({"c": 1, "d": 1}, ""),
    ({"e": 7, "d": 1, "c": 1}, "e"),
    ({"f": 2, "d": 1}, ""),
    ({"f": 2, "d": 1, "g": 12, "h": 1}, ""),
]


class Generation:
    """Sequences of random tokens that go through two layers of one cache, step by step."""

    cudnn = "cuda"  # the name of the backend

    def __init__(self, layout: str, kind: str, device: Any = "cpu", **options: Any) -> None:
        self.layout, self.device = layout, torch.device(device)
        sizes = (HEADS, SIZE, GROUPS)
        self.layers = [
            DotProductAttention(*sizes, qkv_format=layout, layer_number=1 + at, **options).eval()
            for at in range(2)
        ]
        self.cache = InferenceParams(
            *(4, CAPACITY, GROUPS, SIZE, torch.bfloat16), device=self.device, **CACHES[kind]
        )

    def step(self, counts: dict[Any, int], backend: str, seed: int, nan_in: str = "") -> Any:
        """Bring so many tokens of each sequence; return the results of the layers, by sequence.

        The keys and values of ``nan_in`` are NaN, and so are the tokens that pad the others.
        """
        self.cache.pre_step(OrderedDict(counts))
        generator = torch.Generator().manual_seed(seed)
        longest = max(counts.values())
        dense = [
            torch.randn(len(counts), longest, heads, SIZE, generator=generator).bfloat16()
            for heads in (HEADS, GROUPS, GROUPS)
        ]
        for at, (name, count) in enumerate(counts.items()):
            for x in dense[1:]:
                x[at, 0 if name == nan_in else count :] = torch.nan
        if self.layout == "thd":
            dense = [torch.cat([x[at, :n] for at, n in enumerate(counts.values())]) for x in dense]
        elif self.layout == "sbhd":
            dense = [x.transpose(0, 1) for x in dense]
        dense = [x.to(self.device) for x in dense]
        with torch.no_grad(), use_backend(self.cudnn if backend == "cudnn" else backend):
            results = self.attended(dense)
        return [self.by_sequence(y, counts) for y in results]

    def attended(self, qkv: list[torch.Tensor]) -> list[torch.Tensor]:
        return [layer(*qkv, inference_params=self.cache) for layer in self.layers]

    def by_sequence(self, y: torch.Tensor, counts: dict[Any, int]) -> dict[Any, torch.Tensor]:
        rows: Any = y.split([*counts.values()]) if self.layout == "thd" else y
        rows = y.transpose(0, 1) if self.layout == "sbhd" else rows
        return {name: rows[at][:n] for at, (name, n) in enumerate(counts.items())}
