"""Laws try the sizes that a backend's own tests give, instead of the kit's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.backend_api import OpDesc, Operand
from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.checks import LAWS, checks
from fp8core.conformance.subject import Size, Subject
from fp8core_backends.reference.backend import ReferenceBackend
from tests.conformance.broken import Sound

CPU = torch.device("cpu")
ODD: dict[str, tuple[str, str, Size]] = {
    "quantize": ("current.input.bfloat16", "quantize_codes_equal_the_reference", (11, 13)),
    "amax": ("delayed.input.bfloat16.amax", "amax_is_exact", (11, 13)),
    "dequantize": ("current.input.bfloat16.rowwise", "dequantize_rounds_once", (11, 13)),
    "norm": ("rmsnorm.bfloat16.bfloat16", "norm_is_within_the_bound", (11, 13)),
    "norm_backward": (
        "rmsnorm.bfloat16.bfloat16.backward",
        "norm_backward_is_within_the_bound",
        (11, 13),
    ),
    "activation": ("gelu.bfloat16.bfloat16", "activation_is_within_the_bound", (11, 13)),
    "activation_backward": (
        "gelu.bfloat16.bfloat16.backward",
        "activation_backward_is_within_the_bound",
        (11, 13),
    ),
    "column_sums": ("column_sums.bfloat16", "column_sums_are_within_the_bound", (11, 13)),
    "add_norm": ("rmsnorm.bfloat16.bfloat16.add", "add_norm_equals_its_unfused_pair", (11, 13)),
    "activation_quantize": (
        "current.gelu.bfloat16",
        "fused_equals_its_unfused_pair",
        (11, 13),
    ),
    "rotary": ("rotary.sbhd.bfloat16", "rotary_is_within_the_bound", (11, 3, 2, 14, 6)),
    "gemm": ("current.fprop.bfloat16.bfloat16", "gemm_product_is_within_the_bound", (11, 13, 32)),
    "route": ("route.mask", "route_equals_the_reference", (11, 13)),
    "dispatch_rows": ("dispatch_rows.bfloat16", "dispatch_copies_the_rows", (11, 13)),
    "cross_entropy": ("cross_entropy.bfloat16", "cross_entropy_is_within_the_bound", (11, 13)),
}
"""By operation: a descriptor of it, a law, and a size that the kit itself does not try."""


class Recording(Sound):
    """Takes down the shapes of what its operations take first."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)

        def record(first: Any, *rest: Any, **keywords: Any) -> Any:
            x = first.data if isinstance(first, Operand) else first
            self.shapes.add(tuple(x.shape))
            return run(first, *rest, **keywords)

        return record


@pytest.mark.parametrize("op", ODD)
def test_a_law_tries_the_given_sizes(op: str) -> None:
    label, law, size = ODD[op]
    entries = [entry for entry in catalogue() if entry.label == label]
    shape = {"gemm": (11, 32), "rotary": (11, 3, 2, 14)}.get(op, size)
    tried = []
    for sizes in ({}, {"quantize" if op == "amax" else op: [size]}):
        backend = Recording()
        subject = Subject("recording", backend, CPU, ReferenceBackend(), sizes=sizes)
        (check,) = checks(subject, [LAWS[law]], entries)
        assert check.op == op
        check.run()
        tried.append(shape in backend.shapes)
    assert tried == [False, True]
