"""The host's part of attention on CUDA, on the CPU: with cuDNN stood in for, the kit's laws hold.

They cover the tensors, strides, offsets, lengths and masks that cuDNN is given, and the rows that
see nothing. What cuDNN computes from them is tested in test_attention.py, on a device.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    Operand,
    OperandSpec,
)
from fp8core.conformance import laws  # noqa: F401  importing fills the laws
from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.checks import LAWS
from fp8core.conformance.subject import Subject
from fp8core_backends import cuda as cuda_plugin
from fp8core_backends.cuda import cudnn_frontend
from fp8core_backends.cuda.attention_support import attention_problem
from tests.backends.cuda.attention_stand_in import CPU, StandIn
from tests.backends.cuda.cuda_cases import backend
from tests.conformance.test_reference import with_each_value

ENTRIES = [
    # Not a subclass, which asks for more: the backend declines it.
    entry
    for entry in catalogue()
    if type(entry.desc) in (AttentionDesc, AttentionBackwardDesc)
]


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    judge = backend("reference")
    return Subject("cuda", StandIn(monkeypatch), CPU, judge)


def _runs_in_fp8(desc: AttentionDesc | AttentionBackwardDesc) -> bool:
    if isinstance(desc, AttentionBackwardDesc):
        return desc.grad_output is None and _runs_in_fp8(desc.attention)
    if desc.qkv is None or desc.out is None:
        return False
    is_seen = desc.window == (-1, 0) or not desc.padding
    is_dense = desc.dropout == 0 and desc.layout != "thd"
    return desc.qkv.format == "e4m3" and is_dense and is_seen


@pytest.fixture
def refused_cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """``refused_cudnn(release)`` loads a cuDNN that torch refuses, beside a frontend that fits."""

    def version() -> int:
        raise RuntimeError("PyTorch was compiled against (9, 20, 0) but found an older one")

    def load(release: int) -> None:
        loaded = types.SimpleNamespace(getVersionInt=lambda: release)
        monkeypatch.setattr(torch._C, "_cudnn", loaded, raising=False)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    monkeypatch.setattr(cudnn_frontend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cudnn_frontend.importlib.metadata, "version", lambda name: "1.23.0")
    cudnn_frontend.missing.cache_clear()
    yield load
    cudnn_frontend.missing.cache_clear()


CAUSAL = AttentionDesc(torch.bfloat16, "sbhd", 4, 2, 64, 64, 0.125, window=(-1, 0))
WINDOW = dataclasses.replace(CAUSAL, window=(7, 0))


def test_a_cudnn_that_is_too_old_leaves_torchs_operators_and_says_what_to_import_first(
    refused_cudnn: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_cudnn(91400)
    assert attention_problem(CAUSAL, CPU) is None
    said = attention_problem(WINDOW, CPU)
    assert said is not None
    assert "cuDNN 91400 is loaded in this process, expected at least 91900" in said
    assert "import torch or fp8core before it" in said
    assert re.search(r"pip install 'nvidia-cudnn-cu\w+>=9\.19'", said)
    reported = {}
    monkeypatch.setattr(cuda_plugin, "_probe", lambda: None)
    monkeypatch.setattr(cuda_plugin.native, "status", lambda: "")
    cuda_plugin.fp8core_doctor(reported.__setitem__)
    assert reported["cuDNN's attention by its frontend"] in said


def test_a_torch_without_cudnn_is_named(
    refused_cudnn: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert cudnn_frontend.missing() == f"torch {torch.__version__} is built without cuDNN"


def test_a_cudnn_that_torch_refuses_is_used_where_it_is_new_enough(
    refused_cudnn: Callable[[int], None],
) -> None:
    refused_cudnn(91901)
    assert attention_problem(WINDOW, CPU) is None


def forward_of(desc: AttentionDesc | AttentionBackwardDesc) -> AttentionDesc:
    return desc if isinstance(desc, AttentionDesc) else desc.attention


FEW = {forward_of(one.desc) for one in with_each_value(ENTRIES)}
"""Has each value of each field."""


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(desc, marks=() if desc in FEW else pytest.mark.slow)
        for desc in dict.fromkeys(forward_of(one.desc) for one in ENTRIES)
    ],
    ids=str,
)
def test_every_law_of_the_kit_holds(subject: Subject, forward: AttentionDesc) -> None:
    descs = [one.desc for one in ENTRIES if forward_of(one.desc) == forward]
    for desc in descs:
        is_refused = subject.refuses(desc) is not None
        is_declined = (
            forward.dtype not in (torch.bfloat16, torch.float16)
            or forward.softcap > 0
            or forward.bias == "alibi"
            or (forward.low_precision and not _runs_in_fp8(desc))
        )
        assert is_refused == is_declined, f"{desc}: {subject.refuses(desc)}"
        if not is_refused:
            obeys(subject, desc)


@pytest.mark.parametrize(
    "changed",
    [
        {"padding": True, "layout": "bshd", "window": (7, 3)},
        {"dtype": torch.float16, "window": (-1, -1), "groups": 4},
    ],
    ids=["padding.bshd.window", "no_mask.float16"],
)
def test_backward_from_codes_obeys_the_laws(subject: Subject, changed: dict[str, Any]) -> None:
    e4m3 = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
    causal = AttentionDesc(torch.bfloat16, "sbhd", 4, 2, 64, 64, 0.125, window=(-1, 0))
    forward = dataclasses.replace(causal, qkv=e4m3, s=e4m3, out=e4m3, **changed)
    desc = AttentionBackwardDesc(forward)
    assert subject.refuses(desc) is None
    obeys(subject, desc)


def test_codes_of_an_empty_sequence_reach_no_kernel(subject: Subject) -> None:
    """Which the stand-in asserts; the result is that of no key."""
    e4m3 = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
    causal = AttentionDesc(torch.bfloat16, "bshd", 2, 2, 64, 64, 0.125, window=(-1, 0))
    desc = dataclasses.replace(causal, padding=True, qkv=e4m3, s=e4m3, out=e4m3)
    assert subject.refuses(desc) is None
    x = Operand(torch.randint(0x50, (3, 5, 2, 64), dtype=torch.uint8), torch.ones(1))
    ends = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    out, stats, _ = subject.bound(desc)(x, x, x, s_scale=torch.ones(1), **lengths)
    assert out[0].any()
    assert not out[1].any()
    assert bool((stats[1] == -torch.inf).all())
    assert bool(stats[0].isfinite().all())


def test_backward_of_a_part_from_codes_is_declined(subject: Subject) -> None:
    desc = AttentionPartBackwardDesc(
        next(
            entry.desc
            for entry in ENTRIES
            if isinstance(entry.desc, AttentionDesc) and _runs_in_fp8(entry.desc)
        )
    )
    assert "attends to all keys once more" in str(subject.refuses(desc))


def obeys(subject: Subject, desc: AttentionDesc | AttentionBackwardDesc) -> None:
    for law in LAWS.values():
        if desc.op in law.ops and law.applies(desc) and not law.is_strict:
            law.test(subject, desc)
