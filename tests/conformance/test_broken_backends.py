"""The kit catches each of the deliberately broken backends, by the test that names its fault.

On a few of the descriptors. One backend runs the whole kit: nothing but its fault is reported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8core.conformance.catalogue import CatalogueEntry, catalogue
from fp8core.conformance.checks import checks, op_of
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import Subject
from fp8core_backends.reference.backend import ReferenceBackend
from tests.conformance import (
    broken,
    broken_amax,
    broken_attention,
    broken_calls,
    broken_operands,
    broken_rotary,
    broken_training,
    sound,
)

CPU = torch.device("cpu")
LABELS = {
    "current.input.bfloat16",
    "delayed.max",
    "delayed.input.float16",
    "current.grouped.input.bfloat16",
    "current.grouped.input.bfloat16.device",
    "current.fprop.bfloat16.bfloat16",
    "current.wgrad.bfloat16.float32.accumulate",
    "current.grouped.fprop.bfloat16.bfloat16",
    "current.grouped.fprop.bfloat16.bfloat16.device",
    "nvfp4.grouped.wgrad.bfloat16.float32",
    "mxfp8.fprop.bfloat16.bfloat16",
    "rmsnorm.bfloat16.float32.backward",
    "delayed.layernorm.bfloat16",
    "gelu.bfloat16.bfloat16",
    "delayed.gelu.backward.sums.bfloat16",
    "block.swiglu.backward.bfloat16",
    "current.grad_output.float16.rowwise",
    "current.fprop.float16.float16",
    "current.grouped.fprop.float16.float16",
    "layernorm.bfloat16.bfloat16",
    "layernorm.float32.float32",
    "rmsnorm.float16.float16.backward",
    "rowwise.dgrad.bfloat16.bfloat16",
    "geglu.float16.float16.backward",
    "column_sums.bfloat16",
    "attention.window.bottom_right.bfloat16",
    "attention.padding.causal.bottom_right.bfloat16",
    "attention.arbitrary.bfloat16",
    "attention.post_scale.causal.bfloat16",
    "attention.post_scale.causal.bfloat16.backward.bias",
    "attention.softcap.causal.bfloat16",
    "attention.off_by_one.causal.bfloat16",
    "attention.learnable.causal.bfloat16",
    "attention.dropout.causal.bfloat16",
    "attention.dropout.causal.bfloat16.backward",
    "attention.max_logit.causal.bfloat16",
    "attention.thd.causal.bfloat16",
    "attention_part.causal.bfloat16.backward",
    "attention.causal.float16.backward",
    "delayed.attention.causal.bfloat16",
    "delayed.attention.causal.bfloat16.backward",
    "rotary.sbhd.bfloat16",
    "rotary.thd.bfloat16",
    "route.mask",
    "route.experts",
    "route.rows",
    "dispatch_rows.probable.bfloat16",
    "combine_rows.bfloat16",
    "combine_rows_backward.bfloat16",
    "router.softmax.bfloat16",
    "router.sigmoid.float32",
    "router.sigmoid.groups.float16",
    "router_backward.sigmoid.bfloat16",
    "cross_entropy.bfloat16",
    "cross_entropy_backward.bfloat16",
    "adam.masters.bfloat16",
    "sreglu.float16.float16",
    "delayed.input.bfloat16.amax",
    "delayed.grouped.input.bfloat16.device.amax",
    "rowwise.input.bfloat16.amax",
    "nvfp4.input.bfloat16.amax",
    "current.input.bfloat16.by_amax",
    "rowwise.grouped.input.bfloat16.by_amax",
    "rowwise.input.float16.by_amax",
    "nvfp4.input.bfloat16.by_amax",
}


@functools.cache
def entries() -> list[CatalogueEntry]:
    found = [entry for entry in catalogue() if entry.label in LABELS]
    assert {entry.label for entry in found} == LABELS
    return found


MODULES = (
    *(broken, broken_amax, broken_attention, broken_calls, broken_operands, broken_rotary),
    broken_training,
)
CAUGHT_BY = broken.CAUGHT_BY


def failing(backend: broken.Sound, entries: list[CatalogueEntry], *named: str) -> Iterator[str]:
    """Names of the kit's tests that fail, of those ``named`` or of all, check by check."""
    laws = [law for law in LAWS.values() if not named or law.full_name in named]
    subject = Subject("broken", backend, CPU, ReferenceBackend())
    for check in checks(subject, laws, entries):
        try:
            check.run()
        except Exception:  # noqa: BLE001  a broken backend may raise anything
            yield check.law.full_name


@pytest.mark.parametrize(
    ("backend", "ops"), sound.SOUND.items(), ids=[backend.__name__ for backend in sound.SOUND]
)
def test_sound_backend_passes(backend: type[broken.Sound], ops: tuple[str, ...]) -> None:
    changed = [entry for entry in entries() if op_of(entry.desc) in ops]
    assert [*failing(backend(), changed)] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_broken_backends_fail_the_test_that_names_their_fault(module: Any) -> None:
    uncaught = [
        fault.__name__
        for fault, name in CAUGHT_BY.items()
        if fault.__module__ == module.__name__
        and next(failing(fault(), entries(), name), None) is None
    ]
    assert uncaught == []


@pytest.mark.slow  # all of what the tests above run a part of
def test_the_whole_kit_reports_nothing_but_the_fault() -> None:
    fault = broken.FusedRoundsTwice
    of_padded = "law6_fused_padded_equals_its_pair"  # the same, with zeros behind rows
    assert {*failing(fault(), entries())} == {CAUGHT_BY[fault], of_padded}


def test_every_fault_is_caught_by_a_test_of_the_kit() -> None:
    assert set(CAUGHT_BY.values()) <= {law.full_name for law in LAWS.values()}
    named = [value for module in MODULES for value in vars(module).values()]
    faults = {cls for cls in named if isinstance(cls, type) and issubclass(cls, broken.Sound)}
    leaves = {cls for cls in faults if not cls.__subclasses__()}
    assert leaves <= set(CAUGHT_BY)
    assert {fault.__module__ for fault in CAUGHT_BY} == {module.__name__ for module in MODULES}
